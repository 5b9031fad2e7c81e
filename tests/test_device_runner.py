"""Steps that run from what the device keeps of the sequences, ahead of the host: the completions of the plain engine.

On a CPU, with `reference` in the place of a GPU's kernels, and graphs that do their work anew instead of replaying it.
"""

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pagedgen_kernels import reference
from tiny_models import random_sequences, tiny_checkpoint

from pagedgen import Engine, EngineConfig, PagedgenError, Request, SamplingParams
from pagedgen import engine as engine_module
from pagedgen.execution import runner
from pagedgen.execution.attention import AttentionBackend
from pagedgen.execution.capture import NotCapturable
from pagedgen.execution.device_state import DeviceState
from pagedgen.execution.graphs import SIZES, sizes_up_to
from pagedgen.request import BeamParams
from pagedgen.step import SlotArrays, StepPlan

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


class Repeat:
    """What stands for CUDA graphs: counts the captures, and does the work again. It fails on a CPU where a graph would:
    not at all."""

    def __init__(self):
        self.captured = 0

    def __call__(self, run):
        self.captured += 1
        run()
        return run


def make_engine(monkeypatch, checkpoint, backend, **config):
    monkeypatch.setattr(engine_module, "choose_backend", lambda device: AttentionBackend(backend, reference))
    monkeypatch.setattr(runner, "CudaCapture", Repeat)
    config = {"dtype": "float32", "kv_memory": 1 << 22, "block_size": 4, "max_seqs": 16} | config
    return Engine(EngineConfig(model=str(checkpoint), **config))


def requests_of_all_kinds():
    plain = SamplingParams(max_tokens=24, temperature=0.0, seed=3)
    kinds = [
        plain,
        replace(plain, temperature=0.9),
        replace(plain, temperature=0.8, top_p=0.9, top_k=20, min_p=0.01, n=3),
        replace(plain, temperature=1.2, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2),
        replace(plain, logprobs=3, n=2, temperature=1.0),
        replace(plain, prompt_logprobs=1, max_tokens=4),
        replace(plain, logit_bias=((5, 4.0), (9, -2.0)), min_tokens=6, temperature=0.7),
        replace(plain, bad_words=("fox", "the"), temperature=0.9, ignore_eos=True),
        replace(plain, frequency_penalty=1.0, n=2, temperature=0.9),
        replace(plain, stop=("a",), temperature=1.0),
    ]
    prompts = [tuple(ids) for ids in random_sequences([3 + 4 * i % 37 for i in range(40)])]
    prompts = [prompts[i % 3] + ids if i % 2 else ids for i, ids in enumerate(prompts)]  # some share prefixes
    requests = [Request(i, str(i), prompt_token_ids=ids, params=kinds[i % 10]) for i, ids in enumerate(prompts)]
    beam = BeamParams(width=3, num_return=2)
    penalised = replace(plain, repetition_penalty=1.2)
    return [r._replace(beam=beam, params=penalised if r.row % 2 else plain) if r.row % 7 == 6 else r for r in requests]


def completions(engine, requests):
    found = {}
    for c in engine.generate(requests):
        ids = [(x.token_id, x.top_ids) for x in (*(c.logprobs or ()), *(c.prompt_logprobs or ()))]
        numbers = [c.score, c.cumulative_logprob, *(x.logprob for x in c.logprobs or ())]
        found[c.row, c.sample] = (
            (c.status, c.text, c.token_ids, c.finish_reason, c.error, c.prompt_tokens, ids),
            [0.0 if x is None else x for x in numbers],
        )
    return found


@pytest.mark.parametrize(
    "config",
    [{}, {"kv_memory": 120 << 10}, {"max_batch_tokens": 7}, {"prefix_cache": False, "block_size": 16}],
    ids=["roomy", "small pool", "chunks", "no prefix cache"],
)
@pytest.mark.parametrize("cuda_graphs", [True, False], ids=["graphs", "eager"])
def test_the_device_ahead_of_the_host_gives_the_same_completions(checkpoint, monkeypatch, config, cuda_graphs):
    requests = requests_of_all_kinds()
    plain = make_engine(monkeypatch, checkpoint, "torch", **config)
    assert plain.runner.device_state is None
    expected = completions(plain, requests)
    engine = make_engine(monkeypatch, checkpoint, "triton", cuda_graphs=cuda_graphs, **config)
    found = completions(engine, requests)
    assert found.keys() == expected.keys()
    for place, (exact, numbers) in expected.items():
        assert found[place][0] == exact, place
        assert found[place][1] == pytest.approx(numbers, abs=2e-4), place
    if "kv_memory" in config:
        assert engine.scheduler.counts.preemptions > 0
    assert (engine.runner.graphs is not None) == cuda_graphs
    if cuda_graphs:
        assert engine.runner.graphs._capture.captured == 2 * len(engine.runner.graphs._steps) > 2
    assert engine._pipeline._depth == 2


