"""A recorded series on an even axis of time."""

import numpy as np
from numpy.typing import NDArray

from pagedgen.stats.recording import Recording


def resample(r: Recording, values: NDArray[np.float64], cells: int) -> NDArray[np.float64]:
    """float64 [cells]: the mean of `values`, one for each interval, over equal parts of the run's time, weighted by the
    time that each interval has in a part; NaN where no step was under way. values: float64 [N]; NaN is no value."""
    start, end = r.column("start_s"), r.column("end_s")
    if not len(start) or end[-1] <= start[0]:
        return values[:1].repeat(cells) if len(values) else np.full(cells, np.nan)
    edges = np.linspace(start[0], end[-1], cells + 1)
    overlap = np.minimum(end[:, None], edges[1:]) - np.maximum(start[:, None], edges[:-1])
    weight = np.where(np.isnan(values)[:, None], 0.0, np.maximum(overlap, 0.0))
    total = weight.sum(axis=0)
    means = np.full(cells, np.nan)
    np.divide((np.nan_to_num(values)[:, None] * weight).sum(axis=0), total, out=means, where=total > 0)
    return means


def rate(r: Recording, name: str) -> NDArray[np.float64]:
    """float64 [N]: a column of sums per second of its interval, from its first step's start to its last one's end."""
    seconds = r.column("end_s") - r.column("start_s")
    rates = np.full(len(seconds), np.nan)
    np.divide(r.column(name), seconds, out=rates, where=seconds > 0)
    return rates
