"""Runs one step on the device: copies, batch, model, sampling."""

import time

import numpy as np
import torch

from pagedgen.execution.attention import AttentionBackend
from pagedgen.execution.batch import build_batch
from pagedgen.execution.kv_cache import KVCache
from pagedgen.execution.sampler import Sampler
from pagedgen.models.base import Model
from pagedgen.step import LogprobResult, SlotArrays, StepPlan, StepResult

# Float32 logits of one chunk of rows stay within this many bytes, whatever the vocabulary and the batch.
LOGITS_BYTES = 256 << 20


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
        forwarded = time.perf_counter()
        slots = plan.slots[plan.samples]
        tokens = np.empty(len(slots), np.int32)
        logprobs: dict[int, LogprobResult] = {}
        sampling = 0.0
        size = logit_rows_per_chunk(self.model.spec.vocab_size)
        for start in range(0, len(slots), size):
            rows = slice(start, start + size)
            logits = self.model.logits(hidden[rows])
            before = time.perf_counter()
            tokens[rows], found = self.sampler.sample(logits, slots[rows], plan, state)
            logprobs.update(found)
            sampling += time.perf_counter() - before
        finished = time.perf_counter()
        model_seconds = (forwarded - built) + (finished - forwarded - sampling)
        return StepResult(slots, tokens, logprobs, (built - started, model_seconds, sampling))
