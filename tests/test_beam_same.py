"""Beam search: sequence for sequence and score for score what transformers finds in float32, and no block is lost.

Where transformers has nothing to compare with, stop strings and groups of beams, a plain search of our own stands in;
it is itself compared with transformers.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import cycle, product

import pytest
import torch
from beam_oracle import BeamOracle, FullForward, Replay, cut_before_stop
from tiny_models import random_sequences, tiny_checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer

from pagedgen import BeamParams, Engine, EngineConfig, Request, SamplingParams, Status

TOLERANCE = 1e-4
MAX_TOKENS = 16
PLAIN = SamplingParams(max_tokens=MAX_TOKENS)
WIDTHS = (2, 4, 8)
LENGTH_PENALTIES = (0.6, 1.0, 2.0)
EARLY_STOPPING = {"true": True, "false": False, "never": "never"}
# llama and qwen3 run natively, gpt2 through the attention hook of transformers.
ARCHITECTURES = ("llama", "qwen3", "gpt2")
PROMPT_LENGTHS = (1, 5, 12, 23)


@dataclass(frozen=True)
class Case:
    """What is asked of a prompt. num_ends: how many of the subject's end tokens there are."""

    beam: BeamParams
    params: SamplingParams = PLAIN
    num_ends: int = 2


@dataclass
class Expected:
    """What transformers found: (generated ids, score) of each hypothesis, and what its beams' next tokens scored."""

    hypotheses: list[tuple[list[int], float]]
    scores: tuple[torch.Tensor, ...]


class Subject:
    """A model as transformers runs it, prompts for it, and what it finds for them."""

    def __init__(self, folder, prompts, end_ids=None):
        self.folder, self.prompts = folder, prompts
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self._end_ids, self._known = end_ids, {}

    @cached_property
    def end_ids(self):
        """Tokens that beams come to often, so that hypotheses end early, late and not at all."""
        if self._end_ids is not None:
            return self._end_ids
        free = [self.search(i, Case(BeamParams(width=8, num_return=8), num_ends=0)) for i in range(len(self.prompts))]
        prompts_with = {}
        for i, found in enumerate(free):
            for ids, _ in found.hypotheses:
                for token in ids[1:]:
                    prompts_with.setdefault(token, set()).add(i)
        return sorted(prompts_with, key=lambda token: (-len(prompts_with[token]), token))[:3]

    def ends(self, case):
        return self.end_ids[: case.num_ends] if case.num_ends else []

    def search(self, number, case):
        if (number, case) not in self._known:
            self._known[number, case] = self._search(self.prompts[number], case)
        return self._known[number, case]

    @torch.inference_mode()
    def _search(self, prompt, case):
        beam, params = case.beam, case.params
        out = self.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=params.max_tokens,
            min_new_tokens=params.min_tokens or None,
            repetition_penalty=params.repetition_penalty,
            sequence_bias={(token,): bias for token, bias in params.logit_bias} or None,
            num_beams=beam.width,
            num_return_sequences=beam.num_return,
            length_penalty=beam.length_penalty,
            early_stopping=EARLY_STOPPING[beam.early_stopping],
            eos_token_id=self.ends(case) or None,
            pad_token_id=0,
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
        )
        lengths = (out.beam_indices >= 0).sum(dim=1).tolist()
        ids = [row[:length] for row, length in zip(out.sequences[:, len(prompt) :].tolist(), lengths, strict=True)]
        return Expected(list(zip(ids, out.sequences_scores.tolist(), strict=True)), out.scores)

    def margin(self, number, case):
        """The least difference that a decision of transformers' own search hung on."""
        oracle = BeamOracle(
            Replay(self.search(number, case).scores), case.beam, case.params.max_tokens, self.ends(case)
        )
        replayed = [list(h.ids) for h in oracle.search()]
        assert replayed == [ids for ids, _ in self.search(number, case).hypotheses], "the replay took another path"
        return oracle.margin

    def engine(self, **config):
        return Engine(EngineConfig(model=str(self.folder), dtype="float32", **{"kv_memory": 1 << 24, **config}))

    def request(self, row, number, case):
        params = replace(case.params, ignore_eos=True, stop_token_ids=tuple(self.ends(case)))
        return Request(row, str(row), prompt_token_ids=tuple(self.prompts[number]), params=params, beam=case.beam)


