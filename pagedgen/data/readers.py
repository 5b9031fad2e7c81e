"""The input: `open_input` finds the files or the dataset, and the `InputSource` it returns streams their rows."""

import io
import itertools
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from importlib.resources import files as package_files
from pathlib import Path
from typing import BinaryIO, Protocol, cast

import pyarrow as pa

from pagedgen.config import InputConfig
from pagedgen.data.columns import ColumnInference, identifier, merge_schemas
from pagedgen.data.discover import find_files, stem_of
from pagedgen.data.fingerprint import Change, InputFingerprint, compare_files, fingerprint_files, fingerprint_head
from pagedgen.data.hub import DatasetRows
from pagedgen.data.json_document import document_rows
from pagedgen.data.streams import buffered, naming_file, numbered_lines, skip_byte_order_mark
from pagedgen.data.text_formats import SAMPLE_ROWS, RawRow, RowFile, json_rows, parse_object, text_rows
from pagedgen.errors import UsageError
from pagedgen.request import PromptRecord

_MIN_SAMPLE_ROWS = 20
COMPRESSED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd")  # how gzip and Zstandard begin


class RowSource(Protocol):
    """What holds rows: a file, a stream, a dataset. See `RowFile`."""

    name: str
    unit: str
    total: int | None

    def rows(self) -> Iterator[RawRow]: ...


class SampledSource(RowSource, Protocol):
    """What is no file; it can be told by its first rows."""

    def head(self) -> Sequence[RawRow]:
        """The first `SAMPLE_ROWS` rows, or all that there are; they are not used up."""
        ...


class InputSource:
    """The rows of an input, streamed; memory does not depend on how many there are.

    stem: what the default output is named after. description: the input in words. columns: those known before the run,
    with their types; a row may bring others. total: the number of rows where that is known, else None.
    files: the files it reads. Files can be iterated more than once, a stream once.
    """

    def __init__(
        self,
        sources: Iterable[RowFile | SampledSource],
        columns: pa.Schema,
        *,
        stem: str,
        description: str,
    ) -> None:
        self._sources = tuple(sources)
        self.columns = columns
        self.stem = stem
        self.description = description
        self.files = tuple(source.path for source in self._sources if isinstance(source, RowFile))
        totals = [source.total for source in self._sources]
        self.total = None if None in totals else sum(total or 0 for total in totals)
        self.rows_read = 0

    @property
    def total_bytes(self) -> int | None:
        """The size of the files, as they are on the disk, or None for streams and datasets."""
        sizes = [source.progress.size for source in self._sources if isinstance(source, RowFile)]
        return sum(sizes) if len(sizes) == len(self._sources) else None

    @property
    def bytes_read(self) -> int:
        """How much of `total_bytes` has been read."""
        return sum(source.progress.bytes_read for source in self._sources if isinstance(source, RowFile))

    def fingerprint(self) -> InputFingerprint:
        """What the input holds now: of files all of it, else the first rows. Raises PagedgenError for a file that
        cannot be read."""
        if self.files:
            return fingerprint_files(self._named_files)
        return fingerprint_head(row.columns for row in self._head())

    def change_since(self, old: InputFingerprint, now: InputFingerprint) -> Change | str:
        """Whether the rows of a fingerprint are still there, at the same places: "same", "grown" when others came after
        them, else what is different, in words. now: the present fingerprint; only what grew is read once more. Raises
        PagedgenError for a file that cannot be read."""
        if bool(old.files) != bool(self.files):
            return "the input is of another kind"
        if self.files:
            return compare_files(old.files, now.files, self.files)
        if fingerprint_head(row.columns for row in self._head()[: old.head_rows]) != old:
            return f"the first rows of {self.description} have changed"
        return "grown"  # its end is not known before it has been read

    @property
    def _named_files(self) -> list[tuple[str, Path]]:
        return [(source.name, source.path) for source in self._sources if isinstance(source, RowFile)]

    def _head(self) -> list[RawRow]:
        return [row for source in self._sources if not isinstance(source, RowFile) for row in source.head()]

    def __iter__(self) -> Iterator[PromptRecord]:
        """Raises PagedgenError when a file turns out to be truncated or corrupt."""
        row = 0
        for source in self._sources:
            place_name = f"{source.name} {source.unit} "
            for columns, place, error in source.rows():
                where = f"{place_name}{place}"
                if error is None:
                    yield PromptRecord(row, identifier(columns, row), columns, where)
                else:
                    yield PromptRecord(row, str(row), {}, where, f"{where} {error}")
                row += 1
                self.rows_read = row


