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


def blocks_are_dense(*caches: Tensor) -> bool:
    """Whether each block of the caches [num_blocks, Hkv, block_size, D] lies in one piece, wherever the next one is."""
    return all(cache.stride()[1:] == (cache.shape[2] * cache.shape[3], cache.shape[3], 1) for cache in caches)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many multiprocessors (AMD: compute units) the device has."""
    if device.type != "cuda":
        return 4  # the interpreter's, so that small problems meet both sides of what depends on it
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def has_wgmma(device: torch.device) -> bool:
    """Whether matrix products read shared memory themselves, as from NVIDIA's Hopper on, but not on its consumer GPUs:
    what is fast there needs more registers elsewhere."""
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    return is_nvidia and torch.cuda.get_device_capability(device)[0] in (9, 10)
