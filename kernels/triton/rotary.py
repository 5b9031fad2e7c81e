"""New keys and values into the paged cache, and before that the norm and the rotation of queries and keys."""

import torch
import triton
import triton.language as tl

from .. import reference
from . import launch, rows

Tensor = torch.Tensor

# A program takes as many heads of one token as make tiles of this many elements: sixteen bytes for each thread of two
# warps in half precision.
TILE = 512
WARPS = 2


@triton.jit
def _copy_heads(source, head_stride, target, target_stride, head, HEADS: tl.constexpr, DIM: tl.constexpr):
    """Rows source + head * head_stride -> target + head * target_stride, of DIM elements."""
    column = tl.arange(0, triton.next_power_of_2(DIM))[None, :]
    inside = (head < HEADS)[:, None] & (column < DIM)
    values = tl.load(source + head[:, None].to(tl.int64) * head_stride + column, mask=inside)
    tl.store(target + head[:, None] * target_stride + column, values, mask=inside)


@triton.jit
def _normed(x, weight, column, inside, scale):
    """x times scale and weight, rounded as the result of a norm is."""
    weights = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    return (weights * (x * scale)).to(weight.dtype.element_ty).to(tl.float32)


@triton.jit
def _rotate_heads(
    source,
    head_stride,
    target,
    target_stride,
    head,
    norm,
    eps,
    cos,
    sin,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
):
    """`_copy_heads` of heads that are normed, if there is a norm, and rotated on the way."""
    HALF: tl.constexpr = ROTARY_DIM // 2
    PASSED: tl.constexpr = DIM - ROTARY_DIM
    column = tl.arange(0, triton.next_power_of_2(HALF))[None, :]
    turns = column < HALF
    inside = (head < HEADS)[:, None] & turns
    heads = source + head[:, None].to(tl.int64) * head_stride
    low = tl.load(heads + column, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(heads + HALF + column, mask=inside, other=0.0).to(tl.float32)
    if PASSED > 0:
        rest = tl.arange(0, triton.next_power_of_2(PASSED))[None, :]
        passes = rest < PASSED
        left = tl.load(heads + ROTARY_DIM + rest, mask=(head < HEADS)[:, None] & passes, other=0.0).to(tl.float32)
    if norm is not None:
        squares = tl.sum(low * low + high * high, 1)
        if PASSED > 0:
            squares += tl.sum(left * left, 1)
        scale = tl.rsqrt(squares / DIM + eps)[:, None]
        low = _normed(low, norm, column, turns, scale)
        high = _normed(high, norm + HALF, column, turns, scale)
        if PASSED > 0:
            left = _normed(left, norm + ROTARY_DIM, rest, passes, scale)
    targets = target + head[:, None] * target_stride
    cos_low = tl.load(cos + column, mask=turns, other=0.0).to(tl.float32)
    sin_low = tl.load(sin + column, mask=turns, other=0.0).to(tl.float32)
    tl.store(targets + column, (low * cos_low - high * sin_low).to(target.dtype.element_ty), mask=inside)
    cos_high = tl.load(cos + HALF + column, mask=turns, other=0.0).to(tl.float32)
    sin_high = tl.load(sin + HALF + column, mask=turns, other=0.0).to(tl.float32)
    tl.store(targets + HALF + column, (high * cos_high + low * sin_high).to(target.dtype.element_ty), mask=inside)
    if PASSED > 0:
        stored = left.to(target.dtype.element_ty)
        tl.store(targets + ROTARY_DIM + rest, stored, mask=(head < HEADS)[:, None] & passes)


@triton.jit
def _rotary_write_kv_kernel(
    query,
    key,
    value,
    cos,
    sin,
    key_cache,
    value_cache,
    slots,
    query_norm,
    key_norm,
    out,
    query_token_stride,
    query_head_stride,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    cos_stride,
    sin_stride,
    key_block_stride,
    value_block_stride,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    TILE_HEADS: tl.constexpr,
):
    """One token's tile of heads of its query, of its key, or of its value, in this order along the second axis."""
    QUERY_TILES: tl.constexpr = triton.cdiv(HEADS, TILE_HEADS)
    KEY_TILES: tl.constexpr = triton.cdiv(KV_HEADS, TILE_HEADS)
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + token).to(tl.int64)
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    cos_row, sin_row = cos + token * cos_stride, sin + token * sin_stride
    if tile < QUERY_TILES:
        head = tile * TILE_HEADS + tl.arange(0, TILE_HEADS)
        source, target = query + token * query_token_stride, out + token * HEADS * DIM
        _rotate_heads(
            *(source, query_head_stride, target, DIM, head, query_norm, eps, cos_row, sin_row),
            *(HEADS, DIM, ROTARY_DIM),
        )
    elif slot >= 0:
        if tile < QUERY_TILES + KEY_TILES:
            head = (tile - QUERY_TILES) * TILE_HEADS + tl.arange(0, TILE_HEADS)
            source = key + token * key_token_stride
            target = key_cache + block * key_block_stride + offset * DIM
            _rotate_heads(
                *(source, key_head_stride, target, BLOCK_SIZE * DIM, head, key_norm, eps, cos_row, sin_row),
                *(KV_HEADS, DIM, ROTARY_DIM),
            )
        else:
            head = (tile - QUERY_TILES - KEY_TILES) * TILE_HEADS + tl.arange(0, TILE_HEADS)
            source = value + token * value_token_stride
            target = value_cache + block * value_block_stride + offset * VALUE_DIM
            _copy_heads(source, value_head_stride, target, BLOCK_SIZE * VALUE_DIM, head, KV_HEADS, VALUE_DIM)


