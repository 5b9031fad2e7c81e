"""The durable output: completions in as they finish, Parquet parts out, and one file in input order at the end."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pagedgen.data.files import FileLayer, replace_file, write_error
from pagedgen.data.layout import OutputLayout
from pagedgen.data.merge import COMPRESSION, merge_to_json_lines, merge_to_parquet
from pagedgen.data.schema import OutputColumns, OutputRow, TokenStrings
from pagedgen.errors import PagedgenError
from pagedgen.request import Completion

PART_ROWS = 16384
PART_BYTES = 32 << 20
PART_SECONDS = 60.0


class ShardedWriter:
    """Collects completions and writes them as Parquet parts; a part is what a run commits at a time.

    A part holds rows sorted by (row, sample) and appears under its name only when it is on the disk. When the run ends
    early, the parts written so far stay. Every method raises PagedgenError when the disk refuses.

    layout: of `prepare_output`, created. part_rows, part_bytes, part_seconds: a part is closed when it holds this many
    rows, or about this many bytes, or when its first row came this long ago.
    """

    def __init__(
        self,
        layout: OutputLayout,
        columns: OutputColumns,
        *,
        part_rows: int = PART_ROWS,
        part_bytes: int = PART_BYTES,
        part_seconds: float = PART_SECONDS,
        files: FileLayer | None = None,
    ) -> None:
        self._layout = layout
        self._columns = columns
        self._part_rows = part_rows
        self._part_bytes = part_bytes
        self._part_seconds = part_seconds
        self._part_began = 0.0
        self._files = files or FileLayer()
        self._rows: list[OutputRow] = []
        self._bytes = 0
        self.parts_written = 0
        self.rows_written = 0

    def write(
        self, completion: Completion, columns: Mapping[str, Any], token_strings: TokenStrings | None = None
    ) -> None:
        """Takes one outcome with its input row's columns, in any order. token_strings: the text of a token id; needed
        when the completion has log-probabilities."""
        now = time.monotonic()
        if not self._rows:
            self._part_began = now
        self._rows.append(self._columns.row(completion, columns, token_strings))
        self._bytes += _size(completion, columns)
        is_old = now - self._part_began >= self._part_seconds
        if is_old or len(self._rows) >= self._part_rows or self._bytes >= self._part_bytes:
            self.flush()

    def flush(self) -> None:
        """Writes what is collected as a part, however little it is."""
        if not self._rows:
            return
        # Let go of the rows first: an interrupt in here may lose them, which the next run makes good, not repeat them.
        rows, self._rows, self._bytes = self._rows, [], 0
        rows.sort(key=lambda row: (row.completion.row, row.completion.sample))
        self._write_part(self._columns.table(rows))
        self.rows_written += len(rows)

    def finish(self) -> None:
        """Writes the rest; a single-file output is merged from its parts, which are then removed."""
        self.flush()
        layout = self._layout
        if layout.kind == "folder":
            if not layout.finished_parts():
                self._write_part(self._columns.schema.empty_table())
            return
        merge = merge_to_parquet if layout.kind == "parquet" else merge_to_json_lines
        parts = layout.finished_parts()
        try:
            merge(self._files, parts, layout.output, self._columns.schema, layout.parts)
        except OSError as error:
            raise self._error(layout.output, error) from error
        for part in parts:
            self._files.remove(part)
        layout.parts.rmdir()

    def _write_part(self, table: pa.Table) -> None:
        # In memory first: a part is small, and the file is then written in one piece.
        buffer = pa.BufferOutputStream()
        pq.write_table(table, buffer, compression=COMPRESSION, row_group_size=max(table.num_rows, 1))
        path = self._layout.part(self.parts_written)
        try:
            with replace_file(self._files, path) as file:
                file.write(buffer.getvalue())
        except OSError as error:
            raise self._error(path, error) from error
        self.parts_written += 1

    def _error(self, path: Path, error: OSError) -> PagedgenError:
        return write_error(
            path, error, f"make room; the {self.rows_written} rows written so far are safe in {self._layout.parts}"
        )


def _size(completion: Completion, columns: Mapping[str, Any]) -> int:
    """About how many bytes a row takes."""
    size = 64 + len(completion.text or "") + 4 * len(completion.token_ids)
    for entry in (*(completion.logprobs or ()), *(completion.prompt_logprobs or ())):
        size += 16 * (1 + len(entry.top_ids))
    for value in columns.values():
        size += len(value) if type(value) is str else _value_size(value)
    return size


def _value_size(value: Any) -> int:
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_value_size, value.values()))
    if isinstance(value, list | tuple):
        return 8 + sum(map(_value_size, value))
    return 8
