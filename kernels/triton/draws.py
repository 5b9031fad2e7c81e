"""The choice of one token from each row: the largest logit, or a draw from the softmax by the Gumbel-max trick.

A row is split over several programs, so that few rows fill the device too; each gives the best token of its part.
"""

import torch
import triton
import triton.language as tl

from .. import reference
from .candidates import TILE, TileStatistics, tile_statistics
from .filters import find_lowest_kept
from .floats import HIGHEST_ORDER, INFINITY, LOWEST_ORDER, NAN_ORDER, from_order, load_logits, ordered, row_of
from .noise import gumbel, gumbel_bound, random_bits
from .rows import MOST_SPLITS, covers, indices, reals, split

Tensor = torch.Tensor

BLOCK = 1024
PART = 256  # of a block, is looked at closely at a time
WARPS = 4

NO_TOKEN = tl.constexpr(LOWEST_ORDER.value << 32)
LAST_TOKEN = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _packed(score, token):
    """int64 that orders as the score, and for one score the lower token above the higher; NaN is above all."""
    order = tl.where(score != score, NAN_ORDER, ordered(score))
    return (order.to(tl.int64) << 32) | (token ^ LAST_TOKEN).to(tl.int64)


@triton.jit
def _any(flags):
    return tl.max(flags.to(tl.int32), 0) > 0


