"""The live display and the summary: what they show, where it fits, and that the terminal is left as it was found."""

import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from pagedgen.request import Completion, FinishReason, Status
from pagedgen.stats.collector import RunInfo, RunStats, StepSample
from pagedgen.stats.dashboard import dashboard, pool_slots
from pagedgen.stats.live import LiveDisplay, plain_line
from pagedgen.stats.summary import print_summary
from pagedgen.stats.text import (
    Glyphs,
    flow,
    format_duration,
    format_percent,
    format_rate,
    format_row_rate,
    format_seconds,
    sparkline,
    split_width,
)
from pagedgen.units import format_bytes

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
GIB = 2**30


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def make_console(*, terminal: bool = True, width: int = 80, height: int = 50, no_color: bool = False) -> Console:
    return Console(
        file=io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline=""),
        force_terminal=terminal,
        force_interactive=terminal,
        width=width,
        height=height,
        color_system="truecolor" if terminal else None,
        no_color=no_color,
        legacy_windows=False,
        _environ={},
    )


def printed(console: Console) -> str:
    console.file.flush()
    return console.file.buffer.getvalue().decode()


def make_stats(
    clock: Clock, *, total: int | None = 1000, model: str = "HuggingFaceTB/SmolLM2-135M-Instruct"
) -> RunStats:
    """A run of 35 seconds that has generated for 30: 120 rows done, two of them failed."""
    stats = RunStats(clock)
    stats.set_phase("loading model")
    clock.now = 5.0
    stats.set_info(RunInfo(model, "cpu", "bfloat16", "C++", 2 * GIB, 1000, 16))
    stats.set_phase("generating")
    stats.set_total(total)
    for row in range(120):
        status = Status.BAD_ROW if row in (17, 40) else Status.OK
        error = f"prompts.jsonl line {row + 1}: this is not JSON" if status is Status.BAD_ROW else None
        reason = None if error else FinishReason.LENGTH if row % 4 == 0 else FinishReason.STOP
        stats.add_row([Completion(row, str(row), 0, status, finish_reason=reason, error=error)])
    for step in range(300):
        clock.now = 5.1 + step * 0.1
        stats.add_step(
            StepSample(
                clock.now - 0.1, clock.now, 430, 300, 270, 1000, 16, 6240, 500, 64, 816, 56, 40, 25, 0, 0, model_s=0.08
            )
        )
    return stats


def test_dashboard_says_it_all() -> None:
    stats = make_stats(Clock())
    text = "\n".join(line.plain for line in dashboard(stats.snapshot(), 80, 50, Glyphs.of(make_console())))
    for part in (
        "HuggingFaceTB/SmolLM2-135M-Instruct · cpu bfloat16 · C++ kernels",
        "120/1,000  12%",
        "elapsed 00:35",
        "ETA",
        "2 failed",
        "in 560/s · out 400/s",
        "64 running · 816 waiting · 0 preemptions",
        "live 799 MiB",
        "wasted 82 MiB",
        "cached 614 MiB",
        "free 553 MiB",
        "in use 43% · waste 9.3% · sharing saved 14.0% · prefix hits 31%",
    ):
        assert part in text


def test_plain_line() -> None:
    line = plain_line(make_stats(Clock()).snapshot())
    assert line == (
        "[00:35] 120/1000 rows (12%), 4.0 rows/s, ETA 03:40, in 560 tok/s, out 400 tok/s, 64 running, 816 waiting, "
        "KV 43% of 2.0 GiB (live 39%, waste 4%), prefix hits 31%, 0 preemptions, 2 failed"
    )


def test_estimated_and_unknown_totals() -> None:
    stats = make_stats(Clock(), total=None)
    glyphs = Glyphs.of(make_console())

    def text() -> str:
        return "\n".join(line.plain for line in dashboard(stats.snapshot(), 80, 50, glyphs))

    assert "120 rows done" in text()
    assert "ETA --:--" in text()
    assert "120 rows, " in plain_line(stats.snapshot())
    stats.set_input_progress(0.25, 500)
    assert "120/~2,000   6%" in text()
    assert "120/~2000 rows (6%)" in plain_line(stats.snapshot())


