"""What runs have shown of the times of steps: some intervals of several runs, spread over all sizes of steps."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from pagedgen.planning.steptime import Array

# Observations that are kept: of one kind, and in all.
MOST_OF_ONE, MOST = 32, 512


class Observation(NamedTuple):
    """An interval of a run: what its steps computed, in the order of `StepTime`, and the seconds that they took.
    was_busy: other work slowed it. date: of the run, ISO 8601."""

    date: str
    was_busy: bool
    steps: float
    tokens: float
    pairs: float
    rows: float
    seconds: float

    @property
    def kind(self) -> tuple[int, int, bool]:
        """Alike are those with steps of about as many tokens (within a factor of 2) and contexts of about the same
        length (within 4), that mostly draw tokens, or mostly compute prompts."""
        per_step, context = self.tokens / self.steps, self.pairs / max(1.0, self.tokens)
        octave, length = (int(np.log2(max(1.0, value))) for value in (per_step, context))
        return octave, length // 2, 2 * self.rows > self.tokens


def observed(work: Array, seconds: Array, date: str, was_busy: bool) -> list[Observation]:
    """work [N, 4], seconds [N]: as of `steptime.observations`."""
    values = np.column_stack((work, seconds)).tolist()
    return [Observation(date, was_busy, *value) for value in values if value[0] >= 1]


def merge(new: Iterable[Observation], earlier: Iterable[Observation]) -> list[Observation]:
    """Those that are kept: of each kind the newest, of which quiet ones go before all others.

    new: of one run, thinned evenly; earlier: what `merge` gave before.
    """
    found, before = _by_kind(new), _by_kind(earlier)
    kinds = sorted(found.keys() | before.keys())
    limit = MOST_OF_ONE
    while True:
        kept = [
            sorted(_thinned(found[kind], limit) + before[kind], key=lambda one: one.was_busy)[:limit] for kind in kinds
        ]
        if limit == 1 or sum(map(len, kept)) <= MOST:
            return [one for group in kept for one in group][:MOST]
        limit //= 2


def trusted(observations: Iterable[Observation]) -> list[Observation]:
    """Those to learn from: where there are quiet ones of a kind, only these."""
    chosen: list[Observation] = []
    for group in _by_kind(observations).values():
        chosen += [one for one in group if not one.was_busy] or group
    return chosen


def _by_kind(observations: Iterable[Observation]) -> defaultdict[tuple[int, int, bool], list[Observation]]:
    kinds = defaultdict[tuple[int, int, bool], list[Observation]](list)
    for one in observations:
        kinds[one.kind].append(one)
    return kinds


def _thinned(group: Sequence[Observation], most: int) -> list[Observation]:
    if len(group) <= most:
        return list(group)
    return [group[i * len(group) // most] for i in range(most)]
