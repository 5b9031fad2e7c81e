"""Gumbel noise from a counter-based generator."""

import torch
import triton
import triton.language as tl

from .. import reference
from . import launch

Tensor = torch.Tensor

TILE = 256
WARPS = 4


@triton.jit
def random_bits(key, token):
    """uint32: the upper half of SplitMix64 (Steele, Lea and Flood, 2014) at each token's counter."""
    z = key.to(tl.uint64) + (token.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return ((z ^ (z >> 31)) >> 32).to(tl.uint32)


@triton.jit
def gumbel(bits):
    """The noise of random bits: -log(-log1p(-v)) with v = (bits + 0.5) / 2^32, in float64, rounded once.

    1 - v has 33 bits, so that it is exact and log1p is not needed.
    """
    rest = 1.0 - (bits.to(tl.float64) + 0.5) * 2.3283064365386963e-10
    return (-tl.log(-tl.log(rest))).to(tl.float32)


@triton.jit
def gumbel_bound(bits):
    """Not less than the noise, to 1e-4: -log(v), since -log1p(-v) >= v."""
    return 22.18071 - tl.log(bits.to(tl.float32) + 0.5)


@triton.jit(do_not_specialize=["count", "row_stride"])
def _gumbel_noise_kernel(keys, tokens, out, row_stride, column_stride, count, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < count
    token = tl.load(tokens + row * row_stride + column * column_stride, mask=inside, other=0)
    noise = gumbel(random_bits(tl.load(keys + row), token))
    tl.store(out + row * count + column, noise, mask=inside)


def gumbel_noise(keys: Tensor, token_ids: Tensor) -> Tensor:
    if not launch.on_device(keys, token_ids):
        return reference.gumbel_noise(keys, token_ids)
    out = torch.empty(token_ids.shape, dtype=torch.float32, device=keys.device)
    grid = token_ids.shape[0], triton.cdiv(token_ids.shape[1], TILE)
    _gumbel_noise_kernel[grid](
        *(keys.view(torch.int64).contiguous(), token_ids, out, *token_ids.stride(), token_ids.shape[1], TILE),
        num_warps=WARPS,
        enable_fp_fusion=True,
    )
    return out
