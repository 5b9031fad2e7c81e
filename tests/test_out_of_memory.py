"""Steps that run out of memory: what they leave behind, that the others give the same as ever, and who is given up."""

import random
import weakref
from collections import Counter
from dataclasses import replace

import pytest
import torch
from fake_device import FailingDevice, expected_tokens, make_group, make_scheduler, make_search, run_to_end
from hypothesis import given, settings
from hypothesis import strategies as st
from test_groups import alone, beams, make, sampling, smallest_pool
from tiny_models import random_sequences, tiny_checkpoint

from pagedgen import Engine, EngineConfig, PagedgenError, Request, SamplingParams, Status
from pagedgen.execution.failures import is_out_of_memory
from pagedgen.request import BeamParams, FinishReason
from pagedgen.scheduling import budget
from pagedgen.scheduling.budget import GOOD_STEPS, StepBudget


def outcome(group, kind):
    if kind == "samples":
        return [s.generated.tolist() for s in group.sequences]
    return [(s.generated.tolist(), s.score, s.finish_reason) for s in group.sequences]


# By default none of these fails a step of a single token, so that no group is given up.


def more_than(most):
    return lambda plan: plan.num_tokens > most


def at_random(seed, share, least=2):
    draw = random.Random(seed)
    return lambda plan: plan.num_tokens >= least and draw.random() < share


def the_first(count):
    left = iter(range(count))
    return lambda plan: plan.num_tokens > 1 and next(left, None) is not None


rules = st.one_of(
    st.builds(more_than, st.integers(1, 12)),
    st.builds(at_random, st.integers(0, 1000), st.sampled_from([0.05, 0.3, 0.9])),
    st.builds(the_first, st.integers(1, 4)),
)


@settings(max_examples=200, deadline=None)
@given(
    jobs=st.lists(sampling | beams, min_size=2, max_size=6),
    block_size=st.sampled_from([1, 2, 3, 8]),
    slack=st.integers(0, 12),
    spare_slots=st.integers(0, 8),
    most=st.sampled_from([17, 40, 100]),
    prefix_cache=st.booleans(),
    fails=rules | st.builds(at_random, st.integers(0, 1000), st.just(0.3), st.just(1)),
)
def test_steps_that_run_out_of_memory_change_nothing(jobs, block_size, slack, spare_slots, most, prefix_cache, fails):
    """The fake device has done half of a step and spoiled its other half when it fails, and fails the test on any read
    of wrong KV afterwards. Where steps of a single token fail too, some groups are given up."""
    num_blocks = slack + smallest_pool(jobs, block_size)
    max_seqs = max(width for _, _, _, width, _ in jobs) + spare_slots
    scheduler = make_scheduler(num_blocks, block_size, max_seqs, 48, most, prefix_cache)
    for key, job in enumerate(jobs):
        scheduler.add(make(*job, key))
    device = FailingDevice(num_blocks, block_size, fails)
    finished = run_to_end(scheduler, device)
    assert scheduler.counts.out_of_memory == device.failed
    assert sorted(int(group.sequences[0].request.id) for group in finished) == list(range(len(jobs)))
    for group in finished:
        key = int(group.sequences[0].request.id)
        if {s.status for s in group.sequences} == {Status.OK}:
            assert outcome(group, jobs[key][0]) == alone(*jobs[key], key)
    given_up = [group for group in finished if any(s.status is Status.OUT_OF_MEMORY for s in group.sequences)]
    assert len(given_up) <= device.failed_alone
    assert scheduler.blocks.num_used == 0
    assert scheduler.blocks.filled_slots == 0
    assert scheduler.running.unheld_slots == max_seqs
    if not given_up:
        prompt_tokens = sum(len(prompt) for _, prompt, _, _, _ in jobs)
        assert scheduler.counts.prompt_tokens + scheduler.counts.cached_tokens == prompt_tokens


