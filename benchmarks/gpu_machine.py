"""What the machine is, and what it does at best: copies and reads of memory, and a matrix product in bfloat16."""

import importlib.metadata
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence

import psutil
import torch

from benchmarks.gpu_parts import Case, Figures, Setting
from benchmarks.gpu_timing import Call, time_calls
from pagedgen.planning.machine import processor_name

COPIED_BYTES, TINY_BYTES = 4 << 30, 1 << 20
PRODUCT, TINY_PRODUCT = 8192, 64
QUERY = "name,driver_version,pstate,clocks.sm,clocks.mem,clocks.max.sm,power.limit,temperature.gpu,memory.used"


def cases(setting: Setting) -> list[Case]:
    device = torch.device(setting.device)
    size = TINY_BYTES if setting.tiny else COPIED_BYTES
    return [
        Case("packages", packages),
        Case("host", describe_host),
        Case("device", lambda: describe_device(device)),
        Case("driver", describe_driver),
        Case("copy", lambda: copy_rate(device, size)),
        Case("read", lambda: read_rate(device, size)),
        Case("matmul", lambda: product_rate(device, TINY_PRODUCT if setting.tiny else PRODUCT)),
    ]


def describe_host() -> Figures:
    return {
        "processor": processor_name(),
        "cores": os.cpu_count() or 0,
        "memory_bytes": psutil.virtual_memory().total,
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def packages() -> Figures:
    names = ("torch", "triton", "transformers", "numpy", "flash-attn", "kernels")
    found: Figures = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found | {"cuda": torch.version.cuda or "none"}


def describe_device(device: torch.device) -> Figures:
    if device.type == "cpu":
        return {"name": "cpu", "threads": torch.get_num_threads()}
    properties = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    return {
        "name": properties.name,
        "capability": list(torch.cuda.get_device_capability(device)),
        "multiprocessors": properties.multi_processor_count,
        "cache_bytes": getattr(properties, "L2_cache_size", 0),
        "memory_bytes": total,
        "free_bytes": free,
    }


def describe_driver() -> Figures:
    """What nvidia-smi says, where it is there."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {"driver": "no nvidia-smi"}
    command = [program, f"--query-gpu={QUERY}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    values = done.stdout.strip().split("\n")[0].split(", ")
    return dict(zip(QUERY.split(","), values, strict=False)) | {"exit_code": done.returncode}


def copy_rate(device: torch.device, size: int) -> Figures:
    """rate: bytes read and written a second, by a copy of `size` bytes."""
    source = torch.randint(0, 2**31 - 1, (size // 4,), dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    timing = time_calls([lambda: target.copy_(source)], device)
    return {"rate": 2 * size / timing.seconds, "method": timing.method}


def read_rate(device: torch.device, size: int) -> Figures:
    """rate: bytes read a second, by the faster of torch's reductions of `size` bytes."""
    source = torch.randn(size // 4, device=device)
    by: dict[str, Call] = {"sum": lambda: source.sum(), "amax": lambda: source.amax()}
    timings = {name: time_calls([call], device).seconds for name, call in by.items()}
    best = min(timings, key=lambda name: timings[name])
    return {"rate": size / timings[best], "by": best}


def product_rate(device: torch.device, size: int) -> Figures:
    """rate: operations a second of a product of two bfloat16 matrices [size, size] of random values."""
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    timing = time_calls([lambda: left @ right], device)
    return {"rate": 2 * size**3 / timing.seconds, "method": timing.method}


def summary(found: Sequence[Figures]) -> Figures:
    """The measured rates, by name."""
    return {figures["case"]: figures["rate"] for figures in found if "rate" in figures}


def table(found: Sequence[Figures]) -> tuple[Sequence[str], list[Sequence[object]]]:
    units = {"copy": ("TB/s", 1e12), "read": ("TB/s", 1e12), "matmul": ("TFLOP/s", 1e12)}
    rates = summary(found)
    return ("measured", "rate", "unit"), [(name, rates[name] / units[name][1], units[name][0]) for name in rates]
