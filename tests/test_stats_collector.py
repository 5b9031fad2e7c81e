"""The collector against brute force: every mean, rate and total recomputed from the full history."""

import json
import math
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedgen.request import Completion, FinishReason, Status
from pagedgen.stats.collector import RunInfo, RunStats, StepSample
from pagedgen.stats.series import RateWindow, RecentHalf, Timeline, eta_seconds

BLOCKS, BLOCK_SIZE = 200, 16
INFO = RunInfo("model", "cpu", "float32", "reference", 1 << 30, BLOCKS, BLOCK_SIZE)


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@st.composite
def histories(draw: st.DrawFn) -> list[StepSample]:
    """Steps with pauses between them; milliseconds as integers keep sums of durations exact enough."""
    samples = []
    now = 100_000
    for _ in range(draw(st.integers(1, 60))):
        start = now + draw(st.integers(0, 3000))
        now = start + draw(st.integers(0, 4000))
        used = draw(st.integers(0, BLOCKS))
        cached = draw(st.integers(0, BLOCKS - used))
        samples.append(
            StepSample(
                start=start / 1000,
                end=now / 1000,
                used_blocks=used,
                cached_blocks=cached,
                free_blocks=BLOCKS - used - cached,
                total_blocks=BLOCKS,
                block_size=BLOCK_SIZE,
                filled_slots=draw(st.integers(used, used * BLOCK_SIZE)),
                logical_blocks=used + draw(st.integers(0, 50)) if used else 0,
                running=draw(st.integers(0, 64)),
                waiting=draw(st.integers(0, 64)),
                prompt_tokens=draw(st.integers(0, 500)),
                output_tokens=draw(st.integers(0, 64)),
                cached_prompt_tokens=draw(st.integers(0, 100)),
                preemptions=draw(st.integers(0, 2)),
                block_copies=draw(st.integers(0, 2)),
                model_s=(now - start) / 2000,
                sample_s=(now - start) / 4000,
            )
        )
    return samples


def feed(samples: list[StepSample]) -> tuple[RunStats, Clock]:
    clock = Clock()
    stats = RunStats(clock)
    stats.set_info(INFO)
    for sample in samples:
        clock.now = sample.end
        stats.add_step(sample)
    return stats, clock


def time_mean(samples: list[StepSample], values: list[float]) -> float | None:
    weights = [s.end - s.start for s in samples]
    if not sum(weights):
        return None
    return math.fsum(w * v for w, v in zip(weights, values, strict=True)) / math.fsum(weights)


def close(actual: float | None, expected: float | None) -> bool:
    return actual is expected if expected is None else actual == pytest.approx(expected, abs=1e-9, rel=1e-9)


@given(histories(), st.floats(0, 30))
def test_snapshot_equals_brute_force(samples: list[StepSample], wait: float) -> None:
    stats, clock = feed(samples)
    clock.now += wait
    s = stats.snapshot()
    held = [x for x in samples if x.used_blocks]
    waste = [1 - x.filled_slots / (x.used_blocks * BLOCK_SIZE) for x in held]
    saved = [1 - x.used_blocks / x.logical_blocks for x in held]
    assert close(s.mean_waste, time_mean(held, waste))
    assert close(s.mean_sharing_saved, time_mean(held, saved))
    assert close(s.mean_used_blocks, time_mean(samples, [x.used_blocks for x in samples]))
    assert close(s.mean_running, time_mean(samples, [x.running for x in samples]))
    assert s.peak_used_blocks == max(x.used_blocks for x in samples)
    assert s.peak_running == max(x.running for x in samples)
    assert (s.steps, s.last) == (len(samples), samples[-1])
    for total in ("prompt_tokens", "cached_prompt_tokens", "output_tokens", "preemptions", "block_copies"):
        assert getattr(s, total) == sum(getattr(x, total) for x in samples)
    prompt, cached = s.prompt_tokens, s.cached_prompt_tokens
    assert close(s.prefix_hit_rate, cached / (prompt + cached) if prompt + cached else None)
    span = samples[-1].end - samples[0].start
    assert close(s.generating_s, span)
    assert close(s.output_rate_overall, s.output_tokens / span if span else 0.0)
    assert close(s.prompt_rate_overall, s.prompt_tokens / span if span else 0.0)
    assert close(s.step_parts["model"], sum(x.end - x.start for x in samples) / 2)
    assert close(math.fsum(s.step_parts.values()), span)


