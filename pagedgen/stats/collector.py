"""What a run did and where its memory went, kept as running totals: the size of a run costs neither time nor memory."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pagedgen.request import Completion, FinishReason, Status
from pagedgen.stats.series import RateWindow, RecentHalf, Timeline, eta_seconds
from pagedgen.stats.types import ErrorExample, RunInfo, StatsSnapshot, StepSample

STEP_PARTS = ("schedule", "build", "model", "sample", "update")
MAX_ERROR_EXAMPLES = 3

__all__ = ["ErrorExample", "RunInfo", "RunStats", "StatsSnapshot", "StepSample", "summary_dict"]


@dataclass(slots=True)
class _Weighted:
    """A mean weighted by time."""

    total: float = 0.0
    weight: float = 0.0

    def add(self, value: float, weight: float) -> None:
        self.total += value * weight
        self.weight += weight

    @property
    def mean(self) -> float | None:
        return self.total / self.weight if self.weight > 0 else None


@dataclass(slots=True)
class _Totals:
    """Sums and peaks over the steps so far."""

    steps: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    block_copies: int = 0
    peak_used_blocks: int = 0
    peak_running: int = 0
    used_blocks: _Weighted = field(default_factory=_Weighted)
    running: _Weighted = field(default_factory=_Weighted)
    waste: _Weighted = field(default_factory=_Weighted)
    sharing: _Weighted = field(default_factory=_Weighted)
    schedule: float = 0.0
    build: float = 0.0
    model: float = 0.0
    sample: float = 0.0
    update: float = 0.0

    def add(self, s: StepSample) -> None:
        seconds = s.end - s.start
        self.steps += 1
        self.prompt_tokens += s.prompt_tokens
        self.cached_prompt_tokens += s.cached_prompt_tokens
        self.output_tokens += s.output_tokens
        self.preemptions += s.preemptions
        self.block_copies += s.block_copies
        self.peak_used_blocks = max(self.peak_used_blocks, s.used_blocks)
        self.peak_running = max(self.peak_running, s.running)
        self.used_blocks.add(s.used_blocks, seconds)
        self.running.add(s.running, seconds)
        waste, sharing = s.waste, s.sharing_saved
        if waste is not None:
            self.waste.add(waste, seconds)
        if sharing is not None:
            self.sharing.add(sharing, seconds)
        self.schedule += s.schedule_s
        self.build += s.build_s
        self.model += s.model_s
        self.sample += s.sample_s
        self.update += s.update_s


class RunStats:
    """Collects what happens in a run. One thread feeds it, others may take snapshots meanwhile."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._created = clock()
        self._info: RunInfo | None = None
        self._phase: str | None = None
        self._phase_start = self._created
        self._phases: dict[str, float] = {}
        self._totals = _Totals()
        self._first_start = 0.0
        self._last: StepSample | None = None
        self._window = RateWindow()
        self._history = Timeline(self._created)
        self._rows = RecentHalf(self._created)
        self._rows_done = 0
        self._rows_earlier = 0
        self._rows_total: int | None = None
        self._input_fraction: float | None = None
        self._rows_read = 0
        self._statuses: Counter[Status] = Counter()
        self._finish_reasons: Counter[FinishReason] = Counter()
        self._errors: list[ErrorExample] = []

    @property
    def created(self) -> float:
        """When the run began, on the clock."""
        return self._created

    @property
    def elapsed(self) -> float:
        """Seconds since the run began."""
        return self._clock() - self._created

    def set_info(self, info: RunInfo) -> None:
        with self._lock:
            self._info = info

    def set_phase(self, name: str | None) -> None:
        """Say what the run does from now on, like "loading model"; None ends the last phase. Phases may come again."""
        now = self._clock()
        with self._lock:
            if self._phase is not None:
                self._phases[self._phase] += now - self._phase_start
            self._phase, self._phase_start = name, now
            if name is not None:
                self._phases.setdefault(name, 0.0)

    def set_total(self, rows: int | None) -> None:
        """Say how many rows the input has; None while that is not known."""
        with self._lock:
            self._rows_total = rows

    def set_input_progress(self, fraction: float | None, rows_read: int) -> None:
        """Say which part of the input (0 to 1, None when it cannot be told) the `rows_read` rows so far have taken.

        The number of rows is estimated from it until `set_total` says what it is.
        """
        with self._lock:
            self._input_fraction, self._rows_read = fraction, rows_read

    def add_step(self, sample: StepSample) -> None:
        """Count one engine step. Steps come in order of time."""
        with self._lock:
            totals = self._totals
            if self._last is None:
                self._first_start = sample.start
                self._window.record(sample.start, (0, 0))
                self._history = Timeline(sample.start)
                self._rows = RecentHalf(sample.start)
            totals.add(sample)
            self._last = sample
            self._window.record(sample.end, (totals.prompt_tokens, totals.output_tokens))
            self._history.add(sample.start, sample.end, sample.output_tokens)
            self._rows.record(sample.end, self._rows_done - self._rows_earlier)

    def add_row(self, completions: Sequence[Completion]) -> None:
        """Count the outcomes of one row, which is done now."""
        with self._lock:
            self._rows_done += 1
            for completion in completions:
                self._statuses[completion.status] += 1
                if completion.finish_reason is not None:
                    self._finish_reasons[completion.finish_reason] += 1
                if completion.status is not Status.OK and len(self._errors) < MAX_ERROR_EXAMPLES:
                    self._errors.append(
                        ErrorExample(completion.row, completion.status, completion.error or "no reason given")
                    )

    def add_earlier(self, rows: int, statuses: Mapping[Status, int]) -> None:
        """Count the outcomes that an earlier process of the same run has left: they are done, but took no time now."""
        with self._lock:
            self._rows_earlier += rows
            self._rows_done += rows
            self._statuses.update(statuses)

    @property
    def rows_earlier(self) -> int:
        return self._rows_earlier

    @property
    def failed_of(self) -> tuple[int, int]:
        """(completions that are not `ok`, rows that are done)."""
        with self._lock:
            return self._statuses.total() - self._statuses[Status.OK], self._rows_done

    def snapshot(self) -> StatsSnapshot:
        """The run as it is now; a copy that later steps do not change."""
        with self._lock:
            return self._snapshot(self._clock())

    def _estimated_total(self) -> tuple[int | None, bool]:
        """Rows in the input, and whether that is exact."""
        if self._rows_total is not None:
            return self._rows_total, True
        if not self._input_fraction or not self._rows_read:
            return None, False
        return max(round(self._rows_read / min(self._input_fraction, 1.0)), self._rows_read), False

    def _snapshot(self, now: float) -> StatsSnapshot:
        t, last, done = self._totals, self._last, self._rows_done
        total, exact = self._estimated_total()
        window_s, (prompt_rate, output_rate) = self._window.rates(now, (t.prompt_tokens, t.output_tokens))
        generating = last.end - self._first_start if last else 0.0
        running_for = now - self._first_start if last else 0.0
        rows_rate = self._rows.rate(now, done - self._rows_earlier) if last else 0.0
        average = (done - self._rows_earlier) / running_for if running_for > 0 else 0.0
        phases = dict(self._phases)
        if self._phase is not None:
            phases[self._phase] += now - self._phase_start
        parts = {part: getattr(t, part) for part in STEP_PARTS}
        parts["other"] = max(generating - sum(parts.values()), 0.0)
        return StatsSnapshot(
            elapsed=now - self._created,
            info=self._info,
            phase=self._phase,
            phase_s=now - self._phase_start,
            phases=phases,
            steps=t.steps,
            generating_s=generating,
            last=last,
            rows_done=done,
            rows_earlier=self._rows_earlier,
            rows_total=total,
            rows_total_exact=exact,
            progress=min(done / total, 1.0) if total else None,
            rows_rate=rows_rate or average,
            eta=eta_seconds(done=done, total=total, running_for=running_for, rate=rows_rate, average=average),
            statuses=dict(self._statuses),
            finish_reasons=dict(self._finish_reasons),
            errors=tuple(self._errors),
            prompt_tokens=t.prompt_tokens,
            cached_prompt_tokens=t.cached_prompt_tokens,
            output_tokens=t.output_tokens,
            window_s=window_s,
            prompt_rate=prompt_rate,
            output_rate=output_rate,
            prompt_rate_overall=t.prompt_tokens / generating if generating > 0 else 0.0,
            output_rate_overall=t.output_tokens / generating if generating > 0 else 0.0,
            output_history=self._history.values(),
            peak_used_blocks=t.peak_used_blocks,
            peak_running=t.peak_running,
            mean_used_blocks=t.used_blocks.mean,
            mean_running=t.running.mean,
            mean_waste=t.waste.mean,
            mean_sharing_saved=t.sharing.mean,
            preemptions=t.preemptions,
            block_copies=t.block_copies,
            step_parts=parts,
        )

    def summary(self) -> dict[str, Any]:
        """The run in numbers, ready for JSON: seconds, bytes, tokens, fractions 0 to 1; null is "not known"."""
        return summary_dict(self.snapshot())


