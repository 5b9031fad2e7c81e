"""The KV pool's storage on the device."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class LayerKV:
    """The shape of one layer's cache: keys [num_blocks, num_kv_heads, block_size, key_dim], values with value_dim."""

    num_kv_heads: int
    key_dim: int
    value_dim: int


class KVCache:
    """Keys and values of all layers in blocks. Layers of one shape share one tensor, so that a block copy is one
    indexed assignment for all of them.

    key(layer), value(layer): [num_blocks, num_kv_heads, block_size, dim], contiguous, of `dtype` on `device`.
    """

    def __init__(
        self,
        layers: Sequence[LayerKV],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks, self.block_size, self.dtype, self.device = num_blocks, block_size, dtype, device
        # Left uninitialised: on a CPU, memory is then taken from the system only as blocks are first written.
        shapes = [(layer.num_kv_heads, dim) for layer in layers for dim in (layer.key_dim, layer.value_dim)]
        places: list[tuple[tuple[int, int], int]] = []
        counts: dict[tuple[int, int], int] = {}
        for shape in shapes:
            places.append((shape, counts.get(shape, 0)))
            counts[shape] = counts.get(shape, 0) + 1
        self.pools = {
            (heads, dim): torch.empty(count, num_blocks, heads, block_size, dim, dtype=dtype, device=device)
            for (heads, dim), count in counts.items()
        }
        self._views = [self.pools[shape][index] for shape, index in places]

    @staticmethod
    def bytes_per_block(layers: Sequence[LayerKV], block_size: int, dtype: torch.dtype) -> int:
        return sum(x.num_kv_heads * (x.key_dim + x.value_dim) for x in layers) * block_size * dtype.itemsize

    def key(self, layer: int) -> torch.Tensor:
        return self._views[2 * layer]

    def value(self, layer: int) -> torch.Tensor:
        return self._views[2 * layer + 1]