def run(engine, requests):
    """The completions of each request, in the order they came. What a search held is free or cached afterwards."""
    found = {}
    for c in engine.generate(requests):
        found.setdefault(c.row, []).append(c)
    engine.scheduler.check()
    assert engine.blocks.num_used == 0
    assert engine.blocks.num_copies <= engine.scheduler.counts.branchings
    assert sorted(found) == [request.row for request in requests]
    return [found[request.row] for request in requests]


def assert_same(subject, number, case, completions):
    """Fail unless the completions are those of transformers; returns whether they differ after a tie."""
    expected = subject.search(number, case).hypotheses
    assert [c.status for c in completions] == [Status.OK] * len(expected)
    assert [c.sample for c in completions] == list(range(len(expected)))
    ends = subject.ends(case)
    for c in completions:
        assert c.finish_reason == ("stop" if c.token_ids[-1] in ends else "length")
        assert c.cumulative_logprob == pytest.approx(
            c.score * len(c.token_ids) ** case.beam.length_penalty, rel=1e-5, abs=TOLERANCE
        )
        assert c.text == subject.tokenizer.decode(
            c.token_ids[:-1] if c.finish_reason == "stop" else c.token_ids, skip_special_tokens=True
        )
    assert [c.score for c in completions] == sorted((c.score for c in completions), reverse=True)
    if [list(c.token_ids) for c in completions] == [ids for ids, _ in expected]:
        assert [c.score for c in completions] == pytest.approx([score for _, score in expected], abs=TOLERANCE)
        return False
    margin = subject.margin(number, case)
    assert margin <= TOLERANCE, (
        f"{case} of prompt {number} found {[(c.token_ids, c.score) for c in completions]}, not {expected}, "
        f"and every decision was clear by {margin:.2g}"
    )
    return True


def compare(subject, cases, **config):
    """Search all prompts in all ways together; the engine, for what it counted."""
    engine = subject.engine(**config)
    asked = [(number, case) for case in cases for number in range(len(subject.prompts))]
    requests = [subject.request(row, number, case) for row, (number, case) in enumerate(asked)]
    found = run(engine, requests)
    ties = sum(assert_same(subject, *which, completions) for which, completions in zip(asked, found, strict=True))
    print(f"{ties} of {len(asked)} searches differ after a tie")
    assert ties <= len(asked) // 10
    return engine


@pytest.fixture(scope="module", params=ARCHITECTURES)
def subject(request, tmp_path_factory):
    folder = tiny_checkpoint(tmp_path_factory.mktemp(request.param), request.param)
    return Subject(folder, random_sequences(PROMPT_LENGTHS))


