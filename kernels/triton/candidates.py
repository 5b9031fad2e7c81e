"""Of each row of logits the largest of every small tile, and from these the candidates for its largest logits.

One pass over the vocabulary, split over several programs a row, keeps the largest logit of each tile. The k-th largest
of these bounds the k-th largest logit from below, so only the few tiles that reach it are read again, for the
candidates: the logits not below that bound.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .floats import LOWEST_ORDER, load_logits, ordered, row_of
from .rows import MOST_SPLITS, split

Tensor = torch.Tensor

TILE = 128
BLOCK = 2048
WARPS = 4
GATHERED_TILES = 16


class TileStatistics(NamedTuple):
    """tile_maxima: float32 [N, tiles], the largest logit of each tile of TILE tokens. peaks, masses: float32 [N,
    MOST_SPLITS], of each part of a row its largest logit, and the sum of exp((logit - peak) / temperature) over it,
    which is NaN where a logit is. splits: how many parts there are."""

    tile_maxima: Tensor
    peaks: Tensor
    masses: Tensor
    splits: int


@triton.jit
def masses_of(logit, peak, inverse):
    """exp((logit - peak) / temperature); 1 for the peak itself, infinite or not."""
    return tl.exp(tl.where(logit == peak, 0.0, (logit - peak) * inverse))


@triton.jit(do_not_specialize=["blocks_per_split"])
def _tile_statistics_kernel(
    logits,
    stride,
    rows,
    temperature,
    top_k,
    top_p,
    min_p,
    tile_maxima,
    peaks,
    masses,
    blocks_per_split,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
):
    """TileStatistics of one part of a row; of a row that no filter is on for, where there are filters, nothing."""
    draw, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    divisor = tl.load(temperature + draw)
    wanted = divisor > 0
    if top_k is not None:
        wanted = wanted & is_filtered(tl.load(top_k + draw), tl.load(top_p + draw), tl.load(min_p + draw))
    if wanted:
        row, inverse = row_of(logits, stride, rows, draw), 1.0 / divisor
        tile = tl.arange(0, BLOCK // TILE)
        begin = split * blocks_per_split
        peak, mass = tl.full([], float("-inf"), tl.float32), tl.full([], 0.0, tl.float32)
        for block in range(begin, tl.minimum(begin + blocks_per_split, triton.cdiv(VOCAB, BLOCK))):
            number = block * (BLOCK // TILE) + tile
            logit = load_logits(row, number[:, None] * TILE + tl.arange(0, TILE)[None, :], VOCAB)
            largest = tl.max(logit, 1)
            place = tile_maxima + draw * triton.cdiv(VOCAB, TILE) + number
            tl.store(place, largest, mask=number * TILE < VOCAB)
            higher = tl.maximum(peak, tl.max(largest, 0))
            mass = mass * masses_of(peak, higher, inverse) + tl.sum(masses_of(logit, higher, inverse))
            peak = higher
        tl.store(peaks + draw * MOST_SPLITS + split, peak)
        tl.store(masses + draw * MOST_SPLITS + split, mass)


@triton.jit
def is_filtered(top_k, top_p, min_p):
    return (top_k > 0) | (top_p < 1) | (min_p > 0)


def tile_statistics(
    logits: Tensor,
    temperature: Tensor,
    rows: Tensor | None,
    filters: tuple[Tensor, Tensor, Tensor] | None = None,
) -> TileStatistics:
    """temperature: float32 [N]. filters: top_k, top_p and min_p [N]; rows that none of them is on for, or whose
    temperature is 0, are left out."""
    count, vocab_size = temperature.shape[0], logits.shape[1]
    splits, blocks_per_split = split(count, triton.cdiv(vocab_size, BLOCK), logits.device)
    tiles = triton.cdiv(vocab_size, TILE)
    maxima = torch.empty(count, tiles, device=logits.device)
    peaks, masses = torch.empty(2, count, MOST_SPLITS, device=logits.device)
    _tile_statistics_kernel[(count, splits)](
        *(logits, logits.stride(0), rows, temperature, *(filters or (None, None, None)), maxima, peaks, masses),
        *(blocks_per_split, vocab_size, BLOCK, TILE, MOST_SPLITS),
        num_warps=WARPS,
        enable_fp_fusion=True,
    )
    return TileStatistics(maxima, peaks, masses, splits)


def workspace(statistics: TileStatistics, room: int) -> tuple[Tensor, Tensor]:
    """(tile_list, candidates) for the rows that these statistics are of; see `gather_candidates`."""
    maxima = statistics.tile_maxima
    return torch.empty_like(maxima, dtype=torch.int32), maxima.new_empty(maxima.shape[0], room, dtype=torch.int64)


@triton.jit
def whole_row(peaks, masses, splits, inverse, MOST_SPLITS: tl.constexpr):
    """(peak, mass) of a row from those of its parts."""
    split = tl.arange(0, MOST_SPLITS)
    part_peaks = tl.load(peaks + split, mask=split < splits, other=float("-inf"))
    part_masses = tl.load(masses + split, mask=split < splits, other=0.0)
    peak = tl.max(part_peaks, 0)
    return peak, tl.sum(part_masses * masses_of(part_peaks, peak, inverse))


@triton.jit
def largest_code(codes, weights, needed, low, high):
    """The largest code c in [low, high), int64, for which the weights of the codes from c on sum up to what is needed,
    or `low`: one of the codes, where their weights are positive."""
    while high - low > 1:
        middle = low + ((high - low) >> 1)
        enough = tl.sum(tl.where(codes >= middle.to(tl.int32), weights, 0.0)) >= needed
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
    return low


@triton.jit
def code_of(logit, SILENT: tl.constexpr):
    return ordered(logit) >> SILENT


@triton.jit
def packed_of(logit, token, SILENT: tl.constexpr, ID_BITS: tl.constexpr):
    """int64 that orders as the logit, and for one logit the lower token above the higher."""
    return (code_of(logit, SILENT).to(tl.int64) << ID_BITS) | (token ^ ((1 << ID_BITS) - 1))


@triton.jit
def load_maxima(tile_maxima, VOCAB: tl.constexpr, TILE: tl.constexpr):
    """(numbers, maxima) of a row's tiles, -inf past the last one."""
    TILES: tl.constexpr = triton.cdiv(VOCAB, TILE)
    number = tl.arange(0, triton.next_power_of_2(TILES))
    return number, tl.load(tile_maxima + number, mask=number < TILES, other=float("-inf"))


