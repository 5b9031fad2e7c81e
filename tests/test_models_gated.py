"""Gated MLPs of the hook path as one product and one kernel: which models get them, and that nothing changes."""

import gc
import weakref
from pathlib import Path

import pytest
import torch
from pagedgen_kernels import cpu
from tiny_models import tiny_checkpoint
from torch import nn
from transformers import AutoModelForCausalLM

from pagedgen.models.gated import GatedMLP, fuse_gated
from pagedgen.models.hf import load_hf_model

CPU = torch.device("cpu")


def load(architecture: str, folder: Path) -> nn.Module:
    checkpoint = tiny_checkpoint(folder, architecture)
    model: nn.Module = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    return model


def fused_layers(model: nn.Module) -> int:
    return sum(isinstance(module, GatedMLP) for module in model.modules())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("quantize", [False, True])
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "olmo2"])
def test_the_model_stays_the_same(architecture: str, quantize: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    model = load(architecture, tmp_path).to(dtype)
    ids = torch.arange(12)[None]
    with torch.no_grad():
        expected = model(input_ids=ids).logits.float()
        sizes = [m.gate_proj.weight.nbytes + m.up_proj.weight.nbytes for m in model.modules() if hasattr(m, "up_proj")]
        num_bytes = fuse_gated(model, quantize)
        found = model(input_ids=ids).logits.float()
    assert fused_layers(model) == 2
    assert num_bytes < sum(sizes) if quantize else num_bytes == sum(sizes)
    tolerance = 0.1 if quantize else {torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    assert float((found - expected).norm() / expected.norm()) < tolerance


@pytest.mark.parametrize(("architecture", "launcher"), [("gemma2", "gelu_mul"), ("olmo2", "silu_mul")])
def test_a_loaded_model_uses_the_kernel(
    architecture: str, launcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, calls = tiny_checkpoint(tmp_path, architecture), []
    if cpu.available():
        original = getattr(cpu, launcher)
        places = ["pagedgen_kernels.cpu", *(["pagedgen_kernels.cpu.linear"] if launcher == "silu_mul" else [])]
        for place in places:
            monkeypatch.setattr(f"{place}.{launcher}", lambda x: calls.append(x.shape) or original(x))
    model = load_hf_model("tiny", folder, torch.float32, CPU)
    assert fused_layers(model.module) == 2
    assert not cpu.available() or calls


@pytest.mark.parametrize("architecture", ["gpt2", "phi3", "mixtral"])
def test_other_models_keep_their_own(architecture: str, tmp_path: Path) -> None:
    model = load(architecture, tmp_path)
    assert fuse_gated(model) == 0
    assert fused_layers(model) == 0


class Scaled(nn.Module):
    """It looks usual and is not."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)
        self.act_fn = nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x) * 2)
        return out


class Usual(Scaled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return out


def test_what_only_looks_usual_is_left_alone() -> None:
    model = nn.Sequential(Scaled(), Usual(), Scaled())
    assert fuse_gated(model) > 0
    assert [type(module) for module in model] == [Scaled, GatedMLP, Scaled]


def test_the_weights_that_were_fused_are_let_go_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*(Usual() for _ in range(4)))
    weights = [weakref.ref(module.gate_proj.weight) for module in model]
    alive = []
    set_submodule = nn.Module.set_submodule

    def watch(self: nn.Module, *args: object) -> None:
        gc.collect()
        alive.append(sum(weight() is not None for weight in weights))
        set_submodule(self, *args)

    monkeypatch.setattr(nn.Module, "set_submodule", watch)
    fuse_gated(model)
    assert alive == [4, 3, 2, 1]
