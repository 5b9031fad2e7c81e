"""The attention function that `transformers` models call, and what can answer it."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from pagedgen.execution.attention import AttentionBackend
from pagedgen.execution.batch import ForwardBatch
from pagedgen.execution.kv_cache import KVCache, LayerKV

ATTENTION_NAME = "pagedgen"


class UnusableModel(Exception):
    """The hook does not fit this model; the message says why, as a clause."""


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """What a model's attention layer asks for. query [1, Hq, T, Dk], key [1, Hkv, T, Dk], value [1, Hkv, T, Dv]."""

    layer: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float
    sliding_window: int | None
    softcap: float | None
    sinks: torch.Tensor | None


class AttentionCall(Protocol):
    """The keyword that travels through the model to its attention layers."""

    def attend(self, inputs: AttentionInputs) -> torch.Tensor:
        """[1, T, Hq, Dv]."""
        ...


@dataclass(frozen=True, slots=True)
class PagedCall:
    """Attention of one batch over the paged cache."""

    batch: ForwardBatch
    kv_cache: KVCache
    attention: AttentionBackend

    def attend(self, inputs: AttentionInputs) -> torch.Tensor:
        tensors = (inputs.query, inputs.key, inputs.value)
        query, key, value = (x[0].transpose(0, 1).to(self.kv_cache.dtype) for x in tensors)
        out = self.attention.forward(
            inputs.layer,
            query,
            key,
            value,
            self.batch,
            self.kv_cache,
            scale=inputs.scale,
            sliding_window=inputs.sliding_window,
            softcap=inputs.softcap,
            sinks=inputs.sinks,
        )
        return out[None]


class Probe:
    """Records what each layer asks for, and answers zeros."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerKV] = {}
        self.windows: dict[int, int | None] = {}

    def attend(self, inputs: AttentionInputs) -> torch.Tensor:
        if inputs.layer in self.layers:
            raise UnusableModel("one of its layers attends twice")
        shape = LayerKV(inputs.key.shape[1], inputs.key.shape[3], inputs.value.shape[3])
        self.layers[inputs.layer] = shape
        self.windows[inputs.layer] = inputs.sliding_window
        return inputs.query.new_zeros(1, inputs.query.shape[2], inputs.query.shape[1], shape.value_dim)


def _attention_function(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    pagedgen_call: AttentionCall | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """What `transformers` calls in every attention layer; the keywords' names are its own."""
    if pagedgen_call is None:
        raise UnusableModel("it does not hand keywords through to its attention layers")
    if not getattr(module, "is_causal", True) or is_causal is False:
        raise UnusableModel("its attention is not causal")
    inputs = AttentionInputs(
        layer=int(getattr(module, "layer_idx", -1)),
        query=query,
        key=key,
        value=value,
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        sliding_window=None if sliding_window is None else int(sliding_window),
        softcap=softcap,
        sinks=s_aux,
    )
    return pagedgen_call.attend(inputs), None


def register_attention() -> None:
    """Make the attention function known to `transformers`, by name and for the whole process; again is harmless."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, _attention_function)
