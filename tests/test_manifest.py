"""The manifest: written whole or not at all, and read back as it was."""

import json
from pathlib import Path

import pytest

from pagedgen.data.files import FileLayer
from pagedgen.data.manifest import Manifest, read_manifest, utc_now, write_manifest
from pagedgen.errors import PagedgenError

MANIFEST = Manifest(
    version="0.1.0",
    command=("pagedgen", "run", "é.jsonl"),
    model="m",
    input="é.jsonl",
    output="out.parquet",
    started="2025-01-01T00:00:00+00:00",
    schema={"row": "int64"},
    parameters={"temperature": 0.5, "path": None},
)


def test_round_trip_and_replacement(tmp_path: Path) -> None:
    write_manifest(tmp_path, MANIFEST)
    assert read_manifest(tmp_path) == MANIFEST
    ended = MANIFEST.ended("interrupted")
    write_manifest(tmp_path, ended)
    assert read_manifest(tmp_path) == ended
    assert (ended.status, MANIFEST.status, MANIFEST.finished) == ("interrupted", "running", None)
    assert MANIFEST.started < str(ended.finished) <= utc_now()
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]


def test_unknown_fields_of_a_newer_version_are_ignored(tmp_path: Path) -> None:
    write_manifest(tmp_path, MANIFEST)
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"newer": 1}))
    assert read_manifest(tmp_path) == MANIFEST


@pytest.mark.parametrize("text", [None, "", "[]", "{}", '{"version": "0"}', "\0"])
def test_unreadable(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "manifest.json").write_text(text)
    assert read_manifest(tmp_path) is None


def test_a_failed_write_leaves_the_old_one(tmp_path: Path) -> None:
    class Refusing(FileLayer):
        def rename(self, source: Path, target: Path) -> None:
            raise OSError(28, "No space left on device")

    write_manifest(tmp_path, MANIFEST)
    with pytest.raises(PagedgenError, match=r"manifest\.json cannot be written \(No space left on device\)"):
        write_manifest(tmp_path, MANIFEST.ended("failed"), Refusing())
    assert read_manifest(tmp_path) == MANIFEST
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]
