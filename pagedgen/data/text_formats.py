"""JSON lines, CSV and TSV, and plain text: files that hold one row a line, or nearly.

A row that cannot be used (a line that is not JSON, a record with the wrong number of fields, bytes that are not UTF-8)
is a row with an error, never the end of the run. Lines of nothing but whitespace are no rows.
"""

import csv
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from pagedgen.data.columns import ColumnInference
from pagedgen.data.streams import MAX_LINE_BYTES, Line, Progress, is_encodable, numbered_lines, open_stream
from pagedgen.errors import PagedgenError

MAX_DEPTH = 100
"""The deepest nesting of lists and objects in a row; deeper values cannot be handled safely by recursion."""
_JSON_NAMES = {list: "array", str: "string", bool: "boolean", int: "number", float: "number", type(None): "null"}


class RawRow(NamedTuple):
    """A row as its format gives it. place: the line or record it begins at, from 1. error: why it cannot be used, to
    be read after the place, like `is not valid JSON`; its columns are then empty."""

    columns: dict[str, Any]
    place: int
    error: str | None


class RowFile:
    """One file of rows. `rows()` reads it from the start; `unit` is what its places count.

    name: what to call it in errors. total: how many rows it has where that is known, else None.
    """

    unit = "line"

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        self.name = name
        self.progress = Progress(path.stat().st_size)
        self.total: int | None = None

    def rows(self) -> Iterator[RawRow]:
        raise NotImplementedError

    def columns(self, sample_rows: int) -> pa.Schema:
        """The columns, known from the file or inferred from its first rows; sets `total` if that was all of it."""
        return sample_columns(self, sample_rows)


SAMPLE_ROWS, SAMPLE_BYTES = 1000, 16 << 20


def sample_columns(source: RowFile, sample_rows: int) -> pa.Schema:
    """Infers the columns from up to `sample_rows` rows, fewer when they are large; sets `total` if that is all."""
    inference = ColumnInference()
    source.total = 0
    for row in source.rows():
        if source.total == sample_rows or (source.total and source.progress.bytes_read > SAMPLE_BYTES):
            source.total = None
            break
        inference.add(row.columns)
        source.total += 1
    source.progress.restart()
    return inference.schema()


class JsonLinesFile(RowFile):
    """`.jsonl`, `.ndjson`: one JSON object a line."""

    def rows(self) -> Iterator[RawRow]:
        with open_stream(self.path, self.progress) as stream:
            yield from json_rows(numbered_lines(stream))


class TextFile(RowFile):
    """`.txt`: one prompt a line."""

    def rows(self) -> Iterator[RawRow]:
        with open_stream(self.path, self.progress) as stream:
            yield from text_rows(numbered_lines(stream))

    def columns(self, sample_rows: int) -> pa.Schema:
        sample_columns(self, sample_rows)
        # An empty file beside others must not make it look as if they had prompts.
        return pa.schema([] if self.total == 0 else [("prompt", pa.string())])


class CsvFile(RowFile):
    """`.csv`, `.tsv`: a header, then records whose values are text. Quoted values may hold line breaks."""

    def __init__(self, path: Path, name: str, delimiter: str) -> None:
        super().__init__(path, name)
        self._delimiter = delimiter

    def rows(self) -> Iterator[RawRow]:
        with open_stream(self.path, self.progress) as stream:
            yield from csv_rows(stream, self._delimiter, self.path)

    def columns(self, sample_rows: int) -> pa.Schema:
        sample_columns(self, sample_rows)
        with open_stream(self.path, Progress(0)) as stream:
            reader = _csv_reader(stream, self._delimiter)
            return pa.schema([(name, pa.string()) for name in _header(reader, self.path)])


def json_rows(lines: Iterator[Line]) -> Iterator[RawRow]:
    for number, line in lines:
        if line is None:
            yield RawRow({}, number, _TOO_LONG)
            continue
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            yield RawRow({}, number, _not_utf8(error))
            continue
        columns, problem = parse_object(text)
        yield RawRow(columns, number, problem)


