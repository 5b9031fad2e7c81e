"""Records a run while it goes on, in bounded memory and at a bounded cost."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from pagedgen.stats.baselines import POLICIES, Baselines, reserved_tokens, spread
from pagedgen.stats.recording import COLUMNS, INDEX, Recording, Session, kinds
from pagedgen.stats.types import RunInfo, StepSample

# Intervals in memory and in the file: from half of these to all of them, whatever the length of the run.
CAPACITY = 1024
# The memory of the process is asked for this often, in seconds.
MEMORY_INTERVAL = 0.5
# What is done between the steps: writing what is finished; reading, rendering and tokenizing rows.
BETWEEN = ("write", "input")
_SUMS, _PEAKS = kinds("sum", "mean", "ratio"), kinds("peak")
_ENDS = kinds("last")
_RESERVED = [INDEX[f"reserved_{policy}"] for policy in POLICIES]


class Recorder:
    """Takes in each step of a process and keeps the `Recording` of the run, with what earlier processes recorded.

    Steps are summed into intervals. When there are CAPACITY of them, each two neighbours become one, and from then on
    an interval takes twice as many steps. device_bytes: the bytes in use on an accelerator; None where there is none.
    began: when the process began, on `clock`.
    """

    def __init__(
        self,
        info: RunInfo,
        started: str,
        earlier: Recording | None = None,
        *,
        capacity: int = CAPACITY,
        device_bytes: Callable[[], int] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        began: float | None = None,
    ) -> None:
        self._earlier = earlier or Recording((), np.empty((0, len(COLUMNS))))
        self._session = Session(started, self._earlier.elapsed_s, 0.0, {}, info)
        self._capacity, self._device_bytes, self._clock = capacity, device_bytes, clock
        self._began = clock() if began is None else began
        self._rows = np.zeros((capacity, len(COLUMNS)))
        self._count, self._stride, self._steps_in_last = 0, 1, 0
        # Where each interval begins on the clock of the steps, on which no time passes between them.
        self._edges = np.zeros(capacity + 1)
        self._now = 0.0
        self._baselines = Baselines(info.max_model_len, self._reserve)
        self._within = 0.0
        self._next_memory = 0.0
        self._memory = (0, 0)
        self._process = psutil.Process()
        self._between = dict.fromkeys(BETWEEN, 0.0)

    def add_step(self, s: StepSample) -> None:
        """Enter one step. Steps come in order of time."""
        seconds = s.end - s.start
        if self._count == 0 or self._steps_in_last == self._stride:
            self._open_interval(s.start)
        self._steps_in_last += 1
        row = self._rows[self._count - 1]
        self._look_at_memory(s.start)
        values = self._values(s, seconds)
        row[_SUMS] += values[_SUMS]
        row[_PEAKS] = np.maximum(row[_PEAKS], values[_PEAKS])
        row[_ENDS] = values[_ENDS]
        begin, self._now = self._now, self._now + seconds
        self._between.update(dict.fromkeys(BETWEEN, 0.0))
        self._edges[self._count] = self._now
        if s.sequences is not None:
            self._baselines.step(s.sequences, begin, s.finished_rows, self._now)

    def add_seconds(self, part: str, seconds: float) -> None:
        """Count time that was spent between the steps, in one of BETWEEN; it belongs to the step that follows, the rest
        to the last one."""
        self._between[part] += seconds

    def recording(self, summary: Mapping[str, Any], phases_s: Mapping[str, float]) -> Recording:
        """The run so far. summary: `Recording.summary`. phases_s: the seconds of each phase of this process.

        Sequences that have not finished count, in what contiguous allocation would reserve, as the mean of those that
        have; while none has, as long as they are.
        """
        session = replace(self._session, elapsed_s=self._clock() - self._began, phases_s=dict(phases_s))
        rows = self._rows[: self._count].copy()
        for part, seconds in self._between.items():
            rows[-1:, INDEX[f"{part}_s"]] += seconds
        mean, earlier = self._baselines.mean_reserved, self._earlier
        longest = session.info.max_model_len
        for start, end, length in self._baselines.unfinished(self._now):
            own = reserved_tokens(np.array([length], np.int32), longest)[0]
            self._add_reserved(rows, start, end, (longest, *(mean or earlier.reserved or own)[1:]))
        finished = earlier.sequences + self._baselines.finished
        return Recording(
            (*earlier.sessions, session),
            np.concatenate([earlier.sums, rows]),
            finished,
            self._mean_reserved(mean),
            summary,
        )

    def _mean_reserved(self, mean: tuple[float, ...] | None) -> tuple[float, ...] | None:
        """Over the earlier processes too."""
        earlier, count = self._earlier, self._baselines.finished
        if earlier.reserved is None or mean is None:
            return mean or earlier.reserved
        total = earlier.sequences + count
        both = zip(earlier.reserved, mean, strict=True)
        return tuple((before * earlier.sequences + now * count) / total for before, now in both)

    def _look_at_memory(self, now: float) -> None:
        """Ask the system, now and then."""
        if now >= self._next_memory:
            self._next_memory = now + MEMORY_INTERVAL
            self._memory = (self._process.memory_info().rss, self._device_bytes() if self._device_bytes else 0)

    def _values(self, s: StepSample, seconds: float) -> NDArray[np.float64]:
        """float64 [C]: the step as an interval of its own."""
        waste, saved = s.waste or 0.0, s.sharing_saved or 0.0
        if s.group_blocks is not None and s.logical_blocks > s.used_blocks:
            self._within = (s.logical_blocks - s.group_blocks) / (s.logical_blocks - s.used_blocks)
        allocated = seconds if s.used_blocks else 0.0
        prompts = s.prompt_tokens > 0 or s.computed_tokens > s.running  # the latter again, after a preemption
        tail = not prompts and s.waiting == 0
        # In the order of COLUMNS.
        return np.array(
            (
                len(self._earlier.sessions),
                self._run_time(s.start),
                self._run_time(s.end),
                1,
                seconds,
                allocated,
                s.used_blocks * seconds,
                s.cached_blocks * seconds,
                s.free_blocks * seconds,
                s.filled_slots * seconds,
                s.logical_blocks * seconds,
                s.held_tokens * seconds,
                s.running * seconds,
                s.waiting * seconds,
                waste * allocated,
                saved * allocated,
                saved * self._within * allocated,
                0.0,
                0.0,
                0.0,
                s.used_blocks,
                s.logical_blocks,
                s.running,
                s.prompt_tokens,
                s.cached_prompt_tokens,
                s.output_tokens,
                s.computed_tokens,
                s.sampled_rows,
                s.attention_pairs,
                s.preemptions,
                s.block_copies,
                seconds if prompts else 0.0,
                s.output_tokens if prompts else 0,
                seconds if tail else 0.0,
                s.output_tokens if tail else 0,
                s.schedule_s,
                s.build_s,
                s.model_s,
                s.sample_s,
                s.update_s,
                *self._between.values(),
                *self._memory,
                s.touched_blocks,
                s.computed_tokens,
                s.sampled_rows,
            )
        )

    def _open_interval(self, start: float) -> None:
        if self._count == self._capacity:
            self._halve()
        row = self._rows[self._count]
        row[:] = 0.0
        row[INDEX["session"]] = len(self._earlier.sessions)
        row[INDEX["start_s"]] = self._run_time(start)
        self._count += 1
        self._steps_in_last = 0

    def _run_time(self, time_of_clock: float) -> float:
        """Seconds since the run began, the time between its processes left out."""
        return time_of_clock - self._began + self._session.offset_s

    def _halve(self) -> None:
        """Make one interval of each two."""
        pairs = self._rows.reshape(-1, 2, len(COLUMNS))
        merged = pairs[:, 0].copy()
        merged[:, _SUMS] += pairs[:, 1, _SUMS]
        merged[:, _PEAKS] = np.maximum(merged[:, _PEAKS], pairs[:, 1, _PEAKS])
        merged[:, _ENDS] = pairs[:, 1, _ENDS]
        half = self._capacity // 2
        self._rows[:half] = merged
        self._edges[: half + 1] = self._edges[::2]
        self._count, self._stride = half, 2 * self._stride

    def _reserve(self, start: float, end: float, tokens: Sequence[float]) -> None:
        self._add_reserved(self._rows, start, end, tokens)

    def _add_reserved(self, rows: NDArray[np.float64], start: float, end: float, tokens: Sequence[float]) -> None:
        """Add to each interval what was reserved in it, as tokens times seconds."""
        first, seconds = spread(start, end, self._edges[: self._count + 1])
        rows[first : first + len(seconds), _RESERVED] += seconds[:, None] * np.array(tokens)