def test_the_phases_before_the_first_step() -> None:
    clock = Clock()
    stats = RunStats(clock)
    glyphs = Glyphs.of(make_console())
    assert "starting" in dashboard(stats.snapshot(), 80, 24, glyphs)[-1].plain
    stats.set_phase("loading model")
    clock.now = 65.0
    line = dashboard(stats.snapshot(), 80, 24, glyphs)[-1].plain
    assert "loading model" in line
    assert "01:05" in line


SAMPLES = st.builds(
    lambda used, cached, free, filled, shared, counts, tokens: StepSample(
        0.0, 1.0, used, cached, free, used + cached + free, 16, min(filled, used * 16), used + shared, *counts, *tokens
    ),
    st.integers(0, 10**6),
    st.integers(0, 10**6),
    st.integers(0, 10**6),
    st.integers(0, 10**7),
    st.integers(0, 10**6),
    st.tuples(st.integers(0, 10**6), st.integers(0, 10**7)),
    st.tuples(st.integers(0, 10**9), st.integers(0, 10**9)),
)


@given(
    sample=st.none() | SAMPLES,
    total=st.none() | st.integers(0, 10**9),
    model=st.text(st.sampled_from("ab/-模型é"), max_size=60),
    phase=st.sampled_from([None, "generating", "writing"]),
    width=st.sampled_from([1, 7, 20, 40, 80, 200]) | st.integers(1, 220),
    height=st.integers(1, 50),
    terminal=st.booleans(),
)
def test_no_line_exceeds_the_terminal(
    sample: StepSample | None,
    total: int | None,
    model: str,
    phase: str | None,
    width: int,
    height: int,
    terminal: bool,
) -> None:
    stats = make_stats(Clock(), total=total, model=model)
    stats.set_phase(phase)
    snapshot = replace(stats.snapshot(), last=sample)
    lines = dashboard(snapshot, width, height, Glyphs.of(make_console(terminal=terminal)))
    assert 0 < len(lines) <= height
    assert all(line.cell_len <= width for line in lines)
    assert "\n" not in "".join(line.plain for line in lines)


@pytest.mark.parametrize("width", [40, 80, 200])
def test_what_is_written_fits_the_terminal(width: int) -> None:
    console = make_console(width=width)
    with LiveDisplay(make_stats(Clock()), console=console):
        pass
    lines = [ESCAPE.sub("", line) for line in printed(console).replace("\r", "\n").split("\n")]
    assert any("KV pool" in line for line in lines)
    assert max(map(cell_len, lines)) <= width
    if width == 200:
        assert max(map(cell_len, lines)) > 100


@given(st.lists(st.integers(0, 10**9) | st.floats(0, 1e9), min_size=1, max_size=6), st.integers(0, 250))
def test_bar_widths_sum_and_show_every_part(parts: list[float], width: int) -> None:
    widths = split_width(parts, width)
    shown = [part for part in parts if part > 0]
    assert sum(widths) == (width if shown else 0)
    assert all(cells == 0 for cells, part in zip(widths, parts, strict=True) if not part)
    if width >= len(shown):
        assert all(cells >= 1 for cells, part in zip(widths, parts, strict=True) if part)
        for cells, part in zip(widths, parts, strict=True):
            assert abs(cells - part * width / (sum(shown) or 1)) <= len(parts)
    else:
        assert sorted(widths, reverse=True)[:width] == [1] * width


@given(SAMPLES)
def test_the_pool_is_split_without_a_rest(sample: StepSample) -> None:
    slots = pool_slots(sample)
    assert min(slots) >= 0
    assert sum(slots) == sample.total_blocks * sample.block_size


def test_a_closed_stdout_is_no_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    console = make_console()
    monkeypatch.setattr(sys, "stdout", None)
    with LiveDisplay(make_stats(Clock()), console=console) as display:
        display.warn("careful")
    assert "careful" in printed(console)


