"""The report on a terminal, at 80 columns or whatever there is."""

import textwrap

import numpy as np
from numpy.typing import NDArray
from rich.text import Text

from pagedgen.reports.over_time import rate, resample
from pagedgen.reports.report import Allocation, Pool, RunReport, Sharing
from pagedgen.request import Status
from pagedgen.stats.dashboard import ALARM, CACHED, LIVE, WASTED, named, value
from pagedgen.stats.recording import Recording
from pagedgen.stats.text import (
    Glyphs,
    fit,
    flow,
    format_duration,
    format_percent,
    format_rate,
    format_row_rate,
    format_seconds,
    plural,
)
from pagedgen.units import format_bytes, format_bytes_finely

LABEL_WIDTH = 9
MAX_WIDTH = 100
MAX_ERROR_LINES = 2
# The label and the figure beside a line of the timeline.
SERIES_LABEL, SERIES_FIGURE = 10, 18
# What stands beside a bar of the memory: its owner, the bytes, how they are known.
MEMORY_TEXT = 56
# Narrower than this, tables become lines of text.
TABLE_WIDTH = 69
# What is left out first where there is not room for all.
DISPENSABLE = ("plan", "memory", "time", "phases", "steps", "waste", "sharing", "timeline")
Section = tuple[str, list[Text]]


def report_lines(report: RunReport, width: int, glyphs: Glyphs, height: int | None = None) -> list[Text]:
    """The report of one run in lines of at most `width` cells, but for its output's path, which is never cut. With a
    height, as much of it as fits, what changes most while a run goes on before the rest."""
    width = max(min(width, MAX_WIDTH), 40)
    inside = width - LABEL_WIDTH
    sections = {label: content for label, content in _sections(report, inside, glyphs) if content}
    head = _head(report, glyphs)
    if height is not None:
        for label in DISPENSABLE:
            if len(head) + sum(len(content) + 1 for content in sections.values()) > height:
                sections.pop(label, None)
    lines = head
    for label, content in sections.items():
        lines += [Text(), *_labelled(label, content)]
    return [line if i == 0 else fit(line, width, glyphs.ellipsis) for i, line in enumerate(lines)]


def _sections(report: RunReport, inside: int, glyphs: Glyphs) -> list[Section]:
    def flowed(items: list[Text]) -> list[Text]:
        return flow(items, inside, glyphs.separator, glyphs.ellipsis)

    first = [
        ("rows", flowed(_rows(report)) + _errors(report, inside, glyphs)),
        ("tokens", flowed(_tokens(report))),
        ("time", flowed(_times(report))),
    ]
    if report.pool is None or report.sharing is None or report.recording is None:
        return [*first, ("steps", [Text(line, "dim") for line in textwrap.wrap(why_nothing(report), inside)])]
    return [
        *first,
        ("KV pool", flowed(_pool(report.pool))),
        ("waste", _allocations(report, inside, glyphs)),
        ("sharing", flowed(_sharing(report.sharing))),
        ("phases", _phases(report, inside, glyphs)),
        ("steps", flowed(_steps(report))),
        ("memory", _memory(report, inside, glyphs)),
        ("timeline", _timeline(report.recording, inside, glyphs)),
        ("plan", _plan(report, inside)),
    ]


def why_nothing(report: RunReport) -> str:
    """Why a report has no recording to speak of."""
    if report.recording is None and report.head.status != "running":
        return "timeline.parquet is missing or damaged, so it is not known where memory and time went"
    if report.head.status == "running":
        return "nothing has been recorded: no step has come to an end yet"
    return "nothing has been recorded: no step was run"


def _labelled(label: str, lines: list[Text]) -> list[Text]:
    heads = [label, *[""] * (len(lines) - 1)]
    return [
        Text.assemble((head.ljust(LABEL_WIDTH), "dim"), line) if head or line.plain else line
        for head, line in zip(heads, lines, strict=True)
    ]


