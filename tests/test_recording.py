"""The recording of a run against brute force: every number recomputed from the full history of block tables."""

import math
from collections import defaultdict
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from fake_device import FakeDevice, make_group, make_scheduler, make_search
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedgen.observer import StepObserver, StepTimes
from pagedgen.stats.recorder import Recorder
from pagedgen.stats.recording import COLUMNS, read_recording
from pagedgen.stats.types import RunInfo, RunningSequences, StepSample

MAX_MODEL_LEN = 48
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=12)
jobs = st.tuples(
    st.sampled_from(["samples", "beams"]),
    prompts,
    st.integers(1, 24),
    st.sampled_from([1, 2, 4]),
    st.sets(st.integers(0, 4), max_size=1),
)


@dataclass
class Step:
    """One step as it really was. places: (row, sample, tokens held, block table) of each sequence that runs."""

    start: float
    end: float
    places: list[tuple[int, int, int, tuple[int, ...]]]
    waiting: int
    computed: int
    prompt_tokens: int = 0
    output_tokens: int = 0

    @property
    def is_prompts(self):
        return self.prompt_tokens > 0 or self.computed > len(self.places)

    @property
    def seconds(self):
        return self.end - self.start


@dataclass
class History:
    block_size: int
    steps: list[Step] = field(default_factory=list)
    finals: dict[tuple[int, int], int] = field(default_factory=dict)

    def slots(self, step):
        return {
            (table[i // self.block_size], i % self.block_size)
            for _, _, length, table in step.places
            for i in range(length)
        }

    def used(self, step):
        return {block for *_, table in step.places for block in table}

    def mean(self, value, steps=None):
        pairs = [(value(step), step.seconds) for step in (self.steps if steps is None else steps)]
        pairs = [(v, s) for v, s in pairs if v is not None]
        weight = math.fsum(s for _, s in pairs)
        return math.fsum(v * s for v, s in pairs) / weight if weight else None

    def waste(self, step):
        used = self.used(step)
        return 1 - len(self.slots(step)) / (len(used) * self.block_size) if used else None

    def sharing(self, step):
        used, logical = self.used(step), sum(len(table) for *_, table in step.places)
        return 1 - len(used) / logical if logical else None

    def sharing_in_requests(self, step):
        logical, by_row = sum(len(table) for *_, table in step.places), defaultdict(set)
        for row, _, _, table in step.places:
            by_row[row] |= set(table)
        return (logical - sum(map(len, by_row.values()))) / logical if logical else None

    def reserved(self, step, policy):
        finals = [self.finals[row, sample] for row, sample, *_ in step.places]
        if policy == "max":
            return MAX_MODEL_LEN * len(finals)
        if policy == "oracle":
            return sum(finals)
        return sum(min(2 ** math.ceil(math.log2(final)), MAX_MODEL_LEN) for final in finals)


def observe(scheduler, history, durations, recorder, preempt_every, device):
    """Run to the end, noting all that there is at each step."""
    observer, now, number, state = StepObserver(scheduler), 100.0, 0, scheduler.state
    while scheduler.has_work:
        number += 1
        if preempt_every and number < 60 and number % preempt_every == 0 and scheduler.running.groups:
            scheduler._preempt(scheduler.running.groups[-1])
        plan = scheduler.schedule()
        held = observer.holding(plan)
        counts = dict(zip(plan.slots.tolist(), plan.counts.tolist(), strict=True))
        places = [
            (
                sequence.request.row,
                sequence.sample,
                int(state.num_computed[sequence.slot]) + counts.get(sequence.slot, 0),
                tuple(state.block_table[sequence.slot, : state.num_blocks[sequence.slot]].tolist()),
            )
            for group in scheduler.running.groups
            for sequence in group.running
        ]
        start = now + (number % 3) / 4
        now = start + durations[number % len(durations)]
        step = Step(start, now, places, len(scheduler.waiting), int(plan.counts.sum()))
        before = scheduler.counts.prompt_tokens, scheduler.counts.output_tokens
        finished = scheduler.update(plan, device.execute(plan, state))
        step.prompt_tokens, step.output_tokens = (
            scheduler.counts.prompt_tokens - before[0],
            scheduler.counts.output_tokens - before[1],
        )
        history.steps.append(step)
        for group in finished:
            note_final_lengths(history, group)
        recorder.add_step(observer.after(StepTimes(start, now), held, finished))


def note_final_lengths(history, group):
    row = group.sequences[0].request.row
    if group.beam is None:
        for sequence in group.sequences:
            history.finals[row, sequence.sample] = len(sequence.token_ids)
    else:  # the places of a search last as long as it does
        longest = max(place[2] for step in history.steps for place in step.places if place[0] == row)
        history.finals[row, 0] = longest + 1


def info(block_size, num_blocks):
    return RunInfo("m", "cpu", "float32", "none", 64 * num_blocks, num_blocks, block_size, MAX_MODEL_LEN)


@settings(max_examples=120, deadline=None)
@given(
    work=st.lists(jobs, min_size=1, max_size=6),
    block_size=st.sampled_from([1, 3, 8]),
    slack=st.integers(0, 20),
    budget=st.sampled_from([1, 7, 40]),
    prefix_cache=st.booleans(),
    preempt_every=st.sampled_from([0, 2, 5]),
    durations=st.lists(st.sampled_from([0.0, 0.25, 0.5, 3.0]), min_size=1, max_size=7),
    capacity=st.sampled_from([2, 4, 512]),
)
def test_every_number_is_that_of_the_full_history(
    tmp_path_factory, work, block_size, slack, budget, prefix_cache, preempt_every, durations, capacity
):
    """With samples, beams, prefix hits and preemption, merged intervals or not, and read from the file again."""
    needed = max(width * (-(-(len(prompt) + tokens) // block_size)) for _, prompt, tokens, width, _ in work)
    num_blocks = needed + slack
    scheduler = make_scheduler(num_blocks, block_size, 8, MAX_MODEL_LEN, budget, prefix_cache)
    for key, (kind, prompt, tokens, width, end_ids) in enumerate(work):
        scheduler.add(
            make_group(prompt, max_tokens=tokens, end_ids=end_ids, key=key, n=width)
            if kind == "samples"
            else make_search(prompt, max_tokens=tokens, end_ids=end_ids, key=key, width=width)
        )
    history = History(block_size)
    recorder = Recorder(info(block_size, num_blocks), "now", capacity=capacity, began=100.0)
    counted = pytest.MonkeyPatch()
    counted.setattr("pagedgen.observer.COUNTING_SHARE", 1e9)  # in every step
    observe(scheduler, history, durations, recorder, preempt_every, FakeDevice(num_blocks, block_size))
    counted.undo()
    path = tmp_path_factory.mktemp("run") / "timeline.parquet"
    recorder.recording({"rows_done": 1}, {"generating": 1.0}).write(path)
    check(read_recording(path), history, capacity)


def check(recording, history, capacity):
    assert recording is not None
    assert recording.sessions[0].info.max_model_len == MAX_MODEL_LEN
    assert recording.summary == {"rows_done": 1}
    assert len(recording.sums) <= capacity
    means = {
        "live_blocks": lambda step: len(history.used(step)),
        "filled_tokens": lambda step: len(history.slots(step)),
        "logical_blocks": lambda step: sum(len(table) for *_, table in step.places),
        "held_tokens": lambda step: sum(length for _, _, length, _ in step.places),
        "running": lambda step: len(step.places),
        "waiting": lambda step: step.waiting,
        "waste": history.waste,
        "sharing_saved": history.sharing,
        "sharing_in_requests": history.sharing_in_requests,
        **{f"reserved_{p}": lambda step, p=p: history.reserved(step, p) for p in ("max", "pow2", "oracle")},
    }
    for name, value in means.items():
        expected = history.mean(value)
        if expected is None:
            assert recording.mean(name) is None
        else:
            assert recording.mean(name) == pytest.approx(expected, rel=1e-9, abs=1e-9), name
    steps = history.steps
    peaks = {"peak_live_blocks": means["live_blocks"], "peak_running": means["running"]}
    for name, value in peaks.items():
        assert recording.column(name).max() == max(map(value, steps)), name
    assert recording.total("steps") == len(steps)
    assert recording.total("step_s") == pytest.approx(math.fsum(step.seconds for step in steps))
    for phase, chosen in {
        "prompt": [step for step in steps if step.is_prompts],
        "tail": [step for step in steps if not step.is_prompts and not step.waiting],
    }.items():
        assert recording.total(f"{phase}_phase_s") == pytest.approx(math.fsum(step.seconds for step in chosen))
        assert recording.total(f"{phase}_phase_output_tokens") == sum(step.output_tokens for step in chosen)
    # A sample that ends with its first token never holds a block.
    ran = {(row, sample) for step in steps for row, sample, *_ in step.places}
    assert recording.sequences == len(ran)
    assert recording.reserved[2] == pytest.approx(sum(history.finals[key] for key in ran) / len(ran))
    # Interval by interval, where each holds whole steps.
    first = 0
    for i, count in enumerate(recording.column("steps").astype(int).tolist()):
        steps = history.steps[first : first + count]
        first += count
        assert recording.column("start_s")[i] == pytest.approx(steps[0].start - 100)
        assert recording.column("end_s")[i] == pytest.approx(steps[-1].end - 100)
        for name in ("waste", "live_blocks", "reserved_oracle", "reserved_pow2"):
            expected = history.mean(means[name], steps)
            if expected is not None:
                assert recording.column(name)[i] == pytest.approx(expected, rel=1e-9, abs=1e-9), name


def sample(start, end, **more):
    values = {
        "used_blocks": 2,
        "cached_blocks": 1,
        "free_blocks": 7,
        "total_blocks": 10,
        "block_size": 16,
        "filled_slots": 20,
        "logical_blocks": 2,
        "running": 1,
        "waiting": 0,
        "prompt_tokens": 0,
        "output_tokens": 1,
        "held_tokens": 20,
    }
    return StepSample(start, end, **values | more)


def one(row, length):
    slot = np.array([0], np.int32)
    return RunningSequences(slot, np.array([row], np.int64), slot, np.array([length], np.int32))


def test_a_later_process_adds_to_what_an_earlier_one_recorded(tmp_path):
    clock = [10.0]
    first = Recorder(info(16, 10), "a", clock=lambda: clock[0])
    first.add_step(sample(11.0, 13.0, sequences=one(0, 20), finished_rows=(0,)))
    clock[0] = 14.0
    first.recording({}, {"generating": 3.0}).write(tmp_path / "x.parquet")
    clock[0] = 100.0
    changed = replace(info(8, 20), max_model_len=32)
    second = Recorder(changed, "b", read_recording(tmp_path / "x.parquet"), clock=lambda: clock[0])
    second.add_step(sample(101.0, 105.0, block_size=8, sequences=one(1, 6), finished_rows=(1,)))
    clock[0] = 106.0
    found = second.recording({}, {})
    assert found.column("session").tolist() == [0, 1]
    assert found.column("start_s").tolist() == [1.0, 5.0]
    assert found.column("end_s").tolist() == [3.0, 9.0]
    assert found.elapsed_s == 10.0
    assert found.by_session("block_size").tolist() == [16, 8]
    assert found.by_session("bytes_per_block").tolist() == [64, 64]
    assert found.sequences == 2
    assert found.reserved == ((48 + 32) / 2, (32 + 8) / 2, (21 + 7) / 2)
    assert found.column("reserved_oracle").tolist() == [21, 7]


def test_sequences_that_run_count_as_the_mean_of_those_that_have_finished():
    recorder = Recorder(info(16, 10), "a", began=0.0)
    recorder.add_step(sample(0.0, 1.0, sequences=one(0, 29)))
    found = recorder.recording({}, {})
    assert found.column("reserved_oracle").tolist() == [30], "as long as it is, while none has finished"
    assert found.column("reserved_max").tolist() == [MAX_MODEL_LEN]
    recorder = Recorder(info(16, 10), "a", began=0.0)
    recorder.add_step(sample(0.0, 1.0, sequences=one(0, 29), finished_rows=(0,)))
    recorder.add_step(sample(1.0, 3.0, sequences=one(1, 3)))
    assert recorder.recording({}, {}).column("reserved_oracle").tolist() == [30, 30]
    assert recorder.recording({}, {}).column("reserved_oracle").tolist() == [30, 30], "it is counted once only"
    recorder.add_step(sample(3.0, 4.0, sequences=one(1, 9), finished_rows=(1,)))
    assert recorder.recording({}, {}).column("reserved_oracle").tolist() == [30, 10, 10]


def test_time_between_the_steps_is_counted_with_the_step_that_follows():
    recorder = Recorder(info(16, 10), "a", began=0.0)
    recorder.add_seconds("input", 0.5)
    recorder.add_step(sample(1.0, 2.0))
    recorder.add_seconds("write", 0.25)
    recorder.add_step(sample(3.0, 4.0))
    recorder.add_seconds("write", 0.125)
    found = recorder.recording({}, {})
    assert found.column("input_s").tolist() == [0.5, 0.0]
    assert found.column("write_s").tolist() == [0.0, 0.375]


def test_the_file_stays_small_however_long_the_run(tmp_path):
    recorder = Recorder(info(16, 10), "a", began=0.0)
    sizes = []
    for step in range(20_000):
        recorder.add_step(sample(step, step + 0.9))
        if step in (1000, 19_999):
            sizes.append(recorder.recording({}, {}).write(tmp_path / "x.parquet"))
    found = read_recording(tmp_path / "x.parquet")
    assert 512 <= len(found.sums) <= 1024
    assert found.total("steps") == found.total("output_tokens") == 20_000
    assert max(sizes) < 200_000


@pytest.mark.parametrize("content", [b"", b"PAR1", b"x" * 1000])
def test_a_damaged_file_is_no_recording(tmp_path, content):
    (tmp_path / "x.parquet").write_bytes(content)
    assert read_recording(tmp_path / "x.parquet") is None
    assert read_recording(tmp_path / "not there.parquet") is None


def test_the_table_has_the_documented_columns(tmp_path):
    recorder = Recorder(info(16, 10), "a", began=0.0)
    recorder.add_step(sample(0.0, 1.0, used_blocks=0, logical_blocks=0, filled_slots=0))
    table = recorder.recording({}, {}).table()
    assert table.column_names == list(COLUMNS)
    assert table["waste"].to_pylist() == [None], "nothing was allocated"
    assert table["steps"].to_pylist() == [1]
