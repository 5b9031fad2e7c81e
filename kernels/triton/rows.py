"""What the launchers of kernels over rows have in common."""

import torch
import triton

from . import launch

Tensor = torch.Tensor

THREADS_PER_WARP = 32
LEAST_WARPS, MOST_WARPS = 1, 32
# Of long rows: programs for each multiprocessor, about two rounds of what runs there at a time, and parts of a row.
PROGRAMS, MOST_SPLITS = 16, 64


def covers(*tensors: Tensor) -> bool:
    """Whether all of these are on the device, of one floating type, and dense in the last dimension."""
    dtype = tensors[0].dtype
    return (
        dtype in launch.DTYPES
        and all(tensor.dtype is dtype for tensor in tensors)
        and launch.on_device(*tensors)
        and launch.rows_are_dense(*tensors)
    )


def reals(settings: Tensor) -> Tensor:
    """Settings of rows as the kernels read them: float32, one after the other."""
    return settings.to(torch.float32).contiguous()


def indices(rows: Tensor | None) -> Tensor | None:
    return None if rows is None else rows.contiguous()


def warps(elements: int, elements_per_thread: int) -> int:
    """How many warps share a tile, a power of two."""
    wanted = triton.next_power_of_2(elements) // (THREADS_PER_WARP * elements_per_thread)
    return max(LEAST_WARPS, min(MOST_WARPS, wanted))


def split(count: int, blocks: int, device: torch.device) -> tuple[int, int]:
    """(parts that each of `count` rows of so many blocks is split into, blocks of each part), so that few rows fill the
    device too."""
    wanted = triton.cdiv(PROGRAMS * launch.multiprocessors(device), max(1, count))
    blocks_per_split = triton.cdiv(blocks, min(wanted, MOST_SPLITS, blocks))
    return triton.cdiv(blocks, blocks_per_split), blocks_per_split
