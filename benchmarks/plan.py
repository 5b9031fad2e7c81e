"""How near a plan comes: `pagedgen plan` beside the real run of three jobs, after one short run of another job.

The profiling run is all that the plans know of the machine; profiles and plans go to a folder of their own. It is run
again before and after each job: what these two take, relative to the first time, is in the last column, and tells
whether the machine has been the same all the while.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.common import print_table, write_results
from benchmarks.prompts import Chat, gsm8k_chats, mt_bench_chats
from pagedgen import BeamParams, EngineConfig, user_state
from pagedgen.config import InputConfig, JobConfig
from pagedgen.job import run_job
from pagedgen.planning.plan import make_plan
from pagedgen.process import prepare_process
from pagedgen.stats.recording import Recording, read_recording
from pagedgen.stats.text import format_seconds
from pagedgen.units import format_bytes

KV_BYTES = 4 << 30


@dataclass(frozen=True)
class Job:
    """name: what it is, in words. overrides: the generation options."""

    name: str
    chats: Sequence[Chat]
    overrides: dict[str, Any]
    beam: BeamParams | None = None


@dataclass(frozen=True)
class Figures:
    """What a plan expects and what a run took."""

    peak_bytes: float
    seconds: float
    steps: float
    output_tokens: float


@dataclass(frozen=True)
class Result:
    planned: Figures
    measured: Figures
    ratios: dict[str, float]


def jobs() -> tuple[Job, list[Job]]:
    """The profiling run and the jobs that are planned."""
    (_, questions), (_, turns) = gsm8k_chats(), mt_bench_chats()
    profiling = Job("48 MT-bench chats, 48 tokens", turns[:48], {"max_tokens": 48})
    return profiling, [
        Job("128 GSM8K chats, 96 tokens", questions[:128], {"max_tokens": 96}),
        Job(
            "40 MT-bench chats, n=4, 64 tokens",
            turns[40:80],
            {"max_tokens": 64, "n": 4, "ignore_eos": True, "temperature": 0.8},
        ),
        Job("24 GSM8K chats, 4 beams, 64 tokens", questions[200:224], {"max_tokens": 64}, BeamParams(width=4)),
    ]


def config_of(job: Job, folder: Path, model: str | None) -> JobConfig:
    path = folder / "in.jsonl"
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in job.chats))
    return JobConfig(
        InputConfig(str(path)),
        output_path=folder / "out.parquet",
        engine=EngineConfig(model=model, kv_memory=KV_BYTES),
        overrides=job.overrides,
        beam=job.beam,
        quiet=True,
        overwrite=True,
    )


def run(config: JobConfig) -> Recording:
    result = run_job(config)
    recording = read_recording(result.output.with_name(result.output.name + ".run") / "timeline.parquet")
    assert recording is not None, "the run left no recording"
    return recording


def measured(recording: Recording) -> Figures:
    info = recording.sessions[-1].info
    peak = float(recording.column("peak_live_blocks").max())
    seconds = float(recording.column("end_s")[-1] - recording.column("start_s")[0])
    peak_bytes = peak * info.kv_bytes / info.kv_blocks
    return Figures(peak_bytes, seconds, recording.total("steps"), recording.total("output_tokens"))


def planned(config: JobConfig) -> Figures:
    plan = make_plan(replace(config, output_path=None))
    return Figures(plan.peak_kv_bytes, plan.generating_s, plan.steps, plan.of_all("output_tokens"))


def result_of(expected: Figures, found: Figures) -> Result:
    names = [item.name for item in fields(Figures)]
    return Result(expected, found, {name: getattr(expected, name) / getattr(found, name) for name in names})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a Hub id, a folder or a .gguf file; left out: the default model")
    model = parser.parse_args().model
    prepare_process()
    profiling, planned_jobs = jobs()
    with (
        tempfile.TemporaryDirectory() as name,
        mock.patch.object(user_state, "state_folder", return_value=Path(name) / "state"),
    ):
        folder = Path(name)
        probes = [measured(run(config_of(profiling, folder, model))).seconds]
        print(f"profiled: {profiling.name}, {format_seconds(probes[0])}", flush=True)
        # All before the first job: each run leaves a profile of its own.
        plans = {job.name: planned(config_of(job, folder, model)) for job in planned_jobs}
        results: dict[str, Result] = {}
        for job in planned_jobs:
            found = measured(run(config_of(job, folder, model)))
            results[job.name] = result_of(plans[job.name], found)
            probes.append(measured(run(config_of(profiling, folder, model))).seconds)
        changes = [(before + after) / 2 / probes[0] for before, after in pairwise(probes)]
    rows = [
        (
            name,
            format_bytes(result.planned.peak_bytes),
            format_bytes(result.measured.peak_bytes),
            f"{result.ratios['peak_bytes']:.2f}",
            format_seconds(result.planned.seconds),
            format_seconds(result.measured.seconds),
            f"{result.ratios['seconds']:.2f}",
            f"{factor:.2f}",
        )
        for (name, result), factor in zip(results.items(), changes, strict=True)
    ]
    headers = ("job", "KV peak planned", "measured", "ratio", "time planned", "measured", "ratio", "machine")
    print_table("plan against run", headers, rows)
    write_results("plan", {"probes_s": probes, "jobs": {name: asdict(result) for name, result in results.items()}})


if __name__ == "__main__":
    main()
