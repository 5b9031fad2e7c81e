"""Watches over the processes that run a part's cases: stops what hangs, and goes on after what crashed."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.gpu_parts import Figures

POLL_SECONDS = 0.5
LEAST_SECONDS = 10.0  # with less left, no process is started for the cases that are
MOST_STARTS = 8


@dataclass
class Watched:
    """found: the figures of a part's cases so far, by their index. begun, name: the case that is under way.
    taken: how many characters of the file are in them."""

    lines: Path
    found: dict[int, Figures] = field(default_factory=dict)
    begun: int | None = None
    name: str = ""
    taken: int = 0

    def read(self) -> None:
        """Take in what the process has written; a line that is not complete yet is left for later."""
        text = self.lines.read_text("utf-8") if self.lines.exists() else ""
        for line in text[self.taken : text.rfind("\n") + 1].splitlines():
            figures = json.loads(line)
            index = figures.pop("index")
            if figures.pop("begun", False):
                self.begun, self.name = index, figures["case"]
            else:
                self.found[index] = figures
                self.begun = None
        self.taken = text.rfind("\n") + 1

    def lost(self, reason: str) -> int:
        """The case under way is lost; the index of the next one."""
        if self.begun is not None:
            self.found[self.begun] = {"case": self.name, "error": reason}
            self.begun = None
        return max(self.found, default=-1) + 1

    @property
    def cases(self) -> list[Figures]:
        return [self.found[index] for index in sorted(self.found)]


def watch(
    command: Callable[[int, float], Sequence[str]],
    lines: Path,
    *,
    seconds: float,
    case_seconds: float,
    on_progress: Callable[[list[Figures]], None],
    environment: dict[str, str] | None = None,
) -> list[Figures]:
    """Run a part to its end, or for `seconds`; the figures of its cases, in order.

    command: what runs the cases from an index on, for so many seconds. lines: the file that it writes. on_progress: is
    given the figures whenever there are new ones. environment: of the processes.
    """
    end = time.monotonic() + seconds
    watched, first, reason = Watched(lines), 0, ""
    for _ in range(MOST_STARTS):
        left = end - time.monotonic()
        process = subprocess.Popen(command(first, left), env=environment, start_new_session=True)
        try:
            reason = _follow(process, watched, end, case_seconds, on_progress)
        finally:
            _stop(process)
        watched.read()
        if reason == "":
            break
        before, first = first, watched.lost(reason)
        on_progress(watched.cases)
        if end - time.monotonic() < LEAST_SECONDS or first == before:
            break  # no time for another process, or one that came to no case at all
    return watched.cases or [{"case": "start", "error": reason or "the process ran no case"}]


def _follow(
    process: "subprocess.Popen[bytes]",
    watched: Watched,
    end: float,
    case_seconds: float,
    on_progress: Callable[[list[Figures]], None],
) -> str:
    """Why the process ended before its cases did; empty where it came to its end."""
    since, last, count = time.monotonic(), watched.begun, len(watched.found)
    while True:
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(POLL_SECONDS)
            return "" if code == 0 else f"its process ended with exit code {code}"
        watched.read()
        now = time.monotonic()
        if (watched.begun, len(watched.found)) != (last, count):
            last, count, since = watched.begun, len(watched.found), now
            on_progress(watched.cases)
        if now > end:
            return "stopped: the part's time was over"
        if watched.begun is not None and now - since > case_seconds:
            return f"stopped after {now - since:.0f} s"


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """End the process, and where it did not come to its end by itself, those that it started."""
    if process.poll() != 0:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()
