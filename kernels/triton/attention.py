"""Causal attention over the blocks of a KV cache: which kernels run, and with what.

Where every sequence may have one query (T = S, a decoding step) the decode kernel takes all of them. In any other
step it takes the sequences of one query, and the prefill kernel the rest. Both decide by shapes alone, so a step is
one or two launches, three if contexts are split, whatever the lengths; they can be captured in a CUDA graph.
"""

import functools
from dataclasses import dataclass

import torch
import triton

from .. import reference
from . import launch
from .attention_decode import decode_kernel, merge_kernel
from .attention_prefill import prefill_kernel
from .configs import DecodeConfig, decode_config, prefill_config

Tensor = torch.Tensor

LARGEST_HEAD = 256
# Rows of the decode kernel's matrix products: what tensor cores take at least, and what registers hold at most.
FEWEST_ROWS, MOST_ROWS = 16, 64
MERGED_AT_ONCE = 16  # splits of a context whose results are read at a time
INTEGERS = (torch.int32, torch.int64)


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    query_start: Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """As in `reference`. In a decoding step a query of no sequence, and one that sees no key, gives zeros; in other
    steps the rows of queries of no sequence are left as they are."""
    if query.shape[1] * query.stride(1) >= 1 << 31:  # the kernels offset heads in 32 bits: in 64 they spill registers
        query = query.contiguous()
    tensors = (query, key_cache, value_cache, block_tables, context_lens, query_start, sinks)
    if not _is_covered(*tensors):
        return reference.paged_attention(
            *tensors[:-1], scale=scale, sliding_window=sliding_window, softcap=softcap, sinks=sinks
        )
    num_tokens, num_heads, key_dim = query.shape
    num_sequences = context_lens.shape[0]
    _, num_kv_heads, block_size, value_dim = value_cache.shape
    out = query.new_empty(num_tokens, num_heads, value_dim)
    if num_tokens == 0 or num_sequences == 0:
        return out
    shape = layer_shape(
        launch.has_wgmma(query.device),
        query.element_size(),
        num_heads,
        num_kv_heads,
        block_size,
        key_dim,
        value_dim,
        key_cache.stride(0),
        value_cache.stride(0),
        sliding_window or 0,
        softcap or 0.0,
    )
    mixed = num_tokens != num_sequences
    _decode(shape, out, tensors, scale, mixed)
    if mixed:
        _prefill(shape, out, tensors, scale)
    return out