def text_rows(lines: Iterator[Line]) -> Iterator[RawRow]:
    for number, line in lines:
        if line is None:
            yield RawRow({}, number, _TOO_LONG)
            continue
        try:
            yield RawRow({"prompt": line.decode()}, number, None)
        except UnicodeDecodeError as error:
            yield RawRow({}, number, _not_utf8(error))


_TOO_LONG = f"is longer than {MAX_LINE_BYTES >> 20} MiB"
_decode_json: Callable[[str], Any] = json.JSONDecoder().decode


def parse_object(text: str) -> tuple[dict[str, Any], str | None]:
    """Parses one JSON object: (columns, None), or ({}, what is wrong with it).

    As most parsers do, the last of a repeated key wins, and NaN and Infinity are taken as numbers.
    """
    try:
        value = _decode_json(text)
    except json.JSONDecodeError as error:
        message = error.msg.removesuffix(" at")
        return {}, f"is not valid JSON: {message} at column {error.colno}"
    except ValueError:
        return {}, "holds a number with too many digits"
    except RecursionError:
        return {}, f"is nested more than {MAX_DEPTH} levels deep"
    return check_object(value, text)


def check_object(value: Any, text: str) -> tuple[dict[str, Any], str | None]:
    """(value, None) when `value`, parsed from `text`, can be a row, else ({}, what is wrong with it)."""
    if type(value) is not dict:
        return {}, f"is not a JSON object but a JSON {_JSON_NAMES[type(value)]}"
    if text.count("{") + text.count("[") > MAX_DEPTH and _is_too_deep(value):
        return {}, f"is nested more than {MAX_DEPTH} levels deep"
    return value, None


def _is_too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        containers = [item for item in level if isinstance(item, dict | list)]
        if not containers:
            return False
        level = [child for item in containers for child in (item.values() if isinstance(item, dict) else item)]
    return True


def csv_rows(stream: io.BufferedReader, delimiter: str, path: Path) -> Iterator[RawRow]:
    """The records after the header. Raises PagedgenError when the header itself cannot be used."""
    reader = _csv_reader(stream, delimiter)
    header = _header(reader, path)
    width = len(header)
    while True:
        place = reader.line_num + 1
        try:
            values = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            reason = f"is not valid CSV: {error}"
            if reader.line_num > place:  # a quote that never closes takes all that follows with it
                reason += f"; a quote was opened on it that takes in the lines up to {reader.line_num}, which are lost"
            yield RawRow({}, place, reason)
            continue
        if not values:
            continue
        if len(values) != width:
            yield RawRow({}, place, f"has {_count(len(values))} where the header has {width}")
        elif not all(map(is_encodable, values)):
            yield RawRow({}, place, "is not valid UTF-8")
        else:
            yield RawRow(dict(zip(header, values, strict=True)), place, None)


def _csv_reader(stream: io.BufferedReader, delimiter: str) -> Any:
    # A process-wide limit of the csv module; its default of 128 KiB refuses long prompts.
    csv.field_size_limit(MAX_LINE_BYTES)
    # Bytes that are not UTF-8 become lone surrogates here, which no valid file can hold, and are found row by row.
    text = io.TextIOWrapper(stream, encoding="utf-8", errors="surrogateescape", newline="")
    # strict: without it an open quote silently swallows the rest of the file into one value.
    return csv.reader(text, delimiter=delimiter, strict=True)


def _header(reader: Any, path: Path) -> list[str]:
    try:
        header: list[str] = next((values for values in reader if values), [])
    except csv.Error as error:
        raise PagedgenError(f"the header of {path} is not valid CSV ({error}); mend it") from error
    if not all(map(is_encodable, header)):
        raise PagedgenError(f"the header of {path} is not valid UTF-8; save the file as UTF-8")
    names = [name or f"column_{number}" for number, name in enumerate(header, start=1)]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise PagedgenError(f"{path} has two columns named {repeated!r}; rename one of them")
    return names


def _count(fields: int) -> str:
    return "1 field" if fields == 1 else f"{fields} fields"


def _not_utf8(error: UnicodeDecodeError) -> str:
    return f"is not valid UTF-8: byte 0x{error.object[error.start]:02x} at position {error.start + 1}"
