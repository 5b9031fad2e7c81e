"""Watches over the processes that run a part's cases: stops what hangs, and goes on after what crashed."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Lock

from benchmarks.gpu_parts import Figures

POLL_SECONDS = 0.25
LEAST_SECONDS = 10.0  # with less left, no process is started for the cases that are left
MOST_STARTS = 8

# Given the index of the first case to run and the seconds that there are: what runs that case and every N-th after it.
Command = Callable[[int, float], Sequence[str]]


@dataclass
class Watched:
    """What a process has written. found: the figures of its cases so far, by their index. begun, name: the case that is
    under way. taken: how many characters of the file are in them."""

    lines: Path
    found: dict[int, Figures] = field(default_factory=dict)
    begun: int | None = None
    name: str = ""
    taken: int = 0

    def read(self) -> bool:
        """Take in what is new, but for a line that is not complete yet; whether there was anything."""
        text = self.lines.read_text("utf-8") if self.lines.exists() else ""
        end = text.rfind("\n") + 1
        new = text[self.taken : end].splitlines()
        for line in new:
            figures = json.loads(line)
            index = figures.pop("index")
            if figures.pop("begun", False):
                self.begun, self.name = index, figures["case"]
            else:
                self.found[index], self.begun = figures, None
        self.taken = max(end, self.taken)
        return bool(new)

    def lose(self, reason: str) -> None:
        """The case under way, if there is one, has failed."""
        if self.begun is not None:
            self.found[self.begun] = {"case": self.name, "error": reason}
            self.begun = None


@dataclass(frozen=True)
class Limits:
    """seconds: of all cases. case_seconds: of each."""

    seconds: float
    case_seconds: float


def watch(
    commands: Sequence[tuple[Command, Path]],
    limits: Limits,
    on_progress: Callable[[list[Figures]], None],
    environment: Mapping[str, str] | None = None,
) -> list[Figures]:
    """Run a part to its end, or as long as it may take; the figures of its cases, in order.

    commands: of the processes that run side by side, each with the file that it writes; the first one runs case 0 and
    every N-th after it, and so on. on_progress: is given the figures whenever there are new ones. environment: of the
    processes.
    """
    all_watched = [Watched(lines) for _, lines in commands]
    lock, interrupted = Lock(), Event()

    def figures() -> list[Figures]:
        found = {index: value for watched in all_watched for index, value in list(watched.found.items())}
        return [found[index] for index in sorted(found)]

    def progress() -> None:
        with lock:
            on_progress(figures())

    watcher = _Watcher(limits, len(commands), progress, interrupted, environment)
    with ThreadPoolExecutor(len(commands)) as pool:
        try:
            numbers = range(len(commands))
            list(pool.map(lambda number: watcher.run(commands[number][0], all_watched[number], number), numbers))
        finally:
            interrupted.set()  # by Ctrl-C, say: then the processes do not outlive this one
    return figures()


@dataclass(frozen=True)
class _Watcher:
    """step: of the indices of the cases that one process runs. progress: to be told that there is something new."""

    limits: Limits
    step: int
    progress: Callable[[], None]
    interrupted: Event
    environment: Mapping[str, str] | None

    def run(self, command: Command, watched: Watched, first: int) -> None:
        """Run the cases from `first` on, in as many processes as they take."""
        end = time.monotonic() + self.limits.seconds
        for _ in range(MOST_STARTS):
            left = end - time.monotonic()
            process = subprocess.Popen(command(first, left), env=self.environment, process_group=0)
            try:
                reason = self._follow(process, watched, end)
            finally:
                _stop(process)
            watched.read()
            watched.lose(reason)
            going_on = max(watched.found, default=first - self.step) + self.step
            if reason and going_on == first:  # it came to no case at all, and so would another
                watched.found[first] = {"case": "start", "error": reason}
            self.progress()
            is_over = self.interrupted.is_set() or end - time.monotonic() < LEAST_SECONDS
            if not reason or going_on == first or is_over:
                return
            first = going_on

    def _follow(self, process: "subprocess.Popen[bytes]", watched: Watched, end: float) -> str:
        """Why the process ended before its cases did; empty where it came to its end."""
        since = time.monotonic()
        while True:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(POLL_SECONDS)
                return "" if code == 0 else f"its process ended with exit code {code}"
            now = time.monotonic()
            if watched.read():
                since = now
                self.progress()
            if self.interrupted.is_set():
                return "interrupted"
            if now > end:
                return "stopped: the part's time was over"
            if watched.begun is not None and now - since > self.limits.case_seconds:
                return f"stopped after {now - since:.0f} s"


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """End the process, and where it did not come to its end by itself, those that it started."""
    if process.poll() != 0:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()
