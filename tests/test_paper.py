"""What the reproduction of the published claims rests on: its lengths, its reservations, and how it counts."""

import numpy as np
import pytest

from benchmarks.paper_lengths import CHAT, MAX_MODEL_LEN, SHORT, Lengths, LogNormal
from benchmarks.paper_reserve import BUDDY_RESERVATIONS, RESERVATIONS, BuddySpace, PackedSpace
from benchmarks.paper_simulate import Accelerator, Measured, Setting, make_groups, simulate
from pagedgen.simulation import Simulation, StepWork


@pytest.mark.parametrize("workload", [CHAT, SHORT], ids=["chat", "short"])
def test_lengths_have_the_published_means(workload):
    published = {"chat": (161, 338), "short instructions": (19, 58)}[workload.name]
    for distribution, mean in zip((workload.prompt, workload.output), published, strict=True):
        tokens = np.arange(1, distribution.most + 1)
        assert distribution.probabilities.sum() == pytest.approx(1)
        assert distribution.probabilities @ tokens == pytest.approx(mean, abs=1e-6)
        assert np.random.default_rng(0).choice(tokens, 100_000, p=distribution.probabilities).mean() == pytest.approx(
            mean, rel=0.02
        )
    lengths = workload.draw(1000, samples=2)
    assert lengths.prompts.mean() == pytest.approx(published[0], rel=0.01)
    assert lengths.outputs.mean(axis=0) == pytest.approx([published[1]] * 2, rel=0.01)
    assert lengths.prompts.min() >= 1
    assert lengths.outputs.min() >= 1
    assert (lengths.prompts + lengths.outputs.max(axis=1)).max() <= MAX_MODEL_LEN
    assert abs(np.corrcoef(lengths.outputs.T)[0, 1]) < 0.1


def test_a_wide_log_normal_is_truncated():
    distribution = LogNormal(400.0, 1.5, most=1024)
    assert distribution.mu > np.log(400)
    assert distribution.draw(5000, np.random.default_rng(0)).max() == 1024


def test_reservations_by_hand():
    assert [RESERVATIONS[name](10, 35, 100) for name in ("max", "pow2", "oracle")] == [100, 64, 35]
    assert RESERVATIONS["pow2"](10, 64, 100) == 64
    assert RESERVATIONS["pow2"](10, 70, 100) == 100
    # 10 + 32 for an output of 25, and then up to a power of two.
    assert [BUDDY_RESERVATIONS[name](10, 35, 128) for name in ("max", "pow2", "oracle")] == [128, 64, 64]
    assert BUDDY_RESERVATIONS["pow2"](40, 65, 128) == 128


@pytest.mark.parametrize("capacity", [64, 100, 983])
def test_the_buddy_allocator_never_overlaps(capacity):
    """And gives everything back: in the end the largest piece is free again."""
    generator, space, held = np.random.default_rng(0), BuddySpace(capacity), {}
    largest = 1 << (capacity.bit_length() - 1)
    refused = 0
    for _ in range(2000):
        if held and generator.random() < 0.4:
            address = list(held)[generator.integers(len(held))]
            space.give(address, held.pop(address))
        else:
            size = 1 << int(generator.integers(capacity.bit_length() - 2))
            address = space.find(size)
            if address is None:
                refused += 1
                continue
            assert address % size == 0
            assert address + size <= capacity
            assert all(address + size <= other or other + held[other] <= address for other in held)
            space.take(address, size)
            held[address] = size
        assert space.used == sum(held.values())
    for address, size in held.items():
        space.give(address, size)
    assert refused
    assert space.find(largest) == 0
    assert space.used == 0


@pytest.mark.parametrize("name", ["max", "pow2", "oracle"])
@pytest.mark.parametrize("buddy", [False, True], ids=["packed", "buddy"])
def test_reservations_never_exceed_the_pool(name, buddy):
    """At every step what runs has its reservation, and no more run than that allows."""
    lengths = CHAT.draw(40).scaled(8)
    setting = Setting(kv_tokens=1000, max_model_len=256)
    reserve = (BUDDY_RESERVATIONS if buddy else RESERVATIONS)[name]
    space = (BuddySpace if buddy else PackedSpace)(1000)
    scheduler = setting.scheduler()
    scheduler.use(reserve, space)
    most = 0

    def on_step(sample):
        nonlocal most
        rows = sample.sequences.rows
        prompts, outputs = lengths.prompts[rows], lengths.outputs[rows, 0]
        reserved = sum(reserve(int(p), int(p + o), 256) for p, o in zip(prompts, outputs, strict=True))
        assert reserved <= 1000
        assert sample.held_tokens <= reserved
        most = max(most, reserved)

    simulation = Simulation(
        scheduler, lambda _: 1.0, lambda s: int(lengths.outputs[s.request.row, s.sample]), on_step, end_id=0
    )
    assert len(list(simulation.run(make_groups(lengths, setting)))) == 40
    assert most > 600
    assert scheduler.counts.preemptions == 0


