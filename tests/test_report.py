"""The report's own arithmetic: series on an even axis of time, owners of memory, plan against outcome."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_recording import sample

from pagedgen.data.manifest import Manifest
from pagedgen.reports.memory import owners
from pagedgen.reports.outcome import compare_plan
from pagedgen.reports.over_time import rate, resample
from pagedgen.stats.recorder import Recorder
from pagedgen.stats.types import RunInfo

INFO = RunInfo("m", "cpu", "bfloat16", "cpp", 160_000, 100, 16, 2048, 256, 1000, 5_000, 8_000, 9_000, 1000)


def record(steps, info=INFO):
    """steps: (start, end, live blocks)."""
    recorder = Recorder(info, "now", began=0.0)
    for start, end, live in steps:
        recorder.add_step(sample(start, end, used_blocks=live, computed_tokens=250, touched_blocks=live))
    return recorder.recording({}, {})


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5), st.integers(0, 9)), min_size=1, max_size=12),
    st.integers(1, 20),
)
def test_a_resampled_series_is_the_mean_over_each_part_of_the_time(steps, cells):
    now, spans = 0, []
    for pause, seconds, live in steps:
        spans.append((now + pause, now + pause + seconds, live))
        now += pause + seconds
    recording = record(spans)
    found = resample(recording, recording.column("live_blocks"), cells)
    first, last = spans[0][0], spans[-1][1]
    width = (last - first) / cells
    for cell in range(cells):
        begin, end = first + cell * width, first + (cell + 1) * width
        shares = [(max(min(e, end) - max(s, begin), 0), live) for s, e, live in spans]
        total = math.fsum(share for share, _ in shares)
        if total < 1e-9:
            assert np.isnan(found[cell]) or total > 0
        else:
            assert found[cell] == pytest.approx(math.fsum(share * live for share, live in shares) / total)


def test_a_rate_is_what_came_over_the_time_of_its_interval():
    recording = record([(0, 2, 1), (2, 2.5, 1)])
    assert rate(recording, "output_tokens").tolist() == [0.5, 2.0]


def test_the_process_s_memory_is_divided_among_its_owners():
    recording = record([(0, 1, 3), (1, 2, 7)])
    by_owner = {owner.owner: owner.bytes for owner in owners(recording)}
    assert by_owner["weights"] == 5_000
    assert by_owner["KV"] == 7 * 1600
    assert by_owner["activations"] == 8_000 / 4
    assert by_owner["process"] > 1 << 20
    parts = ("weights", "KV", "activations", "logits", "other")
    assert sum(by_owner[part] for part in parts) == pytest.approx(by_owner["process"])
    assert "device" not in by_owner


def test_on_a_gpu_the_pool_is_taken_whole_and_the_device_s_memory_is_what_is_divided():
    recorder = Recorder(RunInfo(**{**_fields(INFO), "device": "cuda"}), "now", began=0.0, device_bytes=lambda: 500_000)
    recorder.add_step(sample(0.0, 1.0, computed_tokens=1000))
    by_owner = {owner.owner: owner.bytes for owner in owners(recorder.recording({}, {}))}
    assert by_owner["KV"] == 160_000
    assert by_owner["device"] == 500_000
    assert by_owner["other"] == 500_000 - 5_000 - 160_000 - 8_000 - by_owner["logits"]


def _fields(info):
    return {name: getattr(info, name) for name in info.__slots__}


def test_the_plan_stands_beside_what_came_of_it(tmp_path):
    recording = record([(0, 4, 2), (4, 8, 5)])
    manifest = Manifest("0", (), "m", "in", "out", "now", {}, rows=10, output_bytes=900)
    assert compare_plan(tmp_path, recording, manifest) == ()
    planned = {"rows": 10, "output_tokens": 4, "generating_s": 4.0, "peak_kv_bytes": 16_000, "made": "today", "x": 1}
    (tmp_path / "plan.json").write_text(json.dumps(planned))
    lines = {line.quantity: line for line in compare_plan(tmp_path, recording, manifest)}
    assert set(lines) == {"rows", "output_tokens", "generating_s", "peak_kv_bytes"}
    assert lines["output_tokens"].measured == 2
    assert lines["generating_s"].ratio == 0.5
    assert lines["peak_kv_bytes"].ratio == 2.0
    (tmp_path / "plan.json").write_text("{")
    assert compare_plan(tmp_path, recording, manifest) == ()
