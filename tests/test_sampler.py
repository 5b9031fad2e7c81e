"""The sampler against transformers' processors, the exact distribution, and itself in other batches."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pagedgen_kernels import reference
from scipy.stats import chisquare
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from pagedgen.execution.sampler import NUM_CANDIDATES, Sampler, position_keys
from pagedgen.scheduling.sequence import mix64, random_key
from pagedgen.step import SlotArrays, StepPlan


def make_state(rows, **settings_):
    """Slot arrays whose slot i has the i-th value of each setting."""
    state = SlotArrays(len(rows) if hasattr(rows, "__len__") else rows, 8, 4)
    for name, values in settings_.items():
        getattr(state, name)[:] = values
    return state


def make_plan(slots, banned=None, logprobs=None):
    ones = np.ones(len(slots), np.int32)
    return StepPlan(slots, ones, ones, ones > 0, np.empty((0, 2), np.int32), banned or {}, logprobs or {})


def sample(logits, state, slots=None, kernels=reference, **plan):
    slots = np.arange(len(logits), dtype=np.int32) if slots is None else np.array(slots, np.int32)
    return Sampler(kernels).sample(logits.clone(), slots, make_plan(slots, **plan), state)


def kept_by_transformers(logits, temperature, top_k, top_p, min_p):
    """The ids that transformers' processors leave, applied in its order."""
    scores = TemperatureLogitsWarper(float(temperature))(None, logits)
    if top_k > 0:
        scores = TopKLogitsWarper(min(int(top_k), logits.shape[1]))(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(float(top_p))(None, scores)
    if min_p > 0:
        scores = MinPLogitsWarper(float(min_p))(None, scores)
    return set(torch.isfinite(scores[0]).nonzero().flatten().tolist())


def mass_before(scaled, top_k, token):
    """The mass of the tokens likelier than `token` among the top k, in float64: what top-p compares with p."""
    values = scaled[0].double().sort(descending=True).values[: top_k or None]
    return float(values.softmax(0)[values > scaled[0, token].double()].sum())


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    vocab_size=st.sampled_from([3, 50, NUM_CANDIDATES, 300, 2000]),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 5, NUM_CANDIDATES, NUM_CANDIDATES + 1, 100, 1000]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    spread=st.sampled_from([0.3, 1.0, 3.0]),
)
def test_the_filters_keep_what_transformers_keeps(seed, vocab_size, temperature, top_k, top_p, min_p, spread):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, vocab_size, generator=generator) * spread
    state = make_state(1, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    scaled = logits / torch.from_numpy(state.temperature)[:, None]
    lowest = Sampler(reference)._thresholds(scaled, np.zeros(1, np.int32), state)
    kept = set((scaled[0] >= lowest[0]).nonzero().flatten().tolist())
    expected = kept_by_transformers(logits, temperature, top_k, top_p, min_p)
    # Which side of p a sum of float32 probabilities falls on is a matter of the order of adding when it is this close.
    assert all(abs(mass_before(scaled, top_k, token) - top_p) < 1e-5 for token in kept ^ expected)


def test_greedy_rows_take_the_likeliest_token():
    logits = torch.randn(5, 40)
    tokens, _ = sample(logits, make_state(5))
    assert tokens.tolist() == logits.argmax(1).tolist()


@pytest.mark.parametrize(
    ("settings_", "probabilities"),
    [
        ({"temperature": 1.0}, [0.4, 0.3, 0.2, 0.1]),
        ({"temperature": 0.5}, [0.16, 0.09, 0.04, 0.01]),
        ({"temperature": 1.0, "top_k": 2}, [0.4, 0.3, 0, 0]),
        ({"temperature": 1.0, "top_p": 0.75}, [0.4, 0.3, 0.2, 0]),
        ({"temperature": 1.0, "min_p": 0.6}, [0.4, 0.3, 0, 0]),
    ],
)
def test_draws_follow_the_exact_distribution(settings_, probabilities):
    n = 20_000
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().repeat(n, 1)
    state = make_state(n, **settings_)
    state.key[:] = [random_key(3, str(i), 0) for i in range(n)]
    tokens, _ = sample(logits, state)
    counts = np.bincount(tokens, minlength=4)
    exact = np.array(probabilities) / sum(probabilities)
    assert counts[exact == 0].sum() == 0
    assert chisquare(counts[exact > 0], exact[exact > 0] * n).pvalue > 1e-3


def test_draws_at_successive_positions_are_independent():
    n = 20_000
    state = make_state(n, temperature=1.0)
    state.key[:] = random_key(0, "row", 0)
    state.num_tokens[:] = np.arange(n)
    tokens, _ = sample(torch.zeros(n, 4), state)
    pairs = np.bincount(tokens[:-1] * 4 + tokens[1:], minlength=16)
    assert chisquare(pairs).pvalue > 1e-3


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_row_draws_the_same_token_in_any_batch(data):
    """Alone, among others, and in another order: greedy and random rows, filtered and not, side by side."""
    n = data.draw(st.integers(2, 12))
    logits = torch.randn(n, 200, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 1000))))
    state = make_state(
        n,
        temperature=data.draw(st.lists(st.sampled_from([0.0, 0.7, 1.5]), min_size=n, max_size=n)),
        top_k=data.draw(st.lists(st.sampled_from([0, 3, 100]), min_size=n, max_size=n)),
        top_p=data.draw(st.lists(st.sampled_from([1.0, 0.9, 0.3]), min_size=n, max_size=n)),
        min_p=data.draw(st.lists(st.sampled_from([0.0, 0.1]), min_size=n, max_size=n)),
        key=[mix64(i) for i in range(n)],
        num_tokens=data.draw(st.lists(st.integers(1, 8), min_size=n, max_size=n)),
    )
    together, _ = sample(logits, state)
    order = data.draw(st.permutations(range(n)))
    shuffled, _ = sample(logits[list(order)], state, slots=order)
    assert together[list(order)].tolist() == shuffled.tolist()
    for i in range(n):
        alone, _ = sample(logits[i : i + 1], state, slots=[i])
        assert alone.tolist() == [together[i]]


