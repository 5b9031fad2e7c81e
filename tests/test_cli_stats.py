"""`pagedgen stats` as a user types it: of runs that finished, go on, were interrupted or killed, one or several."""

import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
from contextlib import suppress
from dataclasses import replace

import pyarrow.parquet as pq
import pytest
from cli_cases import PROMPTS, call, run, sentence, write_jsonl

from pagedgen import user_state
from pagedgen.data.manifest import read_manifest, write_manifest
from pagedgen.reports import show
from pagedgen.reports.find import find_run_folder, read_run
from pagedgen.stats.recording import read_recording

OUTPUT = "in.completions.parquet"


@pytest.fixture
def finished(folder, model):
    """The run folder of a small finished run."""
    write_jsonl(folder / "in.jsonl", PROMPTS)
    code, _, stderr = run(model, "in.jsonl", "--max-tokens", 9, "--ignore-eos", "-n", 2, "--temperature", 1)
    assert code == 0, stderr
    return folder / f"{OUTPUT}.run"


def set_manifest(run_folder, **changes):
    write_manifest(run_folder, replace(read_manifest(run_folder), **changes))


def report(*args):
    code, stdout, stderr = call("stats", *args)
    assert code == 0, stderr
    return stdout


def test_the_report_tells_where_memory_and_time_went(finished):
    text = report(OUTPUT)
    for words in (
        f"{OUTPUT} · finished",
        "5 done · 10 ok",
        "out 90",
        "KV pool",
        "held no token",
        "paged",
        "oracle",
        "pow2",
        "max",
        "under contiguous allocation",
        "by samples and beams",
        "by prefixes",
        "nothing waits",
        "schedule",
        "weights",
        "activations",
        "logits",
        "KV in use",
    ):
        assert words in text, words
    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" not in text