def cases_of(width):
    """Every length penalty with every rule of early stopping, returning one, some or all of the hypotheses."""
    returns = cycle((width, 1, width, width // 2))
    return [
        Case(BeamParams(width, next(returns), penalty, early))
        for penalty, early in product(LENGTH_PENALTIES, EARLY_STOPPING)
    ]


@pytest.mark.parametrize("width", WIDTHS)
def test_sequences_and_scores_are_those_of_transformers(subject, width):
    engine = compare(subject, cases_of(width))
    assert engine.spec.path == ("hook" if engine.spec.name.endswith("gpt2") else "native")


def test_hypotheses_of_these_models_end_early_late_and_at_the_limit(subject):
    """Without this, the comparison above would not meet the rules it is there for."""
    found = [
        ids
        for width in WIDTHS
        for case in cases_of(width)
        for number in range(len(subject.prompts))
        for ids, _ in subject.search(number, case).hypotheses
    ]
    lengths = {len(ids) for ids in found if ids[-1] in subject.end_ids[:2]}
    assert len(lengths) > 5
    assert any(len(ids) == MAX_TOKENS and ids[-1] not in subject.end_ids[:2] for ids in found)


def test_other_parameters_are_those_of_transformers(subject):
    ends, four = subject.end_ids, BeamParams(width=4, num_return=4)
    wide = BeamParams(width=8, num_return=8, early_stopping="true")
    long = BeamParams(width=4, num_return=4, length_penalty=2.0, early_stopping="never")
    nearly_always_ending = replace(PLAIN, logit_bias=tuple((token, 5.0) for token in ends))
    compare(
        subject,
        [
            Case(four, replace(PLAIN, min_tokens=6)),
            Case(wide, replace(PLAIN, min_tokens=6), num_ends=1),
            Case(four, replace(PLAIN, repetition_penalty=1.3)),
            Case(wide, replace(PLAIN, repetition_penalty=0.8, min_tokens=3), num_ends=3),
            Case(four, replace(PLAIN, logit_bias=((ends[0], 2.0), (ends[1], -1.5)))),
            Case(wide, PLAIN, num_ends=0),
            Case(wide, PLAIN, num_ends=3),
            Case(long, nearly_always_ending, num_ends=3),
            Case(four, nearly_always_ending, num_ends=3),
            Case(four, replace(PLAIN, max_tokens=1)),
            Case(BeamParams(width=5, num_return=2, length_penalty=-0.5), PLAIN),
            Case(BeamParams(width=3, num_return=3, length_penalty=0.0, early_stopping="never"), PLAIN),
        ],
    )


def test_in_a_pool_that_makes_groups_give_way(subject):
    """Just enough blocks for any one search: those that were let in while the others were short have to start again."""
    lengths = {2: 56, 4: 26, 8: 12}
    cases = [
        Case(BeamParams(width, width), SamplingParams(max_tokens=lengths[width]), num_ends)
        for num_ends, width in product((0, 1, 0), WIDTHS)
    ]
    ample = subject.engine()
    bytes_per_token = ample.kv_bytes // ample.scheduler.capacity
    tight = {"block_size": 4, "max_batch_tokens": 16, "kv_memory": 148 * bytes_per_token}
    for prefix_cache in (True, False):
        engine = compare(subject, cases, prefix_cache=prefix_cache, **tight)
        assert engine.scheduler.counts.preemptions > 10
        assert engine.blocks.num_copies > 0


def test_an_abandoned_search_leaves_nothing_behind(subject):
    engine = subject.engine(block_size=4)
    cases = cases_of(4)
    completions = engine.generate([subject.request(i, i % len(subject.prompts), case) for i, case in enumerate(cases)])
    next(completions)
    completions.close()
    engine.scheduler.check()
    assert engine.blocks.num_used == 0
    compare_again = run(engine, [subject.request(0, 1, cases[0])])
    assert not assert_same(subject, 1, cases[0], compare_again[0])


# --- what transformers cannot do: the plain search


def plain_search(subject, number, case, stops=()):
    """What the oracle finds: (ids, score, reason, text)."""
    decode = subject.tokenizer.decode
    ends = subject.ends(case)
    oracle = BeamOracle(
        FullForward(subject.model, subject.prompts[number], ends, case.params),
        case.beam,
        case.params.max_tokens,
        ends,
        lambda ids: cut_before_stop(decode(ids, skip_special_tokens=True), stops) is not None,
    )
    found = []
    for h in oracle.search():
        text = decode(h.ids[:-1] if h.ids[-1] in ends else h.ids, skip_special_tokens=True)
        cut = cut_before_stop(text, stops)
        found.append((list(h.ids), h.score, h.reason, text if cut is None else cut))
    return found


def assert_as_plain(subject, cases, **changes):
    """Search all prompts in all ways together and compare with the plain search; all that it found."""
    asked = [(number, case) for case in cases for number in range(len(subject.prompts))]
    requests = [subject.request(row, number, case) for row, (number, case) in enumerate(asked)]
    everything = []
    for (number, case), completions in zip(asked, run(subject.engine(block_size=4), requests), strict=True):
        expected = plain_search(subject, number, case, case.params.stop)
        found = [(list(c.token_ids), c.score, c.finish_reason, c.text) for c in completions]
        scores = [score for _, score, _, _ in expected]
        assert [row[1] for row in found] == pytest.approx(scores, abs=TOLERANCE), f"{case} of prompt {number}"
        assert [(ids, *rest) for ids, _, *rest in found] == [(ids, *rest) for ids, _, *rest in expected]
        everything += expected
    return everything


def test_the_plain_search_is_that_of_transformers(subject):
    for case in (*cases_of(4), Case(BeamParams(8, 8), SamplingParams(max_tokens=12, min_tokens=4), num_ends=3)):
        for number in range(len(subject.prompts)):
            expected = subject.search(number, case).hypotheses
            found = plain_search(subject, number, case)
            assert [ids for ids, *_ in found] == [ids for ids, _ in expected]
            assert [score for _, score, *_ in found] == pytest.approx([score for _, score in expected], abs=TOLERANCE)


def test_stop_strings_end_hypotheses_and_cut_their_text(subject):
    """Two of the stop strings are taken from what the beams say, across the border of tokens where there is one."""
    free = Case(BeamParams(8, 8), SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True), num_ends=0)
    texts = [plain_search(subject, number, free)[0][3] for number in range(len(subject.prompts))]
    pieces = [text[i : i + 2] for text in texts for i in range(2, len(text) - 2) if text[i : i + 2].isascii()]
    stops = (*pieces[:1], *pieces[-1:], "e", "zzz")
    params = SamplingParams(max_tokens=MAX_TOKENS, stop=stops)
    cases = [
        Case(BeamParams(width, width, penalty, early), params, num_ends)
        for (width, early, penalty), num_ends in zip(
            [(1, "false", 1.0), (2, "false", 1.0), (4, "true", 0.6), (4, "never", 2.0), (8, "false", 1.0)],
            cycle((0, 1)),
            strict=False,
        )
    ]
    found = assert_as_plain(subject, cases)
    stopped = [row for row in found if row[2] == "stop"]
    assert len({len(ids) for ids, *_ in stopped}) > 2
    assert any(row[2] == "length" for row in found)
    assert not any(stop in text for *_, text in found for stop in stops)


@pytest.mark.parametrize(("width", "groups"), [(4, 2), (4, 4), (8, 2)])
def test_groups_of_beams_keep_apart(subject, width, groups):
    cases = [
        Case(BeamParams(width, width, length_penalty, early, groups, penalty))
        for penalty, length_penalty, early in [(0.5, 1.0, "false"), (2.0, 0.6, "true"), (0.3, 2.0, "never")]
    ]
    assert_as_plain(subject, [*cases, replace(cases[0], params=SamplingParams(max_tokens=1))])
    found = [
        plain_search(subject, 1, Case(replace(cases[1].beam, diversity_penalty=penalty))) for penalty in (0.0, 2.0)
    ]
    alike, apart = (len({tuple(ids) for ids, *_ in hypotheses}) for hypotheses in found)
    assert alike == width // groups < apart


# --- a real model


@pytest.fixture(scope="module")
def chats(gsm8k, smollm2_folder):
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder)
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True).input_ids
        for question in gsm8k[:16]
    ]
    return Subject(smollm2_folder, prompts, end_ids=[tokenizer.eos_token_id])


@pytest.mark.slow
@pytest.mark.parametrize("width", WIDTHS)
def test_gsm8k(chats, width):
    case = Case(BeamParams(width, width), SamplingParams(max_tokens=64), num_ends=1)
    compare(chats, [case], kv_memory=1 << 30)
