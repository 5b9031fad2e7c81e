"""`pagedgen plan`: its report, its JSON and its errors."""

import io
import json
import re
from dataclasses import replace
from inspect import signature
from itertools import pairwise
from typing import get_args

import pyarrow.parquet as pq
import pytest
import torch
from cli_cases import call, sentence, write_jsonl
from plan_cases import TEXT, config_of, prompts
from rich.console import Console
from rich.text import Text
from test_project import HEAVY, ROOT, run_python

from pagedgen import user_state
from pagedgen.cli import beam, run
from pagedgen.cli import plan as plan_command
from pagedgen.config import PromptConfig
from pagedgen.planning.plan import make_plan
from pagedgen.planning.report import histogram, print_plan


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(user_state, "state_folder", lambda: tmp_path / "cache")


def test_help_imports_nothing_heavy():
    code = (
        "import sys; sys.argv = ['pagedgen', 'plan', '--help']\n"
        "from pagedgen.cli import app\n"
        "try:\n    app()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        f"print('LOADED', sorted(set(sys.modules) & {set(HEAVY)!r}))"
    )
    shown = run_python(code)
    assert "--output-tokens" in shown
    assert shown.splitlines()[-1] == "LOADED []"


def test_the_report_fits_80_columns_without_control_codes(model, folder, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    write_jsonl(folder / "in.jsonl", [*prompts(30), {"prompt": TEXT * 60}])
    code, stdout, stderr = call("plan", "in.jsonl", "-m", model, "--kv-memory", "2MiB")
    assert (code, stderr) == (0, "")
    assert "\x1b" not in stdout
    lines = stdout.splitlines()
    assert max(map(len, lines)) <= 80
    labels = [line.split()[0] for line in lines if line[:1].strip()]
    assert labels == ["model", "rows", "prompts", "memory", "outputs", "work", "disk"]
    assert "estimate" in stdout
    assert "1 too_long" in stdout


def shown_in(plan, width):
    console = Console(file=io.StringIO(), force_terminal=True, width=width, no_color=True, legacy_windows=False)
    print_plan(console, plan)
    return Text.from_ansi(console.file.getvalue()).plain.splitlines()


def test_a_terminal_gets_a_table(model, folder):
    plan = make_plan(config_of(folder, model, prompts(30)))
    for width in (40, 60, 80, 200):
        shown = shown_in(plan, width)
        assert max(map(len, shown)) <= min(width, 98)
        assert any(line.startswith("│ work") for line in shown)


def test_nothing_is_cut_off_in_a_narrow_terminal(model, folder):
    plan = make_plan(config_of(folder, model, [*prompts(30), {"prompt": TEXT}]))

    def words(width):
        cells = [line.split("│")[2] for line in shown_in(plan, width) if line.count("│") == 3]
        return re.sub(r"[\s·━]+", "", "".join(cells))

    assert "…" not in words(40)
    assert words(40) == words(120)


def test_one_is_one(model, folder):
    write_jsonl(folder / "in.jsonl", prompts(1))
    options = ("--max-tokens", 1, "--kv-memory", "64KiB", "--max-model-len", 200, "--block-size", 8)
    code, stdout, _ = call("plan", "in.jsonl", "-m", model, *options)
    assert code == 0
    assert "1 sequence at a time" in stdout
    assert "1 output token ·" in stdout.replace(", ", " · ")
    assert not re.search(r"\b1 (sequences|steps|output tokens|preemptions)", stdout)


def test_kv_of_a_token_can_be_multiplied(model, folder):
    plan = make_plan(config_of(folder, model, prompts(3)))
    for kib in (0.25, 22.5, 360.0):
        pool = replace(plan.pool, bytes_per_block=int(kib * 1024 * plan.block_size))
        shown = " ".join(shown_in(replace(plan, pool=pool), 90))
        assert (f"KV {kib} KiB a token" if kib >= 1 else "KV 256 B a token") in shown


def test_json_goes_to_stdout_whole(model, folder):
    write_jsonl(folder / "in.jsonl", [{"prompt": f"<|im_end|>{number}"} for number in range(3)])
    code, stdout, stderr = call("plan", "in.jsonl", "-m", model, "--kv-memory", "2MiB", "--json", "--max-tokens", 3)
    assert code == 0
    found = json.loads(stdout)
    assert set(found) == {"model", "rows", "prompts", "memory", "work", "disk"}
    readme = (ROOT / "README.md").read_text("utf-8")
    for name, values in found.items():  # all of it is documented
        described = re.search(rf"^\| `{name}` \| (.*) \|$", readme, re.MULTILINE)[1]
        assert set(values) <= set(re.findall(r"`(\w+)`", described)), name
    assert found["rows"]["total"] == 3
    assert found["work"]["output_tokens"] == 9
    assert found["memory"]["kv_is_given"] is True
    assert stderr.startswith("warning: in.jsonl line 1 spells the special token")


def test_stdin_and_beams(model, folder):
    options = ("-m", model, "--kv-memory", "2MiB", "--max-tokens", 4, "--json")
    code, stdout, _ = call("plan", "-", *options, input="one\ntwo\n")
    assert (code, json.loads(stdout)["rows"]["total"]) == (0, 2)
    code, stdout, _ = call("plan", "-", *options, "--width", 3, input="one\ntwo\n")
    assert (code, json.loads(stdout)["memory"]["peak_running"]) == (0, 6)


def test_the_pool_is_estimated_when_it_is_not_given(model, folder):
    write_jsonl(folder / "in.jsonl", prompts(3))
    found = json.loads(call("plan", "in.jsonl", "-m", model, "--json")[1])
    assert found["memory"]["kv_is_given"] is False
    assert found["memory"]["kv_blocks"] == 256 * 256 // 16  # a tiny model: all sequences at full length
    assert re.search(r"\(an estimate; .* of memory\s+are free\)", call("plan", "in.jsonl", "-m", model)[1])


@pytest.mark.parametrize("command", ["run", "beam"])
def test_every_option_of_a_run_can_be_planned(command, model, folder):
    """A command is planned by changing one word."""
    planned, meant = (signature(found).parameters for found in (plan_command, {"run": run, "beam": beam}[command]))
    assert set(meant) <= set(planned)
    for name in meant:
        theirs, ours = (get_args(found[name].annotation)[1] for found in (meant, planned))
        assert ours.param_decls == theirs.param_decls
    write_jsonl(folder / "in.jsonl", prompts(3))
    options = [
        "in.jsonl",
        "-m",
        model,
        "--kv-memory",
        "2MiB",
        "--max-tokens",
        4,
        "-o",
        "x.jsonl",
        "--overwrite",
        "--strict",
    ]
    options += [
        "--quiet",
        "--flush-every",
        "5s",
        "--max-errors",
        "5%",
        "--retry",
        "bad_row",
        "--token-ids",
        "--keep",
        "none",
    ]
    if command == "beam":
        options += ["--width", 3, "--return", 2, "--length-penalty", 0.5, "--early-stopping", "never"]
    code, stdout, stderr = call("plan", *options, "--json")
    assert (code, stderr) == (0, "")
    assert json.loads(stdout)["memory"]["peak_running"] == (9 if command == "beam" else 3)
    assert not (folder / "x.jsonl").exists()


def test_options_without_effect_are_not_listed():
    shown = call("plan", "--help")[1]
    assert "--strict" not in shown
    assert "--overwrite" not in shown
    assert "--strict" in call("run", "--help")[1]


def test_an_option_of_beams_asks_for_a_search(model, folder):
    write_jsonl(folder / "in.jsonl", prompts(2))
    options = ("in.jsonl", "-m", model, "--kv-memory", "2MiB", "--max-tokens", 4, "--json")
    assert json.loads(call("plan", *options, "--return", 2)[1])["memory"]["peak_running"] == 2 * 4


@pytest.mark.parametrize("line", ["null", "[1]", "{bad", "5"])
def test_a_file_of_broken_lines_is_all_bad_rows(line, model, folder):
    (folder / "in.jsonl").write_text(f"{line}\n" * 3)
    options = ("in.jsonl", "-m", model, "--kv-memory", "2MiB")
    code, stdout, _ = call("plan", *options)
    assert code == 0
    assert "3 bad_row" in stdout
    assert "in.jsonl line 1 is not" in " ".join(stdout.split())
    assert call("run", *options)[0] == 0
    rows = pq.read_table(folder / "in.completions.parquet").to_pylist()
    assert [row["status"] for row in rows] == ["bad_row"] * 3
    assert rows[0]["error"].startswith("in.jsonl line 1 is not")


@pytest.mark.parametrize("command", ["run", "plan"])
def test_columns_without_a_prompt_are_named_with_their_file(command, model, folder):
    write_jsonl(folder / "other.jsonl", [{"a": 1}])
    code, _, stderr = call(command, "other.jsonl", "-m", model)
    assert code == 2
    assert sentence(stderr).startswith("pagedgen: other.jsonl has the columns a, but none of messages")
    code, _, stderr = call(command, "other.jsonl", "-m", model, "--raw", "--system", "x")
    assert sentence(stderr).startswith("pagedgen: --system has no effect")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--kv-memory", "1KiB"), "--kv-memory 1.0 KiB is less than one KV block"),
        (("--kv-memory", "900TiB"), r"--kv-memory 900 TiB does not fit: .* are free"),
        (("--prompt-column", "promt"), "in.jsonl has the columns prompt, but no promt as .* did you mean prompt"),
        (("--template", "{{ x }}"), "in.jsonl has the columns prompt, but --template uses only x"),
        (("--keep", "nope"), "--keep names 'nope', which the input does not have"),
        (("--format", "openai"), "--format openai is for JSON lines"),
        (("--return", "9", "--width", "2"), "--return is 9"),
        (("--width", "2", "-n", "3"), "a beam search has no -n; leave it out, or leave --width out"),
        (
            ("--width", "2", "--temperature", "1", "--seed", "0"),
            "a beam search has no --temperature, --seed; leave them",
        ),
        (("--return", "2", "--top-p", "1"), "a beam search has no --top-p; leave it out, or leave --return out"),
        (("--max-model-len", "500"), "--max-model-len 500 is more than"),
        (("--width", "99"), "--width is 99"),
        (("--top-k", "4000"), "--top-k is 4000, but the model has 320 tokens"),
        (("--device", "cuda"), "--device cuda"),
    ],
)
def test_mistakes_are_one_sentence(options, expected, model, folder):
    if "cuda" in options and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    write_jsonl(folder / "in.jsonl", prompts(3))
    code, stdout, stderr = call("plan", "in.jsonl", "-m", model, *options)
    assert (code, stdout) == (2, "")
    assert re.search(expected, sentence(stderr)), stderr


