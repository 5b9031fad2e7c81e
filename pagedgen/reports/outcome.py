"""What was planned for a run beside what came of it."""

import math
from dataclasses import dataclass
from pathlib import Path

from pagedgen.data.layout import PLAN_NAME
from pagedgen.data.manifest import Manifest
from pagedgen.stats.recording import Recording
from pagedgen.user_state import read_json


@dataclass(frozen=True, slots=True)
class PlanLine:
    """One quantity. unit: rows, tokens, steps, s or bytes."""

    quantity: str
    unit: str
    planned: float
    measured: float

    @property
    def ratio(self) -> float | None:
        """Planned, of what was measured."""
        return self.planned / self.measured if self.measured else None


def compare_plan(folder: Path, r: Recording, manifest: Manifest) -> tuple[PlanLine, ...]:
    """The lines of the plan that the run folder holds; none when nothing was planned."""
    planned = read_json(folder / PLAN_NAME)
    if planned is None:
        return ()
    per_block = r.by_session("bytes_per_block")
    measured = {
        "rows": ("rows", manifest.rows),
        "prompt_tokens": ("tokens", r.total("prompt_tokens")),
        "output_tokens": ("tokens", r.total("output_tokens")),
        "steps": ("steps", r.total("steps")),
        "generating_s": ("s", r.generating_s),
        "peak_kv_bytes": ("bytes", float((r.column("peak_live_blocks") * per_block).max())),
        "peak_running": ("sequences", float(r.column("peak_running").max())),
        "output_bytes": ("bytes", manifest.output_bytes),
    }
    return tuple(
        PlanLine(name, unit, float(planned[name]), float(value))
        for name, (unit, value) in measured.items()
        if value is not None and _is_amount(planned.get(name))
    )


def _is_amount(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value >= 0