@given(histories(), st.floats(0, 30))
def test_window_counts_what_ended_in_it(samples: list[StepSample], wait: float) -> None:
    stats, clock = feed(samples)
    clock.now += wait
    s = stats.snapshot()
    since = clock.now - s.window_s
    # A window starts where a step ended (or the first began), at least ten seconds ago if the run is that old.
    marks = [samples[0].start, *(x.end for x in samples)]
    assert s.window_s == 0.0 or min(abs(since - mark) for mark in marks) < 1e-9
    assert s.window_s >= min(10.0, clock.now - samples[0].start) - 1e-9
    older = [mark for mark in marks if mark <= clock.now - 10.0]
    assert not older or since >= max(older) - 0.25 - 1e-9
    for rate, name in ((s.output_rate, "output_tokens"), (s.prompt_rate, "prompt_tokens")):
        # Steps of no length that end at the edge itself may fall on either side of it.
        inside = sum(getattr(x, name) for x in samples if x.end > since + 1e-9)
        edge = sum(getattr(x, name) for x in samples if abs(x.end - since) <= 1e-9)
        assert inside - 1e-6 <= rate * s.window_s <= inside + edge + 1e-6


@given(histories())
def test_timeline_spreads_tokens_over_their_steps(samples: list[StepSample]) -> None:
    origin = samples[0].start
    samples = [*(x for x in samples if x.end > x.start), step_sample(samples[-1].end, samples[-1].end + 0.5)]
    timeline = Timeline(origin, keep=1000)
    for x in samples:
        timeline.add(x.start, x.end, x.output_tokens)
    total = sum(x.output_tokens for x in samples)
    # One more second closes the one still filling.
    timeline.add(samples[-1].end + 1.0, samples[-1].end + 1.0, 0.0)
    values = timeline.values()
    for second, got in enumerate(values):
        begin, end = origin + second, origin + second + 1
        expected = 0.0
        for x in samples:
            expected += x.output_tokens * max(min(x.end, end) - max(x.start, begin), 0.0) / (x.end - x.start)
        assert got == pytest.approx(expected, abs=1e-6)
    assert math.fsum(values) == pytest.approx(total, abs=1e-6)


def test_timeline_counts_an_instant_and_forgets_the_past() -> None:
    timeline = Timeline(0.0, keep=3)
    timeline.add(0.5, 0.5, 7.0)
    timeline.add(0.5, 2.5, 4.0)
    assert timeline.values() == (8.0, 2.0)
    timeline.add(100.0, 101.5, 3.0)
    assert timeline.values() == (0.0, 2.0)


def test_memory_stays_bounded() -> None:
    window, half, timeline = RateWindow(), RecentHalf(0.0), Timeline(0.0)
    for step in range(50_000):
        now = step * 0.05
        window.record(now, (step,))
        half.record(now, step)
        timeline.add(now, now + 0.05, 1.0)
    assert len(window._marks) <= 42
    assert len(half._marks) <= 128
    assert len(timeline.values()) == 239
    assert window.rates(2500.0, (50_000,))[1][0] == pytest.approx(20.0, rel=0.01)
    assert half.rate(2500.0, 50_000) == pytest.approx(20.0, rel=0.01)


def test_recent_half_forgets_the_start() -> None:
    half = RecentHalf(0.0)
    done = 0
    for second in range(1, 101):
        done += 0 if second <= 50 else 4
        half.record(float(second), done)
    assert half.rate(100.0, done) == pytest.approx(4.0)


COMPLETIONS = st.lists(
    st.builds(
        lambda sample, status, reason: Completion(0, "0", sample, status, finish_reason=reason, error="why"),
        st.integers(0, 3),
        st.sampled_from(Status),
        st.sampled_from([None, *FinishReason]),
    ),
    min_size=1,
)


@given(st.lists(COMPLETIONS))
def test_completions(rows: list[list[Completion]]) -> None:
    stats = RunStats()
    for row in rows:
        stats.add_row(row)
    completions = [completion for row in rows for completion in row]
    s = stats.snapshot()
    assert s.rows_done == len(rows)
    assert s.statuses == Counter(c.status for c in completions)
    assert s.finish_reasons == Counter(c.finish_reason for c in completions if c.finish_reason)
    assert s.completions == len(completions)
    failed = [c for c in completions if c.status != "ok"]
    assert s.failed == len(failed)
    assert [e.status for e in s.errors] == [c.status for c in failed][:3]


