"""The launchers of the C++ kernels: those of `reference`, with the same signatures and results.

Each checks that the kernel covers its arguments and otherwise calls `reference`. Covered: tensors on the CPU in
float32, bfloat16 or float16, one dtype within a call, unit stride in the last dimension, caches of dense
blocks. The rest (other dtypes, mixed ones, transposed views) goes to `reference`.
"""

from collections.abc import Iterable

import torch

from .. import reference
from .library import AttentionArgs, Library, RotaryArgs, load

Tensor = torch.Tensor
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def available() -> bool:
    """Whether the C++ kernels can be used; builds them at the first call."""
    return isinstance(load(), Library)


def unavailable_reason() -> str:
    """Why the C++ kernels cannot be used, in one sentence without a full stop; empty when they can."""
    library = load()
    return library if isinstance(library, str) else ""


def _library_for(*tensors: Tensor) -> Library | None:
    """The library when it covers these tensors: one supported dtype, on the CPU, unit stride in the last dimension."""
    library = load()
    first = tensors[0]
    if not isinstance(library, Library) or first.dtype not in TYPES:
        return None
    for tensor in tensors:
        strided = tensor.shape[-1] > 1 and tensor.stride(-1) != 1
        if tensor.dtype is not first.dtype or tensor.device.type != "cpu" or strided:
            return None
    return library


def _dense_blocks(*caches: Tensor) -> bool:
    """Whether each block of the caches [num_blocks, Hkv, block_size, D] lies in one piece, wherever the next one is."""
    return all(cache.stride()[1:] == (cache.shape[2] * cache.shape[3], cache.shape[3], 1) for cache in caches)


