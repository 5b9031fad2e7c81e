"""The Python cost of a step: scheduling and batch building for 256 sequences that decode, on one core.

The device half is left out: the tokens of each step are drawn at random, so nothing but our own bookkeeping is timed.
"""

import argparse
import os
import time

import numpy as np
import torch

from benchmarks.common import percentiles, print_table, write_results
from pagedgen.execution.batch import build_batch
from pagedgen.request import Request, SamplingParams
from pagedgen.scheduling.blocks import BlockManager
from pagedgen.scheduling.scheduler import Scheduler
from pagedgen.scheduling.sequence import Sequence, SequenceGroup
from pagedgen.step import SlotArrays, StepPlan, StepResult

SEQUENCES = 256
VOCAB_SIZE = 49_152
SHORTEST, LONGEST = 64, 192
BLOCK_SIZE = 16
END_ID = VOCAB_SIZE


def make_scheduler(steps: int, generator: np.random.Generator) -> Scheduler:
    """A scheduler with all sequences waiting, prompts of several lengths and a pool that holds them to the end."""
    # Twice the steps: sequences admitted first decode while the others' prompts are still computed.
    max_model_len = LONGEST + 2 * steps
    state = SlotArrays(SEQUENCES, max_model_len, BLOCK_SIZE)
    num_blocks = SEQUENCES * (max_model_len // BLOCK_SIZE + 1)
    scheduler = Scheduler(state, BlockManager(num_blocks, state), max_batch_tokens=2048)
    for row in range(SEQUENCES):
        length = int(generator.integers(SHORTEST, LONGEST + 1))
        sequence = Sequence(
            request=Request(row, str(row)),
            params=SamplingParams(max_tokens=None),
            token_ids=generator.integers(0, VOCAB_SIZE, length, np.int32),
            num_prompt=length,
            max_total=max_model_len,
            end_ids=frozenset({END_ID}),
            key=row,
        )
        scheduler.add(SequenceGroup([sequence]))
    return scheduler


def draw(plan: StepPlan, generator: np.random.Generator) -> StepResult:
    slots = plan.slots[plan.samples]
    return StepResult(slots, generator.integers(0, VOCAB_SIZE, len(slots), np.int32), {})


def measure(steps: int) -> dict[str, list[float]]:
    """Milliseconds of each part in each of `steps` decoding steps."""
    generator = np.random.default_rng(0)
    scheduler = make_scheduler(steps, generator)
    cpu = torch.device("cpu")
    parts: dict[str, list[float]] = {"schedule": [], "build batch": [], "update": [], "all": []}
    while len(parts["all"]) < steps:
        started = time.perf_counter()
        plan = scheduler.schedule()
        scheduled = time.perf_counter()
        assert plan is not None
        build_batch(plan, scheduler.state, cpu)
        built = time.perf_counter()
        result = draw(plan, generator)
        drawn = time.perf_counter()
        scheduler.update(plan, result)
        updated = time.perf_counter()
        if len(plan.slots) == SEQUENCES == plan.num_tokens:
            times = (scheduled - started, built - scheduled, updated - drawn)
            for name, seconds in zip(parts, (*times, sum(times)), strict=True):
                parts[name].append(seconds * 1e3)
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000, help="decoding steps to measure")
    steps = parser.parse_args().steps
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    results = {name: percentiles(values) for name, values in measure(steps).items()}
    rows = [(name, *values.values()) for name, values in results.items()]
    title = f"{SEQUENCES} decoding sequences, {steps} steps, milliseconds a step on one core"
    print_table(title, ("part", "median", "p99", "max"), rows)
    write_results("scheduler", {"sequences": SEQUENCES, "steps": steps, "milliseconds": results})


if __name__ == "__main__":
    main()
