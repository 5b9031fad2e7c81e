"""The C++ kernels against `reference`, with the fallback to it cut off so that the C++ path is what runs."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import make_caches, make_case
from pagedgen_kernels import cpu, reference
from pagedgen_kernels.cpu import launchers

pytestmark = pytest.mark.skipif(
    cpu.unavailable_reason() in ("PAGEDGEN_DISABLE_CPP is set", "no C++ compiler was found"),
    reason="the C++ kernels are off",
)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ULP = {torch.float32: 3e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


@pytest.fixture(scope="module", autouse=True)
def _no_fallback() -> Iterator[None]:
    """Takes the reference away from the launchers: a call that they do not cover fails."""
    assert cpu.available(), cpu.unavailable_reason()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launchers, "reference", SimpleNamespace())
        yield


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal up to the order of float32 sums and one rounding of the dtype."""
    assert actual.dtype == expected.dtype
    tolerance = ULP[actual.dtype]
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("block_size", [1, 4, 16, 32])
def test_attention_over_head_and_block_sizes(dtype: torch.dtype, head_dim: int, block_size: int) -> None:
    lengths = [(1, 1), (1, 15), (1, 16), (1, 17), (1, 64), (1, 65), (1, 130), (3, 3), (16, 33), (40, 70)]
    case = make_case(lengths, 6, 2, head_dim, head_dim, block_size, dtype=dtype)
    close(case.run(cpu), case.run(reference))


@pytest.mark.parametrize("group", range(1, 9))
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_over_group_sizes(group: int, dtype: torch.dtype) -> None:
    case = make_case([(1, 40), (2, 9), (1, 64), (31, 80), (1, 7)], 2 * group, 2, 64, 64, 16, dtype=dtype)
    close(case.run(cpu), case.run(reference))


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("softcap", [None, 1.5, 50.0])
@pytest.mark.parametrize("sliding_window", [None, 1, 7, 64, 100])
def test_attention_options(sinks: bool, softcap: float | None, sliding_window: int | None) -> None:
    lengths = [(1, 200), (1, 3), (5, 150), (90, 90), (50, 130)]
    case = make_case(lengths, 6, 2, 48, 40, 8, sinks=sinks, softcap=softcap, sliding_window=sliding_window)
    close(case.run(cpu), case.run(reference))


@pytest.mark.parametrize("sliding_window", [None, 1500])
@pytest.mark.parametrize("sinks", [False, True])
def test_attention_splits_long_contexts(sliding_window: int | None, sinks: bool) -> None:
    lengths = [(1, 1023), (1, 1024), (1, 1025), (3, 2100), (30, 3000)]
    case = make_case(lengths, 2, 1, 32, 32, 32, sliding_window=sliding_window, sinks=sinks)
    close(case.run(cpu), case.run(reference))


