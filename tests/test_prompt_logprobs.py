"""Log-probabilities of prompt tokens, however the prompts are cut into steps, against one full forward pass."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sampler_cases import make_state
from tiny_models import random_sequences, reference_logits, tiny_checkpoint
from transformers import AutoModelForCausalLM

from pagedgen.config import EngineConfig, InputConfig, JobConfig
from pagedgen.execution import runner
from pagedgen.execution.attention import choose_backend
from pagedgen.execution.batch import build_batch, wanted_prompt_positions
from pagedgen.execution.kv_cache import KVCache
from pagedgen.execution.runner import ModelRunner
from pagedgen.job import run_job
from pagedgen.models.hf import load_hf_model
from pagedgen.models.loader import load_model
from pagedgen.step import SlotArrays, StepPlan

CPU = torch.device("cpu")
BLOCK_SIZE = 4


def step_plan(state, slots, counts, **asks):
    """The next `counts` tokens of `slots`; a sequence whose last known token is among them is sampled."""
    slots, counts = np.array(slots, np.int32), np.array(counts, np.int32)
    starts = state.num_computed[slots]
    samples = starts + counts == state.num_tokens[slots]
    return StepPlan(slots, starts, counts, samples, np.empty((0, 2), np.int32), **asks)


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def case(request, tmp_path_factory):
    """A native and a hooked model, three sequences and the log-probabilities that transformers computes for them."""
    folder = tiny_checkpoint(tmp_path_factory.mktemp("model"), request.param)
    if request.param == "llama":
        model = load_model(EngineConfig(model=str(folder), device="cpu", dtype="float32")).model
        assert model.spec.path == "native"
    else:
        model = load_hf_model("tiny", folder, torch.float32, CPU)
    sequences = random_sequences((23, 9, 17))
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    expected = [torch.log_softmax(reference_logits(module, ids), 1) for ids in sequences]
    return SimpleNamespace(model=model, sequences=sequences, expected=expected)


@pytest.mark.parametrize("chunks", [(23, 17, 9), (7, 3, 5), (1, 2, 1), (4, 4, 4), (22, 1, 16)])
@pytest.mark.parametrize("rows_at_once", [1, 5, 256])
def test_prompt_logprobs_equal_those_of_a_full_pass(case, chunks, rows_at_once, monkeypatch):
    """Slot 0 asks for all of its prompt, slot 1 for none, slot 2 from a position on that it had before (a preemption,
    or a prefix that was computed by another); slot 2 also has three tokens past its prompt."""
    monkeypatch.setattr(runner, "PROMPT_LOGIT_ROWS", rows_at_once)
    lengths = [len(ids) for ids in case.sequences]
    asks = {0: (1, 3), 2: (6, 0)}
    spec = case.model.spec
    state = make_state(3, 32, token_ids=case.sequences, num_prompt=[lengths[0], lengths[1], lengths[2] - 3])
    state.block_table[:] = np.arange(state.block_table.size).reshape(state.block_table.shape)
    cache = KVCache(spec.layers, state.block_table.size, BLOCK_SIZE, spec.dtype, CPU)
    executor = ModelRunner(case.model, cache, choose_backend(CPU))
    found, sampled = {0: [], 2: []}, {}
    while (state.num_computed < state.num_tokens).any():
        slots = np.flatnonzero(state.num_computed < state.num_tokens)[::-1]
        counts = np.minimum(np.array(chunks)[slots], (state.num_tokens - state.num_computed)[slots])
        wanted = {slot: asks[slot] for slot in slots.tolist() if slot in asks}
        result = executor.execute(step_plan(state, slots, counts, prompt_logprobs=wanted), state)
        assert result.prompt_logprobs.keys() == wanted.keys()
        for slot, results in result.prompt_logprobs.items():
            found[slot] += results
        sampled |= zip(result.slots.tolist(), result.tokens.tolist(), strict=True)
        state.num_computed[slots] += counts
    assert sampled == {slot: int(case.expected[slot][-1].argmax()) for slot in range(3)}
    for slot, (first, k) in asks.items():
        positions = range(first, int(state.num_prompt[slot]))
        assert len(found[slot]) == len(positions)
        for position, result in zip(positions, found[slot], strict=True):
            row = case.expected[slot][position - 1]
            assert result.chosen == pytest.approx(float(row[case.sequences[slot][position]]), abs=1e-4)
            assert list(result.top_ids) == row.topk(k).indices.tolist()
            assert result.top_values == pytest.approx(row.topk(k).values.tolist(), abs=1e-4)


def test_positions_and_rows_are_those_of_the_contract():
    """Sampled rows come first; position p needs the logits of token p - 1."""
    state = SlotArrays(4, 16, BLOCK_SIZE)
    state.num_tokens[:], state.num_prompt[:] = [8, 8, 10, 8], [8, 8, 6, 8]
    state.num_computed[:] = [0, 3, 0, 6]
    plan = step_plan(state, [2, 1, 0, 3], [10, 5, 4, 2], prompt_logprobs={0: (1, 0), 1: (1, 0), 2: (3, 0), 3: (9, 0)})
    assert plan.samples.tolist() == [True, True, False, True]
    sequences, positions = wanted_prompt_positions(plan, state)
    assert list(zip(plan.slots[sequences].tolist(), positions.tolist(), strict=True)) == [
        (2, 3), (2, 4), (2, 5),  # from the first that is wanted to the end of the prompt
        (1, 4), (1, 5), (1, 6), (1, 7),  # not position 3: the logits of token 2 were in an earlier step
        (0, 1), (0, 2), (0, 3), (0, 4),  # position 4 from the last token of this step, though it is not computed yet
    ]  # fmt: skip
    rows = build_batch(plan, state, CPU).logit_rows.tolist()
    assert rows == [9, 14, 20, 2, 3, 4, 10, 11, 12, 13, 15, 16, 17, 18]


def test_a_step_that_gives_no_position_gives_an_empty_list(case):
    state = make_state(1, 32, token_ids=[case.sequences[1]], num_prompt=9)
    cache = KVCache(case.model.spec.layers, 8, BLOCK_SIZE, torch.float32, CPU)
    state.block_table[0] = np.arange(8)
    plan = step_plan(state, [0], [4], prompt_logprobs={0: (6, 2)})
    assert ModelRunner(case.model, cache, choose_backend(CPU)).execute(plan, state).prompt_logprobs == {0: []}


def test_a_job_writes_the_column_of_rows_that_ask(tmp_path):
    folder = tiny_checkpoint(tmp_path, "llama")
    prompts = random_sequences((23, 9))
    rows = [{"prompt_token_ids": prompts[0], "prompt_logprobs": 2}, {"prompt_token_ids": prompts[1]}]
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    engine = EngineConfig(model=str(folder), device="cpu", dtype="float32", kv_memory=1 << 20, max_batch_tokens=5)
    options = {"output_path": tmp_path / "out.jsonl", "engine": engine, "overrides": {"max_tokens": 2}, "quiet": True}
    run_job(JobConfig(input=InputConfig(str(source)), **options))
    first, second = (json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines())
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    expected = torch.log_softmax(reference_logits(module, prompts[0]), 1)
    assert [entry["token_id"] for entry in first["prompt_logprobs"]] == prompts[0][1:]
    for position, entry in enumerate(first["prompt_logprobs"], 1):
        row = expected[position - 1]
        assert entry["logprob"] == pytest.approx(float(row[prompts[0][position]]), abs=1e-4)
        assert [top["token_id"] for top in entry["top"]] == row.topk(2).indices.tolist()
    assert second["prompt_logprobs"] is None


def test_the_command_line_may_ask_for_the_column_and_no_column_comes_unasked(tmp_path):
    folder = tiny_checkpoint(tmp_path, "llama")
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "the"}\n')
    engine = EngineConfig(model=str(folder), device="cpu", dtype="float32", kv_memory=1 << 20)
    for name, asked in (("with", {"prompt_logprobs": 0}), ("without", {})):
        output = tmp_path / f"{name}.jsonl"
        overrides = {"max_tokens": 1} | asked
        run_job(JobConfig(InputConfig(str(source)), output, engine=engine, overrides=overrides, quiet=True))
        (row,) = (json.loads(line) for line in output.read_text().splitlines())
        assert ("prompt_logprobs" in row) == bool(asked)
        if asked:
            assert len(row["prompt_logprobs"]) == row["prompt_tokens"] - 1
            assert all(entry["top"] == [] for entry in row["prompt_logprobs"])
