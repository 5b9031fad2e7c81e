"""Gated MLPs of `transformers` models, with gate and up as one product, and what follows it in one kernel."""

from typing import Any

import torch
from torch import nn

from pagedgen.execution.attention import choose_backend
from pagedgen.models.linear import linear_bytes, make_linear

_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
# The launcher that computes each activation.
_GATES = {"SiLU": "silu_mul", "SiLUActivation": "silu_mul", "GELUTanh": "gelu_mul"}
# Largest difference allowed between the module and what replaces it, relative to the size of its result.
_TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)), of the weights of the module that it replaces. num_bytes: what those of gate
    and up occupy."""

    def __init__(self, mlp: Any, quantize: bool = False) -> None:
        super().__init__()
        gate, up = mlp.gate_proj, mlp.up_proj
        weight = torch.cat((gate.weight.detach(), up.weight.detach()))
        bias = None if gate.bias is None else torch.cat((gate.bias.detach(), up.bias.detach()))
        self.num_bytes = linear_bytes(weight, bias, quantize)
        launcher = _GATES[type(mlp.act_fn).__name__]
        self._gate_up = make_linear(weight, bias, quantize=quantize, gated=launcher == "silu_mul")
        self._gate = None if launcher == "silu_mul" else getattr(choose_backend(weight.device).kernels, launcher)
        self.down_proj = mlp.down_proj

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gated = self._gate_up(x.reshape(-1, x.shape[-1]))
        if self._gate is not None:
            gated = self._gate(gated)
        out: torch.Tensor = self.down_proj(gated.view(*x.shape[:-1], -1))
        return out


def fuse_gated(model: nn.Module, quantize: bool = False) -> int:
    """Replace the gated MLPs of the usual form; return the bytes of their gate and up weights. A class of modules is
    left alone where its first one computes anything else. quantize: gate and up in eight bits."""
    num_bytes = 0
    usual: dict[type[nn.Module], bool] = {}
    # Names, because a list of the modules would keep their weights.
    for name in [name for name, module in model.named_modules() if _looks_usual(module)]:
        module = model.get_submodule(name)
        if type(module) not in usual:
            usual[type(module)] = _is_same(module, GatedMLP(module))
        if usual[type(module)]:
            fused = GatedMLP(module, quantize)
            num_bytes += fused.num_bytes
            model.set_submodule(name, fused)
    return num_bytes


def _looks_usual(module: nn.Module) -> bool:
    linears = [getattr(module, name, None) for name in _PROJECTIONS]
    if not all(type(linear) is nn.Linear for linear in linears) or len(list(module.children())) != 4:
        return False
    return type(getattr(module, "act_fn", None)).__name__ in _GATES


@torch.no_grad()
def _is_same(module: Any, fused: GatedMLP) -> bool:
    weight = module.gate_proj.weight
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 5, weight.shape[1], generator=generator).to(weight.device, weight.dtype)
    try:
        expected, found = module(x), fused(x)
    except (RuntimeError, TypeError, ValueError):
        return False
    if not isinstance(expected, torch.Tensor) or expected.shape != found.shape:
        return False
    difference = (found.float() - expected.float()).norm() / expected.float().norm()
    return bool(difference <= _TOLERANCE[weight.dtype])
