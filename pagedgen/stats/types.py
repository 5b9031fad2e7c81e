"""The values that pass through a run's statistics: one step's sample, and the state of the run. Plain dataclasses."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagedgen.request import FinishReason, Status

GENERATING = "generating"


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What runs on what. kv_bytes: size of the KV pool in bytes; kv_blocks: the blocks it holds.

    max_model_len, max_seqs, max_batch_tokens: the engine's limits. weight_bytes: of the loaded weights.
    activation_bytes, logits_bytes: the most that a step takes besides, as measured at the start.
    vocab_size: of the model.
    """

    model: str
    device: str
    dtype: str
    kernels: str
    kv_bytes: int
    kv_blocks: int
    block_size: int
    max_model_len: int = 0
    max_seqs: int = 0
    max_batch_tokens: int = 0
    weight_bytes: int = 0
    activation_bytes: int = 0
    logits_bytes: int = 0
    vocab_size: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class RunningSequences:
    """The sequences that run in a step. slots, samples: int32 [S]; rows: int64 [S], the row of the input. lengths:
    int32 [S], the tokens whose keys and values each has in its blocks once the step is done."""

    slots: NDArray[np.int32]
    rows: NDArray[np.int64]
    samples: NDArray[np.int32]
    lengths: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepSample:
    """One engine step, taken after scheduling, while its sequences hold their blocks. Times in seconds.

    start, end: on the clock given to `RunStats` (by default `time.perf_counter`).
    used_blocks: physical blocks that block tables refer to. cached_blocks: blocks nobody refers to whose content is
        kept. free_blocks: the others; the three sum to total_blocks.
    filled_slots: distinct token slots written in the used blocks. logical_blocks: sum of the block tables' lengths.
    running: sequences that run. waiting: requests that wait, preempted ones too.
    prompt_tokens: prompt tokens computed. cached_prompt_tokens: prompt tokens that sequences admitted in this step had
        in the prefix cache instead. output_tokens: tokens drawn. preemptions, block_copies: how many in this step.
    schedule_s, build_s, model_s, sample_s, update_s: the parts of the step.
    computed_tokens: tokens computed, recomputed ones too. sampled_rows: rows of logits. attention_pairs: (query, key)
        pairs of one attention head. held_tokens: sum of `sequences.lengths`, shared tokens counted for each sequence.
    group_blocks: distinct blocks of each request, summed over the requests; None where it was not counted.
    touched_blocks: blocks that have been used since the start, at one time or another.
    sequences: those that run. finished_rows: the rows that are done after the step.
    """

    start: float
    end: float
    used_blocks: int
    cached_blocks: int
    free_blocks: int
    total_blocks: int
    block_size: int
    filled_slots: int
    logical_blocks: int
    running: int
    waiting: int
    prompt_tokens: int
    output_tokens: int
    cached_prompt_tokens: int = 0
    preemptions: int = 0
    block_copies: int = 0
    schedule_s: float = 0.0
    build_s: float = 0.0
    model_s: float = 0.0
    sample_s: float = 0.0
    update_s: float = 0.0
    computed_tokens: int = 0
    sampled_rows: int = 0
    attention_pairs: int = 0
    held_tokens: int = 0
    group_blocks: int | None = None
    touched_blocks: int = 0
    sequences: RunningSequences | None = None
    finished_rows: tuple[int, ...] = ()

    @property
    def allocated_slots(self) -> int:
        return self.used_blocks * self.block_size

    @property
    def waste(self) -> float | None:
        """The fraction of the allocated slots that hold no token; None when nothing is allocated."""
        return 1.0 - self.filled_slots / self.allocated_slots if self.used_blocks else None

    @property
    def sharing_saved(self) -> float | None:
        """The fraction of the blocks needed without sharing that sharing avoids; None when nothing is allocated."""
        return 1.0 - self.used_blocks / self.logical_blocks if self.logical_blocks else None


@dataclass(frozen=True, slots=True)
class ErrorExample:
    """One completion that is not `ok`, to show the user."""

    row: int
    status: Status
    error: str


@dataclass(frozen=True, slots=True)
class StatsSnapshot:
    """The run as it is now. Times in seconds, rates per second, fractions 0 to 1; None is "not known".

    phase: what the run is doing, and since when (`phase_s`); phases: time spent in each, in order of first appearance.
    generating_s: from the start of the first step to the end of the last one. last: the latest step.
    rows_earlier: of the rows done, those that an earlier process of the run has done.
    rows_total: rows in the input; an estimate while `rows_total_exact` is false. progress: rows done of it.
    statuses, finish_reasons: completions by each. A row's n samples are n completions.
    prompt_rate, output_rate: tokens computed and drawn over about the last ten seconds (`window_s`);
        prompt_rate_overall, output_rate_overall: over `generating_s`. output_history: tokens drawn in each of the last
        seconds, oldest first.
    mean_*: weighted by the steps' durations; waste and sharing leave out steps in which nothing was allocated.
    step_parts: seconds in each part of the steps; `other`: between the parts and between the steps.
    """

    elapsed: float
    info: RunInfo | None
    phase: str | None
    phase_s: float
    phases: Mapping[str, float]
    steps: int
    generating_s: float
    last: StepSample | None
    rows_done: int
    rows_earlier: int
    rows_total: int | None
    rows_total_exact: bool
    progress: float | None
    rows_rate: float
    eta: float | None
    statuses: Mapping[Status, int]
    finish_reasons: Mapping[FinishReason, int]
    errors: tuple[ErrorExample, ...]
    prompt_tokens: int
    cached_prompt_tokens: int
    output_tokens: int
    window_s: float
    prompt_rate: float
    output_rate: float
    prompt_rate_overall: float
    output_rate_overall: float
    output_history: tuple[float, ...]
    peak_used_blocks: int
    peak_running: int
    mean_used_blocks: float | None
    mean_running: float | None
    mean_waste: float | None
    mean_sharing_saved: float | None
    preemptions: int
    block_copies: int
    step_parts: Mapping[str, float]

    @property
    def prefix_hit_rate(self) -> float | None:
        """Prompt tokens found in the prefix cache, of all prompt tokens; None before the first one."""
        prompt = self.prompt_tokens + self.cached_prompt_tokens
        return self.cached_prompt_tokens / prompt if prompt else None

    @property
    def completions(self) -> int:
        return sum(self.statuses.values())

    @property
    def failed(self) -> int:
        """Completions whose status is not `ok`."""
        return self.completions - self.statuses.get(Status.OK, 0)
