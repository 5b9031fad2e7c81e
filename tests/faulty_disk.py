"""A disk that refuses, and a machine that dies, at any operation in turn."""

import errno
import shutil
import tempfile
from pathlib import Path
from typing import Any, BinaryIO, Literal

from pagedgen.data.files import FileLayer

Fault = Literal["full", "killed", "power cut"]


class Death(BaseException):
    """The process is no more: nothing after this reaches the disk."""


class FaultyDisk(FileLayer):
    """The real file system until operation number `at`.

    "full": that operation and all later ones that need room raise OSError. "killed": it and all later ones raise Death,
    and of a write half is there. "power cut": the same, and what was not synced is lost: the content of files, and the
    names in folders.
    """

    def __init__(self, at: int, fault: Fault) -> None:
        self.at, self.fault = at, fault
        self.count = 0
        self.operations: list[str] = []
        self._unsynced: set[Path] = set()
        # What a name stood for before a rename or removal that its folder's sync has not made lasting: path -> copy.
        self._names: list[tuple[Path, Path | None]] = []
        self._copies = tempfile.TemporaryDirectory()
        self._dead = False

    def _operation(self, name: str, path: Path) -> None:
        if self._dead:
            raise Death
        self.count += 1
        self.operations.append(f"{name} {path.name}")
        if self.count < self.at:
            return
        if self.fault == "full":
            if name in ("create", "write", "sync"):
                raise OSError(errno.ENOSPC, "No space left on device", str(path))
            return
        self._die()

    def _die(self) -> None:
        self._dead = True
        if self.fault == "power cut":
            for path, copy in reversed(self._names):
                if copy is None:
                    path.unlink(missing_ok=True)
                else:
                    shutil.move(copy, path)
            for path in self._unsynced:
                if path.exists():
                    path.write_bytes(b"")
        raise Death

    def create(self, path: Path) -> BinaryIO:
        self._operation("create", path)
        file = super().create(path)
        self._unsynced.add(path)
        layer = self

        class Guarded:
            def write(self, data: Any) -> int:
                try:
                    layer._operation("write", path)
                except Death:
                    if layer.fault == "killed" and len(data) > 1:
                        file.write(bytes(data)[: len(data) // 2])
                        file.flush()
                    raise
                return file.write(data)

            def __getattr__(self, name: str) -> Any:
                return getattr(file, name)

        return Guarded()  # type: ignore[return-value]

    def sync(self, file: BinaryIO) -> None:
        path = Path(file.name)
        self._operation("sync", path)
        file.flush()  # the tests' own machine stays up
        self._unsynced.discard(path)

    def rename(self, source: Path, target: Path) -> None:
        self._operation("rename", target)
        self._remember(target)
        super().rename(source, target)
        if source in self._unsynced:
            self._unsynced.remove(source)
            self._unsynced.add(target)

    def sync_folder(self, folder: Path) -> None:
        self._operation("sync folder", folder)
        self._names = [(path, copy) for path, copy in self._names if path.parent != folder]

    def remove(self, path: Path) -> None:
        self._operation("remove", path)
        self._remember(path)
        super().remove(path)
        self._unsynced.discard(path)

    def _remember(self, path: Path) -> None:
        copy = None
        if path.exists():
            copy = Path(self._copies.name, str(self.count))
            shutil.copy(path, copy)
        self._names.append((path, copy))
