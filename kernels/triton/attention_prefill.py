"""Attention of any number of queries to a sequence: prompts, chunks of them, and short ones side by side.

FlashAttention-2 (Dao, 2023) over the blocks of each sequence's table. A program takes consecutive queries of one
sequence and the query heads of one key/value head, which together are the rows of its matrix products. Which ones is
found on the device, so the number of programs depends on shapes alone: the queries of sequence s belong to the programs
from query_start[s] // queries + s on, as many as it needs, and of the following few some have nothing to do.
"""

import triton
import triton.language as tl

from .attention_pieces import load_blocks, load_rows, load_tile, normalized, scaled, with_sinks

SEARCHED_AT_ONCE = tl.constexpr(512)  # sequences
UNSPECIALIZED = ["table_stride", "num_sequences"]
UNALIGNED = ["block_tables", "context_lens", "query_start", "sinks"]


@triton.jit
def find_sequence(query_start, num_sequences, program, QUERIES: tl.constexpr):
    """The sequence that a program works for. Counts those whose first program is no later: a binary search, where each
    load waits for the one before, takes too long when most programs have nothing else to do."""
    count = 0
    for begin in range(0, num_sequences, SEARCHED_AT_ONCE):
        sequence = begin + tl.arange(0, SEARCHED_AT_ONCE)
        known = sequence < num_sequences
        start = tl.load(query_start + sequence, mask=known, other=0).to(tl.int32)
        count += tl.sum((known & (start // QUERIES + sequence <= program)).to(tl.int32), 0)
    return count - 1


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
    blocks = load_blocks(table, first, column, stop, BLOCK_SIZE, TILE)
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
        blocks = load_blocks(table, start + TILE, column, stop, BLOCK_SIZE, TILE)
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
    # Last ones first: new prompts are at the end of a batch, and the end of a prompt sees the most keys.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = program // PARTS % KV_HEADS
    part = program % PARTS
    program = program // (PARTS * KV_HEADS)
    sequence = find_sequence(query_start, num_sequences, program, QUERIES)
    begin = tl.load(query_start + sequence).to(tl.int32)
    count = tl.load(query_start + sequence + 1).to(tl.int32) - begin
    first = (program - begin // QUERIES - sequence) * QUERIES
    if (first >= count) | (count == 1):
        return
    before = tl.load(context_lens + sequence).to(tl.int32) - count
    rows = tl.arange(0, ROWS)
    if PARTS == 1:
        queries, members = first + rows // GROUP, rows % GROUP
        used = (rows < QUERIES * GROUP) & (queries < count)
    else:
        queries, members = first + rows * 0, part * ROWS + rows
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
