"""Whether pagedgen is right and fast on this machine's GPU: all of it in ten minutes, all figures in one file.

    machine             what the device is, and what it copies, reads and multiplies at best
    kernels             every launcher of the GPU's kernels against the reference
    same_tokens         a model's tokens with and without CUDA graphs and overlap, and on the CPU
    engine              `pagedgen run` and `pagedgen beam` from end to end
    decode_step         what a decoding step of 256 sequences is made of, beside the least it could take
    throughput          output tokens per second beside transformers
    decode_attention    attention of decoding steps, beside a copy of memory
    prefill_attention   attention of prompts, beside a matrix product

Each part runs in processes of its own, for as long as it may take: one that fails, crashes or hangs costs none of the
others, and within it no more than a case. The file is written anew as cases end. `--device cpu --tiny` goes through all
of it without a GPU, with the reference in place of the GPU's kernels.
"""

import argparse
import importlib.util
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

from benchmarks.common import RESULTS, print_table
from benchmarks.gpu_parts import PARTS, Figures, Part, Setting, described, plain
from benchmarks.gpu_watch import Command, Limits, watch
from pagedgen.planning.machine import core_count

MACHINE = "machine"
MINUTES = 9.5
LEAST_SECONDS = 15.0  # with less left, no part is begun
# The profiler's library must not be unloaded while there are graphs.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
    "PYTHONFAULTHANDLER": "1",
    "TEARDOWN_CUPTI": "0",
    "DISABLE_CUPTI_LAZY_REINIT": "1",
}


class Results:
    """The figures of all parts, and the file that they are in."""

    def __init__(self, path: Path, options: Figures) -> None:
        self.path, self._started = path, time.monotonic()
        self.figures: Figures = {"machine": {}, "options": options, "elapsed_s": 0.0, "parts": {}}
        path.parent.mkdir(parents=True, exist_ok=True)

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._started

    def begin(self, part: Part, seconds: float) -> None:
        self.figures["parts"][part.name] = {"allowed_s": round(seconds, 1), "began_s": round(self.elapsed, 2)}

    def leave_out(self, part: Part) -> None:
        self.figures["parts"][part.name] = {"allowed_s": 0.0, "cases": [], "summary": {"left_out": "the time was over"}}
        self._write()

    def update(self, part: Part, cases: Sequence[Figures]) -> None:
        """Take in the cases of a part, and write the file."""
        self.figures["parts"][part.name]["cases"] = list(cases)
        if part.name == MACHINE:
            self.figures["machine"] = {figures["case"]: figures for figures in cases}
        self._write()

    def end(self, part: Part) -> Figures:
        """Sum a part up; the summary."""
        here = self.figures["parts"][part.name]
        try:
            here["summary"] = part.load().summary(here["cases"])
        except Exception as error:  # no part may cost the others
            here["summary"] = described(error)
        here["took_s"] = round(max(0.0, self.elapsed - here["began_s"]), 1)
        self._write()
        summary: Figures = here["summary"]
        return summary

    def _write(self) -> None:
        """In one go: whoever is stopped leaves a whole file."""
        self.figures["elapsed_s"] = round(self.elapsed, 1)
        beside = self.path.with_suffix(".part")
        beside.write_text(json.dumps(plain(self.figures), indent=1) + "\n", "utf-8")
        beside.replace(self.path)

    def print_tables(self) -> None:
        for name, found in self.figures["parts"].items():
            failed = [f"{case['case']}: {case['error']}" for case in found.get("cases", ()) if "error" in case]
            took = f"{name}, {found.get('took_s', 0):.0f} s of {found['allowed_s']:.0f}"
            try:
                headers, rows = PARTS[name].load().table(found.get("cases", []))
                print_table(took, headers, [[_cell(cell) for cell in row] for row in rows])
            except Exception as error:  # the figures are in the file all the same
                print(f"\n{took}: no table, {error}")
            for line in failed[:8]:
                print(f"  failed  {line[:180]}")


