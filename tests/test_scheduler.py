"""The scheduler against single runs of each request, over random histories and pools that are too small."""

import numpy as np
import pytest
from fake_device import (
    FakeDevice,
    expected_tokens,
    make_group,
    make_scheduler,
    run_to_end,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedgen.request import FinishReason, SamplingParams, Status
from pagedgen.scheduling.sequence import random_key
from pagedgen.scheduling.slots import RunningSlots
from pagedgen.step import SlotArrays

prompts = st.lists(st.integers(0, 1), min_size=1, max_size=20)
jobs = st.lists(
    st.tuples(prompts, st.integers(1, 12), st.sets(st.integers(0, 4), max_size=2), st.integers(0, 4)),
    min_size=1,
    max_size=12,
)


@settings(max_examples=150, deadline=None)
@given(
    jobs=jobs,
    block_size=st.sampled_from([1, 2, 4, 16]),
    slack=st.integers(0, 12),
    max_seqs=st.integers(1, 6),
    budget=st.integers(1, 40),
    prefix_cache=st.booleans(),
)
def test_every_request_gets_the_tokens_it_would_get_alone(jobs, block_size, slack, max_seqs, budget, prefix_cache):
    """Whatever the batch, chunks, prefix hits and preemptions; the fake device fails on any read of wrong KV."""
    longest = max(len(prompt) + max_tokens for prompt, max_tokens, _, _ in jobs)
    num_blocks = -(-longest // block_size) + slack
    scheduler = make_scheduler(num_blocks, block_size, max_seqs, longest, budget, prefix_cache)
    device = FakeDevice(num_blocks, block_size)
    for key, (prompt, max_tokens, end_ids, min_tokens) in enumerate(jobs):
        minimum = min(min_tokens, max_tokens)
        scheduler.add(make_group(prompt, max_tokens=max_tokens, end_ids=end_ids, key=key, min_tokens=minimum))
    finished = run_to_end(scheduler, device)
    assert sorted(group.sequences[0].key for group in finished) == list(range(len(jobs)))
    for group in finished:
        sequence = group.sequences[0]
        prompt, max_tokens, end_ids, min_tokens = jobs[sequence.key]
        expected = expected_tokens(prompt, max_tokens, end_ids, min(min_tokens, max_tokens), sequence.key)
        assert sequence.generated.tolist() == expected
        assert sequence.status is Status.OK
        ended = expected[-1] in end_ids
        assert sequence.finish_reason is (FinishReason.STOP if ended else FinishReason.LENGTH)
        assert 0 <= sequence.cached_tokens < len(prompt)
        assert sequence.cached_tokens % block_size == 0
    assert scheduler.blocks.num_used == 0
    assert scheduler.blocks.filled_slots == 0
    if not prefix_cache:
        assert scheduler.blocks.num_cached == 0


def test_a_small_pool_preempts_the_last_admitted_and_still_gives_the_same_tokens():
    scheduler = make_scheduler(num_blocks=8, block_size=4, max_seqs=4, max_model_len=32, prefix_cache=False)
    for key in range(4):
        scheduler.add(make_group([key, 1, 2], max_tokens=20, key=key))
    finished = run_to_end(scheduler, FakeDevice(8, 4))
    assert scheduler.counts.preemptions > 0
    assert {g.sequences[0].key: g.sequences[0].generated.tolist() for g in finished} == {
        key: expected_tokens([key, 1, 2], 20, key=key) for key in range(4)
    }


def test_nothing_is_admitted_in_a_step_with_a_preemption(monkeypatch):
    scheduler = make_scheduler(num_blocks=6, block_size=2, max_seqs=3, max_model_len=12, prefix_cache=False)
    for key in range(3):
        scheduler.add(make_group([key, 1, 2], max_tokens=9, key=key))
    admit, tried = scheduler._admit, []
    monkeypatch.setattr(scheduler, "_admit", lambda *args: tried.append(scheduler.counts.preemptions) or admit(*args))
    steps, preempting = 0, 0

    def on_step(plan):
        nonlocal steps, preempting
        steps += 1
        preempting += len(tried) < steps - preempting

    run_to_end(scheduler, FakeDevice(6, 2), on_step=on_step)
    assert preempting == scheduler.counts.preemptions > 0


def test_a_preempted_group_is_the_next_to_be_admitted():
    scheduler = make_scheduler(num_blocks=8, block_size=4, max_seqs=4, max_model_len=32, prefix_cache=False)
    for key in range(6):
        scheduler.add(make_group([key, 1, 2], max_tokens=20, key=key))
    finished = run_to_end(scheduler, FakeDevice(8, 4))
    assert scheduler.counts.preemptions > 0
    assert [group.sequences[0].key for group in finished] == list(range(6))


def test_a_long_prompt_is_computed_in_chunks_and_does_not_hold_up_generation():
    scheduler = make_scheduler(num_blocks=64, block_size=4, max_seqs=4, max_model_len=100, max_batch_tokens=8)
    device = FakeDevice(64, 4)
    scheduler.add(make_group([1, 2, 3], max_tokens=30, key=0))
    scheduler.update(plan := scheduler.schedule(), device.execute(plan, scheduler.state))
    scheduler.add(make_group([0] * 50, max_tokens=4, key=1))
    for _ in range(5):
        plan = scheduler.schedule()
        assert plan.counts.tolist() == [1, 7]
        assert plan.samples.tolist() == [True, False]
        scheduler.update(plan, device.execute(plan, scheduler.state))


def test_a_finished_prompt_serves_the_next_one_from_the_cache():
    scheduler = make_scheduler(num_blocks=32, block_size=4, max_batch_tokens=64)
    device = FakeDevice(32, 4)
    prompt = [1, 0, 1, 1, 0, 0, 1, 0, 1]
    scheduler.add(make_group(prompt, max_tokens=3, key=0))
    run_to_end(scheduler, device)
    scheduler.add(make_group(prompt, max_tokens=3, key=1))
    (group,) = run_to_end(scheduler, device)
    assert group.sequences[0].cached_tokens == 8
    assert scheduler.counts.cached_tokens == 8


def test_a_poisoned_sequence_ends_alone():
    scheduler = make_scheduler(num_blocks=32, block_size=4)
    device = FakeDevice(32, 4)
    device.poisoned = {1}
    for key in range(3):
        scheduler.add(make_group([1, 2, 3], max_tokens=5, key=key))
    statuses = {g.sequences[0].key: g.sequences[0].status for g in run_to_end(scheduler, device)}
    assert statuses == {0: Status.OK, 1: Status.NAN_LOGITS, 2: Status.OK}


def test_abort_returns_every_block():
    scheduler = make_scheduler(num_blocks=16, block_size=4)
    device = FakeDevice(16, 4)
    for key in range(6):
        scheduler.add(make_group([key, 2, 3, 4, 1], max_tokens=9, key=key))
    scheduler.update(plan := scheduler.schedule(), device.execute(plan, scheduler.state))
    scheduler.abort()
    scheduler.check()
    assert scheduler.blocks.num_used == 0
    assert not scheduler.has_work


@pytest.mark.parametrize("count", [3, 20])
def test_many_end_ids_end_a_sequence_too(count):
    end_ids = range(4, 4 + count)
    scheduler = make_scheduler(num_blocks=16, block_size=4)
    scheduler.add(make_group([1, 2], max_tokens=40, end_ids=end_ids, key=0))
    (group,) = run_to_end(scheduler, FakeDevice(16, 4))
    assert group.sequences[0].generated.tolist() == expected_tokens([1, 2], 40, set(end_ids))
    assert group.sequences[0].finish_reason is FinishReason.STOP


def test_random_keys_depend_on_seed_row_and_sample_only():
    keys = {random_key(seed, row, sample) for seed in range(3) for row in ("0", "1", "é") for sample in range(3)}
    assert len(keys) == 27
    assert random_key(0, "a", 0) == random_key(0, "a", 0)
    assert random_key(-1, "a", 0) != random_key(1, "a", 0)
    assert all(0 <= key < 2**64 for key in keys)


def test_slot_arrays_have_room_for_the_longest_sequence():
    scheduler = make_scheduler(num_blocks=4, block_size=4, max_model_len=15)
    scheduler.add(make_group([1] * 7, max_tokens=8, key=0))
    (group,) = run_to_end(scheduler, FakeDevice(4, 4))
    assert len(group.sequences[0].token_ids) == 15
    assert np.all(group.sequences[0].token_ids[:7] == 1)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_prompt_tokens_are_counted_once_however_often_they_are_computed(prefix_cache):
    scheduler = make_scheduler(num_blocks=10, block_size=4, max_seqs=6, max_model_len=32, prefix_cache=prefix_cache)
    for key in range(6):
        scheduler.add(make_group([key] * 10, max_tokens=20, key=key))
    run_to_end(scheduler, FakeDevice(10, 4))
    assert scheduler.counts.preemptions > 0
    assert (scheduler.counts.prompt_tokens, scheduler.counts.cached_tokens) == (60, 0)


def test_the_head_of_the_queue_is_not_matched_again_before_blocks_are_released(monkeypatch):
    scheduler = make_scheduler(num_blocks=8, block_size=4, max_seqs=4, max_model_len=32)
    device = FakeDevice(8, 4)
    for key in range(3):
        scheduler.add(make_group([key] * 17, max_tokens=8, key=key))
    matched = []
    match = scheduler.blocks.match_prefix
    monkeypatch.setattr(scheduler.blocks, "match_prefix", lambda ids: matched.append(int(ids[0])) or match(ids))
    finished = run_to_end(scheduler, device)
    assert [group.sequences[0].key for group in finished] == [0, 1, 2]
    # Once refused beside the one that runs, then started when it has finished.
    assert matched == [0, 1, 1, 2, 2]


def test_a_slot_holds_the_parameters_of_the_sequence_in_it():
    state = SlotArrays(max_seqs=1, max_model_len=16, block_size=4)
    slots = RunningSlots(state)
    warm, cold = SamplingParams(temperature=0.5, top_k=3), SamplingParams(temperature=0.25, frequency_penalty=1.0)
    many = range(20, 40)
    for params, end_ids in [(warm, {1}), (warm, {1, 2}), (cold, {1, 2}), (cold, many), (cold, {3}), (warm, {3})]:
        group = make_group([1, 2], end_ids=end_ids)
        (sequence,) = group.sequences
        sequence.params = params
        slot = slots.occupy(sequence, group)
        assert state.temperature[slot] == params.temperature
        assert state.top_k[slot] == params.top_k
        assert state.frequency_penalty[slot] == params.frequency_penalty
        assert slots.watched[slot] == (end_ids is many)
        assert {*slots.end_ids[slot].tolist()} - {-1} == (set() if end_ids is many else end_ids)
        slots.vacate(sequence)