def test_what_earlier_steps_computed_is_found_again_and_nothing_of_the_failed_one():
    scheduler = make_scheduler(num_blocks=64, block_size=4, max_seqs=4, max_batch_tokens=16)
    fail = iter([False, True])
    device = FailingDevice(64, 4, lambda plan: next(fail, False))
    prompt = [1, 0, 1, 1, 0, 0, 1, 0] * 5
    scheduler.add(make_group(prompt, max_tokens=3, key=0))
    scheduler.update(plan := scheduler.schedule(), device.execute(plan, scheduler.state))
    plan = scheduler.schedule()
    assert plan.starts.tolist() == [16]
    with pytest.raises(MemoryError):
        device.execute(plan, scheduler.state)
    assert scheduler.step_failed(plan) == []
    assert (scheduler.num_running, scheduler.blocks.num_used, scheduler.blocks.num_cached) == (0, 0, 4)
    plan = scheduler.schedule()
    assert (plan.starts.tolist(), plan.counts.tolist()) == ([16], [8])
    scheduler.update(plan, device.execute(plan, scheduler.state))
    (group,) = run_to_end(scheduler, device)
    assert group.sequences[0].generated.tolist() == expected_tokens(prompt, 3, key=0)


def test_groups_wait_again_in_their_order_before_all_others():
    scheduler = make_scheduler(num_blocks=64, block_size=4, max_seqs=3, max_batch_tokens=64)
    for key in range(5):
        scheduler.add(make_group([key, 1, 2], max_tokens=6, key=key))
    scheduler.step_failed(scheduler.schedule())
    assert [group.sequences[0].key for group in scheduler.waiting] == list(range(5))
    assert scheduler.counts.preemptions == 0


def test_a_group_that_was_only_just_admitted_counts_its_cached_tokens_once():
    scheduler = make_scheduler(num_blocks=16, block_size=4, max_batch_tokens=64)
    device = FailingDevice(16, 4, lambda plan: False)
    prompt = [1, 0, 1, 1, 0, 0, 1, 0, 1]
    scheduler.add(make_group(prompt, max_tokens=3, key=0))
    run_to_end(scheduler, device)
    scheduler.add(make_group(prompt, max_tokens=3, key=1))
    scheduler.step_failed(scheduler.schedule())
    assert scheduler.counts.cached_tokens == 0
    (group,) = run_to_end(scheduler, device)
    assert (group.sequences[0].cached_tokens, scheduler.counts.cached_tokens) == (8, 8)


NEVER_FITS = 4  # no text of the others holds this token


@pytest.mark.parametrize("kind", ["plain", "samples", "beams", "resumed beams"])
@pytest.mark.parametrize("place", [0, 3, 6])
def test_a_group_that_does_not_fit_alone_is_given_up_and_the_others_go_on(kind, place):
    scheduler = make_scheduler(num_blocks=256, block_size=4, max_seqs=16, max_model_len=64, max_batch_tokens=64)
    fits = 3 if kind == "plain" else 12  # how long a sequence of that group may get

    def fails(plan):
        state = scheduler.state
        return any(
            state.token_ids[slot, 0] == NEVER_FITS and start + count > fits
            for slot, start, count in zip(plan.slots.tolist(), plan.starts.tolist(), plan.counts.tolist(), strict=True)
        )

    prompt = [NEVER_FITS, 1, 0, 1, 1]
    for key in range(7):
        if key != place:
            scheduler.add(make_group([key % 3, 1, 0, 1], max_tokens=20, key=key, n=1 + key % 2))
        elif kind in ("plain", "samples"):
            scheduler.add(make_group(prompt, max_tokens=30, key=key, n=1 if kind == "plain" else 4))
        else:
            scheduler.add(make_search(prompt, max_tokens=30, key=key, width=4, num_return=4))
    device = FailingDevice(256, 4, fails)
    finished = run_to_end(scheduler, device, limit=3000)
    by_key = {int(group.sequences[0].request.id): group.sequences for group in finished}
    given_up = by_key.pop(place)
    assert [s.status for s in given_up] == [Status.OUT_OF_MEMORY] * (4 if kind == "samples" else 1)
    assert max(len(s.token_ids) for s in given_up) <= fits + 1 + (kind == "plain") * len(prompt)
    assert sorted(by_key) == [key for key in range(7) if key != place]
    for key, sequences in by_key.items():
        assert all(s.status is Status.OK for s in sequences)
        assert outcome_of(sequences) == alone("samples", [key % 3, 1, 0, 1], 20, 1 + key % 2, (), key)
    assert scheduler.blocks.num_used == 0
    assert scheduler.running.unheld_slots == 16
    assert scheduler.budget.tokens == 64  # the one to blame is gone


