"""The sampler against transformers' warpers, the exact distribution, a slow sampler of one row, and other batches."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pagedgen_kernels import cpu, reference
from sampler_cases import kept, make_state, processed, sample
from scipy.stats import chisquare
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from pagedgen.execution import filters, sampler
from pagedgen.execution.filters import CANDIDATES, Filters, count_kept
from pagedgen.execution.sampler import position_keys
from pagedgen.scheduling.sequence import mix64, random_key

BACKENDS = [reference, cpu] if cpu.available() else [reference]


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


def kept_among(logits, width, state):
    """The ids above -inf that the filters keep among the `width` likeliest, or None where these do not tell."""
    values, ids, total = reference.top_tokens(logits, torch.from_numpy(state.temperature), width)
    values /= torch.from_numpy(state.temperature)[:, None]
    count, known = count_kept(values, total, logits.shape[1], filters_of(state))
    found = ids[0, : int(count)][values[0, : int(count)] > -torch.inf]
    return set(found.tolist()) if known else None


def kept_of_all(logits, kernels, state):
    """The ids above -inf that the filters keep of the whole row."""
    settings_ = filters_of(state)
    lowest = kernels.lowest_kept(logits, settings_.temperature, settings_.top_k, settings_.top_p, settings_.min_p)
    scaled = logits / settings_.temperature[:, None]
    return set(((scaled[0] >= lowest[0]) & (scaled[0] > -torch.inf)).nonzero().flatten().tolist())


def filters_of(state):
    return Filters.of(np.zeros(1, np.int32), state, torch.device("cpu"))


FILTERS = {
    "temperature": st.sampled_from([0.3, 1.0, 2.5]),
    "top_k": st.sampled_from([0, 1, 5, 63, 64, 65, 100, 1000]),
    "top_p": st.sampled_from([0.05, 0.5, 0.9, 0.999, 1.0]),
    "min_p": st.sampled_from([0.0, 0.01, 0.3, 1.0]),
}


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    vocab_size=st.sampled_from([3, 50, 64, 300, 2000]),
    spread=st.sampled_from([0.3, 1.0, 3.0]),
    **FILTERS,
)
def test_the_filters_keep_what_transformers_keeps(seed, vocab_size, spread, temperature, top_k, top_p, min_p):
    logits = torch.randn(1, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread
    state = make_state(1, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    scaled = logits / torch.from_numpy(state.temperature)[:, None]
    expected = kept_by_transformers(logits, temperature, top_k, top_p, min_p)
    for kernels in BACKENDS:
        ours = kept_of_all(logits, kernels, state)
        # Which side of p a sum of float32 probabilities falls on depends on the order of adding when it is this close.
        assert all(abs(mass_before(scaled, top_k, token) - top_p) < 1e-5 for token in ours ^ expected)


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    widths=st.lists(st.integers(1, 200), min_size=1, max_size=4),
    step=st.sampled_from([0.01, 0.5, 2.0]),
    possible=st.integers(1, 200),
    **FILTERS,
)
def test_candidates_and_whole_rows_keep_what_a_plain_filter_keeps(
    seed, widths, step, possible, temperature, top_k, top_p, min_p
):
    """Rounded logits, so that many tie, also at the edge of the candidates; and rows with few tokens above -inf."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(1, 200, generator=generator) * 2 / step).round() * step
    logits[0, torch.randperm(200, generator=generator)[possible:]] = -torch.inf
    state = make_state(1, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    settings_ = (getattr(state, name)[0] for name in ("temperature", "top_k", "top_p", "min_p"))
    keep, clear = kept(logits[0].numpy(), *settings_)
    if clear:
        expected = set(np.flatnonzero(keep & (logits[0].numpy() > -np.inf)).tolist())
        for kernels in BACKENDS:
            assert kept_of_all(logits, kernels, state) == expected
        assert kept_among(logits, 200, state) == expected
        for width in widths:
            assert kept_among(logits, width, state) in (None, expected)


def test_most_rows_are_decided_among_few_candidates():
    """Else every draw would come out right, and slowly."""
    logits = torch.randn(100, 5000, generator=torch.Generator().manual_seed(0)) * 2
    logits[:, :20] += 8
    decided = Counter()
    for top_k, top_p, min_p in ((20, 1, 0), (0, 0.5, 0), (0, 1, 0.1), (40, 0.9, 0)):
        state = make_state(1, temperature=1, top_k=top_k, top_p=top_p, min_p=min_p)
        decided.update(kept_among(row[None], CANDIDATES, state) is not None for row in logits)
    assert decided[True] > 390


@pytest.mark.parametrize("kernels", BACKENDS)
def test_greedy_rows_take_the_likeliest_token(kernels):
    logits = torch.randn(5, 40)
    assert sample(logits, make_state(5), kernels=kernels).tokens.tolist() == logits.argmax(1).tolist()


def counting(kernels, calls):
    """The kernels, with each call's name and the dtype and rows that it is given noted."""

    def wrap(name):
        def call(logits, *args, **options):
            calls.append((name, logits.dtype, len(logits)))
            return getattr(kernels, name)(logits, *args, **options)

        return call

    return SimpleNamespace(**{name: wrap(name) for name in ("greedy_argmax", "gumbel_argmax", "top_tokens")})


def test_greedy_rows_without_options_take_one_argmax_of_what_the_model_gave():
    calls = []
    sample(torch.randn(9, 40).bfloat16(), make_state(9), kernels=counting(reference, calls))
    assert calls == [("greedy_argmax", torch.bfloat16, 9)]


def test_only_the_rows_with_penalties_or_biases_are_widened(monkeypatch):
    calls, edits = [], []
    monkeypatch.setattr(sampler, "penalise", lambda scores, *rest: edits.append((scores.dtype, scores.shape)))
    state = make_state(9, token_ids=[[1, 2]] * 9, presence_penalty=[0, 0, 0, 0, 1, 0, 0, 0, 0])
    logits = torch.randn(9, 40).bfloat16()
    sample(logits, state, biases={2: {3: 1.0}}, banned={7: (5,)}, kernels=counting(reference, calls))
    assert edits == [(torch.float32, (2, 40))]
    assert calls == [("greedy_argmax", torch.bfloat16, 9), ("greedy_argmax", torch.float32, 2)]


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
    tokens = sample(logits, state).tokens
    counts = np.bincount(tokens, minlength=4)
    exact = np.array(probabilities) / sum(probabilities)
    assert counts[exact == 0].sum() == 0
    assert chisquare(counts[exact > 0], exact[exact > 0] * n).pvalue > 1e-3


def test_draws_at_successive_positions_are_independent():
    n = 20_000
    state = make_state(n, temperature=1.0)
    state.key[:] = random_key(0, "row", 0)
    state.num_tokens[:] = np.arange(n)
    tokens = sample(torch.zeros(n, 4), state).tokens
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
    together = sample(logits, state).tokens
    order = data.draw(st.permutations(range(n)))
    shuffled = sample(logits[list(order)], state, slots=order).tokens
    assert together[list(order)].tolist() == shuffled.tolist()
    for i in range(n):
        assert sample(logits[i : i + 1], state, slots=[i]).tokens.tolist() == [together[i]]


def test_the_key_changes_with_the_position():
    keys = np.full(100, random_key(0, "a", 0), np.uint64)
    assert len(set(position_keys(keys, np.arange(100, dtype=np.int32)).tolist())) == 100


def test_banned_tokens_are_not_drawn_and_touch_no_neighbour():
    logits = torch.zeros(2, 10)
    logits[:, 7] = 5.0
    assert sample(logits, make_state(2), banned={1: (7,)}).tokens.tolist() == [7, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("top_p", [1.0, 0.5])
@pytest.mark.parametrize("penalty", [1.0, 1.5])
@pytest.mark.parametrize("kernels", BACKENDS)
def test_bad_logits_are_reported_for_their_row_alone(temperature, top_p, penalty, kernels):
    logits = torch.zeros(3, 100)
    logits[:, 5] = 100.0
    logits[1, 9] = torch.nan
    logits[2] = -torch.inf
    state = make_state(3, token_ids=[[5]] * 3, temperature=temperature, top_p=top_p, repetition_penalty=penalty)
    assert sample(logits, state, kernels=kernels).tokens.tolist() == [5, -1, -1]


@pytest.mark.parametrize("kernels", BACKENDS)
def test_infinite_logits_win(kernels):
    logits = torch.randn(4, 100)
    logits[:, [30, 60]] = torch.inf
    state = make_state(4, temperature=[0, 1, 1, 1], top_p=[1, 1, 0.5, 1], top_k=[0, 0, 0, 1])
    assert sample(logits, state, kernels=kernels).tokens.tolist() == [30] * 4


@pytest.mark.parametrize("kernels", BACKENDS)
def test_logprobs_are_those_before_processors_temperature_and_filters(kernels):
    logits = torch.randn(4, 50)
    state = make_state(4, token_ids=[[3, 4]] * 4, temperature=[0.0, 2.0, 1.0, 1.0], top_k=[0, 3, 0, 0])
    state.repetition_penalty[2] = 3
    banned = {0: (int(logits[0].argmax()),)}
    wanted = {0: 0, 1: 4, 2: 100}
    found = sample(logits, state, kernels=kernels, logprobs=wanted, banned=banned, biases={2: {7: 9.0}})
    expected = torch.log_softmax(logits, 1)
    assert found.logprobs.keys() == wanted.keys()
    for slot, k in wanted.items():
        got = found.logprobs[slot]
        assert got.chosen == pytest.approx(float(expected[slot, found.tokens[slot]]), abs=1e-5)
        top = expected[slot].topk(min(k, 50))
        assert list(got.top_ids) == top.indices.tolist()
        assert got.top_values == pytest.approx(top.values.tolist(), abs=1e-5)


def test_logprobs_of_unusable_rows_and_of_impossible_tokens():
    logits = torch.zeros(2, 5)
    logits[0, 2] = torch.nan
    logits[1, 2:] = -torch.inf
    found = sample(logits, make_state(2), logprobs={0: 3, 1: 3})
    assert np.isnan(found.logprobs[0].chosen)
    assert found.logprobs[0].top_ids == ()
    assert found.logprobs[1].top_ids == (0, 1)
    assert found.logprobs[1].top_values == pytest.approx([-np.log(2)] * 2)


@pytest.mark.parametrize("kernels", BACKENDS)
@pytest.mark.parametrize("chunk_bytes", [1, 64 << 20])
def test_further_samples_draw_what_rows_of_their_own_would(kernels, chunk_bytes, monkeypatch):
    """Greedy, free, filtered and penalised rows, each with 0 to 40 further samples, against as many equal rows."""
    monkeypatch.setattr(filters, "CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(filters, "CANDIDATES", 8)
    n, vocab_size = 8, 500
    logits = torch.randn(n, vocab_size, generator=torch.Generator().manual_seed(5)) * 3
    options = {
        "temperature": [0, 1, 1, 1, 0, 1, 1, 0.5],
        "top_p": [1, 1, 0.9, 0.3, 1, 1, 0.95, 1],
        "min_p": [0, 0, 0, 0, 0, 0, 0, 0.05],
        "presence_penalty": [0, 0, 0, 0, 5, 5, 5, 0],
    }
    token_ids = [list(range(10 + slot)) for slot in range(n)]
    keys = {slot: np.array([mix64(100 * slot + i) for i in range(count)], np.uint64)
            for slot, count in enumerate((3, 40, 40, 1, 2, 40, 40)) if slot != 3}  # fmt: skip
    keys[3] = np.array([], np.uint64)
    state = make_state(n, 32, token_ids=token_ids, key=[mix64(slot) for slot in range(n)], **options)
    found = sample(logits, state, kernels=kernels, extra_keys=keys, logprobs={1: 2, 5: 0, 7: 1})
    assert found.extra.keys() == keys.keys()
    assert found.tokens.tolist() == sample(logits, state, kernels=kernels).tokens.tolist()
    for slot, own in keys.items():
        m = len(own)
        many = make_state(m, 32, token_ids=[token_ids[slot]] * m, key=own, **{k: v[slot] for k, v in options.items()})
        alone = sample(logits[[slot] * m], many, kernels=kernels, logprobs=dict.fromkeys(range(m), 2))
        assert found.extra[slot].tokens.dtype == np.int32
        assert found.extra[slot].tokens.tolist() == alone.tokens.tolist()
        expected = [alone.logprobs[i].chosen for i in range(m)] if slot in (1, 5) else []
        assert [x.chosen for x in found.extra[slot].logprobs] == pytest.approx(expected)
        assert all(len(x.top_ids) == (2 if slot == 1 else 0) for x in found.extra[slot].logprobs)
    assert len(set(found.extra[1].tokens.tolist())) > 5
    assert len(set(found.extra[0].tokens.tolist())) == 1


mixtures = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.0, 0.4, 1.0, 2.0]),
        "top_k": st.sampled_from([0, 0, 1, 3, 20, 64]),
        "top_p": st.sampled_from([1.0, 1.0, 0.2, 0.9]),
        "min_p": st.sampled_from([0.0, 0.0, 0.1]),
        "repetition_penalty": st.sampled_from([1.0, 1.0, 1.7, 0.6]),
        "presence_penalty": st.sampled_from([0.0, 0.0, 1.5]),
        "frequency_penalty": st.sampled_from([0.0, 0.0, 0.7]),
        "num_prompt": st.integers(1, 6),
    }
)