def test_parts_differ_without_colour() -> None:
    assert len(set(Glyphs.of(make_console(no_color=True)).pool)) == 4
    assert len(set(Glyphs.of(make_console(terminal=False)).pool)) == 4
    console = make_console(no_color=True)
    with LiveDisplay(make_stats(Clock()), console=console) as display:
        display.warn("careful")
    text = printed(console)
    assert "careful" in text
    colours = [code for codes in re.findall(r"\x1b\[([0-9;]*)m", text) for code in codes.split(";")]
    assert colours
    assert set(colours) <= {"", "0", "1", "2"}


def test_colours_are_used_otherwise() -> None:
    console = make_console()
    with LiveDisplay(make_stats(Clock()), console=console):
        pass
    assert "38;2;" in printed(console)


def test_plain_ascii_where_the_encoding_has_no_more() -> None:
    glyphs = Glyphs.of(Console(file=io.TextIOWrapper(io.BytesIO(), encoding="ascii")))
    lines = dashboard(make_stats(Clock()).snapshot(), 60, 50, glyphs)
    assert "\n".join(line.plain for line in lines).isascii()


def test_plain_mode_writes_lines_without_codes() -> None:
    clock = Clock()
    stats = RunStats(clock)
    console = make_console(terminal=False, width=40)
    with LiveDisplay(stats, console=console) as display:
        display.phase("loading model")
        clock.now = 2.0
        display.refresh()
        display.phase("generating")
        for _ in range(120):
            stats.add_step(StepSample(clock.now, clock.now + 0.1, 10, 0, 90, 100, 16, 100, 10, 4, 0, 5, 4))
            clock.now += 0.1
            display.refresh()
        display.warn("[bold] is not markup here")
        for _ in range(2):
            display.phase("writing")
            display.phase("generating")
    text = printed(console)
    assert "\x1b" not in text
    assert "\r" not in text
    times = [line[:7] for line in text.splitlines()]
    assert times == ["[00:00]", "[00:02]", "[00:07]", "[00:12]", "warning", "[00:14]"]
    assert "warning: [bold] is not markup here" in text
    assert text.splitlines()[-1] == "[00:14] writing"


@pytest.mark.parametrize("terminal", [True, False])
def test_quiet_writes_nothing(terminal: bool) -> None:
    console = make_console(terminal=terminal)
    stats = make_stats(Clock())
    with LiveDisplay(stats, quiet=True, console=console) as display:
        display.phase("writing")
        display.refresh()
        display.warn("careful")
    assert printed(console) == ""
    assert "writing" in stats.snapshot().phases


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("width", [40, 80, 200])
def test_summary(terminal: bool, width: int) -> None:
    console = make_console(terminal=terminal, width=width)
    stats = make_stats(Clock())
    stats.set_phase(None)
    print_summary(console, stats.snapshot(), Path("out.parquet"))
    text = printed(console)
    assert ("\x1b" in text) is terminal
    lines = [ESCAPE.sub("", line) for line in text.splitlines()]
    assert max(map(cell_len, lines)) <= width
    words = " ".join(re.sub(r"[│·]", " ", "\n".join(lines)).split())
    for part in (
        "out.parquet",
        "120 done",
        "880 left",
        "118 ok",
        "2 bad_row",
        "row 17 bad_row: prompts.jsonl",
        "row 40 bad_row: prompts.jsonl",
        "89 stopped",
        "29 hit max_tokens",
        "in 24,300",
        "7,500 from prefix cache",
        "out 12,000",
        "out 400 tok/s",
        "total 35 s",
        "loading model 5.0 s",
        "generating 30 s",
        "2.0 GiB",
        "peak 43%",
        "mean waste 9.3%",
        "sharing saved 14.0%",
        "prefix hits 31%",
        "model 80%",
    ):
        assert part in words


