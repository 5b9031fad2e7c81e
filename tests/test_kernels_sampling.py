"""The C++ kernels over rows of logits against `reference`, with the fallback to it cut off."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pagedgen_kernels import cpu, reference
from pagedgen_kernels.cpu import launchers
from scipy import stats

pytestmark = pytest.mark.skipif(
    cpu.unavailable_reason() in ("PAGEDGEN_DISABLE_CPP is set", "no C++ compiler was found"),
    reason="the C++ kernels are off",
)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(scope="module", autouse=True)
def _no_fallback() -> Iterator[None]:
    """Takes the reference away from the launchers: a call that they do not cover fails."""
    assert cpu.available(), cpu.unavailable_reason()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launchers, "reference", SimpleNamespace())
        yield


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [1, 7, 16, 1023, 1025, 5000])
def test_argmax_with_ties_and_unusable_rows(dtype: torch.dtype, vocab_size: int) -> None:
    logits = torch.randn(20, vocab_size).mul(2).round().to(dtype)  # rounded, so that many tie
    logits[3] = -torch.inf
    logits[4, -1] = torch.nan
    logits[5, 0] = torch.nan
    logits[6, vocab_size // 2] = torch.inf
    logits[7, :-1] = -torch.inf
    for result in (cpu.greedy_argmax(logits), reference.greedy_argmax(logits)):
        rows = logits.float().numpy()
        assert result.tolist() == [-1 if r in (3, 4, 5) else int(rows[r].argmax()) for r in range(20)]
    keys, temperature = torch.arange(20), torch.full((20,), 0.7)
    drawn = cpu.gumbel_argmax(logits, temperature, keys)
    assert torch.equal(drawn, reference.gumbel_argmax(logits, temperature, keys))
    assert drawn[3:6].tolist() == [-1, -1, -1]
    assert drawn[7] == vocab_size - 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spread", [0.0, 1e-3, 1.0, 10.0, 1e4])
def test_gumbel_draws_equal_the_reference(dtype: torch.dtype, spread: float) -> None:
    rows, vocab_size = 24, 3001
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(rows, vocab_size, generator=generator) * spread).to(dtype)
    temperature = torch.logspace(-4, 2, rows)
    keys = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator)
    assert torch.equal(cpu.gumbel_argmax(logits, temperature, keys), reference.gumbel_argmax(logits, temperature, keys))
    unsigned = keys.view(torch.uint64)
    assert torch.equal(
        cpu.gumbel_argmax(logits, temperature, unsigned), reference.gumbel_argmax(logits, temperature, keys)
    )


@settings(max_examples=50, deadline=None)
@given(
    values=st.lists(st.floats(-60, 60, width=32) | st.just(float("-inf")), min_size=1, max_size=80),
    temperature=st.floats(0.01, 10),
    key=st.integers(0, 2**64 - 1),
)
def test_gumbel_draw_on_random_rows(values: list[float], temperature: float, key: int) -> None:
    arguments = torch.tensor([values]), torch.tensor([temperature]), torch.tensor([key], dtype=torch.uint64)
    token = int(cpu.gumbel_argmax(*arguments))
    assert token == int(reference.gumbel_argmax(*arguments))
    assert token == -1 if max(values) == float("-inf") else values[token] > float("-inf")


def same_top(logits: torch.Tensor, temperature: torch.Tensor, k: int, rows: torch.Tensor | None = None) -> None:
    """The same values and ids, bit for bit, except where a NaN leaves them without meaning; totals up to rounding."""
    values, ids, total = cpu.top_tokens(logits, temperature, k, rows)
    expected_values, expected_ids, expected_total = reference.top_tokens(logits, temperature, k, rows)
    assert (values.dtype, ids.dtype, total.dtype) == (torch.float32, torch.int64, torch.float32)
    torch.testing.assert_close(total, expected_total, rtol=2e-6, atol=2e-6, equal_nan=True)
    usable = ~expected_total.isnan()
    assert torch.equal(values[usable], expected_values[usable])
    assert torch.equal(ids[usable], expected_ids[usable])
    assert ((ids >= 0) & (ids < logits.shape[1])).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [1, 7, 16, 1023, 1025, 5000])
@pytest.mark.parametrize("k", [1, 2, 64, 192, 5000])
def test_top_tokens_with_ties_and_unusable_rows(dtype: torch.dtype, vocab_size: int, k: int) -> None:
    logits = torch.randn(20, vocab_size).mul(2).round().to(dtype)  # rounded, so that many tie
    logits[3] = -torch.inf
    logits[4, -1] = torch.nan
    logits[5, 0] = torch.nan
    logits[6, vocab_size // 2] = torch.inf
    logits[7, :-1] = -torch.inf
    logits[8] = 0.0
    logits[9], logits[9, vocab_size // 2 :] = 0.0, -0.0
    logits[10, vocab_size // 3 :] = -torch.inf
    same_top(logits, torch.logspace(-3, 2, 20), min(k, vocab_size))


@pytest.mark.parametrize("order", ["ascending", "descending", "constant"])
@pytest.mark.parametrize("k", [1, 64, 1000])
def test_top_tokens_of_sorted_rows(order: str, k: int) -> None:
    """Rows in which every logit, or none after the first ones, is among the largest so far."""
    logits = {"ascending": torch.arange(9000.0), "descending": -torch.arange(9000.0), "constant": torch.ones(9000)}
    same_top(logits[order].expand(3, 9000), torch.tensor([0.5, 1.0, 300.0]), k)


@pytest.mark.parametrize("temperature", [1e-5, 1.0, 50.0])
def test_totals_at_extreme_values(temperature: float) -> None:
    logits = torch.randn(6, 3000) * torch.tensor([1e-3, 1.0, 30.0, 1e4, 1e30, 1.0])[:, None]
    logits[5, -1] = 1e4  # far above all that came before
    expected = (logits.double() / temperature).logsumexp(1).float()
    total = cpu.top_tokens(logits, torch.full((6,), temperature), 1)[2]
    torch.testing.assert_close(total, expected, rtol=1e-6, atol=1e-5)


@settings(max_examples=80, deadline=None)
@given(
    values=st.lists(st.floats(-60, 60, width=32) | st.just(float("-inf")), min_size=1, max_size=80),
    k=st.integers(1, 80),
    temperature=st.floats(0.01, 10),
)
def test_top_tokens_on_random_rows(values: list[float], k: int, temperature: float) -> None:
    same_top(torch.tensor([values]), torch.tensor([temperature]), min(k, len(values)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [1, 7, 16, 1025, 5000])
@pytest.mark.parametrize("spread", [0.1, 3.0])
def test_lowest_kept(dtype: torch.dtype, vocab_size: int, spread: float) -> None:
    """The same tokens, except for those whose mass lies so near to p that the order of adding tells."""
    rows = 60
    generator = torch.Generator().manual_seed(vocab_size)
    logits = (torch.randn(rows, vocab_size, generator=generator) * spread).to(dtype)
    logits[7, vocab_size // 3 + 1 :] = -torch.inf
    logits[8] = logits[8].float().round().to(dtype)
    temperature = torch.tensor([0.3, 1.0, 2.0]).repeat(rows // 3)
    top_k = torch.tensor([0, 1, 2, 100, vocab_size, 10_000]).repeat(rows // 6)
    top_p = torch.tensor([1.0, 0.01, 0.5, 0.9, 0.999]).repeat(rows // 5)
    min_p = torch.tensor([0.0, 0.0, 0.02, 1.0]).repeat(rows // 4)
    settings_ = temperature, top_k, top_p, min_p
    scaled = logits.float() / temperature[:, None]
    kept = [scaled >= kernels.lowest_kept(logits, *settings_)[:, None] for kernels in (cpu, reference)]
    masses = scaled.double().softmax(1)
    kth = scaled.sort(1, descending=True).values.gather(1, (top_k - 1).clamp(0, vocab_size - 1)[:, None])
    masses[(scaled < kth) & (top_k > 0)[:, None]] = 0
    for row, token in (kept[0] ^ kept[1]).nonzero().tolist():
        before = masses[row][scaled[row] > scaled[row, token]].sum() / masses[row].sum()
        relative = (scaled[row, token] - scaled[row].max()).exp()
        assert abs(before - top_p[row]) < 1e-5 or abs(relative - min_p[row]) < 1e-5 * min_p[row]
    assert kept[0].any(1).all()


@pytest.mark.parametrize("kernels", [cpu, reference])
def test_lowest_kept_between_neighbouring_floats(kernels: Any) -> None:
    """There is nothing between them to bisect at, and their mean rounds to either."""
    step = 2.0**-23
    logits = torch.tensor([[1 + i * step for i in order] for order in ((1, 2), (2, 3), (3, 2), (2, 1))])
    top_p, off = torch.tensor([0.9, 0.9, 0.4, 0.4]), torch.zeros(4)
    found = kernels.lowest_kept(logits, torch.ones(4), torch.zeros(4, dtype=torch.int64), top_p, off)
    assert found.tolist() == [1 + step, 1 + 2 * step, 1 + 3 * step, 1 + 2 * step]
    found = kernels.lowest_kept(logits, torch.ones(4), torch.ones(4, dtype=torch.int64), torch.ones(4), off)
    assert found.tolist() == logits.amax(1).tolist()


@pytest.mark.parametrize("kernels", [cpu, reference])
def test_lowest_kept_of_unusable_rows_harms_no_other(kernels: Any) -> None:
    logits = torch.randn(6, 3000, generator=torch.Generator().manual_seed(0))
    strange = logits.clone()
    strange[1], strange[2, 5], strange[3], strange[4, :1500] = -torch.inf, torch.nan, torch.nan, torch.inf
    settings_ = torch.ones(6), torch.tensor([0, 2000] * 3), torch.full((6,), 0.7), torch.full((6,), 0.001)
    found, expected = kernels.lowest_kept(strange, *settings_), kernels.lowest_kept(logits, *settings_)
    assert torch.equal(found[[0, 5]], expected[[0, 5]])
    assert found[4] == torch.inf


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernels", [cpu, reference])
def test_draws_above_a_bound_are_those_of_the_masked_row(dtype: torch.dtype, kernels: Any) -> None:
    logits = torch.randn(60, 1025).mul(4).round().div(2).to(dtype)
    temperature, keys = torch.linspace(0.2, 3, 60), torch.arange(60) * 104729
    scaled = logits.float() / temperature[:, None]
    lowest = scaled.sort(1, descending=True).values.gather(1, torch.arange(60)[:, None] * 7).squeeze(1)
    masked = logits.masked_fill(scaled < lowest[:, None], -torch.inf)
    drawn = kernels.gumbel_argmax(logits, temperature, keys, lowest=lowest)
    assert torch.equal(drawn, kernels.gumbel_argmax(masked, temperature, keys))
    assert (scaled.gather(1, drawn[:, None]).squeeze(1) >= lowest).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernels", [cpu, reference])
def test_the_rows_that_are_named_give_what_they_give_alone(dtype: torch.dtype, kernels: Any) -> None:
    """Some rows, out of order and repeatedly, of a matrix that is itself a view of some columns of a wider one."""
    logits = torch.randn(30, 700).to(dtype)[:, 100:600]
    rows = torch.tensor([29, 0, 7, 7, 3, *range(12), 29])
    temperature, keys = torch.linspace(0.3, 3, len(rows)), torch.arange(len(rows)) * 7919
    chosen = logits[rows].contiguous()
    assert torch.equal(kernels.greedy_argmax(logits, rows), kernels.greedy_argmax(chosen))
    drawn = kernels.gumbel_argmax(logits, temperature, keys, rows)
    assert torch.equal(drawn, kernels.gumbel_argmax(chosen, temperature, keys))
    filters = torch.full((len(rows),), 9), torch.linspace(0.2, 1, len(rows)), torch.full((len(rows),), 0.01)
    lowest = kernels.lowest_kept(logits, temperature, *filters, rows)
    assert torch.equal(lowest, kernels.lowest_kept(chosen, temperature, *filters))
    top = kernels.top_tokens(logits, temperature, 20, rows)
    for ours, expected in zip(top, kernels.top_tokens(chosen, temperature, 20), strict=True):
        assert torch.equal(ours, expected)


def test_noise_equals_the_reference() -> None:
    keys = torch.randint(-(2**63), 2**63 - 1, (300,))
    tokens = torch.randint(0, 200_000, (300, 70))
    torch.testing.assert_close(cpu.gumbel_noise(keys, tokens), reference.gumbel_noise(keys, tokens), rtol=2e-7, atol=0)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    draws = 40_000
    logits = torch.tensor([2.0, -1.0, 0.5, -torch.inf, 1.5, -4.0, 0.0, 2.0])
    keys = torch.arange(draws) * 0x9E3779B9 + 12345
    drawn = cpu.gumbel_argmax(logits.expand(draws, 8), torch.full((draws,), temperature), keys)
    expected = (logits.double() / temperature).softmax(0) * draws
    counts = drawn.bincount(minlength=8)
    assert counts[3] == 0
    seen = expected > 0
    assert stats.chisquare(counts[seen].numpy(), expected[seen].numpy()).pvalue > 1e-3
