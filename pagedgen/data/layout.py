"""Where a run writes: the output and its run folder, and the checks made before the run begins."""

import errno
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pagedgen.config import OutputConfig
from pagedgen.data.discover import RUN_FOLDER_SUFFIX
from pagedgen.data.files import (
    TEMPORARY_PREFIX,
    TEMPORARY_SUFFIX,
    FileLayer,
    is_temporary,
    temporary_path,
    write_error,
)
from pagedgen.data.lock import LOCK_NAME
from pagedgen.data.manifest import MANIFEST_NAME, Manifest, read_manifest
from pagedgen.errors import UsageError

PARTS_NAME = "parts"
STATS_NAME = "stats.json"
RECORDING_NAME = "timeline.parquet"
PLAN_NAME = "plan.json"
_FILES = (MANIFEST_NAME, STATS_NAME, RECORDING_NAME, PLAN_NAME)
_PART = re.compile(r"part-(\d{5,})\.parquet")
_SET_ASIDE = re.compile(r"part-(\d{5,})\.parquet\.corrupt\d*")
_MERGED = re.compile(r"merge-\d{5,}\.parquet")


@dataclass(frozen=True, slots=True)
class OutputLayout:
    """The paths of one run.

    kind: what `output` is: one Parquet file, one JSON lines file, or a folder of Parquet parts.
    parts: the folder the parts are written to; that is `output` itself when `output` is a folder.
    manifest: of the earlier run that goes on; None when a new one begins.
    """

    output: Path
    kind: Literal["parquet", "jsonl", "folder"]
    overwrite: bool
    manifest: Manifest | None = None

    @property
    def run_folder(self) -> Path:
        return self.output.with_name(self.output.name + RUN_FOLDER_SUFFIX)

    @property
    def parts(self) -> Path:
        return self.output if self.kind == "folder" else self.run_folder / PARTS_NAME

    def part(self, number: int) -> Path:
        return self.parts / f"part-{number:05d}.parquet"

    def finished_parts(self) -> list[Path]:
        """The parts that are complete, in the order they were written."""
        return sorted(self._matching(_PART), key=part_number)

    def set_aside_parts(self) -> list[Path]:
        """The parts that were found damaged."""
        return list(self._matching(_SET_ASIDE))

    def sources(self) -> list[Path]:
        """The files that hold the rows of the run so far, the oldest first: what was merged before, then the parts."""
        manifest = self.manifest
        merged = manifest is not None and manifest.merged and self.kind == "parquet" and self.output.is_file()
        return [*([self.output] if merged else []), *self.finished_parts()]

    def output_bytes(self) -> int | None:
        """The size of a single output file; None when it is not there, or the output is a folder."""
        return self.output.stat().st_size if self.kind != "folder" and self.output.is_file() else None

    def was_touched(self) -> bool:
        """Whether the output file is there, but not as the run left it."""
        size = self.output_bytes()
        return self.manifest is not None and self.manifest.merged and size not in (None, self.manifest.output_bytes)

    def unfinished_files(self) -> list[Path]:
        """What was being written when a run ended without having a say in it."""
        folders = {self.parts, self.run_folder}
        files = [path for folder in folders if folder.is_dir() for path in folder.iterdir() if _is_unfinished(path)]
        output = temporary_path(self.output)
        return [*files, output] if self.kind != "folder" and output.is_file() else files

    def create(self, files: FileLayer) -> None:
        """Makes the folders for a new run, and clears what an earlier one left; nothing else is touched.

        The earlier manifest stays until the new one replaces it: parts without a manifest, or with another's, there are
        at no moment. So does an earlier single output file. Raises PagedgenError.
        """
        try:
            for path in [*self.finished_parts(), *self.set_aside_parts(), *self.unfinished_files()]:
                files.remove(path)
            if self.run_folder.is_dir():
                for path in self.run_folder.iterdir():
                    if path.is_file() and path.name not in (LOCK_NAME, MANIFEST_NAME):
                        files.remove(path)
        except OSError as error:
            raise write_error(self.output, error, "or choose another -o") from error
        self.make_folders()

    def make_folders(self) -> None:
        """Makes the folders that are not there. Raises PagedgenError."""
        try:
            for folder in (self.run_folder, self.parts):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise write_error(self.output, error, "or choose another -o") from error

    def _matching(self, pattern: re.Pattern[str]) -> Iterator[Path]:
        return (
            (path for path in self.parts.iterdir() if pattern.fullmatch(path.name)) if self.parts.is_dir() else iter(())
        )


def part_number(path: Path) -> int:
    """A part's number, also when it was set aside; -1 for what is no part."""
    match = _PART.fullmatch(path.name) or _SET_ASIDE.fullmatch(path.name)
    return int(match[1]) if match else -1


def prepare_output(config: OutputConfig, inputs: Iterable[Path] = ()) -> OutputLayout:
    """Checks that the output can be written, and leaves nothing behind.

    The layout has a manifest when there is a run to go on with: one that was not finished, or a finished one whose
    output is still there. inputs: the files that are read, none of which may be written over. Raises UsageError.
    """
    path = Path(os.path.expanduser(config.path))
    if str(path) == "-":
        raise UsageError("the output cannot be -, standard output; name a file X.jsonl or X.parquet, or a folder")
    layout = OutputLayout(path, _kind(path), config.overwrite)
    _check_inputs(layout, inputs)
    if config.overwrite:
        _check_is_ours(layout)
    else:
        layout = replace(layout, manifest=_earlier_run(layout))
    _check_is_writable(layout)
    return layout