def test_a_model_that_does_not_fit_is_said_to(model, folder, monkeypatch):
    write_jsonl(folder / "in.jsonl", prompts(3))
    with monkeypatch.context() as small:
        small.setattr("pagedgen.models.support.available_memory", lambda _: (1000, 2000))
        code, _, stderr = call("plan", "in.jsonl", "-m", model)
        assert code == 1
        assert "does not fit: its weights need" in sentence(stderr)
    monkeypatch.setattr("pagedgen.planning.memory.available_memory", lambda _: (1 << 20, 1 << 30))
    code, _, stderr = call("plan", "in.jsonl", "-m", model)
    assert code == 1
    assert "no memory would be left for the KV pool" in sentence(stderr)


def test_the_histogram_counts_every_row_once():
    lengths = [3, 17, 17, 40, 99, 100, 250]
    bins = histogram(lengths)
    assert sum(count for _, _, count in bins) == 7
    assert all(later == end + 1 for (_, end, _), (later, _, _) in pairwise(bins))
    assert bins[0][0] <= 3
    assert bins[-1][1] >= 250
    assert len(bins) <= 10
    assert histogram([7, 7]) == [(7, 7, 2)]


def test_a_prompt_config_is_the_runs(model, folder):
    raw = make_plan(config_of(folder, model, prompts(5), prompt=PromptConfig(raw=True)))
    wrapped = make_plan(config_of(folder, model, prompts(5)))
    assert sum(wrapped.survey.lengths) > sum(raw.survey.lengths)