@given(
    done=st.integers(0, 1000),
    total=st.none() | st.integers(0, 1000),
    running_for=st.floats(0, 1e5),
    rate=st.floats(0, 1e3),
)
def test_eta_is_none_or_what_is_left_at_the_rate(done: int, total: int | None, running_for: float, rate: float) -> None:
    average = done / running_for if running_for else 0.0
    eta = eta_seconds(done=done, total=total, running_for=running_for, rate=rate, average=average)
    if total is None or (done < total and (running_for < 3 or done == 0)):
        assert eta is None
    elif done >= total:
        assert eta == 0
    elif eta is not None:
        assert eta * (rate or average) == pytest.approx(total - done, rel=1e-6)
    else:
        assert done < 5 or not (rate or average) or (total - done) / (rate or average) == math.inf


@pytest.mark.parametrize("known", [True, False])
def test_eta_of_a_run_that_starts_slowly(known: bool) -> None:
    """64 rows at a time, ten seconds each, staggered, 1000 in all: the estimate is right from a sixth of the run on."""
    clock = Clock()
    stats = RunStats(clock)
    stats.set_total(1000 if known else None)
    lanes = [(lane + 1) / 6.4 + 10.0 for lane in range(64)]
    finished = sorted(end + 10.0 * turn for turn in range(20) for end in lanes)[:1000]
    total_time = finished[-1]
    done, estimates = 0, []
    for step in range(int(total_time / 0.2) + 1):
        start, end = step * 0.2, (step + 1) * 0.2
        clock.now = 100.0 + end
        while done < 1000 and finished[done] <= end:
            stats.add_row([Completion(done, str(done), 0, Status.OK)])
            done += 1
        if not known:
            read = min(done + 300, 1000)
            stats.set_input_progress(read / 1000, read)
        stats.add_step(step_sample(100.0 + start, 100.0 + end))
        estimates.append((total_time - end, stats.snapshot()))
    assert all(s.eta is None for _, s in estimates[:50])
    for left, s in estimates[len(estimates) // 6 :]:
        assert s.rows_total == 1000
        assert s.rows_total_exact is known
        assert s.eta == pytest.approx(left, abs=1.0 + 0.35 * left)
    assert estimates[-1][1].progress == 1.0


def step_sample(start: float, end: float) -> StepSample:
    return StepSample(start, end, 10, 5, BLOCKS - 15, BLOCKS, BLOCK_SIZE, 150, 12, 10, 3, 20, 10)


def test_phases_add_up_and_may_come_again() -> None:
    clock = Clock(0.0)
    stats = RunStats(clock)
    for name, seconds in (("loading model", 4.0), ("generating", 10.0), ("writing", 1.0), ("generating", 5.0)):
        stats.set_phase(name)
        clock.now += seconds
    assert stats.snapshot().phases == {"loading model": 4.0, "generating": 15.0, "writing": 1.0}
    assert stats.snapshot().phase_s == 5.0
    stats.set_phase(None)
    clock.now += 100.0
    assert stats.snapshot().phases["generating"] == 15.0


def test_a_snapshot_does_not_change() -> None:
    stats, _ = feed([step_sample(100.0, 101.0)])
    stats.set_phase("generating")
    before = stats.snapshot()
    copy = json.dumps(stats.summary()), before.steps, dict(before.statuses), dict(before.phases)
    stats.add_step(step_sample(101.0, 102.0))
    stats.add_row([Completion(0, "0", 0, Status.OK)])
    assert (before.steps, dict(before.statuses), dict(before.phases)) == copy[1:]
    assert json.dumps(stats.summary()) != copy[0]


@settings(max_examples=20)
@given(histories())
def test_summary_is_json_and_agrees_with_the_snapshot(samples: list[StepSample]) -> None:
    stats, _ = feed(samples)
    stats.add_row([Completion(0, "0", 0, Status.UNFIT, error="too big")])
    stats.set_total(7)
    summary = json.loads(json.dumps(stats.summary(), allow_nan=False))
    s = stats.snapshot()
    assert summary["completions_by_status"] == {"unfit": 1}
    assert (summary["rows_done"], summary["rows_total"]) == (1, 7)
    assert summary["mean_waste"] == s.mean_waste
    assert summary["kv_bytes"] == INFO.kv_bytes
    assert summary["step_parts_s"] == s.step_parts


def test_empty_run() -> None:
    summary = json.loads(json.dumps(RunStats().summary(), allow_nan=False))
    assert summary["steps"] == 0
    assert summary["mean_waste"] is None
    assert summary["prefix_hit_rate"] is None
