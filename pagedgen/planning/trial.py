"""The simulated run of a plan's rows, and what it says of all of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from pagedgen.config import EngineConfig
from pagedgen.planning.survey import END_ID
from pagedgen.scheduling.blocks import BlockManager
from pagedgen.scheduling.scheduler import Scheduler
from pagedgen.scheduling.sequence import SequenceGroup, mix64
from pagedgen.simulation import OutputLength, Simulation, StepCost
from pagedgen.stats.types import StepSample
from pagedgen.step import SlotArrays

# Tokens that are simulated, about: a second or two for a million of samples; those of beams take several times as long.
MOST_TOKENS, MOST_BEAM_TOKENS = 1_500_000, 200_000
# Of what runs at a time, at least so many times as much is simulated.
_LEAST_ROUNDS = 3
# The part of the rows that must end in full swing for it to tell what further rows take.
_LEAST_IN_FULL_SWING = 0.3


@dataclass(slots=True)
class Outcome:
    """rows: that were simulated. prompt_tokens: computed, without cached_tokens, which were in the prefix cache.
    peak_blocks: referenced at a time; peak_running: sequences at a time. seconds: on the simulated clock.

    step_tokens: computed by each step.

    full_from, full_to: (rows finished, seconds, steps, output tokens) when the first row ended, and when the last one
    did while others still waited: in between the run was in full swing.
    """

    rows: int = 0
    steps: int = 0
    seconds: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    peak_blocks: int = 0
    peak_running: int = 0
    preemptions: int = 0
    step_tokens: list[int] = field(default_factory=list)
    full_from: tuple[int, float, int, int] | None = None
    full_to: tuple[int, float, int, int] | None = None

    def add(self, sample: StepSample) -> None:
        self.steps += 1
        self.step_tokens.append(sample.computed_tokens)
        self.output_tokens += sample.output_tokens
        if sample.finished_rows:
            self.rows += len(sample.finished_rows)
            now = self.rows, sample.end, self.steps, self.output_tokens
            self.full_from = self.full_from or now
            if sample.waiting:
                self.full_to = now
        self.seconds = sample.end
        self.prompt_tokens += sample.prompt_tokens
        self.cached_tokens += sample.cached_prompt_tokens
        self.peak_blocks = max(self.peak_blocks, sample.used_blocks)
        self.peak_running = max(self.peak_running, sample.running)
        self.preemptions += sample.preemptions

    def sum_for(self, rows: float, name: str) -> float:
        """What so many rows give of a sum, in proportion."""
        return float(getattr(self, name) * rows / max(1, self.rows))

    def time_for(self, rows: float) -> tuple[float, float]:
        """(seconds, steps) of so many rows, at least those that were simulated: the further ones come while the run is
        in full swing, so that its beginning and end count once. They take it as long as it took for their tokens."""
        begin, end = self.full_from, self.full_to
        if begin is None or end is None or end[0] - begin[0] < self.rows * _LEAST_IN_FULL_SWING or end[3] == begin[3]:
            return self.sum_for(rows, "seconds"), self.sum_for(rows, "steps")
        share = (self.sum_for(rows, "output_tokens") - self.output_tokens) / (end[3] - begin[3])
        return self.seconds + (end[1] - begin[1]) * share, self.steps + (end[2] - begin[2]) * share


def simulate(
    groups: Sequence[SequenceGroup],
    config: EngineConfig,
    *,
    num_blocks: int,
    max_model_len: int,
    prefix_cache: bool,
    cost: StepCost,
    lengths: OutputLength,
) -> Outcome:
    """Run the groups, which are used up, or a part of them spread evenly where all would take too long."""
    outcome = Outcome()
    chosen = choose(groups, lengths, config.max_seqs)
    state = SlotArrays(config.max_seqs, max_model_len, config.block_size)
    scheduler = Scheduler(state, BlockManager(num_blocks, state, prefix_cache), config.max_batch_tokens)
    simulation = Simulation(scheduler, cost, lengths, outcome.add, end_id=END_ID)
    for _ in simulation.run(chosen):
        pass
    return outcome


def choose(groups: Sequence[SequenceGroup], lengths: OutputLength, max_seqs: int) -> list[SequenceGroup]:
    """As many of the groups as there is time for, spread over all of them, in their order: one of each stretch of them,
    at no fixed distance, as lengths may come back at one."""
    if not groups:
        return []
    slots = sum(group.num_slots for group in groups) / len(groups)
    tokens = sum(lengths(group.first) * group.num_slots for group in groups)
    most = MOST_TOKENS if groups[0].beam is None else MOST_BEAM_TOKENS
    count = max(round(len(groups) * most / max(1, tokens)), round(_LEAST_ROUNDS * max_seqs / slots))
    if count >= len(groups):
        return list(groups)
    stretches = [(i * len(groups) // count, (i + 1) * len(groups) // count) for i in range(count)]
    return [groups[start + mix64(i + 1) % (end - start)] for i, (start, end) in enumerate(stretches)]
