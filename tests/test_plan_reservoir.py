"""Step times from several runs: which observations are kept, and that small runs say nothing of large steps."""

import re
from dataclasses import astuple, replace

import numpy as np
import pytest
from cli_cases import call
from plan_cases import config_of, prompts
from test_plan_profile import INFO, PRIOR, TRUE, recording_of, seconds_of

from pagedgen import user_state
from pagedgen.planning import profile as profiles
from pagedgen.planning.lengths import OutputLengths
from pagedgen.planning.plan import make_plan
from pagedgen.planning.profile import load_profile, prior_of, record_profile
from pagedgen.planning.reservoir import MOST, MOST_OF_ONE, merge, observed, trusted
from pagedgen.planning.steptime import REACH, BoundedTime, fit
from pagedgen.simulation import StepWork
from pagedgen.stats.types import GENERATING


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(user_state, "state_folder", lambda: tmp_path / "cache")


def run_of(rows, steps=66, step_time=TRUE, warm_up=0.0):
    """What a run of so many rows computes: prompts of 40 tokens in its first step, then a token for each row."""
    first = [1.0, 40 * rows, 40 * 20 * rows, rows]
    work = np.array([first, *([1.0, rows, rows * (40 + step), rows] for step in range(steps - 1))])
    seconds = seconds_of(work, step_time)
    seconds[0] += warm_up
    return work, seconds


def record(work, seconds, info=INFO):
    record_profile(recording_of(work, seconds, info=info), OutputLengths())
    return load_profile("tiny", "cpu", "bfloat16", "cpp")


def step_of(rows, context=200):
    return StepWork(
        computed_tokens=rows, sampled_rows=rows, held_tokens=0, attention_pairs=rows * context, running=rows
    )


def test_one_row_says_nothing_of_large_steps():
    profile, prior = record(*run_of(1, warm_up=0.4)), prior_of(INFO)
    assert profile.step_time.per_token == pytest.approx(prior.per_token, rel=0.2)
    assert profile.measured_tokens == 1
    time = BoundedTime(profile.step_time, REACH * profile.measured_tokens, prior)
    assert time(step_of(1, 50)) == pytest.approx(TRUE(step_of(1, 50)), rel=0.05)
    further = time(step_of(256)) - time(step_of(1))
    assert further == pytest.approx(prior(step_of(256)) - prior(step_of(1)), rel=0.05)


def test_steps_of_a_few_rows_are_not_carried_over_to_large_ones():
    """A token of eight can cost many times what one of hundreds does."""
    work = np.concatenate([run_of(rows)[0][1:] for rows in (2, 4, 8)])
    slow = replace(TRUE, per_token=1e-2)
    profile, prior = record(work, seconds_of(work, slow)), prior_of(INFO)
    time = BoundedTime(profile.step_time, REACH * profile.measured_tokens, prior)
    assert time(step_of(8, 50)) == pytest.approx(slow(step_of(8, 50)), rel=0.1)
    assert time(step_of(1024)) < 0.3 * slow(step_of(1024))


def test_a_small_run_replaces_nothing_that_a_large_one_has_shown():
    large = record(*run_of(200))
    assert large.step_time.per_token == pytest.approx(TRUE.per_token, rel=0.3)
    for _ in range(3):
        after = record(*run_of(1, warm_up=0.4))
        assert after.measured_tokens == large.measured_tokens
        for rows in (100, 200):
            assert after.step_time(step_of(rows, 80)) == pytest.approx(TRUE(step_of(rows, 80)), rel=0.1)


def test_newer_observations_replace_older_ones_of_their_kind():
    record(*run_of(200))
    slower = replace(TRUE, per_step=0.06)
    after = record(*run_of(200, step_time=slower))
    assert after.step_time(step_of(200, 80)) == pytest.approx(slower(step_of(200, 80)), rel=0.05)


def test_quiet_observations_are_preferred(monkeypatch):
    quiet = record(*run_of(200))
    assert not quiet.was_busy
    monkeypatch.setattr(profiles, "is_busy", lambda: True)
    after = record(*run_of(200, step_time=replace(TRUE, per_step=0.5)))
    assert after.step_time == quiet.step_time
    assert not after.was_busy
    other = record(*run_of(2000, step_time=replace(TRUE, per_step=0.5)))  # of a size that was not measured yet
    assert other.was_busy
    assert other.measured_tokens > quiet.measured_tokens


def test_observations_are_bounded_and_of_all_sizes():
    draw = np.random.default_rng(0)
    kept = []
    for run in range(20):
        tokens = np.exp2(draw.uniform(0, 15, 1000)).round()
        pairs = tokens * np.exp2(draw.uniform(0, 15, 1000)).round()
        work = np.stack([np.ones(1000), tokens, pairs, tokens], axis=1)
        kept = merge(observed(work, seconds_of(work), f"2026-01-{run + 1:02}", False), kept)
        assert len(kept) <= MOST
    assert len({one.kind[0] for one in kept}) == 15
    assert sum(one.date == "2026-01-20" for one in kept) > len(kept) / 2
    assert trusted(kept) == kept
    alike = observed(*run_of(100, 1000), "2026-01-01", False)
    assert len(merge(alike, [])) <= 4 * MOST_OF_ONE
    assert len({one.pairs for one in merge(alike, [])}) > MOST_OF_ONE, "spread over the run"


def test_what_was_hardly_there_is_not_scaled_with_the_rest():
    work = np.tile([1.0, 1.0, 100.0, 1.0], (50, 1))
    found = fit(work, 10 * seconds_of(work, PRIOR), PRIOR)
    assert seconds_of(work, found) == pytest.approx(10 * seconds_of(work, PRIOR), rel=1e-6)
    assert astuple(found)[1:] == pytest.approx(astuple(PRIOR)[1:], rel=0.2)


def test_the_plan_says_when_its_steps_are_far_larger_than_measured(model, folder):
    config = config_of(folder, model, prompts(60), overrides={"max_tokens": 8, "ignore_eos": True})
    small = {"looking": 0.1, GENERATING: 1.0}
    facts = make_plan(config)
    info = replace(INFO, model=facts.facts.name, dtype="float32", kernels=facts.kernels)
    record_profile(recording_of(*run_of(1), info=info, phases=small), OutputLengths())
    plan = make_plan(config)
    assert plan.measured_tokens == 1
    assert plan.far_tokens == max(plan.outcome.step_tokens) > 100
    options = ("-m", model, "--kv-memory", "2MiB", "--max-tokens", 8)
    shown = " ".join(call("plan", "in.jsonl", *options)[1].split())
    assert re.search(r"measured up to 1 token a step, but this plan has steps of [\d,]+: what is beyond", shown)
    large = np.concatenate([run_of(200)[0], run_of(2000)[0]])
    record_profile(recording_of(large, seconds_of(large), info=info, phases=small), OutputLengths())
    assert make_plan(config).far_tokens is None
