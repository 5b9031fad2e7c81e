"""The parts of the GPU benchmark, and the process that runs the cases of one.

A case that raises costs itself alone. One that leaves the device unusable costs its process too, which then ends with
DEVICE_FAILED, so that another can go on with the next case. What a case found is in a file of JSON lines as soon as it
has ended, and its name before it begins: whatever happens to the process, the file says how far it came.

    python -m benchmarks.gpu_parts PART SETTING --lines FILE --first N --every N --seconds S
"""

import argparse
import gc
import importlib
import json
import math
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from pagedgen.process import prepare_process

DEVICE_FAILED = 3
TRACEBACK_LINES = 8

Figures = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """device: "cuda" or "cpu". tiny: shapes so small that a CPU is done in seconds. model: for `same_tokens` and
    `engine`, a folder or .gguf file; None is the default model where its package is installed, else random weights.
    folder: where models may be kept from part to part. rates: what the machine was measured to do, by name: "copy" and
    "read" in bytes/s, "matmul" in operations/s; one that is not known is missing."""

    device: str = "cuda"
    tiny: bool = False
    model: str | None = None
    folder: str = "."
    rates: Mapping[str, float] = field(default_factory=dict)

    def share(self, rate: float, name: str) -> float | None:
        """The fraction of a measured rate, if that is known."""
        return rate / self.rates[name] if self.rates.get(name) else None

    def as_json(self) -> str:
        return json.dumps(asdict(self))


class Case(NamedTuple):
    """run: computes the figures of the case; what it raises is written down in their place."""

    name: str
    run: Callable[[], Figures]


class Module(Protocol):
    """What the module of a part has. cases: cheap, and without touching the device. summary: of the figures of all
    cases that were begun, each with its name as "case". table: its headers and rows."""

    def cases(self, setting: Setting) -> list[Case]: ...

    def summary(self, found: Sequence[Figures]) -> Figures: ...

    def table(self, found: Sequence[Figures]) -> tuple[Sequence[str], list[Sequence[object]]]: ...


@dataclass(frozen=True)
class Part:
    """module: a Module. seconds: the most that the part may take, the start of its processes included. case_seconds:
    the most that one case may take. processes: how many run its cases side by side, as far as there are cores, as
    compiling takes longest."""

    name: str
    module: str
    seconds: float
    case_seconds: float
    processes: int = 1

    def load(self) -> Module:
        loaded: Any = importlib.import_module(self.module)
        return loaded  # type: ignore[no-any-return]


# In the order in which they run: what is right comes before what is fast, and the whole before its pieces, as the
# limits add up to more time than there is.
PARTS = {
    part.name: part
    for part in (
        Part("machine", "benchmarks.gpu_machine", 60, 40),
        Part("kernels", "benchmarks.gpu_kernels", 150, 40, processes=8),
        Part("same_tokens", "benchmarks.gpu_tokens", 110, 80),
        Part("engine", "benchmarks.gpu_run", 75, 50),
        Part("decode_step", "benchmarks.gpu_step", 100, 50),
        Part("throughput", "benchmarks.gpu_throughput", 120, 60),
        Part("decode_attention", "benchmarks.gpu_decode", 90, 40),
        Part("prefill_attention", "benchmarks.gpu_prefill", 50, 40),
    )
}


def run_cases(cases: Sequence[tuple[int, Case]], lines: Path, seconds: float, device_works: Callable[[], bool]) -> int:
    """Run the cases, each with its index, and begin none after so many seconds; the exit code of the process.

    device_works: asked after a case that failed."""
    end = time.monotonic() + seconds
    with lines.open("a", encoding="utf-8") as file:

        def write(index: int, name: str, figures: Figures) -> None:
            file.write(json.dumps({"index": index, "case": name, **plain(figures)}, default=str) + "\n")
            file.flush()

        for index, case in cases:
            if time.monotonic() > end:
                write(index, case.name, {"error": "left out: the part's time was over"})
                continue
            write(index, case.name, {"begun": True})
            started = time.perf_counter()
            try:
                figures = case.run()
            except Exception as error:  # whatever it is, the other cases go on
                figures = described(error)
            seconds_taken = round(time.perf_counter() - started, 3)
            write(index, case.name, {"seconds": seconds_taken, **figures})
            print(f"  {case.name}: {as_line(figures)}  [{seconds_taken:.1f} s]", flush=True)
            if "error" in figures and not device_works():
                return DEVICE_FAILED
    return 0


def described(error: Exception) -> Figures:
    """An error, with the last lines of its traceback."""
    last = "".join(traceback.format_exception(error)).rstrip().split("\n")[-TRACEBACK_LINES:]
    message = str(error).strip().split("\n", 1)[0]
    return {"error": f"{type(error).__name__}: {message}"[:400], "traceback": [line[:200] for line in last]}


def plain(value: Any) -> Any:
    """The value as JSON has it: a number that is not finite becomes its name."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def as_line(figures: Figures) -> str:
    """The figures that are numbers or short texts."""
    shown = {name: value for name, value in figures.items() if isinstance(value, int | float | str) and value != ""}
    return "  ".join(f"{name} {_short(value)}" for name, value in shown.items())


def _short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e5 else f"{value:.0f}"
    return str(value)


def device_works(setting: Setting) -> bool:
    """Whether the device still computes, after an error; what that held is given back."""
    if setting.device == "cpu":
        return True
    import torch

    gc.collect()
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return bool(torch.ones(8, device=setting.device).sum().item() == 8)
    except RuntimeError:
        return False


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("setting", help="a Setting as JSON")
    parser.add_argument("--lines", type=Path, required=True, help="the file to append to")
    parser.add_argument("--first", type=int, default=0, help="the index of the first case to run")
    parser.add_argument("--every", type=int, default=1, help="of the cases, run one in so many")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no case later than this")
    parsed = parser.parse_args(arguments)
    prepare_process()  # before torch is loaded
    setting = Setting(**json.loads(parsed.setting))
    try:
        cases = PARTS[parsed.part].load().cases(setting)
    except Exception as error:  # a part that cannot even be imported says so where its cases would be
        line = {"index": parsed.first, "case": "start", **described(error)}
        parsed.lines.write_text(json.dumps(line) + "\n", "utf-8")
        return 0
    chosen = list(enumerate(cases))[parsed.first :: parsed.every]
    return run_cases(chosen, parsed.lines, parsed.seconds, lambda: device_works(setting))


if __name__ == "__main__":
    sys.exit(main())
