"""Byte streams of the text formats: decompressed, without a byte order mark, line by line, with their progress."""

import codecs
import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

import pyarrow as pa

from pagedgen.errors import PagedgenError

COMPRESSIONS = (".gz", ".zst")
BUFFER_BYTES = 1 << 18
MAX_LINE_BYTES = 64 << 20
"""The longest line (or JSON array item) that is read; beyond it the file is taken to be something else."""


class CountingFile(io.RawIOBase):
    """A raw binary file that knows how many bytes were read from it; what is decompressed cannot tell."""

    def __init__(self, raw: io.RawIOBase) -> None:
        self._raw = raw
        self.count = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int | None:  # type: ignore[override]
        count = self._raw.readinto(buffer)
        self.count += count or 0
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


class Progress:
    """How far a file has been read, in bytes of the file; `size` when it is finished. Another thread may ask."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._position: Callable[[], int] = lambda: 0

    def follow(self, position: Callable[[], int]) -> None:
        self._position = position

    def restart(self) -> None:
        self._position = lambda: 0

    def finish(self) -> None:
        self._position = lambda: self.size

    @property
    def bytes_read(self) -> int:
        try:
            return min(self._position(), self.size)
        except ValueError:  # closed between two calls
            return self.size


def compression_of(path: Path) -> str | None:
    """`.gz`, `.zst` or None, from the name."""
    suffix = path.suffix.lower()
    return suffix if suffix in COMPRESSIONS else None


@contextmanager
def open_stream(path: Path, progress: Progress) -> Iterator[io.BufferedReader]:
    """Opens `path` for reading, decompressed, past a UTF-8 byte order mark.

    Raises PagedgenError naming the file when it cannot be read, is truncated or corrupt, or is UTF-16; also for errors
    that come up while the block reads from the stream.
    """
    with naming_file(path), open(path, "rb", buffering=0) as raw:
        compression = compression_of(path)
        if compression is None:
            stream = buffered(raw)
            progress.follow(stream.tell)
        else:
            counting = CountingFile(raw)
            progress.follow(lambda: counting.count)
            stream = buffered(_decompressed(counting, compression))
        skip_byte_order_mark(stream, str(path))
        yield stream
        progress.finish()


@contextmanager
def naming_file(path: Path) -> Iterator[None]:
    """Turns the errors of a file that is unreadable, truncated or corrupt into a PagedgenError that names it."""
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise PagedgenError(f"{path} is truncated or corrupt ({error}); make it again") from error
    except pa.ArrowException as error:
        raise PagedgenError(f"{path} is truncated or corrupt ({first_line(error)}); make it again") from error
    except OSError as error:
        if error.errno is None:  # pyarrow reports bad compressed data as an OSError
            raise PagedgenError(f"{path} is truncated or corrupt ({first_line(error)}); make it again") from error
        raise PagedgenError(f"{path} cannot be read ({error.strerror}); check the file and its permissions") from error


def first_line(error: BaseException) -> str:
    """The first line of an error's message, without a full stop."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(". ") if lines else type(error).__name__


def buffered(raw: Any) -> io.BufferedReader:
    """A buffer over anything that has `readinto`."""
    return io.BufferedReader(raw, BUFFER_BYTES)


def _decompressed(raw: CountingFile, compression: str) -> Any:
    if compression == ".gz":
        return gzip.GzipFile(fileobj=cast(BinaryIO, raw))
    # pyarrow and not `zstandard`, whose reader takes a truncated frame for the end of the file.
    return pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), "zstd")


def skip_byte_order_mark(stream: io.BufferedReader, name: str) -> None:
    """Moves `stream` past a UTF-8 byte order mark; raises PagedgenError for UTF-16."""
    start = stream.peek(3)[:3]
    if start.startswith(codecs.BOM_UTF8):
        stream.read(3)
    elif start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise PagedgenError(f"{name} is UTF-16 text; save it as UTF-8")


Line = tuple[int, bytes | None]


def numbered_lines(stream: io.BufferedReader) -> Iterator[Line]:
    r"""The lines that hold more than whitespace, with their number from 1 and without `\n` or `\r\n`.

    Lines end at `\n` only: U+2028, form feeds and a lone `\r` are ordinary characters. A line longer than
    `MAX_LINE_BYTES` comes as None, and its bytes are skipped.
    """
    readline, limit = stream.readline, MAX_LINE_BYTES
    number = 0
    while line := readline(limit):
        number += 1
        if len(line) == limit and not line.endswith(b"\n"):
            while line and not line.endswith(b"\n"):
                line = readline(limit)
            yield number, None
            continue
        if not line.isspace():
            yield number, line.rstrip(b"\r\n")


def is_encodable(text: str) -> bool:
    r"""Whether `text` can be written as UTF-8: JSON's `"\ud800"` makes a string that cannot."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def encodable(text: str) -> str:
    r"""`text` with each lone surrogate spelled out, as `\ud800`, so that it can be written as UTF-8."""
    return text if is_encodable(text) else text.encode("utf-8", "backslashreplace").decode()
