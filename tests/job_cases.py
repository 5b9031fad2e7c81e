"""What the tests of whole jobs share: a job's configuration, its input, and its output read back."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from pagedgen.config import EngineConfig, InputConfig, JobConfig


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
