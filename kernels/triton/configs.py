"""Launch configurations of the attention kernels, by the width of the dtype and of the heads.

Nothing is tuned at run time. `benchmarks/gpu_configs.py` times candidates on a GPU and remakes the tables below. Those
that stand here were chosen by reasoning and by looking at the machine code for sm_80 and sm_90 (tests/
test_triton_compiled.py holds them to it: nothing is spilled, and shared memory suffices):

* Decoding reads each key and value once, so it should run at the speed of memory. By Little's law an H200 (4.8 TB/s,
  132 multiprocessors, about 0.8 microseconds from a request to its data under load) needs 29 kB on their way to each
  multiprocessor at any time. A tile of 64 keys and values in 16 bits is 16 kB at 64 dimensions and 32 kB at 128. With
  3 stages two tiles are on their way while a third is computed, less the time between a tile's end and the next
  request; 36 kB of shared memory at 64 dimensions and 70 kB at 128 leave room for 6 and 3 programs on a multiprocessor,
  and registers do too (80 and 108 to 151 a thread, of 65536): about 200 kB, several times what is needed, so that a
  program may wait for its softmax while others' data arrives. Smaller tiles pay the same barriers (five a tile) for
  less data; larger ones would leave fewer programs. At 256 dimensions and in float32 tiles are as many bytes, not keys.
* A tile of 64 keys costs a multiprocessor's four schedulers about 1000 instructions at 64 dimensions and 1400 at 128,
  of the 3300 and 6600 that fit into the time it takes to arrive. So instructions do not bind; nor do tensor cores, at
  16 rows for a group of heads: 77 TFLOP/s at full bandwidth and 128 dimensions.
* Four warps: each computes a quarter of a tile's scores, and a quarter of the output's columns. Fewer would need fewer
  barriers but more registers, and each would wait longer for its own instructions.
* Contexts are split until a multiprocessor has 4 programs, enough bytes on their way by the above; a split is of at
  least 4 tiles, as the results of one, 4 bytes a column and query head, are written and read back.
* Prefill computes 128 rows with 8 warps. On Hopper (wgmma) two groups of 4 warps share each tile. Before Hopper,
  operands pass through registers, and tiles of 64 keys spill: 32. At 256 dimensions, 64 rows for the same reason.
  float32 has no tensor cores (its products are exact), and its sums fill the registers at fewer rows.

All fit the 99 kB of shared memory of NVIDIA's consumer GPUs, but for prefill at 128 dimensions on Hopper.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """tile: keys read at a time. programs: contexts are split until each multiprocessor has as many, or a split has no
    more than least_tiles."""

    tile: int
    num_warps: int = 4
    num_stages: int = 3
    programs: int = 4
    least_tiles: int = 4


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """rows: queries times the heads of a group that a program takes. tile: keys read at a time."""

    rows: int
    tile: int
    num_warps: int = 8
    num_stages: int = 3


# (bytes of an element, dimensions of a head rounded up), and whether the device has Hopper's matrix products.
# tables begin
DECODE: dict[tuple[int, int], DecodeConfig] = {
    (2, 64): DecodeConfig(tile=64),
    (2, 128): DecodeConfig(tile=64),
    (2, 256): DecodeConfig(tile=32),
    (4, 64): DecodeConfig(tile=32),
    (4, 128): DecodeConfig(tile=16),
    (4, 256): DecodeConfig(tile=16),
}
PREFILL: dict[tuple[int, int, bool], PrefillConfig] = {
    (2, 64, False): PrefillConfig(rows=128, tile=32),
    (2, 64, True): PrefillConfig(rows=128, tile=64),
    (2, 128, False): PrefillConfig(rows=128, tile=32),
    (2, 128, True): PrefillConfig(rows=128, tile=64),
    (2, 256, False): PrefillConfig(rows=64, tile=32, num_stages=2),
    (2, 256, True): PrefillConfig(rows=64, tile=32, num_stages=2),
    (4, 64, False): PrefillConfig(rows=64, tile=32, num_stages=2),
    (4, 64, True): PrefillConfig(rows=64, tile=32, num_stages=2),
    (4, 128, False): PrefillConfig(rows=32, tile=16, num_stages=2),
    (4, 128, True): PrefillConfig(rows=32, tile=16, num_stages=2),
    (4, 256, False): PrefillConfig(rows=32, tile=16, num_stages=2),
    (4, 256, True): PrefillConfig(rows=32, tile=16, num_stages=2),
}
# tables end


def decode_config(itemsize: int, dim: int) -> DecodeConfig:
    """Of heads of at most 256 dimensions and elements of 2 or 4 bytes."""
    return DECODE[itemsize, _rounded(dim)]


def prefill_config(itemsize: int, dim: int, has_wgmma: bool) -> PrefillConfig:
    """Of heads of at most 256 dimensions and elements of 2 or 4 bytes."""
    return PREFILL[itemsize, _rounded(dim), has_wgmma]


def _rounded(dim: int) -> int:
    return next(width for width in (64, 128, 256) if dim <= width)
