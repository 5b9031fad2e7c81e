"""Facts of models that are not loaded: equal to those of the loaded ones, and no weight is read for them."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import gguf
import pytest
import torch
from tiny_gguf import write_gguf
from tiny_models import ARCHITECTURES, NATIVE, tiny_checkpoint

from pagedgen import EngineConfig
from pagedgen.errors import PagedgenError, UsageError
from pagedgen.execution.kv_cache import KVCache
from pagedgen.models import facts as facts_module
from pagedgen.models.facts import model_facts
from pagedgen.models.loader import load_model
from pagedgen.models.weights import Checkpoint

FIELDS = ("name", "architecture", "path", "layers", "vocab_size", "max_position", "dtype", "kv_depends_on_length")


def facts_of(config):
    with model_facts(config) as facts:
        return facts


def assert_same(facts, spec):
    for name in FIELDS:
        assert getattr(facts, name) == getattr(spec, name), name
    assert abs(facts.size.weight_bytes / spec.weight_bytes - 1) < 0.01
    ours, theirs = (KVCache.bytes_per_block(x.layers, 16, x.dtype) for x in (facts, spec))
    assert ours == theirs


@pytest.fixture
def no_weights(monkeypatch):
    """Reading any weight fails the test."""

    def fail(*_, **__):
        raise AssertionError("weights were read")

    monkeypatch.setattr("safetensors.safe_open", fail)
    monkeypatch.setattr("safetensors.torch.load_file", fail)
    monkeypatch.setattr("gguf.dequantize", fail)
    monkeypatch.setattr(torch, "load", fail)
    monkeypatch.setattr(Checkpoint, "load", fail)


def test_the_fixture_notices_weights(model, no_weights):
    with pytest.raises(AssertionError, match="weights were read"):
        load_model(EngineConfig(model=model))


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_facts_are_those_of_the_loaded_model(model_type, tmp_path, request):
    config = EngineConfig(model=str(tiny_checkpoint(tmp_path, model_type)), device="cpu")
    spec = load_model(config).model.spec
    request.getfixturevalue("no_weights")
    facts = facts_of(config)
    assert_same(facts, spec)
    assert facts.layers_are_exact


@pytest.mark.parametrize(
    ("model_type", "overrides"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"head_dim": 16}),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("phi3", {"tie_word_embeddings": True}),
        ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_facts_of_variants(model_type, overrides, dtype, tmp_path):
    folder = tiny_checkpoint(tmp_path, model_type, **overrides)
    config = EngineConfig(model=str(folder), device="cpu", dtype=dtype)
    assert_same(facts_of(config), load_model(config).model.spec)


def test_a_head_in_the_checkpoint_wins_over_a_config_that_ties_it(tmp_path):
    folder = tiny_checkpoint(tmp_path, "llama")
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"tie_word_embeddings": True}))
    facts = facts_of(EngineConfig(model=str(folder), device="cpu"))
    assert facts.size.parameters == Checkpoint(folder).num_parameters()
    assert_same(facts, load_model(EngineConfig(model=str(folder), device="cpu")).model.spec)


@pytest.mark.parametrize("architecture", NATIVE)
def test_facts_of_a_gguf_before_and_after_it_is_converted(architecture, tmp_path, monkeypatch, request):
    if architecture == "mistral":
        pytest.skip("llama.cpp writes it as llama")
    monkeypatch.setattr("pagedgen.models.gguf._cache_root", lambda: tmp_path / "cache")
    folder = tiny_checkpoint(tmp_path, architecture)
    path = write_gguf(tmp_path / "tiny.gguf", folder, architecture, quantization=gguf.GGMLQuantizationType.F16)
    config = EngineConfig(model=str(path), device="cpu", dtype="bfloat16")
    with model_facts(config) as before:
        assert (before.tokenizer_path / "tokenizer.json").is_file()
        assert not list(before.tokenizer_path.glob("*.safetensors"))
    assert not before.tokenizer_path.exists()
    assert not (tmp_path / "cache").exists()
    loaded = load_model(config)
    request.getfixturevalue("no_weights")
    after = facts_of(config)
    assert str(after.tokenizer_path) == loaded.tokenizer_path
    for facts in (before, after):
        assert_same(facts, loaded.model.spec)
        assert facts.stated_eos == loaded.generation_config["eos_token_id"]


def test_facts_of_smollm2(smollm2_folder, no_weights):
    facts = facts_of(EngineConfig(dtype="float32", device="cpu"))
    assert facts.tokenizer_path == smollm2_folder
    assert facts.size.parameters == 134_515_008
    assert facts.size.weight_bytes == 4 * (134_515_008 + 49152 * 576)
    assert KVCache.bytes_per_block(facts.layers, 16, facts.dtype) == 30 * 2 * 3 * 64 * 16 * 4


def test_on_an_accelerator_a_tied_head_is_no_copy(tmp_path, monkeypatch):
    monkeypatch.setattr(facts_module, "resolve_device", lambda _: SimpleNamespace(type="cuda"))
    monkeypatch.setattr(facts_module, "resolve_dtype", lambda *_: torch.float32)
    monkeypatch.setattr(facts_module, "RotaryEmbedding", lambda *_: SimpleNamespace(depends_on_length=False))
    for model_type in ("llama", "gemma"):
        folder = tiny_checkpoint(tmp_path, model_type, tie_word_embeddings=True)
        facts = facts_of(EngineConfig(model=str(folder)))
        assert facts.size.weight_bytes == pytest.approx(4 * facts.size.parameters, rel=0.01)


def test_only_configs_and_the_tokenizer_are_fetched_from_the_hub(model, monkeypatch, no_weights):
    asked = []

    def snapshot_download(name, *, allow_patterns, ignore_patterns):
        asked.extend(allow_patterns)
        return model

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    facts = facts_of(EngineConfig(model="someone/tiny", device="cpu", dtype="float32"))
    local = facts_of(EngineConfig(model=model, device="cpu", dtype="float32"))
    assert replace(facts, name=local.name) == local
    files = [path for path in Path(model).iterdir() if any(path.match(pattern) for pattern in asked)]
    assert {"config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= {f.name for f in files}
    assert not any(f.suffix == ".safetensors" for f in files)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"model_type": "mamba"}, "state-space"),
        ({"model_type": "not_yet_known"}, "does not know its architecture"),
        ({"model_type": "gpt2", "n_embd": 30, "n_head": 4}, "config.json"),
    ],
)
def test_what_cannot_run_is_refused(values, reason, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    with pytest.raises(PagedgenError, match=reason):
        facts_of(EngineConfig(model=str(tmp_path), device="cpu"))


def test_a_length_past_the_models_is_refused(model):
    with pytest.raises(UsageError, match="--max-model-len 300 is more than the 256 tokens"):
        facts_of(EngineConfig(model=model, max_model_len=300))
