"""The GPU benchmark, gone through on the CPU: every part with tiny shapes, and what becomes of cases that fail."""

import itertools
import json
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cli_cases import call
from pagedgen_kernels import reference

from benchmarks import gpu, gpu_kernels, gpu_parts, gpu_run, gpu_timing, gpu_trace, gpu_watch
from benchmarks.gpu_kernel_work import Heads, attention
from benchmarks.gpu_parts import PARTS, Case, Figures, Setting
from benchmarks.gpu_trace import Span
from benchmarks.gpu_watch import Limits, watch
from pagedgen import engine as engine_module
from pagedgen.execution import runner
from pagedgen.execution.attention import AttentionBackend

CPU = torch.device("cpu")
RATES = {"copy": 1e10, "read": 1e10, "matmul": 1e11}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the parts keep their models."""
    return tmp_path_factory.mktemp("gpu")


@pytest.fixture
def run_part(folder: Path, tmp_path: Path) -> Callable[[str], list[Figures]]:
    """Runs a part's cases in this process, as the one does that the benchmark starts for it."""

    def run(name: str) -> list[Figures]:
        setting = Setting(device="cpu", tiny=True, folder=str(folder), rates=RATES)
        assert gpu_parts.main([name, setting.as_json(), "--lines", str(tmp_path / "lines")]) == 0
        watched = gpu_watch.Watched(tmp_path / "lines")
        watched.read()
        assert watched.begun is None
        found = [watched.found[index] for index in sorted(watched.found)]
        assert len(found) == len(PARTS[name].load().cases(setting))
        assert [figures for figures in found if "error" in figures] == []
        headers, rows = PARTS[name].load().table(found)
        assert rows
        assert {len(row) for row in rows} == {len(headers)}
        json.dumps(gpu_parts.plain(PARTS[name].load().summary(found)), allow_nan=False)
        return found

    return run


