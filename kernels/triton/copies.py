"""Copies of blocks within the pools of the paged cache."""

from collections.abc import Iterable

import torch
import triton
import triton.language as tl

from .. import reference
from . import launch

Tensor = torch.Tensor

# Words of four bytes that a program copies of one block in one layer: eight moves of sixteen bytes for each thread.
TILE = 4096
WARPS = 4


@triton.jit
def _copy_blocks_kernel(pool, copies, copy_stride, side_stride, layer_stride, WORDS: tl.constexpr, TILE: tl.constexpr):
    """pool: in words, WORDS to a block. A program copies a tile of one block in one layer."""
    copy = copies + tl.program_id(0).to(tl.int64) * copy_stride
    source, destination = tl.load(copy).to(tl.int64), tl.load(copy + side_stride).to(tl.int64)
    layer = pool + tl.program_id(1).to(tl.int64) * layer_stride
    word = tl.program_id(2) * TILE + tl.arange(0, TILE)
    inside = word < WORDS
    tl.store(layer + destination * WORDS + word, tl.load(layer + source * WORDS + word, mask=inside), mask=inside)


def copy_blocks(pools: Iterable[Tensor], copies: Tensor) -> None:
    for pool in pools:
        layers = pool.shape[0]
        block_bytes = pool[0, 0].numel() * pool.element_size()
        if not launch.on_device(pool, copies) or not pool.is_contiguous() or block_bytes % 4:
            reference.copy_blocks([pool], copies)
            continue
        words = block_bytes // 4
        tile = min(TILE, triton.next_power_of_2(words))
        _copy_blocks_kernel[(copies.shape[0], layers, triton.cdiv(words, tile))](
            *(pool.view(-1).view(torch.int32), copies, *copies.stride(), pool.shape[1] * words, words, tile),
            num_warps=WARPS,
        )