def _kind(path: Path) -> Literal["parquet", "jsonl", "folder"]:
    suffix = path.suffix.lower()
    if suffix in (".parquet", ".jsonl"):
        if path.is_dir():
            raise UsageError(f"the output {path} is a folder; name a file, or a folder without {suffix}")
        return "parquet" if suffix == ".parquet" else "jsonl"
    if path.is_dir():
        return "folder"
    if path.exists():
        raise UsageError(f"the output {path} is a file and not a folder; use a new folder, X.parquet or X.jsonl")
    if re.fullmatch(r"\.[a-z]\w*", suffix):
        raise UsageError(f"the output {path} is of an unknown kind; use X.parquet, X.jsonl or a folder")
    return "folder"


def _check_inputs(layout: OutputLayout, inputs: Iterable[Path]) -> None:
    output = layout.output.resolve()
    for path in inputs:
        resolved = path.resolve()
        if resolved == output:
            raise UsageError(f"the output {layout.output} is also the input; choose another -o")
        if layout.kind == "folder" and output in resolved.parents:
            raise UsageError(f"the output folder {layout.output} holds the input {path}; choose another -o")


def _earlier_run(layout: OutputLayout) -> Manifest | None:
    """The manifest of the run to go on with. Raises UsageError when something is in the way."""
    output, run_folder = layout.output, layout.run_folder
    is_there = os.path.lexists(output) if layout.kind != "folder" else output.is_dir() and any(output.iterdir())
    manifest = None if run_folder.is_symlink() else read_manifest(run_folder)
    if manifest is None:
        if is_there and layout.kind == "folder":
            raise UsageError(f"the output folder {output} is not empty; use --overwrite or another -o")
        if is_there:
            raise UsageError(f"the output {output} exists; use --overwrite or another -o")
        if os.path.lexists(run_folder) and not _is_bare(run_folder):
            raise UsageError(
                f"{run_folder} has no manifest that can be read, so its run cannot go on; use --overwrite to discard "
                "it, or another -o"
            )
        return None
    if layout.kind == "folder":
        _check_has_only_parts(layout)
    elif is_there and not (manifest.merged or manifest.replaces):
        raise UsageError(
            f"the output {output} exists, but is not of the unfinished run in {run_folder}; use --overwrite or another "
            "-o"
        )
    return manifest if is_there or manifest.status != "finished" else None


def _check_is_ours(layout: OutputLayout) -> None:
    """A run folder is cleared, so it must be one; and whoever reads an output folder reads all that is in it."""
    if layout.kind == "folder" and layout.output.is_dir():
        _check_has_only_parts(layout)
    folder = layout.run_folder
    if not os.path.lexists(folder):
        return
    is_folder = folder.is_dir() and not folder.is_symlink()
    names = {path.name for path in folder.iterdir() if not _is_unfinished(path)} if is_folder else {""}
    if MANIFEST_NAME not in names and not names <= {PARTS_NAME, LOCK_NAME}:
        raise UsageError(f"{folder} was not made by pagedgen; remove it, or choose another -o")


def _check_has_only_parts(layout: OutputLayout) -> None:
    ours = {path.name for path in layout.finished_parts()}
    for path in sorted(layout.output.glob("*.parquet")):
        if path.name not in ours:
            raise UsageError(
                f"the output folder {layout.output} holds {path.name}, which is none of its parts; choose another -o"
            )


def _is_bare(folder: Path) -> bool:
    """Whether a run folder holds nothing yet that could be lost."""
    if not folder.is_dir() or folder.is_symlink():
        return False
    parts = folder / PARTS_NAME
    entries = [path for path in folder.iterdir() if not _is_unfinished(path) and path.name != LOCK_NAME]
    return entries in ([], [parts]) and not (parts.is_dir() and any(parts.iterdir()))


def _check_is_writable(layout: OutputLayout) -> None:
    folder = layout.output if layout.output.is_dir() else layout.output.parent
    while not os.path.lexists(folder) and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        raise UsageError(f"the output {layout.output} cannot be made, as {folder} is not a folder; choose another -o")
    # The run folder is made beside the output, so an existing output folder needs a writable parent too.
    beside = layout.output.parent if layout.output.is_dir() else folder
    ours = (path for path in (layout.run_folder, layout.parts) if path.is_dir())
    for needed in dict.fromkeys((folder, beside, *ours)):
        if not os.access(needed, os.W_OK | os.X_OK):
            reason = os.strerror(errno.EACCES).lower()
            raise UsageError(f"the output {layout.output} cannot be written ({needed}: {reason}); choose another -o")
        _try_out(layout.output, needed)
    with suppress(FileNotFoundError, NotADirectoryError):  # a name that is too long is not found to be missing
        temporary_path(layout.output).lstat()


def _try_out(output: Path, folder: Path) -> None:
    """Make and remove a folder: a file system like /proc, or a full one, takes nothing whatever the permissions say."""
    try:
        os.rmdir(tempfile.mkdtemp(prefix=TEMPORARY_PREFIX, suffix=TEMPORARY_SUFFIX, dir=folder))
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        room = "make room there, or " if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise UsageError(
            f"the output {output} cannot be written (nothing can be made in {folder}: {reason}); {room}choose another "
            "-o"
        ) from error


def _is_unfinished(path: Path) -> bool:
    """Whether a file is one of ours that never got its name, or a step between parts and output."""
    name = path.name[1:].removesuffix(".tmp") if is_temporary(path) else ""
    ours = _PART.fullmatch(name) or _MERGED.fullmatch(name) or name in _FILES
    return bool(ours or _MERGED.fullmatch(path.name))
