"""The largest logits of each row, in order, and its logsumexp."""

import torch
import triton
import triton.language as tl

from .. import reference
from .candidates import (
    GATHERED_TILES,
    TILE,
    code_of,
    code_reached,
    gather_candidates,
    packed_of,
    tile_statistics,
    whole_row,
    workspace,
)
from .floats import SILENT_BITS, from_code, load_logits, row_of
from .rows import MOST_SPLITS, covers, indices, reals

Tensor = torch.Tensor

CANDIDATES = 1024  # there is room for, and for twice as many as are wanted
SEARCH_BLOCK = 4096
RANKED = 4
WARPS = 8
NO_CANDIDATE = tl.constexpr(-(2**63))


@triton.jit
def _count_from(
    row, least, VOCAB: tl.constexpr, SEARCH_BLOCK: tl.constexpr, SILENT: tl.constexpr, ID_BITS: tl.constexpr
):
    """How many logits above -inf a row has whose `packed_of` is not below `least`."""
    counts = tl.zeros([SEARCH_BLOCK], tl.int32)
    for begin in range(0, VOCAB, SEARCH_BLOCK):
        token = begin + tl.arange(0, SEARCH_BLOCK)
        logit = load_logits(row, token, VOCAB)
        there = (packed_of(logit, token, SILENT, ID_BITS) >= least) & (logit > float("-inf"))
        counts += there.to(tl.int32)
    return tl.sum(counts)


@triton.jit
def _find_least(
    row,
    low,
    high,
    k,
    CANDIDATES: tl.constexpr,
    VOCAB: tl.constexpr,
    SEARCH_BLOCK: tl.constexpr,
    SILENT: tl.constexpr,
    ID_BITS: tl.constexpr,
):
    """A `packed_of` between `low` and `high` that at least k of a row's logits reach and at most CANDIDATES do, where
    more reach `low` and fewer `high`."""
    least, count = low, tl.full([], 0, tl.int32)
    while (count < k) | (count > CANDIDATES):
        least = low + ((high - low) >> 1)
        count = _count_from(row, least, VOCAB, SEARCH_BLOCK, SILENT, ID_BITS)
        low, high = tl.where(count < k, low, least), tl.where(count < k, least, high)
    return least


@triton.jit
def _store_in_order(
    candidates,
    count,
    values,
    ids,
    k,
    CANDIDATES: tl.constexpr,
    RANKED: tl.constexpr,
    SILENT: tl.constexpr,
    ID_BITS: tl.constexpr,
):
    """The k largest of the candidates, each at the place that is the number of larger ones: no two are the same."""
    index = tl.arange(0, CANDIDATES)
    packed = tl.load(candidates + index, mask=index < count, other=NO_CANDIDATE)
    rank = tl.zeros([CANDIDATES], tl.int32)
    for first in range(0, count, RANKED):
        which = first + tl.arange(0, RANKED)
        others = tl.load(candidates + which, mask=which < count, other=NO_CANDIDATE)
        rank += tl.sum((others[None, :] > packed[:, None]).to(tl.int32), 1)
    wanted = (index < count) & (rank < k)
    tl.store(values + rank, from_code((packed >> ID_BITS).to(tl.int32), SILENT), mask=wanted)
    tl.store(ids + rank, ~packed & ((1 << ID_BITS) - 1), mask=wanted)


@triton.jit(do_not_specialize=["splits", "k"])
def _top_tokens_kernel(
    logits,
    stride,
    rows,
    temperature,
    tile_maxima,
    peaks,
    masses,
    tile_list,
    candidates,
    values,
    ids,
    total,
    splits,
    k,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
    GATHERED: tl.constexpr,
    CANDIDATES: tl.constexpr,
    RANKED: tl.constexpr,
    SEARCH_BLOCK: tl.constexpr,
    SILENT: tl.constexpr,
    ID_BITS: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
):
    draw = tl.program_id(0).to(tl.int64)
    row = row_of(logits, stride, rows, draw)
    divisor = tl.load(temperature + draw)
    parts = draw * MOST_SPLITS
    peak, mass = whole_row(peaks + parts, masses + parts, splits, 1.0 / divisor, MOST_SPLITS)
    tl.store(total + draw, tl.div_rn(peak, divisor) + tl.log(mass))
    maxima = tile_maxima + draw * triton.cdiv(VOCAB, TILE)
    list_of_row, found = tile_list + draw * triton.cdiv(VOCAB, TILE), candidates + draw * CANDIDATES
    values, ids = values + draw * k, ids + draw * k
    count = tl.full([], 0, tl.int32)
    if (mass == mass) & (peak > float("-inf")):
        least = code_reached(maxima, peak, k, VOCAB, TILE, SILENT) << ID_BITS
        count = gather_candidates(
            row, maxima, list_of_row, found, least, VOCAB, TILE, GATHERED, CANDIDATES, SILENT, ID_BITS
        )
        if count > CANDIDATES:
            above = (code_of(peak, SILENT).to(tl.int64) + 1) << ID_BITS
            least = _find_least(row, least, above, k, CANDIDATES, VOCAB, SEARCH_BLOCK, SILENT, ID_BITS)
            count = gather_candidates(
                row, maxima, list_of_row, found, least, VOCAB, TILE, GATHERED, CANDIDATES, SILENT, ID_BITS
            )
        _store_in_order(found, count, values, ids, k, CANDIDATES, RANKED, SILENT, ID_BITS)
    for first in range(tl.minimum(count, k), k, CANDIDATES):
        index = first + tl.arange(0, CANDIDATES)
        tl.store(values + index, float("-inf"), mask=index < k)
        tl.store(ids + index, 0, mask=index < k)


def top_tokens(
    logits: Tensor, temperature: Tensor, k: int, rows: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    if not covers(logits):
        return reference.top_tokens(logits, temperature, k, rows)
    count, vocab_size = temperature.shape[0], logits.shape[1]
    divisors, chosen = reals(temperature), indices(rows)
    statistics = tile_statistics(logits, divisors, chosen)
    room = max(CANDIDATES, triton.next_power_of_2(2 * k))
    tile_list, candidates = workspace(statistics, room)
    values, total = logits.new_empty(count, k, dtype=torch.float32), logits.new_empty(count, dtype=torch.float32)
    ids = logits.new_empty(count, k, dtype=torch.int64)
    _top_tokens_kernel[(count,)](
        *(logits, logits.stride(0), chosen, divisors, statistics.tile_maxima, statistics.peaks, statistics.masses),
        *(tile_list, candidates, values, ids, total, statistics.splits, k),
        *(vocab_size, TILE, GATHERED_TILES, room, RANKED, SEARCH_BLOCK),
        *(SILENT_BITS[logits.dtype], vocab_size.bit_length(), MOST_SPLITS),
        num_warps=WARPS,
        enable_fp_fusion=True,
    )
    return values, ids, total
