"""What the runner needs of a model."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from pagedgen.execution.attention import AttentionBackend
from pagedgen.execution.batch import ForwardBatch
from pagedgen.execution.kv_cache import KVCache, LayerKV


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Facts of a loaded model.

    name: as the user gave it. architecture: the config's model_type. path: "native" or "hook".
    max_position: the longest sequence its config allows. weight_bytes: what the loaded weights occupy.
    kv_depends_on_length: a token's key depends on the length of its sequence (dynamic and longrope scalings), so blocks
        may only be shared between prompts of one length: the prefix cache must be off.
    """

    name: str
    architecture: str
    path: str
    vocab_size: int
    max_position: int
    layers: tuple[LayerKV, ...]
    dtype: torch.dtype
    device: torch.device
    weight_bytes: int
    kv_depends_on_length: bool = False


class Model(Protocol):
    """A decoder that computes packed batches over the paged cache.

    likeliest: of a model that can tell without making logits, [R, ...] as for `logits` -> int64 [R], what
    `kernels.greedy_argmax` would find in them.
    """

    spec: ModelSpec
    likeliest: Callable[[torch.Tensor], torch.Tensor] | None

    def forward(self, batch: ForwardBatch, kv_cache: KVCache, attention: AttentionBackend) -> torch.Tensor:
        """Write the KV of all tokens and return [R, ...], the last hidden states of `batch.logit_rows`."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, ...] as `forward` returned it (or some of its rows) -> [R, vocab_size]."""
        ...
