"""What a run did and where its memory went, as one value: what the terminal, the page and the JSON show."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

import numpy as np

from pagedgen.data.manifest import Manifest
from pagedgen.reports.find import Run, rows_on_disk
from pagedgen.reports.memory import Owner, owners
from pagedgen.reports.outcome import PlanLine, compare_plan
from pagedgen.stats.baselines import POLICIES
from pagedgen.stats.recorder import BETWEEN
from pagedgen.stats.recording import Recording

STEP_PARTS = ("schedule", "build", "model", "sample", "update", *BETWEEN)


@dataclass(frozen=True, slots=True)
class RunHead:
    """status: finished, interrupted, failed, killed or running. started, finished: ISO 8601. processes: how many the
    run took; elapsed_s: the seconds that they took; generating_s: of these, from the first step of each to its last."""

    output: str
    input: str
    model: str
    version: str
    command: tuple[str, ...]
    status: str
    started: str
    finished: str | None
    processes: int
    elapsed_s: float
    generating_s: float
    phases_s: Mapping[str, float]
    device: str
    dtype: str
    kernels: str


@dataclass(frozen=True, slots=True)
class Rows:
    """total: rows in the input; an estimate unless `total_is_exact`, None while not known. eta_s: of a running job."""

    done: int
    total: int | None
    total_is_exact: bool
    eta_s: float | None
    statuses: Mapping[str, int]
    finish_reasons: Mapping[str, int]
    errors: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Pool:
    """The KV pool. Shares are of its bytes, 0 to 1. waste: the share of the allocated slots that held no token; means
    are weighted by time. cached: what was kept for later prompts."""

    bytes: int
    blocks: int
    block_size: int
    bytes_per_token: int
    peak_bytes: int
    mean_bytes: int
    peak_share: float
    mean_share: float
    mean_cached_bytes: int
    waste: float | None
    peak_running: int
    mean_running: float | None
    preemptions: int
    block_copies: int


@dataclass(frozen=True, slots=True)
class Allocation:
    """A way to allocate, for the sequences that ran at a time in this run. policy: paged, oracle, pow2 or max.

    tokens_per_sequence: slots that it takes for a sequence, a mean over time. mean_bytes: what it held; peak_bytes: the
    most in any recorded interval. utilisation: the share of it that holds a token. sequences_that_fit: how many of them
    the pool would hold at a time.
    """

    policy: str
    tokens_per_sequence: float
    mean_bytes: int
    peak_bytes: int
    utilisation: float
    sequences_that_fit: int


@dataclass(frozen=True, slots=True)
class Sharing:
    """saved: the share of the blocks that would be needed without sharing; in_requests: by the samples or beams of one
    row; by_prefixes: between rows. prefix_hits: prompt tokens found in the cache, of all prompt tokens.
    peak_bytes_without: what the blocks would have taken at their most without sharing."""

    saved: float | None
    in_requests: float | None
    by_prefixes: float | None
    prefix_hits: float | None
    cached_prompt_tokens: int
    peak_bytes_without: int


@dataclass(frozen=True, slots=True)
class Phase:
    """A kind of steps. name: "prompts": steps that compute prompts, or again what was preempted; "decoding": those that
    do not; "tail": of these, those with nothing waiting to take the place of what ends. seconds: their time; rates per
    second."""

    name: str
    seconds: float
    share: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Tokens:
    """Prompt tokens computed, and generated ones; with their rates over the time of the steps."""

    prompt: int
    output: int
    computed: int
    steps: int
    prompt_per_s: float
    output_per_s: float


@dataclass(frozen=True, slots=True)
class RunReport:
    """All of it; the last four are empty while nothing has been recorded. step_parts_s: seconds of each part of the
    steps and of what is done between them. recording: the series itself."""

    head: RunHead
    rows: Rows
    tokens: Tokens | None
    pool: Pool | None
    allocations: tuple[Allocation, ...]
    sharing: Sharing | None
    phases: tuple[Phase, ...]
    step_parts_s: Mapping[str, float]
    memory: tuple[Owner, ...]
    plan: tuple[PlanLine, ...]
    recording: Recording | None

    def as_json(self) -> dict[str, Any]:
        """Ready for JSON: seconds, bytes, tokens, shares 0 to 1; null is "not known". Without the series."""
        values = {name: getattr(self, name) for name in self.__slots__ if name not in ("recording", "step_parts_s")}
        result = {name: _plain(value) for name, value in values.items()}
        return result | {"step_parts_s": dict(self.step_parts_s)}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [asdict(item) for item in value]
    return None if value is None else asdict(value)


def make_report(run: Run) -> RunReport:
    """The report of a run, be it running, interrupted or finished."""
    recording = run.recording
    head, rows = _head(run), _rows(run)
    if recording is None or not len(recording.sums):
        return RunReport(head, rows, None, None, (), None, (), {}, (), (), recording)
    return RunReport(
        head=head,
        rows=rows,
        tokens=_tokens(recording),
        pool=_pool(recording),
        allocations=_allocations(recording),
        sharing=_sharing(recording),
        phases=_phases(recording),
        step_parts_s=_step_parts(recording),
        memory=owners(recording),
        plan=compare_plan(run.folder, recording, run.manifest),
        recording=recording,
    )


def _head(run: Run) -> RunHead:
    manifest, recording = run.manifest, run.recording
    sessions = recording.sessions if recording is not None else ()
    phases: dict[str, float] = {}
    for session in sessions:
        for name, seconds in session.phases_s.items():
            phases[name] = phases.get(name, 0.0) + seconds
    info = sessions[-1].info if sessions else None
    return RunHead(
        output=manifest.output,
        input=manifest.input,
        model=manifest.model,
        version=manifest.version,
        command=manifest.command,
        status=run.status,
        started=manifest.started,
        finished=manifest.finished,
        processes=max(len(sessions), 1),
        elapsed_s=recording.elapsed_s if recording is not None else _seconds(manifest),
        generating_s=recording.generating_s if recording is not None else 0.0,
        phases_s=phases,
        device=info.device if info else "",
        dtype=info.dtype if info else manifest.dtype or "",
        kernels=info.kernels if info else "",
    )


def _seconds(manifest: Manifest) -> float:
    """From a run's beginning to its end, where nothing else tells."""
    if manifest.finished is None:
        return 0.0
    began, ended = (datetime.fromisoformat(text) for text in (manifest.started, manifest.finished))
    return (ended - began).total_seconds()


