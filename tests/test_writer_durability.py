"""Writer: what happens when the disk refuses, and in which order a part reaches it."""

import errno
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow.parquet as pq
import pytest
from writer_cases import completion, writer_for

from pagedgen.data.files import FileLayer
from pagedgen.errors import PagedgenError


class FullDisk(FileLayer):
    """A disk that is full from some operation on."""

    def __init__(self, operation: str, after: int) -> None:
        self.operation = operation
        self.left = after

    def _count(self, operation: str) -> None:
        if operation == self.operation:
            self.left -= 1
            if self.left < 0:
                raise OSError(errno.ENOSPC, "No space left on device")

    def create(self, path: Path) -> BinaryIO:
        self._count("create")
        file = super().create(path)
        layer = self

        class Guarded:
            def write(self, data: Any) -> int:
                layer._count("write")
                return file.write(data)

            def __getattr__(self, name: str) -> Any:
                return getattr(file, name)

        return Guarded()  # type: ignore[return-value]

    def sync(self, file: BinaryIO) -> None:
        self._count("sync")
        super().sync(file)

    def rename(self, source: Path, target: Path) -> None:
        self._count("rename")
        super().rename(source, target)


@pytest.mark.parametrize("operation", ["create", "write", "sync", "rename"])
@pytest.mark.parametrize("kind", ["out.parquet", "out.jsonl", "out"])
@pytest.mark.parametrize("after", [2, 4])
def test_a_full_disk_leaves_the_finished_parts(tmp_path: Path, operation: str, kind: str, after: int) -> None:
    """Four parts of 10 rows, then the merge: the disk is full in the third part, or in the merge."""
    output = tmp_path / kind
    writer = writer_for(output, part_rows=10, files=FullDisk(operation, after))

    def run() -> None:
        for row in range(40):
            writer.write([completion(row)], {"prompt": "p"})
        writer.finish()

    if kind == "out" and after == 4:
        run()
        return
    with pytest.raises(
        PagedgenError, match=r"out\S* cannot be written \(No space left on device\); make room, then run"
    ) as caught:
        run()
    assert str(caught.value).endswith("run the same command again: it goes on after what is finished")
    folder = output if kind == "out" else tmp_path / f"{kind}.run" / "parts"
    parts = sorted(folder.iterdir())
    assert [part.name for part in parts] == [f"part-{number:05d}.parquet" for number in range(after)]
    assert [row for part in parts for row in pq.read_table(part)["row"].to_pylist()] == list(range(after * 10))
    assert kind == "out" or not output.exists()
    assert [path for path in tmp_path.rglob("*") if path.name.endswith(".tmp")] == []


def test_a_part_is_on_the_disk_before_it_has_its_name(tmp_path: Path) -> None:
    events: list[str] = []

    class Recorder(FileLayer):
        def create(self, path: Path) -> BinaryIO:
            events.append(f"create {path.name}")
            return super().create(path)

        def sync(self, file: BinaryIO) -> None:
            super().sync(file)
            assert Path(file.name).stat().st_size > 0
            events.append("sync")

        def rename(self, source: Path, target: Path) -> None:
            super().rename(source, target)
            events.append(f"rename {target.name}")

        def sync_folder(self, folder: Path) -> None:
            super().sync_folder(folder)
            events.append(f"sync {folder.name}")

    writer = writer_for(tmp_path / "out", files=Recorder())
    writer.write([completion(0)], {})
    writer.flush()
    assert events == ["create .part-00000.parquet.tmp", "sync", "rename part-00000.parquet", "sync out"]
