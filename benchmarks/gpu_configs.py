"""Launch configurations of the attention kernels for this GPU: times candidates and makes the tables of
kernels/triton/configs.py.

    python -m benchmarks.gpu_configs            # prints the tables, and what decoding reaches of the memory's speed
    python -m benchmarks.gpu_configs --write    # and puts them into the file

Each configuration of the tables is chosen on a few workloads: the candidate that over all of them takes the least time,
each relative to the fastest there. Workloads have enough layers, each with a cache of its own, not to be held by the
GPU's own caches, and run in a CUDA graph, so that the time of launching from Python does not count. A candidate that
does not compile, needs more shared memory than there is, computes something else or is slow on the first workload is
left out. For the three sizes of heads in 16 bits it takes about ten minutes, most of them compiling.
"""

import argparse
import itertools
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pagedgen_kernels import reference
from pagedgen_kernels.triton import attention, configs, launch

from benchmarks.common import describe_machine, print_table, write_results

BLOCK_SIZE = 16
LEAST_BYTES = 512 << 20  # of the caches of all layers of a workload
SLOW = 1.3  # times the fastest candidate
DTYPES = {2: torch.bfloat16, 4: torch.float32}
BEGIN, END = "# tables begin\n", "# tables end\n"

Key = tuple[int, ...]
Layer = Callable[..., torch.Tensor]
Timer = Callable[[Sequence[Layer]], float]


@dataclass(frozen=True)
class Workload:
    """Sequences of `queries` new tokens each, with `context` tokens in the cache."""

    heads: int
    kv_heads: int
    sequences: int
    context: int
    queries: int = 1

    def cache_bytes(self, dim: int, itemsize: int) -> int:
        """Of one layer, keys and values."""
        return 2 * self.sequences * self.context * self.kv_heads * dim * itemsize


FULL_BATCHES = (Workload(32, 8, 256, 1024), Workload(9, 3, 256, 1024), Workload(16, 16, 128, 2048))
SMALL_BATCHES = (
    Workload(32, 8, 1, 16384),
    Workload(32, 8, 8, 4096),
    Workload(32, 8, 48, 2048),
    Workload(9, 3, 64, 1024),
)
PROMPTS = (Workload(32, 8, 4, 2048, 2048), Workload(32, 8, 2, 4096, 512), Workload(9, 3, 16, 512, 512))


def decode_candidates() -> Iterator[Any]:
    for tile, num_warps, num_stages in itertools.product((16, 32, 64, 128), (2, 4, 8), (2, 3, 4)):
        yield configs.DecodeConfig(tile=tile, num_warps=num_warps, num_stages=num_stages)


def split_candidates(chosen: Any) -> Iterator[Any]:
    for programs, tokens in itertools.product((1, 2, 3, 4, 6, 8), (64, 128, 256, 512)):
        yield replace(chosen, programs=programs, least_tiles=max(1, tokens // chosen.tile))


def prefill_candidates() -> Iterator[Any]:
    for rows, tile, num_warps, num_stages in itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3)):
        yield configs.PrefillConfig(rows=rows, tile=tile, num_warps=num_warps, num_stages=num_stages)


@contextmanager
def configured(table: dict[Any, Any], key: Any, config: Any) -> Iterator[None]:
    """The kernels are launched with this configuration inside."""
    before = table[key]
    table[key] = config
    attention.layer_shape.cache_clear()
    try:
        yield
    finally:
        table[key] = before
        attention.layer_shape.cache_clear()


