"""What a job tells the statistics, and when they are written into its run folder."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from pagedgen.data.layout import RECORDING_NAME
from pagedgen.planning.lengths import OutputLengths
from pagedgen.planning.profile import record_profile
from pagedgen.request import Completion
from pagedgen.stats.collector import RunStats, summary_dict
from pagedgen.stats.recorder import Recorder
from pagedgen.stats.recording import Recording, read_recording
from pagedgen.stats.types import RunInfo, StepSample

# A running job can be looked at: what is on the disk is no older than this many seconds, or than what keeps the time of
# writing it below this share.
SAVE_INTERVAL, SAVE_SHARE = 2.0, 0.004

T = TypeVar("T")


class RunLog:
    """Feeds the statistics of one process and keeps its recording on the disk.

    The recording is a convenience: where it cannot be written, a run goes on without, and says so once.
    """

    def __init__(self, stats: RunStats, run_folder: Path, started: str, warn: Callable[[str], None]) -> None:
        self._stats, self._path, self._started, self._warn = stats, run_folder / RECORDING_NAME, started, warn
        self._recorder: Recorder | None = None
        self._lengths, self._may_stop = OutputLengths(), True
        self._next_save = 0.0
        self._failed = False

    def begin(
        self, info: RunInfo, *, goes_on: bool, may_stop: bool = True, device_bytes: Callable[[], int] | None = None
    ) -> None:
        """The engine is there. goes_on: the run has a recording already, which this process adds to. may_stop: whether
        completions may end before their limit."""
        self._stats.set_info(info)
        self._may_stop = may_stop
        self._recorder = Recorder(
            info,
            self._started,
            read_recording(self._path) if goes_on else None,
            device_bytes=device_bytes,
            began=self._stats.created,
        )

    @property
    def recording(self) -> Recording | None:
        """What was recorded so far, by earlier processes too; None when nothing was generated."""
        if self._recorder is None:
            return None
        snapshot = self._stats.snapshot()
        return self._recorder.recording(summary_dict(snapshot), snapshot.phases)

    def add_step(self, sample: StepSample) -> None:
        self._stats.add_step(sample)
        if self._recorder is not None:
            self._recorder.add_step(sample)

    def add_row(self, completions: Sequence[Completion]) -> None:
        self._stats.add_row(completions)
        for completion in completions:
            self._lengths.add(completion, self._may_stop)

    @contextmanager
    def timing(self, part: str) -> Iterator[None]:
        """Count the time of a block, in one of `recorder.BETWEEN`."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add_seconds(part, time.perf_counter() - started)

    def add_seconds(self, part: str, seconds: float) -> None:
        if self._recorder is not None:
            self._recorder.add_seconds(part, seconds)

    def timed(self, items: Iterator[T], part: str) -> Iterator[T]:
        """The items, with the time it takes to come by them counted."""
        while True:
            with self.timing(part):
                item = next(items, None)
            if item is None:
                return
            yield item

    def save_if_due(self) -> None:
        started = time.perf_counter()
        if started < self._next_save or self._failed or (recording := self.recording) is None:
            return
        self._save(recording)
        ended = time.perf_counter()
        self._next_save = ended + max(SAVE_INTERVAL, (ended - started) / SAVE_SHARE)

    def end(self) -> None:
        """The run is over, in whatever way: keep its recording, and what it shows of the machine for later plans."""
        if (recording := self.recording) is not None:
            self._save(recording)
            record_profile(recording, self._lengths)

    def _save(self, recording: Recording) -> None:
        if self._failed:
            return
        try:
            recording.write(self._path)
        except OSError as error:
            self._failed = True
            self._warn(f"{self._path} cannot be written ({error.strerror or error}); the run goes on without it")
