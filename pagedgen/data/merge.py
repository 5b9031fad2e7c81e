"""From parts in the order rows finished to one file in input order: an external merge (Knuth, TAOCP 3, 5.4).

Each part is sorted by (row, sample). Parts mostly follow each other, so one is opened only when the merge reaches its
first row. Where more than `FAN_IN` overlap, groups of them are merged into longer ones first: memory and open files are
bounded whatever the order. Where a row stands in several parts, as after a retry, the newest one counts.
"""

import heapq
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pagedgen.data.columns import is_json_field, to_json
from pagedgen.data.files import FileLayer, replace_file
from pagedgen.data.finished import find_superseded, naming_parts

FAN_IN = 32
BATCH_ROWS = 1024
GROUP_ROWS = 16384
GROUP_BYTES = 32 << 20
COMPRESSION = "zstd"

Key = tuple[int, int]
ToLines = Callable[[Iterable[pa.Table]], Iterator[str]]


@dataclass(frozen=True, slots=True)
class _Part:
    """A sorted file whose column 0, `row`, goes from `first` to `last`. superseded: rows to leave out, sorted."""

    path: Path
    first: int
    last: int
    superseded: NDArray[np.int64] | None = None


def merge_to_parquet(files: FileLayer, parts: Sequence[Path], target: Path, schema: pa.Schema, scratch: Path) -> None:
    """Merges sorted parts, the oldest first, into one Parquet file. scratch: folder for intermediate files. Raises
    OSError, and PagedgenError for a part that is damaged."""
    with replace_file(files, target) as file:
        _write_parquet(file, _merged(files, parts, schema, scratch), schema)


def merge_to_lines(
    files: FileLayer, parts: Sequence[Path], target: Path, schema: pa.Schema, scratch: Path, to_lines: ToLines
) -> None:
    """Merges sorted parts, the oldest first, into a text file. to_lines: makes its lines from the merged tables. Raises
    OSError, and PagedgenError for a part that is damaged."""
    with replace_file(files, target) as file:
        for line in to_lines(_merged(files, parts, schema, scratch)):
            file.write(line.encode())


def json_lines(tables: Iterable[pa.Table]) -> Iterator[str]:
    """Each row as one JSON object on a line, in column order. Columns kept as JSON text become JSON values again; NaN
    and infinities become null."""
    for table in tables:
        yield "".join(to_json(row) + "\n" for row in plain_rows(table))


def plain_rows(table: pa.Table) -> Iterator[dict[str, Any]]:
    """The rows as Python values, those of JSON columns parsed."""
    names = table.schema.names
    columns = [
        _parsed(column.to_pylist()) if is_json_field(field) else column.to_pylist()
        for field, column in zip(table.schema, table.columns, strict=True)
    ]
    for values in zip(*columns, strict=True):
        yield dict(zip(names, values, strict=True))


def _parsed(values: list[str | None]) -> list[Any]:
    return [None if value is None else json.loads(value) for value in values]


def _write_parquet(file: BinaryIO, tables: Iterator[pa.Table], schema: pa.Schema) -> None:
    writer = pq.ParquetWriter(file, schema, compression=COMPRESSION, write_page_checksum=True)
    pending: list[pa.Table] = []
    rows = size = 0
    for table in tables:
        pending.append(table)
        rows, size = rows + table.num_rows, size + table.nbytes
        if rows >= GROUP_ROWS or size >= GROUP_BYTES:
            writer.write_table(pa.concat_tables(pending), row_group_size=rows)
            pending, rows, size = [], 0, 0
    if pending:
        writer.write_table(pa.concat_tables(pending), row_group_size=rows)
    writer.close()


def _merged(files: FileLayer, paths: Sequence[Path], schema: pa.Schema, scratch: Path) -> Iterator[pa.Table]:
    superseded = find_superseded(paths)
    with naming_parts():
        inspected = [part for path in paths if (part := _inspect(path, superseded.get(path)))]
    parts = sorted(inspected, key=lambda part: part.first)
    made: list[Path] = []
    while _depth(parts) > FAN_IN:
        groups = [parts[start : start + FAN_IN] for start in range(0, len(parts), FAN_IN)]
        parts = []
        for group in groups:
            path = scratch / f"merge-{len(made):05d}.parquet"
            with replace_file(files, path) as file:
                _write_parquet(file, _merge(group), schema)
            made.append(path)
            parts.append(_Part(path, group[0].first, max(part.last for part in group)))
    yield from _merge(parts)
    for path in made:
        files.remove(path)


