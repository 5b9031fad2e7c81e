"""Writes tiny GGUF files of the Llama family from tiny checkpoints, the way llama.cpp's converter lays them out."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import AutoConfig

from pagedgen.models.weights import Checkpoint

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(
    path: Path,
    folder: Path,
    architecture: str,
    *,
    quantization: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    metadata: dict[str, Any] | None = None,
    extra_tensors: dict[str, np.ndarray] | None = None,
) -> Path:
    """folder: a tiny checkpoint. metadata: more keys, `{arch}` standing for the architecture; None leaves one out."""
    config = AutoConfig.from_pretrained(folder)
    writer = gguf.GGUFWriter(path, architecture)
    values = {
        "{arch}.block_count": config.num_hidden_layers,
        "{arch}.context_length": config.max_position_embeddings,
        "{arch}.embedding_length": config.hidden_size,
        "{arch}.feed_forward_length": config.intermediate_size,
        "{arch}.attention.head_count": config.num_attention_heads,
        "{arch}.attention.head_count_kv": config.num_key_value_heads,
        "{arch}.attention.key_length": getattr(config, "head_dim", None),
        "{arch}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "{arch}.rope.freq_base": config.rope_parameters["rope_theta"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 3,
        "tokenizer.ggml.padding_token_id": 0,
    } | (metadata or {})
    for key, value in values.items():
        _add(writer, key.replace("{arch}", architecture), value)
    _add_tokenizer(writer, folder)
    checkpoint = Checkpoint(folder)
    for name in checkpoint.tensors:
        tensor = checkpoint.load(name, torch.float32, torch.device("cpu")).numpy()
        if architecture in {"llama", "smollm3"} and (".q_proj." in name or ".k_proj." in name):
            heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
            halves = tensor.reshape(heads, 2, -1, *tensor.shape[1:])
            tensor = np.stack((halves[:, 0], halves[:, 1]), axis=2).reshape(tensor.shape)
        kind = quantization if tensor.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(_gguf_name(name), gguf.quantize(np.ascontiguousarray(tensor), kind), raw_dtype=kind)
    for name, tensor in (extra_tensors or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    elif value is not None:
        writer.add_uint32(key, value)


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    special = {token["content"] for token in tokenizer["added_tokens"]}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_chat_template((folder / "chat_template.jinja").read_text())


def _gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem in NAMES:
        return f"{NAMES[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[part]}.{kind}"
