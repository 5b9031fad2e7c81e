"""What measuring attention for decoding and for prompts has in common: a pool of blocks, and torch's own attention."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from pagedgen_kernels import reference

from benchmarks.gpu_kernel_work import LLAMA_1B, LLAMA_8B, Heads, Tensor
from benchmarks.gpu_kernels import TOLERANCES, distance, kernels_for
from benchmarks.gpu_parts import Figures, Setting, described
from benchmarks.gpu_timing import Call, time_calls

DTYPE = torch.bfloat16
BLOCK_SIZE, PAGE_SIZE = 16, 256  # ours, and what flash attention takes at least
TINY = Heads("tiny", 4, 2, 16, 16)
MODELS = (LLAMA_1B, LLAMA_8B)


def heads_for(setting: Setting) -> Sequence[Heads]:
    return (TINY,) if setting.tiny else MODELS


def bytes_per_token(heads: Heads) -> int:
    return heads.keys * (heads.key_dim + heads.value_dim) * DTYPE.itemsize


@dataclass
class Pool:
    """Keys and values of random content in memory for `tokens` tokens: in blocks as `KVCache` has them, and once more
    token after token for torch's attention."""

    heads: Heads
    tokens: int
    device: torch.device

    @cached_property
    def blocks(self) -> tuple[Tensor, Tensor]:
        """Keys and values [num_blocks, Hkv, BLOCK_SIZE, D]."""
        shape = (self.tokens // BLOCK_SIZE, 2, self.heads.keys, BLOCK_SIZE, self.heads.key_dim)
        pool = torch.empty(shape, dtype=DTYPE, device=self.device).normal_()
        return pool[:, 0], pool[:, 1]

    @cached_property
    def rows(self) -> tuple[Tensor, Tensor]:
        """Keys and values [tokens, Hkv, D]."""
        shape = (2, self.tokens, self.heads.keys, self.heads.key_dim)
        keys, values = torch.empty(shape, dtype=DTYPE, device=self.device).normal_()
        return keys, values

    def tables(self, count: int, batch: int, context: int, block_size: int) -> list[Tensor]:
        """`count` tables int32 [batch, context / block_size] of different blocks in no order, all from the beginning of
        the pool, so that no more of it is touched than they need."""
        blocks = -(-context // block_size)
        order = torch.randperm(count * batch * blocks, device=self.device).int()
        return list(order.view(count, batch, blocks))


class Attention(NamedTuple):
    """A batch of `batch` sequences of `context` tokens each, of which the last `queries` are asked for.

    query: [batch * queries, Hq, D]. lens: int32 [batch]. starts: int32 [batch + 1].
    """

    pool: Pool
    batch: int
    context: int
    queries: int
    query: Tensor
    lens: Tensor
    starts: Tensor

    @staticmethod
    def of(pool: Pool, batch: int, context: int, queries: int) -> "Attention":
        heads, device = pool.heads, pool.device
        return Attention(
            pool,
            batch,
            context,
            queries,
            torch.randn(batch * queries, heads.queries, heads.key_dim, device=device).to(DTYPE),
            torch.full((batch,), context, dtype=torch.int32, device=device),
            torch.arange(0, batch * queries + 1, queries, dtype=torch.int32, device=device),
        )

    @property
    def scale(self) -> float:
        return float(self.pool.heads.key_dim**-0.5)

    def ours(self, tables: Tensor) -> Tensor:
        """[batch * queries, Hq, D]."""
        kernels = kernels_for(self.pool.device)
        arguments = (*self.pool.blocks, tables, self.lens, self.starts)
        out: Tensor = kernels.paged_attention(self.query, *arguments, scale=self.scale)
        return out

    def check(self, tables: Tensor) -> Figures:
        """The last queries of the last sequence against the reference."""
        some = min(self.queries, 8)
        starts = torch.tensor([0, some], dtype=torch.int32, device=self.pool.device)
        expected = reference.paged_attention(
            self.query[-some:], *self.pool.blocks, tables[-1:], self.lens[-1:], starts, scale=self.scale
        )
        found = distance((self.ours(tables)[-some:],), (expected,), TOLERANCES[DTYPE])
        return {"right": found["differing"] == 0, "largest": found["largest"]}

    def time_torch(self, variants: int) -> Figures:
        """peer: the first of torch's ways to do it that works here. seconds: of one call; each of `variants` calls
        reads other keys and values. refused: why the ways before it do not work."""
        refused: list[str] = []
        for name, make in self._ways(variants).items():
            try:
                calls = make()
                calls[0]()
                timing = time_calls(calls, self.pool.device)
            except Exception as error:  # whatever it is, what we took ourselves is known
                refused.append(f"{name}: {described(error)['error'][:150]}")
                continue
            return {"peer": name, "peer_seconds": timing.seconds, "refused": refused}
        return {"peer": "none", "refused": refused}

    def _ways(self, variants: int) -> dict[str, Callable[[], list[Call]]]:
        ways: dict[str, Callable[[], list[Call]]] = {}
        if self.queries == 1 and self.context % PAGE_SIZE == 0:
            ways["varlen_attn, paged"] = lambda: self._varlen_paged(variants)
        ways["varlen_attn"] = lambda: self._varlen(variants)
        ways["scaled_dot_product_attention"] = lambda: self._dense(variants)
        return ways

    def _varlen_options(self) -> dict[str, Any]:
        """Those of the installed version: in torch 2.11 groups of heads need none."""
        window = (-1, -1) if self.queries == 1 else (-1, 0)  # one query sees all, and is faster without a mask
        wanted = {"scale": self.scale, "window_size": window, "enable_gqa": True}
        known = inspect.signature(_varlen_attn()).parameters
        return {name: value for name, value in wanted.items() if name in known}

    def _varlen(self, variants: int) -> list[Call]:
        varlen_attn, options, size = _varlen_attn(), self._varlen_options(), self.batch * self.context
        key_starts = torch.arange(0, size + 1, self.context, dtype=torch.int32, device=self.pool.device)
        keys, values = self.pool.rows

        def call_on(part: slice) -> Call:
            arguments = (self.query, keys[part], values[part], self.starts, key_starts, self.queries, self.context)
            return lambda: varlen_attn(*arguments, **options)

        return [call_on(slice(i * size, (i + 1) * size)) for i in range(variants)]

    def _varlen_paged(self, variants: int) -> list[Call]:
        varlen_attn, options = _varlen_attn(), self._varlen_options()
        whole = self.pool.tokens // PAGE_SIZE * PAGE_SIZE
        keys, values = (rows[:whole].view(-1, PAGE_SIZE, *rows.shape[1:]) for rows in self.pool.rows)
        sizes = (self.queries, self.context)

        def call_on(table: Tensor) -> Call:
            paged = {"seqused_k": self.lens, "block_table": table}
            return lambda: varlen_attn(self.query, keys, values, self.starts, None, *sizes, **paged, **options)

        return [call_on(table) for table in self.pool.tables(variants, self.batch, self.context, PAGE_SIZE)]

    def _dense(self, variants: int) -> list[Call]:
        size, attend = self.batch * self.context, torch.nn.functional.scaled_dot_product_attention
        query = self.query.view(self.batch, self.queries, *self.query.shape[1:]).transpose(1, 2)
        keys, values = self.pool.rows

        def call_on(part: slice) -> Call:
            shape = (self.batch, self.context, *keys.shape[1:])
            key, value = (rows[part].view(shape).transpose(1, 2) for rows in (keys, values))
            causal = self.queries > 1
            return lambda: attend(query, key, value, is_causal=causal, scale=self.scale, enable_gqa=True)

        return [call_on(slice(i * size, (i + 1) * size)) for i in range(variants)]


def _varlen_attn() -> Any:
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn
