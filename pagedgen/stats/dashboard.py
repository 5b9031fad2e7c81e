"""The live display's picture: a snapshot of the run as lines of text that fit a terminal."""

from dataclasses import dataclass

from rich.text import Text

from pagedgen.stats.text import (
    Glyphs,
    fit,
    flow,
    format_duration,
    format_percent,
    format_rate,
    format_row_rate,
    plural,
    sparkline,
    split_width,
)
from pagedgen.stats.types import GENERATING, StatsSnapshot, StepSample
from pagedgen.units import format_bytes

LABEL_WIDTH = 8
MAX_WIDTH = 140
# Hues that colour-blind readers tell apart (Okabe and Ito, 2008), dark enough for a white background and bright enough
# for a black one.
LIVE, WASTED, CACHED, FREE = "#009E73", "#D55E00", "#2F7FC1", "dim"
POOL_STYLES = (LIVE, WASTED, CACHED, FREE)
ALARM = f"bold {WASTED}"


@dataclass(frozen=True, slots=True)
class Frame:
    """Where a picture goes: the terminal's cells, and what its console can show."""

    width: int
    height: int
    glyphs: Glyphs

    @property
    def content(self) -> int:
        """Cells right of the labels."""
        return max(self.width - LABEL_WIDTH, 1)

    def flow(self, *items: Text) -> list[Text]:
        return flow(items, self.content, self.glyphs.separator, self.glyphs.ellipsis)

    def section(self, label: str, lines: list[Text]) -> list[Text]:
        """The lines with the label before the first one."""
        heads = [label, *[""] * (len(lines) - 1)]
        pairs = zip(heads, lines, strict=True)
        return [Text.assemble((head.ljust(LABEL_WIDTH), "dim"), line) for head, line in pairs]


def value(number: str, label: str, style: str = "bold") -> Text:
    """A number that stands out and what it counts: **64** running."""
    return Text.assemble((number, style), f" {label}")


def named(label: str, number: str, style: str = "bold") -> Text:
    """What is measured, then its number: waste **3.9%**."""
    return Text.assemble(f"{label} ", (number, style))


def dashboard(s: StatsSnapshot, width: int, height: int, glyphs: Glyphs) -> list[Text]:
    """The picture of the run: at most `height` lines, none wider than `width` cells."""
    frame = Frame(max(min(width, MAX_WIDTH), 1), max(height, 1), glyphs)
    groups = [_header(s, frame)]
    if s.last is None:
        groups[0] += [_status(s, frame)]
    else:
        tokens = frame.section("tokens", _tokens(s, frame)) + frame.section("seqs", _sequences(s, s.last, frame))
        groups += [frame.section("rows", _rows(s, frame)), tokens, frame.section("KV pool", _pool(s, s.last, frame))]
    lines = [line for group in groups for line in group]
    if len(lines) + len(groups) <= frame.height:
        lines = [line for group in groups for line in (Text(), *group)]
    return [fit(line, frame.width, glyphs.ellipsis) for line in lines[: frame.height]]


def _spinner(s: StatsSnapshot, frame: Frame) -> str:
    frames = frame.glyphs.spinner
    return frames[int(s.elapsed * 8) % len(frames)]


def _status(s: StatsSnapshot, frame: Frame) -> Text:
    """What the run does before its first step."""
    return Text.assemble((_spinner(s, frame), LIVE), f" {s.phase or 'starting'}  ", (format_duration(s.phase_s), "dim"))


def _header(s: StatsSnapshot, frame: Frame) -> list[Text]:
    if s.info is None:
        return []
    items = [Text(s.info.model, "bold"), Text(f"{s.info.device} {s.info.dtype}"), Text(f"{s.info.kernels} kernels")]
    if s.last is not None and s.phase not in (None, GENERATING):
        items.insert(1, Text(f"{_spinner(s, frame)} {s.phase}", LIVE))
    return flow(items, frame.width, frame.glyphs.separator, frame.glyphs.ellipsis)