def write_kv(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    library = _library_for(key, value, key_cache, value_cache)
    if library is None or not _dense_blocks(key_cache, value_cache):
        return reference.write_kv(key, value, key_cache, value_cache, slot_mapping)
    slots = slot_mapping.contiguous()
    itemsize = key.element_size()
    return library.write_kv(
        key.data_ptr(),
        key.stride(0) * itemsize,
        key.stride(1) * itemsize,
        value.data_ptr(),
        value.stride(0) * itemsize,
        value.stride(1) * itemsize,
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        key_cache.stride(0) * itemsize,
        value_cache.stride(0) * itemsize,
        slots.data_ptr(),
        key.shape[0],
        key_cache.shape[1],
        key_cache.shape[2],
        key_cache.shape[3] * itemsize,
        value_cache.shape[3] * itemsize,
        torch.get_num_threads(),
    )


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
    query, key = _norm_heads(query, query_norm, eps), _norm_heads(key, key_norm, eps)
    library = _library_for(query, key, value, key_cache, value_cache)
    if library is None or not _dense_blocks(key_cache, value_cache):
        return reference.rotary_write_kv(query, key, value, cos, sin, key_cache, value_cache, slot_mapping)
    cosine, sine = (x.to(torch.float32).contiguous() for x in (cos, sin))
    slots = slot_mapping.contiguous()
    out = query.new_empty(query.shape)
    library.rotary_write_kv(
        RotaryArgs(
            query.data_ptr(),
            key.data_ptr(),
            value.data_ptr(),
            *query.stride()[:2],
            *key.stride()[:2],
            *value.stride()[:2],
            cosine.data_ptr(),
            sine.data_ptr(),
            out.data_ptr(),
            key_cache.data_ptr(),
            value_cache.data_ptr(),
            key_cache.stride(0),
            value_cache.stride(0),
            slots.data_ptr(),
            query.shape[0],
            TYPES[query.dtype],
            query.shape[1],
            key_cache.shape[1],
            key_cache.shape[2],
            key_cache.shape[3],
            value_cache.shape[3],
            cosine.shape[1],
            torch.get_num_threads(),
        )
    )
    return out


def _norm_heads(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return x if weight is None else rms_norm(x.reshape(-1, x.shape[-1]), weight, eps).view(x.shape)


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
    library = _library_for(query, key_cache, value_cache)
    if library is None or not _dense_blocks(key_cache, value_cache):
        return reference.paged_attention(
            query,
            key_cache,
            value_cache,
            block_tables,
            context_lens,
            query_start,
            scale=scale,
            sliding_window=sliding_window,
            softcap=softcap,
            sinks=sinks,
        )
    tables, lens, starts = (x.to(torch.int32).contiguous() for x in (block_tables, context_lens, query_start))
    sink_logits = None if sinks is None else sinks.to(torch.float32).contiguous()
    num_kv_heads, block_size, key_dim = key_cache.shape[1:]
    out = query.new_empty(query.shape[0], query.shape[1], value_cache.shape[3])
    library.paged_attention(
        AttentionArgs(
            query.data_ptr(),
            query.stride(0),
            query.stride(1),
            key_cache.data_ptr(),
            value_cache.data_ptr(),
            key_cache.stride(0),
            value_cache.stride(0),
            tables.data_ptr(),
            tables.stride(0),
            lens.data_ptr(),
            starts.data_ptr(),
            None if sink_logits is None else sink_logits.data_ptr(),
            out.data_ptr(),
            TYPES[query.dtype],
            lens.shape[0],
            query.shape[1],
            num_kv_heads,
            block_size,
            key_dim,
            value_cache.shape[3],
            sliding_window or 0,
            scale,
            softcap or 0.0,
            torch.get_num_threads(),
        )
    )
    return out


def copy_blocks(pools: Iterable[Tensor], copies: Tensor) -> None:
    pairs = copies.to(torch.int64).contiguous()
    library = load()
    for pool in pools:
        if not isinstance(library, Library) or pool.device.type != "cpu" or not pool.is_contiguous():
            reference.copy_blocks([pool], pairs)
            continue
        layers, num_blocks = pool.shape[:2]
        block_bytes = pool[0, 0].numel() * pool.element_size()
        library.copy_blocks(
            pool.data_ptr(), layers, num_blocks, block_bytes, pairs.data_ptr(), pairs.shape[0], torch.get_num_threads()
        )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    library = _library_for(x, weight)
    if library is None:
        return reference.rms_norm(x, weight, eps)
    out = x.new_empty(x.shape)
    _norm(library, x, None, weight, None, out, eps)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    library = _library_for(x, residual, weight)
    if library is None:
        return reference.add_rms_norm(x, residual, weight, eps)
    out, new_residual = x.new_empty(x.shape), x.new_empty(x.shape)
    _norm(library, x, residual, weight, new_residual, out, eps)
    return out, new_residual


def _norm(
    library: Library, x: Tensor, residual: Tensor | None, weight: Tensor, total: Tensor | None, out: Tensor, eps: float
) -> None:
    library.rms_norm(
        TYPES[x.dtype],
        x.data_ptr(),
        x.stride(0),
        None if residual is None else residual.data_ptr(),
        0 if residual is None else residual.stride(0),
        weight.data_ptr(),
        None if total is None else total.data_ptr(),
        out.data_ptr(),
        x.shape[0],
        x.shape[1],
        eps,
        torch.get_num_threads(),
    )


def silu_mul(gate_up: Tensor) -> Tensor:
    library = _library_for(gate_up)
    return reference.silu_mul(gate_up) if library is None else _gate_mul(library, gate_up, False)


def gelu_mul(gate_up: Tensor) -> Tensor:
    library = _library_for(gate_up)
    return reference.gelu_mul(gate_up) if library is None else _gate_mul(library, gate_up, True)


def _gate_mul(library: Library, gate_up: Tensor, is_gelu: bool) -> Tensor:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    library.gate_mul(
        TYPES[gate_up.dtype],
        is_gelu,
        gate_up.data_ptr(),
        gate_up.stride(0),
        out.data_ptr(),
        rows,
        width,
        torch.get_num_threads(),
    )
    return out


def greedy_argmax(logits: Tensor, rows: Tensor | None = None) -> Tensor:
    library = _library_for(logits)
    if library is None:
        return reference.greedy_argmax(logits, rows)
    index = _index(rows)
    out = torch.empty(len(logits if index is None else index), dtype=torch.int64)
    library.greedy_argmax(*_matrix(logits, index), len(out), out.data_ptr(), torch.get_num_threads())
    return out


def gumbel_argmax(
    logits: Tensor, temperature: Tensor, keys: Tensor, rows: Tensor | None = None, lowest: Tensor | None = None
) -> Tensor:
    library = _library_for(logits)
    if library is None:
        return reference.gumbel_argmax(logits, temperature, keys, rows, lowest)
    index, row_temperature, row_keys = _index(rows), temperature.to(torch.float32).contiguous(), keys.contiguous()
    bounds = None if lowest is None else lowest.to(torch.float32).contiguous()
    out = torch.empty(len(keys), dtype=torch.int64)
    library.gumbel_argmax(
        *_matrix(logits, index),
        len(out),
        row_temperature.data_ptr(),
        row_keys.data_ptr(),
        None if bounds is None else bounds.data_ptr(),
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


def lowest_kept(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    rows: Tensor | None = None,
) -> Tensor:
    library = _library_for(logits)
    if library is None:
        return reference.lowest_kept(logits, temperature, top_k, top_p, min_p, rows)
    index, counts = _index(rows), top_k.to(torch.int64).contiguous()
    reals = [setting.to(torch.float32).contiguous() for setting in (temperature, top_p, min_p)]
    out = torch.empty(len(counts))
    library.lowest_kept(
        *_matrix(logits, index),
        len(out),
        reals[0].data_ptr(),
        counts.data_ptr(),
        reals[1].data_ptr(),
        reals[2].data_ptr(),
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


def top_tokens(
    logits: Tensor, temperature: Tensor, k: int, rows: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    library = _library_for(logits)
    if library is None:
        return reference.top_tokens(logits, temperature, k, rows)
    index, row_temperature = _index(rows), temperature.to(torch.float32).contiguous()
    count = len(row_temperature)
    values, ids, total = torch.empty(count, k), torch.empty(count, k, dtype=torch.int64), torch.empty(count)
    library.top_tokens(
        *_matrix(logits, index),
        count,
        row_temperature.data_ptr(),
        k,
        values.data_ptr(),
        ids.data_ptr(),
        total.data_ptr(),
        torch.get_num_threads(),
    )
    return values, ids, total


def _index(rows: Tensor | None) -> Tensor | None:
    return None if rows is None else rows.to(torch.int64).contiguous()


def _matrix(logits: Tensor, index: Tensor | None) -> tuple[int, int, int, int, int | None]:
    """The arguments that say where the logits are and which of their rows are meant."""
    pointer = None if index is None else index.data_ptr()
    return TYPES[logits.dtype], logits.data_ptr(), logits.stride(0), logits.shape[1], pointer


def gumbel_noise(keys: Tensor, token_ids: Tensor) -> Tensor:
    library = load()
    if not isinstance(library, Library) or keys.device.type != "cpu":
        return reference.gumbel_noise(keys, token_ids)
    row_keys, tokens = keys.contiguous(), token_ids.to(torch.int64).contiguous()
    out = torch.empty(tokens.shape, dtype=torch.float32)
    library.gumbel_noise(row_keys.data_ptr(), tokens.data_ptr(), out.data_ptr(), *tokens.shape, torch.get_num_threads())
    return out
