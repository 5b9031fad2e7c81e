"""Attention of prompts: causal operations a second, beside a bfloat16 matrix product on the same device, and how much
longer torch's `varlen_attn` takes on keys and values in a row."""

from collections.abc import Sequence
from functools import partial

import torch

from benchmarks.gpu_attention import BLOCK_SIZE, Attention, Pool, heads_for
from benchmarks.gpu_kernel_work import Heads
from benchmarks.gpu_parts import Case, Figures, Setting
from benchmarks.gpu_timing import time_calls

TOKENS, LENGTHS = 16384, (2048, 512, 8192, 1024, 4096, 16384)
TINY_TOKENS, TINY_LENGTHS = 64, (64, 16)


def cases(setting: Setting) -> list[Case]:
    tokens, lengths = (TINY_TOKENS, TINY_LENGTHS) if setting.tiny else (TOKENS, LENGTHS)
    return [
        Case(f"{heads.name} {tokens // length} x {length}", partial(measure, setting, heads, tokens, length))
        for heads in heads_for(setting)
        for length in lengths
    ]


def operations(heads: Heads, length: int) -> int:
    """Of the two products of causal attention over `length` tokens: a multiplication and an addition for each
    dimension of each query head's pairs."""
    return 2 * heads.queries * (heads.key_dim + heads.value_dim) * length * (length + 1) // 2


def measure(setting: Setting, heads: Heads, tokens: int, length: int) -> Figures:
    """rate: operations a second. share: of the rate of a matrix product. ratio: how much longer torch's takes."""
    pool = Pool(heads, tokens, torch.device(setting.device))
    batch = tokens // length
    attention = Attention.of(pool, batch, length, queries=length)
    (blocks,) = pool.tables(1, batch, length, BLOCK_SIZE)
    timing = time_calls([partial(attention.ours, blocks)] * 2, pool.device)
    rate = batch * operations(heads, length) / timing.seconds
    figures = {
        "heads": heads.name,
        "batch": batch,
        "length": length,
        "us": 1e6 * timing.seconds,
        "rate": rate,
        "share": setting.share(rate, "matmul"),
        "method": timing.method,
        **attention.check(blocks),
        **attention.time_torch(1),
    }
    if "peer_seconds" in figures:
        figures["ratio"] = figures["peer_seconds"] / timing.seconds
    return figures


def summary(found: Sequence[Figures]) -> Figures:
    measured = [figures for figures in found if "rate" in figures]
    return {
        "shares": {f["case"]: f["share"] for f in measured},
        "all_right": all(figures["right"] for figures in measured),
        "ratios_to_torch": [round(f["ratio"], 3) for f in measured if "ratio" in f],
    }


def table(found: Sequence[Figures]) -> tuple[Sequence[str], list[Sequence[object]]]:
    headers = ("prompts", "us", "TFLOP/s", "of a product", "torch takes", "torch's", "right")
    rows: list[Sequence[object]] = [
        (f["case"], f["us"], f["rate"] / 1e12, f["share"], f.get("ratio"), f["peer"], f["right"])
        for f in found
        if "rate" in f
    ]
    return headers, rows
