"""Simulated runs: every length is the drawn one, the samples add up, and the accounting is that of a real run."""

import numpy as np
import pytest
from fake_device import make_group, make_scheduler, make_search
from test_project import BLOCKER, HEAVY, run_python
from tiny_models import random_sequences, tiny_checkpoint

from pagedgen import Engine, EngineConfig, Request, SamplingParams
from pagedgen.engine import TOKENIZE_BATCH
from pagedgen.request import FinishReason, Status
from pagedgen.scheduling.blocks import BlockManager
from pagedgen.scheduling.scheduler import Scheduler
from pagedgen.simulation import BEAM_SCALE, PULL_BATCH, Simulation, StepWork
from pagedgen.step import SlotArrays

END_ID = 3


def tokens_and_more(work: StepWork) -> float:
    return 1.0 + 0.01 * work.computed_tokens


def length_of(sequence) -> int:
    """Some length from 1 to 20 for each row and sample."""
    return 1 + (sequence.request.row * 7 + sequence.sample * 5) % 20


def simulate(scheduler, groups, output_length=length_of, cost=tokens_and_more, check=True, **options):
    samples = []

    def on_step(sample):
        if check:
            scheduler.check()
        samples.append(sample)

    simulation = Simulation(scheduler, cost, output_length, on_step, end_id=END_ID, **options)
    return list(simulation.run(iter(groups))), samples


def mixed_groups(count):
    """Samples and searches by turns, with prompts of several lengths."""
    prompts = random_sequences([3 + (row * 5) % 17 for row in range(count)])
    return [
        make_search(prompt, max_tokens=25, end_ids=[END_ID], key=row, width=1 + row % 5)
        if row % 3 == 2
        else make_group(prompt, max_tokens=25, end_ids=[END_ID], key=row, n=1 + row % 4)
        for row, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("num_blocks", [200, 36])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_every_sample_has_its_length(num_blocks, prefix_cache):
    """In a small pool too, where groups are preempted; a sample ends at the end token, a search at its length."""
    scheduler = make_scheduler(num_blocks, 4, max_seqs=16, prefix_cache=prefix_cache)
    finished, samples = simulate(scheduler, mixed_groups(40))
    assert sorted(group.sequences[0].request.row for group in finished) == list(range(40))
    for group in finished:
        if group.beam is None:
            assert [s.sample for s in group.sequences] == list(range(group.sequences[0].params.n))
        for sequence in group.sequences:
            assert sequence.status is Status.OK
            assert len(sequence.generated) == length_of(sequence)
            by_end_token = group.beam is None
            assert sequence.finish_reason is (FinishReason.STOP if by_end_token else FinishReason.LENGTH)
    assert (sum(s.preemptions for s in samples) > 0) == (num_blocks == 36)
    assert sorted(row for s in samples for row in s.finished_rows) == list(range(40))
    assert scheduler.blocks.num_used == 0


def test_samples_keep_their_lengths_when_they_change_slots():
    """After a preemption each of a group's samples may find itself in a slot that another one of them had."""
    scheduler = make_scheduler(24, 4, prefix_cache=False)
    groups = [
        make_group(range(10, 18), max_tokens=30, end_ids=[END_ID], key=0),
        make_group(range(20, 28), max_tokens=30, end_ids=[END_ID], key=1, n=3),
    ]
    finished, samples = simulate(scheduler, groups, lambda s: (26, 22, 29)[s.sample] if s.request.row else 30)
    assert sum(s.preemptions for s in samples) > 0
    lengths = {g.sequences[0].request.row: [len(s.generated) for s in g.sequences] for g in finished}
    assert lengths == {0: [30], 1: [26, 22, 29]}


def test_a_sequence_ends_at_its_limit():
    groups = [
        make_group([5, 6, 7], max_tokens=4, end_ids=[END_ID], key=0),
        make_group([5, 6, 7], max_tokens=4, key=1),
        make_search([5, 6, 7], max_tokens=4, end_ids=[END_ID], key=2, width=2),
    ]
    finished, _ = simulate(make_scheduler(64, 4), groups, lambda sequence: 2 if sequence.request.row == 1 else 9)
    assert [len(group.sequences[0].generated) for group in finished] == [4, 4, 4]
    assert all(group.sequences[0].finish_reason is FinishReason.LENGTH for group in finished)


def test_the_totals_add_up():
    scheduler = make_scheduler(36, 4, max_seqs=16, prefix_cache=False)
    groups = mixed_groups(40)
    works = []
    finished, samples = simulate(scheduler, groups, cost=lambda work: works.append(work) or tokens_and_more(work))
    prompts = sum(group.sequences[0].num_prompt for group in finished)
    assert sum(s.prompt_tokens for s in samples) == prompts
    sampled = [s for group in finished if group.beam is None for s in group.sequences]
    searched = sum((length_of(g.sequences[0]) - 1) * g.beam.params.width for g in finished if g.beam is not None)
    assert sum(s.output_tokens for s in samples) == sum(map(length_of, sampled)) + searched
    # All but each last token is computed, and some of them again after a preemption.
    assert sum(s.computed_tokens for s in samples) > prompts + sum(length_of(s) - 1 for s in sampled)
    assert samples[0].start == 0
    assert [s.end for s in samples[:-1]] == [s.start for s in samples[1:]]
    for sample, work in zip(samples, works, strict=True):
        assert sample.end - sample.start == pytest.approx(tokens_and_more(work))
        assert sample.model_s == tokens_and_more(work)
        assert work == StepWork(
            sample.computed_tokens,
            sample.sampled_rows,
            sample.held_tokens,
            sample.attention_pairs,
            sample.running,
        )


def test_each_length_is_asked_for_once():
    asked = []

    def output_length(sequence):
        asked.append((sequence.request.row, sequence.sample))
        return length_of(sequence)

    groups = mixed_groups(40)
    expected = [(row, i) for row, g in enumerate(groups) for i in range(1 if g.beam else g.sequences[0].params.n)]
    _, samples = simulate(make_scheduler(36, 4, max_seqs=16), groups, output_length)
    assert sum(s.preemptions for s in samples) > 0
    assert sorted(asked) == expected


def test_groups_are_pulled_as_they_are_needed():
    pulled = []
    scheduler = make_scheduler(36, 4)
    simulation = Simulation(scheduler, tokens_and_more, length_of, lambda _: None, end_id=END_ID)
    run = simulation.run(pulled.append(g) or g for g in mixed_groups(300))
    next(run)
    assert len(pulled) <= 2 * PULL_BATCH
    with pytest.raises(RuntimeError, match="another run"):
        next(simulation.run([]))
    run.close()
    assert not scheduler.has_work
    assert PULL_BATCH == TOKENIZE_BATCH
    assert len(list(simulation.run(mixed_groups(5)))) == 5


def test_a_run_repeats():
    def run(seed):
        finished, samples = simulate(make_scheduler(36, 4, max_seqs=16), mixed_groups(20), seed=seed)
        tokens = {g.sequences[0].request.row: [s.token_ids.tolist() for s in g.sequences] for g in finished}
        return tokens, [(s.used_blocks, s.running, s.end) for s in samples]

    assert run(1) == run(1)
    assert run(1)[0] != run(2)[0]


@pytest.mark.parametrize("width", [2, 6])
def test_beams_share_more_than_their_prompt(width):
    """And less than everything: the model of beams lies between its extremes."""
    prompt, tokens = list(range(10, 26)), 48
    scheduler = make_scheduler(400, 4, max_seqs=32, prefix_cache=False)
    groups = [make_search(prompt, max_tokens=tokens, key=row, width=width) for row in range(8)]
    _, samples = simulate(scheduler, groups, lambda _: tokens)
    last = [s for s in samples if s.running][-1]
    of_prompt = 1 - (last.held_tokens - len(prompt) * last.running * (1 - 1 / width)) / last.held_tokens
    assert of_prompt < last.sharing_saved < 1 - 1 / width


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("simulation"), "llama")