@pytest.mark.parametrize("columns", ["40", "60", "80", "200"])
def test_lines_fit_the_terminal(finished, columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    assert max(map(len, report(OUTPUT).splitlines())) <= max(int(columns), 40)


def test_an_encoding_without_blocks_gets_plain_characters(finished):
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-m", "pagedgen", "stats", OUTPUT], env=environment, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert b"KV pool" in done.stdout
    assert done.stdout.isascii()


def test_json_has_the_numbers_of_the_recording(finished):
    values = json.loads(report(OUTPUT, "--json"))
    recording = read_recording(finished / "timeline.parquet")
    assert values["head"]["status"] == "finished"
    assert values["rows"] | {"errors": []} == {
        "done": 5,
        "total": 5,
        "total_is_exact": True,
        "eta_s": None,
        "statuses": {"ok": 10},
        "finish_reasons": {"length": 10},
        "errors": [],
    }
    assert values["tokens"]["output"] == 90 == recording.total("output_tokens")
    assert values["pool"]["waste"] == pytest.approx(recording.mean("waste"))
    assert values["pool"]["bytes"] == recording.sessions[0].info.kv_bytes
    per_block = values["pool"]["bytes_per_token"] * values["pool"]["block_size"]
    assert values["pool"]["peak_bytes"] == recording.column("peak_live_blocks").max() * per_block
    by_policy = {item["policy"]: item for item in values["allocations"]}
    for policy in ("oracle", "pow2", "max"):
        item, reserved = by_policy[policy], recording.mean(f"reserved_{policy}")
        assert item["utilisation"] == pytest.approx(recording.mean("held_tokens") / reserved)
        assert item["tokens_per_sequence"] == pytest.approx(reserved / recording.mean("running"))
        assert item["mean_bytes"] == pytest.approx(reserved * values["pool"]["bytes_per_token"], abs=0.51)
        fit = values["pool"]["bytes"] / values["pool"]["bytes_per_token"] / item["tokens_per_sequence"]
        assert item["sequences_that_fit"] == int(fit)
    assert by_policy["max"]["tokens_per_sequence"] == pytest.approx(128)
    shares = values["sharing"]
    assert shares["saved"] == pytest.approx(shares["in_requests"] + shares["by_prefixes"])
    assert shares["in_requests"] > 0
    assert sum(phase["share"] for phase in values["phases"]) == pytest.approx(1)
    assert sum(values["step_parts_s"].values()) == pytest.approx(values["head"]["generating_s"], rel=0.05)
    assert [owner["owner"] for owner in values["memory"]][:5] == ["weights", "KV", "activations", "logits", "other"]


def test_the_recording_is_a_table_that_anyone_can_read(finished):
    table = pq.read_table(finished / "timeline.parquet")
    assert {"live_blocks", "filled_tokens", "reserved_oracle", "process_bytes"} <= set(table.column_names)
    assert sum(table["output_tokens"].to_pylist()) == 90


def test_the_latest_run_is_meant_when_none_is_named(finished, model, tmp_path_factory, monkeypatch):
    assert f"{OUTPUT} · finished" in report()
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    monkeypatch.chdir(elsewhere)
    assert f"{OUTPUT} · finished" in report(), "wherever the command is given"
    monkeypatch.setattr(user_state, "state_folder", lambda: elsewhere / "none")
    code, _, stderr = call("stats")
    assert code == 2
    assert "there is no run to report on here" in sentence(stderr)
    monkeypatch.chdir(finished.parent)
    assert f"{OUTPUT} · finished" in report(), "the newest in this folder"


@pytest.mark.parametrize("name", [OUTPUT, f"{OUTPUT}.run", "."])
def test_a_run_is_named_by_its_output_its_folder_or_the_folder_it_is_in(finished, name):
    assert find_run_folder(name).resolve() == finished.resolve()


def test_what_is_no_run_is_said(finished, model):
    (finished.parent / "other.txt").touch()
    (finished.parent / "empty").mkdir()
    for name, words in (
        ("nowhere.parquet", "there is no such run"),
        ("other.txt", "is no output of a run"),
        ("empty", "is no output of a run"),
    ):
        code, stdout, stderr = call("stats", name)
        assert (code, stdout) == (2, "")
        assert name in sentence(stderr)
        assert words in stderr
    run(model, "in.jsonl", "-o", "second.parquet", "--max-tokens", 2)
    code, _, stderr = call("stats", ".")
    assert code == 2
    assert "holds 2 runs" in sentence(stderr)
    (finished / "manifest.json").write_text("{")
    code, _, stderr = call("stats", OUTPUT)
    assert code == 1
    assert "manifest.json cannot be read" in sentence(stderr)


def test_several_runs_stand_side_by_side(finished, model):
    for number in range(7):
        assert run(model, "in.jsonl", "-o", f"run{number}.parquet", "--max-tokens", 3 + number, "--ignore-eos")[0] == 0
    names = [f"run{number}.parquet" for number in range(7)]
    text = report(OUTPUT, *names)
    assert max(map(len, text.splitlines())) <= 80
    assert all(name.removesuffix(".parquet") in text for name in names)
    tokens = [line.split()[2:] for line in text.splitlines() if line.startswith("output tokens")]
    assert [token for line in tokens for token in line] == ["90", "15", "20", "25", "30", "35", "40", "45"]
    values = json.loads(report(OUTPUT, names[0], "--json"))
    assert [value["tokens"]["output"] for value in values] == [90, 15]


def test_a_run_whose_process_is_gone_was_killed(finished):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    set_manifest(finished, status="running", process=gone.pid, rows=None, statuses=None, finished=None)
    assert f"{OUTPUT} · killed" in report(OUTPUT)
    assert "5 done · 10 ok" in report(OUTPUT), "what is on the disk counts"
    os.replace(finished.parent / OUTPUT, finished.parent / "elsewhere.parquet")
    assert "0 of 5 done" in report(OUTPUT), "what was finished, but not written, is lost"
    os.replace(finished.parent / "elsewhere.parquet", finished.parent / OUTPUT)
    set_manifest(finished, status="running", process=os.getpid())
    assert f"{OUTPUT} · running" in report(OUTPUT)
    set_manifest(finished, status="interrupted")
    assert f"{OUTPUT} · interrupted" in report(OUTPUT)


@pytest.mark.parametrize("content", [None, b"damaged"])
def test_a_run_without_a_recording_says_so(finished, content):
    path = finished / "timeline.parquet"
    path.unlink() if content is None else path.write_bytes(content)
    assert "timeline.parquet is missing or damaged" in " ".join(report(OUTPUT).split())
    assert "bfloat16 ·" not in report(OUTPUT)
    assert json.loads(report(OUTPUT, "--json"))["pool"] is None
    assert "5 done" in report(OUTPUT), "the manifest knows"


def test_watching_goes_on_until_the_run_ends(finished, monkeypatch):
    set_manifest(finished, status="running", process=os.getpid(), rows=None)
    naps = []

    def nap(seconds):
        naps.append(seconds)
        if len(naps) == 3:
            set_manifest(finished, status="finished", rows=5)

    monkeypatch.setattr(show.time, "sleep", nap)
    lines = report(OUTPUT, "--watch").splitlines()
    assert len(naps) == 3
    assert all("5/5 rows" in line and "KV peak" in line for line in lines[:3])
    assert f"{OUTPUT} · finished" in lines[3]


def test_watching_ends_with_ctrl_c(finished, monkeypatch):
    set_manifest(finished, status="running", process=os.getpid())

    def interrupt(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(show.time, "sleep", interrupt)
    assert f"{OUTPUT} · running" in report(OUTPUT, "--watch")


def test_forms_that_exclude_each_other_are_refused(finished):
    for args in (("--watch", "--json"), ("--watch", "--html", "x.html"), (OUTPUT, "--watch")):
        code, _, stderr = call("stats", OUTPUT, *args)
        assert code == 2
        assert "--watch" in sentence(stderr)


def test_a_resumed_run_is_one_report(finished, model):
    write_jsonl(finished.parent / "in.jsonl", [*PROMPTS, *PROMPTS[:2]])
    code, _, stderr = run(model, "in.jsonl", "--max-tokens", 9, "--ignore-eos", "-n", 2, "--temperature", 1)
    assert code == 0, stderr
    text = report(OUTPUT)
    assert "in 2 processes" in text
    assert "7 done · 14 ok" in text
    assert json.loads(report(OUTPUT, "--json"))["tokens"]["output"] == 14 * 9


def test_a_recording_that_cannot_be_written_stops_nothing(folder, model, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pagedgen.stats.recording.os.replace", full)
    write_jsonl(folder / "in.jsonl", PROMPTS)
    monkeypatch.setattr("pagedgen.data.files.FileLayer.rename", lambda self, source, target: os.rename(source, target))
    code, _, stderr = run(model, "in.jsonl", "--max-tokens", 3)
    assert code == 0
    assert stderr.count("timeline.parquet cannot be written (No space left on device)") == 1


def test_an_overwritten_run_begins_a_new_recording(finished, model):
    run(model, "in.jsonl", "--max-tokens", 2, "--ignore-eos", "--overwrite")
    recording = read_run(finished).recording
    assert len(recording.sessions) == 1
    assert recording.total("output_tokens") == 10


@pytest.mark.parametrize("victim", [OUTPUT, "in.jsonl", f"{OUTPUT}.run/manifest.json", "folder"])
def test_a_page_overwrites_nothing_but_an_earlier_page(finished, victim):
    path = finished.parent / victim
    if victim == "folder":
        path.mkdir()
    before = None if path.is_dir() else path.read_bytes()
    code, stdout, stderr = call("stats", OUTPUT, "--html", victim)
    assert (code, stdout) == (2, "")
    assert f"--html {victim} exists and is no report" in sentence(stderr)
    assert before is None or path.read_bytes() == before
    for _ in range(2):  # into a new folder, and over the page that is there then
        assert call("stats", OUTPUT, "--html", "new/report.html")[0] == 0
    assert (finished.parent / "new" / "report.html").read_text().startswith("<!DOCTYPE html>")


def test_a_terminal_shows_a_run_that_goes_on_and_gives_the_cursor_back(finished):
    """As much of the report as the terminal has lines for; Ctrl-C ends it."""
    set_manifest(finished, status="running", process=os.getpid())
    primary, secondary = pty.openpty()
    fcntl.ioctl(secondary, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    environment = os.environ | {"TERM": "xterm-256color"}
    command = [sys.executable, "-m", "pagedgen", "stats", OUTPUT, "--watch"]
    process = subprocess.Popen(command, stdin=secondary, stdout=secondary, stderr=secondary, env=environment)
    os.close(secondary)
    shown = b""
    while b"KV in use" not in shown:
        shown += os.read(primary, 1 << 16)
    assert b"\x1b[?25l" in shown
    assert shown.count(b"\r\n") < 24
    process.send_signal(signal.SIGINT)
    with suppress(OSError):  # the other end is closed when the process is gone
        while chunk := os.read(primary, 1 << 16):
            shown += chunk
    assert process.wait(30) == 0
    assert b"\x1b[?25h" in shown


@pytest.mark.parametrize("text", ["[1]", "", '{"rows": NaN, "steps": -1, "output_tokens": 1e400}'])
def test_a_plan_that_is_none_is_not_shown(finished, text):
    (finished / "plan.json").write_text(text)
    assert "planned" not in report(OUTPUT)
    assert json.loads(report(OUTPUT, "--json"))["plan"] == []


def test_watching_waits_for_a_run_that_is_about_to_begin(finished, monkeypatch):
    waiting = finished.with_name("waiting")
    finished.rename(waiting)
    os.replace(OUTPUT, "elsewhere.parquet")
    monkeypatch.setattr(show.time, "sleep", lambda _: waiting.rename(finished))
    assert f"{OUTPUT} · finished" in report(OUTPUT, "--watch")
    monkeypatch.setattr(show, "BEGINNING", 0.0)
    code, _, stderr = call("stats", "never.parquet", "--watch")
    assert code == 2
    assert "there is no such run" in sentence(stderr)


def test_a_plan_is_not_judged_by_a_run_that_has_not_finished(finished):
    (finished / "plan.json").write_text('{"output_tokens": 900}')
    assert "10.00" in report(OUTPUT)
    set_manifest(finished, status="interrupted")
    text = report(OUTPUT)
    assert "so far" in text
    assert "10.00" not in text


def test_a_folder_of_a_run_without_its_manifest_is_said_to_be_one(finished):
    (finished / "manifest.json").unlink()
    for name in (OUTPUT, f"{OUTPUT}.run"):
        code, _, stderr = call("stats", name)
        assert code == 2
        assert "has no manifest.json" in sentence(stderr)
    assert "the name of a run is empty" in sentence(call("stats", "")[2])
