"""Random inputs for every launcher of the kernels, and the calls that they are for.

A Work calls a launcher of any module with the signatures of `pagedgen_kernels.reference`, on inputs that are the same
each time, and gives all that the launcher returned or changed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

Tensor = torch.Tensor
Work = Callable[[ModuleType], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Heads:
    """The attention of a model: so many query heads and key/value heads, keys and values of so many dimensions."""

    name: str
    queries: int
    keys: int
    key_dim: int
    value_dim: int


SMOLLM = Heads("smollm2-135m", 9, 3, 64, 64)
LLAMA_1B = Heads("llama-3.2-1b", 32, 8, 64, 64)
LLAMA_8B = Heads("llama-3.1-8b", 32, 8, 128, 128)
ODD = (
    Heads("one group", 5, 1, 80, 80),
    Heads("no groups", 6, 6, 96, 96),
    Heads("wide", 8, 1, 256, 256),
    Heads("narrow values", 16, 4, 192, 128),
)

# (queries, context) of each sequence: contexts beside the borders of blocks and tiles, and a row that fills a batch up.
DECODING = [(1, n) for n in (1, 15, 16, 17, 63, 64, 65, 129, 1000, 4097, 0)]
MIXED = [(1, 700), (1, 0), (30, 30), (200, 1500), (1, 64), (129, 129), (7, 2000), (64, 64)]
LONG = [(1, 20000), (1, 9000), (1, 3)]


def random(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=device).to(dtype)


def caches(
    num_blocks: int, heads: Heads, block_size: int, fill: float, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Keys and values [num_blocks, Hkv, block_size, D] as `KVCache` lays them out: side by side where they are of one
    shape."""
    shape = (num_blocks, 2, heads.keys, block_size, heads.key_dim)
    if heads.key_dim == heads.value_dim:
        pool = torch.full(shape, fill, dtype=dtype, device=device)
        return pool[:, 0], pool[:, 1]
    shapes = [(num_blocks, heads.keys, block_size, dim) for dim in (heads.key_dim, heads.value_dim)]
    keys, values = (torch.full(s, fill, dtype=dtype, device=device) for s in shapes)
    return keys, values


