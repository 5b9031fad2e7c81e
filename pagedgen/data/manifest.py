"""The manifest: what a run was asked to do and how it stands, in `<output>.run/manifest.json`.

The finished parts are not listed in it: a part counts from the moment it has its name.
"""

import base64
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from pagedgen.data.files import FileLayer, write_json

MANIFEST_NAME = "manifest.json"
RunStatus = Literal["running", "finished", "interrupted", "failed"]


@dataclass(frozen=True, slots=True)
class Retry:
    """Rows that are run again. statuses: those with one of these. before_part: as found in the parts below this number;
    what later parts hold has been run again already."""

    statuses: tuple[str, ...]
    before_part: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """A run as it is recorded. Times are ISO 8601 in UTC.

    version: of pagedgen. command: the command line. input, output: in words and as a path. process: the id of the one
        that wrote this last. parameters: everything that was set, by the names of the options.
    schema: the output's columns and their types, in order. input_schema: the input's, as Arrow's IPC message in base
    64:
        it was inferred from the first rows, and holds for those that come later too.
    identity: what the results depend on, besides the input's rows: a run that goes on must have the same.
    input_fingerprint: of what the input held. dtype: what the model ran in.
    merged: whether the single output file holds rows of this run, those whose parts are not there any more.
    output_bytes: the size of that file when the run finished.
    replaces: whether an output file that is there may be replaced: the command said so, or it is this run's own.
    rows: how many the input has, and statuses: how many completions have each; null before the run has finished.
    """

    version: str
    command: tuple[str, ...]
    model: str
    input: str
    output: str
    started: str
    schema: Mapping[str, str]
    parameters: Mapping[str, Any] = field(default_factory=dict)
    identity: Mapping[str, Any] = field(default_factory=dict)
    input_schema: str = ""
    input_fingerprint: Mapping[str, Any] = field(default_factory=dict)
    dtype: str | None = None
    process: int = 0
    merged: bool = False
    output_bytes: int | None = None
    replaces: bool = False
    retry: Retry | None = None
    rows: int | None = None
    statuses: Mapping[str, int] | None = None
    status: RunStatus = "running"
    finished: str | None = None

    def ended(self, status: RunStatus) -> "Manifest":
        """The manifest of the same run that ended now."""
        return replace(self, status=status, finished=utc_now())


def utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def pack_schema(schema: pa.Schema) -> str:
    return base64.b64encode(schema.serialize()).decode()


def unpack_schema(text: str) -> pa.Schema:
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text)))


def write_manifest(folder: Path, manifest: Manifest, files: FileLayer | None = None) -> None:
    """Writes or replaces the manifest in a run folder, atomically. Raises PagedgenError."""
    write_json(folder / MANIFEST_NAME, asdict(manifest), files)


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest in a run folder, or None when there is none that can be read."""
    try:
        values = json.loads((folder / MANIFEST_NAME).read_text("utf-8"))
        known = {item.name for item in fields(Manifest)}
        return Manifest(**{name: value for name, value in values.items() if name in known} | _parsed(values))
    except (OSError, ValueError, TypeError, AttributeError, KeyError):
        return None


def _parsed(values: Mapping[str, Any]) -> dict[str, Any]:
    retry = values.get("retry")
    return {
        "command": tuple(values["command"]),
        "retry": None if retry is None else Retry(tuple(retry["statuses"]), int(retry["before_part"])),
    }
