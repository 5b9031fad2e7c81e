"""Every rope scaling against transformers: prompts as a whole, then tokens decoded one at a time."""

from pathlib import Path
from typing import Any

import pytest
import torch
from test_models_logits import load_hook, load_native, load_reference
from tiny_models import NATIVE, random_sequences, reference_logits, run_packed, tiny_checkpoint, tiny_config
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pagedgen.errors import PagedgenError
from pagedgen.models.rope import RotaryEmbedding

CPU = torch.device("cpu")
ORIGINAL = 16  # the length the scaled models "were trained at"; sequences lie on both sides of it and cross it
LENGTHS, PROMPTS = (30, 9, 22, 18), (24, 5, 11, 16)
SHORT, LONG = [1.0, 1.1, 1.3, 1.7], [1.0, 2.0, 4.0, 8.0]

SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.5},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "yarn-mscale": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL, "mscale": 1.0, "mscale_all_dim": 0.7},
    "yarn-attention": {
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
        "attention_factor": 1.4,
        "beta_fast": 8.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "longrope": {"short_factor": SHORT, "long_factor": LONG, "original_max_position_embeddings": ORIGINAL},
    "longrope-attention": {
        "short_factor": SHORT,
        "long_factor": LONG,
        "original_max_position_embeddings": ORIGINAL,
        "attention_factor": 1.3,
    },
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "proportional": {"factor": 2.0, "partial_rotary_factor": 0.5},
}


def scaled(name: str) -> dict[str, Any]:
    """Overrides for a tiny config: dynamic scaling measures against the maximum length, the others name their own."""
    kind = name.split("-")[0]
    parameters = {"rope_type": kind, "rope_theta": 10000.0, **SCALINGS[name]}
    return {"rope_parameters": parameters} | ({"max_position_embeddings": ORIGINAL} if kind == "dynamic" else {})


def test_all_kinds_are_covered() -> None:
    assert set(ROPE_INIT_FUNCTIONS) <= {name.split("-")[0] for name in SCALINGS}


@pytest.mark.parametrize("factor", [1.0, 2.0, 3.7])
@pytest.mark.parametrize("overrides", [{}, {"head_dim": 24}, {"partial_rotary_factor": 0.5}], ids=str)
def test_dynamic_frequencies_are_those_of_transformers(factor: float, overrides: dict[str, Any]) -> None:
    """Bit for bit, of sequences of all lengths side by side."""
    parameters = {"rope_type": "dynamic", "rope_theta": 50000.0, "factor": factor, **overrides}
    head = {name: value for name, value in overrides.items() if name == "head_dim"}
    config = tiny_config("llama", max_position_embeddings=ORIGINAL, rope_parameters=parameters, **head)
    lengths = torch.tensor([1, 2, ORIGINAL - 1, ORIGINAL, ORIGINAL + 1, 29, 100, 4097, 1 << 20])
    function = ROPE_INIT_FUNCTIONS["dynamic"]
    expected = torch.cat([function(config, CPU, seq_len=length[None])[0][None] for length in lengths])
    assert len(expected.unique(dim=0)) == len(lengths) - 3  # up to ORIGINAL they are the same
    positions = torch.tensor([0, 1, 5, 2, 16, 28, 99, 4096, 1000])
    cos, sin = RotaryEmbedding(config, CPU, torch.float32)(positions, lengths)
    angles = positions[:, None].float() * expected
    assert torch.equal(cos, angles.cos().repeat(1, 2))
    assert torch.equal(sin, angles.sin().repeat(1, 2))


class FromTensors(TorchDispatchMode):
    """Refuses what makes a tensor of the host's values: on a GPU it waits for the device, and no graph can hold it."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.name()
        made = not any(isinstance(arg, torch.Tensor | list) for arg in args) or name == "aten::lift_fresh"
        assert not made, name
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", SCALINGS)
def test_a_batch_makes_no_tensor_of_values_of_the_host(name: str) -> None:
    rope = RotaryEmbedding(tiny_config("llama", **scaled(name)), CPU, torch.float32)
    positions = torch.arange(30)
    with FromTensors():
        rope(positions, positions + 1)


def check(model: Any, folder: Path, chunks: int | tuple[int, ...]) -> None:
    sequences = random_sequences(LENGTHS)
    paged = run_packed(model, sequences, chunks, 4, prompt_lens=PROMPTS)
    for ours, ids, prompt_len in zip(paged, sequences, PROMPTS, strict=True):
        # a fresh model for each: dynamic rope layers remember the longest sequence they have seen
        own = reference_logits(load_reference(folder), ids, prompt_len)
        torch.testing.assert_close(ours, own, atol=1e-4, rtol=0)


@pytest.mark.parametrize("chunks", [2048, (7, 3, 5)])
@pytest.mark.parametrize("name", SCALINGS)
def test_native(name: str, chunks: int | tuple[int, ...], tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "llama", **scaled(name))
    model = load_native(folder)
    check(model, folder, chunks)
    assert model.spec.kv_depends_on_length == (name.split("-")[0] in {"dynamic", "longrope"})


@pytest.mark.parametrize("architecture", [name for name in NATIVE if name != "llama"])
@pytest.mark.parametrize("name", ["yarn", "longrope", "dynamic"])
def test_the_rest_of_the_family(architecture: str, name: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, architecture, head_dim=8, **scaled(name))
    check(load_native(folder), folder, (7, 3, 5))


def test_hook_with_static_scaling(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "olmo2", **scaled("yarn"))
    check(load_hook(folder), folder, (7, 3, 5))


@pytest.mark.parametrize("chunks", [2048, (7, 3, 5)])
def test_hook_with_longrope(chunks: int | tuple[int, ...], tmp_path: Path) -> None:
    overrides = {"original_max_position_embeddings": ORIGINAL, "sliding_window": None}
    folder = tiny_checkpoint(tmp_path, "phi3", **overrides, **scaled("longrope"))
    model = load_hook(folder)
    assert model.spec.kv_depends_on_length
    check(model, folder, chunks)


def test_hook_refuses_dynamic_scaling(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "olmo2", **scaled("dynamic"))
    with pytest.raises(PagedgenError, match=r"\(olmo2\).*dynamic rope scaling"):
        load_hook(folder)


def test_equal_longrope_factors_do_not_depend_on_length() -> None:
    """What Llama 3's GGUF files become: one set of divisors, so prompts of any length share their keys."""
    parameters = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": SHORT, "long_factor": SHORT}
    config = tiny_config("llama", rope_parameters=parameters | {"attention_factor": 1.0})
    rope = RotaryEmbedding(config, torch.device("cpu"), torch.float32)
    assert not rope.depends_on_length
    cos, _ = rope(torch.tensor([3]), torch.tensor([300]))
    expected = torch.cos(3.0 / (torch.tensor(SHORT) * 1e4 ** (torch.arange(0, 8, 2) / 8)))
    torch.testing.assert_close(cos[0], expected.repeat(2))
