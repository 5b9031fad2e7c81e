"""The check every model of the hook path passes before it is used.

Two short sequences run packed, in chunks that cross block edges, and each also alone through the model's own eager
attention. What a few tokens cannot show (sliding windows, length-dependent rope) is checked where the model is set up.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from pagedgen.execution.attention import AttentionBackend
from pagedgen.execution.batch import build_batch
from pagedgen.execution.kv_cache import KVCache
from pagedgen.models.hf import HookModel
from pagedgen.models.hook import UnusableModel
from pagedgen.step import SlotArrays, StepPlan

_BLOCK_SIZE = 4
_LENGTHS = (11, 9)
_CHUNKS = ((4, 3), (7, 5), (0, 1))  # tokens of each sequence in each step; a 0 leaves the sequence out
# Largest difference allowed, relative to the size of a token's logits: rounding of the dtype, grown over the layers
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}


def self_check(model: HookModel, attention: AttentionBackend) -> None:
    """Raise UnusableModel when the packed and paged logits differ from the model's own."""
    random = np.random.default_rng(0)
    sequences = [random.integers(0, model.spec.vocab_size, length) for length in _LENGTHS]
    paged = _paged_logits(model, sequences, attention)
    for ids, ours, first_chunk in zip(sequences, paged, _CHUNKS[0], strict=True):
        own = model.own_logits(torch.from_numpy(ids).to(model.spec.device)).float()
        differences = (ours.float() - own).norm(dim=1) / own.norm(dim=1)
        for part in (differences[:first_chunk], differences[first_chunk:]):
            # in low precision rounding sends single tokens to other experts, so there the typical token counts
            difference = float(part.max() if model.spec.dtype == torch.float32 else part.median())
            if not difference <= _TOLERANCE[model.spec.dtype]:
                raise UnusableModel(f"its logits differ from its own attention's by {difference:.1%}")


def _paged_logits(model: HookModel, sequences: list[Any], attention: AttentionBackend) -> list[torch.Tensor]:
    """[length, vocab_size] for each sequence, computed packed and in chunks."""
    spec = model.spec
    blocks = sum(-(-length // _BLOCK_SIZE) for length in _LENGTHS)
    cache = KVCache(spec.layers, blocks, _BLOCK_SIZE, spec.dtype, spec.device)
    state = SlotArrays(len(sequences), max(_LENGTHS), _BLOCK_SIZE)
    free = list(range(blocks))[::-1]
    for slot, ids in enumerate(sequences):
        state.token_ids[slot, : len(ids)] = ids
        state.num_tokens[slot] = state.num_prompt[slot] = len(ids)
        table = [free.pop(0 if slot else -1) for _ in range(-(-len(ids) // _BLOCK_SIZE))]
        state.block_table[slot, : len(table)] = table
    logits: list[list[torch.Tensor]] = [[] for _ in sequences]
    for step in _CHUNKS:
        slots = np.flatnonzero(step).astype(np.int32)
        counts = np.array(step, np.int32)[slots]
        plan = StepPlan(
            slots=slots,
            starts=state.num_computed[slots],
            counts=counts,
            samples=np.ones(len(slots), np.bool_),
            copies=np.zeros((0, 2), np.int32),
            banned={},
            logprobs={},
        )
        batch = build_batch(plan, state, spec.device)
        batch = replace(batch, logit_rows=torch.arange(batch.num_tokens, device=spec.device))
        parts = torch.split(model.forward(batch, cache, attention), counts.tolist())
        for slot, part in zip(slots.tolist(), parts, strict=True):
            logits[slot].append(part)
        state.num_computed[slots] += counts
    return [torch.cat(chunks) for chunks in logits]
