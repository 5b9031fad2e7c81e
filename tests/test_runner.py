"""The runner over a model that gives fixed logits: chunks of rows change nothing, whatever they ask."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from pagedgen_kernels import reference
from sampler_cases import make_plan, make_state

from pagedgen.execution import runner
from pagedgen.execution.runner import ModelRunner
from pagedgen.scheduling.sequence import mix64

VOCAB_SIZE = 90


class FixedModel:
    """A model whose hidden states are the rows of a table, picked by token, and whose logits are these."""

    def __init__(self):
        self.spec = SimpleNamespace(vocab_size=VOCAB_SIZE)
        self.table = torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(1)) * 3
        self.chunks = []
        self.likeliest, self.asked = None, 0

    def forward(self, batch, kv_cache, attention):
        return self.table[batch.input_ids[batch.logit_rows]]

    def logits(self, hidden):
        self.chunks.append(len(hidden))
        return hidden.clone()

    def find_likeliest(self, hidden):
        self.asked += 1
        return reference.greedy_argmax(hidden)


@pytest.mark.parametrize(("rows", "chunks"), [(100, [6, 3]), (6, [6, 3]), (4, [4, 2, 3]), (1, [1] * 9)])
def test_chunks_of_rows_change_nothing(rows, chunks, monkeypatch):
    state = make_state(
        7,
        token_ids=[[slot + 5, slot + 30, slot + 60] for slot in range(7)],
        num_prompt=3,
        temperature=[0, 1, 1, 0, 0, 1, 0],
        top_p=[1, 1, 0.8, 1, 1, 1, 1],
        presence_penalty=[0, 0, 0, 0, 0, 3, 0],
        key=[mix64(slot) for slot in range(7)],
    )
    asks = {
        "beams": {0: 5, 4: 3},
        "logprobs": {1: 2, 5: 0},
        "banned": {2: (8, 9), 4: (1,)},
        "extra_keys": {1: np.arange(4, dtype=np.uint64), 3: np.arange(2, dtype=np.uint64)},
        "prompt_logprobs": {6: (1, 3), 2: (2, 0)},
        "biases": {3: {7: 2.0}},
    }

    def execute():
        model = FixedModel()
        cache = SimpleNamespace(device=torch.device("cpu"), pools={})
        plan = make_plan(np.arange(7, dtype=np.int32), **asks)
        counts = np.full(7, 3, np.int32)
        plan = replace(plan, starts=np.zeros(7, np.int32), counts=counts, samples=np.arange(7) < 6)
        return ModelRunner(model, cache, SimpleNamespace(kernels=reference)).execute(plan, state), model.chunks

    whole, _ = execute()
    monkeypatch.setattr(runner, "LOGITS_BYTES", rows * 4 * VOCAB_SIZE)
    parts, seen = execute()
    assert seen == chunks
    assert parts.slots.tolist() == [0, 1, 2, 3, 4, 5]
    assert parts.tokens.tolist() == whole.tokens.tolist()
    assert (parts.logprobs, parts.prompt_logprobs) == (whole.logprobs, whole.prompt_logprobs)
    assert parts.logprobs.keys() == {1, 5}
    assert [len(parts.prompt_logprobs[slot]) for slot in (6, 2)] == [2, 1]
    for slot in (1, 3):
        assert parts.extra[slot].tokens.tolist() == whole.extra[slot].tokens.tolist()
        assert parts.extra[slot].logprobs == whole.extra[slot].logprobs
    for slot in (0, 4):
        assert parts.beams[slot].ids.tolist() == whole.beams[slot].ids.tolist()
        assert parts.beams[slot].logprobs.tolist() == whole.beams[slot].logprobs.tolist()
    assert parts.beams.keys() == {0, 4}
    assert all(seconds >= 0 for seconds in parts.seconds)


@pytest.mark.parametrize(
    ("settings", "asks", "asked"),
    [
        ({}, {}, 1),
        ({"temperature": [0, 0, 1]}, {}, 1),  # of the one that is not sampled
        ({"temperature": [0, 1, 0]}, {}, 0),
        ({"presence_penalty": [0, 2, 0]}, {}, 0),
        ({}, {"logprobs": {1: 2}}, 0),
        ({}, {"banned": {0: (8, 9)}}, 0),
        ({}, {"biases": {0: {7: 2.0}}}, 0),
        ({}, {"beams": {0: 2}}, 0),
        ({}, {"extra_keys": {1: np.arange(2, dtype=np.uint64)}}, 0),
    ],
)
def test_a_model_is_asked_for_the_likeliest_tokens_where_nothing_else_is_wanted(settings, asks, asked):
    state = make_state(
        3,
        token_ids=[[slot + 5, slot + 30, slot + 60] for slot in range(3)],
        num_prompt=3,
        **({"temperature": 0} | settings),
    )
    plan = make_plan(np.arange(3, dtype=np.int32), **asks)
    plan = replace(
        plan, starts=np.zeros(3, np.int32), counts=np.full(3, 3, np.int32), samples=np.array([True, True, False])
    )

    def execute(knows):
        model = FixedModel()
        model.likeliest = model.find_likeliest if knows else None
        cache = SimpleNamespace(device=torch.device("cpu"), pools={})
        found = ModelRunner(model, cache, SimpleNamespace(kernels=reference)).execute(plan, state)
        assert model.asked == (asked if knows else 0)
        assert len(model.chunks) == 1 - model.asked
        return found

    found, expected = execute(True), execute(False)
    assert found.slots.tolist() == expected.slots.tolist() == [0, 1]
    assert found.tokens.tolist() == expected.tokens.tolist()
