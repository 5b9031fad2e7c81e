"""Which run is meant, and what there is of it."""

import os
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from pagedgen.data.discover import RUN_FOLDER_SUFFIX
from pagedgen.data.layout import PARTS_NAME, RECORDING_NAME
from pagedgen.data.manifest import MANIFEST_NAME, Manifest, read_manifest
from pagedgen.errors import PagedgenError, UsageError
from pagedgen.stats.recording import Recording, read_recording
from pagedgen.user_state import latest_run


@dataclass(frozen=True, slots=True)
class Run:
    """A run as it is on the disk. is_running: whether its process is alive. recording: None when no step has been
    recorded yet, or the file is damaged."""

    folder: Path
    manifest: Manifest
    recording: Recording | None
    is_running: bool

    @property
    def status(self) -> str:
        """As in the manifest; a run whose process died without a word is "killed"."""
        return "killed" if self.manifest.status == "running" and not self.is_running else self.manifest.status


def find_run_folder(name: str | None) -> Path:
    """The run folder that `name` means: an output, its run folder, or a folder with one run in it; None is the run that
    was begun last. Raises UsageError when there is none."""
    if name is None:
        folder = latest_run()
        if folder is not None and (folder / MANIFEST_NAME).is_file():
            return folder
        found = _runs_in(Path())
        if not found:
            raise UsageError("there is no run to report on here; name one: its output, or its folder X.run")
        return max(found, key=lambda path: (path / MANIFEST_NAME).stat().st_mtime)
    if not name.strip():
        raise UsageError("the name of a run is empty; name its output, or its folder X.run")
    path = Path(os.path.expanduser(name))
    for folder in (path, Path(f"{path}{RUN_FOLDER_SUFFIX}")):
        if (folder / MANIFEST_NAME).is_file():
            return folder
    if not path.exists():
        raise UsageError(f"{name}: there is no such run; name its output, or its folder X.run")
    for folder in (path, Path(f"{path}{RUN_FOLDER_SUFFIX}")):
        if folder.is_dir() and folder.name.endswith(RUN_FOLDER_SUFFIX):
            raise UsageError(f"{folder} has no {MANIFEST_NAME}, so nothing is known of its run; run the job again")
    found = _runs_in(path) if path.is_dir() else []
    if len(found) == 1:
        return found[0]
    if found:
        some = ", ".join(str(folder) for folder in found[:3])
        raise UsageError(f"{name} holds {len(found)} runs; name one of them, like {some}")
    raise UsageError(f"{name} is no output of a run: there is no {path}{RUN_FOLDER_SUFFIX}")


def _runs_in(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.glob(f"*{RUN_FOLDER_SUFFIX}/{MANIFEST_NAME}"))


def read_run(folder: Path) -> Run:
    """Raises PagedgenError when the manifest cannot be read."""
    manifest = read_manifest(folder)
    if manifest is None:
        raise PagedgenError(
            f"{folder / MANIFEST_NAME} cannot be read, so there is nothing to report; run the job again"
        )
    recording = read_recording(folder / RECORDING_NAME)
    return Run(folder, manifest, recording, manifest.status == "running" and _is_alive(folder, manifest.process))


def rows_on_disk(run: Run) -> tuple[int, dict[str, int]]:
    """(rows, completions by status) in the finished parts of a run, and in what it merged before."""
    output = run.folder.with_name(run.folder.name.removesuffix(RUN_FOLDER_SUFFIX))
    parts = [*(run.folder / PARTS_NAME).glob("part-*.parquet"), *output.glob("part-*.parquet")]
    if run.manifest.merged and output.suffix == ".parquet":
        parts.append(output)
    tables = []
    for path in parts:
        with suppress(OSError, pa.ArrowException):  # damaged: it will be made anew
            tables.append(pq.read_table(path, columns=["row", "status"]))
    if not tables:
        return 0, {}
    table = pa.concat_tables(tables)
    counts = Counter(table["status"].to_pylist())
    return len(set(table["row"].to_pylist())), dict(counts)


def _is_alive(folder: Path, process: int) -> bool:
    """Whether the process that wrote the manifest is still there; its number may have gone to a later one."""
    try:
        return bool(psutil.Process(process).create_time() <= (folder / MANIFEST_NAME).stat().st_mtime + 1)
    except (psutil.Error, OSError, ValueError):
        return False
