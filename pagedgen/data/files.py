"""The few file operations durable output is made of, behind one object.

A file appears under its name only when it is complete and on the disk: it is written to a temporary name in the same
folder, synced, renamed, and the folder is synced. Whoever wants to see what a crash or a full disk does passes another
`FileLayer`.
"""

import errno
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from pagedgen.errors import PagedgenError

TEMPORARY_PREFIX = "."
TEMPORARY_SUFFIX = ".tmp"


class FileLayer:
    """The operations of the real file system; every method raises OSError as the system does."""

    def create(self, path: Path) -> BinaryIO:
        return open(path, "wb")

    def sync(self, file: BinaryIO) -> None:
        """Blocks until what was written to `file` is on the disk."""
        file.flush()
        os.fsync(file.fileno())

    def rename(self, source: Path, target: Path) -> None:
        """Gives `source` the name `target`, replacing what had it, in one step."""
        os.replace(source, target)

    def sync_folder(self, folder: Path) -> None:
        """Blocks until the names in `folder` are on the disk, where the system can do that at all."""
        if os.name == "nt":
            return
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)


@contextmanager
def replace_file(files: FileLayer, path: Path) -> Iterator[BinaryIO]:
    """A file to write that becomes `path` when the block ends; when the block raises, `path` stays as it was."""
    temporary = temporary_path(path)
    try:
        file = files.create(temporary)
        try:
            yield file
            files.sync(file)
        finally:
            # A full disk makes close() fail a second time; the first error is the one to report.
            with suppress(OSError):
                file.close()
        files.rename(temporary, path)
    except BaseException:
        with suppress(OSError):
            files.remove(temporary)
        raise
    files.sync_folder(path.parent)


def write_json(path: Path, values: Mapping[str, Any], files: FileLayer | None = None) -> None:
    """Writes or replaces a small JSON file, atomically. Raises PagedgenError."""
    text = json.dumps(values, indent=2, default=str)
    try:
        with replace_file(files or FileLayer(), path) as file:
            file.write(text.encode() + b"\n")
    except OSError as error:
        raise write_error(path, error, "or choose another -o") from error


def temporary_path(path: Path) -> Path:
    """Where `path` is written until it is complete: hidden, so that no reader of the folder takes it for a part."""
    return path.with_name(f"{TEMPORARY_PREFIX}{path.name}{TEMPORARY_SUFFIX}")


def is_temporary(path: Path) -> bool:
    return path.name.startswith(TEMPORARY_PREFIX) and path.name.endswith(TEMPORARY_SUFFIX)


def write_error(path: Path, error: OSError, next_step: str) -> PagedgenError:
    """The error to raise when `path` cannot be written. next_step: what to do once the cause is removed."""
    remedy = _REMEDIES.get(error.errno or 0, "check the disk")
    return PagedgenError(f"{path} cannot be written ({error.strerror or error}); {remedy}, {next_step}")


_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "make room"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "make it writable"),
    errno.ENOENT: "see that its folder is there",
    errno.ENOTDIR: "check the path",
}
