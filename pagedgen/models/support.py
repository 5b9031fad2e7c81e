"""What can be known about a model from its configuration: whether it can run, on which device and in which dtype, and
whether its weights fit. All of it is checked before any weights are read."""

from typing import Any

import torch

from pagedgen.config import Device, Dtype, EngineConfig
from pagedgen.errors import PagedgenError, UsageError
from pagedgen.execution.memory import available_memory
from pagedgen.models.llama import MODEL_TYPES
from pagedgen.units import format_bytes

_ALIBI = frozenset({"bloom", "mpt"})
_STATE_SPACE = frozenset(
    {
        "bailing_hybrid",
        "bamba",
        "falcon_h1",
        "falcon_mamba",
        "granitemoehybrid",
        "jamba",
        "kimi_linear",
        "lfm2",
        "lfm2_moe",
        "lfm3",
        "mamba",
        "mamba2",
        "minimax",
        "nemotron_h",
        "olmo_hybrid",
        "qwen3_next",
        "recurrent_gemma",
        "rwkv",
        "xlstm",
        "zamba",
        "zamba2",
        "zaya",
    }
)
_ATTENTION_LAYERS = frozenset({"attention", "full_attention", "sliding_attention"})
_OTHER_MODALITIES = ("vision_config", "audio_config", "text_config", "speech_config", "image_token_id")
_CAUSAL_CLASSES = ("ForCausalLM", "LMHeadModel")


def check_supported(config: Any, name: str, own_code: bool = False) -> None:
    """Raise PagedgenError, naming the model and the reason, when the `transformers` config is one that cannot run.
    own_code: the model is implemented by code that comes with it."""
    if (reason := _unsupported(config, own_code)) is not None:
        raise PagedgenError(
            f"{name} cannot run in pagedgen: {reason}; choose a decoder-only text model with rotary, learned or no "
            "position embeddings"
        )


def _unsupported(config: Any, own_code: bool) -> str | None:
    kind = config.model_type
    layer_kinds = _layer_kinds(config)
    if kind in _STATE_SPACE or any(x not in _ATTENTION_LAYERS | {"chunked_attention"} for x in layer_kinds):
        return f"its architecture ({kind}) has state-space, recurrent or convolution layers, which keep no KV cache"
    if "chunked_attention" in layer_kinds:
        return f"its architecture ({kind}) attends in fixed chunks"
    if kind in _ALIBI or getattr(config, "alibi", False) or getattr(config, "position_embedding_type", "") == "alibi":
        return f"its architecture ({kind}) uses ALiBi position biases"
    if getattr(config, "is_encoder_decoder", False):
        return f"its architecture ({kind}) is an encoder-decoder"
    if any(getattr(config, attribute, None) is not None for attribute in _OTHER_MODALITIES):
        return f"its architecture ({kind}) is a vision or multimodal model"
    if (quantization := getattr(config, "quantization_config", None)) is not None:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else quantization
        return f"its weights are quantized ({method}), which only GGUF files may be"
    if own_code:
        has_class = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or ())
        return None if has_class else "the code that comes with it names no AutoModelForCausalLM"
    return None if kind in MODEL_TYPES and not config.architectures else _no_causal_class(config)


def _layer_kinds(config: Any) -> set[str]:
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    return set(kinds)


def _no_causal_class(config: Any) -> str | None:
    classes = config.architectures or ()
    if classes and not any(name.endswith(_CAUSAL_CLASSES) for name in classes):
        return f"its checkpoint holds {classes[0]}, which has no language-model head"
    if config.model_type not in MODEL_TYPES:
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            return f"its architecture ({config.model_type}) has no causal language model in transformers"
    return None


def resolve_device(device: Device) -> torch.device:
    """`auto` is CUDA where there is a CUDA device. Raises UsageError for `cuda` where there is none."""
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise UsageError("--device cuda: this machine has no CUDA device that PyTorch can use; leave --device out")
    return torch.device("cuda" if available and device != "cpu" else "cpu")


def resolve_dtype(dtype: Dtype, checkpoint: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype to run in. `auto` is the checkpoint's, where the device computes in it at full speed.

    On a CPU bfloat16 needs the instructions for it (AVX512-BF16, AMX or ARM's BF16); without them, and for float16,
    which oneDNN has no fast kernels for on most CPUs, float32 holds the same values. A GPU without bfloat16 gets
    float16.
    """
    if dtype != "auto":
        resolved: torch.dtype = getattr(torch, dtype)
        return resolved
    if device.type == "cpu":
        return torch.bfloat16 if checkpoint == torch.bfloat16 and _cpu_has_bf16() else torch.float32
    if checkpoint == torch.bfloat16 and not torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.float16
    return checkpoint if checkpoint in (torch.bfloat16, torch.float16) else torch.float32


def _cpu_has_bf16() -> bool:
    if not hasattr(torch.cpu, "get_capabilities"):  # torch 2.11
        return bool(torch.cpu._is_avx512_bf16_supported())
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"))


def check_quantize(config: EngineConfig, device: torch.device) -> bool:
    """Whether the linear layers are to be quantized. Raises UsageError where they cannot be."""
    if config.quantize is not None and device.type != "cpu":
        raise UsageError(f"--quantize {config.quantize} is for CPUs, but the device is {device.type}; leave it out")
    return config.quantize is not None


def check_length(max_model_len: int | None, config: Any) -> None:
    """Raise UsageError when `max_model_len` is more than the model's own limit."""
    limit = getattr(config, "max_position_embeddings", None)
    if max_model_len is not None and limit is not None and max_model_len > limit:
        raise UsageError(
            f"--max-model-len {max_model_len} is more than the {limit} tokens this model allows; lower it, or leave it "
            "out"
        )


def check_memory(name: str, need: int, device: torch.device, dtype: torch.dtype) -> None:
    """Raise PagedgenError when `need` bytes of weights in `dtype` do not fit into what the device has free."""
    have, _ = available_memory(device)
    if need <= have:
        return
    halved = need * 2 // dtype.itemsize
    if halved < need and halved <= have:
        remedy = f"pass --dtype bfloat16, in which they need {format_bytes(halved)}"
    else:
        remedy = f"choose a model of at most {have / 2 / 1e9:.2g} billion parameters in bfloat16, or free memory"
    raise PagedgenError(
        f"--model {name} does not fit: its weights need {format_bytes(need)} in {str(dtype).removeprefix('torch.')} "
        f"and {format_bytes(have)} of {device.type} memory are free; {remedy}"
    )
