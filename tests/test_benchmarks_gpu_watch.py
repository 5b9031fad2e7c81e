"""What becomes of cases of the GPU benchmark that fail, crash or hang, and of parts that do."""

import json
import os
import signal
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu, gpu_parts, gpu_watch
from benchmarks.gpu_parts import PARTS, Case, Figures, Setting
from benchmarks.gpu_watch import Limits, watch


def lines_of(path: Path) -> list[Figures]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_a_case_that_raises_costs_itself_alone(tmp_path: Path) -> None:
    def fail() -> Figures:
        raise KeyError("gone\nand more")

    cases = list(enumerate([Case("a", fail), Case("b", lambda: {"x": float("nan")}), Case("c", fail)]))
    asked: list[bool] = []
    assert gpu_parts.run_cases(cases[:2], tmp_path / "lines", 60, lambda: not asked.append(True)) == 0
    begun, failed, _, passed = lines_of(tmp_path / "lines")
    assert begun == {"index": 0, "case": "a", "begun": True}
    assert failed["error"] == "KeyError: 'gone\\nand more'"
    assert failed["traceback"][-1].startswith("KeyError")
    assert passed["x"] == "nan"
    assert asked == [True]
    assert gpu_parts.run_cases(cases[2:], tmp_path / "lines", 60, lambda: False) == gpu_parts.DEVICE_FAILED
    gpu_parts.run_cases(cases[1:2], tmp_path / "late", -1, lambda: True)
    assert lines_of(tmp_path / "late") == [{"index": 1, "case": "b", "error": "left out: the part's time was over"}]


# Writes what a process of a part writes: case 1 crashes, case 3 hangs, and a process that begins at 5 comes to no case.
CHILD = textwrap.dedent(
    """
    import json, os, sys, time
    path, first, every = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    with open(path, "a") as file:
        for index in range(first, 7, every):
            if first == 5:
                sys.exit(7)
            file.write(json.dumps({"index": index, "case": f"case {index}", "begun": True}) + "\\n")
            file.flush()
            if index == 1:
                os.abort()
            if index == 3:
                time.sleep(600)
            file.write(json.dumps({"index": index, "case": f"case {index}", "done": True}) + "\\n")
            file.flush()
            if index == 4:
                sys.exit(3)
    """
)


def watch_child(folder: Path, every: int, seconds: float = 20.0) -> tuple[list[Figures], list[int]]:
    def command(number: int) -> gpu_watch.Command:
        path = folder / f"{every}-{number}"
        return lambda first, left: [sys.executable, "-c", CHILD, str(path), str(first), str(every)]

    progress: list[int] = []
    commands = [(command(number), folder / f"{every}-{number}") for number in range(every)]
    return watch(commands, Limits(seconds, 0.6), lambda cases: progress.append(len(cases))), progress


def test_what_crashes_or_hangs_costs_its_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_watch, "POLL_SECONDS", 0.05)
    found, progress = watch_child(tmp_path, every=1)
    done = {"done": True}
    assert found[0] == {"case": "case 0"} | done
    assert found[1] == {"case": "case 1", "error": "its process ended with exit code -6"}
    assert found[2] == {"case": "case 2"} | done
    assert found[3]["error"].startswith("stopped after ")
    assert found[4] == {"case": "case 4"} | done
    assert found[5] == {"case": "start", "error": "its process ended with exit code 7"}
    assert len(found) == 6
    assert progress == sorted(progress)
    assert progress[-1] == 6


def test_cases_side_by_side_keep_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_watch, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(gpu_watch, "LEAST_SECONDS", 0.0)
    found, _ = watch_child(tmp_path, every=2)
    assert [figures["case"] for figures in found] == [
        "case 0",
        "case 1",
        "case 2",
        "case 3",
        "case 4",
        "start",
        "case 6",
    ]


def test_a_part_ends_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_watch, "POLL_SECONDS", 0.05)
    slow = [sys.executable, "-c", "import time; time.sleep(600)"]
    (only,) = watch([(lambda first, left: slow, tmp_path / "lines")], Limits(0.3, 60), lambda cases: None)
    assert only == {"case": "start", "error": "stopped: the part's time was over"}


def test_an_interrupted_part_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_watch, "POLL_SECONDS", 0.05)
    slow = [sys.executable, "-c", "import time; time.sleep(600)"]
    commands: list[tuple[gpu_watch.Command, Path]] = [(lambda first, left: slow, tmp_path / "lines")]
    threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    stopped: list[Any] = []
    stop = gpu_watch._stop
    monkeypatch.setattr(gpu_watch, "_stop", lambda process: stop(process) or stopped.append(process.poll()))
    with pytest.raises(KeyboardInterrupt):
        watch(commands, Limits(60, 60), lambda cases: None)
    assert stopped == [-signal.SIGKILL]


