"""Models of random weights for the GPU benchmark, made on the device, and engines that run them."""

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from benchmarks.gpu_parts import Figures, Setting
from pagedgen import Engine, EngineConfig
from pagedgen.execution.failures import free_unused_memory
from pagedgen.models.llama import LlamaModel
from pagedgen.models.loader import LoadedModel
from pagedgen.models.source import resolve_model
from pagedgen.models.weights import Checkpoint

EMBEDDING_DEVIATION = 0.02
DEFAULT_MODEL = "SmolLM2-135M"
CHAT_TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant: "


def llama_config(setting: Setting) -> Any:
    """A config of Llama-3.2-1B's shape, without its scaling of rope."""
    sizes = {"hidden_size": 2048, "num_hidden_layers": 16, "intermediate_size": 8192, "vocab_size": 128256}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64}
    if setting.tiny:
        sizes = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96, "vocab_size": 300}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    return _config({**sizes, **heads, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5}, 500000.0)


def smollm_config(setting: Setting) -> Any:
    """A config of SmolLM2-135M's shape."""
    sizes = {"hidden_size": 576, "num_hidden_layers": 30, "intermediate_size": 1536, "vocab_size": 49152}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}
    if setting.tiny:
        sizes = {"hidden_size": 48, "num_hidden_layers": 2, "intermediate_size": 64, "vocab_size": 300}
        heads = {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16}
    return _config({**sizes, **heads, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5}, 100000.0)


def _config(sizes: dict[str, Any], theta: float) -> Any:
    rope = {"rope_type": "default", "rope_theta": theta}
    return LlamaConfig(**sizes, rope_parameters=rope, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2)


class RandomCheckpoint(Checkpoint):
    """The tensors of a Llama model with tied embeddings: norms are ones, the others normally distributed, such that the
    layers' outputs outweigh the embeddings and the next token depends on all before it. Each is made on the device when
    it is asked for, the same whenever that is."""

    def __init__(self, config: Any) -> None:
        hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
        queries, keys = head_dim * config.num_attention_heads, head_dim * config.num_key_value_heads
        parts = {
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }
        layers = range(config.num_hidden_layers)
        self.shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (config.vocab_size, hidden),
            "model.norm.weight": (hidden,),
            **{f"model.layers.{i}.{name}.weight": shape for i in layers for name, shape in parts.items()},
        }

    def __contains__(self, name: str) -> bool:
        return name in self.shapes

    def load(self, name: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        shape = self.shapes[name]
        if len(shape) == 1:
            return torch.ones(shape, dtype=dtype, device=device)
        deviation = EMBEDDING_DEVIATION if "embed" in name else shape[1] ** -0.5
        generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
        return torch.empty(shape, dtype=dtype, device=device).normal_(0.0, deviation, generator=generator)


def random_model(config: Any, dtype: torch.dtype, device: torch.device) -> LlamaModel:
    return LlamaModel("random weights", config, RandomCheckpoint(config), dtype, device)


def transformers_model(config: Any, dtype: torch.dtype, device: torch.device, attention: str) -> Any:
    """The same weights in transformers' own model. attention: the name of an implementation of its."""
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    checkpoint = RandomCheckpoint(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(checkpoint.load(name, dtype, device))
    return model.eval()


def engine_of(model: LlamaModel, config: Any, tokenizer: Path, settings: EngineConfig, **hooks: Any) -> Engine:
    """An engine that runs a model as it is. tokenizer: a folder that holds one. hooks: further arguments of Engine."""
    loaded = LoadedModel(model, str(tokenizer), {}, config)
    with patch("pagedgen.engine.load_model", lambda _: loaded):
        return Engine(settings, **hooks)


def graphs_of(engine: Engine) -> Figures:
    """Whether decoding steps still run as CUDA graphs, and the sizes of those that were captured; without the first
    where they never could."""
    graphs = engine.runner.graphs
    return {} if graphs is None else {"graphs": graphs._usable, "graph_sizes": sorted(graphs._steps)}


def freeing(device: torch.device, run: Callable[[], Figures]) -> Figures:
    """What `run` gives; the memory that it took of a GPU is given back afterwards."""
    try:
        return run()
    finally:
        if device.type != "cpu":
            free_unused_memory(device)


def byte_tokenizer(folder: Path) -> Path:
    """A tokenizer of bytes and three special tokens, saved in `folder`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = ["<pad>", "<begin>", "<end>", *alphabet]
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<begin>",
        eos_token="<end>",
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(folder)
    return folder


def model_to_run(setting: Setting) -> tuple[str | None, str]:
    """(what `EngineConfig.model` is to be, what it is in words): the model asked for, the default one where its package
    is installed, else random weights of its shape, made once for all parts."""
    if setting.model is not None:
        return setting.model, setting.model
    if not setting.tiny and resolve_model(None).kind == "gguf":
        return None, DEFAULT_MODEL
    folder = Path(setting.folder) / "random-smollm"
    if not (folder / "config.json").is_file():
        config, device = smollm_config(setting), torch.device(setting.device)
        byte_tokenizer(folder)
        transformers_model(config, torch.bfloat16, device, "sdpa").save_pretrained(folder)
    return str(folder), f"random weights of the shape of {DEFAULT_MODEL}"
