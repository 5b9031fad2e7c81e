"""Samples and beams in the scheduler: what they share, what they copy, and that no schedule changes their tokens."""

import numpy as np
import pytest
from fake_device import (
    FakeDevice,
    expected_tokens,
    make_group,
    make_scheduler,
    make_search,
    make_sequence,
    next_token,
    run_to_end,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedgen.request import FinishReason, Status
from pagedgen.scheduling.sequence import random_key

prompts = st.lists(st.integers(0, 1), min_size=1, max_size=12)
sampling = st.tuples(
    st.just("samples"), prompts, st.integers(1, 24), st.integers(1, 5), st.sets(st.integers(0, 4), max_size=1)
)
beams = st.tuples(
    st.just("beams"), prompts, st.integers(1, 24), st.sampled_from([1, 2, 4]), st.sets(st.integers(0, 4), max_size=1)
)


def make(kind, prompt, max_tokens, width, end_ids, key):
    if kind == "samples":
        return make_group(prompt, max_tokens=max_tokens, end_ids=end_ids, key=key, n=width)
    return make_search(prompt, max_tokens=max_tokens, end_ids=end_ids, key=key, width=width, num_return=width)


def sample_keys(key, n):
    return [key, *(random_key(0, str(key), sample) for sample in range(1, n))]


def alone(kind, prompt, max_tokens, width, end_ids, key):
    """What the request gives in a pool and a step that hold everything."""
    if kind == "samples":
        return [expected_tokens(prompt, max_tokens, end_ids, key=k) for k in sample_keys(key, width)]
    scheduler = make_scheduler(512, 4, max_seqs=width, max_batch_tokens=1000, prefix_cache=False)
    scheduler.add(make(kind, prompt, max_tokens, width, end_ids, key))
    (group,) = run_to_end(scheduler, FakeDevice(512, 4))
    assert scheduler.counts.preemptions == 0
    return [(s.generated.tolist(), s.score, s.finish_reason) for s in group.sequences]


def smallest_pool(jobs, block_size):
    """The blocks that suffice for any of the jobs alone, each a (kind, prompt, max_tokens, width, end ids)."""
    return max(
        (shared := len(prompt) // block_size) + width * (-(-(len(prompt) + max_tokens - 1) // block_size) - shared)
        for _, prompt, max_tokens, width, _ in jobs
    )


@settings(max_examples=150, deadline=None)
@given(
    jobs=st.lists(sampling | beams, min_size=2, max_size=6),
    block_size=st.sampled_from([1, 2, 3, 8]),
    slack=st.integers(0, 4),
    spare_slots=st.integers(2, 8),
    budget=st.sampled_from([1, 3, 7, 40]),
    prefix_cache=st.booleans(),
    preempt_every=st.sampled_from([0, 2, 3, 7]),
)
def test_no_schedule_changes_what_a_group_gives(
    jobs, block_size, slack, spare_slots, budget, prefix_cache, preempt_every
):
    """Pools as small as one group can need, chunks, prefix hits, preemption at any time, amid the copies of a resumed
    group too; the fake device fails on any read of wrong KV."""
    num_blocks = slack + smallest_pool(jobs, block_size)
    max_seqs = max(width for _, _, _, width, _ in jobs) + spare_slots
    scheduler = make_scheduler(num_blocks, block_size, max_seqs, 48, budget, prefix_cache)
    for key, job in enumerate(jobs):
        scheduler.add(make(*job, key))
    steps = 0

    def preempt_now_and_then(plan):
        nonlocal steps
        steps += 1
        if preempt_every and steps < 60 and steps % preempt_every == 0 and scheduler.running.groups:
            scheduler._preempt(scheduler.running.groups[-1])
            scheduler.check()

    finished = run_to_end(scheduler, FakeDevice(num_blocks, block_size), on_step=preempt_now_and_then)
    assert len(finished) == len(jobs)
    for group in finished:
        key = int(group.sequences[0].request.id)
        kind = jobs[key][0]
        assert [s.sample for s in group.sequences] == list(range(len(group.sequences)))
        if kind == "samples":
            assert [s.generated.tolist() for s in group.sequences] == alone(*jobs[key], key)
        else:
            found = [(s.generated.tolist(), s.score, s.finish_reason) for s in group.sequences]
            assert found == alone(*jobs[key], key)
        assert all(s.status is Status.OK for s in group.sequences)
    assert scheduler.blocks.num_used == 0
    assert scheduler.blocks.filled_slots == 0
    prompt_tokens = sum(len(prompt) for _, prompt, _, _, _ in jobs)
    assert scheduler.counts.prompt_tokens + scheduler.counts.cached_tokens == prompt_tokens


def test_samples_share_the_prompt_and_copy_only_its_partly_filled_block():
    scheduler = make_scheduler(num_blocks=64, block_size=4, max_seqs=8, max_batch_tokens=64)
    device = FakeDevice(64, 4)
    group = make_group([1, 0, 1, 1, 0, 0], max_tokens=9, key=0, n=4)
    scheduler.add(group)
    scheduler.update(plan := scheduler.schedule(), device.execute(plan, scheduler.state))
    assert plan.num_tokens == 6
    assert (scheduler.blocks.num_used, scheduler.blocks.logical_blocks, scheduler.num_running) == (2, 8, 4)
    plan = scheduler.schedule()
    assert len(plan.copies) == 3  # four sequences share one partly filled block; the last writer keeps it
    scheduler.update(plan, device.execute(plan, scheduler.state))
    run_to_end(scheduler, device)
    assert scheduler.blocks.num_copies == 3
    assert scheduler.counts.prompt_tokens == 6
    assert len({tuple(s.generated.tolist()) for s in group.sequences}) == 4


@pytest.mark.parametrize("n", [2, 3, 7])
def test_samples_run_in_a_pool_that_just_holds_them(n):
    """Their common block is copied for all but one of them: there is no block for one copy more."""
    scheduler = make_scheduler(num_blocks=n, block_size=8, max_seqs=n, max_batch_tokens=64)
    scheduler.add(make_group([1, 0, 1], max_tokens=6, key=0, n=n))
    assert len(run_to_end(scheduler, FakeDevice(n, 8))) == 1
    assert scheduler.counts.preemptions == 0
    assert scheduler.blocks.num_copies == n - 1


def test_a_prompt_that_fills_its_blocks_is_shared_without_any_copy():
    scheduler = make_scheduler(num_blocks=64, block_size=4, max_seqs=8, max_batch_tokens=64)
    scheduler.add(make_group([1, 0, 1, 1], max_tokens=9, key=0, n=5))
    run_to_end(scheduler, FakeDevice(64, 4))
    assert scheduler.blocks.num_copies == 0


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_resumed_group_shares_its_prompt_again(prefix_cache):
    """The pool holds the samples only while they share: resumed as if each were alone, they would never fit."""
    scheduler = make_scheduler(12, 2, max_seqs=9, max_model_len=32, max_batch_tokens=64, prefix_cache=prefix_cache)
    device = FakeDevice(12, 2)
    prompt = [1, 0, 1, 1, 0, 0, 1, 1, 0, 1]
    scheduler.add(make_group([0, 0, 1], max_tokens=10, key=0))
    scheduler.add(make_group(prompt, max_tokens=3, key=1, n=6))
    finished = run_to_end(scheduler, device)
    assert scheduler.counts.preemptions > 0
    found = {group.sequences[0].key: [s.generated.tolist() for s in group.sequences] for group in finished}
    assert found[1] == [expected_tokens(prompt, 3, key=key) for key in sample_keys(1, 6)]


def test_a_resumed_sample_finds_its_own_tokens_in_the_cache():
    scheduler = make_scheduler(64, 2, max_seqs=4, max_model_len=64, max_batch_tokens=64)
    device = FakeDevice(64, 2)
    scheduler.add(make_group([1, 0, 1, 1], max_tokens=30, key=0, n=4))
    for _ in range(20):
        scheduler.update(plan := scheduler.schedule(), device.execute(plan, scheduler.state))
    scheduler._preempt(scheduler.running.groups[0])
    again = 0
    for _ in range(3):
        scheduler.update(plan := scheduler.schedule(), device.execute(plan, scheduler.state))
        scheduler.check()
        again += plan.num_tokens
    assert scheduler.num_running == 4
    assert again < 20  # a block at most for each, besides the new tokens; not the twenty that each had
    run_to_end(scheduler, device)


def test_resumed_beams_share_all_that_they_have_in_common():
    tokens = [[5, 6, 1, 1, 1, 9], [5, 6, 1, 1, 2, 9], [5, 6, 1, 1, 1, 8], [5, 6, 1, 1, 2, 9, 9]]
    group = make_search([5, 6], key=0, width=4)
    group.sequences = [make_sequence(row, key=0) for row in tokens]
    group.plan_forks()
    a, b, c, d = group.sequences
    assert [(fork.child, fork.parent, fork.at) for fork in group.forks] == [(b, a, 4), (c, a, 5), (d, b, 5)]


def test_a_group_is_admitted_only_when_slots_for_all_of_it_are_left():
    scheduler = make_scheduler(num_blocks=64, block_size=4, max_seqs=5, max_batch_tokens=64)
    device = FakeDevice(64, 4)
    for key in range(2):
        scheduler.add(make_group([1, 0, 1], max_tokens=9, key=key, n=3))
    scheduler.update(plan := scheduler.schedule(), device.execute(plan, scheduler.state))
    assert (len(scheduler.running.groups), len(scheduler.waiting)) == (1, 1)
    assert len(run_to_end(scheduler, device)) == 2


def test_samples_end_by_themselves_and_their_slots_go_to_others():
    scheduler = make_scheduler(num_blocks=64, block_size=4, max_seqs=4, max_batch_tokens=64)
    scheduler.add(make_group([1, 0, 1], max_tokens=30, end_ids={0}, key=0, n=3))
    scheduler.add(make_group([1, 1, 1], max_tokens=2, key=7, n=2))
    together = []
    finished = run_to_end(
        scheduler, FakeDevice(64, 4), on_step=lambda plan: together.append(len(scheduler.running.groups))
    )
    assert max(together) == 2  # the second began while the first still had a sample under way
    first = next(group for group in finished if group.sequences[0].key == 0)
    assert len({len(sample.generated) for sample in first.sequences}) > 1
    assert scheduler.running.unheld_slots == 4


def test_a_poisoned_group_is_one_outcome():
    scheduler = make_scheduler(num_blocks=64, block_size=4, max_seqs=8, max_batch_tokens=64)
    device = FakeDevice(64, 4)
    device.poisoned = {1, 2}
    scheduler.add(make_group([1, 0, 1], max_tokens=5, key=0, n=2))
    scheduler.add(make_group([1, 1, 1], max_tokens=5, key=1, n=3))
    scheduler.add(make_search([0, 1], key=2, width=3))
    finished = {group.sequences[0].key: group.sequences for group in run_to_end(scheduler, device)}
    assert [len(finished[key]) for key in range(3)] == [2, 1, 1]
    assert [finished[key][0].status for key in range(3)] == [Status.OK, Status.NAN_LOGITS, Status.NAN_LOGITS]
    assert scheduler.blocks.num_used == 0


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("width", [2, 5, 8])
def test_a_search_copies_at_most_one_block_for_each_branching(block_size, width):
    scheduler = make_scheduler(512, block_size, max_seqs=width, max_model_len=64, max_batch_tokens=64)
    scheduler.add(make_search([1, 0, 1, 1, 0], max_tokens=30, key=0, width=width))
    used = []
    run_to_end(scheduler, FakeDevice(512, block_size), on_step=lambda plan: used.append(scheduler.num_running))
    assert scheduler.counts.branchings > 0
    assert scheduler.blocks.num_copies <= scheduler.counts.branchings
    assert block_size == 1 or scheduler.blocks.num_copies > 0
    assert max(used) == width


def test_a_pruned_beam_gives_its_blocks_back_in_the_same_step():
    scheduler = make_scheduler(64, 2, max_seqs=4, max_model_len=64, max_batch_tokens=64, prefix_cache=False)
    device = FakeDevice(64, 2)
    scheduler.add(make_search([1, 0, 1], max_tokens=20, key=0, width=4))
    for _ in range(12):
        scheduler.update(plan := scheduler.schedule(), device.execute(plan, scheduler.state))
        tables = {int(b) for s in scheduler.slots.occupied for b in _table(scheduler, s)}
        assert scheduler.blocks.num_used == len(tables)


def _table(scheduler, slot):
    return scheduler.state.block_table[slot, : scheduler.state.num_blocks[slot]]


def test_rows_that_begin_alike_wait_until_the_first_has_computed_it():
    scheduler = make_scheduler(num_blocks=64, block_size=4, max_seqs=8, max_model_len=64, max_batch_tokens=16)
    prefix = [1, 0, 1, 1, 0, 0, 1, 1, 0, 1, 1, 1, 0, 0, 0, 1, 1, 0, 1, 0]
    for key in range(5):
        scheduler.add(make_group([*prefix, key, 2, 3], max_tokens=4, key=key))
    scheduler.add(make_group([2, 2, 2], max_tokens=4, key=9))
    device = FakeDevice(64, 4)
    plan = scheduler.schedule()
    assert plan.counts.tolist() == [16]
    scheduler.update(plan, device.execute(plan, scheduler.state))
    plan = scheduler.schedule()
    assert plan.counts.tolist() == [7, 3]  # the rest of the first, and the one that begins otherwise
    scheduler.update(plan, device.execute(plan, scheduler.state))
    finished = run_to_end(scheduler, device)
    cached = {group.sequences[0].key: group.sequences[0].cached_tokens for group in finished}
    assert cached == {0: 0, 1: 20, 2: 20, 3: 20, 4: 20, 9: 0}
    assert scheduler.counts.prompt_tokens == 23 + 4 * 3 + 3


def test_bad_words_and_minimum_are_asked_for_when_they_apply():
    scheduler = make_scheduler(num_blocks=64, block_size=4)
    device = FakeDevice(64, 4)
    first = next_token([1, 2], key=0)
    group = make_group([1, 2], max_tokens=3, end_ids={0}, key=0, min_tokens=2)
    group.sequences[0].bad_words = ((4,), (2, 3), (first, 1), (1, 2, first, 3))
    scheduler.add(group)
    seen = []
    run_to_end(scheduler, device, on_step=lambda plan: seen.append({k: set(v) for k, v in plan.banned.items()}))
    slot = next(iter(seen[0]))
    assert seen[0][slot] == {0, 4, 3}
    second = group.sequences[0].generated.tolist()
    if second[0] == first:
        assert {1, 3, 0, 4} <= seen[1][slot]
    assert 0 not in seen[2][slot]


def test_an_ended_hypothesis_keeps_its_reason():
    scheduler = make_scheduler(512, 4, max_seqs=4, max_model_len=64, max_batch_tokens=64)
    scheduler.add(make_search([1, 0, 1], max_tokens=6, end_ids={0, 1}, key=0, width=4, num_return=4))
    (group,) = run_to_end(scheduler, FakeDevice(512, 4))
    for s in group.sequences:
        ended = s.generated[-1] in (0, 1)
        assert s.finish_reason is (FinishReason.STOP if ended else FinishReason.LENGTH)
        assert ended or len(s.generated) == 6
        assert s.score == pytest.approx(s.cumulative_logprob / len(s.generated), rel=1e-5)
    assert [s.score for s in group.sequences] == sorted((s.score for s in group.sequences), reverse=True)
    assert np.isfinite([s.score for s in group.sequences]).all()


@pytest.mark.parametrize("length_penalty", [-10.0, -1.0, 0.0, 10.0])
@pytest.mark.parametrize("early_stopping", ["true", "false", "never"])
def test_scores_are_numbers_and_in_order_whatever_the_length_penalty(length_penalty, early_stopping):
    scheduler = make_scheduler(512, 16, max_seqs=4, max_model_len=200, max_batch_tokens=64)
    options = {"length_penalty": length_penalty, "early_stopping": early_stopping, "num_return": 4}
    scheduler.add(make_search([1, 0, 1], max_tokens=150, end_ids={0}, key=0, width=4, **options))
    (group,) = run_to_end(scheduler, FakeDevice(512, 16))
    scores = [s.score for s in group.sequences]
    assert all(score < 0 and np.isfinite(score) for score in scores)
    assert scores == sorted(scores, reverse=True)
    assert [s.score for s in group.sequences] == [
        pytest.approx(s.cumulative_logprob / len(s.generated) ** length_penalty, rel=1e-5) for s in group.sequences
    ]
