"""What the tests of whole jobs share: a job's configuration, its input, and its output read back."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from pagedgen.config import EngineConfig, InputConfig, JobConfig
from pagedgen.job import run_job

ROWS = 60
KINDS = ("out.parquet", "out.jsonl", "out")


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def job(folder: Path, model: str, kind: str = "out.parquet", **changes: Any) -> JobConfig:
    config = JobConfig(
        InputConfig(str(folder / "in.jsonl")),
        output_path=folder / kind,
        engine=EngineConfig(model=model),
        quiet=True,
        command=("pagedgen", "run", "in.jsonl"),
    )
    return replace(config, **changes)


def read(output: Path) -> list[dict[str, Any]]:
    """The output's rows, in order of row and sample."""
    if output.suffix == ".jsonl":
        return [json.loads(line) for line in output.read_text().splitlines()]
    if output.is_dir():
        assert all(path.name.startswith("part-") for path in output.iterdir()), list(output.iterdir())
    table = pq.read_table(output)
    return table.sort_by([("row", "ascending"), ("sample", "ascending")]).to_pylist()


def rows_of(count: int = ROWS) -> list[dict[str, Any]]:
    """Rows of all kinds: fine, with samples, broken, without a prompt."""
    rows: list[dict[str, Any]] = [{"prompt": "x" * (number % 23 + 1), "number": number} for number in range(count)]
    for number in range(0, count, 5):
        rows[number]["n"] = 3
    for number in range(7, count, 10):
        rows[number] = {"number": number}
    return rows


def uninterrupted(folder: Path, model: str, kind: str, **changes: Any) -> list[dict[str, Any]]:
    folder.mkdir()
    write_rows(folder / "in.jsonl", rows_of())
    run_job(job(folder, model, kind, **changes))
    return read(folder / kind)
