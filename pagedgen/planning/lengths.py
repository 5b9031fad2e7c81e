"""How long completions were, and how long those of a run will be."""

import random
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagedgen.request import Completion, FinishReason, Status
from pagedgen.scheduling.sequence import Sequence, mix64

CAPACITY = 4096
# Draws whose mean is matched to a mean length that was stated.
_SHAPES = 4096


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


@dataclass(frozen=True, slots=True)
class MeanLength:
    """Lengths of a given mean, as spread out as completions are: gamma-distributed with shape 2, cut off at a limit
    without changing the mean."""

    tokens: float

    def scaled_to(self, most: int) -> float:
        """What a draw of the shape, of mean 1, is multiplied by."""
        if self.tokens >= most:
            return float("inf")
        shapes = np.random.default_rng(0).gamma(2.0, 0.5, _SHAPES)
        low, high = self.tokens, self.tokens * 1e4
        for _ in range(60):
            middle = (low * high) ** 0.5
            if np.minimum(shapes * middle, most).mean() < self.tokens:
                low = middle
            else:
                high = middle
        return high


class ExpectedLengths:
    """The length of each completion of a planned run; the same for a (row, sample) whenever it is asked.

    known: what is known of completions that may stop by themselves; None lets all take their limit. Those without
    `end_ids` always do, and searches unless a mean is given.
    """

    def __init__(self, known: LengthCurve | MeanLength | None) -> None:
        self._known = known
        self._scales: dict[int, float] = {}

    def __call__(self, sequence: Sequence) -> int:
        most = sequence.max_total - sequence.num_prompt
        searches = sequence.num_continuations > 0
        if self._known is None or not sequence.end_ids or (searches and isinstance(self._known, LengthCurve)):
            return most
        key = mix64((sequence.request.row << 16) + sequence.sample)
        if isinstance(self._known, LengthCurve):
            drawn = self._known.quantile((key >> 11) / (1 << 53))
        else:
            if most not in self._scales:
                self._scales[most] = self._known.scaled_to(most)
            drawn = self._scales[most] * float(np.random.default_rng(key).gamma(2.0, 0.5))
        least = sequence.params.min_tokens + 1
        return int(min(most, max(least, round(min(drawn, most)))))
