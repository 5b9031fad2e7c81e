"""How benchmarks/gpu_configs.py chooses launch configurations and writes them down; it times nothing here."""

import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pagedgen_kernels.triton import attention, configs, launch
from triton_interpreter import DEVICE

from benchmarks import gpu_configs
from benchmarks.gpu_configs import Workload, best, layers_of, make_tables, rendered, usable_time, with_tables


def test_tables_are_written_as_they_are_read() -> None:
    path = Path(configs.__file__)
    decode = configs.DECODE | {(2, 128): configs.DecodeConfig(tile=16, num_warps=8, programs=7)}
    prefill = configs.PREFILL | {(4, 64, True): configs.PrefillConfig(rows=64, tile=128)}
    source = with_tables(path.read_text("utf-8"), rendered(decode, prefill))
    names: dict[str, Any] = {"__name__": configs.__name__}
    exec(compile(source, path.name, "exec", dont_inherit=True), names)
    # The classes are new ones, so by their representations.
    assert repr(names["DECODE"]) == repr(decode)
    assert repr(sorted(names["PREFILL"].items())) == repr(sorted(prefill.items()))
    assert with_tables(source, rendered(decode, prefill)) == source
    assert source.split("# tables begin")[0] == path.read_text("utf-8").split("# tables begin")[0]
    assert max(map(len, source.splitlines())) <= 120


def test_each_workload_counts_the_same() -> None:
    assert best({"a": [1.0, 300.0], "b": [2.0, 100.0], "c": [4.0, 90.0]}) == "b"


def test_tables_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that likes some configurations, and forgets none of what was in the tables."""
    monkeypatch.setattr(gpu_configs, "LEAST_BYTES", 1)
    tiny = (Workload(2, 1, 2, 40), Workload(3, 3, 1, 20))
    monkeypatch.setattr(gpu_configs, "FULL_BATCHES", tiny)
    monkeypatch.setattr(gpu_configs, "SMALL_BATCHES", tiny)
    monkeypatch.setattr(gpu_configs, "PROMPTS", (Workload(2, 1, 1, 40, 30),))
    before = dict(configs.DECODE), dict(configs.PREFILL)
    full_key = (2, 64, launch.has_wgmma(torch.device(DEVICE)))
    phases: list[str] = []

    def timer(layers: Sequence[Any]) -> float:
        assert len(layers) == 1
        decode, prefill = configs.DECODE[2, 64], configs.PREFILL[full_key]
        # It starts from tile 64 and 3 stages; every configuration is launched before it is timed.
        phases.append(f"{decode} {prefill}")
        liked = (decode.tile == 32, decode.num_stages == 2, decode.programs == 6, decode.least_tiles == 8)
        return 1.0 - 0.05 * sum(liked) - 0.1 * (prefill.rows == 64 and prefill.num_warps == 4)

    lines: list[str] = []
    decode, prefill = make_tables(torch.device(DEVICE), timer, [(2, 64)], lines.append)
    assert (decode[2, 64].tile, decode[2, 64].num_stages) == (32, 2)
    assert (decode[2, 64].programs, decode[2, 64].least_tiles) == (6, 8)
    assert (prefill[full_key].rows, prefill[full_key].num_warps) == (64, 4)
    assert {key: decode[key] for key in decode if key != (2, 64)} == {
        key: config for key, config in before[0].items() if key != (2, 64)
    }
    assert before == (configs.DECODE, configs.PREFILL)
    assert len(lines) == 3
    assert len(set(phases)) > 60


def test_what_fails_or_is_wrong_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_configs, "LEAST_BYTES", 1)
    layers = layers_of(Workload(2, 1, 2, 40), 64, 2, torch.device(DEVICE))
    expected = layers[0](gpu_configs.reference).float()
    assert usable_time(layers, expected, 2, lambda layers: 5.0) == 5.0
    assert usable_time(layers, expected + 1, 2, lambda layers: 5.0) == math.inf

    def refuse(*args: Any, **options: Any) -> None:
        raise RuntimeError("out of resources")

    monkeypatch.setattr(attention, "decode_kernel", SimpleNamespace(__getitem__=refuse))
    assert usable_time(layers, expected, 2, lambda layers: 5.0) == math.inf
    with pytest.raises(ValueError, match="no candidate"):
        gpu_configs.choose(
            configs.DECODE,
            (2, 64),
            gpu_configs.decode_candidates(),
            (Workload(2, 1, 2, 40),),
            torch.device(DEVICE),
            lambda layers: 5.0,
        )