def _rows(s: StatsSnapshot, frame: Frame) -> list[Text]:
    lines = []
    if s.progress is None or s.rows_total is None:
        lines.append(value(f"{s.rows_done:,}", "rows done"))
    else:
        about = "" if s.rows_total_exact else "~"
        tail = Text.assemble(
            (f"  {s.rows_done:,}", "bold"), f"/{about}{s.rows_total:,}", (f" {format_percent(s.progress):>4}", "bold")
        )
        left = s.rows_total - s.rows_done
        done, todo = split_width((s.rows_done, max(left, 0)), max(frame.content - tail.cell_len, 0))
        lines.append(Text.assemble((frame.glyphs.done * done, LIVE), (frame.glyphs.todo * todo, FREE), tail))
    # The estimate is left out once nothing is left to wait for.
    eta = [] if s.eta == 0 else [named("ETA", "--:--" if s.eta is None else format_duration(s.eta))]
    elapsed = named("elapsed", format_duration(s.elapsed))
    failed = [Text(f"{s.failed:,} failed", ALARM)] if s.failed else []
    return lines + frame.flow(value(*format_row_rate(s.rows_rate).split(" ", 1)), elapsed, *eta, *failed)


def _tokens(s: StatsSnapshot, frame: Frame) -> list[Text]:
    lines = frame.flow(
        named("in", f"{format_rate(s.prompt_rate)}/s"),
        named("out", f"{format_rate(s.output_rate)}/s"),
    )
    # A reserve keeps the line in its place while the numbers before it change their lengths.
    room = frame.content - max(lines[-1].cell_len, 24) - 2
    if len(lines) == 1 and room >= 10 and frame.glyphs.levels and len(s.output_history) > 1:
        seconds = min(room - len(" last 999 s"), len(s.output_history))
        if seconds >= 8:
            picture = sparkline(s.output_history, seconds, frame.glyphs.levels)
            gap = " " * (max(24 - lines[0].cell_len, 0) + 2)
            lines[0] = Text.assemble(lines[0], gap, (picture, LIVE), (f" last {seconds} s", "dim"))
    return lines


def _sequences(s: StatsSnapshot, last: StepSample, frame: Frame) -> list[Text]:
    return frame.flow(
        value(f"{last.running:,}", "running"),
        value(f"{last.waiting:,}", "waiting"),
        value(f"{s.preemptions:,}", plural(s.preemptions, "preemption")),
    )


def _pool(s: StatsSnapshot, last: StepSample, frame: Frame) -> list[Text]:
    slots = pool_slots(last)
    total = last.total_blocks * last.block_size
    size = s.info.kv_bytes if s.info else 0
    used = last.used_blocks / last.total_blocks if last.total_blocks else 0.0
    tail = Text(f"  {format_bytes(size)}" if size else f"  {last.total_blocks:,} blocks", "bold")
    widths = split_width(slots, max(frame.content - tail.cell_len, 0))
    styles = zip(frame.glyphs.pool, widths, POOL_STYLES, strict=True)
    bar = Text.assemble(*((glyph * cells, style) for glyph, cells, style in styles), tail)
    legend = []
    for name, glyph, style, count in zip(
        ("live", "wasted", "cached", "free"), frame.glyphs.pool, POOL_STYLES, slots, strict=True
    ):
        share = count / total if total else 0.0
        amount = format_bytes(size * share) if size else format_percent(share)
        legend.append(Text.assemble((glyph, style), f" {name} ", (amount, "bold")))
    return [
        bar,
        *flow(legend, frame.content, "  ", frame.glyphs.ellipsis),
        *frame.flow(
            named("in use", format_percent(used)),
            named("waste", format_percent(last.waste, 1)),
            named("sharing saved", format_percent(last.sharing_saved, 1)),
            named("prefix hits", format_percent(s.prefix_hit_rate)),
        ),
    ]


def pool_slots(last: StepSample) -> tuple[int, int, int, int]:
    """Token slots of the KV pool that are live (hold a token in use), wasted (allocated, empty), cached and free."""
    wasted = last.allocated_slots - last.filled_slots
    return last.filled_slots, wasted, last.cached_blocks * last.block_size, last.free_blocks * last.block_size