def test_summary_of_a_run_without_steps() -> None:
    console = make_console(terminal=False)
    stats = RunStats(Clock())
    stats.add_row([Completion(0, "0", 0, Status.TOO_LONG, error="a\n" + "very long reason " * 40)])
    print_summary(console, stats.snapshot(), Path("out.parquet"))
    lines = printed(console).splitlines()
    assert "1 too_long" in lines[1]
    assert max(map(len, lines)) <= 80
    assert len(lines) == 6


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        (format_bytes(0), "0 B"),
        (format_bytes(1000), "1.0 KiB"),
        (format_bytes(812 * 2**20), "812 MiB"),
        (format_bytes(2 * GIB), "2.0 GiB"),
        (format_bytes(1023.9 * 2**20), "1.0 GiB"),
        (format_bytes(5000 * GIB), "4.9 TiB"),
        (format_duration(59.6), "01:00"),
        (format_duration(3723), "1:02:03"),
        (format_duration(2 * 86400 + 3 * 3600 + 240), "2d 03:04"),
        (format_seconds(9.96), "10 s"),
        (format_seconds(59.9), "01:00"),
        (format_rate(1405.2), "1,405"),
        (format_rate(9.96), "10"),
        (format_rate(0.42), "0.42"),
        (format_rate(0), "0.0"),
        (format_row_rate(3.4), "3.4 rows/s"),
        (format_row_rate(0.42), "25 rows/min"),
        (format_percent(0.001), "<1%"),
        (format_percent(0.9999), ">99%"),
        (format_percent(1), "100%"),
        (format_percent(0), "0%"),
        (format_percent(0.0391, 1), "3.9%"),
        (format_percent(0.0001, 1), "<0.1%"),
        (format_percent(None), "-"),
        (sparkline([0, 1, 7, 8], 3, "12345678"), "288"),
        (sparkline([0, 0], 5, "12345678"), "11"),
        (flow([], 10, " "), []),
    ],
)
def test_formats(actual: object, expected: object) -> None:
    assert actual == expected


RUN = """
import sys, time
from pagedgen.stats.collector import RunStats, StepSample
from pagedgen.stats.live import LiveDisplay
from pagedgen.units import format_bytes
stats = RunStats()
stats.set_total(100)
with LiveDisplay(stats) as display:
    display.phase("loading model")
    for _ in range(600):
        start = time.perf_counter()
        time.sleep(0.05)
        stats.add_step(StepSample(start, time.perf_counter(), 10, 5, 85, 100, 16, 150, 11, 4, 9, 10, 4))
        print("a line to stderr", file=sys.stderr)
        display.refresh()
"""


@pytest.mark.parametrize("term", ["xterm-256color", "dumb"])
def test_interrupt_leaves_the_terminal_sane(term: str) -> None:
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": term, "FORCE_COLOR": "1", "COLUMNS": "80", "LINES": "24"}
    process = subprocess.Popen(
        [sys.executable, "-c", RUN], stdin=slave, stdout=subprocess.DEVNULL, stderr=slave, env=environment
    )
    os.close(slave)
    output, interrupted = b"", False
    deadline = time.monotonic() + 60
    try:
        while time.monotonic() < deadline:
            if select.select([master], [], [], 0.2)[0]:
                try:
                    chunk = os.read(master, 65536)
                except OSError:  # The other side has closed.
                    break
                if not chunk:
                    break
                output += chunk
            if not interrupted and b"running" in output and output.count(b"a line") > 3:
                interrupted = True
                process.send_signal(signal.SIGINT)
    finally:
        process.kill()
        process.wait()
        os.close(master)
    text = output.decode()
    assert "KeyboardInterrupt" in text
    assert "a line to stderr" in text
    if term == "dumb":
        assert "\x1b" not in text.split("Traceback")[0]
        return
    for off, on in (("\x1b[?25l", "\x1b[?25h"), ("\x1b[?7l", "\x1b[?7h"), ("\x1b[?2026h", "\x1b[?2026l")):
        assert off in text
        assert text.rindex(on) > text.rindex(off)
