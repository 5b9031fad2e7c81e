"""Fingerprints of what a run reads, so that a run that goes on can tell whether it is still the same.

They guard against change, not against forgery: XXH3 with 128 bits, at the speed of the memory.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import xxhash

from pagedgen.data.columns import to_json
from pagedgen.data.streams import compression_of, naming_file

_CHUNK = 1 << 20
# Of weights, which may be hundreds of gigabytes, the beginning, the end and this many pieces between them are looked
# at.
_WHOLE_BYTES = 16 << 20
_PIECES, _PIECE_BYTES = 64, 64 << 10
# Files of these kinds may grow by rows at their end.
_LINE_KINDS = (".jsonl", ".ndjson", ".txt", ".csv", ".tsv")

Change = Literal["same", "grown"]


@dataclass(frozen=True, slots=True)
class FileFingerprint:
    """One input file. name: as in errors. size: bytes. digest: of all of them. ends_line: whether the last one ends a
    line, so that whatever comes after it is another row."""

    name: str
    size: int
    digest: str
    ends_line: bool


@dataclass(frozen=True, slots=True)
class InputFingerprint:
    """What an input holds. files: in the order they are read. head_rows, head_digest: of an input without files, which
    can be read only once, the number and a digest of its first rows."""

    files: tuple[FileFingerprint, ...] = ()
    head_rows: int = 0
    head_digest: str = ""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> "InputFingerprint":
        """Raises KeyError or TypeError when `values` are not those of `as_json`."""
        files = tuple(FileFingerprint(**file) for file in values["files"])
        return InputFingerprint(files, values["head_rows"], values["head_digest"])


def fingerprint_files(files: Sequence[tuple[str, Path]]) -> InputFingerprint:
    """files: their names in errors, and where they are. Raises PagedgenError when one cannot be read."""
    return InputFingerprint(tuple(_fingerprint(name, path, path.stat().st_size) for name, path in files))


def fingerprint_head(rows: Iterable[Mapping[str, Any]]) -> InputFingerprint:
    """rows: the first rows of an input without files."""
    digest, count = xxhash.xxh3_128(), 0
    for row in rows:
        digest.update(to_json(row).encode())
        digest.update(b"\n")
        count += 1
    return InputFingerprint(head_rows=count, head_digest=digest.hexdigest())


def compare_files(
    old: Sequence[FileFingerprint], new: Sequence[FileFingerprint], paths: Sequence[Path]
) -> Change | str:
    """Whether the rows that were there are still there, at the same places: "same", or "grown" when others came after
    them, else what is different, in words. paths: where the new files are."""
    grown = len(new) > len(old)
    for number, known in enumerate(old):
        if number >= len(new):
            return f"{known.name} is gone"
        now, path = new[number], paths[number]
        name = now.name
        if name != known.name:
            return f"{name} stands where {known.name} was"
        may_grow = number == len(old) - 1 and _may_grow(path)
        if now.size < known.size or (now.size > known.size and not may_grow):
            return f"{name} has changed"
        then = now if now.size == known.size else _fingerprint(name, path, known.size)
        if then.digest != known.digest:
            return f"{name} has changed"
        if now.size > known.size:
            if not (known.ends_line or _begins_line(path, known.size)):
                return f"the last row of {name} has changed"
            grown = True
    return "grown" if grown else "same"


def fingerprint_model(path: Path) -> dict[str, str]:
    """Digests of what a model's folder or GGUF file holds, by what it is for.

    Large files are looked at in part: at their beginning, which has the names, shapes and types of the tensors, at
    their end, and at evenly spaced places. Raises PagedgenError when a file cannot be read.
    """
    if path.is_file():
        return {"weights": _sampled([path])}
    files = sorted(file for file in path.iterdir() if file.is_file() and not file.name.startswith("."))
    kinds: dict[str, list[Path]] = {}
    for file in files:
        if kind := _kind_of(file.name):
            kinds.setdefault(kind, []).append(file)
    return {kind: _sampled(found) for kind, found in sorted(kinds.items())}


def _kind_of(name: str) -> str | None:
    """What a file of a model's folder is for; None when no result depends on it."""
    if name.endswith((".safetensors", ".safetensors.index.json")):
        return "weights"
    if name == "config.json" or name.endswith(".py"):
        return "model config"
    if name == "generation_config.json":
        return "generation config"
    if name.endswith(".jinja"):
        return "chat template"
    if name.endswith((".model", ".tiktoken")) or name in _TOKENIZER_FILES:
        return "tokenizer"
    return None


_TOKENIZER_FILES = frozenset(
    ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json")
) | {"merges.txt", "vocab.txt"}


def _fingerprint(name: str, path: Path, size: int) -> FileFingerprint:
    """Of the first `size` bytes."""
    digest, last = xxhash.xxh3_128(), b"\n"
    with naming_file(path), open(path, "rb") as file:
        for chunk in _chunks(file, size):
            digest.update(chunk)
            last = chunk[-1:]
    return FileFingerprint(name, size, digest.hexdigest(), last == b"\n")


def _chunks(file: BinaryIO, size: int) -> Iterator[bytes]:
    while size and (chunk := file.read(min(size, _CHUNK))):
        size -= len(chunk)
        yield chunk


def _may_grow(path: Path) -> bool:
    return compression_of(path) is None and path.suffix.lower() in _LINE_KINDS


def _begins_line(path: Path, position: int) -> bool:
    r"""Whether the line before `position` ends there: with `\n` or `\r\n`."""
    with naming_file(path), open(path, "rb") as file:
        file.seek(position)
        return file.read(2).lstrip(b"\r").startswith(b"\n")


def _sampled(paths: Sequence[Path]) -> str:
    digest = xxhash.xxh3_128()
    for path in paths:
        with naming_file(path), open(path, "rb") as file:
            size = path.stat().st_size
            digest.update(f"{size}\n".encode())  # not the name: the same weights may lie elsewhere
            for chunk in _chunks(file, _WHOLE_BYTES):
                digest.update(chunk)
            if size > _WHOLE_BYTES:
                step = max((size - _WHOLE_BYTES) // _PIECES, 1)
                for position in (*range(_WHOLE_BYTES, size, step), max(size - _PIECE_BYTES, 0)):
                    file.seek(position)
                    digest.update(file.read(_PIECE_BYTES))
    return digest.hexdigest()
