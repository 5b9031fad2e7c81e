"""Triton kernels for GPUs behind the launchers of `pagedgen_kernels.reference`, which they fall back to.

No launcher reads a tensor's value on the host, and what it allocates depends on shapes alone, so that launches can be
captured in CUDA graphs.
"""

import importlib.util

import torch

from ..reference import position_keys

HAS_TRITON = importlib.util.find_spec("triton") is not None

if HAS_TRITON:
    from .activation import gelu_mul, silu_mul
    from .attention import paged_attention
    from .copies import copy_blocks
    from .draws import choose_tokens, greedy_argmax, gumbel_argmax
    from .filters import lowest_kept
    from .largest import top_tokens
    from .noise import gumbel_noise
    from .norm import add_rms_norm, rms_norm
    from .penalties import penalise
    from .rotary import rotary_write_kv, write_kv
else:
    from ..reference import (
        add_rms_norm,
        choose_tokens,
        copy_blocks,
        gelu_mul,
        greedy_argmax,
        gumbel_argmax,
        gumbel_noise,
        lowest_kept,
        paged_attention,
        penalise,
        rms_norm,
        rotary_write_kv,
        silu_mul,
        top_tokens,
        write_kv,
    )

__all__ = [
    "add_rms_norm",
    "available",
    "choose_tokens",
    "copy_blocks",
    "gelu_mul",
    "greedy_argmax",
    "gumbel_argmax",
    "gumbel_noise",
    "lowest_kept",
    "paged_attention",
    "penalise",
    "position_keys",
    "rms_norm",
    "rotary_write_kv",
    "silu_mul",
    "top_tokens",
    "unavailable_reason",
    "write_kv",
]


def available() -> bool:
    """Whether the kernels can be used."""
    return not unavailable_reason()


def unavailable_reason() -> str:
    """Why the kernels cannot be used, in one sentence without a full stop; empty when they can."""
    if not HAS_TRITON:
        return "triton is not installed"
    return "" if torch.cuda.is_available() else "torch finds no GPU"