@triton.jit
def _best_logit(row, begin, end, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """The packed best of the blocks from `begin` to `end`."""
    lane = tl.arange(0, BLOCK)
    best, best_token = tl.full([BLOCK], float("-inf"), tl.float32), tl.zeros([BLOCK], tl.int32)
    for block in range(begin, end):
        token = block * BLOCK + lane
        logit = load_logits(row, token, VOCAB)
        better = (logit > best) | (logit != logit)
        best, best_token = tl.where(better, logit, best), tl.where(better, token, best_token)
    return tl.max(_packed(best, best_token), 0)


@triton.jit
def _open_to(logit, inverse, lowest, best):
    """(which of these can have a score above that of `best` at all, by their logits alone; a number not less than each
    one's quotient; the score of `best`). What is compared to NaN goes on, to be found in the end."""
    leader = best >> 32
    score = tl.where(leader > HIGHEST_ORDER, INFINITY, from_order(leader.to(tl.int32)))
    near = logit * inverse
    # Above the exact quotient, with room for the rounding of the sums that are compared.
    reach = tl.maximum(near * 1.000001, near * 0.999999) + tl.where(inverse < INFINITY, 1e-3, INFINITY)
    return (logit != float("-inf")) & ~(reach < lowest) & ~(reach + 22.88 < score), reach, score


@triton.jit
def _best_of_block(
    row, begin, temperature, inverse, key, lowest, best, VOCAB: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr
):
    """The packed best draw of a block of tokens where it is better than `best`, else that.

    Only parts of a block with a token whose score may be better than that of `best` are looked at closely, so that most
    need no exact division and no logarithm in float64, which many GPUs are slow at.
    """
    token = begin + tl.arange(0, BLOCK)
    open_to, reach, score = _open_to(load_logits(row, token, VOCAB), inverse, lowest, best)
    if _any(open_to):
        noise = gumbel_bound(random_bits(key, token))
        if _any(open_to & ~(reach + noise < score)):
            for first in range(begin, tl.minimum(begin + BLOCK, VOCAB), PART):
                part = first + tl.arange(0, PART)
                logit, bits = load_logits(row, part, VOCAB), random_bits(key, part)
                open_part, part_reach, part_score = _open_to(logit, inverse, lowest, best)
                open_part = open_part & ~(part_reach + gumbel_bound(bits) < part_score)
                if _any(open_part):
                    quotient = tl.div_rn(logit, temperature)
                    exact = tl.where(open_part & ~(quotient < lowest), quotient + gumbel(bits), float("-inf"))
                    best = tl.maximum(best, tl.max(_packed(exact, part), 0))
    return best


@triton.jit
def _best_draw(
    row,
    tile_maxima,
    temperature,
    key,
    lowest,
    begin,
    end,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    PART: tl.constexpr,
):
    """The packed best of the blocks from `begin` to `end`. tile_maxima: of the row, or None."""
    inverse = 1.0 / temperature
    best = tl.full([], NO_TOKEN, tl.int64)
    for block in range(begin, end):
        skip = False
        if tile_maxima is not None:
            tile = block * (BLOCK // TILE) + tl.arange(0, BLOCK // TILE)
            if lowest > float("-inf"):
                largest = tl.max(tl.load(tile_maxima + tile, mask=tile * TILE < VOCAB, other=float("-inf")), 0)
                skip = tl.div_rn(largest, temperature) < lowest
        if not skip:
            best = _best_of_block(row, block * BLOCK, temperature, inverse, key, lowest, best, VOCAB, BLOCK, PART)
    return best


@triton.jit(do_not_specialize=["blocks_per_split"], do_not_specialize_on_alignment=["keys"])
def _best_of_parts_kernel(
    logits,
    stride,
    rows,
    temperature,
    keys,
    lowest,
    tile_maxima,
    best,
    blocks_per_split,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    PART: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
):
    """The packed best token of one part of a row. Without temperatures, and where they are 0, the largest logit is."""
    draw, split = tl.program_id(0), tl.program_id(1)
    row = row_of(logits, stride, rows, draw)
    begin = split * blocks_per_split
    end = tl.minimum(begin + blocks_per_split, triton.cdiv(VOCAB, BLOCK))
    place = best + draw.to(tl.int64) * MOST_SPLITS + split
    if temperature is None:
        tl.store(place, _best_logit(row, begin, end, VOCAB, BLOCK))
    else:
        divisor = tl.load(temperature + draw)
        if divisor > 0:
            bound = float("-inf")
            if lowest is not None:
                bound = tl.load(lowest + draw)
            maxima = tile_maxima
            if tile_maxima is not None:
                maxima = tile_maxima + draw.to(tl.int64) * triton.cdiv(VOCAB, TILE)
            key = tl.load(keys + draw)
            tl.store(place, _best_draw(row, maxima, divisor, key, bound, begin, end, VOCAB, BLOCK, TILE, PART))
        else:
            tl.store(place, _best_logit(row, begin, end, VOCAB, BLOCK))


@triton.jit(do_not_specialize=["splits"])
def _best_of_rows_kernel(best, out, splits, MOST_SPLITS: tl.constexpr):
    draw = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, MOST_SPLITS)
    packed = tl.max(tl.load(best + draw * MOST_SPLITS + split, mask=split < splits, other=NO_TOKEN), 0)
    order, token = packed >> 32, (packed & 0xFFFFFFFF) ^ LAST_TOKEN
    usable = (order > LOWEST_ORDER) & (order <= HIGHEST_ORDER)
    tl.store(out + draw, tl.where(usable, token, -1))


def _choose(
    logits: Tensor,
    count: int,
    rows: Tensor | None,
    temperature: Tensor | None = None,
    keys: Tensor | None = None,
    lowest: Tensor | None = None,
    statistics: TileStatistics | None = None,
) -> Tensor:
    vocab_size = logits.shape[1]
    splits, blocks_per_split = split(count, triton.cdiv(vocab_size, BLOCK), logits.device)
    best = logits.new_empty(count, MOST_SPLITS, dtype=torch.int64)
    _best_of_parts_kernel[(count, splits)](
        *(logits, logits.stride(0), rows, temperature, keys, lowest),
        *(None if statistics is None else statistics.tile_maxima, best, blocks_per_split),
        *(vocab_size, BLOCK, TILE, PART, MOST_SPLITS),
        num_warps=WARPS,
        enable_fp_fusion=True,
    )
    out = logits.new_empty(count, dtype=torch.int64)
    _best_of_rows_kernel[(count,)](best, out, splits, MOST_SPLITS, num_warps=1)
    return out


def greedy_argmax(logits: Tensor, rows: Tensor | None = None) -> Tensor:
    if not covers(logits):
        return reference.greedy_argmax(logits, rows)
    return _choose(logits, logits.shape[0] if rows is None else rows.shape[0], indices(rows))


def gumbel_argmax(
    logits: Tensor, temperature: Tensor, keys: Tensor, rows: Tensor | None = None, lowest: Tensor | None = None
) -> Tensor:
    if not covers(logits):
        return reference.gumbel_argmax(logits, temperature, keys, rows, lowest)
    bounds = None if lowest is None else reals(lowest)
    own_keys = keys.view(torch.int64).contiguous()
    return _choose(logits, keys.shape[0], indices(rows), reals(temperature), own_keys, bounds)


def choose_tokens(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, keys: Tensor
) -> Tensor:
    if not covers(logits):
        return reference.choose_tokens(logits, temperature, top_k, top_p, min_p, keys)
    divisors, filters = reals(temperature), (top_k.contiguous(), reals(top_p), reals(min_p))
    statistics = tile_statistics(logits, divisors, None, filters)
    lowest = find_lowest_kept(logits, divisors, filters, statistics, None)
    own_keys = keys.view(torch.int64).contiguous()
    return _choose(logits, logits.shape[0], None, divisors, own_keys, lowest, statistics)
