"""Rotary position embeddings with every scaling that `transformers` knows, by its own functions where a device can run
them ahead of the host."""

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

        self._dtype = dtype
        parameters = config.rope_parameters
        self._kind: str = parameters["rope_type"]
        self._scaling = 1.0
        if self._kind == "default":
            dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            exponents = torch.arange(0, dim, 2, dtype=torch.float) / dim
            self._inv_freq = (1.0 / parameters["rope_theta"] ** exponents).to(device)
        else:
            init_function = ROPE_INIT_FUNCTIONS[self._kind]
            inv_freq, self._scaling = init_function(config)
            self._inv_freq = inv_freq.to(device)
        self.depends_on_length = self._kind == "dynamic"
        if self._kind == "dynamic":
            self._base, self._factor = parameters["rope_theta"], parameters["factor"]
            self._dim, self._max_position = 2 * len(self._inv_freq), int(config.max_position_embeddings)
            self._exponents = (torch.arange(0, self._dim, 2, dtype=torch.float) / self._dim).to(device)
        if self._kind == "longrope":
            self._original_length = int(parameters["original_max_position_embeddings"])
            self._long_inv_freq = init_function(config, seq_len=self._original_length + 1)[0].to(device)
            self.depends_on_length = not torch.equal(self._inv_freq, self._long_inv_freq)

    def __call__(self, positions: torch.Tensor, rope_lens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions, rope_lens: int64 [T] -> cos, sin: float32 [T, rotary_dim], rounded to the model's dtype as in
        `transformers`."""
        inv_freq = self._inv_freq
        if self.depends_on_length and self._kind == "dynamic":
            inv_freq = self._dynamic_inv_freq(rope_lens[:, None])
        elif self.depends_on_length:
            inv_freq = torch.where(rope_lens[:, None] > self._original_length, self._long_inv_freq, inv_freq)
        angles = positions[:, None].float() * inv_freq
        cos, sin = angles.cos() * self._scaling, angles.sin() * self._scaling
        cos, sin = cos.to(self._dtype).float(), sin.to(self._dtype).float()
        return torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)

    def _dynamic_inv_freq(self, lengths: torch.Tensor) -> torch.Tensor:
        """lengths: int64 [T, 1] -> float32 [T, rotary_dim / 2]. The function of `transformers` makes tensors of numbers
        that the host has, for which it waits for a GPU; these are there."""
        lengths = lengths.clamp(min=self._max_position)
        stretch = self._factor * lengths / self._max_position - (self._factor - 1)
        base: torch.Tensor = self._base * stretch ** (self._dim / (self._dim - 2))
        return 1.0 / (base**self._exponents)
