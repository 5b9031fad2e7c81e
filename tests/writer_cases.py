"""Completions and writers for the tests of the output."""

from pathlib import Path
from typing import Any, BinaryIO, Literal

import pyarrow as pa

from pagedgen.config import OutputConfig
from pagedgen.data.files import FileLayer
from pagedgen.data.layout import prepare_output
from pagedgen.data.schema import OutputColumns
from pagedgen.data.writer import ShardedWriter
from pagedgen.request import Completion, FinishReason, Status

TEXT = pa.schema([("prompt", pa.string())])
Keep = Literal["all", "none"] | tuple[str, ...]


def completion(row: int, sample: int = 0, **changes: Any) -> Completion:
    values: dict[str, Any] = {"text": f"text {row}/{sample}", "token_ids": (1, 2, row), "prompt_tokens": 5} | changes
    return Completion(row, f"id{row}", sample, Status.OK, finish_reason=FinishReason.STOP, **values)


class NoSync(FileLayer):
    """For speed: what these tests look at does not depend on the disk."""

    def sync(self, file: BinaryIO) -> None:
        file.flush()

    def sync_folder(self, folder: Path) -> None:
        pass


def writer_for(
    output: Path,
    columns: pa.Schema = TEXT,
    *,
    files: FileLayer | None = None,
    part_rows: int = 16384,
    part_bytes: int = 32 << 20,
    keep: Keep = "all",
    **options: bool,
) -> ShardedWriter:
    config = OutputConfig(output, keep=keep, **options)
    layout = prepare_output(config)
    layout.create(FileLayer())
    return ShardedWriter(
        layout, OutputColumns(columns, config), part_rows=part_rows, part_bytes=part_bytes, files=files or NoSync()
    )
