"""Biases, penalties and bans against transformers' processors and plain loops; and what they do to beams and draws."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pagedgen_kernels import cpu, reference
from sampler_cases import make_plan, make_state, processed, sample
from scipy.stats import chisquare
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pagedgen.execution.processors import add_biases, ban, edited, penalise
from pagedgen.scheduling.sequence import mix64

BACKENDS = [reference, cpu] if cpu.available() else [reference]
VOCAB_SIZE = 60


def edit_and_ban(logits, state, slots=None, biases=None, banned=None):
    slots = np.arange(len(logits), dtype=np.int32) if slots is None else np.array(slots, np.int32)
    plan = make_plan(slots, biases=biases, banned=banned or {})
    scores = logits.clone()
    add_biases(scores, slots, plan)
    penalise(scores, slots, state)
    ban(scores, slots, plan)
    return scores


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    ids=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=2, max_size=30),
    penalty=st.sampled_from([0.5, 1.0, 1.1, 2.0]),
    biases=st.dictionaries(st.integers(0, VOCAB_SIZE - 1), st.floats(-9, 9, width=16), max_size=4),
    bad_words=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3), max_size=3, unique_by=tuple),
    min_tokens=st.sampled_from([0, 3, 40]),
)
def test_scores_equal_those_of_transformers(seed, ids, penalty, biases, bad_words, min_tokens):
    logits = torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 3
    num_prompt = len(ids) // 2
    processors = LogitsProcessorList()
    if biases:
        processors.append(SequenceBiasLogitsProcessor([[[token], value] for token, value in biases.items()]))
    processors.append(RepetitionPenaltyLogitsProcessor(penalty))
    if bad_words:
        processors.append(NoBadWordsLogitsProcessor(bad_words, eos_token_id=7))
    processors.append(MinNewTokensLengthLogitsProcessor(num_prompt, min_tokens, 7))
    expected = processors(torch.tensor([ids]), logits)
    banned = [word[-1] for word in bad_words if word[:-1] == ids[len(ids) - len(word) + 1 :] or len(word) == 1]
    banned += [7] if len(ids) - num_prompt < min_tokens else []
    state = make_state(1, 30, token_ids=[ids], num_prompt=num_prompt, repetition_penalty=penalty)
    scores = edit_and_ban(logits, state, biases={0: biases} if biases else {}, banned={0: tuple(banned)})
    assert torch.equal(scores, expected)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    rows=st.lists(
        st.tuples(
            st.lists(st.integers(0, 9), min_size=1, max_size=30),  # few tokens, so that many occur often
            st.floats(0, 1),
            st.sampled_from([0.0, 0.5, 2.0]),
            st.sampled_from([0.0, 0.25, 1.0]),
        ),
        min_size=1,
        max_size=6,
    ),
)
def test_presence_and_frequency_count_the_completion_alone(seed, rows):
    logits = torch.randn(len(rows), VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))
    num_prompt = [max(1, round(share * len(ids))) for ids, share, _, _ in rows]
    presence, frequency = ([row[i] for row in rows] for i in (2, 3))
    state = make_state(
        len(rows),
        30,
        token_ids=[row[0] for row in rows],
        num_prompt=num_prompt,
        presence_penalty=presence,
        frequency_penalty=frequency,
    )
    scores = edit_and_ban(logits, state)
    for row, (ids, *_) in enumerate(rows):
        counts = np.bincount(ids[num_prompt[row] :], minlength=VOCAB_SIZE)
        expected = logits[row].numpy() - counts * frequency[row] - (counts > 0) * presence[row]
        np.testing.assert_allclose(scores[row].numpy(), expected, rtol=0, atol=1e-5)
        untouched = counts == 0
        assert np.array_equal(scores[row].numpy()[untouched], logits[row].numpy()[untouched])


def test_the_order_is_bias_repetition_occurrence_bans():
    """A case in which any other order gives another result."""
    logits = torch.tensor([[1.0, 1.0, 1.0]])
    state = make_state(
        1,
        token_ids=[[2, 0, 0]],
        num_prompt=1,
        repetition_penalty=2,
        presence_penalty=0.25,
        frequency_penalty=0.5,
    )
    scores = edit_and_ban(logits, state, biases={0: {0: -2.0, 1: 3.0}}, banned={0: (2,)})
    assert scores.tolist() == [[(1 - 2) * 2 - 2 * 0.5 - 0.25, 4.0, -torch.inf]]


def test_minus_infinity_stays_and_nothing_becomes_nan():
    logits = torch.tensor([[-torch.inf, 0.0, -0.0, 1.0, -torch.inf]])
    state = make_state(
        1,
        token_ids=[[0, 1, 2, 3, 4]],
        num_prompt=1,
        repetition_penalty=[0.3],
        presence_penalty=1.0,
        frequency_penalty=1.0,
    )
    scores = edit_and_ban(logits, state, biases={0: {0: 5.0, 4: -5.0}})
    assert not scores.isnan().any()
    assert (scores[0] == -torch.inf).tolist() == [True, False, False, False, True]


def test_edited_names_the_rows_that_ask():
    state = make_state(6, repetition_penalty=[1, 2, 1, 1, 1, 1], presence_penalty=[0, 0, 1, 0, 0, 0])
    state.frequency_penalty[3] = 0.5
    slots = np.array([5, 4, 3, 2, 1, 0], np.int32)
    plan = make_plan(slots, biases={4: {1: 1.0}}, banned={0: (1,)})
    assert edited(slots, plan, state).tolist() == [False, True, True, True, True, False]


@pytest.mark.parametrize("kernels", BACKENDS)
def test_no_neighbour_is_touched(kernels):
    """Every result of the other rows is bit-identical with and without one odd row, whatever it asks."""
    n, odd = 7, 3
    logits = torch.randn(n, VOCAB_SIZE, generator=torch.Generator().manual_seed(2)).bfloat16() * 2
    base = {
        "token_ids": [[1, 2, 3, slot] for slot in range(n)],
        "num_prompt": 1,
        "temperature": [0, 1, 1, 1, 1, 0, 1],
        "top_p": [1, 1, 0.8, 1, 1, 1, 1],
        "repetition_penalty": [1, 1, 1, 1, 1, 1, 1.5],
        "key": [mix64(slot) for slot in range(n)],
    }
    asks = {"biases": {4: {5: 2.0}}, "logprobs": {1: 3}, "beams": {5: 4, 6: 4}, "banned": {2: (1, 2)}}
    plain = sample(logits, make_state(n, **base), kernels=kernels, **asks)
    state = make_state(n, **base)
    state.repetition_penalty[odd], state.presence_penalty[odd], state.frequency_penalty[odd] = 3, 2, 1
    state.top_k[odd], state.top_p[odd], state.temperature[odd] = 5, 0.5, 2
    asks["biases"] = asks["biases"] | {odd: {0: 50.0, VOCAB_SIZE - 1: -50.0}}
    asks["banned"] = asks["banned"] | {odd: (0, 1, VOCAB_SIZE - 1)}
    asks["logprobs"] = asks["logprobs"] | {odd: 20}
    strange = logits.clone()
    for values in (logits[odd], torch.nan, torch.inf, -torch.inf):
        strange[odd] = values
        for further in ({}, {odd: np.arange(9, dtype=np.uint64)}):
            found = sample(strange, state, kernels=kernels, extra_keys=further, **asks)
            others = np.arange(n) != odd
            assert found.tokens[others].tolist() == plain.tokens[others].tolist()
            assert found.logprobs[1] == plain.logprobs[1]
            for slot in (5, 6):
                assert np.array_equal(found.beams[slot].ids, plain.beams[slot].ids)
                assert np.array_equal(found.beams[slot].logprobs, plain.beams[slot].logprobs)


@pytest.mark.parametrize("kernels", BACKENDS)
def test_draws_after_everything_follow_the_exact_distribution(kernels):
    """All processors and filters of one row at a time, against transformers' own in the same order."""
    n, vocab_size, ids = 20_000, 8, [1, 2, 2, 3]
    logits = torch.tensor([2.0, 2.5, 1.5, 1.0, 0.5, 0.0, -0.5, 3.0])
    biases = {0: 0.5, 5: 1.0}
    chain = LogitsProcessorList(
        [
            SequenceBiasLogitsProcessor([[[token], value] for token, value in biases.items()]),
            RepetitionPenaltyLogitsProcessor(1.3),
        ]
    )
    scores = chain(torch.tensor([ids]), logits[None])
    for token in (2, 2, 3):
        scores[0, token] -= 0.2
    for token in (2, 3):
        scores[0, token] -= 0.1
    scores[0, 7] = -torch.inf
    for warper in (TemperatureLogitsWarper(1.5), TopKLogitsWarper(6), TopPLogitsWarper(0.9), MinPLogitsWarper(0.27)):
        scores = warper(None, scores)
    exact = scores[0].double().softmax(0).numpy()
    assert (exact > 0).sum() == 4  # top-k, top-p and min-p each drop one of seven
    state = make_state(
        n,
        token_ids=[ids] * n,
        num_prompt=1,
        key=[mix64(i) for i in range(n)],
        repetition_penalty=1.3,
        frequency_penalty=0.2,
        presence_penalty=0.1,
        temperature=1.5,
        top_k=6,
        top_p=0.9,
        min_p=0.27,
    )
    rows = range(n)
    asks = {"biases": dict.fromkeys(rows, biases), "banned": dict.fromkeys(rows, (7,))}
    tokens = sample(logits.expand(n, vocab_size), state, kernels=kernels, **asks).tokens
    counts = np.bincount(tokens, minlength=vocab_size)
    assert counts[exact == 0].sum() == 0
    assert chisquare(counts[exact > 0], exact[exact > 0] * n).pvalue > 1e-3


