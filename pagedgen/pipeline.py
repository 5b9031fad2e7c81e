"""The steps of the scheduler on the device: planned, launched, and entered when their results are there."""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from pagedgen.errors import PagedgenError
from pagedgen.execution.failures import is_device_failure, is_out_of_memory
from pagedgen.observer import Held, StepObserver, StepTimes
from pagedgen.scheduling.scheduler import Scheduler
from pagedgen.scheduling.sequence import SequenceGroup
from pagedgen.stats.types import StepSample
from pagedgen.step import SlotArrays, StepPlan, StepResult


class Runner(Protocol):
    """Runs steps in the order in which they are launched."""

    def launch(self, plan: StepPlan, state: SlotArrays) -> Callable[[], StepResult]:
        """Start a step with the state as it is now; what is returned waits for its result."""
        ...


@dataclass(frozen=True, slots=True)
class _Launched:
    """result: None when the step ran out of memory. held: None when nobody observes."""

    plan: StepPlan
    times: StepTimes
    result: Callable[[], StepResult] | None
    held: Held | None


class Pipeline:
    """Keeps the device busy: with `ahead`, the next step is planned and launched before the result of the last one is
    waited for, so that the device never waits for the host. A sequence that ends is then noticed one step late.

    free_memory: gives back to the device what nothing refers to, after a step that ran out of memory. on_step is called
    with the sample of each step that did not; on_note with a sentence when steps have to become smaller than ever.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        ahead: bool,
        free_memory: Callable[[], None],
        on_step: Callable[[StepSample], None] | None,
        on_note: Callable[[str], None],
    ) -> None:
        self._scheduler, self._runner, self._depth = scheduler, runner, 2 if ahead else 1
        self._free_memory, self.on_step, self.on_note = free_memory, on_step, on_note
        self._observer = StepObserver(scheduler)
        self._launched: deque[_Launched] = deque()
        self._ended = 0.0

    def step(self) -> list[SequenceGroup]:
        """Launch what can be, and enter the oldest step that is in flight: the groups that finished in it."""
        while len(self._launched) < self._depth and not self._failed:
            launched = self._launch()
            if launched is None:
                break
            self._launched.append(launched)
        assert self._launched, "a step was asked for, but there is no work"
        return self._enter(self._launched.popleft())

    def abort(self) -> None:
        """Forget the steps in flight and all work of the scheduler."""
        self._launched.clear()
        self._scheduler.abort()

    @property
    def _failed(self) -> bool:
        """Whether the last step that was launched failed: it is taken back before anything else is planned."""
        return bool(self._launched) and self._launched[-1].result is None

    def _launch(self) -> _Launched | None:
        """Plan a step and launch it; None when none can be planned yet."""
        times = StepTimes(time.perf_counter())
        plan = self._scheduler.schedule()
        if plan is None:
            return None
        times.schedule = time.perf_counter() - times.start
        held = None if self.on_step is None else self._observer.holding(plan)
        result = self._start(plan)
        if result is None:
            with _naming_failures():
                self._free_memory()  # only here is the error gone, whose frames held the step's tensors
        return _Launched(plan, times, result, held)

    def _start(self, plan: StepPlan) -> Callable[[], StepResult] | None:
        try:
            with _naming_failures():
                return self._runner.launch(plan, self._scheduler.state)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
        return None

    def _enter(self, step: _Launched) -> list[SequenceGroup]:
        if step.result is None:
            return self._take_back(step.plan)
        with _naming_failures():
            result = step.result()
        times = step.times
        times.build, times.model, times.sample = result.seconds
        executed = time.perf_counter()
        finished = self._scheduler.update(step.plan, result)
        times.start, times.end = max(times.start, self._ended), time.perf_counter()
        times.update = times.end - executed
        self._ended = times.end
        if self.on_step is not None and step.held is not None:
            self.on_step(self._observer.after(times, step.held, finished))
        return finished

    def _take_back(self, plan: StepPlan) -> list[SequenceGroup]:
        """Go on after a step that ran out of memory; the groups that it ends."""
        budget = self._scheduler.budget
        least = budget.least
        ended = self._scheduler.step_failed(plan)
        if budget.least < least:
            tokens = "1 token" if plan.num_tokens == 1 else f"{plan.num_tokens} tokens"
            self.on_note(f"a step of {tokens} ran out of memory; going on with {budget.tokens}")
        return ended


@contextlib.contextmanager
def _naming_failures() -> Iterator[None]:
    """Turn an error after which the device is of no use into a PagedgenError. What has ended is not lost by it."""
    try:
        yield
    except RuntimeError as error:
        if is_out_of_memory(error) or not is_device_failure(error):
            raise
        reason = str(error).split("\n", 1)[0].rstrip(".")
        raise PagedgenError(
            f"the device failed ({reason}); run the same command again to go on with the rows that are left, with a "
            "lower --kv-memory or --max-batch-tokens if it was short of memory, and with --no-cuda-graphs if it fails "
            "again"
        ) from error
