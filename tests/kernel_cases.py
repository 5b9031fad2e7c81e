"""Random paged attention problems for the kernels' tests."""

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch


@dataclass(frozen=True)
class PagedCase:
    """Packed queries and a cache whose unused slots hold NaN, with the same keys and values kept dense.

    lengths: (queries, context) of each sequence. keys, values: for each sequence [context, Hkv, D].
    """

    lengths: Sequence[tuple[int, int]]
    query: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_tables: torch.Tensor
    context_lens: torch.Tensor
    query_start: torch.Tensor
    options: dict[str, Any]

    def run(self, kernels: ModuleType) -> torch.Tensor:
        out: torch.Tensor = kernels.paged_attention(
            self.query,
            self.key_cache,
            self.value_cache,
            self.block_tables,
            self.context_lens,
            self.query_start,
            **self.options,
        )
        return out


def make_caches(
    num_blocks: int, kv_heads: int, block_size: int, key_dim: int, value_dim: int, fill: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values as `KVCache` lays them out: side by side in each block where they are of one shape."""
    if key_dim == value_dim:
        pool = torch.full((num_blocks, 2, kv_heads, block_size, key_dim), fill, dtype=dtype)
        return pool[:, 0], pool[:, 1]
    shape = (num_blocks, kv_heads, block_size)
    return torch.full((*shape, key_dim), fill, dtype=dtype), torch.full((*shape, value_dim), fill, dtype=dtype)


def make_case(
    lengths: Sequence[tuple[int, int]],
    heads: int,
    kv_heads: int,
    key_dim: int,
    value_dim: int,
    block_size: int,
    *,
    dtype: torch.dtype = torch.float32,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    seed: int = 0,
) -> PagedCase:
    """Shuffled block tables with garbage past each sequence's last block; queries are slices of a wider tensor."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-context // block_size) for _, context in lengths]
    num_blocks = sum(counts) + 3
    order = torch.randperm(num_blocks, generator=generator).tolist()
    key_cache, value_cache = make_caches(num_blocks, kv_heads, block_size, key_dim, value_dim, torch.nan, dtype)
    tables = torch.full((len(lengths), max(counts) + 1), -(10**6), dtype=torch.int32)
    all_keys, all_values = [], []
    for s, (_, context) in enumerate(lengths):
        blocks = [order.pop() for _ in range(counts[s])]
        tables[s, : counts[s]] = torch.tensor(blocks)
        keys = torch.randn(context, kv_heads, key_dim, generator=generator).to(dtype)
        values = torch.randn(context, kv_heads, value_dim, generator=generator).to(dtype)
        for position in range(context):
            block, offset = blocks[position // block_size], position % block_size
            key_cache[block, :, offset], value_cache[block, :, offset] = keys[position], values[position]
        all_keys.append(keys)
        all_values.append(values)
    query_lens = torch.tensor([0, *(query_len for query_len, _ in lengths)])
    fused = torch.randn(int(query_lens.sum()), heads + 2, key_dim + 8, generator=generator).to(dtype)
    return PagedCase(
        lengths=lengths,
        query=fused[:, 1 : heads + 1, :key_dim],
        keys=all_keys,
        values=all_values,
        key_cache=key_cache,
        value_cache=value_cache,
        block_tables=tables,
        context_lens=torch.tensor([context for _, context in lengths], dtype=torch.int32),
        query_start=query_lens.cumsum(0).to(torch.int32),
        options={
            "scale": key_dim**-0.5 * 1.5,
            "sliding_window": sliding_window,
            "softcap": softcap,
            "sinks": torch.randn(heads, generator=generator) if sinks else None,
        },
    )
