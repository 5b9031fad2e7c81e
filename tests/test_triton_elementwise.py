"""The triton kernels for states, caches and feed-forward layers against `reference`, with no fallback to it."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernel_cases import make_caches
from pagedgen_kernels import reference
from pagedgen_kernels import triton as kernels
from pagedgen_kernels.triton import activation, copies, norm, rotary
from triton_interpreter import DEVICE

MODULES = (activation, copies, norm, rotary)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ULP = {torch.float32: 3e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
# What numpy says of infinities that a GPU takes in its stride.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")


@pytest.fixture(autouse=True)
def _no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes the reference away from the launchers: a call that they do not cover fails."""
    for module in MODULES:
        monkeypatch.setattr(module, "reference", SimpleNamespace())


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal up to the order of float32 sums and one rounding of the dtype, which few elements need."""
    assert actual.dtype == expected.dtype
    tolerance = ULP[actual.dtype]
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance, equal_nan=True)
    if actual.dtype != torch.float32 and actual.numel():
        different = (actual != expected) & ~(actual.isnan() & expected.isnan())
        assert different.sum() <= 1 + 1e-3 * different.numel()


def slots_of(count: int, num_slots: int, dtype: torch.dtype) -> torch.Tensor:
    """Distinct slots in no order, and two tokens that only fill the batch up."""
    slots = torch.randperm(num_slots, generator=torch.Generator().manual_seed(7))[:count]
    slots[[1, count - 2]] = -1
    return slots.to(dtype).to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "value_dim", "block_size"), [(64, 64, 16), (24, 40, 4), (80, 80, 1)])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_write_kv(dtype: torch.dtype, dim: int, value_dim: int, block_size: int, index: torch.dtype) -> None:
    fused = randn(6, 8, 80, dtype=dtype)
    key, value = fused[:, :3, :dim], fused[:, 4:7, :value_dim]
    slots = slots_of(6, 12 * block_size, index)
    results = []
    for module in (kernels, reference):
        pair = [cache.to(DEVICE) for cache in make_caches(12, 3, block_size, dim, value_dim, 0.0, dtype)]
        module.write_kv(key, value, *pair, slots)
        results.append(pair)
    assert all(map(torch.equal, *results))
    assert torch.equal(results[0][0][slots[3] // block_size, :, slots[3] % block_size], key[3])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("dim", "rotary_dim", "norms"),
    [(64, 64, False), (64, 64, True), (64, 16, True), (80, 32, False), (6, 2, True), (34, 34, False), (96, 96, True)],
)
def test_rotary_write_kv(dtype: torch.dtype, dim: int, rotary_dim: int, norms: bool) -> None:
    fused = randn(5, 29, dim + 4, dtype=dtype)
    angles = randn(5, rotary_dim + 3)[:, :rotary_dim]
    query, key = fused[:, :21, :dim], fused[:, 21:23, 1 : dim + 1]
    value_dim = min(dim, 64)  # as wide as the keys for some
    value = fused[:, 23:27:2, :value_dim]
    slots = slots_of(5, 24, torch.int64)
    options: dict[str, Any] = {}
    if norms:
        options = {"query_norm": randn(dim, dtype=dtype, seed=1), "key_norm": randn(dim, dtype=dtype, seed=2)}
        options["eps"] = 0.3  # large enough to tell
    results = []
    for module in (kernels, reference):
        caches = [cache.to(DEVICE) for cache in make_caches(6, 2, 4, dim, value_dim, 0.0, dtype)]
        rotated = module.rotary_write_kv(query, key, value, angles.cos(), angles.sin(), *caches, slots, **options)
        results.append((rotated, *caches))
    for ours, expected in zip(*results, strict=True):
        close(ours, expected)


def test_rotation_by_angles_in_the_models_dtype() -> None:
    query, key = randn(3, 4, 32, dtype=torch.bfloat16), randn(3, 2, 32, dtype=torch.bfloat16, seed=1)
    cos, sin = randn(2, 3, 32, dtype=torch.bfloat16, seed=2)
    caches = [cache.to(DEVICE) for cache in make_caches(2, 2, 4, 32, 32, 0.0, torch.bfloat16)]
    rotated = kernels.rotary_write_kv(query, key, key, cos, sin, *caches, torch.arange(3, device=DEVICE))
    close(rotated, reference.apply_rotary(query, key, cos, sin)[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "rows"), [(1, 1), (15, 40), (64, 5), (288, 3), (1000, 2), (2050, 1)])
def test_norms_and_gates(dtype: torch.dtype, width: int, rows: int) -> None:
    x, residual = (randn(rows, 2 * width + 3, dtype=dtype, seed=s).mul(3)[:, 1 : 2 * width + 1] for s in (0, 1))
    weight = randn(2 * width, dtype=dtype, seed=2)
    close(kernels.rms_norm(x, weight, 0.1), reference.rms_norm(x, weight, 0.1))
    normed, total = kernels.add_rms_norm(x, residual, weight, 0.1)
    expected, expected_total = reference.add_rms_norm(x, residual, weight, 0.1)
    close(normed, expected)
    assert torch.equal(total, expected_total)
    close(kernels.silu_mul(x), reference.silu_mul(x))
    # Far below zero the reference takes a difference of numbers near 1, and the kernel does not.
    torch.testing.assert_close(kernels.gelu_mul(x), reference.gelu_mul(x), atol=ULP[dtype], rtol=ULP[dtype])


@pytest.mark.parametrize("name", ["silu_mul", "gelu_mul"])
def test_gates_at_extreme_values(name: str) -> None:
    gate = torch.tensor(
        [-1e30, -200.0, -89.0, -88.0, -20.0, -1e-30, 0.0, 20.0, 88.0, 200.0, 1e30, torch.nan, torch.inf]
    )
    both = torch.cat((gate, torch.ones(13)))[None].to(DEVICE)
    close(getattr(kernels, name)(both), getattr(reference, name)(both))


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_copy_blocks(index: torch.dtype) -> None:
    """Blocks of more than one tile, and of fewer bytes than a move; a source that goes to several destinations."""
    pools = [randn(2, 9, 2, 3, 4, 200), randn(3, 9, 1, 1, 1, 6, dtype=torch.bfloat16)]
    expected = [pool.clone() for pool in pools]
    pairs = torch.tensor([[8, 1], [3, 0], [3, 4], [7, 6]], dtype=index, device=DEVICE)
    for some in (pairs, pairs[:, [0, 1]].T.contiguous().T, pairs[:0]):
        kernels.copy_blocks(pools, some)
        reference.copy_blocks(expected, some)
        assert all(map(torch.equal, pools, expected))


def test_no_tokens() -> None:
    x, weight = randn(0, 8), randn(8)
    caches = [cache.to(DEVICE) for cache in make_caches(2, 1, 4, 8, 8, 0.0, torch.float32)]
    slots = torch.empty(0, dtype=torch.int64, device=DEVICE)
    assert kernels.rms_norm(x, weight, 1e-5).shape == (0, 8)
    assert kernels.add_rms_norm(x, x, weight, 1e-5)[1].shape == (0, 8)
    assert kernels.silu_mul(x).shape == (0, 4)
    assert kernels.rotary_write_kv(x[:, None], x[:, None], x[:, None], x, x, *caches, slots).shape == (0, 1, 8)
    kernels.write_kv(x[:, None], x[:, None], *caches, slots)


def fallbacks() -> dict[str, Callable[[], object]]:
    """A call of each launcher that the kernels do not cover."""
    x = torch.randn(3, 2, 8, dtype=torch.float64, device=DEVICE)
    cache = torch.randn(2, 2, 4, 8, dtype=torch.float64, device=DEVICE)
    slots = torch.arange(3, device=DEVICE)
    single = [tensor.float() for tensor in (x, x, cache.mT, cache)]
    return {
        "write_kv": lambda: kernels.write_kv(x, x, cache, cache, slots),
        "write_kv ": lambda: kernels.write_kv(*single, slots),
        "rotary_write_kv": lambda: kernels.rotary_write_kv(x, x, x, x[:, 0], x[:, 0], cache, cache, slots),
        "copy_blocks": lambda: kernels.copy_blocks([cache[None].mT], torch.tensor([[0, 1]], device=DEVICE)),
        "rms_norm": lambda: kernels.rms_norm(x[0], x[0, 0], 1e-5),
        "rms_norm ": lambda: kernels.rms_norm(x[0].float().T, x[0, :, 0].float(), 1e-5),
        "rms_norm  ": lambda: kernels.rms_norm(x[0].float(), x[0, 0], 1e-5),
        "add_rms_norm": lambda: kernels.add_rms_norm(x[0], x[1], x[0, 0], 1e-5),
        "silu_mul": lambda: kernels.silu_mul(x[0]),
        "gelu_mul": lambda: kernels.gelu_mul(x[0]),
    }


@pytest.mark.parametrize("name", fallbacks())
def test_what_is_not_covered_goes_to_the_reference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    stub = SimpleNamespace(**{name.strip(): lambda *args, **options: calls.append(name)})
    for module in MODULES:
        monkeypatch.setattr(module, "reference", stub)
    fallbacks()[name]()
    assert calls == [name]


def test_signatures_are_those_of_the_reference() -> None:
    import inspect

    for name in set(kernels.__all__) - {"available", "unavailable_reason"}:
        assert inspect.signature(getattr(kernels, name)) == inspect.signature(getattr(reference, name)), name