def summary_dict(s: StatsSnapshot) -> dict[str, Any]:
    """`RunStats.summary` of a snapshot."""
    info = s.info
    return {
        "model": info.model if info else None,
        "device": info.device if info else None,
        "dtype": info.dtype if info else None,
        "kernels": info.kernels if info else None,
        "elapsed_s": s.elapsed,
        "phases_s": dict(s.phases),
        "generating_s": s.generating_s,
        "steps": s.steps,
        "rows_done": s.rows_done,
        "rows_done_earlier": s.rows_earlier,
        "rows_total": s.rows_total if s.rows_total_exact else None,
        "rows_total_estimate": s.rows_total,
        "eta_s": s.eta,
        "completions_by_status": {str(status): count for status, count in s.statuses.items()},
        "errors": [{"row": e.row, "status": str(e.status), "error": e.error} for e in s.errors],
        "finish_reasons": {str(reason): count for reason, count in s.finish_reasons.items()},
        "prompt_tokens_computed": s.prompt_tokens,
        "prompt_tokens_cached": s.cached_prompt_tokens,
        "output_tokens": s.output_tokens,
        "prompt_tokens_per_s": s.prompt_rate_overall,
        "output_tokens_per_s": s.output_rate_overall,
        "rows_per_s": (s.rows_done - s.rows_earlier) / s.generating_s if s.generating_s > 0 else 0.0,
        "kv_bytes": info.kv_bytes if info else None,
        "kv_blocks": info.kv_blocks if info else None,
        "block_size": info.block_size if info else None,
        "peak_used_blocks": s.peak_used_blocks,
        "mean_used_blocks": s.mean_used_blocks,
        "mean_waste": s.mean_waste,
        "mean_sharing_saved": s.mean_sharing_saved,
        "prefix_hit_rate": s.prefix_hit_rate,
        "peak_running": s.peak_running,
        "mean_running": s.mean_running,
        "preemptions": s.preemptions,
        "block_copies": s.block_copies,
        "step_parts_s": dict(s.step_parts),
    }