def test_the_key_changes_with_the_position():
    keys = np.full(100, random_key(0, "a", 0), np.uint64)
    assert len(set(position_keys(keys, np.arange(100, dtype=np.int32)).tolist())) == 100


def test_banned_tokens_are_not_drawn_and_touch_no_neighbour():
    logits = torch.zeros(2, 10)
    logits[:, 7] = 5.0
    tokens, _ = sample(logits, make_state(2), banned={1: (7,)})
    assert tokens.tolist() == [7, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("top_p", [1.0, 0.5])
def test_bad_logits_are_reported_for_their_row_alone(temperature, top_p):
    logits = torch.zeros(3, 100)
    logits[:, 5] = 100.0
    logits[1, 9] = torch.nan
    logits[2] = -torch.inf
    tokens, _ = sample(logits, make_state(3, temperature=temperature, top_p=top_p))
    assert tokens.tolist() == [5, -1, -1]


def test_logprobs_are_those_before_temperature_and_filters():
    logits = torch.randn(2, 50)
    state = make_state(2, temperature=[0.0, 2.0], top_k=[0, 3])
    tokens, found = sample(logits, state, logprobs={0: 0, 1: 4})
    expected = torch.log_softmax(logits, 1)
    for slot, k in ((0, 0), (1, 4)):
        assert found[slot].chosen == pytest.approx(float(expected[slot, tokens[slot]]), abs=1e-5)
        top = expected[slot].topk(k)
        assert list(found[slot].top_ids) == top.indices.tolist()
        assert found[slot].top_values == pytest.approx(top.values.tolist(), abs=1e-5)
