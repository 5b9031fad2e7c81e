"""A whole engine over the interpreted Triton kernels: the tokens of the CPU's path, native and through the hook."""

from dataclasses import replace

import numpy as np
import pytest
from pagedgen_kernels import reference
from pagedgen_kernels import triton as kernels
from test_device_runner import Repeat, completions
from tiny_models import random_sequences, tiny_checkpoint
from triton_interpreter import INTERPRETED

from pagedgen import Engine, EngineConfig, Request, SamplingParams
from pagedgen import engine as engine_module
from pagedgen.execution import runner
from pagedgen.execution.attention import AttentionBackend
from pagedgen.request import BeamParams

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="stands for a GPU where there is none")

LAUNCHERS = (
    "add_rms_norm",
    "choose_tokens",
    "copy_blocks",
    "paged_attention",
    "penalise",
    "rms_norm",
    "rotary_write_kv",
    "top_tokens",
    "write_kv",
)


def requests():
    greedy = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True, seed=2)
    drawn = replace(greedy, temperature=0.9, top_p=0.9, top_k=30, n=2)
    penalised = replace(greedy, repetition_penalty=1.5, presence_penalty=0.5, logprobs=2, max_tokens=4)
    params = [greedy, drawn, penalised, greedy]
    prompts = [tuple(ids) for ids in random_sequences([5, 18, 3, 7])]
    made = [Request(i, str(i), prompt_token_ids=ids, params=params[i]) for i, ids in enumerate(prompts)]
    return [*made[:3], made[3]._replace(beam=BeamParams(width=2, num_return=2), params=replace(greedy, max_tokens=3))]


def refuse(*_, **__):
    raise AssertionError("a kernel fell back to reference")


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma2"])
def test_interpreted_kernels_give_the_tokens_of_the_cpu(architecture, tmp_path, monkeypatch):
    checkpoint = tiny_checkpoint(tmp_path, architecture)
    config = EngineConfig(
        model=str(checkpoint), device="cpu", dtype="float32", kv_memory=1 << 20, max_seqs=6, max_batch_tokens=14
    )
    expected = completions(Engine(config), requests())
    backend = AttentionBackend("triton", kernels)
    monkeypatch.setattr(engine_module, "choose_backend", lambda device: backend)
    monkeypatch.setattr(runner, "CudaCapture", Repeat)
    engine = Engine(config)
    for name in LAUNCHERS:
        monkeypatch.setattr(reference, name, refuse)
    found = completions(engine, requests())
    assert engine.info.kernels == "triton"
    assert engine.runner.graphs._capture.captured > 0
    assert found.keys() == expected.keys()
    for place, (exact, numbers) in expected.items():
        assert found[place][0] == exact, place
        np.testing.assert_allclose(found[place][1], numbers, atol=1e-3)
