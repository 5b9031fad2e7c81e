"""What is known of the machine without measuring: its name, and rough figures of what it can do."""

import os
import platform
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Figures:
    """bandwidth: bytes a second that memory gives. flops: floating-point operations a second of matrix products.
    step_s: seconds that a step takes whatever it computes. text: the figures in words."""

    bandwidth: float
    flops: float
    step_s: float
    text: str


# Of each core, by instruction set: measured with SmolLM2 on a Xeon with AMX for AMX and AVX512, halved for AVX2.
_CORE_FLOPS = {"amx_bf16": 170e9, "avx512_bf16": 90e9, "avx512_f": 80e9, "avx2": 40e9}
_CORE_BANDWIDTH, _MOST_BANDWIDTH = 14e9, 200e9
_OTHER_CORE_FLOPS = 15e9
# By a part of the device's name: terabytes a second, and teraflops in bfloat16 without sparsity, as the makers state.
_GPUS = {
    "B200": (8.0, 2250.0),
    "H200": (4.8, 990.0),
    "H100": (3.35, 990.0),
    "A100": (1.9, 312.0),
    "L40S": (0.86, 362.0),
    "L4": (0.3, 121.0),
    "A10": (0.6, 125.0),
    "T4": (0.32, 65.0),
    "V100": (0.9, 125.0),
    "4090": (1.0, 165.0),
    "3090": (0.94, 71.0),
}
_OTHER_GPU = (0.5, 60.0)
# Processes that want to run, for each core, beyond which a step waits for its threads.
_BUSY = 1.5
# What of these a run gets.
_GPU_BANDWIDTH_SHARE, _GPU_FLOPS_SHARE = 0.7, 0.4


def machine_name(device: str) -> str:
    """The name of the processor, or for `cuda` of the accelerator."""
    if device != "cuda":
        return processor_name()
    import torch

    return str(torch.cuda.get_device_name())


def core_count() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_busy() -> bool:
    """Whether there is much more to compute than what keeps the cores busy, as of the last minute."""
    return hasattr(os, "getloadavg") and os.getloadavg()[0] > _BUSY * core_count()


def figures(device: str, dtype: str) -> Figures:
    """device: "cpu" or "cuda". dtype: its name, like "bfloat16"."""
    if device == "cuda":
        return _gpu_figures(machine_name(device), dtype)
    import torch

    cores = core_count()
    has = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    sets = [name for name in _CORE_FLOPS if has.get(name)]
    if dtype != "bfloat16":
        sets = [name for name in sets if "bf16" not in name]
    flops = cores * (_CORE_FLOPS[sets[0]] if sets else _OTHER_CORE_FLOPS)
    bandwidth = min(cores * _CORE_BANDWIDTH, _MOST_BANDWIDTH)
    kind = sets[0].replace("_", "-") if sets else "no known vector instructions"
    return Figures(bandwidth, flops, 3e-3, f"{cores} cores with {kind}: {_rates(bandwidth, flops)}")


def _gpu_figures(name: str, dtype: str) -> Figures:
    terabytes, teraflops = next((found for part, found in _GPUS.items() if part in name), _OTHER_GPU)
    bandwidth = terabytes * 1e12 * _GPU_BANDWIDTH_SHARE
    flops = teraflops * 1e12 * _GPU_FLOPS_SHARE / (2 if dtype == "float32" else 1)
    return Figures(bandwidth, flops, 4e-3, f"{name}: {_rates(bandwidth, flops)}")


def _rates(bandwidth: float, flops: float) -> str:
    return f"{bandwidth / 1e9:,.0f} GB/s, {flops / 1e9:,.0f} GFLOP/s"


def processor_name() -> str:
    """What the machine calls its processor."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
