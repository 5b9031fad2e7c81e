"""The charts of a report's page, drawn with matplotlib into SVG that takes its colours and its font from the page."""

import io
import math
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pagedgen.stats.recording import COLUMNS, INDEX, Recording, kinds
from pagedgen.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Sizes are in the units of the picture, which are pixels when it is shown WIDTH pixels wide.
WIDTH, LEFT, RIGHT, TOP, BOTTOM = 560, 68, 18, 8, 24
PLOT, HEADED = 190, 26
BAR, LABELS, AMOUNTS = 27, 96, 84
# The colours of the page, as its variables are called. In the picture each first is a colour that nothing else has.
COLORS = ("paper", "ink", "muted", "grid", "live", "wasted", "cached", "free", *(f"hue{i}" for i in range(1, 9)))
_SENTINELS = {name: f"#fe01{i:02x}" for i, name in enumerate(COLORS)}
_SENTINEL = re.compile("#fe01([0-9a-f]{2})")
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.size": 12,
    "text.color": _SENTINELS["ink"],
    "axes.edgecolor": _SENTINELS["muted"],
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.axisbelow": True,
    "axes.titlesize": 12,
    "axes.titlelocation": "left",
    "axes.titlepad": 6,
    "axes.xmargin": 0,
    "axes.ymargin": 0,
    "figure.facecolor": "none",
    "grid.color": _SENTINELS["grid"],
    "grid.linewidth": 1,
    "xtick.color": _SENTINELS["muted"],
    "xtick.labelcolor": _SENTINELS["ink"],
    "ytick.labelcolor": _SENTINELS["ink"],
    "ytick.left": False,
    "ytick.major.pad": 6,
    "lines.linewidth": 1.8,
}


