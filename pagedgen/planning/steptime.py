"""How long a step takes: a sum of what it computes, fitted to a recorded run, or from the machine's rough figures."""

from collections.abc import Iterator
from dataclasses import astuple, dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from pagedgen.planning.machine import Figures
from pagedgen.simulation import StepWork
from pagedgen.stats.recording import Recording

# How often sampling goes over the float32 logits of a row, about.
_SAMPLING_PASSES = 8
# How far each part of a step may be, relatively, from what the machine's figures say of it.
_SPREAD = 0.7
_ROUNDS = 20
# What has less than this part in the time of any observation is hardly there.
_LEAST_SHARE = 0.1
# Steps of so many times the tokens of the largest ones that were measured are still taken to be like them.
REACH = 4
# Residuals beyond so many typical ones count as outliers (Huber, 1964).
_OUTLIER = 2.0

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step: for the step itself, for each computed token, each (query, key) pair of attention and each
    sampled row."""

    per_step: float
    per_token: float
    per_pair: float
    per_row: float

    def __call__(self, work: StepWork) -> float:
        return (
            self.per_step
            + self.per_token * work.computed_tokens
            + self.per_pair * work.attention_pairs
            + self.per_row * work.sampled_rows
        )


@dataclass(frozen=True, slots=True)
class BoundedTime:
    """The seconds of a step by `near`, which was measured; what a step has beyond `reach` tokens takes what `far`, the
    machine's figures, says: steps of a few tokens tell little of steps of thousands."""

    near: StepTime
    reach: float
    far: StepTime

    def __call__(self, work: StepWork) -> float:
        if work.computed_tokens <= self.reach:
            return self.near(work)
        share = self.reach / work.computed_tokens
        near, far = (time(work) - time.per_step for time in (self.near, self.far))
        return self.near.per_step + share * near + (1 - share) * far


def roofline(
    figures: Figures, *, weight_bytes: int, active: int, head: int, kv_token_bytes: float, vocab_size: int
) -> StepTime:
    """What the machine's figures give: a step reads all weights, a token is a product with each active parameter of
    the layers, attention reads the keys and values, and a sampled row is a product with the head and some passes over
    its logits. Fields as of `models.facts.Size`."""
    return StepTime(
        per_step=figures.step_s + weight_bytes / figures.bandwidth,
        per_token=2 * active / figures.flops,
        per_pair=kv_token_bytes / figures.bandwidth,
        per_row=2 * head / figures.flops + _SAMPLING_PASSES * 4 * vocab_size / figures.bandwidth,
    )


def observations(recording: Recording) -> tuple[Array, Array]:
    """Of the last session: what each interval computed, [N, 4] in the order of StepTime, and the seconds from its
    beginning to that of the next one, [N], so that time between the steps counts."""
    last = recording.column("session") == len(recording.sessions) - 1
    columns = [recording.column(x)[last] for x in ("steps", "computed_tokens", "attention_pairs", "sampled_rows")]
    starts, ends = recording.column("start_s")[last], recording.column("end_s")[last]
    seconds = np.append(starts[1:], ends[-1:]) - starts
    is_usable = seconds > 0
    return np.stack(columns, axis=1)[is_usable], seconds[is_usable]


def fit(work: Array, seconds: Array, prior: StepTime) -> StepTime:
    """The non-negative coefficients that explain the seconds best, outliers left aside.

    work [N, 4] and seconds [N] as of `observations`, at least one. What the observations leave open (steps that are all
    alike cannot tell its parts apart) comes from the prior, scaled to the seconds as a whole; but for a part that they
    hardly have, of which that scale says nothing.
    """
    of_prior = np.array(astuple(prior))
    expected = work @ of_prior
    scale = float(np.median(seconds / expected))
    has = (work * of_prior / expected[:, None]).max(axis=0) >= _LEAST_SHARE
    units = np.where(has, scale, 1.0) * of_prior
    # A step's time varies in proportion to its root: then long intervals count as the many steps that they are.
    spread = np.sqrt(expected * scale)
    rows, target = work * units / spread[:, None], seconds / spread
    factors, weights = np.ones(4), np.ones(len(target))
    for _ in range(_ROUNDS):
        residuals = target - rows @ factors
        typical = max(float(np.median(np.abs(residuals))) * 1.4826, 1e-3 * float(np.median(target)))
        weights = np.minimum(1.0, _OUTLIER * typical / np.maximum(np.abs(residuals), 1e-300))
        factors = _solve(rows * np.sqrt(weights)[:, None], target * np.sqrt(weights), (typical / _SPREAD) ** 2)
    # In sum it is right for all that is no outlier.
    factors *= float(weights @ seconds) / float(weights @ (work @ (units * factors)))
    return StepTime(*(units * factors).tolist())


def _solve(rows: Array, target: Array, pull: float) -> Array:
    """The x >= 0 with the least |rows x - target|^2 + pull |x - 1|^2: with four unknowns, the best of all choices of
    those that are zero."""
    gram = rows.T @ rows + pull * np.eye(4)
    right = rows.T @ target + pull
    best, least = np.ones(4), np.inf
    for free in _choices():
        x = np.zeros(4)
        x[free] = np.linalg.lstsq(gram[np.ix_(free, free)], right[free], rcond=None)[0]
        value = float(x @ gram @ x - 2 * right @ x)
        if (x >= 0).all() and value < least:
            best, least = x, value
    return best


def _choices() -> Iterator[list[int]]:
    for count in range(1, 5):
        yield from map(list, combinations(range(4), count))
