"""The triton kernels over rows of logits against `reference`, with no fallback to it, and against the sampler."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pagedgen_kernels import reference
from pagedgen_kernels import triton as kernels
from pagedgen_kernels.triton import draws, filters, largest, noise, penalties
from pagedgen_kernels.triton import rows as rows_module
from sampler_cases import make_state, sample
from triton_interpreter import DEVICE, INTERPRETED

from pagedgen.execution import sampler
from pagedgen.execution.processors import penalise

MODULES = (draws, filters, largest, noise, penalties)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NOWHERE = float("-inf")
F32, BF16, F16 = DTYPES
slow = pytest.mark.slow
# What numpy says of infinities that a GPU takes in its stride.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")
fewer = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(autouse=True)
def _no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes the reference away from the launchers: a call that they do not cover fails. Few and long steps suit the
    interpreter."""
    for module in MODULES:
        monkeypatch.setattr(module, "reference", SimpleNamespace())
    if INTERPRETED:
        monkeypatch.setattr(largest, "RANKED", 64)
        monkeypatch.setattr(largest, "SEARCH_BLOCK", 8192)
        monkeypatch.setattr(filters, "SEARCH_BLOCK", 8192)


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, spread: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * spread).to(dtype).to(DEVICE)


def tensor(values: list[Any], dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def some_keys(count: int) -> torch.Tensor:
    return torch.randint(-(2**63), 2**63 - 1, (count,), generator=torch.Generator().manual_seed(3)).to(DEVICE)


def strange_rows(vocab_size: int, dtype: torch.dtype) -> torch.Tensor:
    """Ties, NaN, infinities, both zeros, and few tokens above -inf."""
    logits = randn(9, vocab_size).mul(2).round().to(dtype)  # rounded, so that many tie
    logits[1] = NOWHERE
    logits[2, -1] = torch.nan
    logits[3, 0] = torch.nan
    logits[4, vocab_size // 2 :] = torch.inf
    logits[5, :-1] = NOWHERE
    logits[6] = 0.0
    logits[7], logits[7, vocab_size // 2 :] = -0.0, 0.0
    logits[8, vocab_size // 3 :] = NOWHERE
    return logits


@pytest.fixture
def whole_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row is read by one program, block after block."""
    monkeypatch.setattr(rows_module, "PROGRAMS", 1)
    monkeypatch.setattr(rows_module, "MOST_SPLITS", 1)


@pytest.mark.parametrize(("dtype", "vocab_size"), [(F32, 1), (F16, 7), (BF16, 2049), (F32, 5000), (F16, 5000)])
def test_argmax_with_ties_and_unusable_rows(dtype: torch.dtype, vocab_size: int) -> None:
    logits = strange_rows(vocab_size, dtype)
    assert torch.equal(kernels.greedy_argmax(logits), reference.greedy_argmax(logits))
    arguments = logits, torch.full((9,), 0.7, device=DEVICE), some_keys(9)
    assert torch.equal(kernels.gumbel_argmax(*arguments), reference.gumbel_argmax(*arguments))


@pytest.mark.parametrize("spread", [0.1, 3.0])
def test_rows_that_one_program_reads(spread: float, whole_rows: None) -> None:
    logits = torch.cat((strange_rows(5000, F32), randn(2, 5000, spread=spread)))
    logits[9, 4000:] += 9  # far above all that came before
    temperature, keys = torch.linspace(0.3, 3, 11, device=DEVICE), some_keys(11)
    assert torch.equal(kernels.greedy_argmax(logits), reference.greedy_argmax(logits))
    drawn = kernels.gumbel_argmax(logits, temperature, keys)
    assert torch.equal(drawn, reference.gumbel_argmax(logits, temperature, keys))
    same_top(logits, temperature, 3)


@pytest.mark.parametrize(("dtype", "spread"), [(F32, 0.0), (F32, 1e-3), (BF16, 1.0), (F16, 10.0), (F32, 1e4)])
def test_gumbel_draws_equal_the_reference(dtype: torch.dtype, spread: float) -> None:
    logits, keys = randn(5, 9001, dtype=dtype, spread=spread), some_keys(5)
    temperature = torch.logspace(-4, 2, 5, device=DEVICE)
    drawn = kernels.gumbel_argmax(logits, temperature, keys.view(torch.uint64))
    assert torch.equal(drawn, reference.gumbel_argmax(logits, temperature, keys))


@pytest.mark.parametrize("temperature", [1e-44, 1e-30, 1e30])
def test_gumbel_draws_at_extreme_temperatures(temperature: float, whole_rows: None) -> None:
    logits = randn(3, 2500)
    logits[1] *= 1e-40
    logits[2] = -logits[1].abs()
    arguments = logits, torch.full((3,), temperature, device=DEVICE), some_keys(3)
    assert torch.equal(kernels.gumbel_argmax(*arguments), reference.gumbel_argmax(*arguments))


def test_noise_equals_the_reference() -> None:
    keys, tokens = some_keys(5), torch.randint(0, 200_000, (5, 300)).to(DEVICE)
    for some in (tokens, tokens.to(torch.int32), tokens[:, ::3]):
        torch.testing.assert_close(
            kernels.gumbel_noise(keys, some), reference.gumbel_noise(keys, some), rtol=2e-7, atol=0
        )


def same_top(logits: torch.Tensor, temperature: torch.Tensor, k: int, rows: torch.Tensor | None = None) -> None:
    """The same values and ids, bit for bit, except where a NaN leaves them without meaning; totals up to rounding."""
    values, ids, total = kernels.top_tokens(logits, temperature, k, rows)
    expected_values, expected_ids, expected_total = reference.top_tokens(logits, temperature, k, rows)
    assert (values.dtype, ids.dtype, total.dtype) == (torch.float32, torch.int64, torch.float32)
    torch.testing.assert_close(total, expected_total, rtol=2e-6, atol=2e-6, equal_nan=True)
    usable = ~expected_total.isnan()
    assert torch.equal(values[usable], expected_values[usable])
    assert torch.equal(ids[usable], expected_ids[usable])
    assert ((ids >= 0) & (ids < logits.shape[1])).all()


@pytest.mark.parametrize(
    ("dtype", "vocab_size", "k"),
    [
        *[(F32, 1, 1), (F16, 7, 5), (BF16, 1025, 1025), (F16, 5000, 1), (F32, 5000, 64), (BF16, 10_000, 600)],
        *(pytest.param(dtype, 40_000, k, marks=slow) for dtype in DTYPES for k in (1, 20, 300, 1500)),
    ],
)
def test_top_tokens_with_ties_and_unusable_rows(dtype: torch.dtype, vocab_size: int, k: int) -> None:
    same_top(strange_rows(vocab_size, dtype), torch.logspace(-3, 2, 9, device=DEVICE), k)


@pytest.mark.parametrize(
    ("order", "k"),
    [("ascending", 64), ("descending", 64), ("constant", 1), ("constant", 64), ("constant", 1000), ("shuffled", 1000)],
)
def test_top_tokens_of_sorted_rows(order: str, k: int) -> None:
    """Rows in which the largest logits lie side by side, tie, or are spread over the tiles."""
    logits = {"ascending": torch.arange(9000.0), "descending": -torch.arange(9000.0), "constant": torch.ones(9000)}
    logits["shuffled"] = torch.randperm(9000, generator=torch.Generator().manual_seed(0)).float()
    same_top(logits[order].expand(2, 9000).to(DEVICE), tensor([0.5, 300.0]), k)


@pytest.mark.parametrize("temperature", [1e-5, 1.0, 50.0])
def test_totals_at_extreme_values(temperature: float) -> None:
    logits = randn(6, 3000) * tensor([1e-3, 1.0, 30.0, 1e4, 1e30, 1.0])[:, None]
    logits[5, -1] = 1e4  # far above all that came before
    expected = (logits.double() / temperature).logsumexp(1).float()
    total = kernels.top_tokens(logits, torch.full((6,), temperature, device=DEVICE), 1)[2]
    torch.testing.assert_close(total, expected, rtol=1e-6, atol=1e-5)


@fewer
@given(
    values=st.lists(st.floats(-60, 60, width=32) | st.just(NOWHERE), min_size=1, max_size=80),
    k=st.integers(1, 80),
    temperature=st.floats(0.01, 10),
    key=st.integers(-(2**63), 2**63 - 1),
)
def test_random_rows(values: list[float], k: int, temperature: float, key: int) -> None:
    logits, divisor = tensor([values], torch.float32), tensor([temperature], torch.float32)
    same_top(logits, divisor, min(k, len(values)))
    arguments = logits, divisor, tensor([key])
    assert torch.equal(kernels.gumbel_argmax(*arguments), reference.gumbel_argmax(*arguments))


def same_kept(logits: torch.Tensor, *filters_: torch.Tensor) -> None:
    """The same tokens, except for those whose mass lies so near to p that the order of adding tells."""
    temperature, top_k, top_p, min_p = filters_
    scaled = logits.float() / temperature[:, None]
    kept = [scaled >= module.lowest_kept(logits, *filters_)[:, None] for module in (kernels, reference)]
    masses = scaled.double().softmax(1)
    kth = scaled.sort(1, descending=True).values.gather(1, (top_k - 1).clamp(0, logits.shape[1] - 1)[:, None])
    masses[(scaled < kth) & (top_k > 0)[:, None]] = 0
    for row, token in (kept[0] ^ kept[1]).nonzero().tolist():
        before = masses[row][scaled[row] > scaled[row, token]].sum() / masses[row].sum()
        relative = (scaled[row, token] - scaled[row].max()).exp()
        assert abs(before - top_p[row]) < 1e-5 or abs(relative - min_p[row]) < 1e-5 * min_p[row]
    assert kept[0].any(1).all()


@pytest.mark.parametrize(
    ("dtype", "vocab_size", "spread"),
    [
        *[(F32, 1, 1.0), (F16, 16, 3.0), (BF16, 1100, 0.1), (F32, 9001, 3.0)],
        *(pytest.param(dtype, 40_000, spread, marks=slow) for dtype in DTYPES for spread in (0.1, 3.0)),
    ],
)
def test_lowest_kept(dtype: torch.dtype, vocab_size: int, spread: float) -> None:
    logits = randn(12, vocab_size, dtype=dtype, spread=spread, seed=vocab_size)
    logits[7, vocab_size // 3 + 1 :] = NOWHERE
    logits[8] = logits[8].float().round().to(dtype)
    temperature = tensor([0.3, 1.0, 2.0]).repeat(4)
    top_k = tensor([0, 1, 0, 100, vocab_size, 10_000, 2000, 0, 5, 0, 80, 0])
    top_p = tensor([1.0, 0.01, 0.5, 0.9, 0.999, 0.7, 0.8, 0.9, 1.0, 0.95, 1.0, 0.9999])
    same_kept(logits, temperature, top_k, top_p, tensor([0.0, 0.0, 0.02, 1.0]).repeat(3))


@pytest.mark.parametrize(
    ("dtype", "k", "p", "share"),
    [(F32, 0, 0.97, 0.0), (BF16, 3000, 1.0, 0.0), (F16, 3000, 0.9, 0.0), (F32, 0, 0.97, 0.2)],
)
def test_lowest_kept_beyond_the_candidates(dtype: torch.dtype, k: int, p: float, share: float) -> None:
    """A flat row, of which thousands of tokens are kept, unless min-p drops them; and one of two values, which tie."""
    logits = randn(2, 12_000, dtype=dtype)
    logits[1] = (logits[1] > 0).to(dtype)
    ones = torch.ones(2, device=DEVICE)
    same_kept(logits, ones, tensor([k, k]), ones * p, ones * share)


def test_lowest_kept_between_neighbouring_floats() -> None:
    """There is nothing between them to bisect at, and their mean rounds to either."""
    step = 2.0**-23
    logits = tensor([[1 + i * step for i in order] for order in ((1, 2), (2, 3), (3, 2), (2, 1))])
    ones, off = torch.ones(4, device=DEVICE), torch.zeros(4, device=DEVICE)
    found = kernels.lowest_kept(logits, ones, off.long(), tensor([0.9, 0.9, 0.4, 0.4]), off)
    assert found.tolist() == [1 + step, 1 + 2 * step, 1 + 3 * step, 1 + 2 * step]
    assert kernels.lowest_kept(logits, ones, ones.long(), ones, off).tolist() == logits.amax(1).tolist()


def test_lowest_kept_of_unusable_rows_harms_no_other() -> None:
    logits = randn(5, 1500)
    strange = logits.clone()
    strange[1], strange[2, 5], strange[3, :750] = NOWHERE, torch.nan, torch.inf
    ones = torch.ones(5, device=DEVICE)
    settings_ = ones, tensor([0, 1200, 0, 1200, 1200]), ones * 0.7, ones * 0.001
    found, expected = kernels.lowest_kept(strange, *settings_), kernels.lowest_kept(logits, *settings_)
    assert torch.equal(found[[0, 4]], expected[[0, 4]])
    assert found[3] == torch.inf


def test_draws_above_a_bound_are_those_of_the_masked_row() -> None:
    logits = randn(12, 3001, spread=4).round().div(2)
    temperature, keys = torch.linspace(0.2, 3, 12, device=DEVICE), some_keys(12)
    scaled = logits / temperature[:, None]
    place = torch.arange(12, device=DEVICE)[:, None] * 40
    lowest = scaled.sort(1, descending=True).values.gather(1, place).squeeze(1)
    drawn = kernels.gumbel_argmax(logits, temperature, keys, lowest=lowest)
    masked = logits.masked_fill(scaled < lowest[:, None], NOWHERE)
    assert torch.equal(drawn, reference.gumbel_argmax(masked, temperature, keys))


@pytest.mark.parametrize(("dtype", "index"), [(F32, torch.int64), (BF16, torch.int32), (F16, torch.int64)])
def test_the_rows_that_are_named_give_what_they_give_alone(dtype: torch.dtype, index: torch.dtype) -> None:
    """Some rows, out of order and repeatedly, of a matrix that is itself a view of some columns of a wider one."""
    logits = randn(9, 700, dtype=dtype)[:, 100:600]
    rows = tensor([8, 0, 7, 7, 3], index)
    temperature, keys = torch.linspace(0.3, 3, 5, device=DEVICE), some_keys(5)
    chosen = logits[rows.long()].contiguous()
    assert torch.equal(kernels.greedy_argmax(logits, rows), reference.greedy_argmax(chosen))
    drawn = kernels.gumbel_argmax(logits, temperature, keys, rows)
    assert torch.equal(drawn, reference.gumbel_argmax(chosen, temperature, keys))
    top_k, top_p, min_p = tensor([9] * 5, index), torch.linspace(0.2, 1, 5, device=DEVICE), tensor([0.01] * 5)
    lowest = kernels.lowest_kept(logits, temperature, top_k, top_p, min_p, rows)
    torch.testing.assert_close(lowest, reference.lowest_kept(chosen, temperature, top_k.long(), top_p, min_p))
    for ours, expected in zip(
        kernels.top_tokens(logits, temperature, 20, rows), reference.top_tokens(chosen, temperature, 20), strict=True
    ):
        torch.testing.assert_close(ours, expected, rtol=2e-6, atol=0)


def test_settings_may_be_spread_out() -> None:
    """Strides other than one, and one value for all rows."""
    logits, every, one = randn(4, 300), torch.linspace(0.3, 3, 8, device=DEVICE)[::2], torch.ones(1, device=DEVICE)
    keys, many = some_keys(8)[::2], one.expand(4)
    top_k, rows = tensor([3, 0, 0, 0, 10**10, 0, -1, 0])[::2], tensor([3, 0, 2, 0, 1, 0, 0, 0])[::2]
    expected = reference.gumbel_argmax(logits, every, keys, rows)
    assert torch.equal(kernels.gumbel_argmax(logits, every, keys, rows), expected)
    chosen = kernels.choose_tokens(logits, every, top_k, many * 0.9, many * 0.01, keys)
    assert torch.equal(chosen, reference.choose_tokens(logits, every, top_k, many * 0.9, many * 0.01, keys))
    for some in (every, many):
        lowest = kernels.lowest_kept(logits, some, top_k, many, some / 9, rows)
        torch.testing.assert_close(lowest, reference.lowest_kept(logits, some, top_k, many, some / 9, rows))
        same_top(logits, some, 5, rows)


def test_no_rows() -> None:
    logits, none = randn(0, 50), torch.empty(0, device=DEVICE)
    assert kernels.greedy_argmax(logits).shape == (0,)
    assert kernels.choose_tokens(logits, none, none.long(), none, none, none.long()).shape == (0,)
    assert kernels.top_tokens(logits, none, 3)[0].shape == (0, 3)


def settings_of(seed: int, rows: int) -> dict[str, np.ndarray]:
    """Greedy rows, plain draws, and every combination of filters."""
    random = np.random.default_rng(seed)
    return {
        "temperature": random.choice([0.0, 0.3, 1.0, 2.5], rows).astype(np.float32),
        "top_k": random.choice([0, 1, 20, 90, 3000], rows).astype(np.int32),
        "top_p": random.choice([0.1, 0.9, 0.99, 1.0], rows).astype(np.float32),
        "min_p": random.choice([0.0, 0.0, 0.1], rows).astype(np.float32),
        "key": random.integers(0, 2**64, rows, dtype=np.uint64),
    }


@pytest.mark.parametrize(
    ("module", "seed"),
    [
        *((kernels, seed) for seed in range(5)),
        *((reference, seed) for seed in range(20)),
        *(pytest.param(kernels, seed, marks=slow) for seed in range(5, 100)),
    ],
)
def test_chosen_tokens_are_those_of_the_sampler(module: Any, seed: int) -> None:
    rows, dtype, vocab_size = 6, DTYPES[seed % 3], (9001, 1500)[seed % 2]
    logits = randn(rows, vocab_size, dtype=dtype, seed=seed, spread=(0.5, 3.0)[seed // 2 % 2])
    logits[0, seed % vocab_size] = (torch.nan, torch.inf, NOWHERE)[seed % 3]
    chosen = settings_of(seed, rows)
    state = make_state(rows, token_ids=[[1] * (slot + 1) for slot in range(rows)], **chosen)
    expected = sample(logits.cpu(), state).tokens
    keys = torch.from_numpy(chosen.pop("key")).view(torch.int64).to(DEVICE)
    keys = reference.position_keys(keys, torch.from_numpy(state.num_tokens).to(DEVICE))
    tensors = {name: torch.from_numpy(values).to(DEVICE) for name, values in chosen.items()}
    assert module.choose_tokens(logits, **tensors, keys=keys).tolist() == expected.tolist()


def test_rows_choose_alone() -> None:
    """A token depends on nothing but its own row and settings."""
    rows = 6
    logits = randn(rows, 9001, dtype=torch.bfloat16, spread=3)
    chosen = {name: torch.from_numpy(values).to(DEVICE) for name, values in settings_of(5, rows).items()}
    keys = chosen.pop("key").view(torch.int64)
    together = kernels.choose_tokens(logits, **chosen, keys=keys)
    for row in range(rows):
        own = {name: values[row : row + 1] for name, values in chosen.items()}
        assert kernels.choose_tokens(logits[row : row + 1], **own, keys=keys[row : row + 1]) == together[row]


def test_a_nan_is_found_wherever_it_is() -> None:
    """Filters leave most of a row unread."""
    logits = randn(1, 9001, spread=3)
    logits[0, 8000:] = -50.0
    chosen = {"temperature": tensor([1.0]), "top_k": tensor([1]), "top_p": tensor([0.9]), "min_p": tensor([0.1])}
    assert kernels.choose_tokens(logits, **chosen, keys=some_keys(1)) == logits.argmax()
    logits[0, 8500] = torch.nan
    assert kernels.choose_tokens(logits, **chosen, keys=some_keys(1)).tolist() == [-1]


def test_position_keys_are_those_of_the_sampler() -> None:
    keys, positions = np.array([0, 1, 2**64 - 1, 2**63], np.uint64), np.array([0, 5, 7, 2**31 - 1], np.int32)
    found = kernels.position_keys(torch.from_numpy(keys), torch.from_numpy(positions))
    assert found.numpy().view(np.uint64).tolist() == sampler.position_keys(keys, positions).tolist()


@pytest.mark.parametrize("module", [kernels, reference])
@pytest.mark.parametrize("seed", [*range(5), *(pytest.param(seed, marks=slow) for seed in range(5, 60))])
def test_penalties_are_those_of_the_processors(module: Any, seed: int) -> None:
    random = np.random.default_rng(seed)
    lengths, vocab_size = [0, 1, *random.integers(0, 2500, 3).tolist()], (60, 700, 3)[seed % 3]
    slots = random.permutation(len(lengths) + 2)[: len(lengths)].astype(np.int32)
    state = make_state(len(lengths) + 2, 2500)
    state.token_ids[:] = random.integers(0, vocab_size, state.token_ids.shape)
    state.num_tokens[slots] = lengths
    state.num_prompt[:] = (state.num_tokens * random.random(len(state.num_tokens))).astype(np.int32)
    for name, values in (("repetition", [1.0, 0.7, 1.3]), ("presence", [0.0, 0.3]), ("frequency", [0.0, -0.2, 0.07])):
        getattr(state, f"{name}_penalty")[:] = random.choice(values, len(state.num_tokens))
    scores = randn(len(lengths), vocab_size + 3, seed=seed)[:, :vocab_size]
    scores[0, 0] = NOWHERE
    expected = scores.cpu().clone()
    penalise(expected, slots, state)
    names = ("num_tokens", "num_prompt", "repetition_penalty", "presence_penalty", "frequency_penalty")
    settings_ = [torch.from_numpy(getattr(state, name)[slots]).to(DEVICE) for name in names]
    token_ids, rows = torch.from_numpy(state.token_ids).to(DEVICE), torch.from_numpy(slots.astype(np.int64)).to(DEVICE)
    module.penalise(scores, token_ids, *settings_, rows)
    assert torch.equal(scores.cpu(), expected)


def test_what_is_not_covered_goes_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other dtypes and transposed logits."""
    for module in MODULES:
        monkeypatch.setattr(module, "reference", reference)
    logits, ones = randn(40, 3, dtype=torch.float64), torch.ones(40, device=DEVICE)
    for some in (logits, logits.float().T.contiguous().T):
        assert torch.equal(kernels.greedy_argmax(some), some.argmax(-1))
        arguments = some, ones, some_keys(40)
        assert torch.equal(kernels.gumbel_argmax(*arguments), reference.gumbel_argmax(*arguments))
        for ours, expected in zip(kernels.top_tokens(some, ones, 2), reference.top_tokens(some, ones, 2), strict=True):
            assert torch.equal(ours, expected)
        filters_ = ones, ones.long(), ones, ones
        assert torch.equal(kernels.lowest_kept(some, *filters_), reference.lowest_kept(some, *filters_))
        assert torch.equal(kernels.choose_tokens(some, *filters_, some_keys(40)), some.argmax(-1))
