"""What makes eight bits enough: activations that are large in a few channels are divided there, and the weights
multiplied, before both are rounded (SmoothQuant; Xiao et al., 2023, with a migration strength of 0.5).

The divisions cost nothing: whatever produces an input takes them in, the norm before the gate and up projections, the
value projection before the output's. The query, key, value and down projections stay as they are: rounding the down's
inputs costs nearly as much as all of the rest together, and the first three come next.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

Tensor = torch.Tensor

# Below this a channel counts as silent: neither it nor its weights say by how much to divide.
_LEAST = 1e-5


@dataclass(frozen=True, slots=True)
class Projection:
    """weight: [out, in]; bias: [out] or None."""

    weight: Tensor
    bias: Tensor | None = None

    def times_inputs(self, factors: Tensor) -> "Projection":
        """factors: [in]."""
        return replace(self, weight=self.weight.float() * factors)

    def times_outputs(self, factors: Tensor) -> "Projection":
        """factors: [out]."""
        bias = None if self.bias is None else self.bias.float() * factors
        return Projection(self.weight.float() * factors[:, None], bias)


@dataclass(frozen=True, slots=True)
class LayerParts:
    """The weights of a decoder layer of the Llama family that quantizing touches."""

    value: Projection
    output: Projection
    post_norm: Tensor
    gate: Projection
    up: Projection


@dataclass(frozen=True, slots=True)
class LayerRanges:
    """The largest magnitude of each input channel, float32: output [heads * dim], gate_up [hidden]."""

    output: Tensor
    gate_up: Tensor


def smooth(parts: LayerParts, ranges: LayerRanges, head_dim: int) -> LayerParts:
    """The same layer with evener inputs to its projections."""
    kv_heads = parts.value.weight.shape[0] // head_dim
    gate_up = divisors(ranges.gate_up, parts.gate.weight, parts.up.weight)
    # The query heads of a group read the same values, so they share their divisors.
    grouped = ranges.output.view(kv_heads, -1, head_dim).amax(1).flatten()
    columns = parts.output.weight.float().abs().amax(0).view(kv_heads, -1, head_dim).amax(1).view(1, -1)
    value = divisors(grouped, columns)
    output = value.view(kv_heads, 1, head_dim).expand(-1, ranges.output.numel() // grouped.numel(), -1).flatten()
    return LayerParts(
        value=parts.value.times_outputs(1 / value),
        output=parts.output.times_inputs(output),
        post_norm=parts.post_norm.float() / gate_up,
        gate=parts.gate.times_inputs(gate_up),
        up=parts.up.times_inputs(gate_up),
    )


def divisors(magnitudes: Tensor, *weights: Tensor) -> Tensor:
    """[in]: what to divide inputs of these largest magnitudes [in] by, so that they and the weights [out, in] become
    equally uneven."""
    largest = torch.stack([weight.float().abs().amax(0) for weight in weights]).amax(0)
    return (magnitudes.clamp_min(_LEAST) / largest.clamp_min(_LEAST)).sqrt()


class RangeRecorder:
    """Notes the largest magnitude of each channel of what a linear layer gets."""

    def __init__(self, layer: Callable[[Tensor], Tensor]) -> None:
        self._layer = layer
        self.range: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        found = x.reshape(-1, x.shape[-1]).float().abs().amax(0)
        self.range = found if self.range is None else torch.maximum(self.range, found)
        return self._layer(x)

    @property
    def measured(self) -> Tensor:
        assert self.range is not None, "nothing has run through the layer"
        return self.range
