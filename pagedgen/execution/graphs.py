"""Decoding steps of fixed sizes as CUDA graphs: one call to the device instead of some hundred."""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from pagedgen.execution.attention import AttentionBackend
from pagedgen.execution.batch import ForwardBatch
from pagedgen.execution.capture import NotCapturable
from pagedgen.execution.device_state import DeviceState, to_enter
from pagedgen.execution.failures import is_device_failure, is_out_of_memory
from pagedgen.execution.kv_cache import KVCache
from pagedgen.execution.transfer import to_device
from pagedgen.models.base import Model

# Steps are padded to the next of these sizes: the fewer there are, the less memory and time the graphs take, and a step
# that reads the weights once takes as long for few rows as for one.
SIZES = (1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 1025, 32))


def sizes_up_to(max_seqs: int) -> tuple[int, ...]:
    """The sizes of steps that up to `max_seqs` sequences need, in ascending order."""
    return (*(size for size in SIZES if size < max_seqs), max_seqs)


class DecodeStep:
    """A step in which each of up to `size` sequences computes the last token it has, over tensors that stay in place.

    rows: int64 [size], the slots of the sequences, padded with nobody's. hidden: [size, hidden_size], what `forward`
    gave. tokens: int64 [size], what `choose` drew after it, and entered into the state. Neither call reads anything of
    the host's, so that both can be captured. Nobody's rows attend to nothing and write nothing.
    """

    def __init__(
        self, size: int, model: Model, kv_cache: KVCache, attention: AttentionBackend, state: DeviceState
    ) -> None:
        self._model, self._kv_cache, self._attention, self._state = model, kv_cache, attention, state
        self.rows = torch.full((size,), state.nobody, dtype=torch.int64, device=state.device)
        self._query_start = torch.arange(size + 1, dtype=torch.int32, device=state.device)
        self._everything = torch.arange(size, dtype=torch.int64, device=state.device)
        self.hidden = self.tokens = torch.empty(0, device=state.device)

    def forward(self) -> None:
        state, rows = self._state, self.rows
        used = rows < state.nobody
        positions = torch.where(used, state.num_tokens[rows] - 1, 0)
        batch = ForwardBatch(
            input_ids=state.token_ids[rows, positions].long(),
            positions=positions,
            slot_mapping=torch.where(used, state.slot_mapping(rows, positions), -1),
            query_start=self._query_start,
            context_lens=torch.where(used, positions + 1, 0).int(),
            block_tables=state.block_table[rows],
            rope_lens=torch.maximum(positions + 1, state.num_prompt[rows]),
            logit_rows=self._everything,
        )
        self.hidden = self._model.forward(batch, self._kv_cache, self._attention)

    def choose(self) -> None:
        state, rows = self._state, self.rows
        lengths = torch.where(rows < state.nobody, state.num_tokens[rows], 0)
        tokens: torch.Tensor = self._attention.kernels.choose_tokens(
            self._model.logits(self.hidden),
            state.temperature[rows],
            state.top_k[rows],
            state.top_p[rows],
            state.min_p[rows],
            self._attention.kernels.position_keys(state.key[rows], lengths),
        )
        state.token_ids[rows, lengths] = to_enter(tokens)
        state.num_tokens[rows] = lengths + 1
        self.tokens = tokens


Capture = Callable[[Callable[[], None]], Callable[[], None]]


class DecodeGraphs:
    """The decoding steps of all sizes, each captured when it is first needed.

    capture: given work for the device, it has the device do it, and returns what has it done again; it raises
    NotCapturable for work that cannot be captured. on_note: told in a sentence if that or the work itself fails, but
    for a device that is of no use any more; steps are then launched kernel by kernel.
    """

    def __init__(
        self,
        model: Model,
        kv_cache: KVCache,
        attention: AttentionBackend,
        state: DeviceState,
        max_seqs: int,
        capture: Capture,
        on_note: Callable[[str], None],
    ) -> None:
        self._parts, self._state, self._capture = (model, kv_cache, attention, state), state, capture
        self._on_note, self._usable = on_note, True
        self._sizes = sizes_up_to(max_seqs)
        self._steps: dict[int, _Captured] = {}

    def load(self, slots: NDArray[np.int32]) -> "LoadedStep | None":
        """The step in which the sequences in `slots` [N] compute their last tokens; it is to be run before the next is
        loaded. None where it cannot be captured."""
        size = self._sizes[bisect_left(self._sizes, len(slots))]
        if size not in self._steps and self._usable:
            self._add(size)
        if not self._usable:
            return None
        captured = self._steps[size]
        if captured.slots is None or not np.array_equal(captured.slots, slots):  # which they are in most steps
            rows = np.full(size, self._state.nobody, np.int64)
            rows[: len(slots)] = slots
            captured.step.rows.copy_(to_device(rows, self._state.device))
            captured.slots = slots
        return LoadedStep(captured, len(slots))

    def _add(self, size: int) -> None:
        step = DecodeStep(size, *self._parts)
        try:
            self._steps[size] = _Captured(step, self._capture(step.forward), self._capture(step.choose))
        except RuntimeError as error:
            failed = is_device_failure(error) and not isinstance(error, NotCapturable)  # which names CUDA as well
            if failed or is_out_of_memory(error):
                raise
            self._usable = False
            reason = str(error).split("\n", 1)[0].rstrip(".")
            self._on_note(f"decoding steps run without CUDA graphs, because they could not be captured: {reason}")


@dataclass(slots=True)
class _Captured:
    """A step, what has the device do its two parts, and whose rows it has."""

    step: DecodeStep
    forward: Callable[[], None]
    choose: Callable[[], None]
    slots: NDArray[np.int32] | None = None


@dataclass(frozen=True, slots=True)
class LoadedStep:
    """The captured step of `count` sequences."""

    captured: _Captured
    count: int

    def forward(self) -> torch.Tensor:
        """The hidden states [count, hidden_size]; the next step of the same size overwrites them."""
        self.captured.forward()
        return self.captured.step.hidden[: self.count]

    def choose(self) -> torch.Tensor:
        """After `forward`, the tokens int64 [count] that were drawn and entered; overwritten likewise."""
        self.captured.choose()
        return self.captured.step.tokens[: self.count]