def test_a_run_without_reservations_is_paged():
    lengths = CHAT.draw(40).scaled(8)
    setting = Setting(kv_tokens=1000, max_model_len=256, block_size=4)
    paged = simulate(lengths, setting)
    oracle = simulate(lengths, setting, RESERVATIONS["oracle"], PackedSpace(1000))
    assert paged.mean("running") > oracle.mean("running")
    assert paged.tokens_per_second > oracle.tokens_per_second
    assert paged.preemptions > oracle.preemptions == 0
    assert paged.output_tokens == oracle.output_tokens == lengths.outputs.sum()


@pytest.mark.parametrize("whole", [False, True])
def test_utilisations_are_those_of_a_history(whole):
    """Recomputed from who was running with how many tokens in each step."""
    lengths = CHAT.draw(60).scaled(8)
    setting = Setting(kv_tokens=1000, max_model_len=256, block_size=8)
    scheduler = setting.scheduler()
    measured, history = Measured(lengths, 256, whole), []

    def on_step(sample):
        measured(sample)
        running = dict(zip(sample.sequences.rows.tolist(), sample.sequences.lengths.tolist(), strict=True))
        history.append((sample, running))
        for slot in scheduler.slots.occupied:  # those that have not ended in this step
            assert running[scheduler.slots.rows[slot]] == scheduler.state.num_computed[slot]

    simulation = Simulation(
        scheduler,
        Accelerator().seconds,
        lambda s: int(lengths.outputs[s.request.row, s.sample]),
        on_step,
        end_id=0,
    )
    for _ in simulation.run(make_groups(lengths, setting)):
        pass
    final = (lengths.prompts + lengths.outputs[:, 0]).tolist()
    power = {row: 1 << max(n - 1, 0).bit_length() for row, n in enumerate(final)}
    expected = dict.fromkeys(("max", "pow2", "oracle", "paged", "running", "pool"), 0.0)
    total = 0.0
    for sample, running in history:
        if not whole and sample.waiting == 0:
            continue
        seconds, held = sample.end - sample.start, sum(running.values())
        total += seconds
        expected["max"] += seconds * held / (256 * len(running))
        expected["pow2"] += seconds * held / sum(min(power[row], 256) for row in running)
        expected["oracle"] += seconds * held / sum(final[row] for row in running)
        expected["paged"] += seconds * held / sum(8 * -(-n // 8) for n in running.values())
        expected["running"] += seconds * len(running)
        expected["pool"] += seconds * held / 1000
    for name, value in expected.items():
        assert measured.mean(name) == pytest.approx(value / total), name
    assert measured.seconds == pytest.approx(history[-1][0].end)
    assert 0 < total <= measured.seconds


def test_samples_reserve_each_for_itself():
    """Two samples of a prompt; what they share is held by both, but filled once."""
    lengths = Lengths(np.array([16, 9]), np.array([[17, 33], [40, 8]]))
    setting = Setting(kv_tokens=512, max_model_len=128, n=2)
    scheduler = setting.scheduler()
    measured, history = Measured(lengths, 128, whole=True), []

    def on_step(sample):
        measured(sample)
        running = sample.sequences
        finals = lengths.prompts[running.rows] + lengths.outputs[running.rows, running.samples]
        history.append((int(running.lengths.sum()) / int(finals.sum()), sample.used_blocks / sample.logical_blocks))

    simulation = Simulation(
        scheduler, lambda _: 1.0, lambda s: int(lengths.outputs[s.request.row, s.sample]), on_step, end_id=0
    )
    for _ in simulation.run(make_groups(lengths, setting)):
        pass
    oracle, used = np.array(history).T
    assert measured.output_tokens == lengths.outputs.sum()
    assert measured.mean("oracle") == pytest.approx(oracle.mean())
    assert measured.mean("saved") == pytest.approx(1 - used.mean())
    assert 0.02 < measured.mean("saved") < 0.5


def test_the_published_scale():
    accelerator = Accelerator()
    assert accelerator.token_bytes == 819_200
    assert accelerator.kv_tokens == 15_728
    one = StepWork(computed_tokens=1, sampled_rows=1, held_tokens=0, attention_pairs=0, running=1)
    assert accelerator.seconds(one) == pytest.approx(26e9 / (1.555e12 * 0.8))
    prompt = StepWork(computed_tokens=2048, sampled_rows=1, held_tokens=2048, attention_pairs=0, running=1)
    assert accelerator.seconds(prompt) == pytest.approx(2 * 13e9 * 2048 / (312e12 * 0.6))


def test_seven_requests_fit_at_their_longest():
    """As published: the lengths do not matter."""
    measured = simulate(SHORT.draw(60), Setting(), RESERVATIONS["max"], BuddySpace(Setting().kv_tokens))
    assert measured.mean("running") == pytest.approx(7.0, abs=0.01)
