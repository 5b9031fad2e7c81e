"""Simulated runs at the published scale, and what is measured of a run, simulated or real."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from benchmarks.paper_lengths import MAX_MODEL_LEN, Lengths
from benchmarks.paper_reserve import RESERVATIONS, PackedSpace, Reserve, ReservingScheduler, Space
from pagedgen.request import BeamParams, Request, SamplingParams
from pagedgen.scheduling.beam import BeamSearch
from pagedgen.scheduling.blocks import BlockManager
from pagedgen.scheduling.sequence import Sequence, SequenceGroup, random_key
from pagedgen.simulation import Simulation, StepWork
from pagedgen.stats.types import StepSample
from pagedgen.step import SlotArrays

MAX_SEQS, MAX_BATCH_TOKENS = 256, 2048
END_ID = 0


@dataclass(frozen=True)
class Accelerator:
    """OPT-13B in float16 on an A100 of 40 GB. Of the peaks, the shares that good kernels reach. Nothing is added for
    launching kernels, for the host, or for gathering pages."""

    weight_bytes: float = 26e9
    parameters: float = 13e9
    layers: int = 40
    hidden: int = 5120
    bytes_per_second: float = 1.555e12
    flops_per_second: float = 312e12
    memory_share: float = 0.8
    compute_share: float = 0.6
    kv_bytes: int = 12 << 30

    @property
    def token_bytes(self) -> int:
        """Of one token's keys and values."""
        return 2 * 2 * self.layers * self.hidden

    @property
    def kv_tokens(self) -> int:
        return self.kv_bytes // self.token_bytes

    def seconds(self, work: StepWork) -> float:
        """Of a step, in which memory and arithmetic overlap."""
        read = self.weight_bytes + work.held_tokens * self.token_bytes
        flops = 2 * self.parameters * work.computed_tokens + 4 * self.layers * self.hidden * work.attention_pairs
        return max(
            read / (self.bytes_per_second * self.memory_share), flops / (self.flops_per_second * self.compute_share)
        )


@dataclass
class Measured:
    """What a run held and how fast it went. Called with the sample of each step.

    lengths: of the requests, for what contiguous allocation would have reserved. whole: whether the means are over all
    steps; else over those in which requests wait, so that the pool is as full as it can be.
    """

    lengths: Lengths
    max_model_len: int = MAX_MODEL_LEN
    whole: bool = False
    pool_tokens: int = 0
    seconds: float = 0.0
    output_tokens: int = 0
    preemptions: int = 0
    _means: dict[str, float] = field(default_factory=dict)
    _weight: float = 0.0

    def __post_init__(self) -> None:
        prompts, finals = self.lengths.prompts, self.lengths.prompts[:, None] + self.lengths.outputs
        self._reserved = {
            name: np.array(
                [
                    [reserve(int(prompt), int(final), self.max_model_len) for final in row]
                    for prompt, row in zip(prompts, finals, strict=True)
                ]
            )
            for name, reserve in RESERVATIONS.items()
        }

    def __call__(self, sample: StepSample) -> None:
        seconds = sample.end - sample.start
        self.seconds += seconds
        self.output_tokens += sample.output_tokens
        self.preemptions += sample.preemptions
        self.pool_tokens = sample.total_blocks * sample.block_size
        if not (self.whole or sample.waiting):
            return
        running = sample.sequences
        assert running is not None
        values = {
            "paged": sample.filled_slots / sample.allocated_slots,
            "saved": sample.sharing_saved or 0.0,
            "running": sample.running,
            "pool": sample.filled_slots / self.pool_tokens,
        }
        held = int(running.lengths.sum())
        for name, reserved in self._reserved.items():
            of_samples = np.minimum(running.samples, reserved.shape[1] - 1)
            values[name] = held / int(reserved[running.rows, of_samples].sum())
        self._weight += seconds
        for name, value in values.items():
            self._means[name] = self._means.get(name, 0.0) + seconds * value

    def mean(self, name: str) -> float:
        """Weighted by time. `paged`, `max`, `pow2`, `oracle`: tokens held, of what is allocated or reserved; `saved`:
        sharing saved; `running`: sequences; `pool`: slots filled, of all there are."""
        return self._means[name] / self._weight

    @property
    def tokens_per_second(self) -> float:
        return self.output_tokens / self.seconds


@dataclass(frozen=True)
class Setting:
    """How to run. kv_tokens: the slots of the pool. n: samples of each request. width: beams, instead of samples."""

    kv_tokens: int = Accelerator().kv_tokens
    block_size: int = 16
    max_model_len: int = MAX_MODEL_LEN
    n: int = 1
    width: int = 0

    def scheduler(self) -> ReservingScheduler:
        state = SlotArrays(MAX_SEQS, self.max_model_len, self.block_size)
        blocks = BlockManager(self.kv_tokens // self.block_size, state, prefix_cache=False)
        return ReservingScheduler(state, blocks, MAX_BATCH_TOKENS)


def simulate(
    lengths: Lengths,
    setting: Setting,
    reserve: Reserve | None = None,
    space: Space | None = None,
    accelerator: Accelerator | None = None,
    whole: bool = False,
) -> Measured:
    """A run of all the requests; without `reserve`, paged."""
    scheduler = setting.scheduler()
    scheduler.use(reserve, space or PackedSpace(setting.kv_tokens))
    measured = Measured(lengths, setting.max_model_len, whole)
    simulation = Simulation(
        scheduler,
        (accelerator or Accelerator()).seconds,
        lambda sequence: int(lengths.outputs[sequence.request.row, sequence.sample]),
        measured,
        end_id=END_ID,
    )
    for _ in simulation.run(make_groups(lengths, setting)):
        pass
    return measured


def make_groups(lengths: Lengths, setting: Setting) -> Iterator[SequenceGroup]:
    """One group for each request, with prompts of nothing in particular; its longest sample is its `max_total`."""
    params = SamplingParams(n=setting.n)
    end_ids = frozenset({END_ID})
    for row, (prompt, outputs) in enumerate(zip(lengths.prompts.tolist(), lengths.outputs.tolist(), strict=True)):
        sequence = Sequence(
            request=Request(row, str(row)),
            params=params,
            token_ids=np.ones(prompt, np.int32),
            num_prompt=prompt,
            max_total=prompt + max(outputs),
            end_ids=end_ids,
            key=random_key(0, str(row), 0),
        )
        if not setting.width:
            yield SequenceGroup([sequence])
            continue
        search = BeamSearch(BeamParams(setting.width), prompt, max(outputs), len(end_ids))
        sequence.num_continuations = search.num_continuations
        yield SequenceGroup([sequence], search)
