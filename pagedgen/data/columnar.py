"""Parquet and Arrow IPC files, batch by batch."""

import io
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pagedgen.data.columns import plain_type
from pagedgen.data.streams import Progress, compression_of, first_line, naming_file, open_stream
from pagedgen.data.text_formats import RawRow, RowFile
from pagedgen.errors import PagedgenError

_BATCH_ROWS = 512
_ARROW_FILE_MAGIC = b"ARROW1\0\0"


class ParquetFile(RowFile):
    """`.parquet`; a compressed one is unpacked to a temporary file first, as Parquet is read from its end."""

    unit = "record"

    def __init__(self, path: Path, name: str) -> None:
        super().__init__(path, name)
        with self._open() as file:
            self._schema = plain_schema(file.schema_arrow, path)
            self.total = file.metadata.num_rows

    def columns(self, sample_rows: int) -> pa.Schema:
        return self._schema

    def rows(self) -> Iterator[RawRow]:
        done = 0
        self.progress.follow(lambda: self.progress.size * done // max(self.total or 0, 1))
        with self._open() as file:
            for group in range(file.num_row_groups):  # some nested columns cannot be read across two of them
                for batch in file.iter_batches(batch_size=_BATCH_ROWS, row_groups=[group]):
                    yield from batch_rows(batch, done)
                    done += batch.num_rows
        self.progress.finish()

    @contextmanager
    def _open(self) -> Iterator[pq.ParquetFile]:
        with naming_file(self.path):
            # Small buffers, so that a row group of any size is never held whole.
            if compression_of(self.path) is None:
                with pq.ParquetFile(self.path, buffer_size=1 << 16, pre_buffer=False) as file:
                    yield file
                return
            with open_stream(self.path, Progress(0)) as packed, tempfile.TemporaryFile() as unpacked:
                shutil.copyfileobj(packed, unpacked, 1 << 20)
                with pq.ParquetFile(unpacked, pre_buffer=False) as file:
                    yield file


class ArrowFile(RowFile):
    """`.arrow`: Arrow IPC, the stream and the file format, which is a stream between a magic number and a footer."""

    unit = "record"

    def __init__(self, path: Path, name: str) -> None:
        super().__init__(path, name)
        with self._open() as (reader, _, _):
            self._schema = plain_schema(reader.schema, path)

    def columns(self, sample_rows: int) -> pa.Schema:
        return self._schema

    def rows(self) -> Iterator[RawRow]:
        done = 0
        with self._open() as (reader, stream, is_file):
            for batch in reader:
                yield from batch_rows(batch, done)
                done += batch.num_rows
            # A file cut off between two batches looks like a stream that ends.
            if is_file and not stream.read().endswith(_ARROW_FILE_MAGIC.rstrip(b"\0")):
                raise EOFError("it has no footer")

    @contextmanager
    def _open(self) -> Iterator[tuple[pa.RecordBatchReader, io.BufferedReader, bool]]:
        with open_stream(self.path, self.progress) as stream:
            is_file = stream.peek(len(_ARROW_FILE_MAGIC)).startswith(_ARROW_FILE_MAGIC)
            if is_file:
                stream.read(len(_ARROW_FILE_MAGIC))
            with pa.ipc.open_stream(stream) as reader:
                yield reader, stream, is_file


def plain_schema(schema: pa.Schema, path: Path | str) -> pa.Schema:
    """The columns of a file without encodings and metadata; raises PagedgenError when two have one name."""
    repeated = next((name for name in schema.names if schema.names.count(name) > 1), None)
    if repeated is not None:
        raise PagedgenError(f"{path} has two columns named {repeated!r}; rename one of them")
    return pa.schema([(field.name, plain_type(field.type)) for field in schema])


def batch_rows(batch: pa.RecordBatch, first: int) -> Iterator[RawRow]:
    """The rows of a batch that begins at record `first`, from 0."""
    for start in range(0, batch.num_rows, _BATCH_ROWS):
        part = batch.slice(start, _BATCH_ROWS)
        for number, columns, error in _values(part):
            yield RawRow(columns, first + start + number + 1, error)


def _values(batch: pa.RecordBatch) -> Iterable[tuple[int, dict[str, Any], str | None]]:
    try:
        return [(number, columns, None) for number, columns in enumerate(batch.to_pylist())]
    except (ValueError, OverflowError, pa.ArrowException):  # overflow: a date that Python does not have
        return (_value(batch, number) for number in range(batch.num_rows))


def _value(batch: pa.RecordBatch, number: int) -> tuple[int, dict[str, Any], str | None]:
    try:
        return number, batch.slice(number, 1).to_pylist()[0], None
    except UnicodeDecodeError:
        return number, {}, "holds text that is not valid UTF-8"
    except (ValueError, OverflowError, pa.ArrowException) as error:
        return number, {}, f"holds a value that cannot be read: {first_line(error)}"
