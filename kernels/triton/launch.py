"""What every launcher asks before it launches a kernel."""

import functools

import torch
from triton import knobs

Tensor = torch.Tensor

# Types of devices that the kernels run on: those that torch calls "cuda" (AMD's too), or the CPU under triton's
# interpreter, which stands in for them all.
DEVICE_TYPES = ("cpu",) if knobs.runtime.interpret else ("cuda",)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def on_device(*tensors: Tensor) -> bool:
    """Whether all of these are where the kernels run."""
    return all(tensor.device.type in DEVICE_TYPES for tensor in tensors)


def rows_are_dense(*tensors: Tensor) -> bool:
    """Whether the last dimension of each of these has unit stride."""
    return all(tensor.stride(-1) == 1 or tensor.shape[-1] == 1 for tensor in tensors)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many multiprocessors (AMD: compute units) the device has."""
    if device.type != "cuda":
        return 4  # the interpreter's, so that small problems meet both sides of what depends on it
    return torch.cuda.get_device_properties(device).multi_processor_count
