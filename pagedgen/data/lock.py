"""The lock on a run folder: one process writes to an output at a time, and a process that died holds nothing."""

import os
from pathlib import Path
from types import TracebackType
from typing import Self

from filelock import FileLock, Timeout

from pagedgen.data.files import write_error
from pagedgen.data.manifest import read_manifest
from pagedgen.errors import PagedgenError

LOCK_NAME = "lock"


class RunLock:
    """Holds a run folder's lock while its context lasts; the operating system lets go of it with the process.

    Entering makes the folder when it is not there. Raises PagedgenError when another process holds the lock, or the
    folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / LOCK_NAME
        self._lock = FileLock(self._path)
        self._inode = 0

    def __enter__(self) -> Self:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout=0)
            self._inode = self._path.stat().st_ino
        except Timeout:
            raise PagedgenError(self._busy()) from None
        except NotImplementedError:
            raise PagedgenError(
                f"the file system of {self._folder} cannot lock files, which keeps two runs from writing to one "
                "output; choose an -o on another one"
            ) from None
        except OSError as error:
            raise write_error(self._folder, error, "or choose another -o") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._lock.release()

    @property
    def is_held(self) -> bool:
        return bool(self._lock.is_locked)

    def check(self) -> None:
        """Raises PagedgenError when the folder was removed, or replaced by another one, since it was locked: whatever
        was written next would not be with what was written before."""
        try:
            is_ours = os.stat(self._path).st_ino == self._inode
        except OSError:
            is_ours = False
        if not is_ours:
            raise PagedgenError(
                f"{self._folder} was removed while the run went on, and what was in it is lost; run the same command "
                "again to generate it anew"
            )

    def _busy(self) -> str:
        manifest = read_manifest(self._folder)
        owner = f" (process {manifest.process})" if manifest is not None and manifest.process else ""
        return (
            f"another pagedgen{owner} is writing to {self._folder.with_suffix('')}; wait for it or stop it, or choose "
            "another -o"
        )