def attention(
    lengths: Sequence[tuple[int, int]],
    heads: Heads,
    dtype: torch.dtype,
    device: torch.device,
    *,
    block_size: int = 16,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
) -> Work:
    """Shuffled block tables with garbage past each sequence's last block; NaN in all slots that no token is in; the
    queries are slices of a wider tensor. lengths: (queries, context) of each sequence."""
    counts = [-(-context // block_size) for _, context in lengths]
    num_blocks = sum(counts) + 3
    generator = torch.Generator().manual_seed(1)
    order = torch.randperm(num_blocks, generator=generator, dtype=torch.int32)
    tables = torch.full((len(lengths), max(counts) + 1), -(10**6), dtype=torch.int32)
    key_cache, value_cache = caches(num_blocks, heads, block_size, torch.nan, dtype, device)
    first = 0
    for s, (_, context) in enumerate(lengths):
        blocks, first = order[first : first + counts[s]], first + counts[s]
        tables[s, : counts[s]] = blocks
        place = torch.arange(context)
        block, offset = blocks.long()[place // block_size].to(device), (place % block_size).to(device)
        for part, (cache, dim) in enumerate(((key_cache, heads.key_dim), (value_cache, heads.value_dim))):
            content = random(context, heads.keys, dim, dtype=dtype, device=device, seed=2 * s + part)
            cache[block, :, offset] = content
    starts = torch.tensor([0, *(queries for queries, _ in lengths)]).cumsum(0)
    wide = random(int(starts[-1]), heads.queries + 2, heads.key_dim + 8, dtype=dtype, device=device, seed=99)
    arguments = (
        wide[:, 1 : heads.queries + 1, : heads.key_dim],
        key_cache,
        value_cache,
        tables.to(device),
        torch.tensor([context for _, context in lengths], dtype=torch.int32, device=device),
        starts.to(device, torch.int32),
    )
    options: dict[str, Any] = {
        "scale": heads.key_dim**-0.5 * 1.5,
        "sliding_window": sliding_window,
        "softcap": softcap,
        "sinks": random(heads.queries, dtype=torch.float32, device=device, seed=7) if sinks else None,
    }
    return lambda kernels: (kernels.paged_attention(*arguments, **options),)


def _slots(count: int, num_slots: int, device: torch.device) -> Tensor:
    """int64 [count]: distinct slots in no order, two of them -1."""
    slots = torch.randperm(num_slots, generator=torch.Generator().manual_seed(7))[:count]
    slots[[1, count - 2]] = -1
    return slots.to(device)


def write_kv(heads: Heads, dtype: torch.dtype, device: torch.device) -> Work:
    count, blocks = 40, 12
    wide = random(count, 2 * heads.keys + 1, max(heads.key_dim, heads.value_dim), dtype=dtype, device=device)
    key, value = wide[:, : heads.keys, : heads.key_dim], wide[:, heads.keys + 1 :, : heads.value_dim]
    slots = _slots(count, blocks * 16, device)

    def work(kernels: ModuleType) -> tuple[Tensor, ...]:
        pair = caches(blocks, heads, 16, 0.0, dtype, device)
        kernels.write_kv(key, value, *pair, slots)
        return pair

    return work


def rotary_write_kv(
    heads: Heads, dtype: torch.dtype, device: torch.device, rotary_dim: int | None = None, norms: bool = False
) -> Work:
    """Query, key and value are slices of one tensor, as a fused projection gives them."""
    count, blocks, dim = 40, 12, heads.key_dim
    wide = random(count, heads.queries + 2 * heads.keys, dim, dtype=dtype, device=device)
    query, key, value = torch.split(wide, [heads.queries, heads.keys, heads.keys], 1)
    angles = 10 * random(count, rotary_dim or dim, dtype=torch.float32, device=device, seed=1)
    slots = _slots(count, blocks * 16, device)
    options: dict[str, Any] = {}
    if norms:
        weights = random(2, dim, dtype=dtype, device=device, seed=3)
        options = {"query_norm": weights[0], "key_norm": weights[1], "eps": 1e-5}

    def work(kernels: ModuleType) -> tuple[Tensor, ...]:
        pair = caches(blocks, heads, 16, 0.0, dtype, device)
        rotated = kernels.rotary_write_kv(
            query, key, value[..., : heads.value_dim], angles.cos(), angles.sin(), *pair, slots, **options
        )
        return rotated, *pair

    return work


def copy_blocks(heads: Heads, dtype: torch.dtype, device: torch.device) -> Work:
    pool = random(3, 20, 2, heads.keys, 16, heads.key_dim, dtype=dtype, device=device)
    copies = torch.tensor([[0, 19], [0, 3], [7, 8], [11, 1]], device=device)

    def work(kernels: ModuleType) -> tuple[Tensor, ...]:
        copied = pool.clone()
        kernels.copy_blocks([copied], copies)
        return (copied,)

    return work


def norm(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Work:
    x = 3 * random(rows, width, dtype=dtype, device=device)
    weight = random(width, dtype=dtype, device=device, seed=1)
    return lambda kernels: (kernels.rms_norm(x, weight, 1e-5),)


def add_norm(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Work:
    x, residual = (3 * random(rows, width, dtype=dtype, device=device, seed=seed) for seed in (0, 1))
    weight = random(width, dtype=dtype, device=device, seed=2)
    return lambda kernels: tuple(kernels.add_rms_norm(x, residual, weight, 1e-5))


def gate(name: str, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Work:
    """name: of the launcher."""
    both = 3 * random(rows, 2 * width, dtype=dtype, device=device)
    return lambda kernels: (getattr(kernels, name)(both),)
