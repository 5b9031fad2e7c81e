"""How long completions were, and how long those of a run will be."""

import random
from collections.abc import Iterable
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from pagedgen.request import Completion, FinishReason, Status
from pagedgen.scheduling.sequence import Sequence, SequenceGroup

CAPACITY = 4096
# Completions whose mean is matched to a mean length that was stated.
_MATCHED = 1 << 17
# Irrational steps: however many rows and samples there are, their fractions are spread evenly, and the first is a half.
_ROW_STEP, _SAMPLE_STEP = (5**0.5 - 1) / 2, 2**0.5 - 1
# Of a gamma distribution with shape 2 and mean 1: lengths, and the fraction that does not exceed each.
_SHAPE = np.linspace(1e-9, 12.0, 6001)
_SHAPE_FRACTIONS = 1.0 - np.exp(-2.0 * _SHAPE) * (1.0 + 2.0 * _SHAPE)


class OutputLengths:
    """The lengths of a run's completions: a bounded random sample of them (Vitter's algorithm R), and how many bytes of
    text a token has. pairs: (tokens, whether an end token or stop string ended it)."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.pairs: list[tuple[int, bool]] = []
        self.tokens = self.text_bytes = 0
        self._capacity, self._seen, self._random = capacity, 0, random.Random(0)

    def add(self, completion: Completion, may_stop: bool = True) -> None:
        """may_stop: whether it could have ended before its limit: with `ignore_eos` it tells nothing. Completions that
        are not `ok` and those of beam searches are passed over."""
        if completion.status is not Status.OK or completion.score is not None:
            return
        self.tokens += completion.completion_tokens
        self.text_bytes += len((completion.text or "").encode("utf-8", "replace"))
        if not may_stop:
            return
        self._seen += 1
        pair = completion.completion_tokens, completion.finish_reason is FinishReason.STOP
        if len(self.pairs) < self._capacity:
            self.pairs.append(pair)
        elif (place := self._random.randrange(self._seen)) < self._capacity:
            self.pairs[place] = pair

    @property
    def bytes_per_token(self) -> float | None:
        return self.text_bytes / self.tokens if self.tokens else None


class LengthCurve:
    """The Kaplan-Meier estimate of how many completions are longer than a number of tokens. A completion that its limit
    cut off counts as "longer than that". Past the longest one seen the chance to end is that of all tokens so far.

    pairs: as of OutputLengths, at least one.
    """

    def __init__(self, pairs: Iterable[tuple[int, bool]]) -> None:
        tokens, ended = (np.array(values) for values in zip(*pairs, strict=True))
        order = np.argsort(tokens, kind="stable")
        tokens, ended = tokens[order], ended[order].astype(bool)
        self.ends = np.unique(tokens[ended])
        at_risk = len(tokens) - np.searchsorted(tokens, self.ends, "left")
        events = np.searchsorted(tokens[ended], self.ends, "right") - np.searchsorted(tokens[ended], self.ends, "left")
        # survival[i]: the fraction that is longer than ends[i].
        self.survival: NDArray[np.float64] = np.cumprod(1.0 - events / np.maximum(at_risk, 1), dtype=np.float64)
        self.longest = int(tokens[-1])
        self._hazard = float(ended.sum() / tokens.sum())

    def quantile(self, fraction: float) -> float:
        """The tokens that this fraction of the completions, below 1, does not exceed; inf when none was seen to end."""
        left = 1.0 - fraction
        index = int(np.searchsorted(-self.survival, -left, "left"))
        if index < len(self.ends):
            return float(self.ends[index])
        if not self._hazard:
            return float("inf")
        last = float(self.survival[-1])
        return self.longest + float(np.log(last / left)) / self._hazard


class MeanLength:
    """Lengths of a given mean over the completions of a run, as spread out as completions are: gamma-distributed with
    shape 2. What limits cut off is made good by the others, as far as it can be.

    groups: the run's, of which those count that may end before their limit; at least one. mean: what came of it.
    """

    def __init__(self, tokens: float, groups: Iterable[SequenceGroup]) -> None:
        firsts = ((g.first, s) for g in groups if g.first.end_ids for s in range(g.first.params.n))
        of_all = [(fraction_of(first, sample), *_bounds(first)) for first, sample in islice(firsts, _MATCHED)]
        fractions, least, most = np.array(of_all, dtype=np.float64).T
        shapes = _shape_at(fractions)

        def mean(scale: float) -> float:
            return float(np.minimum(np.maximum(np.rint(shapes * scale), least), most).mean())

        low, high = 1.0, 1e15
        for _ in range(80):
            middle = (low * high) ** 0.5
            low, high = (middle, high) if mean(middle) < tokens else (low, middle)
        self._scale, self.mean = high, mean(high)

    def quantile(self, fraction: float) -> float:
        return self._scale * float(_shape_at(np.array(fraction)))


class ExpectedLengths:
    """The length of each completion of a planned run; the same for a (row, sample) whenever it is asked.

    known: what is known of completions that may stop by themselves; None lets all take their limit. Those without
    `end_ids` always do, and searches unless a mean is given.
    """

    def __init__(self, known: LengthCurve | MeanLength | None) -> None:
        self._known = known

    def __call__(self, sequence: Sequence) -> int:
        least, most = _bounds(sequence)
        searches = sequence.num_continuations > 0
        if self._known is None or not sequence.end_ids or (searches and isinstance(self._known, LengthCurve)):
            return most
        drawn = self._known.quantile(fraction_of(sequence, sequence.sample))
        return min(most, max(least, round(min(drawn, most))))


def fraction_of(sequence: Sequence, sample: int) -> float:
    """Which quantile of the lengths a row's sample has, 0 to 1."""
    return (0.5 + _ROW_STEP * sequence.request.row + _SAMPLE_STEP * sample) % 1.0


def _bounds(sequence: Sequence) -> tuple[int, int]:
    """The fewest and the most tokens of a completion."""
    most = sequence.max_total - sequence.num_prompt
    return min(most, sequence.params.min_tokens + 1), most


def _shape_at(fractions: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.interp(fractions, _SHAPE_FRACTIONS, _SHAPE).astype(np.float64)
