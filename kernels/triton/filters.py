"""What top-k, top-p and min-p leave of each row, by a search over the bits of the floats' order instead of a sort.

The bound of most rows is found among the candidates for their largest logits; only where these do not tell, as when
top-p keeps thousands of tokens, the search goes over the whole row, once for each bit.
"""

import torch
import triton
import triton.language as tl

from .. import reference
from .candidates import (
    GATHERED_TILES,
    TILE,
    TileStatistics,
    code_of,
    code_reached,
    gather_candidates,
    is_filtered,
    largest_code,
    masses_of,
    tile_statistics,
    whole_row,
    workspace,
)
from .floats import LOWEST_ORDER, SILENT_BITS, from_code, load_logits, row_of
from .rows import MOST_SPLITS, covers, indices, reals

Tensor = torch.Tensor

CANDIDATES = 1024
# How many candidates are asked for, at least: enough for the filters of most rows.
WANTED = 64
SEARCH_BLOCK = 4096
WARPS = 8


@triton.jit
def _weight_from(
    row,
    least,
    peak,
    inverse,
    COUNTS: tl.constexpr,
    VOCAB: tl.constexpr,
    SEARCH_BLOCK: tl.constexpr,
    SILENT: tl.constexpr,
):
    """How many logits above -inf have a code from `least` on, or what the sum of their masses is."""
    weights = tl.zeros([SEARCH_BLOCK], tl.float32)
    for begin in range(0, VOCAB, SEARCH_BLOCK):
        logit = load_logits(row, begin + tl.arange(0, SEARCH_BLOCK), VOCAB)
        there = (code_of(logit, SILENT) >= least.to(tl.int32)) & (logit > float("-inf"))
        if COUNTS:
            weights += there.to(tl.float32)
        else:
            weights += tl.where(there, masses_of(logit, peak, inverse), 0.0)
    return tl.sum(weights)


@triton.jit
def _largest_code_of_row(
    row,
    needed,
    low,
    high,
    peak,
    inverse,
    COUNTS: tl.constexpr,
    VOCAB: tl.constexpr,
    SEARCH_BLOCK: tl.constexpr,
    SILENT: tl.constexpr,
):
    """`largest_code` of a whole row, each code's weight being 1 or its mass."""
    while high - low > 1:
        middle = low + ((high - low) >> 1)
        enough = _weight_from(row, middle, peak, inverse, COUNTS, VOCAB, SEARCH_BLOCK, SILENT) >= needed
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
    return low


@triton.jit
def _lowest_code(
    row,
    tile_maxima,
    tile_list,
    candidates,
    peak,
    mass,
    divisor,
    k,
    p,
    bound,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
    GATHERED: tl.constexpr,
    CANDIDATES: tl.constexpr,
    WANTED: tl.constexpr,
    SEARCH_BLOCK: tl.constexpr,
    SILENT: tl.constexpr,
    ID_BITS: tl.constexpr,
):
    """The least code that top-k, if 0 < k < VOCAB, and top-p keep; or one below `bound`, the quotient from which on
    min-p keeps tokens."""
    inverse = 1.0 / divisor
    NONE: tl.constexpr = LOWEST_ORDER >> SILENT
    above = code_of(peak, SILENT).to(tl.int64) + 1
    least = code_reached(tile_maxima, peak, tl.maximum(k, WANTED), VOCAB, TILE, SILENT)
    count = gather_candidates(
        *(row, tile_maxima, tile_list, candidates, least << ID_BITS),
        *(VOCAB, TILE, GATHERED, CANDIDATES, SILENT, ID_BITS),
    )
    fits = count <= CANDIDATES
    index = tl.arange(0, CANDIDATES)
    there = index < count
    code = (tl.load(candidates + index, mask=there, other=0) >> ID_BITS).to(tl.int32)
    weight = tl.where(there, masses_of(from_code(code, SILENT), peak, inverse), 0.0)
    kth, left = tl.full([], NONE, tl.int64), mass
    # Where fewer than k are above -inf, top-k drops nothing.
    if (k > 0) & (k < VOCAB) & (count >= k):
        if fits:
            kth = largest_code(code, there.to(tl.float32), k, least, above)
            left = tl.sum(tl.where(code >= kth.to(tl.int32), weight, 0.0))
        else:
            kth = _largest_code_of_row(row, k, least, above, peak, inverse, True, VOCAB, SEARCH_BLOCK, SILENT)
            left = _weight_from(row, kth, peak, inverse, False, VOCAB, SEARCH_BLOCK, SILENT)
    lowest = kth
    if p < 1:
        needed = p * left
        weight = tl.where(code >= kth.to(tl.int32), weight, 0.0)
        if fits & ((tl.sum(weight) >= needed) | (least == NONE)):
            lowest = tl.maximum(lowest, largest_code(code, weight, needed, kth, above))
        elif (not fits) | (bound < tl.div_rn(from_code(least.to(tl.int32), SILENT), divisor)):
            found = _largest_code_of_row(row, needed, kth, above, peak, inverse, False, VOCAB, SEARCH_BLOCK, SILENT)
            lowest = tl.maximum(lowest, found)
    return lowest