class Timeline:
    """A recording's intervals on the axis of time, merged where there are more than can be seen.

    recording: the merged one. until: float64 [N], where each interval ends on the axis: where the next one begins, when
    that is so near that the gap would not show. borders: where later processes of the run began.
    """

    def __init__(self, recording: Recording, points: int) -> None:
        end = recording.column("end_s")
        self.start, self.end = float(recording.column("start_s").min()), float(end.max())
        self.recording = r = merged(recording, points)
        start, self.until, session = r.column("start_s"), r.column("end_s").copy(), r.column("session")
        near = (session[1:] == session[:-1]) & (start[1:] - self.until[:-1] <= (self.end - self.start) / 150)
        self.until[:-1][near] = start[1:][near]
        self.borders = tuple(session.offset_s for session in r.sessions[1:])

    def rate(self, name: str) -> NDArray[np.float64]:
        """A column of sums by the second; NaN where no time passed."""
        seconds = self.until - self.recording.column("start_s")
        result = np.full(len(seconds), np.nan)
        np.divide(self.recording.column(name), seconds, out=result, where=seconds > 0)
        return result

    def steps(self, values: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """`values` with NaN between intervals that do not meet, and the edges of all of these."""
        starts = self.recording.column("start_s")
        edges = np.stack([starts, self.until], axis=1).ravel()
        both = np.stack([values, np.full(len(values), np.nan)], axis=1).ravel()[:-1]
        keep = np.ones(len(both), bool)
        keep[1::2] = starts[1:] > self.until[:-1]
        return both[keep], np.append(edges[:-1][keep], edges[-1])


def merged(r: Recording, points: int) -> Recording:
    """The recording with neighbours within a process merged, always as many, so that no more than about `points` are
    left: means stay means over time, and peaks peaks."""
    session = r.column("session")
    begins = np.flatnonzero(np.append(True, np.diff(session) != 0))
    place = np.arange(len(session)) - np.repeat(begins, np.diff(np.append(begins, len(session))))
    first = np.flatnonzero(place % math.ceil(len(session) / points) == 0)
    sums = np.add.reduceat(r.sums, first, axis=0)
    peaks = kinds("peak")
    sums[:, peaks] = np.maximum.reduceat(r.sums[:, peaks], first, axis=0)
    last = np.append(first[1:], len(r.sums)) - 1
    for name, kind in COLUMNS.items():
        if kind in ("first", "last"):
            sums[:, INDEX[name]] = r.sums[first if kind == "first" else last, INDEX[name]]
    return replace(r, sums=sums)


@dataclass(frozen=True, slots=True)
class Series:
    """What is drawn over time. color: of COLORS. values: float64 by the intervals of the timeline; NaN is a gap."""

    color: str
    values: NDArray[np.float64]
    timeline: Timeline
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes: `areas` stacked upon each other, `lines` over them. title: stands above it. top: where its axis
    ends; None is a little above what is drawn. level: a value that gets a line of its own where the axis reaches it."""

    format: Callable[[float], str]
    ticks: Callable[[float], Sequence[float]]
    areas: Sequence[Series] = ()
    lines: Sequence[Series] = ()
    title: str = ""
    top: float | None = None
    log: bool = False
    level: float | None = None
    height: int = PLOT

    @property
    def peak(self) -> float:
        """The most that is drawn; 0 when nothing is."""
        drawn = [series.values for series in self.lines]
        if self.areas:
            drawn.append(np.sum([series.values for series in self.areas], axis=0))
        finite = [values[np.isfinite(values)] for values in drawn]
        return float(max((values.max() for values in finite if len(values)), default=0.0))


def over_time(name: str, description: str, panels: Sequence[Panel], *, borders: bool = True) -> str:
    """The panels below each other over one axis of time, as SVG. name: tells the picture from the others on the page;
    description: for those who do not see it. borders: whether to mark where later processes began."""
    timelines = [series.timeline for panel in panels for series in (*panel.areas, *panel.lines)]
    start, end = min(t.start for t in timelines), max(t.end for t in timelines)
    marks = sorted({mark for t in timelines for mark in t.borders if borders and start < mark < end})
    heads = [HEADED if panel.title else TOP for panel in panels]
    height = sum(heads) + sum(panel.height for panel in panels) + BOTTOM

    def paint(figure: "Figure") -> None:
        y = 0
        for panel, head in zip(panels, heads, strict=True):
            y += head + panel.height
            box = (LEFT / WIDTH, 1 - y / height, 1 - (LEFT + RIGHT) / WIDTH, panel.height / height)
            ax = figure.add_axes(box)
            _draw_panel(ax, panel)
            _draw_time(ax, start, end, labels=panel is panels[-1])
            for mark in marks:
                ax.axvline(mark, color=_SENTINELS["muted"], linewidth=1.2, linestyle=(0, (2, 2)))

    return _svg(name, description, height, paint)


def bars(name: str, description: str, items: Sequence[tuple[str, float, str, str]]) -> str:
    """Horizontal bars from the top down, as SVG. items: label, value, the value in words, colour."""
    height = BAR * len(items) + 2 * TOP
    top = max(value for _, value, _, _ in items) or 1.0

    def paint(figure: "Figure") -> None:
        ax = figure.add_axes((LABELS / WIDTH, TOP / height, 1 - (LABELS + AMOUNTS) / WIDTH, 1 - 2 * TOP / height))
        ax.set_axis_off()
        ax.set_xlim(0, top)
        ax.set_ylim(len(items) - 0.5, -0.5)
        for place, (label, value, words, color) in enumerate(items):
            ax.barh(place, value, height=0.66, color=_SENTINELS[color], linewidth=0)
            ax.annotate(label, (0, place), (-8, 0), textcoords="offset points", ha="right", va="center")
            ax.annotate(words, (value, place), (6, 0), textcoords="offset points", ha="left", va="center")

    return _svg(name, description, height, paint)


def _draw_panel(ax: "Axes", panel: Panel) -> None:
    peak = panel.peak or 1.0
    if panel.log:
        drawn = np.concatenate([series.values for series in panel.lines])
        least = float(drawn[drawn > 0].min())
        ax.set_yscale("log")
        ax.set_ylim(least / 1.3, peak * 1.3)
        ticks = log_ticks(least, peak)
    else:
        top = panel.top if panel.top is not None else peak * 1.06
        ax.set_ylim(0, top)
        ticks = [tick for tick in panel.ticks(top) if tick <= top * 1.0001]
    ax.set_yticks(ticks, [panel.format(tick) for tick in ticks])
    ax.minorticks_off()
    ax.grid(axis="y")
    if panel.title:
        ax.set_title(panel.title)
    # Each area goes down to 0 and is painted over by those below it, so that no seams show between them.
    totals = np.cumsum([series.values for series in panel.areas], axis=0) if panel.areas else ()
    for series, total in reversed(list(zip(panel.areas, totals, strict=True))):
        values, edges = series.timeline.steps(total)
        ax.stairs(values, edges, fill=True, color=_SENTINELS[series.color], linewidth=0)
    for series in panel.lines:
        values, edges = series.timeline.steps(series.values)
        line = (0, (4, 2)) if series.dashed else "-"
        if panel.areas:  # a line stands out from the areas behind it
            ax.stairs(values, edges, baseline=None, color=_SENTINELS["paper"], linewidth=4)
        ax.stairs(values, edges, baseline=None, color=_SENTINELS[series.color], linewidth=1.8, linestyle=line)
    if panel.level is not None:
        ax.axhline(panel.level, color=_SENTINELS["ink"], linewidth=1.2, linestyle=(0, (1, 1.5)))


def _draw_time(ax: "Axes", start: float, end: float, labels: bool) -> None:
    scale, unit = (1.0, "s") if end < 120 else (60.0, "min") if end < 7200 else (3600.0, "h")
    ticks = [tick * scale for tick in _nice_ticks(start / scale, end / scale, 6)]
    ax.set_xlim(start, end)
    ax.set_xticks(ticks, [f"{tick / scale:g} {unit}" for tick in ticks] if labels else [])


def _nice_ticks(low: float, high: float, count: int) -> list[float]:
    """At most `count` + 1 multiples of 1, 2 or 5 times a power of ten."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.9999)
    return [round(i * step, 12) for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def number_ticks(top: float) -> list[float]:
    return _nice_ticks(0.0, top, 5)


def count_ticks(top: float) -> list[float]:
    """Of things that are whole."""
    return [tick for tick in _nice_ticks(0.0, top, 5) if tick == int(tick)]


def byte_ticks(top: float) -> list[float]:
    """Multiples of a power of two, which are round numbers of KiB, MiB, ..."""
    step = 2.0 ** max(math.ceil(math.log2(top / 5)), 0)
    return [i * step for i in range(int(top / step) + 1)]


def log_ticks(least: float, most: float) -> list[float]:
    """Powers of two, evenly spaced: about five of them."""
    first, last = math.ceil(math.log2(least / 1.3)), math.floor(math.log2(most * 1.3))
    step = max(math.ceil((last - first) / 5), 1)
    return [2.0**i for i in range(first, last + 1, step)]


def format_number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:g}"


def format_share(value: float) -> str:
    return f"{100 * value:g}%"


def format_axis_bytes(value: float) -> str:
    return format_bytes(value) if value else "0"


def _svg(name: str, description: str, height: int, paint: Callable[["Figure"], None]) -> str:
    # Matplotlib takes most of a second to import, and only the page needs it.
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context():
        # Whatever the user's own matplotlibrc says, the same run gives the same page.
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE | {"svg.hashsalt": name})
        figure = Figure(figsize=(WIDTH / 72, height / 72))
        paint(figure)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return _for_page(buffer.getvalue(), name, description)


