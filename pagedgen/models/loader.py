"""From a model's name to a loaded model, with everything that can go wrong found before the weights are read."""

from dataclasses import dataclass
from typing import Any

import torch

from pagedgen.config import EngineConfig
from pagedgen.models import source as sources
from pagedgen.models.base import Model
from pagedgen.models.llama import LlamaModel, is_native
from pagedgen.models.source import ModelSource, resolve_model
from pagedgen.models.support import (
    check_length,
    check_memory,
    check_quantize,
    check_supported,
    resolve_device,
    resolve_dtype,
)
from pagedgen.models.weights import Checkpoint

__all__ = [
    "LoadedModel",
    "ModelSource",
    "check_model",
    "check_supported",
    "load_model",
    "resolve_dtype",
    "resolve_model",
]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """tokenizer_path: a local folder for AutoTokenizer. generation_config: generation_config.json as it stands, {} if
    there is none. hf_config: the model's `transformers` config."""

    model: Model
    tokenizer_path: str
    generation_config: dict[str, Any]
    hf_config: Any


def check_model(source: ModelSource, trust_remote_code: bool = False) -> None:
    """Raise PagedgenError for a model that cannot run, without reading or downloading its weights. No code that comes
    with it is run unless it is trusted and needed."""
    if source.kind == "gguf":
        from pagedgen.models.gguf import check_gguf

        assert source.path is not None
        check_gguf(source.path)
    else:
        folder = sources.fetch_config(source, trust_remote_code)
        config = sources.read_config(folder, source.name, trust_remote_code)
        check_supported(config, source.name, sources.needs_own_code(folder))


def load_model(config: EngineConfig) -> LoadedModel:
    """Load `config.model` on its device and in its dtype.

    Raises PagedgenError (or UsageError for the device) in one sentence, before any weights are read wherever it can be
    known by then.
    """
    source, own_code = resolve_model(config.model), False
    device = resolve_device(config.device)
    if source.kind == "gguf":
        from pagedgen.models.gguf import checkpoint_dtype, convert_gguf, read_converted_config

        assert source.path is not None
        dtype = resolve_dtype(config.dtype, checkpoint_dtype(source.path), device)
        folder = convert_gguf(source.path, dtype)
        hf_config = read_converted_config(folder)
        checkpoint = Checkpoint(folder)
    else:
        check_model(source, config.trust_remote_code)
        folder = sources.fetch(source, config.trust_remote_code)
        hf_config = sources.read_config(folder, source.name, config.trust_remote_code)
        own_code = sources.needs_own_code(folder)
        checkpoint = Checkpoint(folder)
        dtype = resolve_dtype(config.dtype, _checkpoint_dtype(hf_config, checkpoint), device)
    quantize = check_quantize(config, device)
    check_length(config.max_model_len, hf_config)
    check_memory(source.name, _weight_bytes(hf_config, checkpoint, dtype, device), device, dtype)
    if own_code or not is_native(hf_config):
        from pagedgen.models.hf import load_hf_model

        model: Model = load_hf_model(source.name, folder, dtype, device, own_code, quantize)
    else:
        model = LlamaModel(source.name, hf_config, checkpoint, dtype, device)
    return LoadedModel(model, str(folder), sources.read_generation_config(folder), hf_config)


def _checkpoint_dtype(hf_config: Any, checkpoint: Checkpoint) -> torch.dtype:
    declared = getattr(hf_config, "dtype", None)
    return declared if isinstance(declared, torch.dtype) else checkpoint.main_dtype()


def _weight_bytes(hf_config: Any, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> int:
    """What the loaded weights will occupy: on a CPU a tied head is a packed copy of the embedding."""
    parameters = checkpoint.num_parameters()
    is_tied = getattr(hf_config, "tie_word_embeddings", False) and "lm_head.weight" not in checkpoint
    if device.type == "cpu" and is_tied:  # a config of its own code may name its sizes otherwise
        parameters += getattr(hf_config, "vocab_size", 0) * getattr(hf_config, "hidden_size", 0)
    return parameters * dtype.itemsize
