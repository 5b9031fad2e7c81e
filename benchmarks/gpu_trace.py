"""What a device did, from a trace of torch's profiler: how long which kernel took, and the gaps between them."""

import json
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.gpu_parts import Figures

DEVICE_WORK = {"kernel", "gpu_memcpy", "gpu_memset"}
LONG_GAP_US = 50.0
NAMES, NAME_LENGTH = 10, 90


class Span(NamedTuple):
    """Work of the device. start, end: in microseconds."""

    start: float
    end: float
    name: str


class Trace:
    """A profile that is started and stopped by calls. On a CPU it follows torch's operations in a kernel's stead."""

    def __init__(self, device: torch.device) -> None:
        activity = torch.profiler.ProfilerActivity
        self._wanted = DEVICE_WORK if device.type == "cuda" else {"cpu_op"}
        self._profile = torch.profiler.profile(activities=[activity.CUDA if device.type == "cuda" else activity.CPU])

    def start(self) -> None:
        self._profile.start()

    def stop(self) -> list[Span]:
        """What was done since the start, in order."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._profile.stop()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(path))
            events: list[dict[str, Any]] = json.loads(path.read_text("utf-8", errors="replace"))["traceEvents"]
        found = [e for e in events if e.get("ph") == "X" and e.get("cat") in self._wanted]
        return sorted(Span(float(e["ts"]), float(e["ts"]) + float(e["dur"]), str(e["name"])) for e in found)


def warm_up(device: torch.device) -> None:
    """Load what the profiler needs, before graphs are captured that it is to look into."""
    trace = Trace(device)
    trace.start()
    torch.ones(8, device=device).sum()
    trace.stop()


def gaps(spans: Sequence[Span], steps: int) -> Figures:
    """The times in which nothing ran, in microseconds, over so many steps. busy: the share of time in which something
    did. between_steps: the median of the longest gaps, one for each step but one."""
    if len(spans) < 2:
        return {"gaps": 0}
    ends = np.maximum.accumulate([span.end for span in spans])
    waits = np.maximum(np.array([span.start for span in spans[1:]]) - ends[:-1], 0.0)
    whole = float(ends[-1] - spans[0].start)
    longest = np.sort(waits)[::-1][: max(1, steps - 1)]
    return {
        "gaps": len(waits),
        "largest_gap_us": float(waits.max()),
        "p99_gap_us": float(np.percentile(waits, 99)),
        "between_steps_gap_us": float(np.median(longest)),
        "long_gaps": int((waits > LONG_GAP_US).sum()),
        "busy": 1 - float(waits.sum()) / whole,
    }


def by_name(spans: Sequence[Span], steps: int) -> list[Figures]:
    """The names that took longest: microseconds of each in a step, and how often it ran in one."""
    total: dict[str, float] = defaultdict(float)
    count: dict[str, int] = defaultdict(int)
    for span in spans:
        total[span.name] += span.end - span.start
        count[span.name] += 1
    names = sorted(total, key=lambda name: -total[name])
    return [
        {"name": name[:NAME_LENGTH], "us": total[name] / steps, "times": round(count[name] / steps, 2)}
        for name in names[:NAMES]
    ]
