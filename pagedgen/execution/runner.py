"""Runs one step on the device: copies, batch, model, sampling."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from pagedgen.config import EngineConfig
from pagedgen.execution.attention import AttentionBackend
from pagedgen.execution.batch import ForwardBatch, build_batch, wanted_prompt_positions
from pagedgen.execution.capture import CudaCapture
from pagedgen.execution.device_state import DeviceState
from pagedgen.execution.graphs import DecodeGraphs, LoadedStep
from pagedgen.execution.kv_cache import KVCache
from pagedgen.execution.logprobs import TopLogprobs
from pagedgen.execution.processors import edited, having
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
    step's tokens, and looks at what the device computes while a step is being launched. graphs: of decoding steps, on a
    device with a state of its own.
    """

    def __init__(
        self,
        model: Model,
        kv_cache: KVCache,
        attention: AttentionBackend,
        device_state: DeviceState | None = None,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        self.model, self.kv_cache, self.attention = model, kv_cache, attention
        self.device_state, self.graphs = device_state, graphs
        self.sampler = Sampler(attention.kernels, device_state)

    def execute(self, plan: StepPlan, state: SlotArrays) -> StepResult:
        """Run a step and wait for its result."""
        return self.launch(plan, state)()

    @torch.inference_mode()
    def launch(self, plan: StepPlan, state: SlotArrays) -> Callable[[], StepResult]:
        """Start a step with the state as it is now; what is returned waits for its result."""
        clock = _Clock(time.perf_counter())
        if len(plan.copies):
            copies = to_device(plan.copies.astype(np.int64), self.kv_cache.device)
            self.attention.kernels.copy_blocks(self.kv_cache.pools.values(), copies)
        if self.device_state is not None:
            self.device_state.send(plan, state)
        prompt_logprobs: list[PromptLogprobs] = []
        decoding = self.graphs.load(plan.slots) if self.graphs is not None and is_decoding(plan) else None
        if decoding is not None:
            samples = self._decode(decoding, plan, state, clock)
        else:
            batch = self._batch(plan, state)
            clock.built = time.perf_counter()
            hidden = self.model.forward(batch, self.kv_cache, self.attention)
            sampled = int(plan.samples.sum())
            samples = self._sample(hidden[:sampled], plan, state, clock)
            if plan.prompt_logprobs:
                prompt_logprobs = self._prompt_logprobs(hidden[sampled:], plan, state)
        clock.launched, end = time.perf_counter(), Marker(self.kv_cache.device)

        def wait() -> StepResult:
            end.wait()
            waits = self.device_state is not None
            return _result(plan, samples, prompt_logprobs, clock.seconds(time.perf_counter() if waits else None))

        return wait

    def _batch(self, plan: StepPlan, state: SlotArrays) -> ForwardBatch:
        if self.device_state is None:
            return build_batch(plan, state, self.kv_cache.device)
        return self.device_state.batch(plan, state)

    def _decode(self, step: LoadedStep, plan: StepPlan, state: SlotArrays, clock: "_Clock") -> list[PendingSample]:
        """A step in which all sequences decode, as the graphs have it; where one asks for more than a token, all are
        sampled outside them."""
        clock.built = time.perf_counter()
        hidden = step.forward()
        if not is_plain(plan, state):
            return self._sample(hidden, plan, state, clock)
        assert self.device_state is not None
        tokens = step.choose()
        self.device_state.entered(plan.slots)
        return [PendingSample.of_tokens(plan, tokens)]

    def _sample(self, hidden: torch.Tensor, plan: StepPlan, state: SlotArrays, clock: "_Clock") -> list[PendingSample]:
        """hidden: [R, ...] of the sequences that are sampled."""
        slots, lengths = plan.slots[plan.samples], (plan.starts + plan.counts)[plan.samples]
        if self.model.likeliest is not None and len(slots) and is_greedy(plan, state):
            return [self._entered(PendingSample.of_tokens(plan, self.model.likeliest(hidden)), plan)]
        samples: list[PendingSample] = []
        for rows, logits in self._logits(hidden, logit_rows_per_chunk(self.model.spec.vocab_size)):
            before = time.perf_counter()
            sample = self.sampler.sample(logits, slots[rows], lengths[rows], plan, state)
            samples.append(self._entered(sample, plan))
            clock.sampling += time.perf_counter() - before
        return samples

    def _entered(self, sample: PendingSample, plan: StepPlan) -> PendingSample:
        """The sample, once the device goes on with what it drew."""
        if self.device_state is None:
            return sample
        drawing = ~having(sample.slots, plan.beams)
        if drawing.all():
            self.device_state.enter(sample.slots, sample.tokens)
        elif drawing.any():
            rows = to_device(np.flatnonzero(drawing), sample.tokens.device)
            self.device_state.enter(sample.slots[drawing], sample.tokens[rows])
        return sample

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


@dataclass(slots=True)
class _Clock:
    """When a step was launched and its batch built, when all of it was launched, and how long sampling took."""

    started: float
    built: float = 0.0
    launched: float = 0.0
    sampling: float = 0.0

    def seconds(self, ended: float | None) -> tuple[float, float, float]:
        """Those of a StepResult. ended: when the device had ended, if that was waited for."""
        end = self.launched if ended is None else ended
        return self.built - self.started, end - self.built - self.sampling, self.sampling


def make_runner(
    config: EngineConfig,
    model: Model,
    kv_cache: KVCache,
    attention: AttentionBackend,
    state: SlotArrays,
    on_note: Callable[[str], None],
) -> ModelRunner:
    """The runner for the cache's device. An accelerator keeps what the sequences are, if its kernels let it."""
    if attention.name != "triton":
        return ModelRunner(model, kv_cache, attention)
    device_state = DeviceState(state, kv_cache.device)
    graphs = None
    if config.cuda_graphs:
        parts = (model, kv_cache, attention, device_state)
        graphs = DecodeGraphs(*parts, config.max_seqs, CudaCapture(), on_note)
    return ModelRunner(model, kv_cache, attention, device_state, graphs)


def is_decoding(plan: StepPlan) -> bool:
    """Whether each sequence of the step computes the last token that it has, and nothing else."""
    return bool(plan.samples.all() and (plan.counts == 1).all()) and not plan.prompt_logprobs


def is_plain(plan: StepPlan, state: SlotArrays) -> bool:
    """Whether each sequence of the step asks for one token and nothing else, as the model's logits have it."""
    asks = (plan.banned, plan.logprobs, plan.biases, plan.extra_keys, plan.beams)
    return not any(asks) and not edited(plan.slots, plan, state).any()


def is_greedy(plan: StepPlan, state: SlotArrays) -> bool:
    """Whether each sequence that is sampled asks for the likeliest token and nothing else."""
    return bool((state.temperature[plan.slots[plan.samples]] <= 0).all()) and is_plain(plan, state)


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
