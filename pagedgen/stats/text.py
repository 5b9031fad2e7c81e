"""Numbers as people read them, and lines of text that fit a width."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text


@dataclass(frozen=True, slots=True)
class Glyphs:
    """The characters a console can tell apart.

    pool: one each for the live, wasted, cached and free part of the KV pool. done, todo: the progress bar.
    levels: the sparkline's, lowest first, or empty for no sparkline. spinner: its frames.
    """

    pool: tuple[str, str, str, str]
    done: str
    todo: str
    levels: str
    spinner: str
    separator: str
    ellipsis: str

    @classmethod
    def of(cls, console: Console) -> "Glyphs":
        """Plain ASCII where the encoding has nothing else; shades where there is no colour to tell the pool's parts."""
        if not console.encoding.startswith("utf"):
            return cls(("#", "!", "=", "."), "=", "-", "", "|/-\\", ", ", "~")
        colored = console.color_system is not None and not console.no_color
        pool = ("█", "█", "█", "░") if colored else ("█", "X", "▒", "·")
        return cls(pool, "━", "─", "▁▂▃▄▅▆▇█", "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏", " · ", "…")


def format_duration(seconds: float) -> str:
    """`04:18`, `1:02:03`, `2d 03:04`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}d {hours % 24:02}:{minute:02}"
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute:02}:{second:02}"


def format_seconds(seconds: float) -> str:
    """A time that matters below the minute too: `0.8 s`, `42 s`, `04:18`."""
    if seconds >= 59.5:
        return format_duration(seconds)
    return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"


def format_rate(rate: float) -> str:
    """`1,405`, `3.4`, `0.42`."""
    if rate >= 9.95:
        return f"{rate:,.0f}"
    return f"{rate:.1f}" if rate >= 0.995 or rate == 0 else f"{rate:.2f}"


def format_row_rate(rate: float) -> str:
    """`3.4 rows/s`, or `25 rows/min` when it is below one a second."""
    return f"{format_rate(rate)} rows/s" if rate >= 0.995 or rate == 0 else f"{format_rate(rate * 60)} rows/min"


def format_percent(fraction: float | None, digits: int = 0) -> str:
    """`43%`, or with one digit `3.9%`; `-` when it is not known. Only 0 is `0%`, and only all is `100%`."""
    if fraction is None:
        return "-"
    least = 10.0**-digits
    if 0 < fraction < least / 200:
        return f"<{least:g}%"
    if 1 - least / 200 <= fraction < 1:
        return f">{100 - least:g}%"
    return f"{fraction:.{digits}%}"


def plural(count: int, noun: str) -> str:
    return noun if count == 1 else f"{noun}s"


def split_width(parts: Sequence[float], width: int) -> list[int]:
    """Divide `width` cells among `parts` in proportion. The widths sum to `width` (to 0 when every part is 0).

    Every part above 0 gets a cell; where there are fewer cells than parts, the largest parts do.
    """
    total = sum(parts)
    if total <= 0 or width <= 0:
        return [0] * len(parts)
    shown = sorted((i for i, part in enumerate(parts) if part > 0), key=lambda i: -parts[i])[:width]
    exact = [part * width / total for part in parts]
    widths = [0] * len(parts)
    for i in shown:
        widths[i] = max(1, int(exact[i]))
    while (missing := width - sum(widths)) != 0:
        if missing > 0:
            widths[max(shown, key=lambda i: exact[i] - widths[i])] += 1
        else:
            widths[max((i for i in shown if widths[i] > 1), key=lambda i: widths[i] - exact[i])] -= 1
    return widths


def sparkline(values: Sequence[float], width: int, levels: str) -> str:
    """The last `width` values as one character each, scaled to the largest of them."""
    shown = values[-width:] if width > 0 else ()
    top = max(shown, default=0.0)
    if top <= 0:
        return levels[:1] * len(shown)
    return "".join(levels[min(int(value / top * len(levels)), len(levels) - 1)] for value in shown)


def fit(text: Text, width: int, ellipsis: str) -> Text:
    """`text`, cut to `width` cells with an ellipsis where it is longer."""
    if text.cell_len <= width:
        return text
    text = text.copy()
    text.truncate(max(width - 1, 0), overflow="crop")
    return text.append(ellipsis) if width > 0 else text


def flow(items: Iterable[Text], width: int, separator: str, ellipsis: str = "…") -> list[Text]:
    """Lay items side by side, as many as fit a line of `width` cells, and go on in the next line."""
    lines: list[Text] = []
    for item in items:
        item = fit(item, width, ellipsis)
        if lines and lines[-1].cell_len + len(separator) + item.cell_len <= width:
            lines[-1].append(separator, style="dim").append_text(item)
        else:
            lines.append(Text().append_text(item))
    return lines
