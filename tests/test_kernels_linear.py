"""Linear layers with weights laid out for oneDNN."""

import gc
import weakref

import numpy as np
import pytest
import torch
from pagedgen_kernels.cpu.linear import PackedLinear


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


@pytest.mark.skipif(not PackedLinear(torch.ones(2, 2)).packed, reason="torch has no oneDNN")
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
    assert not layer.packed
    assert torch.equal(layer(x), torch.nn.functional.linear(x, weight))
