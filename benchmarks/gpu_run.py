"""`pagedgen run` and `pagedgen beam` from end to end on the sample prompts, as commands: exit code, rows by status,
tokens per second, and the memory that they took by default."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq

from benchmarks.gpu_model import model_to_run
from benchmarks.gpu_parts import Case, Figures, Setting

ROOT = Path(__file__).resolve().parent.parent
PROMPTS = ROOT / "sample_prompts" / "prompts.jsonl"
TOKENS, TINY_TOKENS = 128, 4
COMMAND_SECONDS = 45
LAST_LINES = 12  # of a command's stderr

COMMANDS: dict[str, tuple[str, ...]] = {
    "run": ("run",),
    "run, no graphs": ("run", "--no-cuda-graphs"),
    "beam": ("beam", "--width", "4"),
}


def cases(setting: Setting) -> list[Case]:
    names = ("run",) if setting.tiny else COMMANDS
    return [Case(name, partial(measure, setting, name)) for name in names]


def measure(setting: Setting, name: str) -> Figures:
    """rate: output tokens a second, while it generated. peak_device_bytes: the most that torch held of the device."""
    model, described = model_to_run(setting)
    output = Path(setting.folder) / f"{name.replace(', ', '-').replace(' ', '-')}.jsonl"
    sizes = ("--kv-memory", "16MiB") if setting.tiny else ()
    arguments = [
        *(*COMMANDS[name], str(PROMPTS), "-o", str(output), "--overwrite", "--device", setting.device),
        *("--max-tokens", str(TINY_TOKENS if setting.tiny else TOKENS), *sizes),
        *(() if model is None else ("--model", model)),
    ]
    code, stderr = run_command(arguments)
    figures: Figures = {"exit_code": code, "model": described, "stderr": stderr.strip().split("\n")[-LAST_LINES:]}
    if not output.is_file():
        return figures
    rows = [json.loads(line) for line in output.read_text("utf-8").splitlines()]
    folder = output.with_name(f"{output.name}.run")
    stats = json.loads((folder / "stats.json").read_text("utf-8"))
    memory = pq.read_table(folder / "timeline.parquet", columns=["device_bytes", "process_bytes"])
    peaks = {name: max(memory.column(name).to_pylist(), default=0) for name in memory.column_names}
    return figures | {
        "rows": len(rows),
        "statuses": dict(Counter(row["status"] for row in rows)),
        "ok": sum(row["status"] == "ok" for row in rows),
        "errors": [f"{row['id']}: {row['error']}"[:200] for row in rows if row["error"]][:3],
        "kernels": stats["kernels"],
        "dtype": stats["dtype"],
        "rate": stats["output_tokens_per_s"],
        "output_tokens": stats["output_tokens"],
        "elapsed_s": stats["elapsed_s"],
        "phases_s": stats["phases_s"],
        "step_parts_s": stats["step_parts_s"],
        "steps": stats["steps"],
        "kv_bytes": stats["kv_bytes"],
        "peak_kv_share": stats["peak_used_blocks"] / stats["kv_blocks"],
        "peak_device_bytes": peaks["device_bytes"],
        "peak_process_bytes": peaks["process_bytes"],
    }


def run_command(arguments: Sequence[str]) -> tuple[int, str]:
    """(exit code, stderr) of a `pagedgen` command; -1 where it did not end in time."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
    command = [sys.executable, "-m", "pagedgen", *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env=environment, timeout=COMMAND_SECONDS
        )
    except subprocess.TimeoutExpired as late:
        shown = late.stderr.decode("utf-8", "replace") if isinstance(late.stderr, bytes) else ""
        return -1, f"{shown}\nstopped after {COMMAND_SECONDS} s"
    return done.returncode, done.stderr


def summary(found: Sequence[Figures]) -> Figures:
    ran = [figures for figures in found if "exit_code" in figures]
    return {
        "all_ok": bool(ran) and all(f["exit_code"] == 0 and f.get("ok") == f.get("rows") for f in ran),
        "exit_codes": {figures["case"]: figures["exit_code"] for figures in ran},
        "rates": {figures["case"]: figures.get("rate") for figures in ran},
    }


def table(found: Sequence[Figures]) -> tuple[Sequence[str], list[Sequence[object]]]:
    headers = ("command", "exit code", "rows", "ok", "kernels", "tokens/s", "seconds", "KV GiB", "peak GiB")
    rows: list[Sequence[object]] = []
    for f in found:
        if "exit_code" in f:
            gib = [f[name] / 2**30 if name in f else "" for name in ("kv_bytes", "peak_device_bytes")]
            names = ("exit_code", "rows", "ok", "kernels", "rate", "elapsed_s")
            rows.append((f["case"], *(f.get(name, "") for name in names), *gib))
    return headers, rows
