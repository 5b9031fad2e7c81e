"""The recording of a run: its steps as a table of bounded length, which is kept in the run folder."""

import io
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pagedgen.stats.types import RunInfo

FORMAT = 1
_METADATA = b"pagedgen.recording"

# How the values of two neighbouring intervals become one: their sum; the larger; that of the first or the last one. A
# "mean" is weighted by the seconds of the steps, a "ratio" by the seconds in which blocks were allocated; both are kept
# as sums of value times seconds.
Kind = Literal["sum", "peak", "first", "last", "mean", "ratio"]
COLUMNS: Mapping[str, Kind] = {
    "session": "first",
    "start_s": "first",
    "end_s": "last",
    "steps": "sum",
    "step_s": "sum",
    "allocated_s": "sum",
    "live_blocks": "mean",
    "cached_blocks": "mean",
    "free_blocks": "mean",
    "filled_tokens": "mean",
    "logical_blocks": "mean",
    "held_tokens": "mean",
    "running": "mean",
    "waiting": "mean",
    "waste": "ratio",
    "sharing_saved": "ratio",
    "sharing_in_requests": "ratio",
    "reserved_max": "mean",
    "reserved_pow2": "mean",
    "reserved_oracle": "mean",
    "peak_live_blocks": "peak",
    "peak_logical_blocks": "peak",
    "peak_running": "peak",
    "prompt_tokens": "sum",
    "cached_prompt_tokens": "sum",
    "output_tokens": "sum",
    "computed_tokens": "sum",
    "sampled_rows": "sum",
    "attention_pairs": "sum",
    "preemptions": "sum",
    "block_copies": "sum",
    "prompt_phase_s": "sum",
    "prompt_phase_output_tokens": "sum",
    "tail_phase_s": "sum",
    "tail_phase_output_tokens": "sum",
    "schedule_s": "sum",
    "build_s": "sum",
    "model_s": "sum",
    "sample_s": "sum",
    "update_s": "sum",
    "write_s": "sum",
    "input_s": "sum",
    "process_bytes": "peak",
    "device_bytes": "peak",
    "touched_blocks": "peak",
    "peak_step_tokens": "peak",
    "peak_step_rows": "peak",
}
INDEX = {name: i for i, name in enumerate(COLUMNS)}
_WEIGHT = {"mean": "step_s", "ratio": "allocated_s"}
_INTEGERS = frozenset(
    {"session", "steps", "touched_blocks"}
    | {name for name in COLUMNS if name.endswith(("_tokens", "_rows", "_pairs", "_bytes", "_copies", "preemptions"))}
    | {name for name, kind in COLUMNS.items() if kind == "peak"}
) - {name for name, kind in COLUMNS.items() if kind in _WEIGHT}


def kinds(*wanted: Kind) -> NDArray[np.intp]:
    """The indices of the columns of these kinds."""
    return np.flatnonzero([kind in wanted for kind in COLUMNS.values()])


@dataclass(frozen=True, slots=True)
class Session:
    """One process of a run. started: ISO 8601 in UTC. offset_s: seconds that earlier processes of the run took;
    elapsed_s: that this one took. phases_s: the seconds of each of its phases. info: what ran on what."""

    started: str
    offset_s: float
    elapsed_s: float
    phases_s: Mapping[str, float]
    info: RunInfo

    @property
    def bytes_per_block(self) -> int:
        return self.info.kv_bytes // self.info.kv_blocks


