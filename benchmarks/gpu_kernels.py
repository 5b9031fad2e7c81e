"""Every launcher of the GPU's kernels against `reference` on the same tensors, on the device, one line a case.

A case passes when no element is further from the reference than the tolerance allows, a second run gives the same bits,
and no launcher fell back to the reference. Memory that a kernel may be given for its results is filled with NaN first,
so that what it leaves unwritten shows.
"""

import importlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from pagedgen_kernels import reference

from benchmarks import gpu_kernel_work as work
from benchmarks.gpu_kernel_work import Heads, Tensor, Work
from benchmarks.gpu_parts import Case, Figures, Setting
from benchmarks.gpu_sampler_work import SAMPLER, make_logits

FLOAT32, FLOAT16, BFLOAT16 = torch.float32, torch.float16, torch.bfloat16
# Of single elements, absolute and relative: one rounding of the result, and of each weight of attention before it meets
# the values; in float32 the order of sums.
TOLERANCES = {FLOAT32: 1e-5, FLOAT16: 2**-10, BFLOAT16: 2**-7}
# Of the norm of all differences beside that of the result. A product that only keeps the ten bits of tf32 is above it.
RELATIVE = {FLOAT32: 1e-5, FLOAT16: 1e-3, BFLOAT16: 8e-3}
# The share of rows in which a sum over the whole vocabulary may decide otherwise, as it lies next to a border.
BORDERLINE = {"lowest_kept": 0.05, "choose_tokens": 0.05}
# What the module of the kernels exports besides launchers, and one that is the reference's own.
NO_LAUNCHERS = {"available", "unavailable_reason", "position_keys"}


@dataclass(frozen=True)
class Check:
    """launcher: its name. make: the inputs, on the device and in the dtype, which are only made when the case runs."""

    launcher: str
    what: str
    dtype: torch.dtype
    make: Callable[[torch.dtype, torch.device], Work]

    @property
    def name(self) -> str:
        return f"{self.launcher} {self.what} {str(self.dtype).removeprefix('torch.')}"


def kernels_for(device: torch.device) -> ModuleType:
    """The launchers that run on the device: on a CPU the reference stands in for the GPU's."""
    name = "pagedgen_kernels.reference" if device.type == "cpu" else "pagedgen_kernels.triton"
    return importlib.import_module(name)


def cases(setting: Setting) -> list[Case]:
    device = torch.device(setting.device)
    checks = tiny_checks() if setting.tiny else all_checks()
    return [
        Case("launchers", lambda: untested(kernels_for(device), checks)),
        *(Case(check.name, partial(run_check, check, device)) for check in checks),
    ]


def all_checks() -> list[Check]:
    return [*row_checks(), *attention_checks(), *sampler_checks()]


def row_checks() -> list[Check]:
    """Of states, caches and feed-forward layers."""
    found: list[Check] = []
    for dtype in (BFLOAT16, FLOAT16, FLOAT32):
        for width in (576, 2048, 4096, 100):
            rows = 300 if width == 2048 else 7
            what = f"{rows} x {width}"
            found.append(Check("rms_norm", what, dtype, _of_rows(work.norm, rows, width)))
            found.append(Check("add_rms_norm", what, dtype, _of_rows(work.add_norm, rows, width)))
        for name, width in (("silu_mul", 8192), ("silu_mul", 1000), ("gelu_mul", 1536)):
            found.append(Check(name, f"33 x {width}", dtype, _of_rows(partial(work.gate, name), 33, width)))
        for heads in (work.SMOLLM, work.LLAMA_1B, work.LLAMA_8B, work.ODD[0]):
            found.append(Check("write_kv", heads.name, dtype, partial(work.write_kv, heads)))
            found.append(Check("rotary_write_kv", heads.name, dtype, partial(work.rotary_write_kv, heads)))
            found.append(Check("copy_blocks", heads.name, dtype, partial(work.copy_blocks, heads)))
        normed = partial(work.rotary_write_kv, work.LLAMA_8B, norms=True)
        found.append(Check("rotary_write_kv", "with norms", dtype, normed))
        partly = partial(work.rotary_write_kv, work.ODD[0], rotary_dim=32, norms=True)
        found.append(Check("rotary_write_kv", "partly rotated", dtype, partly))
    return found


