"""Attention of any number of queries to a sequence: prompts, chunks of them, and short ones side by side.

FlashAttention-2 (Dao, 2023) over the blocks of each sequence's table. A program takes consecutive queries of one
sequence and the query heads of one key/value head, which together are the rows of its matrix products. Which ones is
found on the device, so the number of programs depends on shapes alone: the queries of sequence s belong to the programs
from query_start[s] // queries + s on, as many as it needs, and of the following few some have nothing to do.
"""

import triton
import triton.language as tl

from .attention_pieces import load_blocks, load_rows, load_tile, normalized, scaled, with_sinks

UNSPECIALIZED = ["table_stride", "num_sequences"]
UNALIGNED = ["block_tables", "context_lens", "query_start", "sinks"]


@triton.jit
def find_queries(program, query_start, num_sequences, QUERIES: tl.constexpr):
    """(sequence, its first token, how many it has, the first query of this program)."""
    low = 0
    high = num_sequences - 1
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(query_start + middle).to(tl.int32) // QUERIES + middle <= program:
            low = middle
        else:
            high = middle - 1
    begin = tl.load(query_start + low).to(tl.int32)
    count = tl.load(query_start + low + 1).to(tl.int32) - begin
    return low, begin, count, (program - begin // QUERIES - low) * QUERIES


@triton.jit
def attend(
    acc,
    peak,
    total,
    q,
    keys,
    values,
    table,
    first,
    stop,
    positions,
    scale,
    KEY_STRIDE: tl.constexpr,
    VALUE_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The softmax's sums with the keys from `first`, a multiple of TILE, to `stop`. Unless MASKED, stop is a multiple
    of TILE too and all queries see all of them."""
    column = tl.arange(0, TILE)
    blocks = load_blocks(table, first, column, stop, BLOCK_SIZE, TILE, True)
    for start in range(first, stop, TILE):
        position = start + column
        valid = position < stop
        k = load_tile(keys, blocks, position, column, valid, KEY_STRIDE, BLOCK_SIZE, KEY_DIM, KEY_PADDED, TILE, MASKED)
        v = load_tile(
            values, blocks, position, column, valid, VALUE_STRIDE, BLOCK_SIZE, VALUE_DIM, VALUE_PADDED, TILE, MASKED
        )
        scores = scaled(tl.dot(q, tl.trans(k), input_precision="ieee"), scale, SOFTCAP)
        if MASKED:
            visible = position[None, :] <= positions[:, None]
            if WINDOW > 0:
                visible = visible & (position[None, :] > positions[:, None] - WINDOW)
            scores = tl.where(visible, scores, float("-inf"))
        top = tl.maximum(peak, tl.max(scores, 1))
        base = top
        if WINDOW > 0:
            base = tl.where(top == float("-inf"), 0.0, top)  # a query that sees none of the keys so far
        shrink = tl.exp2(peak - base)
        weights = tl.exp2(scores - base[:, None])
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        peak = top
        blocks = load_blocks(table, start + TILE, column, stop, BLOCK_SIZE, TILE, True)
    return acc, peak, total


@triton.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=UNALIGNED)
def prefill_kernel(
    out,
    query,
    key_cache,
    value_cache,
    block_tables,
    context_lens,
    query_start,
    sinks,
    token_stride,
    head_stride,
    table_stride,
    num_sequences,
    scale,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEY_STRIDE: tl.constexpr,
    VALUE_STRIDE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Skips sequences of one query. Grid: ((T // QUERIES + sequences) * KV_HEADS * the parts of a group of more than
    ROWS heads,)."""
    PARTS: tl.constexpr = (GROUP + ROWS - 1) // ROWS
    kv_head = tl.program_id(0) // PARTS % KV_HEADS
    program = tl.program_id(0) // (PARTS * KV_HEADS)
    sequence, begin, count, first = find_queries(program, query_start, num_sequences, QUERIES)
    if (first >= count) | (count == 1):
        return
    before = tl.load(context_lens + sequence).to(tl.int32) - count
    rows = tl.arange(0, ROWS)
    if PARTS == 1:
        queries, members = first + rows // GROUP, rows % GROUP
        used = (rows < QUERIES * GROUP) & (queries < count)
    else:
        queries, members = first + rows * 0, tl.program_id(0) % PARTS * ROWS + rows
        used = members < GROUP
    heads = kv_head * GROUP + members
    tokens = (begin + queries).to(tl.int64)
    q = load_rows(query + tokens * token_stride + heads * head_stride, used, KEY_DIM, KEY_PADDED)
    table = block_tables + sequence.to(tl.int64) * table_stride
    keys, values = key_cache + kv_head * (BLOCK_SIZE * KEY_DIM), value_cache + kv_head * (BLOCK_SIZE * VALUE_DIM)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, VALUE_PADDED], tl.float32)

    positions = before + queries
    stop = before + tl.minimum(first + QUERIES, count)
    # Tiles that all queries see in full need no mask; behind a sliding window they are too few to tell apart.
    if WINDOW > 0:
        masked_from = tl.maximum(before + first - (WINDOW - 1), 0) // TILE * TILE
    else:
        masked_from = (before + first + 1) // TILE * TILE
        acc, peak, total = attend(
            acc, peak, total, q, keys, values, table, 0, masked_from, positions, scale,
            KEY_STRIDE, VALUE_STRIDE, BLOCK_SIZE, KEY_DIM, VALUE_DIM, KEY_PADDED, VALUE_PADDED, WINDOW, SOFTCAP, TILE,
            False,
        )  # fmt: skip
    acc, peak, total = attend(
        acc, peak, total, q, keys, values, table, masked_from, stop, positions, scale,
        KEY_STRIDE, VALUE_STRIDE, BLOCK_SIZE, KEY_DIM, VALUE_DIM, KEY_PADDED, VALUE_PADDED, WINDOW, SOFTCAP, TILE,
        True,
    )  # fmt: skip
    if sinks is not None:
        acc, total = with_sinks(acc, peak, total, sinks, heads, used)
    columns = tl.arange(0, VALUE_PADDED)
    place = tokens * (KV_HEADS * GROUP) + heads
    keep = used[:, None] & (columns < VALUE_DIM)
    tl.store(out + place[:, None] * VALUE_DIM + columns, normalized(acc, total), mask=keep)
