"""Plans that were made, so that a run's report can show them beside what came of them."""

import hashlib
import json
from dataclasses import asdict
from typing import Any

from pagedgen import user_state
from pagedgen.config import JobConfig
from pagedgen.data.readers import InputSource

# Raise it when plans of an older version are not to be compared any more.
_VERSION = 1


def plan_key(config: JobConfig, source: InputSource) -> str:
    """What a plan and the run it is for have in common: the input and its files with their sizes, the prompting, the
    model, the options of generation and engine, and the width of a beam search. Where it writes to does not matter.

    Call it before the rows of a stream or dataset are read: their first rows count too.
    """
    files = [(str(path.resolve()), path.stat().st_size) for path in source.files]
    common: dict[str, Any] = {
        "version": _VERSION,
        "input": [source.description, files, None if source.files else source.fingerprint().as_json()],
        "prompt": asdict(config.prompt),
        "engine": asdict(config.engine),
        "options": sorted((name, repr(value)) for name, value in config.overrides.items()),
        "width": None if config.beam is None else config.beam.width,
    }
    return hashlib.sha256(json.dumps(common, sort_keys=True).encode()).hexdigest()[:32]


def save_plan(key: str, expected: dict[str, Any]) -> None:
    """Keep what a plan expects, in place of an earlier plan of the same run. Failures are passed over.

    expected: "made" (ISO 8601), and as numbers "rows", "prompt_tokens" (computed, without those found in the prefix
    cache), "output_tokens", "steps", "generating_s", "peak_kv_bytes", "peak_running" and "output_bytes".
    """
    user_state.write_json(user_state.state_folder() / "plans" / f"{key}.json", expected)


def load_plan(key: str) -> dict[str, Any] | None:
    """What the last plan with this key expects; None when none was made."""
    return user_state.read_json(user_state.state_folder() / "plans" / f"{key}.json")
