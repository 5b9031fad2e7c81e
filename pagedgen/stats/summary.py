"""The table at the end of a run."""

import textwrap
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pagedgen.request import FinishReason, Status
from pagedgen.stats.dashboard import ALARM, named, value
from pagedgen.stats.text import (
    Glyphs,
    flow,
    format_percent,
    format_rate,
    format_row_rate,
    format_seconds,
    plural,
)
from pagedgen.stats.types import StatsSnapshot
from pagedgen.units import format_bytes

MAX_WIDTH = 96
LABEL_WIDTH = 8
MAX_ERROR_LINES = 3
# The table's edges and the padding of its two columns.
FRAME_WIDTH = 7

Section = tuple[str, list[Text]]


def print_summary(console: Console, snapshot: StatsSnapshot, output: Path) -> None:
    """Print the summary of a run that wrote `output`: a table on a terminal, else the same as plain lines."""
    glyphs = Glyphs.of(console)
    width = max(min(console.width, MAX_WIDTH) - LABEL_WIDTH - FRAME_WIDTH, 10)
    print_sections(console, summary_sections(snapshot, output, width, glyphs))


def print_sections(console: Console, sections: Sequence[Section]) -> None:
    """Labels and their lines: a table on a terminal, else plain lines."""
    if not console.is_terminal:
        for label, lines in sections:
            for index, line in enumerate(lines):
                console.out(f"{'' if index else label:<{LABEL_WIDTH + 1}} {line.plain}", highlight=False)
        return
    table = Table(box=box.ROUNDED, show_header=False, border_style="dim", safe_box=True)
    table.add_column(style="dim", width=LABEL_WIDTH, no_wrap=True)
    table.add_column(overflow="fold")
    for label, lines in sections:
        table.add_row(label, Text("\n").join(lines))
    console.print(table)


def summary_sections(s: StatsSnapshot, output: Path, width: int, glyphs: Glyphs) -> list[Section]:
    """Each part's label and lines. Only the output's path may be wider than `width`: it is never cut."""

    def lines(items: list[Text]) -> list[Text]:
        return flow(items, width, glyphs.separator, glyphs.ellipsis)

    examples = [
        Text(line)
        for example in s.errors
        for line in textwrap.wrap(
            f"row {example.row} {example.status}: {example.error}",
            width,
            subsequent_indent="  ",
            max_lines=MAX_ERROR_LINES,
            placeholder=glyphs.ellipsis,
        )
    ]
    sections = [
        ("output", [Text(str(output), "bold")]),
        ("rows", lines(_rows(s)) + examples),
        ("finish", lines(_finish(s))),
        ("tokens", lines(_tokens(s))),
        ("rate", lines(_rates(s))),
        ("time", lines(_times(s))),
        ("KV pool", lines(_pool(s)) + lines(_memory(s))),
        ("steps", lines(_steps(s))),
    ]
    return [(label, content) for label, content in sections if content]


def _rows(s: StatsSnapshot) -> list[Text]:
    items = [value(f"{s.rows_done:,}", "done")]
    if s.rows_earlier:
        items.append(value(f"{s.rows_earlier:,}", "of them earlier"))
    if s.rows_total_exact and s.rows_total is not None and s.rows_total > s.rows_done:
        items.append(value(f"{s.rows_total - s.rows_done:,}", "left", ALARM))
    if s.completions != s.rows_done:
        items.append(value(f"{s.completions:,}", "completions"))
    for status in Status:
        if count := s.statuses.get(status, 0):
            items.append(value(f"{count:,}", status, "bold" if status is Status.OK else ALARM))
    return items


def _finish(s: StatsSnapshot) -> list[Text]:
    stopped, cut = (s.finish_reasons.get(reason, 0) for reason in (FinishReason.STOP, FinishReason.LENGTH))
    return [value(f"{stopped:,}", "stopped"), value(f"{cut:,}", "hit max_tokens")] if stopped or cut else []


def _tokens(s: StatsSnapshot) -> list[Text]:
    if not s.steps:
        return []
    return [
        named("in", f"{s.prompt_tokens + s.cached_prompt_tokens:,}"),
        value(f"{s.cached_prompt_tokens:,}", "from prefix cache"),
        named("out", f"{s.output_tokens:,}"),
    ]


def _rates(s: StatsSnapshot) -> list[Text]:
    if s.generating_s <= 0:
        return []
    rows, unit = format_row_rate((s.rows_done - s.rows_earlier) / s.generating_s).split(" ", 1)
    tokens = [value(format_rate(rate), "tok/s") for rate in (s.prompt_rate_overall, s.output_rate_overall)]
    return [Text.assemble(name, text) for name, text in zip(("in ", "out "), tokens, strict=True)] + [value(rows, unit)]


def _times(s: StatsSnapshot) -> list[Text]:
    return [named("total", format_seconds(s.elapsed))] + [
        named(phase, format_seconds(seconds)) for phase, seconds in s.phases.items() if seconds >= 0.05
    ]


def _pool(s: StatsSnapshot) -> list[Text]:
    if s.info is None or s.mean_used_blocks is None:
        return []
    peak, mean = (blocks / s.info.kv_blocks for blocks in (s.peak_used_blocks, s.mean_used_blocks))
    return [
        Text(format_bytes(s.info.kv_bytes), "bold"),
        named("peak", format_percent(peak)),
        named("mean", format_percent(mean)),
        named("most running", f"{s.peak_running:,}"),
    ]


def _memory(s: StatsSnapshot) -> list[Text]:
    if not s.steps:
        return []
    return [
        named("mean waste", format_percent(s.mean_waste, 1)),
        named("sharing saved", format_percent(s.mean_sharing_saved, 1)),
        named("prefix hits", format_percent(s.prefix_hit_rate)),
        value(f"{s.preemptions:,}", plural(s.preemptions, "preemption")),
    ]


def _steps(s: StatsSnapshot) -> list[Text]:
    if s.generating_s <= 0:
        return []
    parts = sorted(s.step_parts.items(), key=lambda part: (part[0] == "other", -part[1]))
    return [Text(f"{s.steps:,}", "bold")] + [
        named(part, format_percent(seconds / s.generating_s)) for part, seconds in parts if seconds > 0
    ]
