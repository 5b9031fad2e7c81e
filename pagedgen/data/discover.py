"""From the path a user gives to the files to read."""

import difflib
import glob
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from pagedgen.data.columnar import ArrowFile, ParquetFile
from pagedgen.data.json_document import JsonFile
from pagedgen.data.streams import compression_of
from pagedgen.data.text_formats import CsvFile, JsonLinesFile, RowFile, TextFile
from pagedgen.errors import UsageError

RUN_FOLDER_SUFFIX = ".run"
_READERS: dict[str, Callable[[Path, str], RowFile]] = {
    ".jsonl": JsonLinesFile,
    ".ndjson": JsonLinesFile,
    ".json": JsonFile,
    ".csv": lambda path, name: CsvFile(path, name, ","),
    ".tsv": lambda path, name: CsvFile(path, name, "\t"),
    ".parquet": ParquetFile,
    ".arrow": ArrowFile,
    ".txt": TextFile,
}
KINDS = f"{', '.join(_READERS)}, and these with .gz or .zst"
# What `Dataset.save_to_disk` writes beside the rows.
_DATASET_FILES = frozenset({"dataset_info.json", "state.json", "dataset_dict.json"})


def kind_of(path: Path) -> str | None:
    """The suffix that names the file's format, without compression, or None for files that cannot be read."""
    name = Path(path.stem) if compression_of(path) else path
    suffix = name.suffix.lower()
    return suffix if suffix in _READERS else None


def find_files(path: str) -> list[RowFile]:
    """The files that `path` (a file, a folder or a glob) stands for, in the order they are read.

    Raises UsageError when there is nothing there that can be read.
    """
    start = Path(os.path.expanduser(path))
    if start.is_dir():
        files = [(file, str(file.relative_to(start))) for file in sorted(_walk(start))]
        if not files:
            raise UsageError(f"the folder {path} holds no file of a known kind ({KINDS})")
    elif start.exists():
        if kind_of(start) is None:
            raise UsageError(f"{path} is of a kind that cannot be read; give one of {KINDS}")
        files = [(start, start.name)]
    elif start.is_symlink():
        raise UsageError(f"{path} is a link to {os.readlink(start)}, which does not exist; give another path")
    elif glob.has_magic(path):
        files = _matches(path)
    else:
        raise UsageError(f"there is no file {path}{_suggestion(start)}")
    for file, _ in files:
        if not os.access(file, os.R_OK):
            raise UsageError(f"{file} cannot be read; check its permissions")
        if file.stat().st_size == 0 and len(files) == 1:
            raise UsageError(f"{file} is empty; give a file with at least one row")
    return [_READERS[kind_of(file) or ""](file, name) for file, name in files if file.stat().st_size > 0]


def stem_of(path: str) -> str:
    """The name the default output is called after: without folder, compression and format."""
    name = Path(os.path.expanduser(path))
    if name.is_dir():
        return name.resolve().name or "root"
    if glob.has_magic(path) and not name.exists():
        kept = "".join(character for character in name.name.split(".")[0] if character not in "*?[]!")
        return kept.strip("-_. ") or "prompts"
    name = Path(name.stem) if compression_of(name) else name
    return name.stem if kind_of(name) else name.name


def _walk(folder: Path) -> Iterator[Path]:
    """The usable files below `folder`, in no order; hidden ones, run folders and the outputs of runs left out."""
    for current, folders, names in os.walk(folder):
        names = [name for name in names if name + RUN_FOLDER_SUFFIX not in folders]
        folders[:] = [name for name in folders if not name.startswith(".") and not name.endswith(RUN_FOLDER_SUFFIX)]
        files = (Path(current, name) for name in names if not name.startswith(".") and name not in _DATASET_FILES)
        yield from (file for file in files if kind_of(file) and file.is_file())


def _matches(pattern: str) -> list[tuple[Path, str]]:

    def in_run(match: Path) -> bool:
        """Whether `**` walked into a run folder that the pattern does not name."""
        return RUN_FOLDER_SUFFIX not in pattern and any(part.endswith(RUN_FOLDER_SUFFIX) for part in match.parts)

    matches = sorted(Path(match) for match in glob.glob(os.path.expanduser(pattern), recursive=True))
    if not matches:
        raise UsageError(f"no file matches {pattern}; check the pattern")
    usable = [
        (match, str(match))
        for match in matches
        if kind_of(match)
        and match.is_file()
        and not in_run(match)
        and not match.with_name(match.name + RUN_FOLDER_SUFFIX).is_dir()
    ]
    if not usable:
        raise UsageError(f"{pattern} matches no file of a known kind ({KINDS})")
    return usable


def _suggestion(path: Path) -> str:
    """What the user may have meant, as the end of a sentence."""
    parent = path.parent
    if not parent.is_dir():
        return f", nor a folder {parent}; check the path"
    close = difflib.get_close_matches(path.name, os.listdir(parent), n=12, cutoff=0.6)
    usable = [str(parent / name) for name in close if _can_be_read(parent / name)][:3]
    return f"; did you mean {' or '.join(usable)}?" if usable else "; check the path"


def _can_be_read(path: Path) -> bool:
    if path.is_dir():
        return not path.name.endswith(RUN_FOLDER_SUFFIX) and any(True for _ in _walk(path))
    return kind_of(path) is not None and path.is_file()
