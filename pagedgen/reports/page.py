"""A report as one HTML page that needs nothing else: for reading, for printing, and for passing on."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import PurePath

import numpy as np
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from numpy.typing import NDArray

from pagedgen.reports import charts
from pagedgen.reports.charts import Panel, Series, Timeline
from pagedgen.reports.comparison import comparison_rows
from pagedgen.reports.report import STEP_PARTS, Allocation, RunReport
from pagedgen.stats.recording import Recording
from pagedgen.stats.text import format_percent, format_rate, format_seconds
from pagedgen.units import format_bytes

# Points in time that a chart shows at most: of what is held, and of what is counted by the second, which jumps more.
POINTS, RATE_POINTS = 400, 140
# Contiguous allocation is drawn on a logarithmic axis where it takes this many times what paging takes.
LOG_RATIO = 20
HUES = 8
POLICY_COLORS = {"paged": "live", "oracle": "hue1", "pow2": "hue3", "max": "hue2"}
PART_COLORS = dict(zip((*STEP_PARTS, "other"), (f"hue{i}" for i in (3, 4, 1, 2, 7, 6, 5, 8)), strict=True))
TOTALS = ("process", "device")


@dataclass(frozen=True, slots=True)
class Key:
    """An entry of a chart's legend. kind: area, line, dashed or dotted."""

    label: str
    color: str
    value: str = ""
    kind: str = "area"


@dataclass(frozen=True, slots=True)
class Chart:
    title: str
    svg: Markup
    keys: Sequence[Key] = ()
    note: str = ""


@dataclass(frozen=True, slots=True)
class Figure:
    """A number that stands out. detail: a few words below it."""

    label: str
    value: str
    detail: str = ""


# Tells a report from other files.
MARK = '<meta name="generator" content="pagedgen stats">'


