"""Attention of one query to a sequence: flash decoding over the blocks of its table.

The query heads that share a key/value head are the rows of one matrix product, so that keys and values are read once
for all of them; tiles of keys, gathered block by block, are independent of the block size. Where sequences times
key/value heads are too few to fill the device, each context is split over several programs, whose partial softmaxes a
second kernel merges ("Flash-Decoding", Dao et al., 2023). The number of programs depends on shapes alone: lengths are
read on the device, and splits past the end of a context return at once.
"""

import triton
import triton.language as tl

from .attention_pieces import load_blocks, load_rows, load_tile, locate, normalized, scaled, with_sinks

UNSPECIALIZED = ["table_stride", "num_sequences", "splits"]
UNALIGNED = ["block_tables", "context_lens", "query_start", "sinks"]


@triton.jit
def split_bounds(seen, splits, WINDOW: tl.constexpr, TILE: tl.constexpr, LEAST: tl.constexpr):
    """(first tile, end of the tiles, tiles in a split) of a context."""
    first = 0
    if WINDOW > 0:
        first = tl.maximum(seen - WINDOW, 0) // TILE
    end = tl.cdiv(seen, TILE)
    return first, end, tl.maximum(tl.cdiv(end - first, splits), LEAST)


@triton.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=UNALIGNED)
def decode_kernel(
    out,
    partial,
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
    splits,
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
    SPLIT: tl.constexpr,
    MIXED: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    LEAST: tl.constexpr,
):
    """Grid: (sequences * KV_HEADS * the parts of a group of more than ROWS heads, splits)."""
    PARTS: tl.constexpr = (GROUP + ROWS - 1) // ROWS
    split = tl.program_id(1)
    kv_head = tl.program_id(0) // PARTS % KV_HEADS
    index = tl.program_id(0) // (PARTS * KV_HEADS)
    token, sequence, seen = locate(index, query_start, context_lens, num_sequences, MIXED)
    if seen < 0:
        return
    first, end, size = split_bounds(seen, splits, WINDOW, TILE, LEAST)
    if SPLIT:
        first += split * size
        if first >= end:
            return
        end = first + size
    stop = tl.minimum(end * TILE, seen)

    rows = tl.program_id(0) % PARTS * ROWS + tl.arange(0, ROWS)
    used, heads = rows < GROUP, kv_head * GROUP + rows
    q = load_rows(query + token.to(tl.int64) * token_stride + heads * head_stride, used, KEY_DIM, KEY_PADDED)
    table = block_tables + sequence.to(tl.int64) * table_stride
    keys, values = key_cache + kv_head * (BLOCK_SIZE * KEY_DIM), value_cache + kv_head * (BLOCK_SIZE * VALUE_DIM)
    column = tl.arange(0, TILE)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    mass = tl.zeros([ROWS, TILE], tl.float32)  # summed over the tile only at the end: a sum in the loop costs a barrier
    acc = tl.zeros([ROWS, VALUE_PADDED], tl.float32)
    # The blocks of the next tile are read before they are needed, so that only one load waits for another.
    blocks = load_blocks(table, first * TILE, column, stop, BLOCK_SIZE, TILE)
    for start in range(first * TILE, stop, TILE):
        position = start + column
        valid = position < stop
        k = load_tile(keys, blocks, position, column, valid, KEY_STRIDE, BLOCK_SIZE, KEY_DIM, KEY_PADDED, TILE, True)
        v = load_tile(
            values, blocks, position, column, valid, VALUE_STRIDE, BLOCK_SIZE, VALUE_DIM, VALUE_PADDED, TILE, True
        )
        scores = scaled(tl.dot(q, tl.trans(k), input_precision="ieee"), scale, SOFTCAP)
        if WINDOW > 0:
            valid = valid & (position >= seen - WINDOW)
        scores = tl.where(valid, scores, float("-inf"))  # never all of a tile: each holds a key that the query sees
        top = tl.maximum(peak, tl.max(scores, 1))
        shrink = tl.exp2(peak - top)
        weights = tl.exp2(scores - top[:, None])
        mass = mass * shrink[:, None] + weights
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        peak = top
        blocks = load_blocks(table, start + TILE, column, stop, BLOCK_SIZE, TILE)

    total = tl.sum(mass, 1)
    columns = tl.arange(0, VALUE_PADDED)
    keep = used[:, None] & (columns < VALUE_DIM)
    if SPLIT:
        place = (index * (KV_HEADS * GROUP) + heads) * splits + split
        tl.store(partial + place[:, None] * VALUE_DIM + columns, normalized(acc, total), mask=keep)
        sums = partial + num_sequences * splits * (KV_HEADS * GROUP * VALUE_DIM)
        tl.store(sums + place, peak + tl.log2(total), mask=used)
    else:
        if sinks is not None:
            acc, total = with_sinks(acc, peak, total, sinks, heads, used)
        place = token.to(tl.int64) * (KV_HEADS * GROUP) + heads
        tl.store(out + place[:, None] * VALUE_DIM + columns, normalized(acc, total), mask=keep)


@triton.jit(do_not_specialize=UNSPECIALIZED, do_not_specialize_on_alignment=UNALIGNED)
def merge_kernel(
    out,
    partial,
    context_lens,
    query_start,
    sinks,
    num_sequences,
    splits,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    WINDOW: tl.constexpr,
    MIXED: tl.constexpr,
    TILE: tl.constexpr,
    LEAST: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """One head of one query from the partial results of its splits. Grid: (sequences * HEADS,)."""
    head = tl.program_id(0) % HEADS
    index = tl.program_id(0) // HEADS
    token, _, seen = locate(index, query_start, context_lens, num_sequences, MIXED)
    if seen < 0:
        return
    first, end, size = split_bounds(seen, splits, WINDOW, TILE, LEAST)
    count = tl.cdiv(end - first, size)
    columns = tl.arange(0, VALUE_PADDED)
    sums = partial + num_sequences * splits * (HEADS * VALUE_DIM)
    peak = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, VALUE_PADDED], tl.float32)
    for start in range(0, count, AT_ONCE):
        split = start + tl.arange(0, AT_ONCE)
        valid = split < count
        place = tl.program_id(0) * splits + split
        part = load_rows(partial + place * VALUE_DIM, valid, VALUE_DIM, VALUE_PADDED)
        scores = tl.load(sums + place, mask=valid, other=float("-inf"))
        top = tl.maximum(peak, tl.max(scores, 0))
        shrink = tl.exp2(peak - top)
        weights = tl.exp2(scores - top)
        total = total * shrink + tl.sum(weights, 0)
        acc = acc * shrink[:, None] + tl.sum(weights[:, None] * part, 0)[None, :]
        peak = top
    if sinks is not None:
        acc, total = with_sinks(acc, peak, total, sinks, head + tl.zeros([1], tl.int32), total == total)
    out += (token.to(tl.int64) * HEADS + head) * VALUE_DIM
    tl.store(out + columns[None, :], normalized(acc, total), mask=columns[None, :] < VALUE_DIM)
