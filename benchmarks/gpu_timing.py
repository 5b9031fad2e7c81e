"""Time that work takes on a device: by CUDA events over replays of a graph, or on a CPU by the clock."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from pagedgen.execution.capture import NotCapturable, capture_graph

TARGET_SECONDS = 0.15
FEWEST, MOST = 3, 50

Call = Callable[[], object]


class Timing(NamedTuple):
    """seconds: of one call. method: how that was found."""

    seconds: float
    method: str


def time_calls(calls: Sequence[Call], device: torch.device) -> Timing:
    """How long one of the calls takes: the median over repetitions of all of them in a row, divided by their number.

    Where the calls read different memory, more of it in all than a cache holds, none of it comes from a cache.
    """

    def all_calls() -> None:
        for call in calls:
            call()

    all_calls()  # compiles
    if device.type == "cpu":
        return Timing(_repeat(all_calls, _by_clock) / len(calls), "clock")
    torch.cuda.synchronize()
    graph = _captured(all_calls)
    if graph is None:
        return Timing(_repeat(all_calls, _by_events) / len(calls), "events over launches")
    return Timing(_repeat(graph.replay, _by_events) / len(calls), "events over graph replays")


def _captured(run: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
    """None where the work cannot be captured."""
    try:
        return capture_graph(run, torch.cuda.graph_pool_handle())
    except (NotCapturable, torch.OutOfMemoryError):
        return None


def _repeat(run: Callable[[], None], timed: Callable[[Callable[[], None]], float]) -> float:
    """The median of as many repetitions as fit the target."""
    timed(run)
    first = timed(run)
    count = int(min(MOST, max(FEWEST, TARGET_SECONDS / max(first, 1e-6))))
    return statistics.median(timed(run) for _ in range(count))


def _by_clock(run: Callable[[], None]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def _by_events(run: Callable[[], None]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3