def open_input(config: InputConfig, *, stdin: BinaryIO | None = None) -> InputSource:
    """Finds the input, checks that it can be read and has a row, and learns its columns.

    stdin: what the path `-` reads. Raises UsageError when the input cannot be found or is empty, PagedgenError when it
    is corrupt at its beginning.
    """
    if (config.path is None) == (config.dataset is None):
        raise UsageError(
            "--config and --split belong to --dataset, which names none"
            if config.path is None
            else "there is an input path and a --dataset; give one of them"
        )
    if config.dataset is not None:
        return _open_dataset(config)
    if config.dataset_config is not None or config.split is not None:
        raise UsageError("--config and --split belong to --dataset; leave them out with an input path")
    path = cast(str, config.path)
    if path == "-":
        if stdin is None:
            raise UsageError("there is nothing on standard input; pipe the prompts in, or give a path")
        return _open_stream(stdin, "stdin", "stdin")
    if _is_pipe(path):
        with naming_file(Path(path)):
            return _open_stream(open(path, "rb"), Path(path).name, path)
    return _open_files(path, stem_of(path), path)


def open_bundled_prompts() -> InputSource:
    """The sample prompts that come with pagedgen, for when there is no input at all."""
    path = package_files("pagedgen.sample_prompts").joinpath("prompts.jsonl")
    return _open_files(str(path), "sample_prompts", "the bundled sample prompts")


def _open_files(path: str, stem: str, description: str) -> InputSource:
    files = find_files(path)
    sample = max(_MIN_SAMPLE_ROWS, SAMPLE_ROWS // max(len(files), 1))
    columns = merge_schemas([file.columns(sample) for file in files])
    if all(file.total == 0 for file in files):
        raise UsageError(f"{path} has no rows; give an input with at least one row")
    return InputSource(files, columns, stem=stem, description=description)


def _open_dataset(config: InputConfig) -> InputSource:
    dataset = DatasetRows(config)
    columns = dataset.columns(SAMPLE_ROWS)
    if next(iter(dataset.rows()), None) is None:
        raise UsageError(f"split '{dataset.split}' of dataset {config.dataset} has no rows; choose another")
    stem = Path(dataset.name).name or "dataset"
    return InputSource([dataset], columns, stem=stem, description=f"dataset {dataset.name} ({dataset.split})")


def _is_pipe(path: str) -> bool:
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)


class _Stream:
    """A stream that is read once: the rows that were sampled, then the rest."""

    def __init__(self, name: str, unit: str, rows: Iterator[RawRow]) -> None:
        self.name = name
        self.unit = unit
        self._rest = rows
        self._is_read = False
        self._head = list(itertools.islice(rows, SAMPLE_ROWS))
        self.total = len(self._head) if len(self._head) < SAMPLE_ROWS else None

    def columns(self) -> pa.Schema:
        inference = ColumnInference()
        for row in self._head:
            inference.add(row.columns)
        return inference.schema()

    def head(self) -> Sequence[RawRow]:
        assert not self._is_read, "the first rows are gone"
        return self._head

    def rows(self) -> Iterator[RawRow]:
        self._is_read = True
        head, self._head = self._head, []
        return itertools.chain(head, self._rest)


def _open_stream(file: BinaryIO, name: str, description: str) -> InputSource:
    stream = buffered(file)
    skip_byte_order_mark(stream, description)
    lines = numbered_lines(stream)
    first = next(lines, None)
    if first is None:
        raise UsageError(f"{description} is empty; give at least one prompt")
    if (first[1] or b"").startswith(COMPRESSED):
        raise UsageError(f"{description} is compressed; decompress it on the way, like `zcat FILE.gz | pagedgen run`")
    start = (first[1] or b"").lstrip()
    lines = itertools.chain([first], lines)
    if start == b"{" or re.match(rb"\[\s*(\{|$)", start):
        # A document and not lines: put the first line back in front.
        document = buffered(_Prefixed(start + b"\n", stream))
        source = _Stream(name, "item", document_rows(document, description))
    elif start.startswith(b'{"') or parse_object(start.decode("utf-8", "replace"))[1] is None:
        source = _Stream(name, "line", json_rows(lines))
    else:
        source = _Stream(name, "line", text_rows(lines))
    if source.total == 0:
        raise UsageError(f"{description} has no rows; give at least one prompt")
    return InputSource([source], source.columns(), stem=Path(name).stem, description=description)


class _Prefixed(io.RawIOBase):
    """Some bytes, then a stream."""

    def __init__(self, prefix: bytes, stream: io.BufferedReader) -> None:
        self._prefix = prefix
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = self._prefix[: len(buffer)] or self._stream.read1(len(buffer))
        self._prefix = self._prefix[len(data) :]
        buffer[: len(data)] = data
        return len(data)