def outcome_of(sequences):
    return [s.generated.tolist() for s in sequences]


def test_without_any_memory_every_group_is_given_up():
    scheduler = make_scheduler(num_blocks=64, block_size=4, max_seqs=4, max_batch_tokens=16)
    for key in range(5):
        scheduler.add(make_group([1, 0, key], max_tokens=6, key=key, n=1 + key % 2))
    scheduler.add(make_search([1, 0], max_tokens=6, key=5, width=4))
    device = FailingDevice(64, 4, lambda plan: True)
    finished = run_to_end(scheduler, device, limit=100)
    assert [s.status for group in finished for s in group.sequences] == [Status.OUT_OF_MEMORY] * 6
    assert scheduler.counts.prompt_tokens == scheduler.counts.output_tokens == scheduler.counts.cached_tokens == 0


def test_a_step_of_one_token_is_tried_again_before_its_group_is_given_up():
    scheduler = make_scheduler(num_blocks=64, block_size=4, max_batch_tokens=16)
    scheduler.add(make_group([1, 0, 1], max_tokens=6, key=0))
    fail = iter([False, True])
    (group,) = run_to_end(scheduler, FailingDevice(64, 4, lambda plan: next(fail, False)))
    assert group.sequences[0].generated.tolist() == expected_tokens([1, 0, 1], 6, key=0)
    assert scheduler.counts.out_of_memory == 1


def test_the_budget_halves_and_comes_back():
    steps = StepBudget(2048)
    steps.step_failed(1500)
    assert (steps.tokens, steps.least) == (750, 750)
    steps.step_failed(750)
    assert steps.tokens == 375
    for tokens in (750, 1500, 2048):
        for _ in range(GOOD_STEPS):
            assert steps.tokens < tokens
            steps.step_succeeded()
        assert steps.tokens == tokens
    assert steps.least == 375
    for _ in range(3 * GOOD_STEPS):
        steps.step_succeeded()
    assert steps.tokens == 2048
    steps.step_failed(1)
    assert steps.tokens == 1
    assert steps.is_least


def test_a_budget_that_cannot_be_raised_is_tried_ever_more_rarely():
    steps = StepBudget(64)
    for waits in (1, 2, 4, 8):
        steps.step_failed(64)
        for _ in range(waits * GOOD_STEPS):
            assert steps.tokens == 32
            steps.step_succeeded()
        assert steps.tokens == 64
    for _ in range(8 * GOOD_STEPS):  # now it holds
        steps.step_succeeded()
    steps.step_failed(64)
    for _ in range(GOOD_STEPS):
        steps.step_succeeded()
    assert steps.tokens == 64


def test_a_prompt_that_takes_longer_than_the_budget_stays_low_is_computed_all_the_same(monkeypatch):
    """Without a prefix cache a failed step costs all that was computed of a prompt."""
    monkeypatch.setattr(budget, "GOOD_STEPS", 16)
    scheduler = make_scheduler(8, 16, max_seqs=2, max_model_len=128, max_batch_tokens=2, prefix_cache=False)
    scheduler.add(make_group([1, 0] * 40, max_tokens=1, key=0))
    device = FailingDevice(8, 16, more_than(1))
    assert len(run_to_end(scheduler, device, limit=250)) == 1
    assert device.failed == 4  # after 0, 16, 32 and 64 good steps; then 80 are enough


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("The size of tensor a (2) must match the size of tensor b (3)"), False),
        (ValueError("DefaultCPUAllocator"), False),
    ],
)
def test_what_running_out_of_memory_is(error, expected):
    assert is_out_of_memory(error) is expected


# --- the engine ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


def make_engine(checkpoint, notes=None, **config):
    config = {"dtype": "float32", "kv_memory": 1 << 22, "block_size": 4} | config
    return Engine(EngineConfig(model=str(checkpoint), **config), on_note=None if notes is None else notes.append)


def limit(engine, monkeypatch, fails, error=torch.OutOfMemoryError):
    """Let the engine's steps of which `fails(plan)` fail after they have been executed; how many did, by tokens."""
    launch, failed = engine.runner.launch, Counter()

    def limited(plan, state):
        result = launch(plan, state)
        if fails(plan):
            failed[plan.num_tokens] += 1
            raise error("CUDA out of memory." if error is torch.OutOfMemoryError else "something else")
        return result

    monkeypatch.setattr(engine.runner, "launch", limited)
    return failed