def test_without_overlap_each_step_waits_for_the_one_before(checkpoint, monkeypatch):
    requests = requests_of_all_kinds()[:10]
    expected = completions(make_engine(monkeypatch, checkpoint, "torch"), requests)
    engine = make_engine(monkeypatch, checkpoint, "triton", overlap=False)
    schedule, in_flight = engine.scheduler.schedule, Counter()
    monkeypatch.setattr(
        engine.scheduler, "schedule", lambda: in_flight.update([len(engine.scheduler.in_flight)]) or schedule()
    )
    assert {place: exact for place, (exact, _) in completions(engine, requests).items()} == {
        place: exact for place, (exact, _) in expected.items()
    }
    assert in_flight.keys() == {0}


@pytest.mark.parametrize(
    "error",
    [
        NotCapturable("CUDA error: operation not permitted when stream is capturing.\nmore"),
        RuntimeError("the padding is more than this model computes"),
    ],
)
def test_work_that_cannot_be_captured_is_launched_kernel_by_kernel(checkpoint, monkeypatch, error):
    requests = requests_of_all_kinds()[:10]
    expected = completions(make_engine(monkeypatch, checkpoint, "torch"), requests)
    engine = make_engine(monkeypatch, checkpoint, "triton")
    notes = []

    def refuse(run):
        raise error

    monkeypatch.setattr(engine.runner.graphs, "_capture", refuse)
    monkeypatch.setattr(engine.runner.graphs, "_on_note", notes.append)
    assert {place: exact for place, (exact, _) in completions(engine, requests).items()} == {
        place: exact for place, (exact, _) in expected.items()
    }
    reason = str(error).split(".")[0]
    assert notes == [f"decoding steps run without CUDA graphs, because they could not be captured: {reason}"]


def test_a_device_that_fails_while_graphs_are_made_is_not_taken_for_one_without_them(checkpoint, monkeypatch):
    engine = make_engine(monkeypatch, checkpoint, "triton")
    notes = []

    def fail(run):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(engine.runner.graphs, "_capture", fail)
    monkeypatch.setattr(engine.runner.graphs, "_on_note", notes.append)
    with pytest.raises(PagedgenError, match=r"^the device failed \(CUDA error: an illegal memory access"):
        completions(engine, requests_of_all_kinds()[:10])
    assert notes == []


def test_a_graph_that_gets_no_memory_fails_its_step_only(checkpoint, monkeypatch):
    engine = make_engine(monkeypatch, checkpoint, "triton")
    capture, refused = engine.runner.graphs._capture, []

    def short(run):
        if not refused:
            refused.append(True)
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return capture(run)

    monkeypatch.setattr(engine.runner.graphs, "_capture", short)
    requests = requests_of_all_kinds()[:10]
    expected = completions(make_engine(monkeypatch, checkpoint, "torch"), requests)
    assert {place: exact for place, (exact, _) in completions(engine, requests).items()} == {
        place: exact for place, (exact, _) in expected.items()
    }
    assert engine.scheduler.counts.out_of_memory == 1


@pytest.mark.parametrize("max_seqs", [1, 3, 8, 100, 256, 1000])
def test_sizes_of_steps_reach_the_most_sequences_in_small_steps(max_seqs):
    sizes = sizes_up_to(max_seqs)
    assert sizes[0] == 1
    assert sizes[-1] == max_seqs
    assert list(sizes) == sorted(set(sizes))
    assert all(b - a <= max(1, a) for a, b in itertools.pairwise(sizes))
    assert set(sizes) <= {*SIZES, max_seqs}


# --- what the device keeps -------------------------------------------------------------------------------------------


