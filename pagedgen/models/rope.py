"""Rotary position embeddings with every scaling that `transformers` knows, computed by its own functions."""

from typing import Any

import torch


class RotaryEmbedding:
    """Cosines and sines for packed tokens.

    They are computed for each batch and not looked up: a step needs them once for all layers, and there is then no
    table to grow and no maximum to synchronise on. `depends_on_length` says that the frequencies change with the length
    of the sequence (dynamic NTK and longrope); `transformers` then rotates a whole prompt by its length, and each later
    token by the length at that moment, which is what `rope_lens` holds.
    """

    def __init__(self, config: Any, device: torch.device, dtype: torch.dtype) -> None:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        self._config, self._device, self._dtype = config, device, dtype
        parameters = config.rope_parameters
        self._kind: str = parameters["rope_type"]
        self._scaling = 1.0
        if self._kind == "default":
            dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            exponents = torch.arange(0, dim, 2, dtype=torch.float) / dim
            self._inv_freq = (1.0 / parameters["rope_theta"] ** exponents).to(device)
        else:
            self._init_function = ROPE_INIT_FUNCTIONS[self._kind]
            inv_freq, self._scaling = self._init_function(config)
            self._inv_freq = inv_freq.to(device)
        self.depends_on_length = self._kind == "dynamic"
        if self._kind == "longrope":
            self._original_length = int(parameters["original_max_position_embeddings"])
            self._long_inv_freq = self._init_function(config, seq_len=self._original_length + 1)[0].to(device)
            self.depends_on_length = not torch.equal(self._inv_freq, self._long_inv_freq)

    def __call__(self, positions: torch.Tensor, rope_lens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions, rope_lens: int64 [T] -> cos, sin: float32 [T, rotary_dim], rounded to the model's dtype as in
        `transformers`."""
        inv_freq = self._inv_freq
        if self.depends_on_length and self._kind == "dynamic":
            inv_freq, _ = self._init_function(self._config, self._device, seq_len=rope_lens[:, None])
        elif self.depends_on_length:
            inv_freq = torch.where(rope_lens[:, None] > self._original_length, self._long_inv_freq, inv_freq)
        angles = positions[:, None].float() * inv_freq
        cos, sin = angles.cos() * self._scaling, angles.sin() * self._scaling
        cos, sin = cos.to(self._dtype).float(), sin.to(self._dtype).float()
        return torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)
