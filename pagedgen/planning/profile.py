"""What runs on this machine have shown, for the plans of later ones: one small file for each model and machine."""

import contextlib
import hashlib
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from pagedgen import user_state
from pagedgen.planning.lengths import CAPACITY, OutputLengths
from pagedgen.planning.machine import core_count, figures, is_busy, machine_name
from pagedgen.planning.steptime import StepTime, fit, observations, roofline
from pagedgen.stats.recording import Recording
from pagedgen.stats.types import GENERATING, RunInfo

_VERSION = 1
# A run of fewer steps, or with fewer completions that could stop, does not replace what a longer one has shown.
LEAST_STEPS, LEAST_LENGTHS = 20, 32


@dataclass(frozen=True, slots=True)
class Profile:
    """date: ISO 8601, of the run whose steps were fitted, which were `steps`; was_busy: other work slowed it. load_s:
    seconds before the first step. activation_bytes: for each token of a step. lengths: as of OutputLengths.
    bytes_per_token: of completions as text, None when it is not known."""

    date: str
    steps: int
    was_busy: bool
    step_time: StepTime
    load_s: float
    activation_bytes: float
    lengths: tuple[tuple[int, bool], ...] = ()
    bytes_per_token: float | None = None


def record_profile(recording: Recording, lengths: OutputLengths) -> None:
    """Keep what a run has shown; call it once a run is over, finished or not. What goes wrong is passed over.

    recording: of the run; its last session counts. lengths: of the completions of this process.
    """
    with contextlib.suppress(Exception):  # a profile only makes later estimates better: no run may fail for it
        _record(recording, lengths)


def load_profile(model: str, device: str, dtype: str, kernels: str) -> Profile | None:
    """The profile of a model on this machine; None when there is none that can be used. Arguments as in RunInfo."""
    values = user_state.read_json(_path(model, device, dtype, kernels))
    try:
        if values is None or values["version"] != _VERSION:
            return None
        return Profile(
            date=str(values["date"]),
            steps=int(values["steps"]),
            was_busy=bool(values["was_busy"]),
            step_time=StepTime(**values["step_time"]),
            load_s=float(values["load_s"]),
            activation_bytes=float(values["activation_bytes"]),
            lengths=tuple((int(tokens), bool(ended)) for tokens, ended in values["lengths"]),
            bytes_per_token=values["bytes_per_token"],
        )
    except (KeyError, TypeError, ValueError):
        return None


def prior_of(info: RunInfo) -> StepTime:
    """What the machine's figures say of a run. The parameters of layers and head are not told apart there."""
    return roofline(
        figures(info.device, info.dtype),
        weight_bytes=info.weight_bytes,
        active=info.weight_bytes // (4 if info.dtype == "float32" else 2),
        head=0,
        kv_token_bytes=info.kv_bytes / info.kv_blocks / info.block_size,
        vocab_size=info.vocab_size,
    )


def _record(recording: Recording, lengths: OutputLengths) -> None:
    session = recording.sessions[-1]
    info = session.info
    earlier = load_profile(info.model, info.device, info.dtype, info.kernels)
    work, seconds = observations(recording)
    steps = int(work[:, 0].sum())
    if not steps:
        return
    pairs = lengths.pairs
    if earlier is not None and len(pairs) < LEAST_LENGTHS:
        pairs = [*pairs, *earlier.lengths][:CAPACITY]
    bytes_per_token = lengths.bytes_per_token
    if earlier is not None and bytes_per_token is None:
        bytes_per_token = earlier.bytes_per_token
    keeps_steps = earlier is not None and steps < LEAST_STEPS <= earlier.steps
    profile = Profile(
        date=earlier.date if earlier and keeps_steps else datetime.now(UTC).isoformat(timespec="seconds"),
        steps=earlier.steps if earlier and keeps_steps else steps,
        was_busy=earlier.was_busy if earlier and keeps_steps else is_busy(),
        step_time=earlier.step_time if earlier and keeps_steps else fit(work, seconds, prior_of(info)),
        load_s=_seconds_before_generating(session.phases_s),
        activation_bytes=info.activation_bytes / max(1, info.max_batch_tokens),
        lengths=tuple(pairs),
        bytes_per_token=bytes_per_token,
    )
    if not np.isfinite(astuple(profile.step_time)).all():
        return
    about = {"version": _VERSION, "model": info.model, "device": info.device, "dtype": info.dtype}
    user_state.write_json(_path(info.model, info.device, info.dtype, info.kernels), about | asdict(profile))


def _seconds_before_generating(phases_s: Mapping[str, float]) -> float:
    """phases_s: in the order in which the phases began."""
    seconds = 0.0
    for phase, took in phases_s.items():
        if phase == GENERATING:
            break
        seconds += took
    return seconds


def _path(model: str, device: str, dtype: str, kernels: str) -> Path:
    parts = (model, device, dtype, kernels, machine_name(device), str(core_count()))
    key = hashlib.sha256("|".join(parts).encode()).hexdigest()[:32]
    return user_state.state_folder() / "profiles" / f"{key}.json"