@settings(max_examples=60, deadline=None)
@given(
    contexts=st.lists(st.tuples(st.integers(1, 90), st.integers(0, 100)), min_size=1, max_size=5),
    heads=st.tuples(st.integers(1, 3), st.integers(1, 8)),
    dims=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    block_size=st.integers(1, 40),
    dtype=st.sampled_from(DTYPES),
    sliding_window=st.none() | st.integers(1, 120),
    softcap=st.none() | st.floats(0.5, 60),
    sinks=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_attention_on_random_shapes(
    contexts: list[tuple[int, int]], heads: tuple[int, int], dims: tuple[int, int], block_size: int, **options: Any
) -> None:
    lengths = [(queries, queries + before) for queries, before in contexts]
    case = make_case(lengths, heads[0] * heads[1], heads[0], *dims, block_size, **options)
    close(case.run(cpu), case.run(reference))


def test_attention_of_a_sequence_does_not_depend_on_the_batch_or_the_threads() -> None:
    lengths = [(1, 1500), (1, 70), (20, 90), (64, 300)]
    together = make_case(lengths, 6, 2, 64, 64, 16, dtype=torch.bfloat16)
    out = together.run(cpu)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(together.run(cpu), out)
    finally:
        torch.set_num_threads(threads)
    for s in range(len(lengths)):
        begin, end = together.query_start[s : s + 2].tolist()
        alone = cpu.paged_attention(
            together.query[begin:end],
            together.key_cache,
            together.value_cache,
            together.block_tables[s : s + 1],
            together.context_lens[s : s + 1],
            torch.tensor([0, end - begin], dtype=torch.int32),
            **together.options,
        )
        assert torch.equal(alone, out[begin:end])


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(
    ("kv_heads", "key_dim", "value_dim", "block_size", "sliding_window"),
    [(3, 64, 64, 16, None), (5, 32, 96, 48, 37), (1, 128, 128, 16, 37)],
)
def test_attention_of_many_decoding_sequences(
    group: int, kv_heads: int, key_dim: int, value_dim: int, block_size: int, sliding_window: int | None
) -> None:
    """Enough of them for a task to take all key/value heads of its sequence, beside a few prompts."""
    lengths = [(1, 1 + 9 * s) for s in range(8 * torch.get_num_threads() + 5)] + [(70, 90), (1, 1100), (3, 40)]
    options: dict[str, Any] = {"sliding_window": sliding_window, "sinks": sliding_window is not None}
    case = make_case(
        lengths, kv_heads * group, kv_heads, key_dim, value_dim, block_size, dtype=torch.bfloat16, **options
    )
    close(case.run(cpu), case.run(reference))


@pytest.mark.parametrize("queries", [1, 40])
def test_attention_passes_nan_of_used_slots_on(queries: int) -> None:
    case = make_case([(queries, 50), (queries, 60)], 3, 3, 16, 16, 4)
    used = int(case.block_tables[0, 1])
    case.key_cache[used, 1, 2] = torch.nan
    out = case.run(cpu)
    assert torch.equal(out.isnan().flatten(1).any(1), case.run(reference).isnan().flatten(1).any(1))
    assert out[queries - 1, 1].isnan().all()
    assert not out[:, [0, 2]].isnan().any()
    assert not out[queries:].isnan().any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("key_dim", [24, 40])
def test_write_kv(dtype: torch.dtype, block_size: int, key_dim: int) -> None:
    fused = torch.randn(150, 5, 40).to(dtype)
    key, value = fused[:, :2, :key_dim], fused[:, 2:4, :]
    slots = torch.randperm(200 * block_size)[:150]
    caches = []
    for kernels in (cpu, reference):
        pair = make_caches(200, 2, block_size, key_dim, 40, 0.0, dtype)
        kernels.write_kv(key, value, *pair, slots)
        caches.append(pair)
    assert torch.equal(caches[0][0], caches[1][0])
    assert torch.equal(caches[0][1], caches[1][1])
    assert torch.equal(caches[0][0][slots[7] // block_size, :, slots[7] % block_size], key[7])


@pytest.mark.parametrize("kernels", [cpu, reference])
def test_tokens_that_fill_a_batch_up_are_not_stored(kernels: Any) -> None:
    key, query = torch.randn(5, 2, 8), torch.randn(5, 4, 8)
    slots, angles = torch.tensor([3, -1, 17, -1, 0]), torch.randn(5, 8)
    kept = slots >= 0
    expected, caches = make_caches(5, 2, 4, 8, 8, 0.0, torch.float32), make_caches(5, 2, 4, 8, 8, 0.0, torch.float32)
    reference.write_kv(key[kept], key[kept], *expected, slots[kept])
    kernels.write_kv(key, key, *caches, slots)
    assert all(map(torch.equal, caches, expected))
    rotation = angles.cos(), angles.sin()
    reference.rotary_write_kv(query[kept], key[kept], key[kept], *(x[kept] for x in rotation), *expected, slots[kept])
    rotated = kernels.rotary_write_kv(query, key, key, *rotation, *caches, slots)
    close(caches[0], expected[0])
    close(rotated, reference.apply_rotary(query, key, *rotation)[0])


def test_copy_blocks() -> None:
    pools = [torch.randn(3, 40, 2, 4, 8), torch.randn(2, 40, 1, 4, 8).to(torch.bfloat16)]
    expected = [pool.clone() for pool in pools]
    order = torch.randperm(40)
    copies = torch.stack((order[:12], order[12:24]), 1)
    cpu.copy_blocks(pools, copies)
    reference.copy_blocks(expected, copies)
    assert all(torch.equal(a, b) for a, b in zip(pools, expected, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 15, 64, 576, 1000])
@pytest.mark.parametrize("rows", [1, 70])
def test_norms_and_gate(dtype: torch.dtype, width: int, rows: int) -> None:
    x, residual = (torch.randn(rows, 2 * width + 3).mul(3).to(dtype)[:, 1 : 2 * width + 1] for _ in range(2))
    weight = torch.randn(2 * width).to(dtype)
    close(cpu.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    normed, total = cpu.add_rms_norm(x, residual, weight, 1e-6)
    expected, expected_total = reference.add_rms_norm(x, residual, weight, 1e-6)
    close(normed, expected)
    assert torch.equal(total, expected_total)
    close(cpu.silu_mul(x), reference.silu_mul(x))
    close(cpu.gelu_mul(x), reference.gelu_mul(x))


@pytest.mark.parametrize("name", ["silu_mul", "gelu_mul"])
def test_gate_at_extreme_values(name: str) -> None:
    gate = torch.tensor([-200.0, -89.0, -88.0, -20.0, 0.0, 20.0, 88.0, 200.0, torch.nan, torch.inf])
    rows = torch.cat((gate, torch.ones(10)))[None]
    close(getattr(cpu, name)(rows), getattr(reference, name)(rows))


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "rotary_dim"), [(64, 64), (64, 16), (80, 32), (6, 2), (34, 34)])
def test_rotary_write_kv(dtype: torch.dtype, dim: int, rotary_dim: int, norms: bool) -> None:
    fused = torch.randn(90, 8, dim + 4).to(dtype)
    angles = torch.randn(90, rotary_dim)
    query, key = fused[:, :5, :dim], fused[:, 5:7, 1 : dim + 1]
    value_dim = min(dim, 64)  # as wide as the keys for some
    value = fused[:, 4:8:2, :value_dim]
    slots = torch.randperm(120)[:90]
    weights = torch.rand(2, dim).to(dtype)
    options: dict[str, Any] = {"query_norm": weights[0], "key_norm": weights[1], "eps": 1e-6} if norms else {}
    results = []
    for kernels in (cpu, reference):
        caches = make_caches(30, 2, 4, dim, value_dim, 0.0, dtype)
        rotated = kernels.rotary_write_kv(query, key, value, angles.cos(), angles.sin(), *caches, slots, **options)
        results.append((rotated, *caches))
    for ours, expected in zip(*results, strict=True):
        close(ours, expected)


def fallbacks() -> dict[str, Callable[[], object]]:
    """A call of each launcher that the C++ kernels do not cover."""
    x = torch.randn(3, 2, 8, dtype=torch.float64)
    cache = torch.randn(2, 2, 4, 8, dtype=torch.float64)
    tables, lens, start = (torch.tensor(v, dtype=torch.int32) for v in ([[0]], [3], [0, 3]))
    return {
        "write_kv": lambda: cpu.write_kv(x, x, cache, cache, torch.arange(3)),
        "paged_attention": lambda: cpu.paged_attention(x, cache, cache, tables, lens, start, scale=1.0),
        "copy_blocks": lambda: cpu.copy_blocks([cache[None].mT], torch.tensor([[0, 1]])),
        "rms_norm": lambda: cpu.rms_norm(x[0], x[0, 0], 1e-5),
        "add_rms_norm": lambda: cpu.add_rms_norm(x[0], x[1], x[0, 0], 1e-5),
        "silu_mul": lambda: cpu.silu_mul(x[0]),
        "gelu_mul": lambda: cpu.gelu_mul(x[0]),
        "rotary_write_kv": lambda: cpu.rotary_write_kv(
            x, x, x, torch.ones(3, 8), torch.ones(3, 8), cache, cache, torch.arange(3)
        ),
        "greedy_argmax": lambda: cpu.greedy_argmax(x[0]),
        "gumbel_argmax": lambda: cpu.gumbel_argmax(x[0], torch.ones(2), torch.arange(2)),
        "lowest_kept": lambda: cpu.lowest_kept(
            x[0], torch.ones(2), torch.zeros(2, dtype=torch.int64), torch.ones(2), torch.zeros(2)
        ),
        "top_tokens": lambda: cpu.top_tokens(x[0], torch.ones(2), 3),
    }


def test_transposed_views_go_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launchers, "reference", reference)
    x, weight = torch.randn(16, 8).T, torch.randn(16)
    close(cpu.rms_norm(x, weight, 1e-5), reference.rms_norm(x.contiguous(), weight, 1e-5))
    assert torch.equal(cpu.greedy_argmax(x), x.argmax(-1))


@pytest.mark.parametrize("name", fallbacks())
def test_what_is_not_covered_goes_to_the_reference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(launchers, "reference", SimpleNamespace(**{name: lambda *args, **options: calls.append(name)}))
    fallbacks()[name]()
    assert calls == [name]
