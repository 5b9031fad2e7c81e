"""What is remembered between commands: which run was the latest, plans, and profiles of the machine."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

_LATEST = "latest-run"


def state_folder() -> Path:
    """`$XDG_STATE_HOME/pagedgen`, by default under `~/.local/state`; it need not exist."""
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "pagedgen"


def latest_run() -> Path | None:
    """The run folder that `note_run` was last told of; None when there was none."""
    try:
        return Path((state_folder() / _LATEST).read_text("utf-8").strip())
    except (OSError, ValueError):
        return None


def note_run(run_folder: Path) -> None:
    """Remember a run that begins or goes on. Where that cannot be done, nothing is lost but convenience."""
    _replace(state_folder() / _LATEST, f"{run_folder.resolve()}\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """None when there is no such file, or it holds no object."""
    try:
        values = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return values if isinstance(values, dict) else None


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Replace the file whole; what goes wrong is passed over, as nothing depends on it."""
    _replace(path, json.dumps(values, indent=1))


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with suppress(OSError, RuntimeError):  # no home folder is a RuntimeError
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, "utf-8")
        temporary.replace(path)
