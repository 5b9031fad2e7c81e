"""The steps that were planned and whose results are still to come: more than one where the device is kept ahead of."""

from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from pagedgen.step import SlotArrays, StepPlan, StepResult

T = TypeVar("T")


class StepsInFlight:
    """Steps in the order in which they were planned, which is that of their results.

    A step that was planned before the result of the one before it was known may compute a sequence that this result
    ends. What such a step gives for the sequence is dropped here, even if the slot has a new one by then: a slot and
    its epoch name a sequence. Its blocks may be given to others at once, because the device runs the steps one after
    the other, and nothing reads a slot of a block before it was written.
    """

    def __init__(self, state: SlotArrays) -> None:
        self._state = state
        self._steps: deque[tuple[StepPlan, NDArray[np.int64]]] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def num_tokens(self) -> int:
        """The tokens that these steps compute for sequences that still run."""
        return sum(int(plan.counts[self._still_run(plan, epochs)].sum()) for plan, epochs in self._steps)

    def enter(self, plan: StepPlan) -> None:
        state = self._state
        state.num_scheduled[plan.slots] += plan.counts
        state.num_pending[_drawing(plan)] += 1
        self._steps.append((plan, state.epoch[plan.slots]))

    def leave(self, plan: StepPlan, result: StepResult) -> tuple[StepPlan, StepResult]:
        """Take out the oldest step; it and its result without the sequences that run no more."""
        first, epochs = self._steps.popleft()
        assert first is plan, "results come in the order of the plans"
        runs = self._still_run(plan, epochs)
        if not runs.all():
            plan, result = _only(plan, result, runs)
        self._state.num_pending[_drawing(plan)] -= 1
        return plan, result

    def take_back(self, plan: StepPlan) -> NDArray[np.int32]:
        """Take out the only step, which failed; the slots of its sequences that still run."""
        ((only, epochs),) = self._steps
        assert only is plan, "a step can be taken back when all before it are done"
        self._steps.clear()
        return plan.slots[self._still_run(plan, epochs)]

    def clear(self) -> None:
        self._steps.clear()

    def _still_run(self, plan: StepPlan, epochs: NDArray[np.int64]) -> NDArray[np.bool_]:
        still_run: NDArray[np.bool_] = self._state.epoch[plan.slots] == epochs
        return still_run


def _drawing(plan: StepPlan) -> NDArray[np.int32]:
    """The slots that get a token from the step."""
    slots = plan.slots[plan.samples]
    return slots[~np.isin(slots, list(plan.beams))] if plan.beams else slots


def _only(plan: StepPlan, result: StepResult, runs: NDArray[np.bool_]) -> tuple[StepPlan, StepResult]:
    """The part of a step and of its result that is about the sequences with `runs`, bool [S]."""
    ended = set(plan.slots[~runs].tolist())

    def left(found: Mapping[int, T]) -> dict[int, T]:
        return {slot: value for slot, value in found.items() if slot not in ended}

    sampled = runs[plan.samples]
    arrays = {name: getattr(plan, name)[runs] for name in ("slots", "starts", "counts", "samples")}
    return replace(plan, **arrays), replace(
        result,
        slots=result.slots[sampled],
        tokens=result.tokens[sampled],
        logprobs=left(result.logprobs),
        extra=left(result.extra),
        beams=left(result.beams),
        prompt_logprobs=left(result.prompt_logprobs),
    )