def _head(report: RunReport, glyphs: Glyphs) -> list[Text]:
    head = report.head
    style = LIVE if head.status in ("finished", "running") else ALARM
    first = Text.assemble((head.output, "bold"), glyphs.separator, (head.status, f"bold {style}"))
    processes = f", in {head.processes} processes" if head.processes > 1 else ""
    started = head.started[:16].replace("T", " ")
    kernels = f"{head.kernels} kernels" if head.kernels else ""
    second = glyphs.separator.join(
        part for part in (head.model, f"{head.device} {head.dtype}".strip(), kernels) if part
    )
    third = f"{started} UTC{glyphs.separator}took {format_duration(head.elapsed_s)}{processes}"
    return [first, Text(second, "dim"), Text(third, "dim")]


def _rows(report: RunReport) -> list[Text]:
    rows = report.rows
    total = f" of {'' if rows.total_is_exact else 'about '}{rows.total:,}" if rows.total else ""
    items = [value(f"{rows.done:,}{total if rows.total != rows.done else ''}", "done")]
    for status, count in rows.statuses.items():
        items.append(value(f"{count:,}", status, "bold" if status == Status.OK else ALARM))
    if rows.eta_s is not None:
        items.append(named("ETA", format_duration(rows.eta_s)))
    return items


def _errors(report: RunReport, width: int, glyphs: Glyphs) -> list[Text]:
    return [
        Text(line)
        for error in report.rows.errors
        for line in textwrap.wrap(
            f"row {error['row']} {error['status']}: {error['error']}",
            width,
            subsequent_indent="  ",
            max_lines=MAX_ERROR_LINES,
            placeholder=glyphs.ellipsis,
        )
    ]


def _tokens(report: RunReport) -> list[Text]:
    tokens, sharing = report.tokens, report.sharing
    if tokens is None or sharing is None:
        return []
    seconds = report.head.generating_s
    rows_here = report.rows.done / seconds if seconds else 0.0
    rows, unit = format_row_rate(rows_here).split(" ", 1)
    return [
        named("in", f"{tokens.prompt + sharing.cached_prompt_tokens:,}"),
        value(f"{sharing.cached_prompt_tokens:,}", "from prefix cache"),
        named("out", f"{tokens.output:,}"),
        Text.assemble("in ", value(format_rate(tokens.prompt_per_s), "tok/s")),
        Text.assemble("out ", value(format_rate(tokens.output_per_s), "tok/s")),
        value(rows, unit),
    ]


def _times(report: RunReport) -> list[Text]:
    return [named(phase, format_seconds(seconds)) for phase, seconds in report.head.phases_s.items() if seconds >= 0.05]


def _pool(pool: Pool) -> list[Text]:
    return [
        Text(format_bytes(pool.bytes), "bold"),
        value(f"{pool.blocks:,}", f"blocks of {pool.block_size} tokens"),
        value(format_bytes_finely(pool.bytes_per_token), "a token"),
        Text.assemble("peak ", value(format_bytes(pool.peak_bytes), f"({format_percent(pool.peak_share, 1)})")),
        Text.assemble("mean ", value(format_bytes(pool.mean_bytes), f"({format_percent(pool.mean_share, 1)})")),
        value(format_bytes(pool.mean_cached_bytes), "cached"),
        value(f"{pool.peak_running:,}", "running at most"),
        value(format_rate(pool.mean_running or 0.0), "on average"),
        value(f"{pool.preemptions:,}", plural(pool.preemptions, "preemption")),
        value(f"{pool.block_copies:,}", "copied " + plural(pool.block_copies, "block")),
    ]


def _allocations(report: RunReport, width: int, glyphs: Glyphs) -> list[Text]:
    """The table of allocations, and what it says in words."""
    pool = report.pool
    assert pool is not None
    said = f"{format_percent(pool.waste, 1)} of what was allocated held no token (mean)"
    lines = [Text(line) for line in textwrap.wrap(said, width)]
    if not report.allocations:
        return lines
    if width >= TABLE_WIDTH:
        header = f"{'allocation':<11}{'a sequence':>14}{'held (mean)':>13}{'at peak':>10}{'used':>8}{'fit in pool':>13}"
        lines += [Text(), Text(header, "dim")]
        lines += [_allocation(item) for item in report.allocations]
    else:
        lines.append(Text())
        for item in report.allocations:
            lines += flow(_in_words(item), width, glyphs.separator, glyphs.ellipsis)
    by_policy = {item.policy: item for item in report.allocations}
    if "max" in by_policy and "paged" in by_policy:
        sentence = contiguous_sentence(by_policy, pool)
        lines += [Text(), *(Text(line) for line in textwrap.wrap(sentence, width))]
    return lines


