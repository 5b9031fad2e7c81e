"""What the parts of the GPU benchmark are made of: checks that can fail, traces, and work timed on a device that is not
there."""

import itertools
import sys
from collections.abc import Callable
from dataclasses import asdict, make_dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_cuda import Cuda
from pagedgen_kernels import reference

from benchmarks import gpu_decode, gpu_kernels, gpu_machine, gpu_throughput, gpu_timing, gpu_trace
from benchmarks.gpu_kernel_work import LLAMA_1B, LLAMA_8B, Heads, attention
from benchmarks.gpu_parts import Figures, Setting
from benchmarks.gpu_trace import Span

CPU = torch.device("cpu")


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


@pytest.mark.parametrize(("captures", "method"), [(True, "graph replays"), (False, "launches")])
def test_a_call_is_timed_by_events(captures: bool, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = RuntimeError("CUDA error: operation not permitted when stream is capturing")
    cuda, calls = Cuda(monkeypatch, None if captures else refused), itertools.count()
    timing = gpu_timing.time_calls([lambda: next(calls)] * 4, torch.device("cuda"))
    assert timing == (0.005 / 4, f"events over {method}")
    assert cuda.is_as_before
    assert (cuda.replayed > gpu_timing.FEWEST) == captures
    assert next(calls) == (8 if captures else 8 + 4 * (2 + 30))


def test_the_pool_of_a_gpu_takes_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10 << 30, 80 << 30))
    pools = gpu_decode.Pools(Setting(device="cuda"))
    pool = pools.of(LLAMA_1B)
    assert pool.tokens == int(0.4 * (10 << 30)) // 2048
    assert pools.of(LLAMA_1B) is pool
    assert pools.of(LLAMA_8B).tokens == int(0.4 * (10 << 30)) // 4096
    assert gpu_decode.measure(Setting(device="cuda"), pools, LLAMA_8B, 512, 32768) == {
        "left_out": "the device has not enough free memory"
    }


def test_attention_that_is_aimed_at_is_timed_first_for_every_model() -> None:
    names = [case.name for case in gpu_decode.cases(Setting())]
    shapes = [(name.split()[0], *map(int, name.split()[-3::2])) for name in names]
    aimed = [batch >= 256 and context >= 1024 for _, batch, context in shapes]
    assert aimed == sorted(aimed, reverse=True)
    models = [model for model, _ in itertools.groupby(shape[0] for shape in shapes)]
    assert len(models) == 3  # each change of the model makes a pool anew
    assert len({shape[0] for shape in shapes[: sum(aimed)]}) == 2
    assert len(set(names)) == len(names)


class Slow:
    """A model that gives `rate` tokens a second, by a clock of its own, and in its first run a tenth of that."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rate: float) -> None:
        self.rate, self.now = rate, 0.0
        self.runs: list[tuple[int, int]] = []
        monkeypatch.setattr(gpu_throughput, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def __call__(self, prompts: list[list[int]], output: int) -> int:
        self.runs.append((len(prompts), output))
        tokens = len(prompts) * output
        self.now += tokens / self.rate * (10 if len(self.runs) == 1 else 1)
        return tokens


@pytest.mark.parametrize(
    ("rate", "measured"), [(100_000, (512, 256)), (500, (512, 19)), (30, (512, 1)), (20, None)], ids=str
)
def test_transformers_gets_as_many_requests_however_slow_it_is(
    rate: float, measured: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = gpu_throughput.Bench(Setting(device="cpu", tiny=True))
    bench.requests, bench.prompt, bench.output = 512, 2, 256
    model = Slow(monkeypatch, rate)
    found = gpu_throughput.peer_figures(bench, model)
    assert model.runs == [(64, 32), (64, 32), *([measured] if measured else [])]
    assert (found["requests"], found["output"]) == model.runs[-1]
    assert found["rate"] == pytest.approx(rate)
    assert found["trial_rate"] == pytest.approx(rate)
    assert found["run_s"] < max(gpu_throughput.SECONDS, 2048 / rate) + 1e-6


@pytest.mark.parametrize("attention", ["sdpa", "flash_attention_2"])
@pytest.mark.parametrize("newer", [True, False])
def test_sdpa_stays_sdpa(attention: str, newer: bool) -> None:
    added: list[Any] = [("auto_switch_to_flash", bool, True)] if newer else []
    kind = make_dataclass("Config", [("allow_block_sharing", bool), *added])
    expected = {"allow_block_sharing": False} | ({"auto_switch_to_flash": attention != "sdpa"} if newer else {})
    assert asdict(gpu_throughput.batching_config(kind, attention, tiny=False)) == expected


def test_a_gpu_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="NVIDIA H200", multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1, 2))
    assert gpu_machine.describe_device(torch.device("cuda")) == {
        "name": "NVIDIA H200",
        "capability": [9, 0],
        "multiprocessors": 132,
        "cache_bytes": 0,
        "memory_bytes": 2,
        "free_bytes": 1,
    }
    monkeypatch.setattr(gpu_machine.shutil, "which", lambda name: "/nvidia-smi")
    done = SimpleNamespace(stdout="NVIDIA H200, 580.159.04, P0\n", returncode=0)
    monkeypatch.setattr(gpu_machine.subprocess, "run", lambda *arguments, **options: done)
    assert gpu_machine.describe_driver() == {
        "name": "NVIDIA H200",
        "driver_version": "580.159.04",
        "pstate": "P0",
        "exit_code": 0,
    }