@pytest.fixture
def runs_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines work as on a GPU: with a state of their own, steps planned ahead, and graphs that do their work anew."""
    monkeypatch.setattr(engine_module, "choose_backend", lambda device: AttentionBackend("triton", reference))
    monkeypatch.setattr(runner, "CudaCapture", lambda: lambda run: run() or run)


def test_machine(run_part: Callable[[str], list[Figures]]) -> None:
    found = {figures["case"]: figures for figures in run_part("machine")}
    assert found["packages"]["torch"] == torch.__version__
    assert found["device"]["name"] == "cpu"
    assert all(found[name]["rate"] > 0 for name in ("copy", "read", "matmul"))
    assert set(PARTS["machine"].load().summary(list(found.values()))) == {"copy", "read", "matmul"}


def test_kernels(run_part: Callable[[str], list[Figures]]) -> None:
    found = run_part("kernels")
    assert all(figures["passed"] for figures in found[1:])
    assert PARTS["kernels"].load().summary(found) == {
        "cases": len(found) - 1,
        "passed": len(found) - 1,
        "without_a_case": [],
        "not_passed": [],
    }


def test_same_tokens(run_part: Callable[[str], list[Figures]], runs_ahead: None) -> None:
    found = run_part("same_tokens")
    assert (found[0]["runs_ahead"], found[0]["graphs"], found[1]["graphs"]) == (True, True, False)
    assert all(figures["equal"] == figures["completions"] > 0 and not figures["not_ok"] for figures in found[2:])
    assert PARTS["same_tokens"].load().summary(found)["all_equal"]


def test_engine(run_part: Callable[[str], list[Figures]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_run, "run_command", lambda arguments: call(*arguments)[::2])
    (found,) = run_part("engine")
    assert (found["exit_code"], found["rows"], found["statuses"]) == (0, 42, {"ok": 42})
    assert found["rate"] > 0
    assert found["kv_bytes"] == 16 << 20
    assert PARTS["engine"].load().summary([found])["all_ok"]


def test_a_command_is_run_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_run.run_command(["--version"])[0] == 0
    monkeypatch.setattr(gpu_run, "COMMAND_SECONDS", 0.01)
    code, stderr = gpu_run.run_command(["--version"])
    assert code == -1
    assert "stopped after" in stderr


def test_decode_step(run_part: Callable[[str], list[Figures]], runs_ahead: None) -> None:
    found = run_part("decode_step")
    for figures in found:
        assert "trace_error" not in figures
        assert figures["attention"] == "triton"
        assert figures["step_ms"] > 0
        assert figures["host_ms"] > 0
        assert figures["steps"] == 4
        assert figures["sequences"] == 4
        assert figures["ratio"] == pytest.approx(figures["step_ms"] / figures["floor_ms"])
        assert figures["kernels_a_step"] > 10
        assert figures["by_name"][0]["us"] >= figures["by_name"][-1]["us"] > 0
        assert 0 < figures["busy"] <= 1
    assert PARTS["decode_step"].load().summary(found)["ratio"] == found[0]["ratio"]


def test_decode_attention(run_part: Callable[[str], list[Figures]]) -> None:
    for figures in run_part("decode_attention"):
        assert figures["right"]
        assert figures["share"] == pytest.approx(figures["rate"] / RATES["copy"])
        assert figures["bytes"] == figures["batch"] * figures["context"] * 2 * 2 * 16 * 2
        assert figures["peer"] == "scaled_dot_product_attention"
        assert len(figures["refused"]) == (2 if figures["context"] == 256 else 1)
        assert figures["ratio"] > 0


def test_prefill_attention(run_part: Callable[[str], list[Figures]]) -> None:
    for figures in run_part("prefill_attention"):
        assert figures["right"]
        operations = 4 * 4 * 16 * figures["length"] * (figures["length"] + 1) // 2 * figures["batch"]
        assert figures["rate"] * figures["us"] / 1e6 == pytest.approx(operations)
        assert figures["share"] > 0


def test_throughput(run_part: Callable[[str], list[Figures]]) -> None:
    found = run_part("throughput")
    assert [figures.get("output") for figures in found] == [6, 6, 6, 6, None]
    assert "left_out" in found[-1]
    summary = PARTS["throughput"].load().summary(found)
    assert summary["ratio"] == pytest.approx(max(f["rate"] for f in found[:2]) / found[2]["rate"])


def wrong_kernels(**launchers: Callable[..., Any]) -> Any:
    names = ("paged_attention", "rms_norm", "greedy_argmax", "lowest_kept")
    kept = {name: getattr(reference, name) for name in names}
    return SimpleNamespace(__name__="none.of_them", **(kept | launchers))


def test_kernels_that_are_wrong_do_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = {check.launcher: check for check in gpu_kernels.tiny_checks()}

    def result(launcher: str, function: Callable[..., Any]) -> Figures:
        monkeypatch.setattr(gpu_kernels, "kernels_for", lambda device: wrong_kernels(**{launcher: function}))
        return gpu_kernels.run_check(checks[launcher], CPU)

    def norm(*arguments: Any) -> torch.Tensor:
        return reference.rms_norm(*arguments)

    assert result("rms_norm", norm)["passed"]
    assert not result("rms_norm", lambda *a: norm(*a) * 1.0001)["passed"]
    assert not result("rms_norm", lambda *a: torch.where(norm(*a) > 1, torch.nan, norm(*a)))["passed"]
    assert result("rms_norm", lambda *a: norm(*a) + torch.nan)["largest"] > 1e300
    calls = itertools.count()
    changing = result("rms_norm", lambda *a: norm(*a) * (1 + 2e-6 * next(calls)))
    assert (changing["passed"], changing["repeats"], changing["differing"]) == (False, False, 0)
    assert not result("greedy_argmax", lambda *a: reference.greedy_argmax(*a) + 1)["passed"]
    with pytest.raises(ValueError, match=r"float64 \(3, 8\) instead of"):
        result("rms_norm", lambda *a: norm(*a).double())


def test_a_fallback_to_the_reference_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(__name__="made_up", reference=reference)
    module.rms_norm = lambda *a: module.reference.rms_norm(*a)
    monkeypatch.setitem(sys.modules, "made_up.norm", module)  # type: ignore[arg-type]
    with gpu_kernels.fallbacks(module) as called:  # type: ignore[arg-type]
        module.rms_norm(torch.ones(1, 2), torch.ones(2), 1e-5)
    assert called == ["rms_norm"]
    assert module.reference is reference


def test_attention_cases_have_the_reference_read_what_is_there_alone() -> None:
    work = attention([(1, 5), (1, 0), (3, 20)], Heads("", 4, 2, 16, 8), torch.float32, CPU, block_size=4)
    (out,) = work(reference)
    assert out.shape == (5, 4, 8)
    assert out.isfinite().all()
    assert torch.equal(out, work(reference)[0])


def test_the_launchers_of_all_cases_are_real_ones() -> None:
    checks = gpu_kernels.all_checks()
    assert len({check.name for check in checks}) == len(checks)
    assert all(callable(getattr(reference, check.launcher)) for check in checks)
    assert {check.launcher for check in checks} == {check.launcher for check in gpu_kernels.tiny_checks()}


def test_gaps_between_work_of_the_device() -> None:
    spans = [Span(0, 10, "a"), Span(5, 30, "b"), Span(20, 25, "a"), Span(90, 100, "a"), Span(101, 110, "b")]
    found = gpu_trace.gaps(spans, steps=2)
    assert found == {
        "gaps": 4,
        "largest_gap_us": 60,
        "p99_gap_us": pytest.approx(60, rel=0.04),
        "between_steps_gap_us": 60,
        "long_gaps": 1,
        "busy": pytest.approx(1 - 61 / 110),
    }
    names = gpu_trace.by_name(spans, steps=2)
    assert [(row["name"], row["us"], row["times"]) for row in names] == [("b", 17, 1), ("a", 12.5, 1.5)]
    assert gpu_trace.gaps([], steps=2) == {"gaps": 0}


def test_a_call_is_timed_by_the_clock() -> None:
    calls = [0, 0]

    def count(i: int) -> None:
        calls[i] += 1

    timing = gpu_timing.time_calls([lambda: count(0), lambda: count(1)], CPU)
    assert timing.method == "clock"
    assert 0 < timing.seconds < 0.1
    assert calls[0] == calls[1] > gpu_timing.FEWEST


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
                time.sleep(60)
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
    slow = [sys.executable, "-c", "import time; time.sleep(60)"]
    (only,) = watch([(lambda first, left: slow, tmp_path / "lines")], Limits(0.3, 60), lambda cases: None)
    assert only == {"case": "start", "error": "stopped: the part's time was over"}


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
