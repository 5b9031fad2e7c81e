"""The manifest: what a run was asked to do and how it stands, in `<output>.run/manifest.json`.

The finished parts are not listed in it: a part counts from the moment it has its name.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pagedgen.data.files import FileLayer, write_json

MANIFEST_NAME = "manifest.json"
RunStatus = Literal["running", "finished", "interrupted", "failed"]


@dataclass(frozen=True, slots=True)
class Manifest:
    """A run as it is recorded. Times are ISO 8601 in UTC.

    version: of pagedgen. command: the command line. input, output: in words and as a path. parameters: everything that
    was set, by the names of the options. schema: the output's columns and their types, in order.
    """

    version: str
    command: tuple[str, ...]
    model: str
    input: str
    output: str
    started: str
    schema: Mapping[str, str]
    parameters: Mapping[str, Any] = field(default_factory=dict)
    status: RunStatus = "running"
    finished: str | None = None

    def ended(self, status: RunStatus) -> "Manifest":
        """The manifest of the same run that ended now."""
        return replace(self, status=status, finished=utc_now())


def utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def write_manifest(folder: Path, manifest: Manifest, files: FileLayer | None = None) -> None:
    """Writes or replaces the manifest in a run folder, atomically. Raises PagedgenError."""
    write_json(folder / MANIFEST_NAME, asdict(manifest), files)


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest in a run folder, or None when there is none that can be read."""
    try:
        values = json.loads((folder / MANIFEST_NAME).read_text("utf-8"))
        known = {item.name for item in fields(Manifest)}
        return Manifest(**{name: value for name, value in values.items() if name in known} | _tuples(values))
    except (OSError, ValueError, TypeError, AttributeError, KeyError):
        return None


def _tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    return {"command": tuple(values["command"])}
