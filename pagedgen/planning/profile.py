"""What runs on this machine have shown, for the plans of later ones: one small file for each model and machine."""

import contextlib
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from pagedgen import user_state
from pagedgen.planning.lengths import CAPACITY, OutputLengths
from pagedgen.planning.machine import core_count, figures, is_busy, machine_name
from pagedgen.planning.reservoir import Observation, merge, observed, trusted
from pagedgen.planning.steptime import Array, StepTime, fit, observations, roofline
from pagedgen.stats.recording import Recording
from pagedgen.stats.types import GENERATING, RunInfo

_VERSION = 2
# A run with fewer completions that could stop, or fewer tokens of text, does not replace what a longer one has shown.
LEAST_LENGTHS, LEAST_TEXT = 32, 512
# A first interval that should take fewer seconds tells of warming up and not of steps.
_WARM_UP = 0.3


@dataclass(frozen=True, slots=True)
class Profile:
    """observations: of several runs, newest first in each kind; step_time: what was fitted to those that are trusted.
    These are of `steps` steps of up to `measured_tokens` tokens each, the newest of `date`; was_busy: other work slowed
    most of them.

    load_s: seconds before the first step, of the latest run. activation_bytes: for each token of a step, measured with
    steps of `activation_tokens`. lengths: as of OutputLengths. bytes_per_token: of completions as text, None when it is
    not known.
    """

    date: str
    steps: int
    measured_tokens: int
    was_busy: bool
    step_time: StepTime
    load_s: float
    activation_bytes: float
    activation_tokens: int
    observations: tuple[Observation, ...]
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
            measured_tokens=int(values["measured_tokens"]),
            was_busy=bool(values["was_busy"]),
            step_time=StepTime(**values["step_time"]),
            load_s=float(values["load_s"]),
            activation_bytes=float(values["activation_bytes"]),
            activation_tokens=int(values["activation_tokens"]),
            observations=tuple(Observation(*one) for one in values["observations"]),
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
    info, prior = session.info, prior_of(session.info)
    earlier = load_profile(info.model, info.device, info.dtype, info.kernels)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    new = observed(*_warmed_up(*observations(recording), prior), now, is_busy())
    if not new:
        return
    kept = merge(new, earlier.observations if earlier is not None else ())
    used = trusted(kept)
    per_token, tokens = info.activation_bytes / max(1, info.max_batch_tokens), info.max_batch_tokens
    if earlier is not None and tokens < earlier.activation_tokens:
        per_token, tokens = earlier.activation_bytes, earlier.activation_tokens
    pairs, bytes_per_token = _text_of(lengths, earlier)
    profile = Profile(
        date=max(one.date for one in used),
        steps=round(sum(one.steps for one in used)),
        measured_tokens=round(max(one.tokens / one.steps for one in used)),
        was_busy=sum(one.seconds for one in used if one.was_busy) > sum(one.seconds for one in used) / 2,
        step_time=_fitted(used, prior),
        load_s=_seconds_before_generating(session.phases_s),
        activation_bytes=per_token,
        activation_tokens=tokens,
        observations=tuple(kept),
        lengths=pairs,
        bytes_per_token=bytes_per_token,
    )
    if not np.isfinite(astuple(profile.step_time)).all():
        return
    about = {"version": _VERSION, "model": info.model, "device": info.device, "dtype": info.dtype}
    user_state.write_json(_path(info.model, info.device, info.dtype, info.kernels), about | asdict(profile))


def _warmed_up(work: Array, seconds: Array, prior: StepTime) -> tuple[Array, Array]:
    """The observations without the first one where warming up may have taken the most of it."""
    is_short = len(work) > 1 and float(work[0] @ np.array(astuple(prior))) < _WARM_UP
    return (work[1:], seconds[1:]) if is_short else (work, seconds)


def _fitted(used: Sequence[Observation], prior: StepTime) -> StepTime:
    values = np.array([(one.steps, one.tokens, one.pairs, one.rows, one.seconds) for one in used])
    return fit(values[:, :4], values[:, 4], prior)


def _text_of(lengths: OutputLengths, earlier: Profile | None) -> tuple[tuple[tuple[int, bool], ...], float | None]:
    """The lengths of completions and the bytes of a token, with what earlier runs have shown where this one says
    little."""
    pairs, bytes_per_token = lengths.pairs, lengths.bytes_per_token
    if earlier is not None and len(pairs) < LEAST_LENGTHS:
        pairs = [*pairs, *earlier.lengths][:CAPACITY]
    if earlier is not None and earlier.bytes_per_token is not None and lengths.tokens < LEAST_TEXT:
        bytes_per_token = earlier.bytes_per_token
    return tuple(pairs), bytes_per_token


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