def _rows(run: Run) -> Rows:
    """Of a run whose process died, what is on the disk: what else it had finished is lost."""
    summary = run.recording.summary if run.recording is not None else {}
    manifest = run.manifest
    done = manifest.rows if manifest.rows is not None else summary.get("rows_done", 0)
    exact = manifest.rows if manifest.rows is not None else summary.get("rows_total")
    statuses = manifest.statuses or summary.get("completions_by_status", {})
    if run.status == "killed":
        done, statuses = rows_on_disk(run)
    return Rows(
        done=done,
        total=exact if exact is not None else summary.get("rows_total_estimate"),
        total_is_exact=exact is not None,
        eta_s=summary.get("eta_s") if run.is_running else None,
        statuses=statuses,
        finish_reasons=summary.get("finish_reasons", {}),
        errors=tuple(summary.get("errors", ())),
    )


def _tokens(r: Recording) -> Tokens:
    seconds = r.generating_s
    prompt, output = r.total("prompt_tokens"), r.total("output_tokens")
    return Tokens(
        prompt=int(prompt),
        output=int(output),
        computed=int(r.total("computed_tokens")),
        steps=int(r.total("steps")),
        prompt_per_s=prompt / seconds if seconds else 0.0,
        output_per_s=output / seconds if seconds else 0.0,
    )


def _mean(r: Recording, name: str, scale: Any = 1.0) -> float:
    """The mean over time of a column times `scale`, which may differ between intervals; 0 when no time has passed."""
    seconds = r.column("step_s")
    values = np.nan_to_num(r.column(name)) * scale
    return float((values * seconds).sum() / seconds.sum()) if seconds.sum() > 0 else 0.0


