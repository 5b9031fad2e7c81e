"""The attention kernels against `reference`, with the fallback to it cut off so that the kernels are what runs."""

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import PagedCase, make_case
from pagedgen_kernels import reference
from pagedgen_kernels.triton import attention, attention_prefill, launch
from triton_interpreter import DEVICE, INTERPRETED, last_program_first

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
# One rounding of the output, and in half precision one of each weight before it meets the values.
TOLERANCE = {FP32: 1e-5, BF16: 2**-7, FP16: 2**-10}


@pytest.fixture(scope="module", autouse=True)
def _no_fallback() -> Iterator[None]:
    """Takes the reference away from the launcher: a call that it does not cover fails."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "reference", SimpleNamespace())
        yield


def on_device(case: PagedCase) -> PagedCase:
    tensors = {field.name: getattr(case, field.name) for field in fields(case)}
    moved = {name: value.to(DEVICE) for name, value in tensors.items() if isinstance(value, torch.Tensor)}
    options = {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in case.options.items()}
    return replace(case, **moved, options=options)


def check(case: PagedCase) -> None:
    case = on_device(case)
    actual, expected = case.run(attention), case.run(reference)
    assert actual.dtype == expected.dtype
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


def case_of(lengths: Sequence[tuple[int, int]], group: int, dim: int, block_size: int, **options: Any) -> PagedCase:
    return make_case(lengths, 2 * group, 2, dim, dim, block_size, **options)


@pytest.fixture
def one_multiprocessor(monkeypatch: pytest.MonkeyPatch) -> None:
    """So few that no context is split."""
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 1)


@pytest.mark.parametrize(
    ("dim", "dtype"),
    [(16, FP32), (64, FP16), (64, BF16), (80, FP32), (128, BF16), (128, FP32), (192, BF16), (256, FP16), (256, FP32)],
)
def test_head_sizes(dim: int, dtype: torch.dtype, one_multiprocessor: None) -> None:
    check(case_of([(1, 1), (1, 64), (1, 65), (1, 150)], 3, dim, 16, dtype=dtype))
    check(case_of([(5, 5), (60, 150)], 3, dim, 16, dtype=dtype))


@pytest.mark.parametrize("block_size", [1, 4, 8, 24, 32, 64, 128])
def test_any_block_size(block_size: int) -> None:
    check(case_of([(1, 1), (1, 170), (30, 170)], 4, 64, block_size, dtype=FP16))


@pytest.mark.parametrize("group", [1, 2, 5, 8, 9, 16, 17, 70])
def test_any_group_of_query_heads(group: int) -> None:
    check(case_of([(1, 40), (3, 70), (20, 20)], group, 64, 16, dtype=FP16))


def test_a_group_of_more_heads_than_a_program_has_rows() -> None:
    check(case_of([(2, 40), (1, 3)], 130, 16, 16))


@pytest.mark.parametrize(("softcap", "sinks"), [(None, False), (None, True), (1.5, True), (50.0, False)])
@pytest.mark.parametrize("sliding_window", [None, 1, 64, 100])
def test_options(softcap: float | None, sinks: bool, sliding_window: int | None) -> None:
    lengths = [(1, 200), (1, 3), (5, 150), (90, 90)]
    check(make_case(lengths, 3, 1, 48, 40, 8, sinks=sinks, softcap=softcap, sliding_window=sliding_window))


@pytest.mark.parametrize(
    ("dtype", "sliding_window", "sinks"), [(FP32, None, True), (FP32, 300, False), (BF16, 1, True), (FP16, None, False)]
)
def test_long_contexts_are_split(
    dtype: torch.dtype, sinks: bool, sliding_window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over more programs than some contexts have tiles, and than the results that are merged at a time."""
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 40)
    options: dict[str, Any] = {"dtype": dtype, "sliding_window": sliding_window, "sinks": sinks}
    check(make_case([(1, 2600), (1, 1), (1, 257)], 3, 1, 32, 24, 32, **options))


def test_splits_beside_prompts() -> None:
    check(make_case([(1, 900), (30, 60), (1, 300), (2, 2)], 3, 1, 32, 32, 16, sinks=True))


def test_values_of_other_size_than_keys() -> None:
    check(make_case([(1, 70), (40, 90)], 4, 2, 192, 128, 16, dtype=BF16))
    check(make_case([(1, 70)], 4, 2, 64, 200, 16, dtype=BF16))


def test_programs_write_to_places_of_their_own() -> None:
    """Sequences without queries, and programs with a part of their rows unused, among the others."""
    for lengths in ([(0, 20), (1, 90), (45, 90), (0, 5), (30, 30), (1, 20)], [(0, 9), (1, 90), (2, 8)]):
        case = on_device(case_of(lengths, 3, 32, 16))
        out = case.run(attention)
        with last_program_first():
            assert torch.equal(case.run(attention), out)