def _of_rows(function: Callable[..., Work], rows: int, width: int) -> Callable[[torch.dtype, torch.device], Work]:
    return partial(function, rows, width)


def attention_checks() -> list[Check]:
    found: list[Check] = []

    def add(heads: Heads, dtypes: Sequence[torch.dtype], what: str = "", **options: Any) -> None:
        for kind, lengths in (("decoding", work.DECODING), ("mixed", work.MIXED)):
            for dtype in dtypes:
                make = partial(work.attention, lengths, heads, **options)
                found.append(Check("paged_attention", f"{heads.name} {what}{kind}", dtype, make))

    for heads in (work.SMOLLM, work.LLAMA_1B, work.LLAMA_8B):
        add(heads, (BFLOAT16, FLOAT16, FLOAT32))
    every: dict[str, Any] = {"sliding_window": 100, "softcap": 3.0, "sinks": True}
    for name, value in every.items():
        add(work.LLAMA_1B, (BFLOAT16,), f"{name} ", **{name: value})
    add(work.LLAMA_8B, (BFLOAT16, FLOAT32), "window, softcap, sinks ", **every)
    for heads in work.ODD:
        add(heads, (BFLOAT16, FLOAT32))
    for block_size in (32, 24, 1):
        add(work.LLAMA_1B, (BFLOAT16,), f"blocks of {block_size} ", block_size=block_size)
    for heads in (work.SMOLLM, work.LLAMA_8B):
        for dtype in (BFLOAT16, FLOAT32):
            make = partial(work.attention, work.LONG, heads)
            found.append(Check("paged_attention", f"{heads.name} long contexts", dtype, make))
    return found


def sampler_checks() -> list[Check]:
    sizes = (
        (49152, BFLOAT16),
        (49152, FLOAT32),
        (128256, BFLOAT16),
        (128256, FLOAT32),
        (50257, FLOAT16),
        (77, FLOAT32),
    )
    return [Check(name, f"of {size}", dtype, partial(_sample, name, size)) for size, dtype in sizes for name in SAMPLER]


def _sample(name: str, vocab_size: int, dtype: torch.dtype, device: torch.device) -> Work:
    return SAMPLER[name](make_logits(vocab_size, dtype, device))


def tiny_checks() -> list[Check]:
    """One or two of each launcher."""
    heads, lengths = Heads("tiny", 4, 2, 16, 16), [(1, 3), (1, 0), (5, 20)]
    return [
        Check("rms_norm", "3 x 8", FLOAT32, _of_rows(work.norm, 3, 8)),
        Check("add_rms_norm", "3 x 8", BFLOAT16, _of_rows(work.add_norm, 3, 8)),
        Check("silu_mul", "3 x 8", FLOAT16, _of_rows(partial(work.gate, "silu_mul"), 3, 8)),
        Check("gelu_mul", "3 x 8", FLOAT32, _of_rows(partial(work.gate, "gelu_mul"), 3, 8)),
        Check("write_kv", "tiny", FLOAT32, partial(work.write_kv, heads)),
        Check("rotary_write_kv", "tiny", FLOAT32, partial(work.rotary_write_kv, heads, norms=True)),
        Check("copy_blocks", "tiny", FLOAT16, partial(work.copy_blocks, heads)),
        Check("paged_attention", "tiny", FLOAT32, partial(work.attention, lengths, heads, sinks=True)),
        Check("paged_attention", "narrow values", BFLOAT16, partial(work.attention, lengths, Heads("", 4, 2, 16, 8))),
        *(Check(name, "of 300", FLOAT32, partial(_sample, name, 300)) for name in SAMPLER),
    ]


def untested(kernels: ModuleType, checks: Sequence[Check]) -> Figures:
    """The launchers that the module exports and no case calls."""
    exported = set(getattr(kernels, "__all__", ())) - NO_LAUNCHERS
    missing = sorted(exported - {check.launcher for check in checks})
    return {"kernels": kernels.__name__, "without_a_case": missing, "cases": len(checks)}


