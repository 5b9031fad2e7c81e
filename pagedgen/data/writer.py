"""The durable output: completions in as they finish, Parquet parts out, and one file in input order at the end."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pagedgen.data.files import FileLayer, replace_file, write_error
from pagedgen.data.finished import find_superseded, naming_parts
from pagedgen.data.layout import OutputLayout
from pagedgen.data.merge import COMPRESSION, ToLines, json_lines, merge_to_lines, merge_to_parquet
from pagedgen.data.schema import OutputColumns, OutputRow, TokenStrings
from pagedgen.errors import PagedgenError
from pagedgen.request import Completion

PART_ROWS = 16384
PART_BYTES = 32 << 20
PART_SECONDS = 30.0
_NUMBERS = frozenset({int, float})


class ShardedWriter:
    """Collects completions and writes them as Parquet parts; a part is what a run commits at a time.

    A part holds rows sorted by (row, sample), a row with all its samples, and appears under its name only when it is on
    the disk: a finished part is the commit, and there is no other record of it. When the run ends early, the parts
    written so far stay. Every method raises PagedgenError when the disk refuses.

    layout: of `prepare_output`, created. first_part: the number of the first part to write. part_rows, part_bytes,
    part_seconds: a part is closed when it holds this many completions, or about this many bytes, or when its first row
    came this long ago. to_lines: how a JSON lines output is written. before_part: called before a part is written.
    """

    def __init__(
        self,
        layout: OutputLayout,
        columns: OutputColumns,
        *,
        first_part: int = 0,
        part_rows: int = PART_ROWS,
        part_bytes: int = PART_BYTES,
        part_seconds: float = PART_SECONDS,
        to_lines: ToLines = json_lines,
        before_part: Callable[[], None] | None = None,
        files: FileLayer | None = None,
    ) -> None:
        self._layout = layout
        self._columns = columns
        self._next_part = first_part
        self._part_rows = part_rows
        self._part_bytes = part_bytes
        self._part_seconds = part_seconds
        self._to_lines = to_lines
        self._before_part = before_part
        self._part_began = 0.0
        self._files = files or FileLayer()
        self._rows: list[OutputRow] = []
        self._bytes = 0
        self.parts_written = 0
        self.rows_written = 0

    def write(
        self,
        completions: Sequence[Completion],
        columns: Mapping[str, Any],
        token_strings: TokenStrings | None = None,
    ) -> None:
        """Takes all outcomes of one input row with the row's columns; the rows come in any order. token_strings: the
        text of a token id; needed when a completion has log-probabilities."""
        if not self._rows:
            self._part_began = time.monotonic()
        for completion in completions:
            self._rows.append(self._columns.row(completion, columns, token_strings))
            self._bytes += _size(completion, columns)
        if len(self._rows) >= self._part_rows or self._bytes >= self._part_bytes:
            self.flush()

    def flush_if_due(self) -> None:
        """Writes a part when its first row came long enough ago."""
        if self._rows and time.monotonic() - self._part_began >= self._part_seconds:
            self.flush()

    def flush(self) -> None:
        """Writes what is collected as a part, however little it is."""
        if not self._rows:
            return
        # Let go of the rows first: an interrupt in here may lose them, which the next run makes good, not repeat them.
        rows, self._rows, self._bytes = self._rows, [], 0
        rows.sort(key=lambda row: (row.completion.row, row.completion.sample))
        self._write_part(self._layout.part(self._next_part), self._columns.table(rows))
        self._next_part += 1
        self.parts_written += 1
        self.rows_written += len({row.completion.row for row in rows})

    def finish(self) -> None:
        """Writes the rest, and makes the output of the parts: one file, or a folder in which each row stands once."""
        self.flush()
        layout, schema = self._layout, self._columns.schema
        sources = layout.sources()
        try:
            if layout.kind == "parquet":
                merge_to_parquet(self._files, sources, layout.output, schema, layout.parts)
            elif layout.kind == "jsonl":
                merge_to_lines(self._files, sources, layout.output, schema, layout.parts, self._to_lines)
            else:
                self._clean_folder(sources)
        except OSError as error:
            raise self._error(layout.output, error) from error

    def discard_parts(self) -> None:
        """Removes the parts that a single Parquet output was made of, once the manifest says that it holds them. Other
        outputs need theirs: a run that goes on reads them."""
        if self._layout.kind != "parquet":
            return
        try:
            for part in self._layout.finished_parts():
                self._files.remove(part)
        except OSError as error:
            raise self._error(self._layout.parts, error) from error

    def _clean_folder(self, parts: Sequence[Path]) -> None:
        """Take rows out of parts that newer ones have too; and a folder of no rows still has a file that says so."""
        for path, rows in find_superseded(parts).items():
            with naming_parts():
                table = pq.read_table(path)
            kept = table.filter(pa.array(~np.isin(table["row"].to_numpy(), rows)))
            if kept.num_rows:
                self._write_part(path, kept)
            else:
                self._files.remove(path)
        if not parts:
            self._write_part(self._layout.part(self._next_part), self._columns.schema.empty_table())

    def _write_part(self, path: Path, table: pa.Table) -> None:
        if self._before_part is not None:
            self._before_part()
        # In memory first: a part is small, and the file is then written in one piece.
        buffer = pa.BufferOutputStream()
        pq.write_table(
            table,
            buffer,
            compression=COMPRESSION,
            row_group_size=max(table.num_rows, 1),
            write_page_checksum=True,
        )
        try:
            with replace_file(self._files, path) as file:
                file.write(buffer.getvalue())
        except OSError as error:
            raise self._error(path, error) from error

    def _error(self, path: Path, error: OSError) -> PagedgenError:
        return write_error(path, error, "then run the same command again: it goes on after what is finished")


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
        if _NUMBERS.issuperset(map(type, value)):  # a prompt's token ids, say
            return 8 + 8 * len(value)
        return 8 + sum(map(_value_size, value))
    return 8
