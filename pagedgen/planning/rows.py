"""The rows of an input that a plan looks at, all of a few thousand or a sample, and how many there are."""

import bisect
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pagedgen.data.columns import identifier
from pagedgen.data.readers import InputSource
from pagedgen.data.streams import Progress, compression_of, numbered_lines, open_stream
from pagedgen.data.text_formats import RawRow, json_rows, text_rows
from pagedgen.request import PromptRecord

# Rows that a plan looks at, and bytes of files in which it looks for them. An input of twice as many is read whole.
MOST_ROWS, MOST_BYTES = 4096, 64 << 20
# A sample is taken at so many places.
PLACES = 64
# Lines of files up to this size are counted, which takes a second or two.
COUNTED_BYTES = 512 << 20
# Rows of other inputs past the sample are counted for so many seconds at most.
_COUNT_SECONDS, _COUNT_AT_A_TIME = 2.0, 4096
_LINE_KINDS = {".jsonl": json_rows, ".ndjson": json_rows, ".txt": text_rows}


@dataclass(frozen=True, slots=True)
class RowSample:
    """records: the rows to look at. total: the rows of the input, and what kind of number that is. how: which rows they
    are, in words; None when they are all there is."""

    records: list[PromptRecord]
    total: int
    kind: Literal["exact", "estimate", "at least"] = "exact"
    how: str | None = None


def sample_rows(source: InputSource, most: int = MOST_ROWS) -> RowSample:
    """Raises PagedgenError when a file turns out to be truncated or corrupt."""
    rows = iter(source)
    records: list[PromptRecord] = []
    read = 0  # bytes, up to the last row that is looked at
    for record in itertools.islice(rows, 2 * most):
        records.append(record)
        if len(records) <= most:
            read = source.bytes_read
        if (source.total_bytes is not None and source.bytes_read > MOST_BYTES) and len(records) >= PLACES:
            break
    if next(rows, None) is None:
        return RowSample(records, len(records))
    seen = len(records) + 1
    del records[most:]
    first = f"the first {len(records):,} rows"
    if source.total is not None:
        return RowSample(records, source.total, "exact", first)
    if (spread := _spread(source, most, max(1, read // len(records)))) is not None:
        return spread
    counted, is_all = _count(rows)
    total = seen + counted
    if is_all:
        return RowSample(records, total, "exact", first)
    if not source.total_bytes:
        return RowSample(records, total, "at least", first)
    return RowSample(records, round(total * source.total_bytes / max(1, source.bytes_read)), "estimate", first)


def _count(rows: Iterator[PromptRecord]) -> tuple[int, bool]:
    """The rows that follow, and whether that is all of them."""
    until, count = time.monotonic() + _COUNT_SECONDS, 0
    for count, _ in enumerate(rows, start=1):
        if count % _COUNT_AT_A_TIME == 0 and time.monotonic() > until:
            return count, False
    return count, True


def _count_lines(files: Sequence[Path]) -> int:
    """The rows of files of lines."""
    count = 0
    for path in files:
        with open_stream(path, Progress(0)) as stream:
            count += sum(1 for _ in numbered_lines(stream))
    return count


def _spread(source: InputSource, most: int, row_bytes: int) -> RowSample | None:
    """Rows at places spread evenly over files of lines, about `most`; None for files of other kinds. row_bytes: of the
    first ones; where others turn out to be longer, it is done again."""
    files, size = source.files, source.total_bytes
    if not size or any(path.suffix.lower() not in _LINE_KINDS or compression_of(path) for path in files):
        return None
    records, taken = _at_places(files, size, min(MOST_BYTES, row_bytes * most))
    if len(records) < most // 2:
        records, taken = _at_places(files, size, min(MOST_BYTES, taken * most // len(records)))
    how = f"{len(records):,} rows at {PLACES} places of the input"
    if size <= COUNTED_BYTES:
        return RowSample(records, _count_lines(files), "exact", how)
    return RowSample(records, round(size * len(records) / taken), "estimate", how)


def _at_places(files: Sequence[Path], size: int, wanted: int) -> tuple[list[PromptRecord], int]:
    """About `wanted` bytes of rows, and how many they are. Each place gives the same number of bytes, and not of rows,
    else long rows would count for too much, and none of what the next one begins with."""
    ends = list(itertools.accumulate(path.stat().st_size for path in files))
    records: list[PromptRecord] = []
    taken = 0
    for place in range(PLACES):
        position, following = (size * i // PLACES for i in (place, place + 1))
        index = bisect.bisect_right(ends, position)
        start = position - (ends[index - 1] if index else 0)
        rows, length = _rows_at(files[index], start, min(-(-wanted // PLACES), following - position))
        records += [
            _record(raw, f"{files[index].name} past byte {start:,}", len(records) + i) for i, raw in enumerate(rows)
        ]
        taken += length
    return records, taken


def _rows_at(path: Path, position: int, wanted: int) -> tuple[list[RawRow], int]:
    """The rows of the lines that begin within the `wanted` bytes from a position, and how many bytes they take."""
    with open_stream(path, Progress(0)) as stream:
        if position:
            stream.seek(position - 1)
            stream.readline()
        begin = stream.tell()
        if begin >= position + wanted:
            return [], 0
        rows = []
        for row in _LINE_KINDS[path.suffix.lower()](numbered_lines(stream)):
            rows.append(row)
            if stream.tell() >= position + wanted:
                break
        return rows, stream.tell() - begin


def _record(raw: RawRow, where: str, row: int) -> PromptRecord:
    if raw.error is not None:
        return PromptRecord(row, str(row), {}, where, f"{where} {raw.error}")
    return PromptRecord(row, identifier(raw.columns, row), raw.columns, where)
