"""Several runs side by side."""

from collections.abc import Callable, Sequence
from pathlib import PurePath

from rich.text import Text

from pagedgen.reports.report import RunReport
from pagedgen.stats.text import Glyphs, fit, format_duration, format_percent, format_rate
from pagedgen.units import format_bytes

LABEL_WIDTH, LEAST_COLUMN, MOST_COLUMN = 26, 13, 24
MISSING = "-"


def comparison_rows(reports: Sequence[RunReport]) -> list[tuple[str, list[str]]]:
    """What is compared, and its figure in each run; "-" where it is not known."""

    def allocation(policy: str, figure: Callable[..., str]) -> Callable[[RunReport], str]:
        def of(r: RunReport) -> str:
            found = [item for item in r.allocations if item.policy == policy]
            return figure(found[0]) if found else MISSING

        return of

    def pool(figure: Callable[..., str]) -> Callable[[RunReport], str]:
        return lambda r: MISSING if r.pool is None else figure(r.pool)

    def sharing(figure: Callable[..., str]) -> Callable[[RunReport], str]:
        return lambda r: MISSING if r.sharing is None else figure(r.sharing)

    def tokens(figure: Callable[..., str]) -> Callable[[RunReport], str]:
        return lambda r: MISSING if r.tokens is None else figure(r.tokens)

    figures: list[tuple[str, Callable[[RunReport], str]]] = [
        ("status", lambda r: r.head.status),
        ("model", lambda r: PurePath(r.head.model).name),
        ("device", lambda r: f"{r.head.device} {r.head.dtype}".strip() or MISSING),
        ("rows done", lambda r: f"{r.rows.done:,}"),
        ("rows not ok", lambda r: f"{sum(r.rows.statuses.values()) - r.rows.statuses.get('ok', 0):,}"),
        ("time", lambda r: format_duration(r.head.elapsed_s)),
        ("steps", tokens(lambda t: f"{t.steps:,}")),
        ("prompt tokens computed", tokens(lambda t: f"{t.prompt:,}")),
        ("output tokens", tokens(lambda t: f"{t.output:,}")),
        ("output tok/s", tokens(lambda t: format_rate(t.output_per_s))),
        ("KV pool", pool(lambda p: format_bytes(p.bytes))),
        ("block size", pool(lambda p: f"{p.block_size}")),
        ("KV peak", pool(lambda p: format_bytes(p.peak_bytes))),
        ("KV mean", pool(lambda p: format_bytes(p.mean_bytes))),
        ("waste", pool(lambda p: format_percent(p.waste, 1))),
        ("running, mean", pool(lambda p: format_rate(p.mean_running or 0.0))),
        ("preemptions", pool(lambda p: f"{p.preemptions:,}")),
        ("sharing saved", sharing(lambda s: format_percent(s.saved, 1))),
        ("by samples and beams", sharing(lambda s: format_percent(s.in_requests, 1))),
        ("by prefixes", sharing(lambda s: format_percent(s.by_prefixes, 1))),
        ("prefix hits", sharing(lambda s: format_percent(s.prefix_hits))),
    ]
    for policy in ("oracle", "pow2", "max"):
        figures.append((f"{policy} would hold (mean)", allocation(policy, lambda a: format_bytes(a.mean_bytes))))
    return [(name, [figure(report) for report in reports]) for name, figure in figures]


def comparison_lines(reports: Sequence[RunReport], width: int, glyphs: Glyphs) -> list[Text]:
    """A table with the runs as columns, as many beside one another as the width takes, the others below."""
    each = max((width - LABEL_WIDTH) // len(reports), LEAST_COLUMN)
    column = min(each, MOST_COLUMN)
    at_a_time = max((width - LABEL_WIDTH) // column, 1)
    lines: list[Text] = []
    for first in range(0, len(reports), at_a_time):
        some = reports[first : first + at_a_time]
        names = [fit(Text(PurePath(r.head.output).name), column - 1, glyphs.ellipsis).plain for r in some]
        lines += [Text()] if lines else []
        lines.append(Text(" " * LABEL_WIDTH + "".join(f"{name:>{column}}" for name in names), "bold"))
        for label, figures in comparison_rows(some):
            cells = (fit(Text(figure), column - 1, glyphs.ellipsis).plain for figure in figures)
            line = "".join(f"{cell:>{column}}" for cell in cells)
            lines.append(Text.assemble((f"{label:<{LABEL_WIDTH}}", "dim"), line))
    return lines