def html_page(reports: Sequence[RunReport]) -> str:
    """The page of one run, or of several side by side."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {
        "bytes": format_bytes,
        "percent": format_percent,
        "rate": format_rate,
        "seconds": format_seconds,
        "count": _count,
        "command": _command,
        "when": _when,
    }
    source = resources.files(__package__).joinpath("page.html.jinja").read_text("utf-8")
    names = [PurePath(report.head.output).name or report.head.output for report in reports]
    several = len(reports) > 1
    if several:
        names = [f"{i}. {name}" for i, name in enumerate(names, 1)]
    points = max(POINTS // max(len(reports), 1), RATE_POINTS)
    return environment.from_string(source).render(
        runs=[_run(report, names[i], f"run{i + 1}", points) for i, report in enumerate(reports)],
        comparison=comparison_rows(reports) if several else (),
        overlays=_overlays(reports, names, points) if several else (),
    )


def _run(report: RunReport, name: str, key: str, points: int) -> Mapping[str, object]:
    """What the template shows of one run. key: tells its ids from those of the others."""
    return {
        "name": name,
        "key": key,
        "report": report,
        "figures": _figures(report),
        "contiguous": _contiguous(report.allocations),
        "charts": _charts(report.recording, report, key, points) if _is_drawn(report) else (),
        "steps_each": _steps_each(report, points),
        "memory": _memory_chart(report, key) if report.memory else "",
        "totals": TOTALS,
    }


def _is_drawn(report: RunReport) -> bool:
    """Whether any time has passed in the steps of the run."""
    r = report.recording
    return r is not None and len(r.sums) > 0 and r.generating_s > 0 and r.total("step_s") > 0


def _steps_each(report: RunReport, points: int) -> int:
    """How many steps a value in a chart is the mean of, at most."""
    if report.recording is None or not _is_drawn(report):
        return 0
    return int(charts.merged(report.recording, points).column("steps").max())


def _command(command: Sequence[str]) -> str:
    return shlex.join([PurePath(command[0]).name, *command[1:]]) if command else ""


def _when(time: str | None) -> str:
    return (time or "-").replace("T", " ").replace("+00:00", " UTC")


def _count(value: float) -> str:
    return f"{value:,.0f}" if value >= 9.95 or value == int(value) else f"{value:.1f}"


def _rows_of(report: RunReport) -> str:
    total = report.rows.total
    return "" if total is None else f"of {'' if report.rows.total_is_exact else 'about '}{total:,}"


def _figures(report: RunReport) -> list[Figure]:
    rows, tokens, pool, sharing = report.rows, report.tokens, report.pool, report.sharing
    eta = f", {format_seconds(rows.eta_s)} left" if rows.eta_s else ""
    figures = [Figure("rows done", f"{rows.done:,}", _rows_of(report) + eta)]
    if tokens is None or pool is None or sharing is None:
        return figures
    seconds = format_seconds(report.head.generating_s).replace(" ", "\u00a0")
    within, between = format_percent(sharing.in_requests, 1), format_percent(sharing.by_prefixes, 1)
    saved = f"{within} in requests, {between} by prefixes" if sharing.saved else "of the blocks"
    peak = f"{format_percent(pool.peak_share)} of {format_bytes(pool.bytes)}"
    hits = f"{sharing.cached_prompt_tokens:,} prompt tokens"
    return [
        *figures,
        Figure("output", f"{format_rate(tokens.output_per_s)} tok/s", f"{tokens.output:,} tokens in {seconds}"),
        Figure("KV peak", format_bytes(pool.peak_bytes), peak),
        Figure("KV mean", format_bytes(pool.mean_bytes), f"{format_percent(pool.mean_share)} of the pool"),
        Figure("waste", format_percent(pool.waste, 1), "of the allocated slots held no token"),
        Figure("sharing saved", format_percent(sharing.saved, 1), saved),
        Figure("prefix hits", format_percent(sharing.prefix_hits, 1), hits),
    ]


def _contiguous(allocations: Sequence[Allocation]) -> str:
    """One sentence on what contiguous allocation would have taken; empty while that is not known."""
    paged = next((item for item in allocations if item.policy == "paged"), None)
    others = [item for item in reversed(allocations) if item.policy != "paged"]
    if paged is None or not others:
        return ""
    held = _either([f"{format_bytes(item.mean_bytes)} ({item.policy})" for item in others])
    fit = [_count(item.sequences_that_fit) if item.sequences_that_fit >= 1 else "not one" for item in others]
    fitting = _either([f"{count} ({item.policy})" for count, item in zip(fit, others, strict=True)])
    return (
        f"The same sequences under contiguous allocation would hold {held} instead of {format_bytes(paged.mean_bytes)},"
        f" on average; in this pool {fitting} would fit at a time instead of {_count(paged.sequences_that_fit)}."
    )


def _either(items: Sequence[str]) -> str:
    return " or ".join([", ".join(items[:-1]), items[-1]] if len(items) > 1 else items)


def _per_block(r: Recording) -> NDArray[np.float64]:
    return r.by_session("bytes_per_block")


def _charts(recording: Recording | None, report: RunReport, key: str, points: int) -> list[Chart]:
    assert recording is not None
    fine, coarse = Timeline(recording, points), Timeline(recording, min(points, RATE_POINTS))
    found = [_pool_chart(fine, report, key), _contiguous_chart(fine, report, key), _sharing_chart(fine, report, key)]
    found += [_running_chart(fine, report, key), _rate_chart(coarse, report, key), _parts_chart(coarse, report, key)]
    return [chart for chart in found if chart is not None]


def _pool_chart(t: Timeline, report: RunReport, key: str) -> Chart:
    r, pool = t.recording, report.pool
    assert pool is not None
    per_block, size = _per_block(r), float(t.recording.by_session("kv_bytes").max())
    live = r.column("filled_tokens") * per_block / r.by_session("block_size")
    wasted = np.maximum(r.column("live_blocks") * per_block - live, 0)
    cached, free = r.column("cached_blocks") * per_block, r.column("free_blocks") * per_block
    used = live + wasted + cached
    most = float(np.nanmax(used)) or size
    is_cut = size > 1.6 * most
    top = 1.25 * most if is_cut else 1.04 * size
    areas = {"live": live, "wasted": wasted, "cached": cached, "free": np.minimum(free, np.maximum(top - used, 0))}
    panel = Panel(
        charts.format_axis_bytes,
        charts.byte_ticks,
        areas=[Series(name, values, t) for name, values in areas.items()],
        top=top,
    )
    mean_wasted = pool.mean_bytes * (pool.waste or 0.0)
    free_bytes = max(pool.bytes - pool.mean_bytes - pool.mean_cached_bytes, 0.0)
    means = (pool.mean_bytes - mean_wasted, mean_wasted, pool.mean_cached_bytes, free_bytes)
    keys = [Key(name, name, format_bytes(mean)) for name, mean in zip(areas, means, strict=True)]
    note = f"The pool holds {format_bytes(size)}"
    note += "; the axis ends a little above what was in use." if is_cut else "."
    svg = charts.over_time(f"{key}-pool", "The KV pool over time", [panel])
    return Chart("The KV pool", Markup(svg), keys, note)


def _contiguous_chart(t: Timeline, report: RunReport, key: str) -> Chart | None:
    r, known = t.recording, {item.policy: item.mean_bytes for item in report.allocations}
    if len(known) < 2:
        return None
    per_token = _per_block(r) / r.by_session("block_size")
    values = {policy: r.column(f"reserved_{policy}") * per_token for policy in known if policy != "paged"}
    values = {"paged": r.column("live_blocks") * _per_block(r)} | values
    series = [
        Series(POLICY_COLORS[policy], np.where(held > 0, held, np.nan), t, dashed=policy != "paged")
        for policy, held in values.items()
    ]
    log, size = max(known.values()) > LOG_RATIO * min(known.values()), float(r.by_session("kv_bytes")[-1])
    panel = Panel(charts.format_axis_bytes, charts.byte_ticks, lines=series[::-1], log=log)
    kinds = {policy: "line" if policy == "paged" else "dashed" for policy in values}
    keys = [Key(name, POLICY_COLORS[name], format_bytes(known[name]), kind) for name, kind in kinds.items()]
    if size <= panel.peak:
        panel = replace(panel, level=size)
        keys.append(Key("the pool", "ink", format_bytes(size), "dotted"))
    svg = charts.over_time(f"{key}-contiguous", "Paged and contiguous allocation over time", [panel])
    return Chart("Beside contiguous allocation", Markup(svg), keys, "The axis is logarithmic." if log else "")


def _sharing_chart(t: Timeline, report: RunReport, key: str) -> Chart:
    r, pool, sharing = t.recording, report.pool, report.sharing
    assert pool is not None
    assert sharing is not None
    saved, within = r.column("sharing_saved"), r.column("sharing_in_requests")
    keys, areas = [Key("waste", "wasted", format_percent(pool.waste, 1), "line")], []
    if sharing.in_requests:
        areas.append(Series("hue3", within, t))
        keys.append(Key("saved in requests", "hue3", format_percent(sharing.in_requests, 1)))
    if sharing.by_prefixes:
        areas.append(Series("hue4", np.maximum(saved - within, 0), t))
        keys.append(Key("saved by prefixes", "hue4", format_percent(sharing.by_prefixes, 1)))
    waste = Series("wasted", r.column("waste"), t)
    panel = Panel(charts.format_share, charts.number_ticks, areas=areas, lines=[waste])
    svg = charts.over_time(f"{key}-sharing", "Waste and sharing saved over time", [panel])
    return Chart("Waste and sharing saved", Markup(svg), keys, "" if areas else "No block was shared.")


def _running_chart(t: Timeline, report: RunReport, key: str) -> Chart:
    r, whole = t.recording, report.recording
    assert whole is not None
    halves = [
        ("running sequences", Series("live", r.column("running"), t), _count(whole.mean("running") or 0.0)),
        ("waiting requests", Series("hue8", r.column("waiting"), t), _count(whole.mean("waiting") or 0.0)),
    ]
    return _in_halves(f"{key}-running", "Running and waiting", halves, charts.count_ticks)


def _rate_chart(t: Timeline, report: RunReport, key: str) -> Chart:
    tokens = report.tokens
    assert tokens is not None
    halves = [
        ("prompt tokens per second", Series("hue1", t.rate("prompt_tokens"), t), format_rate(tokens.prompt_per_s)),
        ("output tokens per second", Series("live", t.rate("output_tokens"), t), format_rate(tokens.output_per_s)),
    ]
    return _in_halves(f"{key}-rates", "Throughput", halves, charts.number_ticks)


def _in_halves(
    name: str, title: str, halves: Sequence[tuple[str, Series, str]], ticks: Callable[[float], Sequence[float]]
) -> Chart:
    """Quantities of different sizes, each with axes of its own. halves: what it is, over time, its mean."""
    panels = [
        Panel(charts.format_number, ticks, areas=[series], title=label, height=charts.PLOT // 2 - 17)
        for label, series, _ in halves
    ]
    svg = charts.over_time(name, " and ".join(label for label, _, _ in halves) + " over time", panels)
    return Chart(title, Markup(svg), [Key(label, series.color, mean) for label, series, mean in halves])


def _parts_chart(t: Timeline, report: RunReport, key: str) -> Chart:
    r = t.recording
    parts = {part: r.column(f"{part}_s") for part in STEP_PARTS}
    known = np.sum(list(parts.values()), axis=0)
    whole = np.maximum(t.until - r.column("start_s"), known)
    parts["other"] = whole - known
    # The largest lies at the bottom, where its edge is level with the axis.
    order = sorted(parts, key=lambda part: -report.step_parts_s[part])
    whole = np.where(whole > 0, whole, np.nan)
    areas = [Series(PART_COLORS[part], parts[part] / whole, t) for part in order]
    panel = Panel(charts.format_share, charts.number_ticks, areas=areas, top=1.0)
    total = sum(report.step_parts_s.values()) or 1.0
    keys = [Key(part, PART_COLORS[part], format_percent(report.step_parts_s[part] / total, 1)) for part in order]
    svg = charts.over_time(f"{key}-parts", "The shares of a step's parts over time", [panel])
    return Chart("Where a step's time goes", Markup(svg), keys)


def _memory_chart(report: RunReport, key: str) -> Markup:
    items = [
        (owner.owner, owner.bytes, format_bytes(owner.bytes), "hue8" if owner.owner in TOTALS else "cached")
        for owner in report.memory
    ]
    return Markup(charts.bars(f"{key}-memory", "Memory by owner", items))


def _overlays(reports: Sequence[RunReport], names: Sequence[str], points: int) -> list[Chart]:
    """The charts of several runs over each other, each from its own beginning."""
    drawn = [(i, report) for i, report in enumerate(reports) if _is_drawn(report)]
    if len(drawn) < 2:
        return []
    fine = {i: Timeline(report.recording, points) for i, report in drawn if report.recording is not None}
    coarse = {i: Timeline(report.recording, RATE_POINTS) for i, report in drawn if report.recording is not None}
    colors = {i: f"hue{i % HUES + 1}" for i in fine}
    # With more runs than hues, those that have a hue for the second time are dashed.
    keys = [Key(names[i], colors[i], kind="dashed" if i >= HUES else "line") for i in fine]

    def chart(title: str, name: str, of: Mapping[int, NDArray[np.float64]], panel: Panel) -> Chart:
        lines = [Series(colors[i], of[i], (coarse if name == "rates" else fine)[i], dashed=i >= HUES) for i in of]
        svg = charts.over_time(f"all-{name}", f"{title}, of each run", [replace(panel, lines=lines)], borders=False)
        return Chart(title, Markup(svg), keys)

    live = {i: t.recording.column("live_blocks") * _per_block(t.recording) for i, t in fine.items()}
    running = {i: t.recording.column("running") for i, t in fine.items()}
    output = {i: t.rate("output_tokens") for i, t in coarse.items()}
    saved = {i: t.recording.column("sharing_saved") for i, t in fine.items()}
    return [
        chart("KV in use", "live", live, Panel(charts.format_axis_bytes, charts.byte_ticks)),
        chart("Running sequences", "running", running, Panel(charts.format_number, charts.count_ticks)),
        chart("Output tokens per second", "rates", output, Panel(charts.format_number, charts.number_ticks)),
        chart("Sharing saved", "saved", saved, Panel(charts.format_share, charts.number_ticks)),
    ]
