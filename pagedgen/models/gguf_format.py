"""What a GGUF file of the Llama family says about itself, in the terms of `transformers`.

Names of keys and tensors: the GGUF specification of ggml. Nothing here reads weights except the few numbers of the rope
factors.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from pagedgen.errors import PagedgenError

# llama.cpp rotates neighbouring pairs of these, so their query and key rows are stored permuted
PERMUTED = frozenset({"llama", "smollm3"})
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"


class GgufFile:
    """An open GGUF file. Opening raises PagedgenError when it is damaged, cut short, or of a kind that cannot run."""

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        self.path = path
        try:
            reader = GGUFReader(path)
        except Exception as error:  # the reader meets a damaged file with whatever numpy raises
            raise PagedgenError(f"{path} is no GGUF file, or it is damaged or cut short; download it again") from error
        self._fields: Any = reader.fields
        self.tensors: dict[str, Any] = {tensor.name: tensor for tensor in reader.tensors}
        self.architecture = str(self.get("general.architecture", "unknown"))
        self._check()

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value; `{arch}` in the key stands for the architecture."""
        field = self._fields.get(key.replace("{arch}", getattr(self, "architecture", "")))
        return default if field is None else field.contents()

    def refuse(self, reason: str) -> PagedgenError:
        return PagedgenError(
            f"{self.path} cannot run in pagedgen: {reason}; GGUF files of the Llama family (llama, mistral, qwen2, "
            "qwen3, smollm3) can, and other models as safetensors"
        )

    def _check(self) -> None:
        if self.architecture not in _ARCHITECTURES:
            raise self.refuse(f"its architecture is {self.architecture}")
        if int(self.get("split.count", 1)) > 1:
            raise PagedgenError(
                f"{self.path} is one part of a split GGUF file; merge the parts with llama-gguf-split --merge first"
            )
        for name in self.tensors:
            if name != _ROPE_FACTORS and hf_tensor_name(name) is None:
                raise self.refuse(f"it has tensors like {name}, which the Llama family does not")
        for key in ("block_count", "embedding_length", "feed_forward_length", "attention.head_count"):
            if not isinstance(value := self.get(f"{{arch}}.{key}"), int):
                raise self.refuse(f"its {key} is {'missing' if value is None else 'not the same in all layers'}")

    def checkpoint_dtype(self) -> torch.dtype:
        """The float type the weights are stored in; quantized ones count as bfloat16, as such models are trained."""
        kinds = {tensor.tensor_type.name for name, tensor in self.tensors.items() if "norm" not in name}
        if kinds <= {"F32"}:
            return torch.float32
        return torch.float16 if kinds <= {"F32", "F16"} else torch.bfloat16

    def config(self) -> dict[str, Any]:
        """The content of a config.json."""
        heads = self.get("{arch}.attention.head_count")
        hidden = self.get("{arch}.embedding_length")
        head_dim = self.get("{arch}.attention.key_length") or hidden // heads
        rotary_dim = self.get("{arch}.rope.dimension_count", head_dim)
        if rotary_dim != head_dim:
            raise self.refuse(f"it rotates {rotary_dim} of {head_dim} dimensions of a head")
        window = self.get("{arch}.attention.sliding_window")
        model_type = "mistral" if self.architecture == "llama" and window else self.architecture
        window_values = {"sliding_window": window} if model_type == "mistral" else {}
        context_length = self.get("{arch}.context_length", 2048)
        return {
            "model_type": model_type,
            "architectures": [_ARCHITECTURES[model_type]],
            "vocab_size": int(self.tensors["token_embd.weight"].shape[1]),
            "hidden_size": hidden,
            "intermediate_size": self.get("{arch}.feed_forward_length"),
            "num_hidden_layers": self.get("{arch}.block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self.get("{arch}.attention.head_count_kv", heads),
            "head_dim": head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": context_length,
            "rms_norm_eps": _shortest(self.get("{arch}.attention.layer_norm_rms_epsilon", 1e-5)),
            "rope_parameters": self._rope(context_length),
            "attention_bias": self.has_bias("attn_q") and self.architecture != "qwen2",
            "mlp_bias": self.has_bias("ffn_gate"),
            "tie_word_embeddings": "output.weight" not in self.tensors,
            **window_values,
            **{f"{name}_token_id": token for name, token in self.token_ids().items()},
        }

    def has_bias(self, part: str) -> bool:
        return f"blk.0.{part}.bias" in self.tensors

    def token_ids(self) -> dict[str, Any]:
        """bos, eos and pad ids for config.json and generation_config.json. eos is a list: the end of a text, and of a
        turn or message where the file tells them apart."""
        ends = [self.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
        return {
            "bos": self.get("tokenizer.ggml.bos_token_id"),
            "eos": sorted({end for end in ends if end is not None}) or None,
            "pad": self.get("tokenizer.ggml.padding_token_id"),
        }

    def _rope(self, context_length: int) -> dict[str, Any]:
        base = {"rope_theta": _shortest(self.get("{arch}.rope.freq_base", 10000.0))}
        original = self.get("{arch}.rope.scaling.original_context_length", context_length)
        if _ROPE_FACTORS in self.tensors:
            # Llama 3's scaling is stored as one divisor per frequency, which is what longrope takes
            factors = np.asarray(self.tensors[_ROPE_FACTORS].data, np.float32).tolist()
            scaling = {"short_factor": factors, "long_factor": factors, "attention_factor": 1.0}
            return base | {"rope_type": "longrope", "original_max_position_embeddings": original} | scaling
        kind = self.get("{arch}.rope.scaling.type", "none")
        factor = self.get("{arch}.rope.scaling.factor", 1.0)
        if kind == "linear":
            return base | {"rope_type": "linear", "factor": factor}
        if kind == "yarn":
            return base | {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        if kind != "none":
            raise self.refuse(f"its rope scaling is {kind}")
        return base | {"rope_type": "default"}


def hf_tensor_name(name: str) -> str | None:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; None for a tensor the family does not have."""
    if name in _TOP:
        return _TOP[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _IN_BLOCK:
        return f"model.layers.{parts[1]}.{_IN_BLOCK[parts[2]]}.{parts[3]}"
    return None


def unpermute(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undo llama.cpp's order of a query or key projection's rows: neighbours back into the two halves of a head."""
    pairs = tensor.view(num_heads, -1, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)


def _shortest(value: float) -> float:
    """The shortest decimal that is this float32, so that 9.999999747378752e-06 is 1e-05 again."""
    return float(str(np.float32(value)))
