"""The gates of feed-forward layers."""

import torch
import triton
import triton.language as tl

from .. import reference
from . import rows

Tensor = torch.Tensor

TILE = 1024
ELEMENTS_PER_THREAD = 8


@triton.jit
def _silu(x):
    return x * tl.sigmoid(x)


@triton.jit
def _gelu_tanh(x):
    """0.5 * x * (1 + tanh(z)), since (1 + tanh(z)) / 2 is the sigmoid of 2 * z."""
    return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit
def _gate_kernel(gate_up, out, stride, WIDTH: tl.constexpr, ACTIVATION: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < WIDTH
    gate = tl.load(gate_up + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + column, (ACTIVATION(gate) * up).to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    return _launch(gate_up, _silu) if _covers(gate_up) else reference.silu_mul(gate_up)


def gelu_mul(gate_up: Tensor) -> Tensor:
    return _launch(gate_up, _gelu_tanh) if _covers(gate_up) else reference.gelu_mul(gate_up)


def _covers(gate_up: Tensor) -> bool:
    return gate_up.dim() == 2 and rows.covers(gate_up)


def _launch(gate_up: Tensor, activation: triton.JITFunction) -> Tensor:
    count, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(count, width)
    tile = min(TILE, triton.next_power_of_2(width))
    _gate_kernel[(count, triton.cdiv(width, tile))](
        *(gate_up, out, gate_up.stride(0), width, activation, tile),
        num_warps=rows.warps(tile, ELEMENTS_PER_THREAD),
        enable_fp_fusion=True,
    )
    return out
