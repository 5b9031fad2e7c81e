"""Where a run may write, and what --overwrite removes."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from pagedgen.config import OutputConfig
from pagedgen.data.files import FileLayer
from pagedgen.data.layout import OutputLayout, part_number, prepare_output
from pagedgen.data.manifest import Manifest, RunStatus, write_manifest
from pagedgen.errors import PagedgenError, UsageError


def manifest(status: RunStatus) -> Manifest:
    return Manifest("0", ("pagedgen",), "m", "in", "out", "2026-01-01T00:00:00+00:00", {}, status=status)


def prepare(path: Path, overwrite: bool = False, inputs: tuple[Path, ...] = ()) -> OutputLayout:
    return prepare_output(OutputConfig(path, overwrite=overwrite), inputs)


def run_folder(output: Path, status: RunStatus | None) -> Path:
    folder = output.with_name(output.name + ".run")
    (folder / "parts").mkdir(parents=True)
    (folder / "parts" / "part-00000.parquet").write_text("part")
    if status:
        write_manifest(folder, manifest(status))
    return folder


@pytest.mark.parametrize(
    ("name", "kind", "parts"),
    [
        ("x.parquet", "parquet", "x.parquet.run/parts"),
        ("X.JSONL", "jsonl", "X.JSONL.run/parts"),
        ("out", "folder", "out"),
        ("run-0.5", "folder", "run-0.5"),
        ("new/deep/x.parquet", "parquet", "new/deep/x.parquet.run/parts"),
    ],
)
def test_new_output(tmp_path: Path, name: str, kind: str, parts: str) -> None:
    layout = prepare(tmp_path / name)
    assert list(tmp_path.iterdir()) == []
    assert (layout.kind, layout.parts) == (kind, tmp_path / parts)
    layout.create(FileLayer())
    assert layout.parts.is_dir()
    assert layout.run_folder == tmp_path / f"{name}.run"
    assert layout.run_folder.is_dir()


def test_existing_output_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").touch()
    with pytest.raises(UsageError, match=r"x\.parquet exists; use --overwrite or another -o"):
        prepare(tmp_path / "x.parquet")
    (tmp_path / "link.jsonl").symlink_to("nowhere")
    with pytest.raises(UsageError, match="exists"):
        prepare(tmp_path / "link.jsonl")
    (tmp_path / "out").mkdir()
    prepare(tmp_path / "out")
    (tmp_path / "out" / "notes.md").touch()
    with pytest.raises(UsageError, match="is not empty; use --overwrite or another -o"):
        prepare(tmp_path / "out")


@pytest.mark.parametrize("status", ["running", "interrupted", "failed"])
def test_an_unfinished_run_goes_on_and_a_finished_one_without_output_is_replaced(
    tmp_path: Path, status: RunStatus
) -> None:
    output = tmp_path / "x.parquet"
    folder = run_folder(output, status)
    assert prepare(output).manifest == manifest(status)
    assert prepare(output, overwrite=True).manifest is None
    write_manifest(folder, manifest("finished"))
    layout = prepare(output)
    assert layout.manifest is None
    layout.create(FileLayer())
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", "parts"]
    assert list((folder / "parts").iterdir()) == []


def test_a_run_without_a_manifest_cannot_go_on(tmp_path: Path) -> None:
    run_folder(tmp_path / "x.parquet", None)
    with pytest.raises(UsageError, match=r"x\.parquet\.run has no manifest that can be read"):
        prepare(tmp_path / "x.parquet")
    assert prepare(tmp_path / "x.parquet", overwrite=True).manifest is None


def test_an_output_is_part_of_its_run_only_when_the_manifest_says_so(tmp_path: Path) -> None:
    output = tmp_path / "x.parquet"
    folder = run_folder(output, "interrupted")
    output.write_text("someone else's")
    with pytest.raises(UsageError, match="is not of the unfinished run"):
        prepare(output)
    write_manifest(folder, replace(manifest("interrupted"), replaces=True))
    assert prepare(output).sources() == [folder / "parts" / "part-00000.parquet"]
    write_manifest(folder, replace(manifest("finished"), merged=True))
    assert prepare(output).sources() == [output, folder / "parts" / "part-00000.parquet"]
    output.unlink()
    write_manifest(folder, replace(manifest("running"), merged=True))
    assert prepare(output).sources() == [folder / "parts" / "part-00000.parquet"]


def test_a_folder_goes_on_with_its_parts(tmp_path: Path) -> None:
    output = tmp_path / "out"
    run_folder(output, "failed")
    output.mkdir()
    for name in ("part-00010.parquet", "part-00002.parquet", "part-00003.parquet.corrupt", ".part-00011.parquet.tmp"):
        (output / name).touch()
    layout = prepare(output)
    assert layout.manifest is not None
    assert [path.name for path in layout.sources()] == ["part-00002.parquet", "part-00010.parquet"]
    assert [path.name for path in layout.unfinished_files()] == [".part-00011.parquet.tmp"]
    assert list(map(part_number, layout.set_aside_parts())) == [3]
    (output / "theirs.parquet").touch()
    with pytest.raises(UsageError, match=r"theirs\.parquet"):
        prepare(output)


def test_overwrite_removes_only_what_is_ours(tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    for name in ("part-00000.parquet", ".part-00001.parquet.tmp", "part-x.txt", "notes.md", ".other.tmp"):
        (output / name).touch()
    folder = run_folder(output, "failed")
    layout = prepare(output, overwrite=True)
    assert len(list(output.iterdir())) == 5
    layout.create(FileLayer())
    assert sorted(path.name for path in output.iterdir()) == [".other.tmp", "notes.md", "part-x.txt"]
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", "parts"]


def test_a_folder_with_someone_else_s_parts_is_refused(tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    for name in ("part-00000.parquet", "mine.parquet"):
        (output / name).touch()
    with pytest.raises(UsageError, match=r"mine\.parquet"):
        prepare(output, overwrite=True)
    assert len(list(output.iterdir())) == 2


def test_overwrite_keeps_the_old_file_until_it_is_replaced(tmp_path: Path) -> None:
    output = tmp_path / "x.parquet"
    output.write_text("old")
    run_folder(output, "finished")
    prepare(output, overwrite=True).create(FileLayer())
    assert output.read_text() == "old"


def test_a_run_folder_of_someone_else_is_not_removed(tmp_path: Path) -> None:
    folder = tmp_path / "x.parquet.run"
    folder.mkdir()
    (folder / "thesis.tex").touch()
    for overwrite, message in ((False, "no manifest that can be read"), (True, "was not made by pagedgen")):
        with pytest.raises(UsageError, match=message):
            prepare(tmp_path / "x.parquet", overwrite)
    other = tmp_path / "y.parquet.run"
    other.symlink_to(folder)
    for overwrite in (False, True):
        with pytest.raises(UsageError, match=r"y\.parquet\.run"):
            prepare(tmp_path / "y.parquet", overwrite)


@pytest.mark.parametrize("name", ["x.csv", "x.json", "x.parquet.gz", "x.xlsx"])
def test_unknown_kind(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=r"unknown kind; use X\.parquet, X\.jsonl or a folder"):
        prepare(tmp_path / name)


def test_file_and_folder_mixed_up(tmp_path: Path) -> None:
    (tmp_path / "d.parquet").mkdir()
    with pytest.raises(UsageError, match="is a folder"):
        prepare(tmp_path / "d.parquet", overwrite=True)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is a file and not a folder"):
        prepare(tmp_path / "file", overwrite=True)
    with pytest.raises(UsageError, match=r"cannot be made, as .*file is not a folder"):
        prepare(tmp_path / "file" / "x.parquet")
    (tmp_path / "v1.old").mkdir()
    assert prepare(tmp_path / "v1.old").kind == "folder"


def test_input_is_never_the_output(tmp_path: Path) -> None:
    source = tmp_path / "in" / "x.jsonl"
    source.parent.mkdir()
    source.touch()
    (tmp_path / "link.jsonl").symlink_to(source)
    for output in (source, tmp_path / "in" / ".." / "in" / "x.jsonl", tmp_path / "link.jsonl"):
        with pytest.raises(UsageError, match="is also the input"):
            prepare(output, overwrite=True, inputs=(source,))
    for output in (tmp_path / "in", tmp_path):
        with pytest.raises(UsageError, match="holds the input"):
            prepare(output, overwrite=True, inputs=(source,))
    prepare(tmp_path / "in" / "y.jsonl", inputs=(source,))


def test_not_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # permissions do not bind the superuser
    with pytest.raises(UsageError, match=r"x\.parquet cannot be written .*permission denied"):
        prepare(tmp_path / "new" / "x.parquet")


def test_folders_that_cannot_be_made(tmp_path: Path) -> None:
    layout = prepare(tmp_path / "new" / "x.parquet")
    (tmp_path / "new").touch()
    with pytest.raises(
        PagedgenError, match=r"x\.parquet cannot be written \(Not a directory\); check the path, or choose another -o"
    ):
        layout.create(FileLayer())
