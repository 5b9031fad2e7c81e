"""Penalties on the tokens that occurred."""

import torch
import triton
import triton.language as tl

from .. import reference
from . import launch
from .rows import covers

Tensor = torch.Tensor

TILE = 1024
WARPS = 8


@triton.jit
def _penalise_kernel(
    scores,
    token_ids,
    lengths,
    num_prompt,
    repetition,
    presence,
    frequency,
    rows,
    marks,
    score_stride,
    id_stride,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
):
    """All penalties of one row. marks: int32 [N, VOCAB] that need not be set: bit 0 of a token that occurred says that
    it is in the prompt, the bits above are how often it is in the completion. Of the places of one token, the one that
    takes its mark first changes its score."""
    row = tl.program_id(0).to(tl.int64)
    factor, once, each = tl.load(repetition + row), tl.load(presence + row), tl.load(frequency + row)
    if (factor != 1) | (once != 0) | (each != 0):
        length, prompt = tl.load(lengths + row).to(tl.int32), tl.load(num_prompt + row).to(tl.int32)
        ids, lane = token_ids + tl.load(rows + row).to(tl.int64) * id_stride, tl.arange(0, TILE)
        row_marks, row_scores = marks + row * VOCAB, scores + row * score_stride
        start = tl.where(factor != 1, 0, prompt)
        for begin in range(start, length, TILE):
            place = begin + lane
            token = tl.load(ids + place, mask=place < length, other=0)
            tl.store(row_marks + token, 0, mask=place < length)
        tl.debug_barrier()
        for begin in range(start, length, TILE):
            place = begin + lane
            token = tl.load(ids + place, mask=place < length, other=0)
            tl.atomic_or(row_marks + token, 1, mask=(place < length) & (place < prompt), sem="relaxed")
            tl.atomic_add(row_marks + token, 2, mask=(place < length) & (place >= prompt), sem="relaxed")
        tl.debug_barrier()
        for begin in range(start, length, TILE):
            place = begin + lane
            token = tl.load(ids + place, mask=place < length, other=0)
            mark = tl.atomic_xchg(row_marks + token, 0, mask=place < length, sem="relaxed")
            first = (place < length) & (mark != 0)
            score = tl.load(row_scores + token, mask=first, other=0.0)
            score = tl.where(score < 0, score * factor, tl.div_rn(score, factor))
            loss = tl.where(mark > 1, (mark >> 1).to(tl.float32) * each + once, 0.0)
            tl.store(row_scores + token, score - loss, mask=first)


def penalise(
    scores: Tensor,
    token_ids: Tensor,
    lengths: Tensor,
    num_prompt: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
    rows: Tensor,
) -> None:
    settings = lengths, num_prompt, repetition, presence, frequency, rows
    covered = scores.dtype is torch.float32 and covers(scores) and launch.rows_are_dense(token_ids)
    if not covered or not launch.on_device(token_ids, *settings):
        return reference.penalise(scores, token_ids, *settings)
    count, vocab_size = scores.shape
    marks = torch.empty(count, vocab_size, dtype=torch.int32, device=scores.device)
    _penalise_kernel[(count,)](
        *(scores, token_ids, *(setting.contiguous() for setting in settings), marks),
        *(scores.stride(0), token_ids.stride(0), vocab_size, TILE),
        num_warps=WARPS,
        enable_fp_fusion=False,  # what is rounded in between is as in the reference
    )
    return None
