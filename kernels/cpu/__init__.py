"""C++ kernels for CPUs behind the launchers of `pagedgen_kernels.reference`, which they fall back to."""

from ..reference import choose_tokens, penalise, position_keys
from .launchers import (
    add_rms_norm,
    available,
    copy_blocks,
    gelu_mul,
    greedy_argmax,
    gumbel_argmax,
    gumbel_noise,
    lowest_kept,
    paged_attention,
    rms_norm,
    rotary_write_kv,
    silu_mul,
    top_tokens,
    unavailable_reason,
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
