"""What runs leave for later plans: fits of step times, curves of lengths, profiles and plans on the disk."""

import json
from dataclasses import astuple, replace

import numpy as np
import pytest
from fake_device import make_group
from test_project import run_python

from pagedgen import user_state
from pagedgen.config import EngineConfig, InputConfig, JobConfig, PromptConfig
from pagedgen.data.readers import open_input
from pagedgen.planning import profile as profiles
from pagedgen.planning.lengths import ExpectedLengths, LengthCurve, MeanLength, OutputLengths
from pagedgen.planning.machine import figures
from pagedgen.planning.profile import load_profile, prior_of, record_profile
from pagedgen.planning.steptime import StepTime, fit, observations, roofline
from pagedgen.planning.store import load_plan, plan_key, save_plan
from pagedgen.request import BeamParams, Completion, FinishReason, Status
from pagedgen.simulation import StepWork
from pagedgen.stats.recording import COLUMNS, INDEX, Recording, Session
from pagedgen.stats.types import GENERATING, RunInfo

TRUE = StepTime(0.02, 7e-4, 2e-7, 3e-4)
PRIOR = StepTime(0.05, 3e-4, 1e-6, 1e-4)
INFO = RunInfo(
    model="tiny",
    device="cpu",
    dtype="bfloat16",
    kernels="cpp",
    kv_bytes=1 << 20,
    kv_blocks=64,
    block_size=16,
    max_batch_tokens=2048,
    weight_bytes=300 << 20,
    activation_bytes=2048 * 5000,
    vocab_size=49152,
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(user_state, "state_folder", lambda: tmp_path / "cache")
    return tmp_path / "cache"


def work_of(count, seed=0):
    draw = np.random.default_rng(seed)
    columns = (np.ones(count), *(draw.integers(1, most, count) for most in (2000, 100_000, 256)))
    return np.stack(columns, axis=1).astype(float)


def seconds_of(work, step_time=TRUE):
    return work @ np.array(astuple(step_time))


def recording_of(work, seconds, *, sessions=1, phases=None, info=INFO):
    """A recording whose intervals, of the last of the sessions, take so long, a third of it between the steps."""
    sums = np.zeros((len(work), len(COLUMNS)))
    starts = np.concatenate([[0], np.cumsum(seconds)[:-1]])
    values = {
        "session": np.full(len(work), sessions - 1),
        "start_s": starts,
        "end_s": starts + np.append(seconds[:-1] * 2 / 3, seconds[-1:]),
        "steps": work[:, 0],
        "computed_tokens": work[:, 1],
        "attention_pairs": work[:, 2],
        "sampled_rows": work[:, 3],
    }
    for name, column in values.items():
        sums[:, INDEX[name]] = column
    phases = phases or {"looking at the input": 0.5, "loading the model": 2.0, GENERATING: 60.0, "writing": 1.0}
    return Recording(
        tuple(Session("2026-01-01T00:00:00+00:00", 0.0, 70.0, phases, info) for _ in range(sessions)), sums
    )


def completion(tokens, stopped, **more):
    reason = FinishReason.STOP if stopped else FinishReason.LENGTH
    return Completion(0, "0", 0, Status.OK, text="abc" * tokens, finish_reason=reason, token_ids=(5,) * tokens, **more)


# --- step times ------------------------------------------------------------------------------------------------------


def test_a_fit_recovers_the_coefficients():
    work = work_of(200)
    assert astuple(fit(work, seconds_of(work), PRIOR)) == pytest.approx(astuple(TRUE), rel=1e-3)


def test_a_fit_does_not_mind_a_slow_first_step_and_noise():
    work = work_of(300)
    seconds = seconds_of(work) * np.random.default_rng(1).lognormal(0, 0.05, len(work))
    seconds[0] += 20
    seconds[100] += 5
    found = fit(work, seconds, PRIOR)
    expected = seconds_of(work).sum()
    assert seconds_of(work, found).sum() == pytest.approx(expected, rel=0.02)
    assert found.per_token == pytest.approx(TRUE.per_token, rel=0.1)


def test_intervals_of_many_steps_are_fitted_as_their_sums():
    work = work_of(512).reshape(64, 8, 4).sum(axis=1)
    assert astuple(fit(work, seconds_of(work), PRIOR)) == pytest.approx(astuple(TRUE), rel=0.01)


def test_steps_that_are_all_alike_are_divided_as_the_prior_says():
    work = np.tile([1.0, 200, 200 * 200, 200], (50, 1))
    found = fit(work, seconds_of(work), PRIOR)
    assert seconds_of(work, found) == pytest.approx(seconds_of(work), rel=1e-6)
    ratios = np.array(astuple(found)) / np.array(astuple(PRIOR))
    assert ratios == pytest.approx(np.full(4, ratios[0]), rel=0.01)


def test_no_coefficient_is_negative():
    work = work_of(100)
    seconds = np.maximum(seconds_of(work) - 2e-3 * work[:, 3], 1e-3)
    assert min(astuple(fit(work, seconds, PRIOR))) >= 0


def test_a_step_costs_the_sum_of_its_parts():
    work = StepWork(computed_tokens=100, sampled_rows=10, held_tokens=0, attention_pairs=5000, running=10)
    assert TRUE(work) == pytest.approx(0.02 + 0.07 + 0.001 + 0.003)


def test_observations_are_the_last_sessions_with_the_time_between_its_steps():
    work = work_of(10)
    recording = recording_of(work, seconds_of(work), sessions=2)
    recording.sums[:4, INDEX["session"]] = 0
    found, seconds = observations(recording)
    assert (found == work[4:]).all()
    assert seconds == pytest.approx(seconds_of(work)[4:])


def test_figures_are_stated_and_of_a_sensible_size():
    for device, dtype in (("cpu", "bfloat16"), ("cpu", "float32")):
        found = figures(device, dtype)
        assert "GB/s" in found.text
        time = roofline(
            found,
            weight_bytes=300 << 20,
            active=106_000_000,
            head=28_000_000,
            kv_token_bytes=23040.0,
            vocab_size=49152,
        )
        decode = StepWork(
            computed_tokens=256, sampled_rows=256, held_tokens=50_000, attention_pairs=50_000, running=256
        )
        assert 0.001 < time(decode) < 100
    assert figures("cpu", "bfloat16").flops >= figures("cpu", "float32").flops


def test_an_accelerator_is_known_by_its_name(monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA H200")
    known = figures("cuda", "bfloat16")
    assert known.text.startswith("NVIDIA H200: 3,360 GB/s")
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA X1")
    other = figures("cuda", "bfloat16")
    assert other.bandwidth < known.bandwidth
    assert figures("cuda", "float32").flops == other.flops / 2


# --- lengths ---------------------------------------------------------------------------------------------------------


def test_the_curve_is_that_of_kaplan_and_meier():
    """Ends at 2 and 4; cut off at 3 and 5: S = 3/4 after 2, 3/4 * 1/2 after 4."""
    curve = LengthCurve([(5, False), (2, True), (4, True), (3, False)])
    assert curve.ends.tolist() == [2, 4]
    assert curve.survival == pytest.approx([0.75, 0.375])
    assert curve.quantile(0.1) == 2
    assert curve.quantile(0.25) == 2
    assert curve.quantile(0.26) == 4
    assert curve.quantile(0.62) == 4
    assert 5 < curve.quantile(0.7) < curve.quantile(0.9)  # past the longest one seen


def test_a_curve_without_ends_never_ends():
    assert LengthCurve([(8, False), (9, False)]).quantile(0.5) == float("inf")


def test_limits_do_not_bias_the_draws():
    """Exponential lengths with mean 100, cut off at 60: drawn for a limit of 1000 they have the mean they had."""
    true = np.random.default_rng(0).exponential(100, 4000).astype(int) + 1
    curve = LengthCurve([(min(60, int(x)), x <= 60) for x in true])
    lengths = ExpectedLengths(curve)
    drawn = [lengths(make_group([1, 2], max_tokens=1000, end_ids=[3], key=row).first) for row in range(2000)]
    assert np.mean(drawn) == pytest.approx(np.mean(true), rel=0.1)
    short = [lengths(make_group([1, 2], max_tokens=60, end_ids=[3], key=row).first) for row in range(2000)]
    assert np.mean(short) == pytest.approx(np.mean(np.minimum(true, 60)), rel=0.1)


def test_draws_are_the_same_for_a_sample_and_differ_between_them():
    lengths = ExpectedLengths(LengthCurve([(n, True) for n in range(1, 100)]))
    first = make_group([1, 2], max_tokens=100, end_ids=[3], key=7, n=2).first
    assert lengths(first) == lengths(first)
    assert len({lengths(first.sibling(sample)) for sample in range(20)}) > 10


def test_what_cannot_stop_takes_its_limit():
    lengths = ExpectedLengths(LengthCurve([(3, True)]))
    assert lengths(make_group([1, 2], max_tokens=50, end_ids=[3], key=0).first) == 3
    assert lengths(make_group([1, 2], max_tokens=50, end_ids=[], key=0).first) == 50
    assert ExpectedLengths(None)(make_group([1, 2], max_tokens=50, end_ids=[3], key=0).first) == 50


@pytest.mark.parametrize(("mean", "most"), [(20, 1000), (80, 100), (100, 100), (500, 100)])
def test_a_stated_mean_is_kept_whatever_the_limit(mean, most):
    groups = [make_group([1, 2], max_tokens=most, end_ids=[3], key=row) for row in range(40)]
    known = MeanLength(mean, groups)
    drawn = [ExpectedLengths(known)(group.first) for group in groups]
    assert np.mean(drawn) == pytest.approx(min(mean, most), rel=0.01)
    assert known.mean == pytest.approx(np.mean(drawn))
    assert max(drawn) <= most


def test_a_stated_mean_is_kept_over_samples_and_different_limits():
    groups = [make_group([1, 2], max_tokens=8 + 10 * row, end_ids=[3], key=row, n=3) for row in range(20)]
    lengths = ExpectedLengths(MeanLength(30, groups))
    drawn = [lengths(group.first.sibling(sample)) for group in groups for sample in range(3)]
    assert np.mean(drawn) == pytest.approx(30, rel=0.01)
    assert len(set(drawn)) > 20


@pytest.mark.parametrize(("rows", "tolerance"), [(1, 0.01), (3, 0.25), (10, 0.1), (100, 0.03)])
def test_few_rows_have_lengths_of_the_middle(rows, tolerance):
    lengths = ExpectedLengths(LengthCurve([(n, True) for n in range(1, 200)]))
    drawn = [lengths(make_group([1, 2], max_tokens=400, end_ids=[3], key=row).first) for row in range(rows)]
    assert np.mean(drawn) == pytest.approx(100, rel=tolerance)


def test_lengths_are_a_bounded_random_sample():
    lengths = OutputLengths(capacity=200)
    for tokens in range(1, 10_001):
        lengths.add(completion(tokens, tokens % 2 == 0))
    assert len(lengths.pairs) == 200
    assert np.mean([tokens for tokens, _ in lengths.pairs]) == pytest.approx(5000, rel=0.15)
    assert all(ended == (tokens % 2 == 0) for tokens, ended in lengths.pairs)
    assert lengths.bytes_per_token == 3.0


def test_what_tells_nothing_about_lengths_is_left_out():
    lengths = OutputLengths()
    lengths.add(completion(5, False, score=-1.0))
    lengths.add(Completion(0, "0", 0, Status.BAD_ROW, error="no"))
    lengths.add(completion(7, False), may_stop=False)
    assert lengths.pairs == []
    assert (lengths.tokens, lengths.text_bytes) == (7, 21)


# --- profiles --------------------------------------------------------------------------------------------------------


def profile_of(count=100, step_time=TRUE, lengths=None, **options):
    work = work_of(count)
    record_profile(recording_of(work, seconds_of(work, step_time), **options), lengths or OutputLengths())
    return load_profile("tiny", "cpu", "bfloat16", "cpp")


def test_a_profile_tells_what_a_run_has_shown(own_cache):
    lengths = OutputLengths()
    for tokens in range(1, 50):
        lengths.add(completion(tokens, True))
    profile = profile_of(lengths=lengths)
    assert astuple(profile.step_time) == pytest.approx(astuple(TRUE), rel=0.02)
    assert 64 <= profile.steps <= 100
    assert 1500 < profile.measured_tokens <= 2000
    assert profile.load_s == 2.5
    assert profile.activation_bytes == 5000
    assert profile.bytes_per_token == 3.0
    assert list(profile.lengths) == lengths.pairs
    files = list((own_cache / "profiles").iterdir())
    assert len(files) == 1
    assert json.loads(files[0].read_text())["model"] == "tiny"


@pytest.mark.parametrize(("load", "was_busy"), [(1.0, False), (1.4, False), (3.0, True)])
def test_a_profile_says_whether_the_machine_was_busy(load, was_busy, monkeypatch):
    monkeypatch.setattr("os.getloadavg", lambda: (load * profiles.core_count(), 0.0, 0.0))
    assert profile_of().was_busy is was_busy


def test_profiles_are_kept_apart():
    profile_of()
    for other in (
        ("small", "cpu", "bfloat16", "cpp"),
        ("tiny", "cpu", "float32", "cpp"),
        ("tiny", "cpu", "bfloat16", "torch"),
    ):
        assert load_profile(*other) is None
    assert load_profile("tiny", "cpu", "bfloat16", "cpp") is not None


def test_a_profile_is_of_its_machine(monkeypatch):
    profile_of()
    monkeypatch.setattr(profiles, "core_count", lambda: 999)
    assert load_profile("tiny", "cpu", "bfloat16", "cpp") is None


def test_a_run_of_few_completions_replaces_no_lengths():
    lengths = OutputLengths()
    for _ in range(80):
        lengths.add(completion(9, True))
    first = profile_of(lengths=lengths)
    few = OutputLengths()
    few.add(Completion(0, "0", 0, Status.OK, text="", finish_reason=FinishReason.STOP, token_ids=(5,)))
    after = profile_of(5, lengths=few)
    assert after.lengths == ((1, True), *first.lengths)
    assert after.bytes_per_token == first.bytes_per_token == 3.0


def test_activations_are_those_of_the_largest_steps_that_were_measured():
    profile_of()
    small = replace(INFO, max_batch_tokens=16, activation_bytes=1 << 30)
    assert profile_of(info=small).activation_bytes == 5000
    assert profile_of(info=replace(INFO, activation_bytes=2048 * 6000)).activation_bytes == 6000


def test_a_profile_that_fails_fails_nobody(own_cache, monkeypatch):
    record_profile(Recording((), np.zeros((0, len(COLUMNS)))), OutputLengths())
    assert profile_of(0) is None
    own_cache.write_text("a file, where the folder should be")
    assert profile_of() is None
    own_cache.unlink()
    profile_of()
    file = next((own_cache / "profiles").iterdir())
    for text in ("no json", "[]", "{}", '{"version": 1}'):
        file.write_text(text)
        assert load_profile("tiny", "cpu", "bfloat16", "cpp") is None


def test_the_prior_of_a_run_is_positive():
    assert min(astuple(prior_of(INFO))) > 0
    assert prior_of(replace(INFO, weight_bytes=2 * INFO.weight_bytes)).per_token == 2 * prior_of(INFO).per_token


def test_profiles_and_plans_need_no_torch_to_be_imported():
    code = (
        "import sys, pagedgen.planning.profile, pagedgen.planning.store, pagedgen.planning.lengths\n"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert run_python(code).strip() == "[]"


# --- plans -----------------------------------------------------------------------------------------------------------


def test_a_plan_is_found_again_by_the_run(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "a"}\n')
    config = JobConfig(InputConfig(str(path)), engine=EngineConfig(model="tiny"), overrides={"max_tokens": 5})
    key = plan_key(config, open_input(config.input))
    assert load_plan(key) is None
    save_plan(key, {"made": "now", "rows": 3})
    run = replace(config, output_path=tmp_path / "out.jsonl", keep="none", quiet=True, command=("pagedgen", "run"))
    assert load_plan(plan_key(run, open_input(run.input))) == {"made": "now", "rows": 3}
    others = [
        replace(config, overrides={"max_tokens": 6}),
        replace(config, engine=EngineConfig(model="other")),
        replace(config, engine=EngineConfig(model="tiny", max_seqs=3)),
        replace(config, beam=BeamParams(width=3)),
        replace(config, prompt=PromptConfig(raw=True)),
    ]
    keys = [plan_key(other, open_input(other.input)) for other in others]
    path.write_text('{"prompt": "ab"}\n')
    keys.append(plan_key(config, open_input(config.input)))
    assert len({key, *keys}) == 7


def test_streams_are_told_apart_by_their_first_rows(tmp_path):
    import io

    config = JobConfig(InputConfig("-"))
    keys = [
        plan_key(config, open_input(config.input, stdin=io.BytesIO(text))) for text in (b"a\nb\n", b"a\nb\n", b"c\n")
    ]
    assert keys[0] == keys[1] != keys[2]
