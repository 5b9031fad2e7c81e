"""How long a person waits: `pagedgen --help`, and one short prompt from process start to finished file.

The first, unmeasured run fills the caches. Python alone and with torch imported stand beside them as the floor.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.common import alternate, print_table, spread, write_results


def commands(folder: Path) -> dict[str, list[str]]:
    program = str(Path(sys.executable).parent / "pagedgen")
    prompt, output = folder / "prompt.jsonl", folder / "out.parquet"
    prompt.write_text(json.dumps({"prompt": "Name three colours."}) + "\n")
    run = [program, "run", str(prompt), "-o", str(output), "--overwrite", "--max-tokens", "16", "--temperature", "0"]
    return {
        "python": [sys.executable, "-c", "pass"],
        "python, import torch": [sys.executable, "-c", "import torch"],
        "pagedgen --help": [program, "--help"],
        "pagedgen run, one prompt": run,
    }


def contestant(command: Sequence[str], folder: Path) -> Callable[[int], float]:
    def run(_: int) -> float:
        started = time.perf_counter()
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        seconds = time.perf_counter() - started
        if done.returncode:
            sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")
        return seconds

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as name:
        contestants = {what: contestant(command, Path(name)) for what, command in commands(Path(name)).items()}
        for warm_up in contestants.values():
            warm_up(0)
        seconds = alternate(contestants, rounds)
    rows = [(what, *spread(values).values()) for what, values in seconds.items()]
    print_table(f"seconds, {rounds} rounds", ("command", "median", "min", "max"), rows)
    write_results("startup", {"seconds": seconds})


if __name__ == "__main__":
    main()
