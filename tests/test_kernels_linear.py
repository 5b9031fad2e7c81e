"""Linear layers with weights laid out for oneDNN."""

import gc
import weakref

import numpy as np
import pytest
import torch
from pagedgen_kernels import reference
from pagedgen_kernels.cpu.linear import PackedLinear, tiles_fit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("bias", [False, True])
def test_equals_the_plain_layer(dtype: torch.dtype, bias: bool) -> None:
    weight = torch.randn(40, 48).to(dtype)
    offset = torch.randn(40).to(dtype) if bias else None
    layer = PackedLinear(weight.clone(), offset)
    for rows in (0, 1, 2, 7, 16, 33, 64):
        x = torch.randn(rows, 60).to(dtype)[:, 6:54]
        out = layer(x)
        assert out.shape == (rows, 40)
        assert out.dtype == dtype
        tolerance = {torch.bfloat16: 0.1, torch.float16: 0.01}.get(dtype, 1e-4)  # sums of 48, rounded once
        expected = torch.nn.functional.linear(x.double(), weight.double(), None if offset is None else offset.double())
        torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=0.01)
    assert layer(torch.randn(2, 3, 48).to(dtype)).shape == (2, 3, 40)


@pytest.mark.skipif(PackedLinear(torch.ones(2, 2)).kind != "onednn", reason="torch has no oneDNN")
def test_only_the_packed_weight_stays_alive() -> None:
    memory = np.random.default_rng(0).standard_normal((64, 64), np.float32)
    weight = torch.nn.Parameter(torch.from_numpy(memory))
    expected = torch.nn.functional.linear(torch.ones(1, 64), weight).detach()
    layer = PackedLinear(weight)
    memory_is_alive = weakref.ref(memory)  # a tensor made from an array keeps the array alive
    del memory
    assert memory_is_alive() is not None
    del weight
    gc.collect()
    assert memory_is_alive() is None
    torch.testing.assert_close(layer(torch.ones(1, 64)), expected)


