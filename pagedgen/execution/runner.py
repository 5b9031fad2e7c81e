"""Runs one step on the device: copies, batch, model, sampling."""

import time
from collections.abc import Callable, Iterator

import numpy as np
import torch

from pagedgen.execution.attention import AttentionBackend
from pagedgen.execution.batch import ForwardBatch, build_batch, wanted_prompt_positions
from pagedgen.execution.device_state import DeviceState
from pagedgen.execution.kv_cache import KVCache
from pagedgen.execution.logprobs import TopLogprobs
from pagedgen.execution.processors import having
from pagedgen.execution.sampler import PendingSample, Sampler
from pagedgen.execution.transfer import Marker, to_device
from pagedgen.models.base import Model
from pagedgen.step import LogprobResult, SlotArrays, StepPlan, StepResult

# The slots of some prompt positions, and what gives the log-probability of each once the device has come so far.
PromptLogprobs = tuple[list[int], Callable[[], list[LogprobResult]]]
# Float32 logits of one chunk of rows stay within this many bytes, whatever the vocabulary and the batch.
LOGITS_BYTES = 256 << 20
# A chunk of rows that only tell a prompt's log-probabilities has no more than these: enough to keep the LM head busy.
PROMPT_LOGIT_ROWS = 256


def logit_rows_per_chunk(vocab_size: int) -> int:
    return max(1, LOGITS_BYTES // (4 * vocab_size))


class ModelRunner:
    """A model, its KV cache and a sampler; `launch` starts the step of a StepPlan.

    device_state: what the device keeps of the sequences, where it runs by itself; without it, the host gathers each
    step's tokens, and looks at what the device computes while a step is being launched.
    """

    def __init__(
        self, model: Model, kv_cache: KVCache, attention: AttentionBackend, device_state: DeviceState | None = None
    ) -> None:
        self.model, self.kv_cache, self.attention = model, kv_cache, attention
        self.device_state = device_state
        self.sampler = Sampler(attention.kernels, device_state)

    def execute(self, plan: StepPlan, state: SlotArrays) -> StepResult:
        """Run a step and wait for its result."""
        return self.launch(plan, state)()

    @torch.inference_mode()
    def launch(self, plan: StepPlan, state: SlotArrays) -> Callable[[], StepResult]:
        """Start a step with the state as it is now; what is returned waits for its result."""
        started = time.perf_counter()
        device = self.kv_cache.device
        if len(plan.copies):
            self.attention.kernels.copy_blocks(
                self.kv_cache.pools.values(), to_device(plan.copies.astype(np.int64), device)
            )
        batch = self._batch(plan, state)
        built = time.perf_counter()
        hidden = self.model.forward(batch, self.kv_cache, self.attention)
        slots, lengths = plan.slots[plan.samples], (plan.starts + plan.counts)[plan.samples]
        sampling = 0.0
        samples: list[PendingSample] = []
        for rows, logits in self._logits(hidden[: len(slots)], logit_rows_per_chunk(self.model.spec.vocab_size)):
            before = time.perf_counter()
            samples.append(self.sampler.sample(logits, slots[rows], lengths[rows], plan, state))
            sampling += time.perf_counter() - before
        self._enter(samples, plan)
        prompt_logprobs = self._prompt_logprobs(hidden[len(slots) :], plan, state) if plan.prompt_logprobs else []
        launched, end = time.perf_counter(), Marker(device)

        def wait() -> StepResult:
            end.wait()
            waited = 0.0 if self.device_state is None else time.perf_counter() - launched
            seconds = (built - started, launched - built - sampling + waited, sampling)
            return _result(plan, samples, prompt_logprobs, seconds)

        return wait

    def _batch(self, plan: StepPlan, state: SlotArrays) -> ForwardBatch:
        if self.device_state is None:
            return build_batch(plan, state, self.kv_cache.device)
        self.device_state.send(plan, state)
        return self.device_state.batch(plan, state)

    def _enter(self, samples: list[PendingSample], plan: StepPlan) -> None:
        """Let the device go on with what it drew."""
        if self.device_state is None:
            return
        for sample in samples:
            drawing = ~having(sample.slots, plan.beams)
            if drawing.all():
                self.device_state.enter(sample.slots, sample.tokens)
            elif drawing.any():
                rows = to_device(np.flatnonzero(drawing), sample.tokens.device)
                self.device_state.enter(sample.slots[drawing], sample.tokens[rows])

    def _logits(self, hidden: torch.Tensor, size: int) -> Iterator[tuple[slice, torch.Tensor]]:
        """The logits of `size` rows of hidden states at a time, and which rows they are."""
        for begin in range(0, len(hidden), size):
            rows = slice(begin, begin + size)
            yield rows, self.model.logits(hidden[rows])

    def _prompt_logprobs(self, hidden: torch.Tensor, plan: StepPlan, state: SlotArrays) -> list[PromptLogprobs]:
        """hidden: [P, ...] of the positions before those of `wanted_prompt_positions`."""
        sequences, positions = wanted_prompt_positions(plan, state)
        slots = plan.slots[sequences]
        tokens = to_device(state.token_ids[slots, positions].astype(np.int64), hidden.device)
        parts: list[PromptLogprobs] = []
        size = min(PROMPT_LOGIT_ROWS, logit_rows_per_chunk(self.model.spec.vocab_size))
        for rows, logits in self._logits(hidden, size):
            of = slots[rows].tolist()
            everything = np.arange(len(of))
            wanted = [plan.prompt_logprobs[slot][1] for slot in of]
            likeliest = TopLogprobs(self.attention.kernels, logits, everything, wanted)
            parts.append((of, likeliest.of_tokens(tokens[rows], everything)))
        return parts


def _result(
    plan: StepPlan,
    samples: list[PendingSample],
    prompt_logprobs: list[PromptLogprobs],
    seconds: tuple[float, float, float],
) -> StepResult:
    sampled = [sample.result() for sample in samples]
    by_slot: dict[int, list[LogprobResult]] = {slot: [] for slot in plan.prompt_logprobs}
    for slots, results in prompt_logprobs:
        for slot, result in zip(slots, results(), strict=True):
            by_slot[slot].append(result)
    return StepResult(
        plan.slots[plan.samples],
        np.concatenate([np.empty(0, np.int32), *(part.tokens for part in sampled)]),
        {slot: found for part in sampled for slot, found in part.logprobs.items()},
        {slot: drawn for part in sampled for slot, drawn in part.extra.items()},
        {slot: found for part in sampled for slot, found in part.beams.items()},
        by_slot,
        seconds,
    )
