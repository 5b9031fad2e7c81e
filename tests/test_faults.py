"""What a disk that fails, or a process that dies, can do to a run: nothing that the same command does not make good."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from faulty_disk import Death, Fault, FaultyDisk
from job_cases import KINDS, ROWS, job, read, rows_of, uninterrupted, write_rows

from pagedgen.data.files import FileLayer
from pagedgen.data.manifest import read_manifest
from pagedgen.errors import PagedgenError, UsageError
from pagedgen.job import run_job

pytestmark = pytest.mark.usefixtures("fake_jobs")


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("*") if path.name.endswith(".tmp") or path.name.startswith("merge-")]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fault", ["full", "killed", "power cut"])
def test_a_fault_at_any_operation_of_the_disk_loses_nothing(
    tmp_path: Path, model: str, kind: str, fault: Fault
) -> None:
    expected = uninterrupted(tmp_path / "whole", model, kind)
    assert {row["row"] for row in expected} == set(range(ROWS))
    assert len(expected) > ROWS, "some have samples"
    assert {row["status"] for row in expected} == {"ok", "bad_row", "nan_logits"}
    at, finished = 0, False
    while not finished:
        at, said = at + 1, ""
        folder = tmp_path / f"{at}"
        folder.mkdir()
        write_rows(folder / "in.jsonl", rows_of())
        config, disk = job(folder, model, kind), FaultyDisk(at, fault)
        try:
            run_job(config, files=disk)
            finished = True
        except Death:
            pass
        except PagedgenError as error:
            said = str(error)
        if fault == "full" and not finished:
            assert "(No space left on device); make room, " in said
        run_job(config)
        assert read(folder / kind) == expected, (at, disk.operations)
        assert leftovers(folder) == []
        manifest = read_manifest(folder / f"{kind}.run")
        assert manifest is not None
        assert (manifest.status, manifest.rows) == ("finished", ROWS)
    assert at > 40, "there were operations to fail"


def test_faults_upon_faults(tmp_path: Path, model: str) -> None:
    """A run that dies again and again, a few operations further each time."""
    for kind in KINDS:
        expected = uninterrupted(tmp_path / f"whole {kind}", model, kind)
        folder = tmp_path / kind.replace(".", "-")
        folder.mkdir()
        write_rows(folder / "in.jsonl", rows_of())
        for attempt in range(300):
            try:
                run_job(job(folder, model, kind), files=FaultyDisk(9 + attempt, "power cut"))
                break
            except Death:
                continue
        assert attempt > 3
        assert read(folder / kind) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_part_is_set_aside_and_its_rows_run_again(
    tmp_path: Path, model: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = uninterrupted(tmp_path / "whole", model, kind)
    write_rows(tmp_path / "in.jsonl", rows_of())
    config = job(tmp_path, model, kind)
    with pytest.raises(Death):
        run_job(config, files=FaultyDisk(30, "killed"))
    parts = sorted((tmp_path / kind if kind == "out" else tmp_path / f"{kind}.run" / "parts").glob("part-*.parquet"))
    assert len(parts) >= 3
    parts[0].write_bytes(parts[0].read_bytes()[:-20])
    content = bytearray(parts[1].read_bytes())
    content[len(content) // 3] ^= 0xFF
    parts[1].write_bytes(content)
    run_job(replace(config, quiet=False))
    warnings = capsys.readouterr().err
    folder = parts[0].parent
    for part in parts[:2]:
        aside = folder / f"{part.name}.corrupt"
        assert str(aside) in warnings
        assert aside.is_file()
        aside.unlink()
    assert read(tmp_path / kind) == expected


@pytest.mark.parametrize("kind", ["out.jsonl", "out"])
def test_an_overwriting_run_that_dies_never_mixes_with_the_old_one(tmp_path: Path, model: str, kind: str) -> None:
    new = {"overrides": {"seed": 5}}
    expected = uninterrupted(tmp_path / "whole", model, kind, **new)
    at, finished = 0, False
    while not finished:
        at += 1
        folder = tmp_path / f"{at}"
        folder.mkdir()
        write_rows(folder / "in.jsonl", rows_of())
        run_job(job(folder, model, kind))
        try:
            run_job(job(folder, model, kind, overwrite=True, **new), files=FaultyDisk(at, "killed"))
            finished = True
        except Death:
            pass
        with suppress(UsageError):  # where the old run's manifest is still there
            run_job(job(folder, model, kind, **new))
            assert read(folder / kind) == expected, at
        run_job(job(folder, model, kind, overwrite=True, **new))
        assert read(folder / kind) == expected
    assert at > 20


def test_a_run_folder_that_was_replaced_under_way_is_not_written_to(tmp_path: Path, model: str) -> None:
    write_rows(tmp_path / "in.jsonl", rows_of())
    run_folder = tmp_path / "out.parquet.run"

    class Replacing(FileLayer):
        replaced = False

        def sync_folder(self, folder: Path) -> None:
            super().sync_folder(folder)
            if not self.replaced and list(folder.glob("part-*")):
                self.replaced = True
                run_folder.rename(tmp_path / "theirs")
                (run_folder / "parts").mkdir(parents=True)
                (run_folder / "lock").touch()

    with pytest.raises(PagedgenError, match=r"out\.parquet\.run was removed while the run went on"):
        run_job(job(tmp_path, model), files=Replacing())
    assert list((run_folder / "parts").iterdir()) == []


@pytest.mark.parametrize("what", ["run folder", "parts", "output folder"])
def test_a_folder_that_is_removed_under_way_ends_the_run_in_a_sentence(
    tmp_path: Path, model: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = "out" if what == "output folder" else "out.parquet"
    expected = uninterrupted(tmp_path / "whole", model, kind)
    write_rows(tmp_path / "in.jsonl", rows_of())
    config = job(tmp_path, model, kind)
    victim = {"run folder": "out.parquet.run", "parts": "out.parquet.run/parts", "output folder": "out"}[what]

    class Removing(FileLayer):
        removed = False

        def sync_folder(self, folder: Path) -> None:
            super().sync_folder(folder)
            if not self.removed and len(list(folder.glob("part-*"))) == 2:
                self.removed = True
                for path in sorted((tmp_path / victim).rglob("*"), reverse=True):
                    path.rmdir() if path.is_dir() else path.unlink()
                (tmp_path / victim).rmdir()

    with pytest.raises(PagedgenError, match=r"removed|see that its folder is there"):
        run_job(config, files=Removing())
    run_job(config)
    assert read(tmp_path / kind) == expected
