"""The KV pool's storage on the device."""

from collections import Counter
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
    indexed assignment for all of them. A block's keys and values lie side by side where they are of one shape: memory
    is read the faster, the longer the stretches are.

    key(layer), value(layer): [num_blocks, num_kv_heads, block_size, dim] of `dtype` on `device`; each block is in
    one piece. pools: [layers, num_blocks, 1 or 2, num_kv_heads, block_size, dim], contiguous.
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
        counts: Counter[tuple[int, int, int]] = Counter()
        places: list[tuple[tuple[int, int, int], int, int]] = []
        for layer in layers:
            if layer.key_dim == layer.value_dim:
                shape = (2, layer.num_kv_heads, layer.key_dim)
                places += [(shape, counts[shape], part) for part in (0, 1)]
                counts[shape] += 1
            else:
                for dim in (layer.key_dim, layer.value_dim):
                    shape = (1, layer.num_kv_heads, dim)
                    places.append((shape, counts[shape], 0))
                    counts[shape] += 1
        # Left uninitialised: on a CPU, memory is then taken from the system only as blocks are first written.
        self.pools = {
            (parts, heads, dim): torch.empty(
                count, num_blocks, parts, heads, block_size, dim, dtype=dtype, device=device
            )
            for (parts, heads, dim), count in counts.items()
        }
        self._views = [self.pools[shape][index, :, part] for shape, index, part in places]

    @staticmethod
    def bytes_per_block(layers: Sequence[LayerKV], block_size: int, dtype: torch.dtype) -> int:
        return sum(x.num_kv_heads * (x.key_dim + x.value_dim) for x in layers) * block_size * dtype.itemsize

    def key(self, layer: int) -> torch.Tensor:
        return self._views[2 * layer]

    def value(self, layer: int) -> torch.Tensor:
        return self._views[2 * layer + 1]