@settings(max_examples=150, deadline=None)
@given(
    rows=st.lists(
        st.tuples(
            mixtures,
            st.lists(st.integers(0, 119), min_size=6, max_size=20),
            st.none() | st.dictionaries(st.integers(0, 119), st.floats(-8, 8, width=16), min_size=1, max_size=5),
            st.lists(st.integers(0, 119), max_size=3),
        ),
        min_size=1,
        max_size=8,
    ),
    seed=st.integers(0, 10_000),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    kernels=st.sampled_from(BACKENDS),
)
def test_any_mixture_of_rows_gives_what_each_gives_in_a_slow_sampler(rows, seed, dtype, kernels):
    n = len(rows)
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(n, 120, generator=generator) * 2.5).to(dtype)
    options = {name: [row[0][name] for row in rows] for name in rows[0][0]}
    state = make_state(n, 24, token_ids=[row[1] for row in rows], key=[mix64(seed + i) for i in range(n)], **options)
    biases = {slot: row[2] for slot, row in enumerate(rows) if row[2]}
    banned = {slot: tuple(row[3]) for slot, row in enumerate(rows) if row[3]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filters, "CANDIDATES", 8)
        tokens = sample(logits, state, kernels=kernels, biases=biases, banned=banned).tokens
    keys = torch.from_numpy(position_keys(state.key, state.num_tokens).view(np.int64))
    for slot in range(n):
        scores = processed(logits[slot], state, slot, biases.get(slot), banned.get(slot, ()))
        if state.temperature[slot] == 0:
            assert tokens[slot] == scores.argmax()
            continue
        filters_ = (getattr(state, name)[slot] for name in ("temperature", "top_k", "top_p", "min_p"))
        keep, clear = kept(scores, *filters_)
        if clear:
            scaled = torch.from_numpy(np.where(keep, scores, -np.inf))[None] / float(state.temperature[slot])
            noise = reference.gumbel_noise(keys[slot : slot + 1], torch.arange(120)[None])
            assert tokens[slot] == (scaled + noise).argmax()


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), spread=st.sampled_from([0.5, 3.0]), step=st.sampled_from([0.0, 0.5]), **FILTERS)
def test_a_filtered_draw_is_the_draw_of_the_masked_row(seed, spread, step, temperature, top_k, top_p, min_p):
    """Bit for bit: the same noise, added to the same quotient, whichever way the token was found."""
    n = 20
    logits = torch.randn(n, 300, generator=torch.Generator().manual_seed(seed)) * spread
    if step:
        logits = (logits / step).round() * step
    state = make_state(n, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    state.key[:] = [mix64(seed * n + i) for i in range(n)]
    one = make_state(1, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    masked = torch.full_like(logits, -torch.inf)
    for row in range(n):
        ids = list(kept_of_all(logits[row : row + 1], reference, one))
        masked[row, ids] = logits[row, ids]
    keys = torch.from_numpy(position_keys(state.key, state.num_tokens).view(np.int64))
    for kernels in BACKENDS:
        expected = kernels.gumbel_argmax(masked, torch.from_numpy(state.temperature), keys)
        assert sample(logits, state, kernels=kernels).tokens.tolist() == expected.tolist()