def _is_covered(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    query_start: Tensor,
    sinks: Tensor | None,
) -> bool:
    indices = (block_tables, context_lens, query_start)
    others = indices if sinks is None else (*indices, sinks)
    return (
        query.dtype in launch.DTYPES
        and query.dtype == key_cache.dtype == value_cache.dtype
        and key_cache.shape[3] <= LARGEST_HEAD
        and value_cache.shape[3] <= LARGEST_HEAD
        and all(index.dtype in INTEGERS for index in indices)
        and launch.on_device(query, key_cache, value_cache, *others)
        and launch.rows_are_dense(query, *others)
        and launch.blocks_are_dense(key_cache, value_cache)
    )


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What stays the same from step to step for a layer.

    constants: compile-time arguments and launch options of the two kernels that read the cache. decode, prefill, merge:
    those of one kernel. parts: programs that share the queries of one key/value head.
    """

    num_kv_heads: int
    config: DecodeConfig
    constants: dict[str, int | float]
    decode: dict[str, int]
    decode_parts: int
    merge: dict[str, int]
    prefill: dict[str, int]
    prefill_parts: int


@functools.lru_cache(maxsize=256)
def layer_shape(
    has_wgmma: bool,
    itemsize: int,
    num_heads: int,
    num_kv_heads: int,
    block_size: int,
    key_dim: int,
    value_dim: int,
    key_stride: int,
    value_stride: int,
    window: int,
    softcap: float,
) -> LayerShape:
    group = num_heads // num_kv_heads
    key_padded, value_padded = (max(16, triton.next_power_of_2(dim)) for dim in (key_dim, value_dim))
    decode = decode_config(itemsize, max(key_padded, value_padded))
    prefill = prefill_config(itemsize, max(key_padded, value_padded), has_wgmma)
    rows = min(MOST_ROWS, max(FEWEST_ROWS, triton.next_power_of_2(group)))
    values = {"VALUE_DIM": value_dim, "VALUE_PADDED": value_padded, "WINDOW": window}
    bounds = {"TILE": decode.tile, "LEAST": decode.least_tiles}
    return LayerShape(
        num_kv_heads=num_kv_heads,
        config=decode,
        constants=values
        | {
            "GROUP": group,
            "KV_HEADS": num_kv_heads,
            "KEY_DIM": key_dim,
            "KEY_PADDED": key_padded,
            "BLOCK_SIZE": block_size,
            "KEY_STRIDE": key_stride,
            "VALUE_STRIDE": value_stride,
            "SOFTCAP": softcap,
            "enable_fp_fusion": True,
        },
        decode=bounds | {"ROWS": rows, "num_warps": decode.num_warps, "num_stages": decode.num_stages},
        decode_parts=-(-group // rows),
        merge=values | bounds | {"HEADS": num_heads, "AT_ONCE": MERGED_AT_ONCE, "enable_fp_fusion": True},
        prefill={
            "ROWS": prefill.rows,
            "TILE": prefill.tile,
            "QUERIES": max(1, prefill.rows // group),
            "num_warps": prefill.num_warps,
            "num_stages": prefill.num_stages,
        },
        prefill_parts=-(-group // prefill.rows),
    )


def _decode(shape: LayerShape, out: Tensor, tensors: tuple[Tensor, ...], scale: float, mixed: bool) -> None:
    query, key_cache, value_cache, block_tables, context_lens, query_start, sinks = tensors
    num_sequences, num_heads = context_lens.shape[0], query.shape[1]
    programs = num_sequences * shape.num_kv_heads * shape.decode_parts
    wanted = shape.config.programs * launch.multiprocessors(query.device)
    longest = block_tables.shape[1] * key_cache.shape[2]
    least = shape.config.least_tiles * shape.config.tile
    splits = max(1, min(-(-wanted // programs), longest // least))
    partial = None
    if splits > 1:
        results = num_sequences * num_heads * splits
        partial = torch.empty(results * (out.shape[2] + 1), dtype=torch.float32, device=query.device)
    decode_kernel[(programs, splits)](
        out,
        partial,
        query,
        key_cache,
        value_cache,
        block_tables,
        context_lens,
        query_start,
        sinks,
        query.stride(0),
        query.stride(1),
        block_tables.stride(0),
        num_sequences,
        splits,
        scale,
        SPLIT=splits > 1,
        MIXED=mixed,
        **shape.constants,
        **shape.decode,
    )
    if splits > 1:
        merge_kernel[(num_sequences * num_heads,)](
            out, partial, context_lens, query_start, sinks, num_sequences, splits, MIXED=mixed, **shape.merge
        )


def _prefill(shape: LayerShape, out: Tensor, tensors: tuple[Tensor, ...], scale: float) -> None:
    query, key_cache, value_cache, block_tables, context_lens, query_start, sinks = tensors
    num_sequences = context_lens.shape[0]
    programs = query.shape[0] // shape.prefill["QUERIES"] + num_sequences
    prefill_kernel[(programs * shape.num_kv_heads * shape.prefill_parts,)](
        out,
        query,
        key_cache,
        value_cache,
        block_tables,
        context_lens,
        query_start,
        sinks,
        query.stride(0),
        query.stride(1),
        block_tables.stride(0),
        num_sequences,
        scale,
        **shape.constants,
        **shape.prefill,
    )
