"""Rates and timelines of a run in bounded memory: what was counted lately, and what the rest may take."""

import math
from collections import deque


class RateWindow:
    """Rates of a few growing counters over about the last `span` seconds.

    The counters are marked at most once every `span / 40` seconds: some 40 marks a window, whatever the step rate.
    """

    def __init__(self, span: float = 10.0) -> None:
        self._span = span
        self._marks: deque[tuple[float, tuple[int, ...]]] = deque()

    def record(self, now: float, counters: tuple[int, ...]) -> None:
        """Note the counters' values at `now`; the first call starts the window."""
        marks = self._marks
        if marks and now - marks[-1][0] < self._span / 40:
            return
        marks.append((now, counters))
        while len(marks) > 1 and marks[1][0] <= now - self._span:
            marks.popleft()

    def rates(self, now: float, counters: tuple[int, ...]) -> tuple[float, tuple[float, ...]]:
        """The window's length in seconds, and each counter's increase per second over it.

        The window starts at the last mark at least `span` ago, or at the first one early in a run.
        """
        base = next((mark for mark in reversed(self._marks) if mark[0] <= now - self._span), None)
        if base is None and self._marks:
            base = self._marks[0]
        if base is None or now <= base[0]:
            return 0.0, (0.0,) * len(counters)
        seconds = now - base[0]
        return seconds, tuple((value - before) / seconds for value, before in zip(counters, base[1], strict=True))


class RecentHalf:
    """The rate of one counter over the later half of the time since `start`.

    A run's start is unlike the rest of it: nothing has finished while the first sequences run. Half of the elapsed
    time forgets the start soon and is still long enough to smooth bursts. At most 128 marks: when they are full, every
    second one is dropped and they are taken half as often.
    """

    _CAPACITY = 128

    def __init__(self, start: float, interval: float = 0.25) -> None:
        self._start = start
        self._interval = interval
        self._marks: list[tuple[float, int]] = [(start, 0)]

    def record(self, now: float, counter: int) -> None:
        if now - self._marks[-1][0] < self._interval:
            return
        self._marks.append((now, counter))
        if len(self._marks) >= self._CAPACITY:
            self._marks = self._marks[::2]
            self._interval *= 2

    def rate(self, now: float, counter: int) -> float:
        """Increase per second, 0 while no time has passed."""
        middle = (self._start + now) / 2
        time, before = next(mark for mark in reversed(self._marks) if mark[0] <= max(middle, self._start))
        return (counter - before) / (now - time) if now > time else 0.0


class Timeline:
    """Amounts a second over the last `keep` seconds. An amount is spread evenly over the time it took."""

    def __init__(self, start: float, keep: int = 240) -> None:
        self._start = start
        self._keep = keep
        self._last = 0
        self._buckets: deque[float] = deque([0.0], maxlen=keep)

    def add(self, start: float, end: float, amount: float) -> None:
        """Add `amount`, which came between `start` and `end` (seconds, `end` never before that of earlier calls)."""
        last = max(int(end - self._start), self._last)
        for _ in range(min(last - self._last, self._keep)):
            self._buckets.append(0.0)
        self._last = last
        oldest = last - len(self._buckets) + 1
        if end <= start:
            self._buckets[-1] += amount
            return
        for second in range(max(int(start - self._start), oldest), last + 1):
            begin = self._start + second
            overlap = min(end, begin + 1.0) - max(start, begin)
            if overlap > 0:
                self._buckets[second - oldest] += amount * overlap / (end - start)

    def values(self) -> tuple[float, ...]:
        """The full seconds, oldest first; the one still filling is left out."""
        return tuple(self._buckets)[:-1]


def eta_seconds(*, done: int, total: float | None, running_for: float, rate: float, average: float) -> float | None:
    """Seconds until `total` rows are done, or None while that would be a guess.

    rate: rows a second lately; average: over the whole run, used when none finished lately. A first estimate needs
    three seconds of steps and five finished rows (or a tenth of a small input).
    """
    if total is None:
        return None
    if done >= total:
        return 0.0
    if running_for < 3.0 or (done < 5 and done < 0.1 * total):
        return None
    speed = rate or average
    seconds = (total - done) / speed if speed > 0 else math.inf
    return seconds if math.isfinite(seconds) else None
