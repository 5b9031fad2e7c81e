"""What a loaded model will say of itself, found from its configuration and headers: no weights are read."""

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pagedgen.config import EngineConfig
from pagedgen.errors import PagedgenError
from pagedgen.execution.kv_cache import LayerKV
from pagedgen.models import source as sources
from pagedgen.models.llama import is_native
from pagedgen.models.rope import RotaryEmbedding
from pagedgen.models.source import ModelSource
from pagedgen.models.support import check_length, check_quantize, check_supported, resolve_device, resolve_dtype
from pagedgen.models.weights import Checkpoint

_META = torch.device("meta")


@dataclass(frozen=True, slots=True)
class Size:
    """parameters: of the model, a tied head counted once. active: of its layers, those that a token goes through.
    head: of the matrix that gives the logits. quantizable: what `--quantize` stores in eight bits. weight_bytes: what
    the loaded weights occupy."""

    parameters: int
    active: int
    head: int
    quantizable: int
    weight_bytes: int


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """See `ModelSpec`, whose fields of the same names have the same values once the model is loaded.

    hidden_size, intermediate_size: of a layer, for estimates. tokenizer_path: a local folder for AutoTokenizer.
    generation_config: generation_config.json as it stands, {} if there is none. stated_eos: the end tokens that it or
    the config names. layers_are_exact: False when the shapes of the KV cache come from the config's usual names alone,
    because the model could not be tried without weights.
    """

    name: str
    architecture: str
    path: str
    size: Size
    layers: tuple[LayerKV, ...]
    vocab_size: int
    max_position: int
    dtype: torch.dtype
    device: torch.device
    kv_depends_on_length: bool
    hidden_size: int
    intermediate_size: int
    tokenizer_path: Path
    generation_config: dict[str, Any]
    stated_eos: Any
    layers_are_exact: bool = True


@contextlib.contextmanager
def model_facts(config: EngineConfig) -> Iterator[ModelFacts]:
    """The facts of `config.model` on its device and in its dtype; the tokenizer's folder may be gone afterwards.

    Of a Hub model only configs and tokenizer are downloaded. Raises PagedgenError or UsageError for what `load_model`
    would refuse before it reads weights, but for weights that do not fit the memory.
    """
    source, device = sources.resolve_model(config.model), resolve_device(config.device)
    if source.kind == "gguf":
        with _gguf_folder(source, config, device) as (folder, dtype, hf_config):
            check_length(config.max_model_len, hf_config)
            yield _in_eight_bits(config, _native_facts(source.name, hf_config, folder, None, dtype, device))
        return
    own_code = config.trust_remote_code
    folder = sources.fetch_config(source, own_code)
    hf_config = sources.read_config(folder, source.name, own_code)
    needs_code = sources.needs_own_code(folder)
    check_supported(hf_config, source.name, needs_code)
    folder = sources.fetch_without_weights(source, own_code)
    checkpoint = Checkpoint(folder) if source.kind == "folder" else None  # which reads headers only
    declared = getattr(hf_config, "dtype", None)
    if not isinstance(declared, torch.dtype):
        declared = checkpoint.main_dtype() if checkpoint is not None else torch.float32
    dtype = resolve_dtype(config.dtype, declared, device)
    check_length(config.max_model_len, hf_config)
    if not needs_code and is_native(hf_config):
        facts = _native_facts(source.name, hf_config, folder, checkpoint, dtype, device)
    else:
        facts = _hook_facts(source.name, hf_config, folder, dtype, device, needs_code)
    yield _in_eight_bits(config, facts)


def quick_facts(config: EngineConfig) -> ModelFacts | None:
    """The facts of a model where they cost next to nothing: it has a native path, and if it is a GGUF file, it has been
    converted already. Raises what `model_facts` raises."""
    source = sources.resolve_model(config.model)
    if source.kind == "gguf":
        from pagedgen.models.gguf import find_converted

        assert source.path is not None
        is_quick = find_converted(source.path, config.dtype, resolve_device(config.device)) is not None
    else:
        folder = sources.fetch_config(source, config.trust_remote_code)
        hf_config = sources.read_config(folder, source.name, config.trust_remote_code)
        is_quick = not sources.needs_own_code(folder) and is_native(hf_config)
    if not is_quick:
        return None
    with model_facts(config) as facts:
        return facts


