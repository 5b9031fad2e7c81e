"""What contiguous allocation would have reserved in the same run: for each sequence one piece of memory, from the step
in which it begins to run to the one in which it ends."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagedgen.stats.types import RunningSequences

POLICIES = ("max", "pow2", "oracle")
_EMPTY = -1
# A row's samples are told apart by their number, which is below this.
_SAMPLES = 1 << 12


def reserved_tokens(final_lengths: NDArray[np.int32], max_model_len: int) -> NDArray[np.float64]:
    """float64 [N, P]: the tokens that sequences of these final lengths [N] get under each of POLICIES: the run's
    longest sequence, the next power of two, exactly their length."""
    _, exponents = np.frexp(final_lengths - 1)
    pow2 = np.minimum(np.left_shift(1, exponents), max_model_len)
    return np.stack([np.full(len(final_lengths), max_model_len), pow2, final_lengths], axis=1).astype(np.float64)


@dataclass(slots=True)
class _Span:
    """A time that a sequence ran. start, end: on the clock of the steps. length: the tokens it held at the end."""

    start: float
    end: float
    length: int


class Baselines:
    """Follows each sequence from step to step, and hands out what would have been reserved for it once its final length
    is known: `add(start, end, tokens of each policy)`, a span at a time.

    The places of a beam search are sequences too: what one beam leaves another takes over, so each lasts from its first
    step to the end of the search, as contiguous memory would be kept for it.
    """

    def __init__(self, max_model_len: int, add: Callable[[float, float, Sequence[float]], None]) -> None:
        self._max_model_len, self._add = max_model_len, add
        self._keys = np.empty(0, np.int64)
        self._since = np.empty(0)
        self._lengths = np.empty(0, np.int32)
        # What of each unfinished row is over: by (row, sample).
        self._pending: dict[int, dict[int, list[_Span]]] = {}
        self.finished = 0
        self._sums = np.zeros(len(POLICIES))

    @property
    def mean_reserved(self) -> tuple[float, ...] | None:
        """Tokens of each policy for a sequence, a mean over those that are finished; None before the first."""
        return tuple((self._sums / self.finished).tolist()) if self.finished else None

    def step(self, running: RunningSequences, begin: float, finished_rows: tuple[int, ...], end: float) -> None:
        """Enter a step, which took from `begin` to `end`, and the rows that finished in it."""
        self._grow(int(running.slots.max(initial=-1)) + 1)
        keys = np.full(len(self._keys), _EMPTY, np.int64)
        keys[running.slots] = running.rows * _SAMPLES + running.samples
        changed = keys != self._keys
        for slot in np.flatnonzero(changed & (self._keys != _EMPTY)).tolist():
            self._close(slot, begin)
        self._since[changed] = begin
        self._keys = keys
        self._lengths[running.slots] = running.lengths
        if finished_rows:
            self._finish(finished_rows, end)

    def unfinished(self, end: float) -> list[tuple[float, float, int]]:
        """(start, end, length so far) of the spans whose sequences' final lengths are not known yet."""
        running = np.flatnonzero(self._keys != _EMPTY).tolist()
        over = [span for samples in self._pending.values() for spans in samples.values() for span in spans]
        return [
            *((float(self._since[slot]), end, int(self._lengths[slot]) + 1) for slot in running),
            *((span.start, span.end, span.length + 1) for span in over),
        ]

    def _grow(self, slots: int) -> None:
        more = slots - len(self._keys)
        if more > 0:
            self._keys = np.concatenate([self._keys, np.full(more, _EMPTY, np.int64)])
            self._since = np.concatenate([self._since, np.zeros(more)])
            self._lengths = np.concatenate([self._lengths, np.zeros(more, np.int32)])

    def _close(self, slot: int, end: float) -> None:
        """The sequence in the slot does not run any more, from `end` on."""
        key = int(self._keys[slot])
        row, sample = divmod(key, _SAMPLES)
        span = _Span(float(self._since[slot]), end, int(self._lengths[slot]))
        self._pending.setdefault(row, {}).setdefault(sample, []).append(span)

    def _finish(self, rows: tuple[int, ...], end: float) -> None:
        """The rows are done. Most have had one time to run, which began with that of others: those go together."""
        slots = np.flatnonzero(np.isin(self._keys // _SAMPLES, rows))  # an empty key belongs to row -1
        keys = self._keys[slots]
        _, inverse, counts = np.unique(keys, return_inverse=True, return_counts=True)
        at_once = counts[inverse] == 1
        if self._pending:
            at_once &= ~np.isin(keys // _SAMPLES, list(self._pending))
        for slot in slots[~at_once].tolist():
            self._close(slot, end)
        self._keys[slots] = _EMPTY
        lengths = self._lengths[slots[at_once]] + 1  # the last token is drawn, but never computed
        self._add_together(self._since[slots[at_once]], end, reserved_tokens(lengths, self._max_model_len))
        for row in rows:
            for spans in self._pending.pop(row, {}).values():
                length = max(span.length for span in spans) + 1
                tokens = reserved_tokens(np.array([length], np.int32), self._max_model_len)[0]
                self.finished += 1
                self._sums += tokens
                for span in spans:
                    self._add(span.start, span.end, tokens)

    def _add_together(self, starts: NDArray[np.float64], end: float, tokens: NDArray[np.float64]) -> None:
        """Sequences that ran without a break from `starts` [N] to `end`; tokens: [N, P], reserved for each."""
        self.finished += len(starts)
        self._sums += tokens.sum(axis=0)
        different, inverse = np.unique(starts, return_inverse=True)
        for i, start in enumerate(different.tolist()):
            self._add(start, end, tokens[inverse == i].sum(axis=0))


def spread(start: float, end: float, edges: NDArray[np.float64]) -> tuple[int, NDArray[np.float64]]:
    """The time between `start` and `end` that falls into each interval: the first interval it touches, and the seconds
    in that one and the following ones. edges: float64 [N + 1], ascending, of N intervals; the last one takes what comes
    after it."""
    last = len(edges) - 2
    first = min(max(int(np.searchsorted(edges, start, "right")) - 1, 0), last)
    until = min(max(int(np.searchsorted(edges, end, "left")) - 1, first), last)
    borders = np.concatenate([[start], edges[first + 1 : until + 1], [end]])
    return first, np.diff(borders)
