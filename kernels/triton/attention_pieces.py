"""What the attention kernels share, each a few lines of device code.

Scores are logits times log2(e), so that a power of two is enough for the softmax (Dao, 2023: the running maximum of
FlashAttention-2). `seen` is how many keys a query sees from the start of its sequence: its position plus one.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def find_sequence(query_start, num_sequences, token):
    """The sequence of a token: the last one that starts no later."""
    low = 0
    high = num_sequences - 1
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(query_start + middle) <= token:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def locate(index, query_start, context_lens, num_sequences, MIXED: tl.constexpr):
    """(token, sequence, seen) of the query that belongs to `index`: if MIXED the only one of that sequence, with -1
    seen if it has none or several; else that token, with 0 seen if it is of no sequence."""
    begin, end = tl.load(query_start + index).to(tl.int32), tl.load(query_start + index + 1).to(tl.int32)
    context = tl.load(context_lens + index).to(tl.int32)
    token, sequence, seen = index, index, tl.maximum(context, 0)
    if MIXED:
        token = begin
        seen = tl.where(end - begin == 1, seen, -1)
    else:
        if (begin != index) | (end != index + 1):  # a sequence with no query or several comes before
            sequence = find_sequence(query_start, num_sequences, token)
            end = tl.load(query_start + sequence + 1).to(tl.int32)
            context = tl.load(context_lens + sequence).to(tl.int32)
            seen = tl.where(token < end, tl.maximum(context - (end - token) + 1, 0), 0)
    return token, sequence, seen


@triton.jit
def load_blocks(table, start, column, stop, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """The blocks of the keys at start + column, as far as these are before `stop`; start is a multiple of TILE."""
    if TILE % BLOCK_SIZE == 0:
        entries = table + (start // BLOCK_SIZE) + column // BLOCK_SIZE
    else:
        entries = table + (start + column) // BLOCK_SIZE
    return tl.load(entries, mask=start + column < stop, other=0)


@triton.jit
def load_tile(
    head,
    blocks,
    position,
    column,
    valid,
    BLOCK_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """[TILE, PADDED] keys or values of a head, which starts at `head` in block 0; zeros past DIM and, if MASKED, where
    they are not valid, for those slots may hold anything."""
    # The same for every tile where tiles are of whole blocks.
    offset = (column if TILE % BLOCK_SIZE == 0 else position) % BLOCK_SIZE
    rows = head + (blocks.to(tl.int64) * BLOCK_STRIDE + offset * DIM)
    if MASKED:
        return load_rows(rows, valid, DIM, PADDED)
    columns = tl.arange(0, PADDED)[None, :]
    if DIM == PADDED:
        return tl.load(rows[:, None] + columns)
    return tl.load(rows[:, None] + columns, mask=columns < DIM, other=0.0)


@triton.jit
def load_rows(rows, valid, DIM: tl.constexpr, PADDED: tl.constexpr):
    """[N, PADDED] from N pointers to dense rows; zeros past DIM and where a row is not valid, which is not read."""
    columns = tl.arange(0, PADDED)
    if DIM == PADDED:
        return tl.load(rows[:, None] + columns, mask=valid[:, None], other=0.0)
    return tl.load(rows[:, None] + columns, mask=valid[:, None] & (columns < DIM), other=0.0)


@triton.jit
def scaled(scores, scale, SOFTCAP: tl.constexpr):
    """Dot products to scores: times scale, then softcap * tanh(score / softcap) if SOFTCAP is not zero."""
    if SOFTCAP > 0:
        # tanh(x) = 1 - 2 / (exp(2x) + 1), right also where the exponential overflows or vanishes.
        power = tl.exp2(scores * (scale * (2.0 / SOFTCAP * LOG2_E)))
        return (1.0 - 2.0 / (power + 1.0)) * (SOFTCAP * LOG2_E)
    return scores * (scale * LOG2_E)


@triton.jit
def with_sinks(acc, peak, total, sinks, heads, used):
    """The softmax's sums when the logits of the heads' sinks join the denominator."""
    sink = tl.load(sinks + heads, mask=used, other=0.0).to(tl.float32) * LOG2_E
    top = tl.maximum(peak, sink)
    shrink = tl.exp2(peak - top)
    return acc * shrink[:, None], total * shrink + tl.exp2(sink - top)


@triton.jit
def normalized(acc, total):
    """acc [N, D] over total [N], or zeros where a query saw no key at all; NaN stays."""
    return acc * (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]