def layers_of(workload: Workload, dim: int, itemsize: int, device: torch.device) -> list[Layer]:
    """The attention of each layer, as a call that takes the module of its kernels, with blocks in random order."""
    dtype, context = DTYPES[itemsize], workload.context
    blocks_each = -(-context // BLOCK_SIZE)
    num_blocks = workload.sequences * blocks_each
    count = max(1, -(-LEAST_BYTES // workload.cache_bytes(dim, itemsize)))
    tables = torch.randperm(num_blocks, device=device).view(workload.sequences, blocks_each).to(torch.int32)
    lens = torch.full((workload.sequences,), context, dtype=torch.int32, device=device)
    starts = torch.arange(workload.sequences + 1, dtype=torch.int32, device=device) * workload.queries
    query = torch.randn(workload.sequences * workload.queries, workload.heads, dim, device=device).to(dtype)

    def layer() -> Layer:
        pool = torch.empty(num_blocks, 2, workload.kv_heads, BLOCK_SIZE, dim, dtype=dtype, device=device).normal_()

        def call(kernels: Any = attention) -> torch.Tensor:
            out: torch.Tensor = kernels.paged_attention(
                query, pool[:, 0], pool[:, 1], tables, lens, starts, scale=dim**-0.5
            )
            return out

        return call

    return [layer() for _ in range(count)]


def time_on_gpu(layers: Sequence[Layer]) -> float:
    """Seconds of one layer, the median of several replays of all of them."""
    layers[0]()  # compiles, outside of the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in layers:
            layer()
    graph.replay()
    seconds: list[float] = []
    for _ in range(7):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1000 / len(layers))
    return statistics.median(seconds)


def choose(
    table: dict[Any, Any],
    key: Any,
    candidates: Iterable[Any],
    workloads: Sequence[Workload],
    device: torch.device,
    timer: Timer,
) -> tuple[Any, dict[Any, list[float]]]:
    """(the best candidate, the seconds of each on each workload that it was still in for)."""
    itemsize, dim = key[:2]
    seconds: dict[Any, list[float]] = {candidate: [] for candidate in candidates}
    running = list(seconds)
    for workload in workloads:
        layers = layers_of(workload, dim, itemsize, device)
        expected = layers[0](reference).float()
        for candidate in running:
            with configured(table, key, candidate):
                seconds[candidate].append(usable_time(layers, expected, itemsize, timer))
        fastest = min(seconds[candidate][-1] for candidate in running)
        running = [candidate for candidate in running if seconds[candidate][-1] < SLOW * fastest]
        if not running:
            raise ValueError(f"no candidate for {key} can be used on {workload}")
    return best({candidate: seconds[candidate] for candidate in running}), seconds


def usable_time(layers: Sequence[Layer], expected: torch.Tensor, itemsize: int, timer: Timer) -> float:
    """Seconds of a layer, infinity where the kernel cannot be launched or is wrong."""
    try:
        actual = layers[0]().float()
    except Exception as error:  # of many kinds: out of resources, errors of the compiler and of the assembler
        print(f"    left out: {type(error).__name__}: {str(error)[:100]!r}")
        return math.inf
    tolerance = 2e-2 if itemsize == 2 else 1e-4
    if not torch.allclose(actual, expected, atol=tolerance, rtol=tolerance):
        print("    left out: the result differs")
        return math.inf
    return timer(layers)


def best(seconds: Mapping[Any, Sequence[float]]) -> Any:
    """The candidate with the least mean over the workloads of its time relative to the fastest there."""
    fastest = [min(column) for column in zip(*seconds.values(), strict=True)]
    return min(seconds, key=lambda c: statistics.mean(t / f for t, f in zip(seconds[c], fastest, strict=True)))


def make_tables(
    device: torch.device, timer: Timer, keys: Sequence[Key], report: Callable[[str], None] = print
) -> tuple[dict[Key, Any], dict[Any, Any]]:
    """New (DECODE, PREFILL), where the keys (bytes of an element, dimensions) have what is best on the device."""
    decode, prefill = dict(configs.DECODE), dict(configs.PREFILL)
    for key in keys:
        chosen, seconds = choose(configs.DECODE, key, decode_candidates(), FULL_BATCHES, device, timer)
        for workload, time in zip(FULL_BATCHES, seconds[chosen], strict=True):
            speed = workload.cache_bytes(key[1], key[0]) / time / 1e9
            report(f"{key} {workload}: {time * 1e6:.1f} us, {speed:.0f} GB/s with {chosen}")
        with configured(configs.DECODE, key, chosen):
            decode[key], _ = choose(configs.DECODE, key, split_candidates(chosen), SMALL_BATCHES, device, timer)
        full_key = (*key, launch.has_wgmma(device))
        prefill[full_key], _ = choose(configs.PREFILL, full_key, prefill_candidates(), PROMPTS, device, timer)
        report(f"{key}: {decode[key]}, {prefill[full_key]}")
    return decode, prefill


def rendered(decode: Mapping[Key, Any], prefill: Mapping[Any, Any]) -> str:
    """The tables as they stand in kernels/triton/configs.py."""
    lines = ["DECODE: dict[tuple[int, int], DecodeConfig] = {"]
    lines += [f"    {key}: {config}," for key, config in sorted(decode.items())]
    lines += ["}", "PREFILL: dict[tuple[int, int, bool], PrefillConfig] = {"]
    lines += [f"    {key}: {config}," for key, config in sorted(prefill.items())]
    return "\n".join([*lines, "}", ""])


def with_tables(source: str, tables: str) -> str:
    """The text of configs.py with other tables."""
    before, rest = source.split(BEGIN)
    return before + BEGIN + tables + END + rest.split(END)[1]


def copy_speed(device: torch.device) -> float:
    """Bytes per second read and written by the fastest plain copy."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / time_on_gpu([lambda: target.copy_(source)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the tables into kernels/triton/configs.py")
    parser.add_argument("--width", type=int, choices=(64, 128, 256), action="append", help="only these dimensions")
    parser.add_argument("--float32", action="store_true", help="float32 too")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("torch finds no GPU to time the kernels on")
    device = torch.device("cuda")
    speed = copy_speed(device)
    print(f"{torch.cuda.get_device_name()}: a copy reads and writes {speed / 1e9:.0f} GB/s")
    itemsizes = (2, 4) if args.float32 else (2,)
    keys = list(itertools.product(itemsizes, args.width or (64, 128, 256)))
    notes: list[str] = []

    def report(line: str) -> None:
        print(line, flush=True)
        notes.append(line)

    decode, prefill = make_tables(device, time_on_gpu, keys, report)
    print_table("chosen", ("key", "decode", "prefill"), [
        (str(key), str(decode[key]), str(prefill[*key, launch.has_wgmma(device)])) for key in keys
    ])  # fmt: skip
    tables = rendered(decode, prefill)
    print(tables)
    write_results("gpu_configs", {"machine": describe_machine(), "copy": speed, "notes": notes, "tables": tables})
    if args.write:
        path = Path(configs.__file__)
        path.write_text(with_tables(path.read_text("utf-8"), tables), "utf-8")


if __name__ == "__main__":
    main()