def mixed_requests():
    plain = SamplingParams(max_tokens=20, temperature=0.9, seed=3, ignore_eos=True)
    prompts = [tuple(ids) for ids in random_sequences([5 + 3 * i for i in range(14)])]
    params = [plain, replace(plain, n=3, logprobs=2), replace(plain, prompt_logprobs=1, max_tokens=4)]
    requests = [Request(i, str(i), prompt_token_ids=ids, params=params[i % 3]) for i, ids in enumerate(prompts)]
    beam = BeamParams(width=3, num_return=2)
    return [r._replace(beam=beam, params=plain) if r.row % 4 == 3 else r for r in requests]


def shown(completion):
    """What must not depend on the steps, with numbers that rounding may move."""
    c = completion
    numbers = [c.score, c.cumulative_logprob, *(x.logprob for x in (*(c.logprobs or ()), *(c.prompt_logprobs or ())))]
    exact = (c.status, c.text, c.token_ids, c.finish_reason, c.error, c.prompt_tokens)
    ids = [(x.token_id, x.top_ids) for x in (*(c.logprobs or ()), *(c.prompt_logprobs or ()))]
    return exact, ids, [0.0 if x is None else x for x in numbers]


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_an_engine_whose_larger_steps_fail_gives_the_same(checkpoint, monkeypatch, prefix_cache):
    requests = mixed_requests()
    expected = {(c.row, c.sample): shown(c) for c in make_engine(checkpoint).generate(requests)}
    notes = []
    engine = make_engine(checkpoint, notes, prefix_cache=prefix_cache)
    failed = limit(engine, monkeypatch, more_than(40))
    found = {(c.row, c.sample): shown(c) for c in engine.generate(requests)}
    engine.scheduler.check()
    assert found.keys() == expected.keys()
    for key, (exact, ids, numbers) in expected.items():
        assert found[key][:2] == (exact, ids)
        assert found[key][2] == pytest.approx(numbers, abs=1e-3)
    assert engine.scheduler.counts.out_of_memory == failed.total() > 1
    first = max(failed)
    assert notes[0] == f"a step of {first} tokens ran out of memory; going on with {first // 2}"
    assert len(notes) <= failed.total()
    assert engine.blocks.num_used == 0


def test_a_row_that_never_fits_is_an_outcome_and_says_what_to_do(checkpoint, monkeypatch):
    notes = []
    engine = make_engine(checkpoint, notes)
    long = 60
    limit(engine, monkeypatch, lambda plan: bool((plan.starts + plan.counts > long).any()), MemoryError)
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, n=2)
    prompts = random_sequences([9, 70, 12, 55, 30])
    requests = [Request(i, str(i), prompt_token_ids=tuple(ids), params=params) for i, ids in enumerate(prompts)]
    found = {completions[0].row: completions for completions in engine.complete(requests)}
    statuses = [{c.status for c in found[row]} for row in range(5)]
    assert statuses == [{Status.OK}, {Status.OUT_OF_MEMORY}, {Status.OK}, {Status.OUT_OF_MEMORY}, {Status.OK}]
    assert [len(found[row]) for row in range(5)] == [2, 1, 2, 2, 2]
    (refused,) = found[1]
    assert (refused.text, refused.finish_reason, refused.prompt_tokens) == (None, None, 70)
    assert "--kv-memory" in refused.error
    assert "\n" not in refused.error
    assert [c.completion_tokens for c in found[3]] == [6, 6]
    assert len(notes) == len({note.split()[3] for note in notes}) < 10  # for each smaller budget, once
    assert notes[-1].endswith("; going on with 1")


def test_other_errors_end_the_run_and_the_engine_stays_usable(checkpoint, monkeypatch):
    engine = make_engine(checkpoint)
    requests = mixed_requests()
    expected = {(c.row, c.sample): shown(c) for c in engine.generate(requests)}
    for error in (RuntimeError, KeyboardInterrupt):
        steps = iter(range(7))
        with monkeypatch.context() as patch:
            limit(engine, patch, lambda plan, steps=steps: next(steps, None) is None, error)
            with pytest.raises(error):
                list(engine.generate(requests))
        engine.scheduler.check()
        assert not engine.scheduler.has_work
        assert engine.blocks.num_used == 0
    completions = engine.generate(requests)
    next(completions)
    completions.close()
    assert not engine.scheduler.has_work
    found = {(c.row, c.sample): shown(c) for c in engine.generate(requests)}
    assert {key: value[:2] for key, value in found.items()} == {key: value[:2] for key, value in expected.items()}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("who", ["CUDA error", "Triton Error [CUDA]"])