def _cell(cell: object) -> object:
    return "" if cell is None else cell


def run_part(part: Part, setting: Setting, results: Results, seconds: float) -> Figures:
    """Run a part's cases in processes of their own; its summary."""
    results.begin(part, seconds)
    print(f"\n{part.name}: at {results.elapsed:.0f} s, for {seconds:.0f} s at most", flush=True)
    Thread(target=preload, args=(part,)).start()
    count = 1 if setting.tiny else min(part.processes, core_count())
    with tempfile.TemporaryDirectory() as folder:
        commands: list[tuple[Command, Path]] = []
        for number in range(count):
            lines = Path(folder) / f"{number}.jsonl"
            commands.append((partial(command_of, part, setting, lines, count), lines))
        limits = Limits(seconds, part.case_seconds)
        results.update(part, watch(commands, limits, partial(results.update, part), os.environ | ENVIRONMENT))
    return results.end(part)


def preload(part: Part) -> None:
    """Import a part's module while its cases run elsewhere: it sums them up. What is wrong with it shows there."""
    with suppress(Exception):
        part.load()


def command_of(part: Part, setting: Setting, lines: Path, every: int, first: int, seconds: float) -> list[str]:
    """What runs the case of index `first` and every so many-th after it."""
    options = {"--lines": lines, "--first": first, "--every": every, "--seconds": f"{seconds - 1:.1f}"}
    given = [str(word) for option in options.items() for word in option]
    return [sys.executable, "-m", "benchmarks.gpu_parts", part.name, setting.as_json(), *given]


def run(parts: Sequence[Part], setting: Setting, results: Results, minutes: float) -> None:
    """The parts one after the other, those that there is time for, with what the machine can do before them."""
    for part in (PARTS[MACHINE], *parts):
        left = 60 * minutes - results.elapsed
        if left < LEAST_SECONDS:
            results.leave_out(part)
            continue
        summary = run_part(part, setting, results, min(part.seconds, left))
        if part.name == MACHINE and "error" not in summary:
            setting = Setting(setting.device, setting.tiny, setting.model, setting.folder, summary)


def parse(arguments: Sequence[str] | None) -> tuple[argparse.ArgumentParser, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="parts with commas between them; what the machine can do is always measured")
    parser.add_argument("--json", type=Path, default=RESULTS / "gpu.json", help="the file to write")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="the most that all of it may take")
    parser.add_argument("--model", help="a folder or .gguf file for same_tokens and engine; else the default model")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="shapes for trying it out")
    return parser, parser.parse_args(arguments)


def check(options: Any, parser: argparse.ArgumentParser) -> list[Part]:
    """The parts to run after the machine; an error for what cannot work at all."""
    names = [name for name in PARTS if name != MACHINE] if options.only is None else options.only.split(",")
    if unknown := set(names) - set(PARTS):
        parser.error(f"--only: {', '.join(sorted(unknown))} is none of {', '.join(PARTS)}")
    if importlib.util.find_spec("pagedgen_kernels") is None:
        parser.error(
            "pagedgen is not installed; where it cannot be, put a link pagedgen_kernels to kernels/ on PYTHONPATH"
        )
    return [part for name, part in PARTS.items() if name in names and name != MACHINE]


def main(arguments: Sequence[str] | None = None) -> None:
    parser, options = parse(arguments)
    parts = check(options, parser)
    chosen = {"device": options.device, "tiny": options.tiny, "minutes": options.minutes, "only": options.only}
    results = Results(options.json, chosen)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as after Ctrl-C, no process is left behind
    with tempfile.TemporaryDirectory() as folder:
        setting = Setting(options.device, options.tiny, options.model, folder)
        run(parts, setting, results, options.minutes)
    results.print_tables()
    print(f"\n{results.elapsed:.0f} s, written to {results.path}")
    for name, part in results.figures["parts"].items():
        print(f"{name}: {json.dumps(plain(part.get('summary')))[:500]}")


if __name__ == "__main__":
    main()
