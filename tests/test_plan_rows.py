"""Which rows a plan looks at, and which it finds that cannot run."""

import io
import json
from functools import partial

import pytest
from cli_cases import call, write_jsonl
from job_cases import job
from plan_cases import SMALL, TEXT, config_of, prompts

from pagedgen import user_state
from pagedgen.config import EngineConfig, InputConfig, JobConfig
from pagedgen.data.readers import open_input
from pagedgen.planning import rows, trial
from pagedgen.planning.plan import make_plan
from pagedgen.planning.rows import sample_rows
from pagedgen.planning.store import load_plan, plan_key
from pagedgen.request import Status


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(user_state, "state_folder", lambda: tmp_path / "cache")


def test_rows_that_cannot_run_are_counted_with_their_reasons(model, folder):
    input_rows = [
        *prompts(5),
        {"other": 1},
        {"prompt": TEXT * 50},
        {"prompt": "a", "max_tokens": 0},
        {"prompt": "a", "n": 100},
        {"messages": []},
    ]
    plan = make_plan(config_of(folder, model, input_rows, overrides={"max_tokens": 4}))
    assert plan.survey.read == plan.sample.total == 10
    assert plan.survey.statuses == {Status.BAD_ROW: 3, Status.TOO_LONG: 1, Status.UNFIT: 1}
    assert len(plan.survey.lengths) == plan.outcome.rows == 5
    errors = [example.error for example in plan.survey.examples]
    assert len(errors) == 4  # two of one status at most
    assert all(error.startswith("in.jsonl line ") for error in errors)
    assert any("max_tokens is 0" in error for error in errors) or any("has no value" in error for error in errors)


def test_no_row_can_run(model, folder):
    plan = make_plan(config_of(folder, model, [{"prompt": None}, {"prompt": 5}]))
    assert plan.outcome.rows == 0
    assert load_plan(plan_key(job(folder, model), open_input(InputConfig(str(folder / "in.jsonl"))))) is None
    code, stdout, _ = call("plan", folder / "in.jsonl", "-m", model, "--kv-memory", "2MiB")
    assert code == 0
    assert "2 bad_row" in stdout


def test_shared_prefixes_are_full_blocks_of_earlier_rows(model, folder):
    config = config_of(folder, model, [{"prompt_token_ids": [5] * 20 + [6 + i] * 12} for i in range(4)])
    plan = make_plan(config)
    assert plan.survey.shared_tokens == 3 * 16
    assert plan.outcome.cached_tokens == 3 * 16


def test_openai_batch_files_are_planned(model, folder):
    body = {"model": "x", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 7}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    bad = line | {"body": body | {"tools": [1]}}
    plan = make_plan(config_of(folder, model, [line, bad, line]))
    assert plan.outcome.output_tokens == 14
    assert plan.survey.statuses == {Status.BAD_ROW: 1}