def contiguous_sentence(by_policy: dict[str, Allocation], pool: Pool) -> str:
    """What the same run would have taken under contiguous allocation, in words."""
    worst, best = by_policy["max"], by_policy.get("oracle")
    least = ""
    if best is not None:
        least = (
            f", and {format_bytes(best.peak_bytes)} or {best.sequences_that_fit:,} if all lengths were known in advance"
        )
    fit = worst.sequences_that_fit
    return (
        f"The same run under contiguous allocation: {format_bytes(worst.peak_bytes)} at its peak instead of "
        f"{format_bytes(pool.peak_bytes)}, or {fit or 'no'} {plural(fit, 'sequence')} at a time in this pool "
        f"instead of {by_policy['paged'].sequences_that_fit:,}{least}."
    )


def _in_words(item: Allocation) -> list[Text]:
    return [
        named(item.policy, f"{item.tokens_per_sequence:,.0f} tokens a sequence"),
        value(format_bytes(item.mean_bytes), "held"),
        value(format_bytes(item.peak_bytes), "at peak"),
        value(format_percent(item.utilisation, 1), "used"),
        value(f"{item.sequences_that_fit:,}", "fit in the pool"),
    ]


def _allocation(item: Allocation) -> Text:
    style = LIVE if item.policy == "paged" else ""
    return Text(
        f"{item.policy:<11}{item.tokens_per_sequence:>7,.0f} tokens{format_bytes(item.mean_bytes):>13}"
        f"{format_bytes(item.peak_bytes):>10}{format_percent(item.utilisation, 1):>8}"
        f"{item.sequences_that_fit:>13,}",
        style,
    )


def _sharing(sharing: Sharing) -> list[Text]:
    return [
        value(format_percent(sharing.saved, 1), "of the blocks saved"),
        value(format_percent(sharing.in_requests, 1), "by samples and beams"),
        value(format_percent(sharing.by_prefixes, 1), "by prefixes"),
        named("prefix hits", format_percent(sharing.prefix_hits)),
        Text.assemble("peak without sharing ", (format_bytes(sharing.peak_bytes_without), "bold")),
    ]


_PHASES = {
    "prompts": "with prompts",
    "decoding": "decoding only",
    "tail": "tail, nothing waits",
}


def _phases(report: RunReport, width: int, glyphs: Glyphs) -> list[Text]:
    lines: list[Text] = []
    for phase in report.phases:
        prompts, outputs = format_rate(phase.prompt_tokens_per_s), format_rate(phase.output_tokens_per_s)
        share, seconds = format_percent(phase.share), format_seconds(phase.seconds)
        if width >= TABLE_WIDTH:
            rates = f"{seconds:>9}   in {prompts:>6}   out {outputs:>6} tok/s"
            lines.append(Text.assemble(f"{_PHASES[phase.name]:<21}", (f"{share:>5}", "bold"), rates))
            continue
        items = [named(_PHASES[phase.name], share), Text(seconds), named("in", prompts), named("out", outputs)]
        lines += flow([*items, Text("tok/s")], width, glyphs.separator, glyphs.ellipsis)
    return lines


def _steps(report: RunReport) -> list[Text]:
    whole = report.head.generating_s
    assert report.tokens is not None
    parts = sorted(report.step_parts_s.items(), key=lambda part: (part[0] == "other", -part[1]))
    shares = [named(part, format_percent(seconds / whole, 1)) for part, seconds in parts if whole and seconds > 0]
    return [Text(f"{report.tokens.steps:,}", "bold"), *shares]