@triton.jit
def code_reached(tile_maxima, peak, k, VOCAB: tl.constexpr, TILE: tl.constexpr, SILENT: tl.constexpr):
    """int64: the code of the k-th largest of a row's tile maxima, which k logits of the row reach; that of -inf where
    there are fewer."""
    _, maxima = load_maxima(tile_maxima, VOCAB, TILE)
    low = tl.full([], LOWEST_ORDER >> SILENT, tl.int64)
    there = (maxima > float("-inf")).to(tl.float32)
    return largest_code(code_of(maxima, SILENT), there, k, low, code_of(peak, SILENT).to(tl.int64) + 1)


@triton.jit
def gather_candidates(
    row,
    tile_maxima,
    tile_list,
    candidates,
    least,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
    GATHERED: tl.constexpr,
    CANDIDATES: tl.constexpr,
    SILENT: tl.constexpr,
    ID_BITS: tl.constexpr,
):
    """How many logits above -inf a row has whose `packed_of` is not below `least`; these go to candidates int64
    [CANDIDATES], as far as they fit in. tile_list: int32, room for the numbers of all tiles."""
    number, maxima = load_maxima(tile_maxima, VOCAB, TILE)
    reaching = (code_of(maxima, SILENT) >= (least >> ID_BITS).to(tl.int32)) & (maxima > float("-inf"))
    line = tl.cumsum(reaching.to(tl.int32), 0) - 1
    tl.store(tile_list + line, number, mask=reaching)
    listed = tl.sum(reaching.to(tl.int32))
    tl.debug_barrier()  # all of the list is written before any of it is read
    count = tl.full([], 0, tl.int32)
    for first in range(0, listed, GATHERED):
        which = first + tl.arange(0, GATHERED)
        tile = tl.load(tile_list + which, mask=which < listed, other=0)
        token = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
        logit = load_logits(row, token, VOCAB)
        packed = packed_of(logit, token, SILENT, ID_BITS)
        keep = (which < listed)[:, None] & (logit > float("-inf")) & (packed >= least)
        kept = keep.to(tl.int32)
        in_tile = tl.sum(kept, 1)
        place = (count + tl.cumsum(in_tile, 0) - in_tile)[:, None] + tl.cumsum(kept, 1) - 1
        tl.store(candidates + place, packed, mask=keep & (place < CANDIDATES))
        count += tl.sum(in_tile)
    tl.debug_barrier()  # so are the candidates, and the list is no longer needed
    return count