def _for_page(picture: str, name: str, description: str) -> str:
    """The picture as an element of the page: its ids like no other's, its colours the page's, nothing that is not
    needed."""
    root = ET.fromstring(picture)
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        element.text, element.tail = (text if text and text.strip() else None for text in (element.text, element.tail))
        for key, value in list(element.attrib.items()):
            del element.attrib[key]
            element.set(key.rpartition("}")[2], value)
    for parent in root.iter():
        for child in [child for child in parent if child.tag in ("metadata", "style")]:
            parent.remove(child)
    text = ET.tostring(root, "unicode")
    used = set(re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', text))
    _clean(root, name, {first or second for first, second in used})
    box = root.get("viewBox", "")
    root.attrib.clear()
    root.attrib.update({"class": "chart", "viewBox": box, "role": "img", "aria-label": description})
    text = ET.tostring(root, "unicode")
    return _SENTINEL.sub(lambda found: f"var(--{COLORS[int(found[1], 16)]})", text)


def _clean(root: ET.Element, name: str, used: set[str]) -> None:
    for element in root.iter():
        attributes = element.attrib
        if attributes.get("id") not in used:
            attributes.pop("id", None)
        if attributes.get("transform", "").startswith("rotate(-0 "):
            del attributes["transform"]
        for key, value in attributes.items():
            attributes[key] = _shorter(key, value, name)


def _shorter(key: str, value: str, name: str) -> str:
    if key == "id":
        return f"{name}-{value}"
    if key in ("href", "clip-path"):
        return value.replace("#", f"#{name}-")
    if key == "style":  # the font is the page's; older versions of matplotlib write `font`, later ones `font-family`
        return re.sub(r"font: ([\d.]+px) [^;]*;?", r"font-size: \1;", re.sub(r"font-family:[^;]*;? ?", "", value))
    if key == "d":
        return _path(value)
    return f"{float(value):.1f}" if key in ("x", "y") else value


def _path(d: str) -> str:
    """The same path to a tenth of a unit. Most of it runs along the axes, where one coordinate says enough."""
    parts, x, y = [], "", ""
    for command, points in re.findall(r"([MLCQz])([^MLCQz]*)", d):
        numbers = [f"{float(number):.1f}".removesuffix(".0") for number in points.split()]
        if command == "L" and numbers == [x, y]:
            continue
        if command == "L" and numbers[0] == x:
            parts.append(f"V{numbers[1]}")
        elif command == "L" and numbers[1] == y:
            parts.append(f"H{numbers[0]}")
        else:
            parts.append(command + " ".join(numbers))
        if numbers:
            x, y = numbers[-2:]
    return "".join(parts)
