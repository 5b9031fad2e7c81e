"""Eight-bit linear layers against the reference, which sums exactly."""

import pytest
import torch
from pagedgen_kernels import reference
from pagedgen_kernels.cpu import available
from pagedgen_kernels.cpu import quantized as module
from pagedgen_kernels.cpu.linear import tiles_fit
from pagedgen_kernels.cpu.quantized import QuantizedLinear, quantize_rows

HAS_TILES = tiles_fit(torch.ones(32, 64, dtype=torch.int8))


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, 7, 16, 33, 64, 100])
def test_rows_are_quantized_as_by_the_reference(dtype: torch.dtype, width: int) -> None:
    if not available():
        pytest.skip("the C++ kernels are not there")
    x = normal(37, width + 3)[:, 3:].to(dtype)
    x[4] = 0
    x[5] *= 1e-3
    for found, expected in zip(quantize_rows(x), reference.quantize_rows(x), strict=True):
        if found.dtype is torch.int8:  # products that fall on a half may be rounded either way
            difference = found.int() - expected.int()
            assert difference.abs().max() <= 1
            assert (difference != 0).sum() <= found.numel() // 100 + 1
        else:
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    values, scales = quantize_rows(x)
    assert (values[4] == 0).all()
    assert ((values.float() * scales - x.float()).abs() <= scales * 0.5001).all()


def test_a_row_that_is_not_all_numbers_has_no_scale() -> None:
    x = normal(5, 64)
    x[1, 3], x[3, 60] = float("nan"), float("inf")
    for scales in (quantize_rows(x)[1], reference.quantize_rows(x)[1]):
        assert scales.isnan().flatten().tolist() == [False, True, False, True, False]
    layer = QuantizedLinear(normal(40, 64))
    assert layer(x.bfloat16()).isnan().all(1).tolist() == [False, True, False, True, False]


@pytest.mark.parametrize("columns", [1, 33, 100])
@pytest.mark.parametrize("inner", [64, 576, 48, 1536])
@pytest.mark.parametrize("bias", [False, True])
def test_layers_equal_the_reference(columns: int, inner: int, bias: bool) -> None:
    weight, offset = normal(columns, inner), normal(columns, seed=1) if bias else None
    layer = QuantizedLinear(weight, offset)
    assert layer.kind == ("tiles" if HAS_TILES and inner % 64 == 0 else "onednn")
    values, scales = reference.quantize_rows(weight)
    for rows in (0, 1, 16, 17, 33, 100):
        x = normal(rows, inner, seed=2).bfloat16()
        quantized, row_scales = quantize_rows(x)
        exact = (quantized.double() @ values.double().T) * (row_scales.double() * scales.double().T)
        expected = exact if offset is None else exact + offset.double()
        torch.testing.assert_close(layer(x).double(), expected, rtol=2**-7, atol=1e-5 * inner**0.5)
        if rows:  # the same up to rows whose rounding to eight bits differed at a half
            by_reference = reference.int8_linear(x, values, scales, offset)
            close = torch.isclose(layer(x).float(), by_reference.float(), rtol=2**-6, atol=0.3)
            assert close.float().mean() > 0.98


@pytest.mark.parametrize("gated", [False, True])
def test_onednn_gives_what_the_tiles_give(gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, bias, x = normal(96, 128), normal(96, seed=2), normal(19, 128, seed=1).bfloat16()
    first = QuantizedLinear(weight, bias, gated)(x)
    assert first.shape == (19, 48 if gated else 96)
    monkeypatch.setattr(module, "tiles_fit", lambda *_: False)
    other = QuantizedLinear(weight, bias, gated)
    assert other.kind == "onednn"
    # gated, both factors were rounded once more
    torch.testing.assert_close(other(x).float(), first.float(), rtol=2**-5 if gated else 2**-7, atol=1e-3)


@pytest.mark.skipif(not HAS_TILES, reason="this CPU has no AMX, or there is no compiler")
def test_a_row_s_result_is_the_same_bit_for_bit_whatever_the_other_rows() -> None:
    layer, x = QuantizedLinear(normal(100, 576)), normal(700, 576, seed=1).bfloat16()
    whole = layer(x)
    for first, last in ((0, 1), (5, 30), (31, 66), (699, 700)):
        assert torch.equal(layer(x[first:last]), whole[first:last])
