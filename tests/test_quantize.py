"""`--quantize int8`: which layers it touches, that smoothing alone changes nothing, and that a run with it works."""

import json

import pyarrow.parquet as pq
import pytest
import torch
from cli_cases import PROMPTS, call, run, sentence, write_jsonl
from pagedgen_kernels.cpu.linear import PackedLinear
from pagedgen_kernels.cpu.quantized import QuantizedLinear
from tiny_models import NATIVE, random_sequences, reference_logits, run_packed, tiny_checkpoint
from transformers import AutoModelForCausalLM

from pagedgen import Engine, EngineConfig
from pagedgen.errors import UsageError
from pagedgen.models import llama, loader
from pagedgen.models.facts import model_facts
from pagedgen.models.hf import load_hf_model
from pagedgen.models.linear import make_linear
from pagedgen.models.smoothing import divisors
from pagedgen.quantizing import quantize_model
from pagedgen.text.tokenizer import Tokenizer

LENGTHS = (23, 9, 17)


def quantized(folder, **changes):
    return Engine(EngineConfig(model=str(folder), quantize="int8", kv_memory=1 << 20, **changes))


@pytest.mark.parametrize("architecture", NATIVE)
def test_smoothing_alone_changes_no_logits(architecture, tmp_path, monkeypatch):
    """The layers once more in float32 instead of eight bits: what is divided is multiplied elsewhere."""
    folder = tiny_checkpoint(tmp_path, architecture)
    loaded = loader.load_model(EngineConfig(model=str(folder), dtype="float32"))
    before = loaded.model._layers[0].post_norm.clone()
    monkeypatch.setattr(
        llama,
        "make_linear",
        lambda weight, bias=None, quantize=False, gated=False: make_linear(weight, bias, gated=gated),
    )
    quantize_model(loaded.model, Tokenizer.load(loaded.tokenizer_path))
    assert not torch.allclose(loaded.model._layers[0].post_norm, before)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    sequences = random_sequences(LENGTHS)
    for ours, ids in zip(run_packed(loaded.model, sequences, 7, 4), sequences, strict=True):
        torch.testing.assert_close(ours, reference_logits(reference, ids), atol=2e-4, rtol=0)


@pytest.mark.parametrize("architecture", NATIVE)
def test_a_native_model_has_its_output_gate_and_up_projections_in_eight_bits(architecture, tmp_path):
    folder = tiny_checkpoint(tmp_path, architecture)
    engine, plain = quantized(folder), Engine(EngineConfig(model=str(folder), kv_memory=1 << 20))
    for layer in engine.model._layers:
        assert isinstance(layer.output, QuantizedLinear)
        assert isinstance(layer.gate_up, QuantizedLinear)
        assert all(isinstance(x, PackedLinear) for x in (layer.qkv, layer.down))
    assert isinstance(engine.model._head, PackedLinear)
    assert engine.spec.weight_bytes < plain.spec.weight_bytes
    sequences = random_sequences(LENGTHS)
    pairs = zip(run_packed(engine.model, sequences, 7, 4), run_packed(plain.model, sequences, 7, 4), strict=True)
    for ours, exact in pairs:
        assert 0 < (ours - exact).abs().max() < 0.5 * exact.abs().max()


def test_other_models_have_theirs_in_eight_bits_too(tmp_path):
    folder = tiny_checkpoint(tmp_path, "gpt2")
    model = load_hf_model("tiny", folder, torch.float32, torch.device("cpu"), quantize=True)
    linears = {name: x.linear for name, x in model.module.named_modules() if hasattr(x, "linear")}
    assert linears
    for name, linear in linears.items():
        assert isinstance(linear, PackedLinear if name == "lm_head" else QuantizedLinear), name


def test_a_channel_that_is_silent_is_not_divided_by_nothing():
    found = divisors(torch.tensor([0.0, 4.0, 1.0]), torch.tensor([[0.0, 1.0, 0.25]]))
    assert found.isfinite().all()
    assert found.tolist()[1:] == [2.0, 2.0]


def test_a_run_with_it_is_another_run(folder, model):
    write_jsonl(folder / "in.jsonl", PROMPTS)
    code, _, stderr = run(model, "in.jsonl", "--max-tokens", 6, "--quantize", "int8")
    assert code == 0, stderr
    assert pq.read_table("in.completions.parquet")["status"].to_pylist() == ["ok"] * 5
    manifest = json.loads((folder / "in.completions.parquet.run" / "manifest.json").read_text())
    assert manifest["parameters"]["quantize"] == "int8"
    code, _, stderr = run(model, "in.jsonl", "--max-tokens", 6)
    assert code == 2
    assert "quantize" in sentence(stderr)


def test_where_it_cannot_be_is_said():
    with pytest.raises(UsageError, match=r"--quantize int8 is for CPUs, but the device is cuda"):
        loader.check_quantize(EngineConfig(quantize="int8"), torch.device("cuda"))
    with pytest.raises(UsageError, match="quantize is 'int4'"):
        EngineConfig(quantize="int4")
    assert call("run", "x.jsonl", "--quantize", "int4")[0] == 2


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_a_plan_knows_what_the_weights_take(architecture, tmp_path):
    folder = tiny_checkpoint(tmp_path, architecture)
    engine = quantized(folder)
    assert engine.info.kernels.endswith(" int8")
    with model_facts(engine.config) as facts:
        assert facts.size.weight_bytes == pytest.approx(engine.spec.weight_bytes, rel=0.1)  # tiny layers, large scales
