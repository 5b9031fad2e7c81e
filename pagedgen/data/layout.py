"""Where a run writes: the output and its run folder, and the checks made before the run begins."""

import errno
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pagedgen.config import OutputConfig
from pagedgen.data.discover import RUN_FOLDER_SUFFIX
from pagedgen.data.files import is_temporary, write_error
from pagedgen.data.manifest import MANIFEST_NAME, read_manifest
from pagedgen.errors import UsageError

PARTS_NAME = "parts"
_PART = re.compile(r"part-\d{5,}\.parquet")


@dataclass(frozen=True, slots=True)
class OutputLayout:
    """The paths of one run.

    kind: what `output` is: one Parquet file, one JSON lines file, or a folder of Parquet parts.
    parts: the folder the parts are written to; that is `output` itself when `output` is a folder.
    """

    output: Path
    kind: Literal["parquet", "jsonl", "folder"]
    overwrite: bool

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
        if not self.parts.is_dir():
            return []
        return sorted((path for path in self.parts.iterdir() if _PART.fullmatch(path.name)), key=_part_number)

    def create(self) -> None:
        """Makes the folders, and with `overwrite` clears what an earlier run left; nothing else is touched.

        An earlier single output file stays until the new one replaces it. Raises PagedgenError.
        """
        try:
            if self.run_folder.is_dir():
                shutil.rmtree(self.run_folder)
            if self.kind == "folder" and self.output.is_dir() and self.overwrite:
                for path in [*self.finished_parts(), *filter(_is_part_temporary, self.output.iterdir())]:
                    path.unlink()
            self.run_folder.mkdir(parents=True)
            self.parts.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise write_error(self.output, error, "choose another -o") from error


def prepare_output(config: OutputConfig, inputs: Iterable[Path] = ()) -> OutputLayout:
    """Checks that the output can be written, without writing or removing anything.

    inputs: the files that are read, none of which may be written over. Raises UsageError.
    """
    path = Path(os.path.expanduser(config.path))
    if str(path) == "-":
        raise UsageError("the output cannot be -, standard output; name a file X.jsonl or X.parquet, or a folder")
    layout = OutputLayout(path, _kind(path), config.overwrite)
    _check_inputs(layout, inputs)
    if config.overwrite:
        _check_is_ours(layout)
    else:
        _check_is_new(layout)
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


def _check_is_new(layout: OutputLayout) -> None:
    output, run_folder = layout.output, layout.run_folder
    if layout.kind != "folder" and os.path.lexists(output):
        raise UsageError(f"the output {output} exists; use --overwrite or another -o")
    if layout.kind == "folder" and output.is_dir() and any(output.iterdir()):
        raise UsageError(f"the output folder {output} is not empty; use --overwrite or another -o")
    if os.path.lexists(run_folder) and not _is_finished(run_folder):
        raise UsageError(f"{run_folder} is left from an unfinished run; use --overwrite to discard it, or another -o")


def _check_is_ours(layout: OutputLayout) -> None:
    """A run folder is removed whole, so it must be one; and whoever reads an output folder reads all that is in it."""
    if layout.kind == "folder" and layout.output.is_dir():
        ours = {path.name for path in layout.finished_parts()}
        for path in sorted(layout.output.glob("*.parquet")):
            if path.name not in ours:
                raise UsageError(
                    f"the output folder {layout.output} holds {path.name}, which is none of its parts; "
                    "choose another -o"
                )
    folder = layout.run_folder
    if not os.path.lexists(folder):
        return
    names = set(os.listdir(folder)) if folder.is_dir() and not folder.is_symlink() else {""}
    if names and MANIFEST_NAME not in names and not names <= {PARTS_NAME}:
        raise UsageError(f"{folder} was not made by pagedgen; remove it, or choose another -o")


def _is_finished(folder: Path) -> bool:
    """Whether a run folder holds nothing that is still needed: an empty one, or that of a finished run."""
    if not folder.is_dir() or folder.is_symlink():
        return False
    manifest = read_manifest(folder)
    return manifest.status == "finished" if manifest is not None else not any(folder.iterdir())


def _check_is_writable(layout: OutputLayout) -> None:
    folder = layout.output if layout.output.is_dir() else layout.output.parent
    while not os.path.lexists(folder) and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        raise UsageError(f"the output {layout.output} cannot be made, as {folder} is not a folder; choose another -o")
    # The run folder is made beside the output, so an existing output folder needs a writable parent too.
    for needed in (folder, layout.output.parent if layout.output.is_dir() else folder):
        if not os.access(needed, os.W_OK | os.X_OK):
            reason = os.strerror(errno.EACCES).lower()
            raise UsageError(f"the output {layout.output} cannot be written ({needed}: {reason}); choose another -o")


def _part_number(path: Path) -> int:
    return int(path.stem.removeprefix("part-"))


def _is_part_temporary(path: Path) -> bool:
    return is_temporary(path) and bool(_PART.fullmatch(path.name[1:].removesuffix(".tmp")))
