"""RMSNorm, alone and after the addition of the residual stream."""

import torch
import triton
import triton.language as tl

from .. import reference
from . import rows

Tensor = torch.Tensor

# A row lies in the registers of one program; narrow rows share one. WIDEST: the widest row that does.
TILE = 1024
ELEMENTS_PER_THREAD = 16
WIDEST = 32768


@triton.jit(do_not_specialize=["rows"])
def _rms_norm_kernel(
    x,
    residual,
    weight,
    total,
    out,
    x_stride,
    residual_stride,
    rows,
    eps,
    WIDTH: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    column = tl.arange(0, triton.next_power_of_2(WIDTH))[None, :]
    row = (tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)).to(tl.int64)[:, None]
    inside = (row < rows) & (column < WIDTH)
    wide = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        wide += tl.load(residual + row * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
        rounded = wide.to(total.dtype.element_ty)
        tl.store(total + row * WIDTH + column, rounded, mask=inside)
        wide = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 1) / WIDTH + eps)[:, None]
    weights = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + column, (weights * (wide * scale)).to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if not _covers(x, weight):
        return reference.rms_norm(x, weight, eps)
    out = x.new_empty(x.shape)
    _launch(x, None, weight, None, out, eps)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    if not _covers(x, residual, weight):
        return reference.add_rms_norm(x, residual, weight, eps)
    out, total = x.new_empty(x.shape), x.new_empty(x.shape)
    _launch(x, residual, weight, total, out, eps)
    return out, total


def _covers(x: Tensor, *others: Tensor) -> bool:
    return x.dim() == 2 and x.shape[1] <= WIDEST and rows.covers(x, *others)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, total: Tensor | None, out: Tensor, eps: float) -> None:
    count, width = x.shape
    padded = triton.next_power_of_2(width)
    tile_rows = max(1, TILE // padded)
    _rms_norm_kernel[(triton.cdiv(count, tile_rows),)](
        *(x, residual, weight, total, out, x.stride(0), 0 if residual is None else residual.stride(0), count, eps),
        *(width, tile_rows),
        num_warps=rows.warps(tile_rows * padded, ELEMENTS_PER_THREAD),
        enable_fp_fusion=True,
    )
