"""The GPU benchmark, gone through on the CPU: every part with tiny shapes, as on a GPU but for its kernels."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cli_cases import call
from pagedgen_kernels import reference
from tiny_models import tiny_checkpoint

from benchmarks import gpu_parts, gpu_run, gpu_step, gpu_tokens, gpu_watch
from benchmarks.gpu_parts import PARTS, Figures, Setting
from pagedgen import Completion, Engine, EngineConfig
from pagedgen import engine as engine_module
from pagedgen.execution import runner
from pagedgen.execution.attention import AttentionBackend
from pagedgen.execution.capture import NotCapturable
from pagedgen.request import Status

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
    assert (found[0]["runs_ahead"], found[1]["runs_ahead"]) == (True, True)
    compared = found[2:-1]
    assert all(figures["equal"] == figures["completions"] > 0 and not figures["not_ok"] for figures in compared)
    of_graphs = [figures for figures in compared if ": graphs as" in figures["case"]]
    assert all((f["graphs"], f["graphs_used"], f["notes"]) == (True, True, []) for f in of_graphs)
    assert of_graphs[-1]["graph_sizes"]
    assert "left_out" in found[-1]
    assert PARTS["same_tokens"].load().summary(found)["passed"]


@pytest.mark.parametrize("refuses", [True, False], ids=["captures fail", "no graphs"])
def test_without_graphs_same_tokens_do_not_pass(
    run_part: Callable[[str], list[Figures]], monkeypatch: pytest.MonkeyPatch, runs_ahead: None, refuses: bool
) -> None:
    def refuse(run: Callable[[], None]) -> None:
        raise NotCapturable("CUDA error: operation not permitted when stream is capturing")

    if refuses:
        monkeypatch.setattr(runner, "CudaCapture", lambda: refuse)
    else:
        monkeypatch.setattr(engine_module, "choose_backend", lambda device: AttentionBackend("torch", reference))
    monkeypatch.setattr(gpu_tokens, "has_graphs", lambda setting: True)
    monkeypatch.setattr(gpu_tokens, "failed_capture", lambda setting: {"recovers": True})
    found = run_part("same_tokens")
    summary = PARTS["same_tokens"].load().summary(found)
    assert (summary["all_equal"], summary["graphs_used"], summary["passed"]) == (True, False, False)
    if refuses:
        assert [note.split(":")[0] for note in summary["notes"]] == [
            "decoding steps run without CUDA graphs, because they could not be captured"
        ]


def test_after_a_capture_that_fails_the_device_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    captures: list[Callable[[], object]] = []

    def capture(run: Callable[[], object], pool: str) -> Any:
        captures.append(run)
        if len(captures) == 2 and refused:
            raise NotCapturable(refused)
        return SimpleNamespace(replay=run)

    zeros = torch.zeros
    monkeypatch.setattr(gpu_tokens, "capture_graph", capture)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch, "zeros", lambda size, device: zeros(size))
    monkeypatch.setattr(torch, "randn", lambda size, device: zeros(size))
    refused = "CUDA error: operation not permitted\nmore"
    found = gpu_tokens.failed_capture(Setting(device="cuda"))
    assert found == {"recovers": True, "refused": "CUDA error: operation not permitted"}
    captures.clear()
    refused = ""
    assert not gpu_tokens.failed_capture(Setting(device="cuda"))["recovers"]
    equal = {"case": "greedy: graphs as cpu", "completions": 1, "equal": 1, "not_ok": [], "graphs_used": True}
    assert gpu_tokens.summary([equal, {"case": "a capture that fails", "recovers": True}])["passed"]
    for figures in ({"recovers": False}, {"error": "RuntimeError: captures_underway.empty() INTERNAL ASSERT FAILED"}):
        assert not gpu_tokens.summary([equal, {"case": "a capture that fails", **figures}])["passed"]


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
        with_graphs = not figures["case"].startswith("no graphs")
        assert (figures.get("graphs", False), figures["notes"]) == (with_graphs, [])
        assert figures.get("graph_sizes", [])[-1:] == ([4] if with_graphs else [])
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


def test_where_completions_part_the_gap_is_told(tmp_path: Path) -> None:
    model = str(tiny_checkpoint(tmp_path, "llama"))
    engine = Engine(EngineConfig(model=model, device="cpu", dtype="float32", kv_memory=1 << 22))
    prompts = [(5, 6, 7), (8, 9)]
    expected = {(0, 0): (10, 11, 12), (1, 0): (13, 14, 15)}
    found = gpu_tokens.first_difference(engine, prompts, {(0, 0): (10, 11, 13), (1, 0): (13, 16, 15)}, expected)
    assert (found["row"], found["place"], found["tokens"]) == (1, 1, [16, 14])
    shorter = gpu_tokens.first_difference(engine, prompts, {(0, 0): (10,), (1, 0): (13, 14, 15)}, expected)
    assert shorter == {"row": 0, "sample": 0, "place": 1, "tokens": [11], "gap": None}
    likeliest = gpu_tokens.first_difference(engine, prompts, {(0, 0): (), (1, 0): (13, 14)}, expected)
    assert (likeliest["row"], likeliest["place"]) == (0, 0)


def test_completions_are_compared_by_row_and_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    def completed(self: Any, name: str, kind: str) -> list[Completion]:
        last = 4 if name == "cpu" else 5
        tokens = [(0, 0, (1, 2)), (0, 1, (1, last))]
        return [Completion(row, "", sample, Status.OK, token_ids=ids, score=0.5 * last) for row, sample, ids in tokens]

    monkeypatch.setattr(gpu_tokens.Runs, "completed", completed)
    runner = SimpleNamespace(graphs=SimpleNamespace(_usable=True, _steps={4: None, 1: None}))
    monkeypatch.setattr(gpu_tokens.Runs, "engine", lambda self, name: SimpleNamespace(runner=runner))
    monkeypatch.setattr(gpu_tokens.Runs, "prompts", lambda self, name: [(7, 8)])
    monkeypatch.setattr(gpu_tokens, "first_difference", lambda *arguments: {"row": 0, "place": 1, "gap": 1e-5})
    found = gpu_tokens.compare(gpu_tokens.Runs(Setting()), "beams", "graphs", "cpu")
    assert found == {
        "completions": 2,
        "equal": 1,
        "not_ok": [],
        "largest_score_difference": 0.5,
        "first": {"row": 0, "place": 1, "gap": 1e-5},
        "graphs_used": True,
        "graphs": True,
        "graph_sizes": [1, 4],
        "notes": [],
    }
    case = {"case": "beams: graphs as cpu", **found}
    assert not gpu_tokens.summary([case])["all_equal"]
    assert gpu_tokens.table([case])[1] == [("beams: graphs as cpu", 2, 1, "row 0 token 1 gap 1e-05")]


def test_steps_are_timed_without_a_trace_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = gpu_step.Bench(Setting(device="cpu", tiny=True, folder=str(tmp_path), rates=RATES))
    bench.steps = gpu_step.Steps(2, 4, 60, 2, -55)
    ended = gpu_step.measure(bench, {})
    assert ended["trace_error"] == "the sequences ended before the trace did"
    assert ended["step_ms"] > 0

    def fail(device: torch.device) -> None:
        raise RuntimeError("no profiler")

    monkeypatch.setattr(gpu_step, "Trace", fail)
    bench.steps = gpu_step.TINY_STEPS
    failed = gpu_step.measure(bench, {})
    assert failed["trace_error"] == "RuntimeError: no profiler"
    assert failed["step_ms"] > 0
