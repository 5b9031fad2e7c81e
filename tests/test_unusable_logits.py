"""Logits that are NaN or all -inf end their own row, though the device goes on with it before the host knows."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_device_runner import completions, make_engine
from tiny_models import random_sequences, tiny_checkpoint

from pagedgen import Request, SamplingParams
from pagedgen.request import BeamParams, Status

POISON = slice(10, None, 24)  # the token ids whose embeddings are NaN, and so what is computed from them


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tiny_checkpoint(tmp_path_factory.mktemp("llama"), "llama", tie_word_embeddings=False)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][POISON] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def requests():
    plain = SamplingParams(max_tokens=16, temperature=0.0, seed=3, ignore_eos=True)
    drawn = replace(plain, temperature=1.5)
    kinds = [
        plain,
        drawn,
        replace(drawn, top_p=0.9, top_k=50, min_p=0.001, n=2),
        replace(drawn, repetition_penalty=1.3),
        replace(drawn, presence_penalty=0.4, frequency_penalty=0.2, n=2),
        replace(drawn, logprobs=2),
        replace(plain, repetition_penalty=1.3),
        replace(drawn, bad_words=("fox",), logit_bias=((5, 3.0),)),
    ]
    prompts = [tuple(ids) for ids in random_sequences([2 + 5 * i % 23 for i in range(40)])]
    made = [Request(i, str(i), prompt_token_ids=ids, params=kinds[i % 8]) for i, ids in enumerate(prompts)]
    return [r._replace(beam=BeamParams(width=2, num_return=2), params=plain) if r.row % 10 == 9 else r for r in made]


def outcome(monkeypatch, checkpoint, backend, filled, **config):
    """What `completions` gives; filled: what all logits of a row that has a NaN are to be, if not NaN."""
    engine = make_engine(monkeypatch, checkpoint, backend, **config)
    logits = engine.model.logits

    def fill(hidden):
        found = logits(hidden)
        return found if filled is None else torch.where(found.isnan().any(1, keepdim=True), filled, found)

    monkeypatch.setattr(engine.model, "logits", fill)
    return {place: exact for place, (exact, _) in completions(engine, requests()).items()}, engine


@pytest.mark.parametrize("filled", [None, -torch.inf], ids=["NaN", "all -inf"])
@pytest.mark.parametrize("config", [{}, {"max_batch_tokens": 9}], ids=["roomy", "mixed steps"])
@pytest.mark.parametrize("cuda_graphs", [True, False], ids=["graphs", "eager"])
def test_rows_with_unusable_logits_end_alone(checkpoint, monkeypatch, filled, config, cuda_graphs):
    waiting, _ = outcome(monkeypatch, checkpoint, "triton", filled, overlap=False, cuda_graphs=cuda_graphs, **config)
    statuses = Counter(status for status, *_ in waiting.values())
    assert statuses.keys() == {Status.OK, Status.NAN_LOGITS}
    assert min(statuses.values()) >= 10
    assert any(ids for status, _, ids, *_ in waiting.values() if status is Status.NAN_LOGITS)  # after some tokens
    assert {row for row, _ in waiting} == set(range(40))
    assert waiting == outcome(monkeypatch, checkpoint, "torch", filled, **config)[0]
    found, engine = outcome(monkeypatch, checkpoint, "triton", filled, cuda_graphs=cuda_graphs, **config)
    assert engine._pipeline._depth == 2
    assert found == waiting