def run_check(check: Check, device: torch.device) -> Figures:
    """largest, relative, differing: see `distance`. repeats: whether a second run gave the same bits. fell_back: what
    of the reference was called."""
    kernels, tolerance = kernels_for(device), TOLERANCES[check.dtype]
    call = check.make(check.dtype, device)
    expected = call(reference)
    spoil(expected)
    with fallbacks(kernels) as called:
        found = call(kernels)
    again = call(kernels)
    figures = distance(found, expected, tolerance)
    repeats = all(torch.equal(_bits(a), _bits(b)) for a, b in zip(found, again, strict=True))
    if check.launcher in BORDERLINE:
        right = figures["differing"] <= BORDERLINE[check.launcher]
    else:
        right = figures["differing"] == 0 and figures["relative"] <= RELATIVE[check.dtype]
    passed = right and repeats and not called
    return {"passed": passed, **figures, "tolerance": tolerance, "repeats": repeats, "fell_back": ", ".join(called)}


def spoil(tensors: Sequence[Tensor]) -> None:
    """Fill memory of the sizes of these with NaN (or numbers that no result is), and give it back: the next tensors of
    these sizes lie there."""
    for tensor in tensors:
        fill = torch.nan if tensor.is_floating_point() else -77
        spoiled = [torch.full_like(tensor, fill, memory_format=torch.contiguous_format) for _ in range(2)]
        del spoiled


def distance(found: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> dict[str, float]:
    """largest: the largest difference of an element. relative: the norm of the differences beside that of the result.
    differing: the share of elements that are further away than the tolerance allows, or of integers not the same, in
    the tensor where it is largest."""
    largest = differing = squares = size = 0.0
    for ours, theirs in zip(found, expected, strict=True):
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            raise ValueError(f"{ours.dtype} {tuple(ours.shape)} instead of {theirs.dtype} {tuple(theirs.shape)}")
        if not ours.numel():
            continue
        same = (ours == theirs) | ((ours != ours) & (theirs != theirs))  # NaN is NaN
        if ours.is_floating_point():
            apart = torch.where(same, 0.0, (ours.double() - theirs.double()).abs()).nan_to_num(nan=torch.inf)
            magnitude = theirs.double().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs()
            same = apart <= tolerance + tolerance * magnitude
            largest = max(largest, float(apart.max()))
            squares, size = squares + float(apart.square().sum()), size + float(magnitude.square().sum())
        differing = max(differing, float((~same).double().mean()))
    relative = (squares / size) ** 0.5 if size else float(squares > 0)
    return {"largest": largest, "relative": relative, "differing": differing}


def _bits(tensor: Tensor) -> Tensor:
    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(widths[tensor.element_size()])


@contextmanager
def fallbacks(kernels: ModuleType) -> Iterator[list[str]]:
    """What launchers call of the reference meanwhile, by name."""
    called: list[str] = []

    class Watched:
        def __getattr__(self, name: str) -> Any:
            called.append(name)
            return getattr(reference, name)

    prefix = f"{kernels.__name__}."
    launchers = [m for name, m in sys.modules.items() if name.startswith(prefix) and hasattr(m, "reference")]
    with ExitStack() as stack:
        for module in launchers:
            stack.enter_context(patch.object(module, "reference", Watched()))
        yield called


def summary(found: Sequence[Figures]) -> Figures:
    checked = [figures for figures in found if figures["case"] != "launchers"]
    listed = [figures["without_a_case"] for figures in found if "without_a_case" in figures]
    return {
        "cases": len(checked),
        **Counter("failed" if "error" in f else "passed" if f["passed"] else "wrong" for f in checked),
        "without_a_case": listed[0] if listed else None,
        "not_passed": [f["case"] for f in checked if not f.get("passed")],
    }


def table(found: Sequence[Figures]) -> tuple[Sequence[str], list[Sequence[object]]]:
    """The cases that did not pass, and of each launcher and dtype the worst of those that did."""
    names = ("passed", "largest", "tolerance", "relative", "differing", "repeats", "fell_back")
    wrong = [f for f in found if not f.get("passed") and f["case"] != "launchers"]
    worst: dict[tuple[str, str], Figures] = {}
    for figures in found:
        words = figures["case"].split()
        if figures.get("passed") and figures["largest"] >= worst.get((words[0], words[-1]), figures)["largest"]:
            worst[words[0], words[-1]] = figures
    rows: list[Sequence[object]] = [
        (f["case"], *(f.get(name, "") for name in names)) for f in (*wrong, *worst.values())
    ]
    return ("case", *names), rows