@pytest.mark.parametrize(("kv_memory", "prefix_cache"), [(1 << 22, True), (1 << 16, True), (1 << 16, False)])
def test_the_accounting_is_that_of_a_real_run(checkpoint, kv_memory, prefix_cache):
    """Step for step, for prompts in chunks, samples, and a pool that binds."""
    real = []
    config = EngineConfig(
        model=str(checkpoint),
        dtype="float32",
        kv_memory=kv_memory,
        max_batch_tokens=48,
        max_seqs=12,
        prefix_cache=prefix_cache,
    )
    engine = Engine(config, on_step=real.append)
    prompts = random_sequences([1 + (row * 13) % 70 for row in range(90)])
    requests = []
    for row, prompt in enumerate(prompts):
        params = SamplingParams(
            max_tokens=1 + (row * 11) % 40, temperature=float(row % 4 == 3), ignore_eos=True, n=3 if row % 4 == 3 else 1
        )
        requests.append(Request(row, str(row), prompt_token_ids=tuple(prompt), params=params))
    completions = list(engine.generate(requests))
    assert all(completion.status is Status.OK for completion in completions)

    state = SlotArrays(config.max_seqs, engine.max_model_len, config.block_size)
    blocks = BlockManager(engine.blocks.num_blocks, state, prefix_cache)
    scheduler = Scheduler(state, blocks, config.max_batch_tokens)
    groups = [engine.admission.group(request, request.prompt_token_ids) for request in requests]
    _, simulated = simulate(scheduler, groups, lambda sequence: sequence.params.max_tokens)
    assert accounts(simulated) == accounts(real)
    assert (sum(s.preemptions for s in real) > 0) == (kv_memory < 1 << 22)


def accounts(samples):
    names = (
        "used_blocks",
        "logical_blocks",
        "filled_slots",
        "running",
        "waiting",
        "held_tokens",
        "computed_tokens",
        "sampled_rows",
        "attention_pairs",
        "preemptions",
        "block_copies",
        "prompt_tokens",
        "output_tokens",
        "finished_rows",
    )
    return [tuple(getattr(sample, name) for name in names) for sample in samples]


def test_it_needs_no_torch():
    assert run_python(BLOCKER.format(blocked=HEAVY) + "import pagedgen.simulation as s; print(s.PULL_BATCH)") == "64\n"


def test_beam_gaps_are_gumbel():
    """The mean gap between the best and the second of many Gumbel variables is their scale."""
    simulation = Simulation(make_scheduler(4, 4), tokens_and_more, length_of, lambda _: None, end_id=END_ID)
    found = simulation._continuations(dict.fromkeys(range(4000), 4))
    gaps = np.array([-np.diff(continuations.logprobs) for continuations in found.values()])
    assert gaps.mean(axis=0) == pytest.approx(BEAM_SCALE / np.array([1, 2, 3]), rel=0.1)
