"""`pagedgen stats`: find the runs, and show them in the form that is asked for."""

import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from pagedgen.data.files import write_error
from pagedgen.errors import PagedgenError, UsageError
from pagedgen.reports.comparison import comparison_lines
from pagedgen.reports.find import find_run_folder, read_run
from pagedgen.reports.report import RunReport, make_report
from pagedgen.reports.terminal import report_lines
from pagedgen.standard_streams import printing, tell
from pagedgen.stats.live import stdout_console
from pagedgen.stats.text import Glyphs, format_duration, format_percent, format_rate
from pagedgen.units import format_bytes

WATCH_INTERVAL, PLAIN_INTERVAL = 1.0, 5.0
# How long a run that is not there yet may take to begin.
BEGINNING = 30.0


def show_stats(names: Sequence[str], *, as_json: bool, html: Path | None, watch: bool) -> None:
    """Report on the runs that `names` mean, the latest one when there are none, on stdout.

    as_json: as JSON, an object, or an array of several. html: as a page in this file. watch: until the run ends.
    Raises UsageError for a run that is not there or forms that exclude each other, PagedgenError for a file that cannot
    be written, and what `printing` raises.
    """
    if watch and (as_json or html is not None):
        raise UsageError("--watch shows a run on the terminal; leave --json and --html out")
    if watch and len(names) > 1:
        raise UsageError("--watch shows one run; name only one")
    if watch:
        folder = _wait_for(names[0]) if names else find_run_folder(None)
        with printing():
            _watch(folder)
        return
    folders = [find_run_folder(name) for name in names] or [find_run_folder(None)]
    reports = [make_report(read_run(folder)) for folder in folders]
    if html is not None:
        _write_page(reports, html)
    if as_json:
        values = [report.as_json() for report in reports]
        with printing():
            print(json.dumps(values[0] if len(values) == 1 else values, indent=2, default=str))
    elif html is None:
        with printing():
            console = stdout_console()
            console.print(*_lines(reports, console), sep="\n", soft_wrap=True)


def _lines(reports: Sequence[RunReport], console: Console, height: int | None = None) -> list[Text]:
    glyphs = Glyphs.of(console)
    if len(reports) == 1:
        return report_lines(reports[0], console.width, glyphs, height)
    return comparison_lines(reports, console.width, glyphs)


def _write_page(reports: Sequence[RunReport], path: Path) -> None:
    from pagedgen.reports.page import MARK, html_page  # matplotlib is imported only when there is something to draw

    try:
        if os.path.lexists(path) and (not path.is_file() or MARK.encode() not in path.read_bytes()[:4096]):
            raise UsageError(f"--html {path} exists and is no report of pagedgen; name another file, like report.html")
        page = html_page(reports)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page, "utf-8")
    except OSError as error:
        raise write_error(path, error, "or choose another --html") from error
    tell(f"written to {path}")


def _wait_for(name: str) -> Path:
    """The run's folder, which comes about only when the model is loaded. Raises UsageError when it does not come."""
    deadline = time.monotonic() + BEGINNING
    while True:
        try:
            return find_run_folder(name)
        except UsageError:
            if time.monotonic() > deadline or Path(name).exists():
                raise
        time.sleep(WATCH_INTERVAL)


def _watch(folder: Path) -> None:
    """Show the run until it has ended or Ctrl-C comes, on a terminal as a picture, elsewhere a line every few seconds;
    then its report."""
    console = stdout_console()
    report = make_report(read_run(folder))
    with suppress(KeyboardInterrupt), _interruptible():
        if console.is_terminal:
            with Live(console=console, auto_refresh=False, transient=True, vertical_overflow="crop") as live:
                while report.head.status == "running":
                    live.update(Group(*_lines([report], console, console.height - 1)), refresh=True)
                    time.sleep(WATCH_INTERVAL)
                    report = _again(folder, report)
        else:
            while report.head.status == "running":
                console.out(_plain_line(report), highlight=False)
                time.sleep(PLAIN_INTERVAL)
                report = _again(folder, report)
    console.print(*_lines([report], console), sep="\n", soft_wrap=True)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt meanwhile, so that the terminal's cursor comes back."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _again(folder: Path, report: RunReport) -> RunReport:
    """The report as it is now; the last one, should the manifest be just being replaced."""
    try:
        return make_report(read_run(folder))
    except PagedgenError:
        if not folder.is_dir():
            raise
        return report


def _plain_line(report: RunReport) -> str:
    rows, pool, tokens = report.rows, report.pool, report.tokens
    total = f"/{'' if rows.total_is_exact else '~'}{rows.total:,}" if rows.total else ""
    parts = [f"[{format_duration(report.head.elapsed_s)}] {rows.done:,}{total} rows"]
    if pool is not None and tokens is not None:
        parts += [
            f"out {format_rate(tokens.output_per_s)} tok/s",
            f"KV peak {format_bytes(pool.peak_bytes)}",
            f"waste {format_percent(pool.waste, 1)}",
        ]
    if rows.eta_s is not None:
        parts.append(f"ETA {format_duration(rows.eta_s)}")
    return ", ".join(parts)