def _in_eight_bits(config: EngineConfig, facts: ModelFacts) -> ModelFacts:
    """The facts with the layers' weights quantized, if they are to be; their scales are left out."""
    if not check_quantize(config, facts.device):
        return facts
    saved = facts.size.quantizable * (facts.dtype.itemsize - 1)
    return replace(facts, size=replace(facts.size, weight_bytes=facts.size.weight_bytes - saved))


@contextlib.contextmanager
def _gguf_folder(
    source: ModelSource, config: EngineConfig, device: torch.device
) -> Iterator[tuple[Path, torch.dtype, Any]]:
    """The converted folder of a GGUF file if there is one, else a temporary one without weights; the dtype and the
    config that a run would have."""
    from pagedgen.models import gguf
    from pagedgen.models.gguf_format import GgufFile

    assert source.path is not None
    converted = gguf.find_converted(source.path, config.dtype, device)
    if converted is not None:
        hf_config = gguf.read_converted_config(converted)
        dtype = resolve_dtype(config.dtype, gguf.checkpoint_dtype(source.path), device)
        yield converted, dtype, hf_config
        return
    file = GgufFile(source.path)
    dtype = resolve_dtype(config.dtype, file.checkpoint_dtype(), device)
    with tempfile.TemporaryDirectory(prefix="pagedgen-") as folder:
        gguf.write_without_weights(file, dtype, Path(folder))
        yield Path(folder), dtype, gguf.read_converted_config(Path(folder))


def _native_facts(
    name: str, config: Any, folder: Path, checkpoint: Checkpoint | None, dtype: torch.dtype, device: torch.device
) -> ModelFacts:
    """checkpoint: None where its headers are not there to tell what the config leaves open."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    layer = LayerKV(config.num_key_value_heads, head_dim, head_dim)
    generation_config = sources.read_generation_config(folder)
    return ModelFacts(
        name=name,
        architecture=config.model_type,
        path="native",
        size=_native_size(config, head_dim, checkpoint, dtype, device),
        layers=(layer,) * config.num_hidden_layers,
        vocab_size=config.vocab_size,
        max_position=config.max_position_embeddings,
        dtype=dtype,
        device=device,
        kv_depends_on_length=RotaryEmbedding(config, device, dtype).depends_on_length,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        tokenizer_path=folder,
        generation_config=generation_config,
        stated_eos=generation_config.get("eos_token_id", getattr(config, "eos_token_id", None)),
    )


def _native_size(
    config: Any, head_dim: int, checkpoint: Checkpoint | None, dtype: torch.dtype, device: torch.device
) -> Size:
    """Counts what `LlamaModel` loads, matrix by matrix; a tied head is a packed copy on a CPU."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query, both = config.num_attention_heads * head_dim, 2 * config.num_key_value_heads * head_dim
    bias = bool(getattr(config, "attention_bias", False))
    layer = hidden * (query + both) + query * hidden + 3 * hidden * inner + 2 * hidden
    layer += (query + both) * (bias or config.model_type == "qwen2") + hidden * bias
    layer += (2 * inner + hidden) * bool(getattr(config, "mlp_bias", False))
    layer += 2 * head_dim * (config.model_type == "qwen3")
    layers, head = config.num_hidden_layers * layer, config.vocab_size * hidden
    is_tied = config.tie_word_embeddings and (checkpoint is None or "lm_head.weight" not in checkpoint)
    parameters = layers + hidden + head * (1 if is_tied else 2)
    loaded = parameters + head * (is_tied and device.type == "cpu")
    quantizable = config.num_hidden_layers * hidden * (query + 2 * inner)
    return Size(parameters, layers, head, quantizable, loaded * dtype.itemsize)


