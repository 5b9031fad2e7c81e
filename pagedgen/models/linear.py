"""Linear layers in the form each device runs fastest."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from pagedgen.execution.attention import choose_backend

Linear = Callable[[torch.Tensor], torch.Tensor]


def make_linear(
    weight: torch.Tensor, bias: torch.Tensor | None = None, *, quantize: bool = False, gated: bool = False
) -> Linear:
    """weight [out, in], bias [out] -> a function of x [T, in] that gives [T, out]. quantize: in eight bits, on a CPU.
    gated: the outputs are gates and then as many values, and silu(gate) * value is what it gives, [T, out / 2].

    On a CPU the weight is repacked into oneDNN's own layout and `weight` can be freed: a plain bf16 linear of few rows
    takes a path 10 to 20 times slower there.
    """
    if quantize:
        from pagedgen_kernels.cpu.quantized import QuantizedLinear

        quantized: Linear = QuantizedLinear(weight, bias, gated)
        return quantized
    if weight.device.type == "cpu":
        from pagedgen_kernels.cpu.linear import PackedLinear

        packed: Linear = PackedLinear(weight, bias, gated)
        return packed
    plain = partial(functional.linear, weight=weight, bias=bias)
    kernels = choose_backend(weight.device).kernels
    return (lambda x: kernels.silu_mul(plain(x))) if gated else plain


def argmax_of(linear: Linear) -> Linear | None:
    """A function of x [T, in] that gives int64 [T], `kernels.greedy_argmax` of what the layer gives, for a layer that
    finds it without keeping what it computes."""
    from pagedgen_kernels.cpu.linear import PackedLinear

    return linear.argmax if isinstance(linear, PackedLinear) and linear.has_argmax else None


class PackedModule(nn.Module):
    """Takes the place of a linear layer in a `transformers` model, over a repacked weight.

    `weight` is left as a meta tensor: code that asks for its dtype or shape works, code that computes with it raises
    or gives meta tensors, so that a model which does is found out by its self-check.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, quantize: bool) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.linear = make_linear(weight, bias, quantize=quantize)
        self.weight = weight.to("meta")
        self.bias = bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.reshape(-1, self.in_features)).view(*x.shape[:-1], self.out_features)


def linear_bytes(weight: torch.Tensor, bias: torch.Tensor | None, quantize: bool) -> int:
    """What a layer of `make_linear` occupies: eight bits a weight and a scale for each output where it is quantized."""
    if quantize:
        return weight.numel() + 4 * weight.shape[0] * (1 if bias is None else 2)
    return weight.nbytes + (0 if bias is None else bias.nbytes)


def pack_linears(model: nn.Module, quantize: bool = False) -> int:
    """Replace every linear layer of a CPU model by a packed one; return the bytes of the packed weights.

    A weight shared with an embedding stays with the embedding and is packed as a copy. quantize: all but the head in
    eight bits.
    """
    from transformers.pytorch_utils import Conv1D

    packed_bytes = 0
    # Names, because a list of the modules would keep their weights.
    for name in [name for name, module in model.named_modules() if type(module) in (nn.Linear, Conv1D)]:
        module: Any = model.get_submodule(name)
        weight = module.weight.detach()
        if type(module) is Conv1D:  # gpt2's layer: the same product with the weight stored as [in, out]
            weight = weight.T.contiguous()
        bias = None if module.bias is None else module.bias.detach()
        in_eight_bits = quantize and module is not model.get_output_embeddings()  # type: ignore[operator]
        packed_bytes += linear_bytes(weight, bias, in_eight_bits)
        model.set_submodule(name, PackedModule(weight, bias, in_eight_bits))
    return packed_bytes
