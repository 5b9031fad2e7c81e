"""What a device's errors mean."""

import gc

import torch

# What torch, its allocators and NVIDIA's libraries say when they get no memory. On a CPU torch raises a plain
# RuntimeError; its allocator's name is all there is to tell it by.
_NO_MEMORY = ("DefaultCPUAllocator", "out of memory", "ALLOC_FAILED")
# What torch and triton say of errors after which a CUDA context is of no use any more.
_DEVICE_FAILED = ("CUDA error", "HIP error", "Triton Error", "CUDNN_STATUS", "CUBLAS_STATUS", "cuDNN error")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error says that memory, the device's or the machine's, did not suffice."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)


def is_device_failure(error: BaseException) -> bool:
    """Whether the error says that the device can compute nothing more in this process."""
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _DEVICE_FAILED)


def free_unused_memory(device: torch.device) -> None:
    """Give back what nothing refers to any more. An error that is still being handled keeps its frames' tensors."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
