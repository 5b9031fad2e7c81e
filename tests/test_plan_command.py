"""`pagedgen plan`: its report, its JSON and its errors."""

import io
import json
import re
from itertools import pairwise

import pytest
import torch
from cli_cases import call, sentence, write_jsonl
from plan_cases import TEXT, config_of, prompts
from rich.console import Console
from rich.text import Text
from test_project import HEAVY, ROOT, run_python

from pagedgen import user_state
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


def test_a_terminal_gets_a_table(model, folder):
    plan = make_plan(config_of(folder, model, prompts(30)))
    for width in (60, 80, 200):
        console = Console(file=io.StringIO(), force_terminal=True, width=width, no_color=True, legacy_windows=False)
        print_plan(console, plan)
        shown = Text.from_ansi(console.file.getvalue()).plain.splitlines()
        assert max(map(len, shown)) <= min(width, 98)
        assert any(line.startswith("│ work") for line in shown)


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
    assert "(estimate: free are" in call("plan", "in.jsonl", "-m", model)[1]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--kv-memory", "1KiB"), "--kv-memory 1.0 KiB is less than one KV block"),
        (("--kv-memory", "900TiB"), r"--kv-memory 900 TiB does not fit: .* are free"),
        (("--prompt-column", "promt"), "did you mean prompt"),
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