def _hook_facts(
    name: str, config: Any, folder: Path, dtype: torch.dtype, device: torch.device, own_code: bool
) -> ModelFacts:
    """Builds the module without memory (on the meta device) and runs it on two tokens to see what its layers keep."""
    from pagedgen.models.hf import HookModel
    from pagedgen.models.hook import register_attention

    register_attention()
    module = _module_without_weights(name, config, dtype, own_code)
    size = _hook_size(module, config, dtype, device)
    generation_config = sources.read_generation_config(folder)
    try:
        spec = HookModel(name, module, dtype, _META).spec
        layers, vocab_size, depends, is_exact = spec.layers, spec.vocab_size, spec.kv_depends_on_length, True
    except Exception:  # what cannot be traced without values may well run with them; the run's self-check decides
        layers, vocab_size, depends, is_exact = _usual_layers(config), config.vocab_size, False, False
    return ModelFacts(
        name=name,
        architecture=config.model_type,
        path="hook",
        size=size,
        layers=layers,
        vocab_size=vocab_size,
        max_position=getattr(config, "max_position_embeddings", None) or 2048,
        dtype=dtype,
        device=device,
        kv_depends_on_length=depends,
        hidden_size=config.hidden_size,
        intermediate_size=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        tokenizer_path=folder,
        generation_config=generation_config,
        stated_eos=generation_config.get("eos_token_id", getattr(config, "eos_token_id", None)),
        layers_are_exact=is_exact,
    )


def _module_without_weights(name: str, config: Any, dtype: torch.dtype, own_code: bool) -> nn.Module:
    from transformers import AutoModelForCausalLM

    try:
        with _META:
            # Of the ways to compute experts this one does not look at the values.
            config._experts_implementation = "batched_mm"
            module: nn.Module = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation="eager", trust_remote_code=own_code
            )
    except Exception as error:  # as in loading, a config may be wrong in many ways
        reason = " ".join(str(error).split())
        raise PagedgenError(f"{name} cannot be built by transformers ({reason}); check its config.json") from error
    config.pad_token_id = None  # some models look for it in their input, which has no values here
    return module.eval()


def _hook_size(module: nn.Module, config: Any, dtype: torch.dtype, device: torch.device) -> Size:
    """Counts as `HookModel` does: on a CPU linear layers are packed, a tied head as a copy."""
    from transformers.pytorch_utils import Conv1D

    parameters = sum(tensor.numel() for tensor in module.parameters())
    in_experts = sum(tensor.numel() for name, tensor in module.named_parameters() if ".experts." in name)
    all_experts = next(
        (n for x in ("num_experts", "num_local_experts", "n_routed_experts") if (n := _of(config, x))), 1
    )
    used_experts = _of(config, "num_experts_per_tok") or all_experts
    head = _of(config, "vocab_size") * config.hidden_size
    tables = sum(m.weight.numel() for m in module.modules() if isinstance(m, nn.Embedding))
    is_tied = bool(getattr(config, "tie_word_embeddings", False))
    idle = in_experts - in_experts * used_experts // all_experts
    active = max(0, parameters - tables - idle - head * (not is_tied))
    linears = {id(m): m for m in module.modules() if type(m) is nn.Linear or type(m) is Conv1D}
    if device.type != "cpu":
        held = [*module.parameters(), *module.buffers()]
    else:
        # A parameter that anything else holds too stays there, and is packed as a copy.
        kept = {id(p): p for m in module.modules() if id(m) not in linears for p in m.parameters(recurse=False)}
        packed = [p for m in linears.values() for p in m.parameters(recurse=False)]
        held = [*kept.values(), *packed, *module.buffers()]
    return Size(parameters, active, head, active, sum(tensor.nbytes for tensor in held))


def _of(config: Any, name: str) -> int:
    value = getattr(config, name, None)
    return value if isinstance(value, int) else 0


def _usual_layers(config: Any) -> tuple[LayerKV, ...]:
    """The shapes of the KV cache by the names that most configs use."""
    heads = _of(config, "num_key_value_heads") or config.num_attention_heads
    dim = _of(config, "head_dim") or config.hidden_size // config.num_attention_heads
    return (LayerKV(heads, dim, dim),) * int(config.num_hidden_layers)
