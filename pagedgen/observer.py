"""What a step's statistics are taken from: the scheduler and its blocks, while the step's sequences hold them."""

import time
from dataclasses import dataclass, replace

import numpy as np

from pagedgen.scheduling.scheduler import Scheduler
from pagedgen.scheduling.sequence import SequenceGroup
from pagedgen.stats.types import RunningSequences, StepSample
from pagedgen.step import StepPlan

# Counting the distinct blocks of each request may take this part of a run's time.
COUNTING_SHARE = 0.002

# The fields of a StepSample that are known when the step is scheduled.
Held = dict[str, object]


@dataclass(slots=True)
class StepTimes:
    """On one clock, in seconds: when the step began and ended; and how long its parts took."""

    start: float
    end: float = 0.0
    schedule: float = 0.0
    build: float = 0.0
    model: float = 0.0
    sample: float = 0.0
    update: float = 0.0


class StepObserver:
    """Takes a StepSample of each step: what it is `holding` once it is scheduled, and the rest `after` it was entered.

    What is counted while several steps are in flight goes to the one that is entered next.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._counts = replace(scheduler.counts)
        self._next_count = 0.0

    def holding(self, plan: StepPlan) -> Held:
        """The blocks while the step's sequences hold them; each token of a step in flight fills one more slot."""
        scheduler, blocks, state = self._scheduler, self._scheduler.blocks, self._scheduler.state
        order, slots = scheduler.running.order, scheduler.slots
        held = state.num_scheduled[order]
        ends = plan.starts + plan.counts
        pairs = plan.counts.astype(np.int64) * (plan.starts + ends + 1) // 2
        sequences = RunningSequences(order, slots.rows[order], slots.samples[order], held)
        return {
            "used_blocks": blocks.num_used,
            "cached_blocks": blocks.num_cached,
            "free_blocks": blocks.num_free,
            "total_blocks": blocks.num_blocks,
            "block_size": blocks.block_size,
            "filled_slots": blocks.filled_slots + scheduler.in_flight.num_tokens,
            "logical_blocks": blocks.logical_blocks,
            "running": scheduler.num_running,
            "waiting": len(scheduler.waiting),
            "computed_tokens": plan.num_tokens,
            "sampled_rows": int(plan.samples.sum()),
            "attention_pairs": int(pairs.sum()),
            "held_tokens": int(held.sum()),
            "group_blocks": self._group_blocks(sequences),
            "touched_blocks": blocks.num_touched,
            "block_copies": len(plan.copies),
            "sequences": sequences,
        }

    def after(self, times: StepTimes, held: Held, finished: list[SequenceGroup]) -> StepSample:
        counts, before = replace(self._scheduler.counts), self._counts
        self._counts = counts
        return StepSample(
            start=times.start,
            end=times.end,
            prompt_tokens=counts.prompt_tokens - before.prompt_tokens,
            output_tokens=counts.output_tokens - before.output_tokens,
            cached_prompt_tokens=counts.cached_tokens - before.cached_tokens,
            preemptions=counts.preemptions - before.preemptions,
            schedule_s=times.schedule,
            build_s=times.build,
            model_s=times.model,
            sample_s=times.sample,
            update_s=times.update,
            finished_rows=tuple(group.sequences[0].request.row for group in finished),
            **held,  # type: ignore[arg-type]
        )

    def _group_blocks(self, sequences: RunningSequences) -> int | None:
        """Without sharing, or without several sequences of one request, it is known at once. Counting takes time in
        proportion to the tables, so it is done as seldom as COUNTING_SHARE says."""
        blocks = self._scheduler.blocks
        if blocks.num_used == blocks.logical_blocks or len(np.unique(sequences.rows)) == len(sequences.rows):
            return blocks.logical_blocks
        started = time.perf_counter()
        if started < self._next_count:
            return None
        count = blocks.count_by_group(sequences.slots, sequences.rows)
        ended = time.perf_counter()
        self._next_count = ended + (ended - started) / COUNTING_SHARE
        return count