def rotary_write_kv(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    norms = [norm for norm in (query_norm, key_norm) if norm is not None]
    if not _covers(query, key, value, key_cache, value_cache, *norms) or not launch.rows_are_dense(cos, sin):
        return reference.rotary_write_kv(
            *(query, key, value, cos, sin, key_cache, value_cache, slot_mapping),
            query_norm=query_norm,
            key_norm=key_norm,
            eps=eps,
        )
    tokens, heads, dim = query.shape
    kv_heads, block_size, value_dim = value_cache.shape[1:]
    rotary_dim = cos.shape[1]
    tile_heads = _tile_heads(max(rotary_dim, dim - rotary_dim, value_dim) // 2)
    out = query.new_empty(query.shape)
    tiles = triton.cdiv(heads, tile_heads) + 2 * triton.cdiv(kv_heads, tile_heads)
    _rotary_write_kv_kernel[(tokens, tiles)](
        *(query, key, value, cos, sin, key_cache, value_cache, slot_mapping.contiguous(), query_norm, key_norm, out),
        *(*query.stride()[:2], *key.stride()[:2], *value.stride()[:2]),
        *(cos.stride(0), sin.stride(0), key_cache.stride(0), value_cache.stride(0), eps),
        *(heads, kv_heads, block_size, dim, value_dim, rotary_dim, tile_heads),
        num_warps=WARPS,
        enable_fp_fusion=True,
    )
    return out


@triton.jit
def _write_kv_kernel(
    key,
    value,
    key_cache,
    value_cache,
    slots,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    key_block_stride,
    value_block_stride,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TILE_HEADS: tl.constexpr,
):
    """One token's tile of heads of its key and value."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * TILE_HEADS + tl.arange(0, TILE_HEADS)
    slot = tl.load(slots + token).to(tl.int64)
    if slot >= 0:
        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        target = key_cache + block * key_block_stride + offset * DIM
        _copy_heads(key + token * key_token_stride, key_head_stride, target, BLOCK_SIZE * DIM, head, KV_HEADS, DIM)
        source = value + token * value_token_stride
        target = value_cache + block * value_block_stride + offset * VALUE_DIM
        _copy_heads(source, value_head_stride, target, BLOCK_SIZE * VALUE_DIM, head, KV_HEADS, VALUE_DIM)


def write_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    if not _covers(key, value, key_cache, value_cache):
        return reference.write_kv(key, value, key_cache, value_cache, slot_mapping)
    kv_heads, block_size, dim = key_cache.shape[1:]
    value_dim = value_cache.shape[3]
    tile_heads = _tile_heads(max(dim, value_dim))
    _write_kv_kernel[(key.shape[0], triton.cdiv(kv_heads, tile_heads))](
        *(key, value, key_cache, value_cache, slot_mapping.contiguous(), *key.stride()[:2], *value.stride()[:2]),
        *(key_cache.stride(0), value_cache.stride(0), kv_heads, block_size, dim, value_dim, tile_heads),
        num_warps=WARPS,
    )
    return None


def _tile_heads(columns: int) -> int:
    return max(1, TILE // triton.next_power_of_2(columns))


def _covers(*tensors: Tensor) -> bool:
    """Whether the kernels cover the states, caches and norms: one dtype, and blocks in one piece."""
    dense_blocks = all(
        tensor.stride()[1:] == (tensor.shape[2] * tensor.shape[3], tensor.shape[3], 1)
        for tensor in tensors
        if tensor.dim() == 4
    )
    return dense_blocks and rows.covers(*tensors)