@dataclass(frozen=True, slots=True)
class Recording:
    """What was recorded, one row for a number of steps that is the same for all rows but the last of a session.

    sums: float64 [N, C] by COLUMNS; means and ratios are multiplied by their seconds. sequences: how many have finished
    and were followed from step to step. reserved: their mean tokens under each of `baselines.POLICIES`. summary: how
    the run stood when this was taken; see `collector.summary_dict`.
    """

    sessions: tuple[Session, ...]
    sums: NDArray[np.float64]
    sequences: int = 0
    reserved: tuple[float, ...] | None = None
    summary: Mapping[str, Any] = field(default_factory=dict)

    def column(self, name: str) -> NDArray[np.float64]:
        """float64 [N]; means and ratios as such, NaN in intervals that have none."""
        values = self.sums[:, INDEX[name]]
        weight = _WEIGHT.get(COLUMNS[name])
        if weight is None:
            return values
        seconds = self.sums[:, INDEX[weight]]
        result = np.full(len(values), np.nan)
        np.divide(values, seconds, out=result, where=seconds > 0)
        return result

    def total(self, name: str) -> float:
        """The sum of a column of sums."""
        assert COLUMNS[name] == "sum"
        return float(self.sums[:, INDEX[name]].sum())

    def mean(self, name: str) -> float | None:
        """The mean of a column over the time of the run; None when there was no such time."""
        seconds = float(self.sums[:, INDEX[_WEIGHT[COLUMNS[name]]]].sum())
        return float(self.sums[:, INDEX[name]].sum()) / seconds if seconds > 0 else None

    def by_session(self, name: str) -> NDArray[np.float64]:
        """float64 [N]: what `Session.info` or a session's property has under this name, for each interval."""
        values = [getattr(s, name) if hasattr(s, name) else getattr(s.info, name) for s in self.sessions]
        result: NDArray[np.float64] = np.array(values, np.float64)[self.sums[:, INDEX["session"]].astype(np.intp)]
        return result

    @property
    def elapsed_s(self) -> float:
        """Seconds that the run took, over all its processes."""
        return self.sessions[-1].offset_s + self.sessions[-1].elapsed_s if self.sessions else 0.0

    @property
    def generating_s(self) -> float:
        """Seconds from the first step of each process to its last, all together."""
        session, start, end = (self.column(name) for name in ("session", "start_s", "end_s"))
        return sum(float(end[session == s].max() - start[session == s].min()) for s in np.unique(session))

    def table(self) -> pa.Table:
        """The intervals as a table with the columns of COLUMNS; intervals without a value have null."""
        arrays = [_array(self.column(name), name in _INTEGERS) for name in COLUMNS]
        return pa.table(arrays, names=list(COLUMNS))

    def write(self, path: Path) -> int:
        """Replace the file; nobody waits for the disk. How many bytes that were. Raises OSError."""
        about = {
            "format": FORMAT,
            "sessions": [asdict(session) for session in self.sessions],
            "sequences": self.sequences,
            "reserved": self.reserved,
            "summary": self.summary,
        }
        table = self.table().replace_schema_metadata({_METADATA: json.dumps(about, default=str)})
        buffer = io.BytesIO()
        pq.write_table(table, buffer, compression="zstd", use_dictionary=False)
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_bytes(buffer.getbuffer())
        os.replace(temporary, path)
        return buffer.tell()


def _array(values: NDArray[np.float64], is_integer: bool) -> pa.Array:
    """The values as Arrow has them, NaN as null. `pa.array` would import pandas for it, which takes a third of a
    second."""
    if is_integer:
        return pa.Array.from_buffers(
            pa.int64(), len(values), [None, pa.py_buffer(np.round(values).astype(np.int64).tobytes())]
        )
    validity = np.packbits(~np.isnan(values), bitorder="little").tobytes()
    return pa.Array.from_buffers(pa.float64(), len(values), [pa.py_buffer(validity), pa.py_buffer(values.tobytes())])


def read_recording(path: Path) -> Recording | None:
    """The recording in a file; None when there is none, or none that can be read."""
    try:
        table = pq.read_table(path)
        about = json.loads((table.schema.metadata or {})[_METADATA])
        if about["format"] != FORMAT:
            return None
        sessions = tuple(_session(values) for values in about["sessions"])
        values = {name: np.array(table[name].to_pylist(), np.float64) for name in COLUMNS}  # null becomes NaN
        for name, kind in COLUMNS.items():
            if kind in _WEIGHT:
                values[name] = np.nan_to_num(values[name]) * values[_WEIGHT[kind]]
        reserved = about["reserved"]
        sums = np.stack([values[name] for name in COLUMNS], axis=1)
        reserved = None if reserved is None else tuple(reserved)
        return Recording(sessions, sums, about["sequences"], reserved, about["summary"])
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException):
        return None


def _session(values: Mapping[str, Any]) -> Session:
    known = {item.name for item in fields(RunInfo)}
    info = RunInfo(**{name: value for name, value in values["info"].items() if name in known})
    return Session(**{**values, "info": info})