@pytest.mark.parametrize("kernels", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_continuations_are_the_top_of_the_log_softmax(kernels, dtype):
    logits = (torch.randn(5, 300, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    wanted = {0: 1, 1: 7, 3: 190, 4: 400}
    found = sample(logits, make_state(5), kernels=kernels, beams=wanted)
    assert found.beams.keys() == wanted.keys()
    assert found.tokens[2] == logits[2].float().argmax()
    expected = torch.log_softmax(logits.float(), 1)
    for slot, k in wanted.items():
        best = found.beams[slot]
        order = np.lexsort((np.arange(300), -logits[slot].float().numpy()))[:k]
        assert best.ids.tolist() == order.tolist()
        assert (best.ids.dtype, best.logprobs.dtype) == (np.int64, np.float32)
        np.testing.assert_allclose(best.logprobs, expected[slot].numpy()[order], atol=2e-6, rtol=1e-6)
        assert found.tokens[slot] == best.ids[0]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    rows=st.lists(
        st.tuples(
            st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=2, max_size=8),
            st.sampled_from([1.0, 1.0, 1.4, 0.7]),
            st.sampled_from([0.0, 0.0, 0.5]),
            st.none() | st.dictionaries(st.integers(0, VOCAB_SIZE - 1), st.floats(-5, 5, width=16), min_size=1),
            st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=3),
            st.integers(1, VOCAB_SIZE),
        ),
        min_size=1,
        max_size=6,
    ),
    kernels=st.sampled_from(BACKENDS),
)
def test_processors_act_on_the_log_probabilities_of_beams(seed, rows, kernels):
    n = len(rows)
    logits = torch.randn(n, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 3
    state = make_state(n, token_ids=[row[0] for row in rows], num_prompt=1)
    state.repetition_penalty[:], state.presence_penalty[:] = ([row[i] for row in rows] for i in (1, 2))
    biases = {slot: row[3] for slot, row in enumerate(rows) if row[3]}
    banned = {slot: tuple(row[4]) for slot, row in enumerate(rows) if row[4]}
    wanted = {slot: row[5] for slot, row in enumerate(rows)}
    found = sample(logits, state, kernels=kernels, biases=biases, banned=banned, beams=wanted)
    for slot in range(n):
        normalised = torch.log_softmax(logits[slot], 0)
        scores = processed(normalised, state, slot, biases.get(slot), banned.get(slot, ()))
        k = min(wanted[slot], int((scores > -np.inf).sum()))
        best = found.beams[slot]
        np.testing.assert_allclose(best.logprobs, np.sort(scores)[::-1][:k], atol=1e-5, rtol=1e-5)
        np.testing.assert_allclose(scores[best.ids], best.logprobs, atol=1e-5, rtol=1e-5)
        assert len(set(best.ids.tolist())) == k


@pytest.mark.parametrize("kernels", BACKENDS)
def test_unusable_beams_have_no_continuations(kernels):
    logits = torch.randn(7, 12)
    logits[0, 3] = torch.nan
    logits[1] = -torch.inf
    logits[2, 5] = torch.inf
    logits[3, 2:] = -torch.inf
    logits[5, 3] = torch.nan
    state = make_state(7, token_ids=[[1]] * 7, repetition_penalty=[1, 1, 1, 1, 1, 2, 1])
    everything = tuple(range(12))
    found = sample(logits, state, kernels=kernels, beams=dict.fromkeys(range(7), 4), banned={4: everything, 6: (1,)})
    assert found.beams.keys() == {3, 6}
    assert (found.tokens >= 0).tolist() == [False, False, False, True, False, False, True]
    assert sorted(found.beams[3].ids.tolist()) == [0, 1]
    assert found.beams[3].logprobs[0] == pytest.approx(float(torch.log_softmax(logits[3], 0).max()))
    assert 1 not in found.beams[6].ids.tolist()