def test_a_sequence_computes_the_same_in_any_batch(one_multiprocessor: None) -> None:
    """Alone, beside others, beside prompts, and where it is one itself, as long as its context is not split."""
    case = on_device(case_of([(1, 300), (30, 90), (1, 130), (50, 60)], 3, 64, 16, dtype=BF16))
    out, starts = case.run(attention), [0, 1, 31, 32, 82]
    for chosen in ([0], [2], [1], [0, 2], [0, 3]):
        counts = torch.tensor([0, *(starts[s + 1] - starts[s] for s in chosen)])
        rows = torch.cat([torch.arange(starts[s], starts[s + 1]) for s in chosen])
        part = replace(
            case,
            query=case.query[rows],
            block_tables=case.block_tables[chosen],
            context_lens=case.context_lens[chosen],
            query_start=counts.cumsum(0).to(DEVICE, torch.int32),
        )
        assert torch.equal(part.run(attention), out[rows])


@pytest.mark.parametrize("lengths", [[(1, 40), (1, 90)], [(1, 40), (30, 90)]])
def test_integers_of_either_width(lengths: list[tuple[int, int]]) -> None:
    case = case_of(lengths, 3, 32, 16)
    wide = {name: getattr(case, name).long() for name in ("block_tables", "context_lens", "query_start")}
    check(replace(case, **wide))
    check(replace(case, context_lens=wide["context_lens"]))


random_shapes = given(
    contexts=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 100)), min_size=1, max_size=5),
    decoding=st.booleans(),
    group=st.integers(1, 16),
    dim=st.integers(1, 40).map(lambda n: 4 * n),
    block_size=st.integers(1, 40),
    dtype=st.sampled_from([FP32, BF16, FP16]),
    sliding_window=st.none() | st.integers(1, 120),
    softcap=st.none() | st.floats(0.5, 60),
    sinks=st.booleans(),
    seed=st.integers(0, 1000),
)


def check_random(
    contexts: list[tuple[int, int]], decoding: bool, group: int, dim: int, block_size: int, **options: Any
) -> None:
    lengths = [(min(queries, 1) if decoding else queries, queries + before) for queries, before in contexts]
    case = case_of(lengths, group, dim, block_size, **options)
    if len(case.query):
        check(case)


test_random_shapes = settings(max_examples=10, deadline=None)(random_shapes(check_random))
test_many_random_shapes = pytest.mark.slow(settings(max_examples=150, deadline=None)(random_shapes(check_random)))


@pytest.mark.parametrize(
    "lengths",
    [
        [(0, 30), (2, 40)],
        [(3, 40), (0, 0), (0, 70)],
        [(0, 0), (0, 0), (1, 5), (2, 20), (3, 3), (0, 9)],
        [(0, 9), (1, 9)],
    ],
)
def test_sequences_without_queries(lengths: list[tuple[int, int]]) -> None:
    """As many tokens as sequences, or not; never one query each."""
    check(case_of(lengths, 3, 32, 8))


@pytest.mark.skipif(not INTERPRETED, reason="what is compiled keeps the constant")
def test_more_sequences_than_are_searched_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_prefill, "SEARCHED_AT_ONCE", tl.constexpr(4))
    for lengths in ([(1, 9)] * 8 + [(50, 50), (2, 3)], [(1, 9)] * 5 + [(0, 3), (2, 5)]):
        check(case_of(lengths, 3, 32, 8))


