"""What the benchmarks share: the machine they ran on, alternating rounds, a table and a result file."""

import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import psutil

from benchmarks.serving import ANSWER
from benchmarks.serving import serve as serve  # the other side of a Worker
from pagedgen.planning.machine import processor_name

RESULTS = Path("build/bench")


def describe_machine() -> dict[str, str | float]:
    """What a figure depends on: processor, cores, memory, load, accelerator and versions."""
    import torch

    versions = {name: importlib.metadata.version(name) for name in ("pagedgen", "torch", "transformers")}
    return {
        "processor": processor_name(),
        "cores": os.cpu_count() or 0,
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load_1min": round(os.getloadavg()[0], 2),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **versions,
    }


def alternate(contestants: Mapping[str, Callable[[int], float]], rounds: int) -> dict[str, list[float]]:
    """Call each contestant once a round with the round's number, in reversed order every other round, so that a drift
    of the machine meets all of them alike. The seconds each reports, by round."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds):
        for name in list(contestants)[:: 1 if number % 2 == 0 else -1]:
            seconds[name].append(contestants[name](number))
            print(f"round {number + 1}/{rounds}  {name}: {seconds[name][-1]:.3f} s", flush=True)
    return seconds


class Worker:
    """A contestant in a process of its own, which `python -m MODULE ARGUMENTS` starts and which calls `serve`: neither
    meets the other's threads, settings of memory or warm caches, and both stay loaded between the rounds.

    python: the interpreter, for a peer that has an environment of its own. about: what it says that it is.
    """

    def __init__(self, module: str, *arguments: str, python: str = sys.executable) -> None:
        command = [python, "-m", module, *arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.about = self._answer()  # it is ready

    def __call__(self, number: int) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{number}\n")
        self._process.stdin.flush()
        return float(self._answer())

    def _answer(self) -> str:
        """The next line for us; what else the contestant prints is passed on."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(ANSWER):
                return line.removeprefix(ANSWER).strip()
            print(line, end="", flush=True)
        sys.exit(f"a contestant ended early, with exit code {self._process.wait()}")


def compare(
    name: str,
    title: str,
    contestants: Mapping[str, Callable[[int], float]],
    *,
    amount: float | Mapping[str, float],
    rounds: int,
    label: str = "engine",
    ours: Sequence[str] | None = None,
    **more: object,
) -> None:
    """Warm the contestants up, alternate them, print their rates and the ratios of ours to the others, and write all of
    it to the result file, with `more`.

    title: the work and the unit of a rate. amount: how much of that unit a round is, for each contestant where they do
    not have the same to do. label: what a contestant is. ours: the contestants that the others are compared with; None
    is the last one.
    """
    for contestant, warm_up in contestants.items():
        print(f"warming up {contestant}: {warm_up(rounds):.3f} s", flush=True)
    seconds = alternate(contestants, rounds)
    rates = rates_of(seconds, amount)
    ratios = ratios_of(rates, ours or list(contestants)[-1:])
    rows = [(contestant, *spread(values).values()) for contestant, values in rates.items()]
    print_table(title, (label, "median", "min", "max"), rows)
    print()
    for pair, values in ratios.items():
        print(f"{pair}: {statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f}) in {rounds} rounds")
    write_results(name, {"work": title, "seconds": seconds, "rates": rates, "ratios": ratios, **more})


def rates_of(seconds: Mapping[str, Sequence[float]], amount: float | Mapping[str, float]) -> dict[str, list[float]]:
    """How much each contestant did in a second, by round. amount: of a round, for all or for each."""
    amounts = amount if isinstance(amount, Mapping) else dict.fromkeys(seconds, amount)
    return {contestant: [amounts[contestant] / s for s in values] for contestant, values in seconds.items()}


def ratios_of(rates: Mapping[str, Sequence[float]], ours: Sequence[str]) -> dict[str, list[float]]:
    """`A / B` -> what A did in a second for each that B did, by round: each of ours over each of the others."""
    others = [contestant for contestant in rates if contestant not in ours]
    return {
        f"{mine} / {other}": [a / b for a, b in zip(rates[mine], rates[other], strict=True)]
        for mine in ours
        for other in others
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def percentiles(values: Sequence[float]) -> dict[str, float]:
    return {"median": float(np.median(values)), "p99": float(np.percentile(values, 99)), "max": max(values)}


def print_table(title: str, headers: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Aligned columns: the first to the left, the others to the right; floats with three significant digits."""
    texts = [[_text(cell) for cell in row] for row in (headers, *rows)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    print(f"\n{title}")
    for first, *others in texts:
        numbers = (f"  {cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True))
        print(f"{first:<{widths[0]}}" + "".join(numbers))


def _text(cell: object) -> str:
    if isinstance(cell, float):
        return f"{cell:.0f}" if abs(cell) >= 100 else f"{cell:.3g}"
    return str(cell)


def write_results(name: str, results: Mapping[str, object]) -> None:
    """Write the results, with the machine's description, to build/bench/NAME.json."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": describe_machine(), **results}, indent=2) + "\n")
    print(f"\nwritten to {path}")
