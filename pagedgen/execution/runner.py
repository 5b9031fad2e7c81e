"""Runs one step on the device: copies, batch, model, sampling."""

import time
from collections.abc import Iterator

import numpy as np
import torch

from pagedgen.execution.attention import AttentionBackend
from pagedgen.execution.batch import build_batch, wanted_prompt_positions
from pagedgen.execution.kv_cache import KVCache
from pagedgen.execution.logprobs import TopLogprobs
from pagedgen.execution.sampler import Sampled, Sampler
from pagedgen.models.base import Model
from pagedgen.step import LogprobResult, SlotArrays, StepPlan, StepResult

# Float32 logits of one chunk of rows stay within this many bytes, whatever the vocabulary and the batch.
LOGITS_BYTES = 256 << 20
# A chunk of rows that only tell a prompt's log-probabilities has no more than these: enough to keep the LM head busy.
PROMPT_LOGIT_ROWS = 256


def logit_rows_per_chunk(vocab_size: int) -> int:
    return max(1, LOGITS_BYTES // (4 * vocab_size))


class ModelRunner:
    """A model, its KV cache and a sampler; `execute` turns a StepPlan into a StepResult."""

    def __init__(self, model: Model, kv_cache: KVCache, attention: AttentionBackend) -> None:
        self.model, self.kv_cache, self.attention = model, kv_cache, attention
        self.sampler = Sampler(attention.kernels)

    @torch.inference_mode()
    def execute(self, plan: StepPlan, state: SlotArrays) -> StepResult:
        started = time.perf_counter()
        if len(plan.copies):
            copies = torch.from_numpy(plan.copies.astype(np.int64)).to(self.kv_cache.device)
            self.attention.kernels.copy_blocks(self.kv_cache.pools.values(), copies)
        batch = build_batch(plan, state, self.kv_cache.device)
        built = time.perf_counter()
        hidden = self.model.forward(batch, self.kv_cache, self.attention)
        slots = plan.slots[plan.samples]
        sampling = 0.0
        sampled: list[Sampled] = []
        for rows, logits in self._logits(hidden[: len(slots)], logit_rows_per_chunk(self.model.spec.vocab_size)):
            before = time.perf_counter()
            sampled.append(self.sampler.sample(logits, slots[rows], plan, state))
            sampling += time.perf_counter() - before
        prompt_logprobs = self._prompt_logprobs(hidden[len(slots) :], plan, state) if plan.prompt_logprobs else {}
        return StepResult(
            slots,
            np.concatenate([np.empty(0, np.int32), *(part.tokens for part in sampled)]),
            {slot: found for part in sampled for slot, found in part.logprobs.items()},
            {slot: drawn for part in sampled for slot, drawn in part.extra.items()},
            {slot: found for part in sampled for slot, found in part.beams.items()},
            prompt_logprobs,
            seconds=(built - started, time.perf_counter() - built - sampling, sampling),
        )

    def _logits(self, hidden: torch.Tensor, size: int) -> Iterator[tuple[slice, torch.Tensor]]:
        """The logits of `size` rows of hidden states at a time, and which rows they are."""
        for begin in range(0, len(hidden), size):
            rows = slice(begin, begin + size)
            yield rows, self.model.logits(hidden[rows])

    def _prompt_logprobs(
        self, hidden: torch.Tensor, plan: StepPlan, state: SlotArrays
    ) -> dict[int, list[LogprobResult]]:
        """hidden: [P, ...] of the positions before those of `wanted_prompt_positions`. Every slot that asks gets a
        list, be it empty."""
        sequences, positions = wanted_prompt_positions(plan, state)
        slots = plan.slots[sequences]
        tokens = state.token_ids[slots, positions]
        results: dict[int, list[LogprobResult]] = {slot: [] for slot in plan.prompt_logprobs}
        size = min(PROMPT_LOGIT_ROWS, logit_rows_per_chunk(self.model.spec.vocab_size))
        for rows, logits in self._logits(hidden, size):
            wanted = [plan.prompt_logprobs[slot][1] for slot in slots[rows].tolist()]
            everything = np.arange(len(wanted))
            found = TopLogprobs(self.attention.kernels, logits, everything, wanted).results(tokens[rows], everything)
            for slot, result in zip(slots[rows].tolist(), found, strict=True):
                results[slot].append(result)
        return results