def test_plain_where_onednn_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    weight, x = torch.randn(8, 16), torch.randn(3, 16)
    layer = PackedLinear(weight)
    assert layer.kind == "plain"
    assert torch.equal(layer(x), torch.nn.functional.linear(x, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("width", [32, 40, 96])
def test_gated_layers(dtype: torch.dtype, bias: bool, width: int) -> None:
    """Fused with the product where it is computed in tiles and the width fills them, a pass of its own elsewhere."""
    weight = torch.randn(2 * width, 64).to(dtype) / 8
    offset = torch.randn(2 * width).to(dtype) if bias else None
    layer = PackedLinear(weight.clone(), offset, gated=True)
    assert (layer.kind == "tiles") == (HAS_TILES and dtype is torch.bfloat16 and width % 16 == 0)
    for rows in (0, 1, 17, 70):
        x = torch.randn(rows, 64).to(dtype) * 2
        both = torch.nn.functional.linear(x.double(), weight.double(), None if offset is None else offset.double())
        expected = torch.nn.functional.silu(both[:, :width]) * both[:, width:]
        out = layer(x)
        assert out.shape == (rows, width)
        tolerance = {torch.bfloat16: 0.02, torch.float16: 0.002}.get(dtype, 1e-5)
        torch.testing.assert_close(out.double(), expected, atol=tolerance * 10, rtol=tolerance)
    extreme = layer(torch.tensor([1e30, -1e30, torch.nan])[:, None].expand(3, 64).to(dtype))
    assert extreme[2].isnan().all()


HAS_TILES = tiles_fit(torch.ones(32, 32, dtype=torch.bfloat16))
needs_tiles = pytest.mark.skipif(not HAS_TILES, reason="this CPU has no AMX, or there is no compiler")


def bf16(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@needs_tiles
@pytest.mark.parametrize("columns", [1, 15, 32, 33, 100, 257])
@pytest.mark.parametrize("inner", [32, 64, 576, 1536])
def test_tiles_equal_the_product_in_float64(columns: int, inner: int) -> None:
    """For numbers of rows around the sizes of tiles and blocks, rows apart in memory, with and without bias."""
    weight, bias = bf16(columns, inner), bf16(columns, seed=1)
    for offset in (None, bias):
        layer = PackedLinear(weight.clone(), offset)
        assert layer.kind == "tiles"
        for rows in (0, 1, 2, 15, 16, 17, 31, 32, 33, 48, 63, 64, 100):
            x = bf16(rows, inner + 8, seed=2)[:, 8:]
            expected = x.double() @ weight.double().T + (0 if offset is None else offset.double())
            scale = x.double().abs() @ weight.double().abs().T + 1
            error = (layer(x).double() - expected).abs()
            # One rounding to bfloat16, and float32 sums.
            assert (error <= expected.abs() * 2**-8 + scale * 2**-20).all()


@needs_tiles
@pytest.mark.parametrize("inner", [64, 4096])
def test_a_row_s_result_is_the_same_bit_for_bit_whatever_the_other_rows(inner: int) -> None:
    """With thousands of rows, which go in several chunks, and with any number of threads."""
    layer = PackedLinear(bf16(200, inner))
    x = bf16(1500, inner, seed=1)
    whole = layer(x)
    for first, last in ((0, 1), (3, 20), (40, 73), (1, 1500), (1499, 1500)):
        assert torch.equal(layer(x[first:last]), whole[first:last])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert torch.equal(layer(x), whole)
    finally:
        torch.set_num_threads(threads)


@needs_tiles
def test_what_is_not_a_number_stays_in_its_row() -> None:
    layer = PackedLinear(bf16(64, 64))
    x = bf16(37, 64, seed=1)
    expected = layer(x)
    x[5], x[36] = float("nan"), float("inf")
    out = layer(x)
    others = [row for row in range(37) if row not in (5, 36)]
    assert torch.equal(out[others], expected[others])
    assert out[5].isnan().all()
    assert not out[36].isfinite().any()


@needs_tiles
def test_tiles_write_and_read_nothing_outside() -> None:
    """The rows end where the memory does, and what lies beside the result stays."""
    layer = PackedLinear(bf16(40, 64))
    memory = torch.full((20, 64), float("nan"), dtype=torch.bfloat16)
    memory[:17] = bf16(17, 64, seed=1)
    assert layer(memory[:17]).isfinite().all()


@needs_tiles
@pytest.mark.parametrize("columns", [1, 15, 16, 17, 31, 32, 33, 100, 3333])
@pytest.mark.parametrize("bias", [False, True])
def test_argmax_is_that_of_the_layer_s_results(columns: int, bias: bool) -> None:
    """Bit for bit, so with the rounding of the results; rows apart in memory, with NaN and infinities in some."""
    offset = bf16(columns, seed=1) if bias else None
    layer = PackedLinear(bf16(columns, 64), offset)
    assert layer.has_argmax
    for rows in (0, 1, 15, 16, 17, 31, 32, 33, 100):
        x = bf16(rows, 72, seed=2)[:, 8:]
        x[2::7], x[3::7], x[4::7], x[5::7] = torch.nan, -torch.tensor(torch.nan), torch.inf, 0
        found = layer.argmax(x)
        assert found.dtype == torch.int64
        assert found.tolist() == (reference.greedy_argmax(layer(x)).tolist() if rows else [])


@needs_tiles
def test_argmax_is_the_first_of_equals() -> None:
    """In whichever halves, panels and tasks they are; zeros of both signs are equal, and -inf is nothing."""
    weight = torch.zeros(5000, 32)
    for row, columns in enumerate([(4, 5), (15, 16), (31, 32), (40, 4000), (4000, 4999), (6, 38), (7, 22)]):
        weight[list(columns), row] = 3
    x = torch.eye(32)
    x[8], x[9] = -torch.inf, torch.inf
    weight[:, 8] = 1
    x[8, :8] = x[8, 9:] = x[9, :8] = x[9, 9:] = 1
    layer = PackedLinear(weight.bfloat16())
    expected = [4, 15, 31, 40, 4000, 6, 7, 0, -1, 0]
    x[7, 7] = -0.0
    assert layer.argmax(x[:10].bfloat16()).tolist() == expected


@needs_tiles
@pytest.mark.parametrize(
    ("bias", "expected"),
    [
        ([-(2.0**-130), 0.0, 0.0], 0),  # rounded to -0
        ([0.0, torch.nan, 1.0], -1),
        ([0.0, -torch.nan, 1.0], -1),
        ([0.0, 1.0, torch.inf], 2),
        ([-torch.inf, -1.0, -torch.inf], 1),
    ],
)
def test_argmax_of_what_is_in_one_column(bias: list[float], expected: int) -> None:
    offset = torch.tensor(bias).bfloat16()
    layer = PackedLinear(torch.zeros(3, 32).bfloat16(), offset)
    x = torch.zeros(1, 32).bfloat16()
    assert layer.argmax(x).tolist() == reference.greedy_argmax(layer(x)).tolist() == [expected]


@needs_tiles
def test_argmax_in_several_chunks_and_with_any_number_of_threads() -> None:
    layer = PackedLinear(bf16(200, 4096))
    x = bf16(1500, 4096, seed=1)
    expected = reference.greedy_argmax(layer(x)).tolist()
    threads = torch.get_num_threads()
    for count in (threads, 1, 3):
        torch.set_num_threads(count)
        try:
            assert layer.argmax(x).tolist() == expected
        finally:
            torch.set_num_threads(threads)


def test_only_layers_in_tiles_without_gates_have_argmax() -> None:
    assert PackedLinear(bf16(64, 64)).has_argmax == HAS_TILES
    assert not PackedLinear(bf16(64, 64), gated=True).has_argmax
    assert not PackedLinear(bf16(64, 33)).has_argmax
    assert not PackedLinear(bf16(64, 64).float()).has_argmax


def test_inner_sizes_that_do_not_fill_the_tiles_go_another_way() -> None:
    for inner in (1, 31, 33, 48):
        assert PackedLinear(bf16(8, inner)).kind != "tiles"
    assert PackedLinear(bf16(8, 64).float()).kind == "onednn"


def test_without_the_compiled_kernels_onednn_computes_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagedgen_kernels.cpu.linear.load", lambda: "there is no compiler")
    layer = PackedLinear(bf16(8, 64))
    assert layer.kind in ("onednn", "plain")
    assert layer(bf16(3, 64)).shape == (3, 8)
