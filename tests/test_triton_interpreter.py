"""That kernels in triton's interpreter compute with bfloat16 as a GPU does; see triton_interpreter.py."""

import pytest
import torch
import triton
import triton.language as tl
from triton_interpreter import DEVICE, INTERPRETED

BF16 = torch.bfloat16


@triton.jit
def _convert(x, out, COUNT: tl.constexpr):
    offsets = tl.arange(0, COUNT)
    tl.store(out + offsets, tl.load(x + offsets))


@triton.jit
def _elementwise(x, y, out, COUNT: tl.constexpr):
    offsets = tl.arange(0, COUNT)
    a, b = tl.load(x + offsets), tl.load(y + offsets)
    tl.store(out + offsets, a + b)
    tl.store(out + COUNT + offsets, a * b)
    tl.store(out + 2 * COUNT + offsets, tl.maximum(a, b))
    tl.store(out + 3 * COUNT + offsets, tl.where(a < b, -a, 0.3))


@triton.jit
def _dot(x, y, out, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    rows = tl.arange(0, SIZE)
    offsets = rows[:, None] * SIZE + rows
    tl.store(out + offsets, tl.dot(tl.load(x + offsets), tl.load(y + offsets), input_precision=PRECISION))


@triton.jit
def _sum(x, out, COUNT: tl.constexpr):
    tl.store(out, tl.sum(tl.load(x + tl.arange(0, COUNT))))


def every_bf16() -> torch.Tensor:
    """All 65536 values, infinities, NaNs and subnormal ones among them."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32, device=DEVICE).to(torch.int16).view(BF16)


def same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_bfloat16_becomes_other_types(dtype: torch.dtype) -> None:
    out = torch.empty(2**16, dtype=dtype, device=DEVICE)
    _convert[(1,)](every_bf16(), out, COUNT=2**16)
    same(out, every_bf16().to(dtype))


def test_float32_rounds_to_nearest_even() -> None:
    bits = torch.randint(-(2**31), 2**31, (2**15,), generator=torch.Generator().manual_seed(0))
    halfway = (every_bf16().view(torch.int16).cpu()[::4].long() << 16) + 0x8000
    bits[: len(halfway)] = halfway
    bits[-4:] = torch.tensor([0x7F800001, 0x7F7FFFFF, 0x3F7FFFFF, -1])
    wide = bits.to(torch.int32).view(torch.float32).to(DEVICE)
    out = torch.empty(2**15, dtype=BF16, device=DEVICE)
    _convert[(1,)](wide, out, COUNT=2**15)
    same(out, wide.to(BF16))


def test_bfloat16_arithmetic_rounds_once() -> None:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(512, generator=generator).mul(3).to(BF16).to(DEVICE) for _ in range(2))
    out = torch.empty(4, 512, dtype=BF16, device=DEVICE)
    _elementwise[(1,)](x, y, out, COUNT=512)
    expected = [x + y, x * y, torch.maximum(x, y), torch.where(x < y, -x, torch.tensor(0.3, dtype=BF16, device=DEVICE))]
    same(out, torch.stack(expected))


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_dot_of_half_precision_sums_in_float32(dtype: torch.dtype) -> None:
    x, y = (torch.randn(32, 32, generator=torch.Generator().manual_seed(2)).to(dtype).to(DEVICE) for _ in range(2))
    out = torch.empty(32, 32, device=DEVICE)
    _dot[(1,)](x, y, out, SIZE=32, PRECISION="ieee")
    torch.testing.assert_close(out, x.float() @ y.float(), atol=1e-5, rtol=1e-5)


def test_dot_of_float32_needs_ieee() -> None:
    x, y = (torch.randn(32, 32, generator=torch.Generator().manual_seed(3)).to(DEVICE) for _ in range(2))
    exact, coarse = torch.empty(32, 32, device=DEVICE), torch.empty(32, 32, device=DEVICE)
    _dot[(1,)](x, y, exact, SIZE=32, PRECISION="ieee")
    _dot[(1,)](x, y, coarse, SIZE=32, PRECISION="tf32")
    expected = (x.double() @ y.double()).float()
    torch.testing.assert_close(exact, expected, atol=1e-5, rtol=1e-5)
    assert 1e-4 < float((coarse - expected).abs().max()) < 0.1


@pytest.mark.skipif(not INTERPRETED, reason="a GPU can do it")
def test_reductions_of_bfloat16_are_refused() -> None:
    with pytest.raises(Exception, match="convert to float32"):
        _sum[(1,)](torch.ones(16, dtype=BF16), torch.zeros(1), COUNT=16)
