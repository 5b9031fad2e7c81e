"""Whether a run may go on: what its results depend on must be what it was when it began."""

import json
import reprlib
import shlex
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from pagedgen.config import JobConfig
from pagedgen.data.fingerprint import InputFingerprint
from pagedgen.data.layout import OutputLayout
from pagedgen.data.manifest import Manifest
from pagedgen.data.readers import InputSource
from pagedgen.errors import UsageError
from pagedgen.params import flag_of

# What an engine's configuration has that changes results and is no matter of where and how fast they are computed.
_ENGINE_SETTINGS = ("dtype", "quantize", "max_model_len", "on_too_long")
_FILE_KINDS = "the model's {}"
_FLAGS = {"num_return": "return"}


def run_identity(config: JobConfig, model: Mapping[str, str]) -> dict[str, Any]:
    """What the results of a run depend on, apart from the input's rows: name -> value, as JSON gives it back.

    model: the digests of `fingerprint_model`.
    """
    settings: dict[str, Any] = {
        "command": "run" if config.beam is None else "beam",
        **dict(config.overrides),
        **(asdict(config.beam) if config.beam is not None else {}),
        **asdict(config.prompt),
        **{name: getattr(config.engine, name) for name in _ENGINE_SETTINGS},
        "keep": config.keep,
        "token_ids": config.token_ids,
        "format": config.format,
    }
    named = {_FILE_KINDS.format(kind): digest for kind, digest in model.items()}
    identity: dict[str, Any] = json.loads(json.dumps(settings | named))
    return identity


def check_same_run(
    layout: OutputLayout,
    manifest: Manifest,
    identity: Mapping[str, Any],
    source: InputSource,
    fingerprint: InputFingerprint,
) -> bool:
    """Whether the input, whose fingerprint this is now, is exactly what it was; it may have grown too.

    Raises UsageError that lists what else has changed, and the ways out.
    """
    changes = _differences(manifest.identity, identity)
    try:
        known = InputFingerprint.from_json(manifest.input_fingerprint)
    except (KeyError, TypeError):
        changes.append("the manifest does not tell what the input was")
    else:
        change = source.change_since(known, fingerprint)
        if change not in ("same", "grown"):
            changes.append(change)
    if changes:
        raise UsageError(
            f"the run in {layout.run_folder} cannot go on, as its rows would not fit the new ones "
            f"({'; '.join(changes)}); use --overwrite to start again, or another -o to keep both"
        )
    return change == "same"


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What has changed, in words."""
    found = []
    for name in sorted(old.keys() | new.keys()):
        before, now = old.get(name), new.get(name)
        if before == now:
            continue
        if name.startswith(_FILE_KINDS.format("")):
            found.append(f"{name} is another" if before and now else f"{name} {'came' if now else 'went'}")
        elif name == "command":
            found.append(f"it was pagedgen {before}")
        else:
            flag = flag_of(_FLAGS.get(name, name))
            found.append(f"{flag} {'was not given' if before is None else f'was {_show(before)}'}, now {_now(now)}")
    return found


def _now(value: Any) -> str:
    return "it is not" if value is None else f"it is {_show(value)}"


def _show(value: Any) -> str:
    return reprlib.repr(value)


def command_to_go_on(config: JobConfig) -> str:
    """The command line that continues the run: with --overwrite it would begin again."""
    if not config.command:
        return "run the same job again"
    arguments = [argument for argument in config.command[1:] if argument != "--overwrite"]
    piped = ", with the same rows piped in" if config.input.path == "-" else ""
    return shlex.join(["pagedgen", *arguments]) + piped