def test_a_device_that_fails_for_good_ends_the_run_in_a_sentence(checkpoint, monkeypatch, late, who):
    engine = make_engine(checkpoint)
    launch, steps = engine.runner.launch, iter(range(5))

    def fail(*_):
        raise RuntimeError(f"{who}: an illegal memory access was encountered\nCUDA kernel errors might be late.")

    def failing(plan, state):
        result = launch(plan, state)
        if next(steps, None) is not None:
            return result
        return fail if late else fail()

    monkeypatch.setattr(engine.runner, "launch", failing)
    with pytest.raises(PagedgenError) as caught:
        list(engine.generate(mixed_requests()))
    assert str(caught.value) == (
        f"the device failed ({who}: an illegal memory access was encountered); run the same command again to go on "
        "with the rows that are left, with a lower --kv-memory or --max-batch-tokens if it was short of memory, and "
        "with --no-cuda-graphs if it fails again"
    )
    assert not engine.scheduler.has_work


def test_complete_yields_the_completions_of_a_request_together(checkpoint):
    engine = make_engine(checkpoint)
    requests = [*mixed_requests(), Request(99, "99", prompt="")]
    together = list(engine.complete(requests))
    widths = {r.row: 2 if r.beam else (r.params or SamplingParams()).n for r in requests}
    assert {group[0].row: len(group) for group in together} == widths
    for group in together:
        assert [(c.row, c.sample) for c in group] == [(group[0].row, i) for i in range(len(group))]
    assert [group[0].status for group in together if group[0].row == 99] == [Status.BAD_ROW]
    assert {c.finish_reason for group in together for c in group if c.row != 99} <= {
        FinishReason.LENGTH,
        FinishReason.STOP,
    }
    assert [c.row for c in make_engine(checkpoint).generate(requests)] == [c.row for g in together for c in g]


DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")),
]


@pytest.mark.parametrize("device", DEVICES)
def test_an_allocation_that_really_fails_is_survived(checkpoint, monkeypatch, device):
    requests = mixed_requests()
    engine = make_engine(checkpoint, device=device)
    launch = engine.runner.launch

    def greedy(plan, state):
        if plan.num_tokens > 40:
            torch.empty(1 << 50, dtype=torch.uint8, device=device)
        return launch(plan, state)

    monkeypatch.setattr(engine.runner, "launch", greedy)
    found = list(engine.generate(requests))
    assert len(found) == sum(2 if r.beam else r.params.n for r in requests)
    assert all(c.status is Status.OK for c in found)
    assert engine.scheduler.counts.out_of_memory > 0


def test_what_the_failed_step_held_is_let_go_before_the_device_frees_memory(checkpoint, monkeypatch):
    engine = make_engine(checkpoint)
    launch, held, freed = engine.runner.launch, [], []

    def failing(plan, state):
        if held:
            return launch(plan, state)
        tensor = torch.empty(100)
        held.append(weakref.ref(tensor))
        raise torch.OutOfMemoryError

    monkeypatch.setattr(engine.runner, "launch", failing)
    monkeypatch.setattr(engine._pipeline, "_free_memory", lambda: freed.append(held[0]() is None))
    (completion,) = engine.generate([Request(0, "0", prompt="fox", params=SamplingParams(max_tokens=2))])
    assert completion.status is Status.OK
    assert freed == [True]


def test_a_device_that_fails_while_it_frees_memory_is_named_too(checkpoint, monkeypatch):
    engine = make_engine(checkpoint)

    def fail():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    limit(engine, monkeypatch, lambda plan: True)
    monkeypatch.setattr(engine._pipeline, "_free_memory", fail)
    with pytest.raises(PagedgenError, match=r"^the device failed \(CUDA error: an illegal memory access"):
        list(engine.generate(mixed_requests()))
