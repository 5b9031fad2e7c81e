"""The figure beside the table of `benchmarks.paper`."""

import statistics
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

from benchmarks.paper_found import PUBLISHED_RATIO, PUBLISHED_SAVED, PUBLISHED_USE, WIDTHS, Found
from benchmarks.paper_lengths import CHAT, SHORT

# Okabe and Ito's colours, which most people with a colour deficiency tell apart.
PUBLISHED, CHATS, SHORTS, INK = "#999999", "#0072B2", "#E69F00", "#333333"
COLOURS = {CHAT.name: CHATS, SHORT.name: SHORTS}
BAR = 0.26
STYLE: dict[Any, Any] = {  # matplotlib names its keys one by one
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "svg.fonttype": "none",
    "legend.frameon": False,
}


def draw(found: Found, path: Path) -> None:
    """Four panels, in the format that the path's suffix names."""
    with pyplot.rc_context(STYLE):
        figure, ((use, sharing), (speed, waste)) = pyplot.subplots(2, 2, figsize=(10, 7.2))
        figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.12)
        _draw_use(use, found)
        _draw_sharing(sharing, found)
        _draw_speed(speed, found)
        _draw_waste(waste, found)
        figure.savefig(path, dpi=160)
        pyplot.close(figure)


def _label_bars(axes: Axes, at: list[float], values: list[float], form: str) -> None:
    for x, value in zip(at, values, strict=True):
        axes.annotate(form.format(value), (x, value), (0, 2), textcoords="offset points", ha="center", fontsize=7.5)


def _draw_use(axes: Axes, found: Found) -> None:
    names = list(PUBLISHED_USE)
    series = [("published", PUBLISHED, [100 * value for value in PUBLISHED_USE.values()])]
    for workload in (CHAT, SHORT):
        of_pool = {name: found.policies[workload.name]["buddy"][name]["pool"] for name in names[:-1]}
        values = [100 * value for value in (*of_pool.values(), found.use[workload.name][names[-1]])]
        series.append((workload.name, COLOURS[workload.name], values))
    for offset, (label, colour, values) in enumerate(series, -1):
        at = [i + offset * BAR for i in range(len(names))]
        axes.bar(at, values, BAR * 0.92, color=colour, label=label)
        _label_bars(axes, at, values, "{:.0f}")
    axes.set_xticks(range(len(names)), [*names[:-1], "paged,\nof its blocks"])
    axes.set_ylim(0, 108)
    axes.set_ylabel("% of the memory")
    axes.set_title("KV memory that holds tokens")
    axes.legend(loc="upper left")


def _draw_sharing(axes: Axes, found: Found) -> None:
    ticks = []
    for place, ((kind, workload), (least, most)) in enumerate(PUBLISHED_SAVED.items()):
        at = [place + (i - 1) * BAR for i in range(len(WIDTHS))]
        axes.bar(place, 100 * (most - least), 3.3 * BAR, 100 * least, color=PUBLISHED, alpha=0.35, linewidth=0)
        simulated = [100 * value for value in found.saved[kind][workload].values()]
        axes.plot(at, simulated, "o", color=COLOURS[workload], markerfacecolor="white", markersize=7)
        real = found.beams_real.get(workload) if kind == "beams" else None
        if real:
            axes.plot(at, [100 * value for value in real.values()], "o", color=COLOURS[workload], markersize=7)
        highest = [max(100 * real[n], s) if real else s for n, s in zip(WIDTHS, simulated, strict=True)]
        for x, value, count in zip(at, highest, WIDTHS, strict=True):
            axes.annotate(
                str(count), (x, value), (0, 6), textcoords="offset points", ha="center", fontsize=7.5, color=INK
            )
        ticks.append(f"{kind},\n{'chat' if workload == CHAT.name else 'short'}")
    axes.bar(0, 0, color=PUBLISHED, alpha=0.35, label="published, 2 to 6")
    axes.plot([], [], "o", color=INK, markerfacecolor="white", label="simulated 2, 4, 6")
    if found.beams_real:
        axes.plot([], [], "o", color=INK, label="real run")
    axes.set_xticks(range(len(ticks)), ticks)
    axes.set_ylim(0, 92)
    axes.set_ylabel("% of the blocks")
    axes.set_title("Blocks saved by sharing")
    axes.legend(loc="upper left")


def _draw_speed(axes: Axes, found: Found) -> None:
    policies = ["max", "pow2", "oracle"]
    ways = [("buddy", CHATS, "simulated, buddy allocator"), ("packed", "#56B4E9", "simulated, packed")]
    series = [(label, colour, [found.ratio(CHAT.name, way, p) for p in policies]) for way, colour, label in ways]
    if found.real:
        medians = [statistics.median(found.real_ratios(policy)) for policy in policies]
        series.append(("real run, packed", "#009E73", medians))
    for i, policy in enumerate(policies):
        if policy in PUBLISHED_RATIO:
            least, most = PUBLISHED_RATIO[policy]
            axes.bar(i, most - least, 3.5 * BAR, least, color=PUBLISHED, alpha=0.35, linewidth=0)
    axes.bar(0, 0, color=PUBLISHED, alpha=0.35, label="published")
    for number, (label, colour, values) in enumerate(series):
        at = [i + (number - (len(series) - 1) / 2) * BAR for i in range(len(policies))]
        axes.bar(at, values, BAR * 0.92, color=colour, label=label)
        _label_bars(axes, at, values, "{:.2f}")
    axes.axhline(1, color=INK, linewidth=0.8, linestyle=":")
    axes.set_xticks(range(len(policies)), [f"over {policy}" for policy in policies])
    axes.set_ylabel("times the throughput")
    axes.set_title("Paging over reservations in the same memory, chat")
    axes.legend(loc="upper right")


def _draw_waste(axes: Axes, found: Found) -> None:
    for workload, values in found.waste.items():
        axes.plot(list(values), [100 * value for value in values.values()], "o-", color=COLOURS[workload], markersize=4)
        size = max(values)
        axes.annotate(
            workload,
            (size, 100 * values[size]),
            (0, 7),
            textcoords="offset points",
            ha="right",
            color=COLOURS[workload],
        )
    axes.set_xscale("log", base=2)
    sizes = list(next(iter(found.waste.values())))
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.axvline(16, color=INK, linewidth=0.8, linestyle=":")
    axes.annotate("default", (16, 72), (4, 0), textcoords="offset points", fontsize=7.5, color=INK)
    axes.set_ylim(0, 80)
    axes.set_xlabel("tokens a block")
    axes.set_ylabel("% of the allocated slots")
    axes.set_title("Waste by block size, paged")