@pytest.mark.parametrize(("cores", "tiny", "processes"), [(16, False, 8), (2, False, 2), (16, True, 1)])
def test_a_part_that_compiles_has_no_more_processes_than_cores(
    cores: int, tiny: bool, processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    monkeypatch.setattr(gpu, "core_count", lambda: cores)
    monkeypatch.setattr(gpu, "watch", lambda commands, *_: counts.append(len(commands)) or [])
    gpu.run_part(PARTS["kernels"], Setting(tiny=tiny), gpu.Results(tmp_path / "gpu.json", {}), 60)
    assert counts == [processes]


def test_what_comes_last_may_be_cut() -> None:
    """The parts in their order; the limits of all of them are more than there is."""
    assert list(PARTS)[-2:] == ["decode_attention", "prefill_attention"]
    assert list(PARTS)[:3] == ["machine", "kernels", "same_tokens"]


def run_gpu(monkeypatch: pytest.MonkeyPatch, cases: dict[str, list[Figures]], *arguments: str) -> list[Any]:
    """Run the benchmark with made-up cases of its parts; what the processes would have been started with."""
    commands: list[Any] = []

    def made_up(
        processes: Any, limits: Limits, on_progress: Callable[[list[Figures]], None], env: Any
    ) -> list[Figures]:
        commands.append(processes[0][0](0, limits.seconds))
        found = cases.get(commands[-1][3], [])
        on_progress(found)
        return found

    monkeypatch.setattr(gpu, "watch", made_up)
    monkeypatch.setattr(signal, "signal", lambda *arguments: None)
    gpu.main([*arguments])
    return commands


def test_the_file_has_all_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    cases: dict[str, list[Figures]] = {
        "machine": [{"case": "device", "name": "H200"}, {"case": "copy", "rate": 4e12}],
        "kernels": [{"case": "rms_norm x float32", "error": "RuntimeError: no", "traceback": []}],
        "throughput": [{"case": "pagedgen 1", "rate": 1.0}, {"case": "pagedgen 2", "rate": "not a number"}],
    }
    path = tmp_path / "new" / "gpu.json"
    commands = run_gpu(monkeypatch, cases, "--json", str(path), "--device", "cuda", "--minutes", "5")
    written = json.loads(path.read_text("utf-8"))
    assert list(written["parts"]) == list(PARTS) == [command[3] for command in commands]
    assert written["machine"]["device"]["name"] == "H200"
    assert written["parts"]["kernels"]["summary"]["failed"] == 1
    assert (
        "error" in written["parts"]["throughput"]["summary"]
    )  # a part that cannot be summed up costs none of the others
    assert all({"cases", "summary", "took_s", "allowed_s"} <= set(part) for part in written["parts"].values())
    assert Setting(**json.loads(commands[1][4])).rates == {"copy": 4e12}
    assert Setting(**json.loads(commands[0][4])).rates == {}
    shown = capsys.readouterr().out
    assert "failed  rms_norm x float32: RuntimeError: no" in shown
    assert "throughput, 0 s of" in shown


def test_parts_can_be_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    options = ("--json", str(tmp_path / "gpu.json"), "--device", "cpu", "--tiny")
    commands = run_gpu(monkeypatch, {}, *options, "--only", "engine,kernels")
    assert [command[3] for command in commands] == ["machine", "kernels", "engine"]
    assert run_gpu(monkeypatch, {}, *options, "--minutes", "0") == []
    written = json.loads((tmp_path / "gpu.json").read_text("utf-8"))
    assert {name: part["summary"] for name, part in written["parts"].items()} == {
        name: {"left_out": "the time was over"} for name in PARTS
    }
    with pytest.raises(SystemExit):
        run_gpu(monkeypatch, {}, *options, "--only", "kernel")
    assert "kernel is none of machine, kernels" in capsys.readouterr().err


def test_a_part_that_cannot_be_imported_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PARTS, "engine", gpu_parts.Part("engine", "benchmarks.no_such_module", 1, 1))
    assert gpu_parts.main(["engine", Setting().as_json(), "--lines", str(tmp_path / "lines"), "--first", "2"]) == 0
    (line,) = lines_of(tmp_path / "lines")
    assert (line["index"], line["case"]) == (2, "start")
    assert line["error"].startswith("ModuleNotFoundError")


@pytest.mark.slow
def test_all_of_it_in_processes_of_their_own(tmp_path: Path) -> None:
    gpu.main(["--device", "cpu", "--tiny", "--json", str(tmp_path / "gpu.json")])
    written = json.loads((tmp_path / "gpu.json").read_text("utf-8"))
    assert list(written["parts"]) == list(PARTS)
    assert [case for part in written["parts"].values() for case in part["cases"] if "error" in case] == []