@pytest.mark.parametrize("padding", ["tokens", "sequences"])
@pytest.mark.parametrize("multiprocessors", [1, 40])
def test_a_step_padded_to_a_fixed_size(padding: str, multiprocessors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a captured graph launches for fewer sequences than it has room for: the rest of the arrays is garbage."""
    monkeypatch.setattr(launch, "multiprocessors", lambda device: multiprocessors)
    case = on_device(case_of([(1, 300), (1, 20)], 3, 32, 8))
    expected = case.run(reference)
    query = torch.full((6, *case.query.shape[1:]), torch.nan, device=DEVICE)
    query[:2] = case.query
    tables = torch.full((6, case.block_tables.shape[1]), 10**9, dtype=torch.int32, device=DEVICE)
    tables[:2] = case.block_tables
    # Either each has a sequence of its own with an empty context, or tokens and sequences past the real ones have none.
    starts = torch.arange(7) if padding == "sequences" else torch.tensor([0, 1, 2, 2, 2, 2, 2])
    lens = torch.tensor([300, 20, 0, 0, 0, 0] if padding == "sequences" else [300, 20, 10**9, 5, 0, -7])
    starts, lens = (x.to(DEVICE, torch.int32) for x in (starts, lens))
    caches = (case.key_cache, case.value_cache)
    out = attention.paged_attention(query, *caches, tables, lens, starts, **case.options)
    torch.testing.assert_close(out[:2], expected, atol=1e-5, rtol=1e-5)
    assert not out[2:].any()


def test_queries_that_see_no_key_give_zeros() -> None:
    case = on_device(case_of([(0, 9), (2, 9)], 3, 32, 8))
    out = replace(case, context_lens=case.context_lens * 0).run(attention)
    assert not out.any()


def test_a_prompt_beside_empty_sequences() -> None:
    case = on_device(case_of([(1, 50), (9, 40)], 3, 32, 8))
    tables = torch.cat([case.block_tables, torch.full_like(case.block_tables, 10**9)])
    starts = torch.tensor([0, 1, 10, 10, 14], dtype=torch.int32, device=DEVICE)
    lens = torch.tensor([50, 40, 0, 0], dtype=torch.int32, device=DEVICE)
    query = torch.cat([case.query, torch.full_like(case.query[:4], torch.nan)])
    out = attention.paged_attention(query, case.key_cache, case.value_cache, tables, lens, starts, **case.options)
    torch.testing.assert_close(out[:10], case.run(reference), atol=1e-5, rtol=1e-5)


def test_nothing_at_all() -> None:
    case = on_device(case_of([(1, 50)], 3, 32, 8))
    starts = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    caches, tables = (case.key_cache, case.value_cache), case.block_tables
    lens = case.context_lens
    assert attention.paged_attention(case.query[:0], *caches, tables, lens, starts, **case.options).shape == (0, 6, 32)
    out = attention.paged_attention(case.query[:0], *caches, tables[:0], lens[:0], starts[:1], **case.options)
    assert out.shape == (0, 6, 32)


@pytest.mark.parametrize("lengths", [[(1, 50), (1, 60)], [(1, 50), (40, 60)]])
def test_nan_of_used_slots_is_passed_on(lengths: list[tuple[int, int]]) -> None:
    case = on_device(make_case(lengths, 3, 3, 16, 16, 4))
    case.key_cache[int(case.block_tables[0, 1]), 1, 2] = torch.nan
    out = case.run(attention)
    assert torch.equal(out.isnan(), case.run(reference).isnan())
    assert out[0, 1].isnan().all()
    assert out.isnan().sum() == 16


@pytest.mark.parametrize("lengths", [[(1, 50), (1, 60)], [(1, 50), (40, 60)]])
def test_large_scores_do_not_overflow(lengths: list[tuple[int, int]]) -> None:
    case = on_device(case_of(lengths, 3, 32, 8, sinks=True))
    check(replace(case, query=case.query * 1e4))


def uncovered() -> dict[str, PagedCase]:
    """Calls that go to the reference."""
    case = case_of([(1, 50), (3, 60)], 3, 32, 8)
    strided = case.query.mT.contiguous().mT
    return {
        "float64": case_of([(1, 50), (3, 60)], 3, 32, 8, dtype=torch.float64),
        "mixed dtypes": replace(case, query=case.query.half()),
        "large heads": case_of([(1, 50), (3, 60)], 3, 260, 8),
        "strided query": replace(case, query=strided),
        "scattered blocks": replace(case, key_cache=case.key_cache.mT.contiguous().mT),
        "short integers": replace(case, context_lens=case.context_lens.short()),
    }


@pytest.mark.parametrize("name", uncovered())
def test_what_is_not_covered_goes_to_the_reference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        attention, "reference", SimpleNamespace(paged_attention=lambda *args, **options: (args, options))
    )
    case = on_device(uncovered()[name])
    args, options = case.run(attention)
    assert options == case.options
    assert args[0] is case.query
    assert args[-1] is case.query_start


@pytest.mark.skipif(not INTERPRETED, reason="takes ten gigabytes of a real device")
@pytest.mark.parametrize("lengths", [[(1, 5)], [(3, 5)]], ids=["decoding", "prompt"])
def test_heads_that_lie_gigabytes_apart(lengths: list[tuple[int, int]], tmp_path: Path) -> None:
    """As in [heads, tokens, dim] of very many tokens. Before the first head lies as much memory as behind it, so that
    an offset which overflows is read from there."""
    case = make_case(lengths, 3, 1, 16, 16, 4, dtype=FP16)
    apart, row = 1 << 30, 16
    memory = torch.from_file(str(tmp_path / "sparse"), shared=True, size=5 * apart, dtype=FP16)
    query = memory.as_strided(case.query.shape, (row, apart, 1), 2 * apart)
    query.copy_(case.query)
    assert 2 * query.stride(1) == 1 << 31
    check(replace(case, query=query))