def _pool(r: Recording) -> Pool:
    per_block, pool = r.by_session("bytes_per_block"), r.by_session("kv_bytes")
    info = r.sessions[-1].info
    peak = r.column("peak_live_blocks") * per_block
    return Pool(
        bytes=info.kv_bytes,
        blocks=info.kv_blocks,
        block_size=info.block_size,
        bytes_per_token=r.sessions[-1].bytes_per_block // info.block_size,
        peak_bytes=int(peak.max()),
        mean_bytes=round(_mean(r, "live_blocks", per_block)),
        peak_share=float((peak / pool).max()),
        mean_share=_mean(r, "live_blocks", per_block / pool),
        mean_cached_bytes=round(_mean(r, "cached_blocks", per_block)),
        waste=r.mean("waste"),
        peak_running=int(r.column("peak_running").max()),
        mean_running=r.mean("running"),
        preemptions=int(r.total("preemptions")),
        block_copies=int(r.total("block_copies")),
    )


def _allocations(r: Recording) -> tuple[Allocation, ...]:
    """What paging took beside what contiguous allocation would have reserved; the latter is known once sequences have
    finished."""
    running = r.mean("running")
    if not running:
        return ()
    size, per_block = r.by_session("block_size"), r.by_session("bytes_per_block")
    per_token, pool_tokens = per_block / size, r.by_session("kv_bytes") / (per_block / size)

    def allocation(policy: str, column: str, scale: Any, held: str, peak: int | None = None) -> Allocation | None:
        tokens = _mean(r, column, scale)
        if not tokens:
            return None
        each = tokens / running
        return Allocation(
            policy=policy,
            tokens_per_sequence=each,
            mean_bytes=round(_mean(r, column, scale * per_token)),
            peak_bytes=round(float((r.column(column) * scale * per_token).max())) if peak is None else peak,
            utilisation=_mean(r, held) / tokens,
            sequences_that_fit=int(float(pool_tokens[-1]) / each),
        )

    ones = np.ones(len(size))
    peak = int((r.column("peak_live_blocks") * per_block).max())
    found = [allocation("paged", "live_blocks", size, "filled_tokens", peak)]
    found += [allocation(policy, f"reserved_{policy}", ones, "held_tokens") for policy in reversed(POLICIES)]
    return tuple(item for item in found if item is not None)


def _sharing(r: Recording) -> Sharing:
    saved, within = r.mean("sharing_saved"), r.mean("sharing_in_requests")
    prompt, cached = r.total("prompt_tokens"), r.total("cached_prompt_tokens")
    return Sharing(
        saved=saved,
        in_requests=within,
        by_prefixes=saved - within if saved is not None and within is not None else None,
        prefix_hits=cached / (prompt + cached) if prompt + cached else None,
        cached_prompt_tokens=int(cached),
        peak_bytes_without=int((r.column("peak_logical_blocks") * r.by_session("bytes_per_block")).max()),
    )


def _phases(r: Recording) -> tuple[Phase, ...]:
    step, prompt, tail = r.total("step_s"), r.total("prompt_phase_s"), r.total("tail_phase_s")
    output = r.total("output_tokens")
    in_prompt, in_tail = r.total("prompt_phase_output_tokens"), r.total("tail_phase_output_tokens")
    phases = (
        ("prompts", prompt, r.total("prompt_tokens"), in_prompt),
        ("decoding", step - prompt - tail, 0.0, output - in_prompt - in_tail),
        ("tail", tail, 0.0, in_tail),
    )
    return tuple(
        Phase(name, seconds, seconds / step, prompts / seconds, outputs / seconds)
        for name, seconds, prompts, outputs in phases
        if seconds > 1e-9
    )


def _step_parts(r: Recording) -> dict[str, float]:
    parts = {part: r.total(f"{part}_s") for part in STEP_PARTS}
    return parts | {"other": max(r.generating_s - sum(parts.values()), 0.0)}
