"""Logits of every architecture, packed, chunked and across block edges, against transformers on each sequence alone."""

from pathlib import Path

import pytest
import torch
from tiny_models import ARCHITECTURES, NATIVE, random_sequences, reference_logits, run_packed, tiny_checkpoint
from transformers import AutoModelForCausalLM

from pagedgen.config import EngineConfig
from pagedgen.errors import PagedgenError
from pagedgen.models.base import Model
from pagedgen.models.hf import load_hf_model
from pagedgen.models.loader import load_model

LENGTHS = (23, 9, 17)
CPU = torch.device("cpu")


def load_native(folder: Path) -> Model:
    model = load_model(EngineConfig(model=str(folder), device="cpu", dtype="float32")).model
    assert model.spec.path == "native"
    return model


def load_hook(folder: Path) -> Model:
    return load_hf_model("tiny", folder, torch.float32, CPU)


def load_reference(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def worst(model: Model, folder: Path, chunks: int | tuple[int, ...], block_size: int) -> float:
    """The largest difference of any logit of any token."""
    sequences = random_sequences(LENGTHS)
    reference = load_reference(folder)
    pairs = zip(run_packed(model, sequences, chunks, block_size), sequences, strict=True)
    return max(float((ours - reference_logits(reference, ids)).abs().max()) for ours, ids in pairs)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_hook_logits(architecture: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, architecture)
    model = load_hook(folder)
    for chunks, block_size in (((7, 3, 5), 4), (2048, 16), (1, 4)):
        assert worst(model, folder, chunks, block_size) < 1e-4


@pytest.mark.parametrize("architecture", NATIVE)
@pytest.mark.parametrize(("chunks", "block_size"), [((7, 3, 5), 4), (2048, 16), (1, 16), (2048, 1)])
def test_native_logits(architecture: str, chunks: int | tuple[int, ...], block_size: int, tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, architecture)
    assert worst(load_native(folder), folder, chunks, block_size) < 1e-4


@pytest.mark.parametrize("architecture", NATIVE)
def test_native_equals_hook(architecture: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, architecture)
    sequences = random_sequences(LENGTHS)
    native, hook = load_native(folder), load_hook(folder)
    for a, b in zip(run_packed(native, sequences, 5, 4), run_packed(hook, sequences, 5, 4), strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=0)
    assert native.spec.layers == hook.spec.layers
    assert native.spec.max_position == hook.spec.max_position == 256
    assert native.spec.vocab_size == hook.spec.vocab_size


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gpt2", "gpt_neox", "falcon"])
def test_only_the_rows_asked_for(architecture: str, tmp_path: Path) -> None:
    """Steps that ask for some rows, or for none while prompts are in their chunks, give what asking for all does."""
    folder = tiny_checkpoint(tmp_path, architecture)
    sequences = random_sequences(LENGTHS)
    for load in (load_hook, load_native) if architecture in NATIVE else (load_hook,):
        model = load(folder)
        everything = run_packed(model, sequences, 6, 4)
        final = run_packed(model, sequences, 6, 4, only_final=True)
        for rows, last in zip(everything, final, strict=True):
            torch.testing.assert_close(last, rows[-1:], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"head_dim": 20, "num_key_value_heads": 1}),
        ("mistral", {"sliding_window": None}),
        ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
        ("qwen2", {"use_sliding_window": False}),
        ("smollm3", {"attention_bias": True, "mlp_bias": True, "use_sliding_window": True, "sliding_window": 6}),
        ("smollm3", {"no_rope_layers": [1, 1, 0, 1], "tie_word_embeddings": False}),
    ],
)
def test_native_variants(architecture: str, overrides: dict[str, object], tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, architecture, **overrides)
    assert worst(load_native(folder), folder, (7, 3, 5), 4) < 1e-4


@pytest.mark.parametrize(
    "overrides",
    [
        {"new_decoder_architecture": True, "num_kv_heads": 2},
        {"multi_query": False},
        {"parallel_attn": False, "bias": True},
    ],
)
def test_falcon_variants(overrides: dict[str, object], tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "falcon", **overrides)
    assert worst(load_hook(folder), folder, (7, 3, 5), 4) < 1e-4


def test_another_activation_takes_the_hook(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "llama", hidden_act="gelu")
    model = load_model(EngineConfig(model=str(folder), device="cpu", dtype="float32")).model
    assert model.spec.path == "hook"
    assert worst(model, folder, (7, 3, 5), 4) < 1e-4


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2", "gpt_oss"])
def test_bfloat16(architecture: str, tmp_path: Path) -> None:
    """In bfloat16 the logits stay near float32's, on both paths."""
    folder = tiny_checkpoint(tmp_path, architecture)
    sequences = random_sequences(LENGTHS)
    model = load_model(EngineConfig(model=str(folder), device="cpu", dtype="bfloat16")).model
    reference = load_reference(folder)
    for ours, ids in zip(run_packed(model, sequences, 5, 4), sequences, strict=True):
        own = reference_logits(reference, ids)
        assert float((ours - own).norm() / own.norm()) < 0.05


@pytest.mark.parametrize("architecture", ["stablelm", "nemotron"])
def test_models_that_drop_the_keyword_are_refused(architecture: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, architecture)
    with pytest.raises(PagedgenError, match=rf"\({architecture}\).*keywords"):
        load_model(EngineConfig(model=str(folder), device="cpu"))


def test_the_self_check_finds_wrong_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose attention is not what the hook computes is refused, whatever the difference is."""
    from transformers.models.olmo2 import modeling_olmo2

    own = modeling_olmo2.eager_attention_forward

    def biased(module, query, key, value, mask, **keywords):  # type: ignore[no-untyped-def]
        distance = torch.arange(key.shape[2]) * 0.3
        return own(module, query, key, value, mask + distance, **keywords)

    folder = tiny_checkpoint(tmp_path, "olmo2")
    monkeypatch.setattr(modeling_olmo2, "eager_attention_forward", biased)
    with pytest.raises(PagedgenError, match=r"\(olmo2\).*logits differ"):
        load_hook(folder)


def test_a_window_kept_from_the_attention_layers_is_refused(tmp_path: Path) -> None:
    """OLMo2 has no sliding window; a config that names one must not be taken at its word."""
    folder = tiny_checkpoint(tmp_path, "olmo2", sliding_window=64)
    with pytest.raises(PagedgenError, match=r"\(olmo2\).*sliding window"):
        load_hook(folder)
