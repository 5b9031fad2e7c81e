"""The linear layers over numbers of rows from 1 to 512: whether any number falls off a fast path.

Each of a decoder layer's products and the LM head is timed for each number of rows, with weights that come from memory
as they do in a step: a round goes through copies of the layers, larger together than the caches of a core. A number of
rows that takes longer than some larger one could be padded to it; the worst such excess is the figure to look at.
"""

import argparse
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from benchmarks.common import print_table, write_results
from pagedgen.process import prepare_process

if TYPE_CHECKING:
    from pagedgen_kernels.cpu.linear import PackedLinear
    from pagedgen_kernels.cpu.quantized import QuantizedLinear

# Of SmolLM2-135M: (outputs, inputs).
SHAPES = {"qkv": (960, 576), "output": (576, 576), "gate_up": (3072, 576), "down": (576, 1536), "head": (49152, 576)}
ROWS = (
    1,
    2,
    3,
    4,
    6,
    8,
    12,
    15,
    16,
    17,
    24,
    31,
    32,
    33,
    48,
    63,
    64,
    65,
    96,
    127,
    128,
    129,
    192,
    255,
    256,
    257,
    384,
    512,
)
COPIES = 8
ROUNDS = 15


def milliseconds(layers: "Sequence[PackedLinear | QuantizedLinear]", rows: int, inputs: int, kind: str) -> float:
    """Of one layer, the fastest of some rounds through all of them."""
    import torch

    x = torch.randn(rows, inputs, dtype=torch.float32 if kind == "float32" else torch.bfloat16)
    best = float("inf")
    for _ in range(ROUNDS):
        started = time.perf_counter()
        for layer in layers:
            layer(x)
        best = min(best, time.perf_counter() - started)
    return 1e3 * best / len(layers)


def excess(times: Sequence[float]) -> list[float]:
    """By how much each takes longer than the fastest of the larger ones, as a part of that; 0 where none is faster."""
    return [max(0.0, own / min(times[i:]) - 1) for i, own in enumerate(times)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=("bfloat16", "float32", "int8"), default="bfloat16")
    arguments = parser.parse_args()
    prepare_process()
    import torch
    from pagedgen_kernels.cpu.linear import PackedLinear
    from pagedgen_kernels.cpu.quantized import QuantizedLinear

    make = QuantizedLinear if arguments.kind == "int8" else PackedLinear
    dtype = torch.float32 if arguments.kind == "float32" else torch.bfloat16
    found: dict[str, list[float]] = {}
    with torch.inference_mode():
        for name, (outputs, inputs) in SHAPES.items():
            count = 1 if name == "head" else COPIES
            layers = [make(torch.randn(outputs, inputs, dtype=dtype) * inputs**-0.5) for _ in range(count)]
            found[name] = [milliseconds(layers, rows, inputs, arguments.kind) for rows in ROWS]
    operations = {name: 2 * outputs * inputs for name, (outputs, inputs) in SHAPES.items()}
    table = [
        (rows, *(f"{found[name][i]:.3f} ({operations[name] * rows / found[name][i] / 1e6:.0f})" for name in SHAPES))
        for i, rows in enumerate(ROWS)
    ]
    print_table(f"{arguments.kind}: ms (GFLOP/s) by rows", ("rows", *SHAPES), table)
    worst = {name: max(excess(times)) for name, times in found.items()}
    for name, value in worst.items():
        at = ROWS[max(range(len(ROWS)), key=excess(found[name]).__getitem__)]
        print(f"{name}: at worst {value:.0%} longer than for more rows" + (f", at {at}" if value else ""))
    write_results(f"linear-{arguments.kind}", {"rows": ROWS, "ms": found, "excess": worst})


if __name__ == "__main__":
    main()