def _memory(report: RunReport, width: int, glyphs: Glyphs) -> list[Text]:
    most = max((owner.bytes for owner in report.memory), default=0)
    bar = max(min(width - MEMORY_TEXT, 24), 0)
    styles = {"KV": LIVE, "weights": CACHED, "other": "dim"}
    lines = []
    for owner in report.memory:
        filled = round(bar * owner.bytes / most) if most else 0
        lines.append(
            Text.assemble(
                f"{owner.owner:<12}",
                (f"{format_bytes(owner.bytes):>8} ", "bold"),
                (glyphs.pool[0] * filled, styles.get(owner.owner, WASTED)),
                " " * (bar - filled),
                (f" {owner.how}" if width >= MEMORY_TEXT else "", "dim"),
            )
        )
    return lines


def _timeline(r: Recording, width: int, glyphs: Glyphs) -> list[Text]:
    """Series over the time of the run, each scaled to its own largest value."""
    wide = width >= TABLE_WIDTH
    cells = width - SERIES_LABEL - (SERIES_FIGURE if wide else 0)
    if not glyphs.levels:
        return []
    live = r.column("live_blocks") * r.by_session("bytes_per_block")
    series: list[tuple[str, NDArray[np.float64], str, str]] = [
        ("KV in use", live, LIVE, f"to {format_bytes(float(np.nanmax(live)))}"),
        ("running", r.column("running"), LIVE, f"to {np.nanmax(r.column('running')):,.0f}"),
        ("waiting", r.column("waiting"), "dim", f"to {np.nanmax(r.column('waiting')):,.0f}"),
        ("waste", r.column("waste"), WASTED, f"to {format_percent(_most(r.column('waste')), 1)}"),
        ("shared", r.column("sharing_saved"), CACHED, f"to {format_percent(_most(r.column('sharing_saved')), 1)}"),
        ("out", rate(r, "output_tokens"), "", f"to {format_rate(_most(rate(r, 'output_tokens')) or 0.0)} tok/s"),
    ]
    lines = [
        Text.assemble(
            f"{name:<{SERIES_LABEL}}",
            (_levels(resample(r, values, cells), glyphs), style),
            (f" {figure}" if wide else "", "dim"),
        )
        for name, values, style, figure in series
    ]
    end = format_duration(r.elapsed_s)
    axis = f"{'':<{SERIES_LABEL}}{format_duration(float(r.column('start_s')[0]))}"
    return [*lines, Text(f"{axis}{end:>{SERIES_LABEL + cells - len(axis)}}", "dim")]


def _most(values: NDArray[np.float64]) -> float | None:
    known = values[~np.isnan(values)]
    return float(known.max()) if len(known) else None


def _levels(values: NDArray[np.float64], glyphs: Glyphs) -> str:
    top = _most(values) or 0.0
    levels, last = glyphs.levels, len(glyphs.levels) - 1
    return "".join(
        " " if np.isnan(v) else levels[min(int(v / top * len(levels)), last) if top else 0] for v in values.tolist()
    )


def _plan(report: RunReport, width: int) -> list[Text]:
    """What was planned beside what came; ratios only of a run that is done."""
    if not report.plan:
        return []
    done, head = report.head.status == "finished", report.head
    wide = width >= TABLE_WIDTH - 10
    header = ("planned", "came", "planned / came") if done else ("planned", "so far", "")
    columns = f"{'':<16}{header[0]:>12}{header[1]:>12}{header[2]:>16}" if wide else " / ".join(header[:2])
    lines = [Text(columns, "dim")]
    for line in report.plan:
        planned, came = (_quantity(number, line.unit) for number in (line.planned, line.measured))
        ratio = "" if line.ratio is None or not done else f"{line.ratio:.2f}"
        off = line.ratio is not None and not 0.7 <= line.ratio <= 1.3
        name = line.quantity.removesuffix("_s").removesuffix("_bytes").replace("_", " ")
        style = ALARM if off else "bold"
        if wide:
            lines.append(Text.assemble(f"{name:<16}{planned:>12}{came:>12}", (f"{ratio:>16}", style)))
        else:
            lines += [Text(f"{name} {planned} / {came}"), Text(f"  {ratio}", style)]
    if head.processes > 1:
        note = f"It took {head.processes} processes: what was generated again counts again."
        lines += [Text(text, "dim") for text in textwrap.wrap(note, width)]
    return lines


def _quantity(number: float, unit: str) -> str:
    if unit == "bytes":
        return format_bytes(number)
    return format_seconds(number) if unit == "s" else f"{number:,.0f}"
