"""All layers in one call of C++, against the same kernels called one by one: bit for bit."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from pagedgen_kernels import cpu
from pagedgen_kernels.cpu.decoder import Decoder
from pagedgen_kernels.cpu.linear import tiles_fit
from tiny_models import random_sequences, run_packed, tiny_checkpoint

from pagedgen import EngineConfig
from pagedgen.execution.attention import choose_backend
from pagedgen.execution.kv_cache import KVCache
from pagedgen.models import loader
from pagedgen.models.llama import LlamaModel
from pagedgen.quantizing import quantize_model
from pagedgen.text.tokenizer import Tokenizer

pytestmark = pytest.mark.skipif(
    not tiles_fit(torch.ones(32, 32, dtype=torch.bfloat16)), reason="this CPU has no AMX, or there is no compiler"
)
SIZES = {"hidden_size": 128, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
BACKEND = choose_backend(torch.device("cpu"))


def load(folder: Path, architecture: str, dtype: str = "bfloat16", **sizes: int) -> tuple[LlamaModel, Path]:
    loaded = loader.load_model(
        EngineConfig(model=str(tiny_checkpoint(folder, architecture, **(SIZES | sizes))), dtype=dtype)
    )
    assert isinstance(loaded.model, LlamaModel)
    return loaded.model, loaded.tokenizer_path


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "smollm3"])
@pytest.mark.parametrize("quantize", [False, True])
@pytest.mark.parametrize("only_final", [False, True])
def test_one_call_gives_what_the_kernels_give_one_by_one(
    architecture: str, quantize: bool, only_final: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts in chunks beside decoding sequences; sliding windows, biases, layers without rotation, eight bits."""
    model, tokenizer = load(tmp_path, architecture)
    if quantize:
        quantize_model(model, Tokenizer.load(tokenizer))
    calls: list[int] = []
    call = Decoder.__call__
    monkeypatch.setattr(
        Decoder, "__call__", lambda self, *arguments: (calls.append(len(arguments[0])), call(self, *arguments))[1]
    )
    # with two threads enough of them for tasks that take all heads, and rotate the queries themselves
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    sequences = random_sequences([40, 7, 90, 33, 1, 70] + [20] * 15)
    prompt_lens = [20, 7, 60, 1, 1, 70] + [3] * 15
    options = {"prompt_lens": prompt_lens, "only_final": only_final}
    found = run_packed(model, sequences, (9, 50, 3), 16, **options)
    assert sum(calls) == sum(map(len, sequences))
    calls.clear()
    one_by_one = replace(BACKEND, kernels=SimpleNamespace(**{name: getattr(cpu, name) for name in dir(cpu)}))
    expected = run_packed(model, sequences, (9, 50, 3), 16, attention=one_by_one, **options)
    assert not calls
    for ours, theirs in zip(found, expected, strict=True):
        assert not ours.isnan().any()
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("tied", [False, True])
def test_the_likeliest_tokens_come_from_the_head_without_logits(tied: bool, tmp_path: Path) -> None:
    model, _ = load(tmp_path, "llama", tie_word_embeddings=tied)
    hidden = torch.randn(40, SIZES["hidden_size"]).bfloat16()
    assert model.likeliest is not None
    assert model.likeliest(hidden).tolist() == cpu.greedy_argmax(model.logits(hidden)).tolist()
    other, _ = load(tmp_path / "float32", "llama", "float32")
    assert other.likeliest is None


@pytest.mark.parametrize(
    ("architecture", "dtype", "sizes"),
    [("llama", "float32", {}), ("qwen3", "bfloat16", {}), ("llama", "bfloat16", {"intermediate_size": 40})],
)
def test_what_it_does_not_cover_goes_layer_by_layer(
    architecture: str, dtype: str, sizes: dict[str, int], tmp_path: Path
) -> None:
    model, _ = load(tmp_path, architecture, dtype, **sizes)
    cache = KVCache(model.spec.layers, 4, 16, model.spec.dtype, model.spec.device)
    assert model.whole_decoder(cache, BACKEND) is None


def test_a_cache_is_not_kept(tmp_path: Path) -> None:
    model, _ = load(tmp_path, "llama")
    caches = [KVCache(model.spec.layers, 4, 16, model.spec.dtype, model.spec.device) for _ in range(2)]
    first, second = (model.whole_decoder(cache, BACKEND) for cache in caches)
    assert first is not None
    assert second is not first
    assert model.whole_decoder(caches[1], BACKEND) is second
    del caches
    assert model._decoder is not None
    assert model._decoder.cache() is None
