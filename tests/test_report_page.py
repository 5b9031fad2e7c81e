"""The report's page: well-formed, of one piece, safe with any text, and there whatever the run was like."""

import math
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from test_recording import sample

from pagedgen.data.manifest import Manifest
from pagedgen.reports.charts import COLORS, Timeline, byte_ticks, log_ticks, merged
from pagedgen.reports.find import Run
from pagedgen.reports.outcome import PlanLine
from pagedgen.reports.page import html_page
from pagedgen.reports.report import make_report
from pagedgen.stats.recorder import CAPACITY, Recorder
from pagedgen.stats.recording import COLUMNS, INDEX, Recording
from pagedgen.stats.types import RunInfo, RunningSequences

MIB = 1 << 20
INFO = RunInfo("org/model", "cpu", "bfloat16", "cpp", 64 * MIB, 64, 16, 2048, 64, 512, 300 * MIB, 9 * MIB, 8 * MIB, 100)
VOID = {"meta", "br"}


def sequences(count, length, first_row=0):
    slots = np.arange(count, dtype=np.int32)
    return RunningSequences(slots, first_row + slots.astype(np.int64), slots * 0, np.full(count, length, np.int32))


def record(steps=40, *, earlier=None, info=INFO, seconds=1.0, began=-2.0, blocks=32, summary=None):
    recorder = Recorder(info, "now", earlier, began=began, clock=lambda: steps * max(seconds, 1.0))
    for i in range(steps):
        used = 1 + round((blocks - 1) * abs(math.sin(i / 7)))
        more = {
            "used_blocks": used,
            "cached_blocks": (info.kv_blocks - used) // 2,
            "free_blocks": info.kv_blocks - used - (info.kv_blocks - used) // 2,
            "total_blocks": info.kv_blocks,
            "filled_slots": used * 15,
            "logical_blocks": used + used // 3,
            "group_blocks": used + used // 6,
            "held_tokens": used * 15,
            "running": 4,
            "waiting": max(20 - i, 0),
            "prompt_tokens": 100 if i % 10 == 0 else 0,
            "cached_prompt_tokens": 25 if i % 10 == 0 else 0,
            "output_tokens": 4,
            "model_s": 0.8 * seconds,
            "sample_s": 0.1 * seconds,
            "computed_tokens": 104,
            "sampled_rows": 4,
            "touched_blocks": blocks,
            "sequences": sequences(4, 20 + i % 10, i // 10 * 4),
            "finished_rows": tuple(range(i // 10 * 4, i // 10 * 4 + 4)) if i % 10 == 9 else (),
        }
        recorder.add_step(sample(i * seconds, (i + 1) * seconds, **more))
        recorder.add_seconds("write", 0.02 * seconds)
    return recorder.recording({"rows_done": 16, "rows_total": 20} if summary is None else summary, {"generating": 9.0})


def report_of(recording, status="finished", is_running=False, output="data/out.parquet", **more):
    command = ("bin/pagedgen", "run", "in put.jsonl", "-o", output)
    manifest = Manifest("1.2.3", command, "org/model", "in put.jsonl", output, "2026-01-02T03:04:05+00:00", {})
    manifest = replace(manifest, status=status, **more)
    return make_report(Run(Path("/nowhere"), manifest, recording, is_running))


class Reader(HTMLParser):
    """Notes what is not closed, every id, every address, and the text."""

    def __init__(self, page):
        super().__init__()
        self.open, self.ids, self.addresses, self.words, self.tags = [], [], [], [], set()
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        values = dict(attrs)
        self.ids += [values["id"]] if "id" in values else []
        self.addresses += [values[key] for key in ("src", "href", "xlink:href", "data", "action") if key in values]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


def pictures(page):
    return re.findall(r"<svg.*?</svg>", page, re.DOTALL)


def check(page):
    """What holds for every page; returns what it says."""
    reader = Reader(page)
    assert not reader.tags & {"script", "link", "iframe", "img", "object", "base"}
    assert "http" not in page
    assert "@import" not in page
    assert all(address.startswith("#") and address[1:] in reader.ids for address in reader.addresses)
    assert len(reader.ids) == len(set(reader.ids))
    assert all(target in reader.ids for target in re.findall(r"url\(#([^)]*)\)", page))
    assert re.findall(r"url\((?!#)", page) == []
    assert "#fe01" not in page.lower()
    assert set(re.findall(r"var\(--([a-z0-9]+)\)", page)) <= {*COLORS, "raised"}
    for picture in pictures(page):
        root = ElementTree.fromstring(picture)
        assert root.get("viewBox")
        assert root.get("width") is None, "as wide as the page lets it be"
        assert root.find(".//metadata") is None
        assert "nan" not in picture.lower()
    assert len(page) < 1_000_000
    return reader.text


def test_a_run_is_shown_with_its_figures_its_charts_and_its_tables():
    manifest = {"rows": 20, "statuses": {"ok": 19, "too_long": 1}, "finished": "2026-01-02T04:04:05+00:00"}
    errors = [{"row": 7, "status": "too_long", "error": "3,000 tokens do not fit"}]
    summary = {"finish_reasons": {"stop": 12, "length": 7}, "errors": errors}
    report = report_of(record(summary=summary), **manifest)
    report = replace(report, plan=(PlanLine("peak_kv_bytes", "bytes", 3 * MIB, 2 * MIB),))
    page = html_page([report])
    text = check(page)
    assert len(pictures(page)) == 7
    said = ("out.parquet finished", "rows done 20 of 20", "waste 6.2%", "prefix hits 20.0%", "max", "pow2", "oracle")
    said += ("The same sequences under contiguous allocation would hold", "pagedgen run 'in put.jsonl'", "1.2.3")
    said += ("too_long 1", "7 too_long 3,000 tokens do not fit", "stop 12, length 7", "peak KV 3.0 MiB 2.0 MiB 1.50")
    said += ("weights 300 MiB", "What the numbers mean", "2026-01-02 03:04:05 UTC")
    for words in said:
        assert words in text, words


def test_the_same_run_gives_the_same_page():
    report = report_of(record())
    assert html_page([report]) == html_page([report])


def test_the_user_s_own_settings_of_matplotlib_change_nothing_and_are_not_changed():
    report = report_of(record(10))
    plain = html_page([report])
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "red", "svg.fonttype": "path"}):
        assert html_page([report]) == plain
        assert matplotlib.rcParams["font.size"] == 30


def test_matplotlib_is_not_imported_before_something_is_drawn():
    code = "import sys, pagedgen.reports.page; print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_what_users_name_their_files_is_text():
    nasty = "data/<b>x</b>&\"'<script>alert(1)</script>.parquet"
    error = [{"row": 0, "status": "bad_row", "error": "<img src=x onerror=alert(1)>"}]
    page = html_page([report_of(record(4, summary={"errors": error}), output=nasty), report_of(None, output=nasty)])
    text = check(page)
    assert "<b>x" not in page
    assert "<img" not in page
    assert nasty in text
    assert "<img src=x onerror=alert(1)>" in text


@pytest.mark.parametrize(
    ("status", "is_running", "said"),
    [
        ("interrupted", False, "was interrupted"),
        ("failed", False, "This run failed"),
        ("running", True, "still going on"),
        ("running", False, "ended without a word"),
    ],
)
def test_a_run_that_is_not_finished_says_so(status, is_running, said):
    text = check(html_page([report_of(record(3), status, is_running)]))
    assert said in text
    assert ("pagedgen run" in text.partition("rows done")[0]) is not is_running
    assert ("rows done 0 of 20" if said == "ended without a word" else "rows done 16 of 20") in text


@pytest.mark.parametrize(
    "recording", [None, Recorder(INFO, "now").recording({}, {}), Recording((), np.empty((0, len(COLUMNS))))]
)
def test_a_run_without_a_step_says_that_nothing_was_recorded(recording):
    page = html_page([report_of(recording, "failed")])
    assert "Nothing has been recorded" in check(page)
    assert pictures(page) == []


def test_one_interval_is_drawn():
    page = html_page([report_of(record(1))])
    assert "6.2%" in check(page)
    assert len(pictures(page)) == 7


def test_steps_that_took_no_time_are_not_drawn():
    page = html_page([report_of(record(5, seconds=0.0))])
    assert "no time that could be measured" in check(page)
    assert len(pictures(page)) == 1, "the memory by owner"


def test_some_steps_that_took_no_time_are_gaps():
    recorder = Recorder(INFO, "now", began=0.0)
    for start, end in ((0, 1), (1, 1), (1, 2), (50, 51)):
        recorder.add_step(sample(start, end, used_blocks=0, logical_blocks=0, filled_slots=0))
    check(html_page([report_of(recorder.recording({}, {}))]))


def test_a_run_in_several_processes_is_marked_where_a_later_one_begins():
    first = record(10)
    changed = replace(INFO, kv_bytes=128 * MIB, kv_blocks=64, block_size=8)
    both = record(10, earlier=first, info=changed)
    page = html_page([report_of(both)])
    text = check(page)
    assert "in 2 processes" in text
    assert "a later process begins" in text
    dotted = [picture.count("stroke-dasharray: 2.4,2.4") for picture in pictures(page)]
    assert dotted == [1, 1, 1, 2, 2, 1, 0]


def test_several_runs_stand_side_by_side():
    reports = [report_of(record(steps), output=f"{name}.parquet") for steps, name in ((12, "one"), (30, "two"))]
    page = html_page([*reports, report_of(None, "failed", output="three.parquet")])
    text = check(page)
    assert "3 runs side by side" in text
    assert len(pictures(page)) == 4 + 7 + 7
    assert all(f"{i}. {name}.parquet" in text for i, name in enumerate(("one", "two", "three"), 1))
    assert check(html_page([report_of(None), report_of(None)]))


def test_the_page_of_a_long_run_stays_small():
    recording = record(CAPACITY * 2)
    assert len(recording.sums) == CAPACITY
    page = html_page([report_of(recording)])
    check(page)
    assert len(page) < 400_000
    assert "Each value is a mean over 6 steps" in check(page)
    assert "Each value" not in check(html_page([report_of(record())]))
    check(html_page([report_of(recording)] * 4))


def test_a_pool_far_larger_than_what_is_used_does_not_flatten_it():
    recording = record(info=replace(INFO, kv_bytes=64 * 1024 * MIB, kv_blocks=64 * 1024))
    recording.sums[:, INDEX["cached_blocks"]] = 0
    page = html_page([report_of(recording)])
    text = check(page)
    assert "The pool holds 64 GiB; the axis ends a little above what was in use." in text
    assert "64 GiB" not in pictures(page)[0]


def test_merged_intervals_keep_means_sums_and_peaks():
    first = record(50)
    whole = record(60, earlier=first)
    fewer = merged(whole, 16)
    assert len(fewer.sums) == 8 + 9, "seven of 110 each, none of both processes"
    for name in ("live_blocks", "waste", "sharing_saved", "reserved_oracle"):
        assert fewer.mean(name) == pytest.approx(whole.mean(name))
    assert fewer.total("output_tokens") == whole.total("output_tokens")
    assert fewer.column("peak_live_blocks").max() == whole.column("peak_live_blocks").max()
    assert set(fewer.column("session")) == {0, 1}
    assert fewer.column("end_s")[-1] == whole.column("end_s")[-1]
    assert (np.diff(fewer.column("start_s")) > 0).all()


def test_a_pause_is_a_gap_in_what_is_drawn():
    recorder = Recorder(INFO, "now", began=0.0)
    for start, end in ((0, 1), (1.001, 2), (8, 10)):
        recorder.add_step(sample(start, end, output_tokens=6))
    timeline = Timeline(recorder.recording({}, {}), 100)
    values, edges = timeline.steps(timeline.rate("output_tokens"))
    assert edges.tolist() == [0, 1.001, 2, 8, 10]
    assert values.tolist() == pytest.approx([6 / 1.001, 6 / 0.999, math.nan, 3], nan_ok=True)


@pytest.mark.parametrize("most", [1.5, 100, 3e6, 2.7e9, 1e13])
def test_ticks_are_few_and_round(most):
    assert 2 <= len(byte_ticks(most)) <= 6
    assert all(tick <= most for tick in byte_ticks(most))
    for least in (most / 30, most / 1e6):
        ticks = log_ticks(least, most)
        assert 2 <= len(ticks) <= 7
        assert all(math.log2(tick).is_integer() for tick in ticks)