@pytest.fixture
def big_file(folder):
    write_jsonl(folder / "in.jsonl", [{"prompt": "x" * (1 + number // 20)} for number in range(4000)])
    return folder / "in.jsonl"


def test_a_big_file_is_sampled_all_over(big_file):
    sample = sample_rows(open_input(InputConfig(str(big_file))), most=320)
    assert 64 <= len(sample.records) <= 640
    assert (sample.total, sample.kind) == (4000, "exact")
    assert sample.how == f"{len(sample.records)} rows at 64 places of the input"
    lengths = [len(record.columns["prompt"]) for record in sample.records]
    assert min(lengths) < 20
    assert max(lengths) > 180
    assert lengths == sorted(lengths)
    assert sum(lengths) / len(lengths) == pytest.approx(100, rel=0.15)
    assert [record.row for record in sample.records] == list(range(len(lengths)))


def test_lines_of_huge_files_are_not_counted(big_file, monkeypatch):
    monkeypatch.setattr(rows, "COUNTED_BYTES", 1000)
    sample = sample_rows(open_input(InputConfig(str(big_file))), most=320)
    assert sample.kind == "estimate"
    assert sample.total == pytest.approx(4000, rel=0.1)


@pytest.mark.parametrize("count", [321, 500, 640, 641, 1100])
def test_no_more_rows_are_looked_at_than_there_are(count, folder):
    """Blank lines and an end without a line break included."""
    lines = [json.dumps({"prompt": f"x{number}"}) for number in range(count)]
    (folder / "in.jsonl").write_text("\n\n".join(lines))
    sample = sample_rows(open_input(InputConfig(str(folder / "in.jsonl"))), most=320)
    assert (sample.total, sample.kind) == (count, "exact")
    found = [record.columns["prompt"] for record in sample.records]
    assert len(set(found)) == len(found) <= count
    if count <= 640:
        assert (len(found), sample.how) == (count, None)


def test_files_of_other_kinds_are_read_from_their_beginning(folder):
    (folder / "in.csv").write_text("prompt\n" + "".join(f"x{number}\n" for number in range(3000)))
    sample = sample_rows(open_input(InputConfig(str(folder / "in.csv"))), most=100)
    assert (len(sample.records), sample.total, sample.kind) == (100, 3000, "exact")
    assert sample.how == "the first 100 rows"
    stream = io.BytesIO(b"".join(b"x%d\n" % number for number in range(3000)))
    sample = sample_rows(open_input(InputConfig("-"), stdin=stream), most=100)
    assert (len(sample.records), sample.total, sample.kind) == (100, 3000, "exact")


def test_an_input_that_takes_long_to_count_is_estimated(folder, monkeypatch):
    (folder / "in.csv").write_text("prompt\n" + "".join(f"text number {number}\n" for number in range(50_000)))
    monkeypatch.setattr(rows, "_COUNT_SECONDS", 0.0)
    sample = sample_rows(open_input(InputConfig(str(folder / "in.csv"))), most=100)
    assert sample.kind == "estimate"
    assert sample.total == pytest.approx(50_000, rel=0.15)
    stream = io.BytesIO(b"".join(b"x%d\n" % number for number in range(30_000)))
    sample = sample_rows(open_input(InputConfig("-"), stdin=stream), most=100)
    assert sample.kind == "at least"
    assert 100 < sample.total <= 30_000


def test_files_are_sampled_across_their_borders(folder):
    for name, count in (("a", 500), ("b", 10), ("c", 700)):
        write_jsonl(folder / f"{name}.jsonl", [{"prompt": name * 20}] * count)
    sample = sample_rows(open_input(InputConfig(str(folder))), most=256)
    assert sample.total == pytest.approx(1210, rel=0.1)
    places = {record.columns["prompt"][0] for record in sample.records}
    assert places == {"a", "b", "c"} or places == {"a", "c"}


def test_a_sampled_plan_says_so_and_is_in_proportion(big_file, model, monkeypatch):
    config = job(big_file.parent, model, engine=EngineConfig(model=model, **SMALL | {"max_model_len": 256}))
    whole = make_plan(JobConfig(config.input, engine=config.engine, overrides={"max_tokens": 6, "ignore_eos": True}))
    monkeypatch.setattr("pagedgen.planning.plan.sample_rows", partial(sample_rows, most=320))
    code, stdout, _ = call(
        *("plan", big_file, "-m", model, "--max-tokens", 6, "--ignore-eos", "--json", "--kv-memory", "2MiB"),
        *("--max-seqs", 16, "--max-model-len", 256, "--block-size", 8),
    )
    assert code == 0
    found = json.loads(stdout)
    assert found["rows"]["looked_at"] < 330
    assert "places of the input" in found["rows"]["sample"]
    assert found["work"]["output_tokens"] == pytest.approx(whole.outcome.output_tokens, rel=0.1)
    assert found["work"]["generating_s"] == pytest.approx(whole.generating_s, rel=0.1)
    assert found["rows"]["total"] == 4000
    assert found["work"]["output_tokens"] == 4000 * 6
    assert found["work"]["steps"] * found["memory"]["peak_running"] >= 4000 * 6
    text = call("plan", big_file, "-m", model, "--kv-memory", "2MiB")[1]
    assert "estimates from" in text
    monkeypatch.setattr(rows, "COUNTED_BYTES", 1000)
    assert "about" in call("plan", big_file, "-m", model, "--kv-memory", "2MiB")[1]


def test_fewer_rows_are_simulated_where_outputs_are_long(model, folder, monkeypatch):
    config = config_of(folder, model, prompts(400), overrides={"max_tokens": 40, "ignore_eos": True})
    whole = make_plan(config)
    monkeypatch.setattr(trial, "MOST_TOKENS", 4000)
    part = make_plan(config)
    assert part.outcome.rows == 100
    assert part.is_sampled
    assert part.of_all("output_tokens") == whole.outcome.output_tokens
    assert part.generating_s == pytest.approx(whole.generating_s, rel=0.1)
    assert part.peak_kv_bytes == pytest.approx(whole.peak_kv_bytes, rel=0.1)
    assert part.steps * part.outcome.peak_running >= part.of_all("output_tokens")


@pytest.mark.parametrize("tokens", [1, 2, 16])
def test_steps_tokens_and_time_are_of_one_scale(tokens, model, folder, monkeypatch):
    """However short the outputs are, a step gives each running sequence at most one token."""
    config = config_of(folder, model, prompts(640), overrides={"max_tokens": tokens, "ignore_eos": True})
    whole = make_plan(config)
    monkeypatch.setattr("pagedgen.planning.plan.sample_rows", partial(sample_rows, most=160))
    plan = make_plan(config)
    assert plan.is_sampled
    assert plan.of_all("output_tokens") == 640 * tokens
    assert plan.steps * plan.outcome.peak_running >= 640 * tokens
    assert plan.steps == pytest.approx(whole.steps, rel=0.15)
