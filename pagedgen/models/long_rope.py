"""Longrope in the models of `transformers`: each token rotated by the length of its own sequence.

Their rotary layers take one length for the whole row, the largest position in it, which packed sequences would share.
So a token's length travels with its position, in the upper half of the same integer, and these layers take the two
apart.
"""

from typing import Any

import torch
from torch import nn

from pagedgen.models.hook import UnusableModel

_SHIFT = 32


def fold_lengths(positions: torch.Tensor, rope_lens: torch.Tensor) -> torch.Tensor:
    """int64 [T] each -> int64 [T] that a `_LengthwiseRotary` takes apart again."""
    return positions | (rope_lens << _SHIFT)


def follow_lengths(model: nn.Module) -> bool:
    """Wrap the rotary layers that depend on the length; whether there were any. Raises UnusableModel for dynamic NTK,
    whose layers carry state from call to call."""
    found = False
    for name, module in list(model.named_modules()):
        kinds = getattr(module, "rope_type", None)
        all_kinds = set(kinds.values()) if isinstance(kinds, dict) else {kinds}
        if any(isinstance(kind, str) and "dynamic" in kind for kind in all_kinds):
            raise UnusableModel("it uses dynamic rope scaling, which only the Llama family can here")
        if "longrope" not in all_kinds:
            continue
        if isinstance(kinds, dict):
            raise UnusableModel("it uses longrope in some layers and not in others")
        model.set_submodule(name, _LengthwiseRotary(module, model.config))
        found = True
    return found


class _LengthwiseRotary(nn.Module):
    """Runs a longrope layer for short and for long sequences, and takes each token from where it belongs."""

    def __init__(self, rotary: Any, config: Any) -> None:
        super().__init__()
        self.rotary = rotary
        self.original_length = int(config.rope_parameters["original_max_position_embeddings"])

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """position_ids: int64 [1, T] of `fold_lengths` -> cos, sin: [1, T, rotary_dim]."""
        lengths, positions = position_ids >> _SHIFT, position_ids & ((1 << _SHIFT) - 1)
        short = self.rotary(x, positions.clamp(max=self.original_length - 1))
        # one more position, just past the original length, makes the layer see a long sequence
        marker = positions.new_full((1, 1), self.original_length)
        long = (part[:, :-1] for part in self.rotary(x, torch.cat((positions, marker), dim=1)))
        is_long = (lengths > self.original_length)[..., None]
        return tuple(torch.where(is_long, far, near) for far, near in zip(long, short, strict=True))
