"""The live display of a run on stderr: a picture on a terminal, plain lines anywhere else."""

import io
import os
import sys
from contextlib import suppress
from types import TracebackType
from typing import Self

from rich.console import Console, ConsoleOptions, RenderResult
from rich.control import Control
from rich.live import Live
from rich.segment import ControlType, Segment
from rich.text import Text

from pagedgen.stats.collector import RunStats
from pagedgen.stats.dashboard import ALARM, dashboard, pool_slots
from pagedgen.stats.text import (
    Glyphs,
    format_duration,
    format_percent,
    format_rate,
    format_row_rate,
    plural,
)
from pagedgen.stats.types import GENERATING, StatsSnapshot
from pagedgen.units import format_bytes

FRAMES_PER_SECOND = 5
PLAIN_INTERVAL = 5.0


def stderr_console() -> Console:
    """A console on stderr that sends control codes only to a terminal that knows them, whatever FORCE_COLOR says."""
    if sys.stderr is None:  # closed by whoever started the process
        return StreamConsole(file=io.StringIO())
    terminal = sys.stderr.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")
    return StreamConsole(
        stderr=True, force_terminal=terminal, force_interactive=terminal, force_jupyter=False, highlight=False
    )


def stdout_console() -> Console:
    """A console on stdout that sends control codes only to a terminal that knows them, whatever FORCE_COLOR says."""
    terminal = sys.stdout.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")
    return StreamConsole(force_terminal=terminal, force_interactive=terminal, force_jupyter=False, highlight=False)


class StreamConsole(Console):
    """A console whose reader may go away: that raises BrokenPipeError, as other errors of writing raise OSError, where
    Rich would end the process."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


class LiveDisplay:
    """Shows a run while it goes on; used as a context manager.

    On a terminal a thread draws the statistics a few times a second, so that the display stays alive through long steps
    and phases; what is printed to stderr meanwhile appears above it, and it is gone when the run ends. Elsewhere
    `refresh` writes a line every five seconds. With `quiet` nothing is shown.
    """

    def __init__(self, stats: RunStats, *, quiet: bool = False, console: Console | None = None) -> None:
        self._stats = stats
        self._quiet = quiet
        self._console = console or stderr_console()
        self._glyphs = Glyphs.of(self._console)
        self._live: Live | None = None
        self._drawn: tuple[int, ...] = ()
        self._next_line = 0.0
        self._announced: set[str] = set()

    def __enter__(self) -> Self:
        if self._console.is_terminal and not self._quiet:
            self._live = Live(
                get_renderable=self._picture,
                console=self._console,
                refresh_per_second=FRAMES_PER_SECOND,
                transient=True,
                redirect_stdout=sys.stdout is not None and sys.stdout.isatty(),
                vertical_overflow="crop",
            )
            self._live.start(refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            with suppress(OSError):  # the terminal is gone, which is no reason for the run to fail
                self._live.stop()
            self._live = None

    def phase(self, name: str) -> None:
        """Say what the run does from now on; it is shown and its time is counted."""
        self._stats.set_phase(name)
        if self._live is None and not self._quiet and name != GENERATING and name not in self._announced:
            self._announced.add(name)
            self._line(f"[{format_duration(self._stats.elapsed)}] {name}")

    def refresh(self) -> None:
        """Called after each step; it writes the next plain line when that is due. A terminal's picture draws itself."""
        if self._live is not None or self._quiet or self._stats.elapsed < self._next_line:
            return
        snapshot = self._stats.snapshot()
        if snapshot.last is not None:
            self._next_line = snapshot.elapsed + PLAIN_INTERVAL
            self._line(plain_line(snapshot))

    def warn(self, message: str) -> None:
        """Print a warning, above the picture on a terminal."""
        if self._quiet:
            return
        if self._live is None:
            self._line(f"warning: {message}")
        else:
            with suppress(OSError):
                self._console.print(Text.assemble(("warning: ", ALARM), message))

    def _line(self, line: str) -> None:
        """A run goes on when nobody reads its lines any more."""
        try:
            self._console.out(line, highlight=False)
        except OSError:
            self._quiet = True

    def _picture(self) -> "_Picture":
        width, height = self._console.size
        self._erase_reflowed(width)
        lines = dashboard(self._stats.snapshot(), width, height - 1, self._glyphs)
        self._drawn = tuple(line.cell_len for line in lines)
        return _Picture(lines)

    def _erase_reflowed(self, width: int) -> None:
        """Erase the lines that the last picture takes more than when it was drawn.

        A terminal made narrower breaks the lines that no longer fit; Rich erases as many lines as it had written.
        """
        extra = sum(max(cells - 1, 0) // width for cells in self._drawn)
        if extra:
            erase_up = ((ControlType.ERASE_IN_LINE, 2), (ControlType.CURSOR_UP, 1))
            self._console.control(Control(*erase_up * extra))


class _Picture:
    """Lines drawn as one: the terminal shows them at once (synchronized update, mode 2026), and does not break those
    that are too wide because it was just made narrower (auto-wrap, mode 7)."""

    BEGIN, END = "\x1b[?2026h\x1b[?7l", "\x1b[?7h\x1b[?2026l"

    def __init__(self, lines: list[Text]) -> None:
        self._lines = lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        # Marked as control codes, so that they count as no cells.
        mark = ((ControlType.CARRIAGE_RETURN,),)
        yield Segment(self.BEGIN, None, mark)
        for index, line in enumerate(self._lines):
            if index:
                yield Segment.line()
            yield from line.render(console)
        yield Segment(self.END, None, mark)


def plain_line(s: StatsSnapshot) -> str:
    """The run in one line, for logs: `[00:35] 120/1000 rows (12%), 3.4 rows/s, ETA 04:18, in 812 tok/s, ...`."""
    if s.rows_total is None or s.progress is None:
        rows = f"{s.rows_done} rows"
    else:
        rows = f"{s.rows_done}/{'' if s.rows_total_exact else '~'}{s.rows_total} rows ({format_percent(s.progress)})"
    parts = [rows, format_row_rate(s.rows_rate)]
    if s.eta != 0:
        parts.append(f"ETA {'--:--' if s.eta is None else format_duration(s.eta)}")
    parts += [f"in {format_rate(s.prompt_rate)} tok/s", f"out {format_rate(s.output_rate)} tok/s"]
    if s.last is not None:
        parts += [f"{s.last.running} running", f"{s.last.waiting} waiting", _plain_pool(s)]
    parts += [
        f"prefix hits {format_percent(s.prefix_hit_rate)}",
        f"{s.preemptions} {plural(s.preemptions, 'preemption')}",
    ]
    if s.failed:
        parts.append(f"{s.failed} failed")
    return f"[{format_duration(s.elapsed)}] " + ", ".join(parts)


def _plain_pool(s: StatsSnapshot) -> str:
    """The KV pool's use; every percentage is of the whole pool."""
    assert s.last is not None
    live, wasted, _, _ = pool_slots(s.last)
    total = s.last.total_blocks * s.last.block_size
    shares = [format_percent(slots / total if total else 0.0) for slots in (live + wasted, live, wasted)]
    size = f" of {format_bytes(s.info.kv_bytes)}" if s.info else ""
    return f"KV {shares[0]}{size} (live {shares[1]}, waste {shares[2]})"