def _inspect(path: Path, superseded: NDArray[np.int64] | None) -> _Part | None:
    """The part's range of rows; None when it has no rows."""
    with pq.ParquetFile(path) as file:
        metadata = file.metadata
        groups = [metadata.row_group(group).column(0).statistics for group in range(metadata.num_row_groups)]
    bounds = [group for group in groups if group is not None and group.has_min_max]
    if not bounds:
        return None
    return _Part(path, min(b.min for b in bounds), max(b.max for b in bounds), superseded)


def _depth(parts: Sequence[_Part]) -> int:
    """The most parts that are open at one time when they are merged in order of their first rows."""
    open_until: list[int] = []
    depth = 0
    for part in parts:
        while open_until and open_until[0] < part.first:
            heapq.heappop(open_until)
        heapq.heappush(open_until, part.last)
        depth = max(depth, len(open_until))
    return depth


class _Cursor:
    """An open part and the rows of it that are not merged yet."""

    def __init__(self, part: _Part) -> None:
        self._superseded = part.superseded
        self._file = pq.ParquetFile(part.path, page_checksum_verification=True, buffer_size=1 << 16, pre_buffer=False)
        self._batches: Iterator[pa.RecordBatch] = self._file.iter_batches(batch_size=BATCH_ROWS)
        self._batch = pa.Table.from_batches([], self._file.schema_arrow)
        self._rows: NDArray[np.int64] = np.empty(0, np.int64)
        self._samples: NDArray[np.int32] = np.empty(0, np.int32)
        self.advance()

    def advance(self) -> bool:
        """Loads the next batch that has rows; False, and the file is closed, when there is none."""
        with naming_parts():
            batch = next((batch for batch in map(self._kept, self._batches) if batch.num_rows), None)
        if batch is None:
            self._file.close()
            return False
        self._batch = pa.Table.from_batches([batch])
        self._rows, self._samples = batch.column("row").to_numpy(), batch.column("sample").to_numpy()
        return True

    def _kept(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if self._superseded is None:
            return batch
        return batch.filter(pa.array(~np.isin(batch.column("row").to_numpy(), self._superseded)))

    @property
    def last(self) -> Key:
        return int(self._rows[-1]), int(self._samples[-1])

    def take_until(self, key: Key) -> pa.Table:
        """The rows up to and including `key`, which are not seen again."""
        row, sample = key
        count = int(np.count_nonzero((self._rows < row) | ((self._rows == row) & (self._samples <= sample))))
        taken = self._batch.slice(0, count)
        self._batch, self._rows, self._samples = self._batch.slice(count), self._rows[count:], self._samples[count:]
        return taken

    @property
    def is_empty(self) -> bool:
        return len(self._rows) == 0


def _merge(parts: Sequence[_Part]) -> Iterator[pa.Table]:
    """Merges in pieces: whatever is loaded and cannot be preceded by a row that is not, sorted together.

    The piece ends at the smallest last key of the loaded batches, so each piece uses up at least one batch.
    """
    waiting = list(reversed(parts))
    cursors: list[_Cursor] = []
    while waiting or cursors:
        if not cursors:
            cursors += _opened(waiting.pop())
            continue
        limit = min(cursor.last for cursor in cursors)
        while waiting and (waiting[-1].first, 0) <= limit:
            cursors += _opened(waiting.pop())
            limit = min(limit, cursors[-1].last)
        yield _sorted([cursor.take_until(limit) for cursor in cursors])
        cursors = [cursor for cursor in cursors if not cursor.is_empty or cursor.advance()]


def _opened(part: _Part) -> list[_Cursor]:
    """The part's cursor, unless all its rows are superseded."""
    with naming_parts():
        cursor = _Cursor(part)
    return [] if cursor.is_empty else [cursor]


def _sorted(tables: Sequence[pa.Table]) -> pa.Table:
    tables = [table for table in tables if table.num_rows]
    if len(tables) == 1:
        return tables[0]
    table = pa.concat_tables(tables)
    return table.sort_by([("row", "ascending"), ("sample", "ascending")])
