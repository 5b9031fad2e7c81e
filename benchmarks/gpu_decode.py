"""Attention of a decoding step: bytes of keys and values read a second, beside a copy of memory on the same device.

Each call of a row reads other blocks than the ones before, of more than a cache holds in all. Blocks of 16 tokens in no
order. Beside it torch's `varlen_attn`, on pages of 256 tokens where it takes pages, else on keys and values in a row.
"""

from collections.abc import Sequence
from functools import partial

import torch

from benchmarks.gpu_attention import BLOCK_SIZE, Attention, Pool, bytes_per_token, heads_for
from benchmarks.gpu_kernel_work import Heads
from benchmarks.gpu_parts import Case, Figures, Setting
from benchmarks.gpu_timing import time_calls

BATCHES, CONTEXTS = (256, 64, 512, 16, 1, 4), (1024, 4096, 16384, 256, 32768)
TINY_BATCHES, TINY_CONTEXTS = (2, 1), (32, 256)
POOL_BYTES, TINY_POOL_BYTES = 36 << 30, 1 << 20
CYCLE_BYTES, TINY_CYCLE_BYTES = 1 << 30, 1 << 16  # read before a block is read again, where the pool holds as much
MOST_VARIANTS, FEWEST_CALLS = 256, 4
# What is aimed at: this share of a copy, for batches and contexts of at least so many.
TARGET, TARGET_BATCH, TARGET_CONTEXT = 0.85, 256, 1024


class Pools:
    """The pool of one model's heads at a time."""

    def __init__(self, setting: Setting) -> None:
        self._bytes = TINY_POOL_BYTES if setting.tiny else POOL_BYTES
        self._device = torch.device(setting.device)
        self._pool: Pool | None = None

    def of(self, heads: Heads) -> Pool:
        if self._pool is None or self._pool.heads != heads:
            self._pool = None
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
                free, _ = torch.cuda.mem_get_info(self._device)
                self._bytes = min(self._bytes, int(0.4 * free))  # it is there twice
            self._pool = Pool(heads, self._bytes // bytes_per_token(heads), self._device)
        return self._pool


def cases(setting: Setting) -> list[Case]:
    pools = Pools(setting)
    batches, contexts = (TINY_BATCHES, TINY_CONTEXTS) if setting.tiny else (BATCHES, CONTEXTS)
    most = TINY_POOL_BYTES if setting.tiny else POOL_BYTES

    def of_model(heads: Heads, aimed: bool) -> list[Case]:
        return [
            Case(f"{heads.name} {batch} x {context}", partial(measure, setting, pools, heads, batch, context))
            for batch in batches
            for context in contexts
            if batch * context * bytes_per_token(heads) <= most and is_aimed_at(batch, context) == aimed
        ]

    # What is aimed at comes first for every model, and then the rest of the model whose pool is there.
    models = heads_for(setting)
    order = [*((heads, True) for heads in models), *((heads, False) for heads in reversed(models))]
    return [case for heads, aimed in order for case in of_model(heads, aimed)]


def is_aimed_at(batch: int, context: int) -> bool:
    return batch >= TARGET_BATCH and context >= TARGET_CONTEXT


def measure(setting: Setting, pools: Pools, heads: Heads, batch: int, context: int) -> Figures:
    """rate: bytes of keys and values a second. share: of the rate of a copy. ratio: how much longer torch's takes."""
    size, pool = batch * context * bytes_per_token(heads), pools.of(heads)
    fitting = pool.tokens // (batch * context)
    if not fitting:
        return {"left_out": "the device has not enough free memory"}
    cycle = TINY_CYCLE_BYTES if setting.tiny else CYCLE_BYTES
    variants = max(1, min(-(-cycle // size), MOST_VARIANTS, fitting))
    attention = Attention.of(pool, batch, context, queries=1)
    tables = pool.tables(variants, batch, context, BLOCK_SIZE)
    calls = [partial(attention.ours, table) for table in tables]
    timing = time_calls(calls * -(-FEWEST_CALLS // variants), pool.device)
    rate = size / timing.seconds
    figures = {
        "heads": heads.name,
        "batch": batch,
        "context": context,
        "us": 1e6 * timing.seconds,
        "rate": rate,
        "share": setting.share(rate, "copy"),
        "bytes": size,
        "variants": variants,
        "method": timing.method,
        **attention.check(tables[-1]),
        **attention.time_torch(variants),
    }
    if "peer_seconds" in figures:
        figures["peer_rate"] = size / figures["peer_seconds"]
        figures["ratio"] = figures["peer_seconds"] / timing.seconds
    return figures


def summary(found: Sequence[Figures]) -> Figures:
    """worst: the smallest share of a copy among the batches and contexts that are aimed at."""
    measured = [figures for figures in found if "rate" in figures]
    aimed = [f for f in measured if is_aimed_at(f["batch"], f["context"])]
    shares = {f["case"]: f["share"] for f in aimed if f["share"] is not None}
    worst = min(shares, key=lambda case: shares[case], default=None)
    return {
        "target": TARGET,
        "worst": shares[worst] if worst else None,
        "worst_case": worst,
        "met": shares[worst] >= TARGET if worst else None,
        "all_right": all(figures["right"] for figures in measured),
        "ratios_to_torch": [round(f["ratio"], 3) for f in measured if "ratio" in f],
    }


def table(found: Sequence[Figures]) -> tuple[Sequence[str], list[Sequence[object]]]:
    """The share of a copy (or GB/s where that is not known) and how much longer torch takes, by context."""
    measured = [figures for figures in found if "rate" in figures]
    contexts = sorted({figures["context"] for figures in measured})
    rows: list[Sequence[object]] = []
    for heads, batch in sorted({(f["heads"], f["batch"]) for f in measured}):
        by_context = {f["context"]: f for f in measured if (f["heads"], f["batch"]) == (heads, batch)}
        rows.append((f"{heads} {batch}", *(_cell(by_context.get(context)) for context in contexts)))
    return ("share of a copy / torch", *(f"{context:,}" for context in contexts)), rows


def _cell(figures: Figures | None) -> str:
    if figures is None:
        return ""
    share = figures["share"]
    ours = f"{share:.0%}" if share is not None else f"{figures['rate'] / 1e9:.0f} GB/s"
    return f"{ours} {figures['ratio']:.2f}" if "ratio" in figures else ours