@triton.jit(do_not_specialize=["splits"])
def _lowest_kept_kernel(
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
    tile_list,
    candidates,
    lowest,
    splits,
    VOCAB: tl.constexpr,
    TILE: tl.constexpr,
    GATHERED: tl.constexpr,
    CANDIDATES: tl.constexpr,
    WANTED: tl.constexpr,
    SEARCH_BLOCK: tl.constexpr,
    SILENT: tl.constexpr,
    ID_BITS: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
):
    """-inf for a row that is not filtered or not drawn from, or that holds a NaN."""
    draw = tl.program_id(0).to(tl.int64)
    divisor = tl.load(temperature + draw)
    k = tl.minimum(tl.load(top_k + draw).to(tl.int64), VOCAB).to(tl.int32)
    p, share = tl.load(top_p + draw), tl.load(min_p + draw)
    result = tl.full([], float("-inf"), tl.float32)
    if (divisor > 0) & is_filtered(k, p, share):
        parts = draw * MOST_SPLITS
        peak, mass = whole_row(peaks + parts, masses + parts, splits, 1.0 / divisor, MOST_SPLITS)
        if peak > float("-inf"):
            result = tl.div_rn(peak, divisor) + tl.log(share)
            if ((k > 0) & (k < VOCAB)) | (p < 1):
                tiles = draw * triton.cdiv(VOCAB, TILE)
                code = _lowest_code(
                    *(row_of(logits, stride, rows, draw), tile_maxima + tiles, tile_list + tiles),
                    *(candidates + draw * CANDIDATES, peak, mass, divisor, k, p, result),
                    *(VOCAB, TILE, GATHERED, CANDIDATES, WANTED, SEARCH_BLOCK, SILENT, ID_BITS),
                )
                result = tl.maximum(result, tl.div_rn(from_code(code.to(tl.int32), SILENT), divisor))
        if mass != mass:
            result = float("-inf")
    tl.store(lowest + draw, result)


def find_lowest_kept(
    logits: Tensor,
    temperature: Tensor,
    filters: tuple[Tensor, Tensor, Tensor],
    statistics: TileStatistics,
    rows: Tensor | None,
) -> Tensor:
    """`lowest_kept`, but -inf for the rows that the statistics leave out. filters: top_k, top_p and min_p [N]."""
    count, vocab_size = temperature.shape[0], logits.shape[1]
    lowest = torch.empty(count, device=logits.device)
    _lowest_kept_kernel[(count,)](
        *(logits, logits.stride(0), rows, temperature, *filters, *statistics[:3]),
        *(*workspace(statistics, CANDIDATES), lowest, statistics.splits),
        *(vocab_size, TILE, GATHERED_TILES, CANDIDATES, WANTED, SEARCH_BLOCK),
        *(SILENT_BITS[logits.dtype], vocab_size.bit_length(), MOST_SPLITS),
        num_warps=WARPS,
        enable_fp_fusion=True,
    )
    return lowest


def lowest_kept(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    rows: Tensor | None = None,
) -> Tensor:
    if not covers(logits):
        return reference.lowest_kept(logits, temperature, top_k, top_p, min_p, rows)
    divisors, chosen, filters = reals(temperature), indices(rows), (top_k.contiguous(), reals(top_p), reals(min_p))
    statistics = tile_statistics(logits, divisors, chosen)
    return find_lowest_kept(logits, divisors, filters, statistics, chosen)
