"""Steps that are planned ahead of the results: the same tokens as without, over random histories."""

import itertools

import numpy as np
import pytest
from fake_device import (
    DelayedDevice,
    FakeDevice,
    expected_tokens,
    make_group,
    make_scheduler,
    make_sequence,
    run_ahead,
    run_to_end,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from test_groups import alone, beams, make, sampling, smallest_pool
from test_out_of_memory import at_random, rules
from test_scheduler import jobs as plain_jobs

from pagedgen.pipeline import Pipeline
from pagedgen.request import FinishReason, Status
from pagedgen.scheduling.sequence import SequenceGroup


def outcome(group):
    return [(s.generated.tolist(), s.score, s.finish_reason, s.status) for s in group.sequences]


@settings(max_examples=150, deadline=None)
@given(
    jobs=plain_jobs,
    block_size=st.sampled_from([1, 2, 4, 16]),
    slack=st.integers(0, 12),
    max_seqs=st.integers(1, 6),
    budget=st.integers(1, 40),
    prefix_cache=st.booleans(),
)
def test_every_request_gets_the_tokens_it_would_get_alone(jobs, block_size, slack, max_seqs, budget, prefix_cache):
    longest = max(len(prompt) + max_tokens for prompt, max_tokens, _, _ in jobs)
    num_blocks = -(-longest // block_size) + slack
    scheduler = make_scheduler(num_blocks, block_size, max_seqs, longest, budget, prefix_cache)
    for key, (prompt, max_tokens, end_ids, min_tokens) in enumerate(jobs):
        minimum = min(min_tokens, max_tokens)
        scheduler.add(make_group(prompt, max_tokens=max_tokens, end_ids=end_ids, key=key, min_tokens=minimum))
    finished = run_ahead(scheduler, DelayedDevice(num_blocks, block_size))
    assert sorted(group.sequences[0].key for group in finished) == list(range(len(jobs)))
    for group in finished:
        (sequence,) = group.sequences
        prompt, max_tokens, end_ids, min_tokens = jobs[sequence.key]
        expected = expected_tokens(prompt, max_tokens, end_ids, min(min_tokens, max_tokens), sequence.key)
        assert sequence.generated.tolist() == expected
        assert sequence.finish_reason is (FinishReason.STOP if expected[-1] in end_ids else FinishReason.LENGTH)
    assert scheduler.blocks.num_used == scheduler.blocks.filled_slots == 0
    prompt_tokens = sum(len(prompt) for prompt, *_ in jobs)
    assert scheduler.counts.prompt_tokens + scheduler.counts.cached_tokens == prompt_tokens
    assert scheduler.counts.output_tokens == sum(len(group.sequences[0].generated) for group in finished)


@settings(max_examples=200, deadline=None)
@given(
    jobs=st.lists(sampling | beams, min_size=2, max_size=6),
    block_size=st.sampled_from([1, 2, 3, 8]),
    slack=st.integers(0, 4),
    spare_slots=st.integers(2, 8),
    budget=st.sampled_from([1, 3, 7, 40]),
    prefix_cache=st.booleans(),
    fails=st.just(lambda plan: False) | rules | st.builds(at_random, st.integers(0, 1000), st.just(0.2), st.just(2)),
    preempt_every=st.sampled_from([0, 2, 3]),
)
def test_no_history_changes_what_a_group_gives(
    jobs, block_size, slack, spare_slots, budget, prefix_cache, fails, preempt_every
):
    """Samples, beams, chunks, prefix hits, preemptions and steps that run out of memory, each while another step may
    be in flight."""
    num_blocks = slack + smallest_pool(jobs, block_size)
    max_seqs = max(width for _, _, _, width, _ in jobs) + spare_slots
    scheduler = make_scheduler(num_blocks, block_size, max_seqs, 48, budget, prefix_cache)
    for key, job in enumerate(jobs):
        scheduler.add(make(*job, key))
    device, schedule, planned = DelayedDevice(num_blocks, block_size, fails), scheduler.schedule, 0

    def preempt_now_and_then():
        nonlocal planned
        planned += 1
        due = preempt_every and planned < 60 and planned % preempt_every == 0
        if due and not scheduler.in_flight and scheduler.running.groups:
            scheduler._preempt(scheduler.running.groups[-1])
        return schedule()

    scheduler.schedule = preempt_now_and_then
    finished = run_ahead(scheduler, device)
    assert sorted(int(group.sequences[0].request.id) for group in finished) == list(range(len(jobs)))
    for group in finished:
        key = int(group.sequences[0].request.id)
        if any(s.status is Status.OUT_OF_MEMORY for s in group.sequences):
            continue
        if jobs[key][0] == "samples":
            assert [s.generated.tolist() for s in group.sequences] == alone(*jobs[key], key)
        else:
            assert [(s.generated.tolist(), s.score, s.finish_reason) for s in group.sequences] == alone(*jobs[key], key)
    assert scheduler.counts.out_of_memory == device.failed
    assert scheduler.blocks.num_used == scheduler.blocks.filled_slots == 0
    assert scheduler.running.unheld_slots == max_seqs


def test_the_device_never_waits_while_sequences_generate():
    scheduler = make_scheduler(num_blocks=64, block_size=4, max_seqs=4, max_model_len=64)
    device = DelayedDevice(64, 4)
    for key in range(8):
        scheduler.add(make_group([key, 1, 2], max_tokens=5 + 3 * key, key=key))
    run_ahead(scheduler, device)
    assert device.launched_ahead == device.launched - 1  # all but the first


def test_an_end_token_is_noticed_one_step_late_and_nothing_is_seen_of_that_step():
    scheduler = make_scheduler(num_blocks=16, block_size=4, max_seqs=2)
    device = DelayedDevice(16, 4)
    prompt, end = [1, 2], {3}
    expected = expected_tokens(prompt, 40, end)
    assert 2 < len(expected) < 40
    scheduler.add(make_group(prompt, max_tokens=40, end_ids=end, key=0))
    (group,) = run_ahead(scheduler, device)
    assert group.sequences[0].generated.tolist() == expected
    assert device.launched == len(expected) + 1
    assert scheduler.counts.output_tokens == len(expected)


def test_a_slot_is_given_away_while_its_last_step_is_in_flight():
    """What that step draws for the sequence that is gone must not reach the one that has the slot now."""
    scheduler = make_scheduler(num_blocks=64, block_size=4, max_seqs=1)
    device = DelayedDevice(64, 4)
    for key in range(6):
        scheduler.add(make_group([key, 1], max_tokens=30, end_ids={3}, key=key))
    finished = run_ahead(scheduler, device)
    assert [g.sequences[0].generated.tolist() for g in finished] == [
        expected_tokens([key, 1], 30, {3}, key=key) for key in range(6)
    ]
    assert device.launched_ahead == device.launched - 1


def test_the_limit_of_tokens_is_known_ahead():
    scheduler = make_scheduler(num_blocks=16, block_size=4)
    device = DelayedDevice(16, 4)
    scheduler.add(make_group([1, 2, 3], max_tokens=7, key=0))
    run_ahead(scheduler, device)
    assert device.launched == 7


@pytest.mark.parametrize("bad", [(4,), (2, 4)])
def test_bad_words_wait_for_the_tokens_they_look_at(bad):
    def run(runner, device_class):
        scheduler = make_scheduler(num_blocks=64, block_size=4)
        sequence = make_sequence([1, 0, 2], max_tokens=30, key=0)
        sequence.bad_words = (bad,)
        other = make_group([2, 2], max_tokens=30, key=1)
        scheduler.add(SequenceGroup([sequence]))
        scheduler.add(other)
        device = device_class(64, 4)
        return {g.sequences[0].key: g.sequences[0].generated.tolist() for g in runner(scheduler, device)}, device

    expected, _ = run(run_to_end, FakeDevice)
    found, device = run(run_ahead, DelayedDevice)
    assert found == expected
    text = str(found[0])
    assert str(list(bad))[1:-1] not in text
    assert device.launched_ahead > 0


def test_logits_that_cannot_be_used_end_a_sequence_alone():
    scheduler = make_scheduler(num_blocks=32, block_size=4)
    device = DelayedDevice(32, 4)
    device.poisoned = {1}
    for key in range(3):
        scheduler.add(make_group([1, 2, 3], max_tokens=5, key=key))
    statuses = {g.sequences[0].key: g.sequences[0].status for g in run_ahead(scheduler, device)}
    assert statuses == {0: Status.OK, 1: Status.NAN_LOGITS, 2: Status.OK}


def test_samples_of_steps_lie_one_after_the_other_and_add_up():
    scheduler = make_scheduler(num_blocks=64, block_size=4, max_seqs=4, max_model_len=64)
    for key in range(8):
        scheduler.add(make_group([key, 1, 2, 3, 4], max_tokens=5 + 3 * key, key=key, n=1 + key % 3))
    samples = []
    run_ahead(scheduler, DelayedDevice(64, 4), on_step=samples.append)
    assert all(a.end <= b.start <= b.end for a, b in itertools.pairwise(samples))
    counts = scheduler.counts
    for name, total in (
        ("prompt_tokens", counts.prompt_tokens),
        ("output_tokens", counts.output_tokens),
        ("cached_prompt_tokens", counts.cached_tokens),
    ):
        assert sum(getattr(sample, name) for sample in samples) == total, name
    assert all(s.filled_slots <= s.used_blocks * s.block_size for s in samples)
    assert max(s.running for s in samples) == 4


def test_abort_with_steps_in_flight_returns_every_block():
    scheduler = make_scheduler(num_blocks=16, block_size=4)
    device = DelayedDevice(16, 4)
    pipeline = Pipeline(
        scheduler, device, ahead=True, free_memory=lambda: None, on_step=None, on_note=lambda text: None
    )
    for key in range(6):
        scheduler.add(make_group([key, 2, 3, 4, 1], max_tokens=9, key=key))
    pipeline.step()
    assert len(scheduler.in_flight) == 1
    pipeline.abort()
    scheduler.check()
    assert scheduler.blocks.num_used == 0
    assert not scheduler.has_work
    assert not scheduler.in_flight
    scheduler.add(make_group([1, 2], max_tokens=3, key=9))
    assert np.array_equal(pipeline.step(), [])
