"""Falcon with rotary positions: its layers neither look attention functions up nor hand unknown keywords through. They
do hand the model's cache argument through, so the batch travels there."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pagedgen.models.hook import AttentionCall, AttentionInputs


@dataclass(frozen=True, slots=True)
class CallAsCache:
    """Takes the place of a `transformers` cache that holds nothing yet."""

    call: AttentionCall

    def get_seq_length(self) -> int:
        return 0


def adapt_falcon(model: Any) -> None:
    """Replace Falcon's attention modules and its own kind of linear layer; the weights stay."""
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and type(module) is not nn.Linear:
            linear = nn.Linear(module.in_features, module.out_features, module.bias is not None, device="meta")
            linear.weight, linear.bias = module.weight, module.bias
            model.set_submodule(name, linear)
    for layer in model.transformer.h:
        layer.self_attention = _FalconAttention(layer.self_attention)


class _FalconAttention(nn.Module):
    """Falcon's attention over whatever call arrives as its cache; without one it is the original."""

    def __init__(self, original: Any) -> None:
        super().__init__()
        self.original = original

    def forward(self, hidden_states: torch.Tensor, **arguments: Any) -> tuple[torch.Tensor, Any]:
        """hidden_states [1, T, hidden_size] -> [1, T, hidden_size] and the attention weights, which are None."""
        from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

        cache, original = arguments["layer_past"], self.original
        if not isinstance(cache, CallAsCache):
            output: tuple[torch.Tensor, Any] = original(hidden_states, **arguments)
            return output
        query, key, value = self._heads(original.query_key_value(hidden_states))
        query, key = apply_rotary_pos_emb(query, key, *arguments["position_embeddings"])
        scale = original.head_dim**-0.5
        inputs = AttentionInputs(original.layer_idx, query, key, value, scale, None, None, None)
        return original.dense(cache.call.attend(inputs).flatten(2)), None

    def _heads(self, fused: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[1, T, fused] -> query [1, Hq, T, D], key and value [1, Hkv, T, D], in Falcon's three layouts: groups of
        queries followed by their key and value, all queries and then one key and value, or the three of each head."""
        original = self.original
        if original.new_decoder_architecture:
            groups, width = original.num_kv_heads, original.num_heads // original.num_kv_heads + 2
        elif original.multi_query:
            groups, width = 1, original.num_heads + 2
        else:
            groups, width = original.num_heads, 3
        heads = fused.view(*fused.shape[:2], groups, width, original.head_dim)
        parts = (heads[..., :-2, :].flatten(2, 3), heads[..., -2, :], heads[..., -1, :])
        query, key, value = (part.transpose(1, 2) for part in parts)
        return query, key, value