class Host:
    """Slot arrays that change as a scheduler changes them, at random."""

    def __init__(self, draw):
        self.draw, self.state = draw, SlotArrays(4, 24, 4)
        self.blocks = iter(range(10_000))
        self.drawn = {}

    def occupy(self, slot):
        state, length = self.state, self.draw(st.integers(1, 12))
        state.epoch[slot] += 1
        state.token_ids[slot, :length] = [self.draw(st.integers(0, 99)) for _ in range(length)]
        state.num_tokens[slot] = length
        state.num_prompt[slot] = self.draw(st.integers(1, length))
        state.num_blocks[slot] = state.num_scheduled[slot] = state.num_pending[slot] = 0
        state.temperature[slot], state.top_k[slot] = self.draw(st.floats(0, 2, width=32)), self.draw(st.integers(0, 9))
        state.top_p[slot], state.repetition_penalty[slot] = self.draw(st.sampled_from([0.5, 1.0])), 1.5
        state.key[slot] = self.draw(st.integers(0, 2**64 - 1))
        self.drawn[slot] = []

    def plan(self, slots):
        state = self.state
        ends = state.num_tokens[slots] + state.num_pending[slots]
        counts = np.array([self.draw(st.integers(1, int(end))) for end in ends], np.int32)
        for slot, end in zip(slots.tolist(), ends.tolist(), strict=True):
            for index in range(int(state.num_blocks[slot]), -(-end // 4)):
                state.block_table[slot, index] = next(self.blocks)
            state.num_blocks[slot] = -(-end // 4)
        return StepPlan(slots, ends - counts, counts, counts > 0, np.empty((0, 2), np.int32))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_device_knows_what_the_host_knows_and_what_it_drew_itself(data):
    host = Host(data.draw)
    state, device = host.state, DeviceState(host.state, CPU)
    for slot in range(4):
        host.occupy(slot)
    for _ in range(data.draw(st.integers(1, 12))):
        for slot in range(4):
            length = int(state.num_tokens[slot] + state.num_pending[slot])
            if length >= 23 or data.draw(st.integers(0, 5)) == 0:
                host.occupy(slot)
            elif host.drawn[slot] and data.draw(st.booleans()):  # a result comes
                state.token_ids[slot, state.num_tokens[slot]] = host.drawn[slot].pop(0)
                state.num_tokens[slot] += 1
                state.num_pending[slot] -= 1
            elif not host.drawn[slot] and data.draw(st.integers(0, 3)) == 0:  # a beam, which the host goes on with
                state.token_ids[slot, state.num_tokens[slot]] = data.draw(st.integers(0, 99))
                state.num_tokens[slot] += 1
            if state.num_blocks[slot] and data.draw(st.integers(0, 5)) == 0:  # copied on write
                state.block_table[slot, state.num_blocks[slot] - 1] = next(host.blocks)
        slots = np.array(data.draw(st.lists(st.sampled_from(range(4)), min_size=1, unique=True)), np.int32)
        plan = host.plan(slots)
        device.send(plan, state)
        batch = device.batch(plan, state)
        expected_ids, expected_slots = [], []
        for slot, start, count in zip(slots.tolist(), plan.starts.tolist(), plan.counts.tolist(), strict=True):
            tokens = state.token_ids[slot, : state.num_tokens[slot]].tolist() + host.drawn[slot]
            expected_ids += tokens[start : start + count]
            places = np.arange(start, start + count)
            expected_slots += (state.block_table[slot, places // 4] * 4 + places % 4).tolist()
            assert int(device.num_tokens[slot]) == len(tokens)
            assert int(device.num_prompt[slot]) == state.num_prompt[slot]
            assert int(device.key[slot]) == state.key[slot].view(np.int64)
            assert float(device.temperature[slot]) == state.temperature[slot]
            assert float(device.repetition_penalty[slot]) == 1.5
        assert batch.input_ids.tolist() == expected_ids
        assert batch.slot_mapping.tolist() == expected_slots
        assert batch.context_lens.tolist() == (plan.starts + plan.counts).tolist()
        drawing = slots[[data.draw(st.booleans()) for _ in slots]]
        tokens = [data.draw(st.integers(0, 99)) for _ in drawing]
        if len(drawing):
            device.enter(drawing, torch.tensor(tokens))
        for slot, token in zip(drawing.tolist(), tokens, strict=True):
            host.drawn[slot].append(token)
            state.num_pending[slot] += 1
