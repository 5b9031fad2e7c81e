"""What a plan says of the output's size, beside the output of the run."""

import io
import json

import pytest
from cli_cases import call, write_jsonl
from job_cases import job
from plan_cases import SMALL, TEXT, config_of

from pagedgen import user_state
from pagedgen.config import EngineConfig, InputConfig
from pagedgen.job import run_job
from pagedgen.planning.plan import make_plan
from pagedgen.request import BeamParams


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(user_state, "state_folder", lambda: tmp_path / "cache")


def size_of(path):
    files = path.iterdir() if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files)


def rows_of(count=60):
    return [{"prompt": f"{TEXT} {number}", "note": TEXT * 20, "number": number} for number in range(count)]


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("out.parquet", {}),
        ("out.jsonl", {}),
        ("out", {}),
        ("out.parquet", {"keep": "none"}),
        ("out.jsonl", {"keep": "none"}),
        ("out.jsonl", {"format": "openai"}),
        ("out.parquet", {"token_ids": True}),
        ("out.jsonl", {"token_ids": True}),
        ("out.parquet", {"beam": BeamParams(width=4, num_return=4)}),
        ("out.jsonl", {"beam": BeamParams(width=4, num_return=1)}),
        ("out.parquet", {"overrides": {"max_tokens": 20, "ignore_eos": True, "n": 3, "temperature": 1.0}}),
        ("out.jsonl", {"overrides": {"max_tokens": 20, "ignore_eos": True, "logprobs": 5}}),
        ("out.parquet", {"overrides": {"max_tokens": 20, "ignore_eos": True, "prompt_logprobs": 2}}),
    ],
)
def test_the_output_takes_at_most_what_was_planned(kind, changes, model, folder):
    overrides = {"max_tokens": 20, "ignore_eos": True}
    config = config_of(folder, model, rows_of(), kind=kind, **{"overrides": overrides} | changes)
    planned = make_plan(config).disk
    run_job(config)
    took = size_of(folder / kind)
    assert took <= planned.output_bytes
    if "prompt_logprobs" not in changes.get("overrides", {}):  # they are the same for prompts that are alike
        assert planned.output_bytes <= 4 * took
    assert planned.output_bytes <= planned.with_parts_bytes
    assert planned.kind == {"out": "folder"}.get(kind, kind.removeprefix("out."))


def test_the_columns_of_streams_and_datasets_count(model, folder):
    """Their size is not known before; that of their rows is."""
    lines = "".join(json.dumps(row) + "\n" for row in rows_of())
    engine = EngineConfig(model=model, **SMALL)
    overrides = {"max_tokens": 20, "ignore_eos": True}
    of_file = make_plan(config_of(folder, model, rows_of(), kind="out.jsonl", overrides=overrides)).disk
    of_stream = make_plan(
        job(folder, model, "out.jsonl", input=InputConfig("-"), engine=engine, overrides=overrides),
        io.BytesIO(lines.encode()),
    ).disk
    (folder / "set").mkdir()
    write_jsonl(folder / "set" / "train.jsonl", rows_of())
    dataset = InputConfig(dataset=str(folder / "set"))
    of_dataset = make_plan(
        job(folder, model, "out.jsonl", input=dataset, engine=engine, overrides=overrides),
    ).disk
    assert of_stream.output_bytes == of_file.output_bytes > 60 * 20 * len(TEXT)
    assert of_dataset.output_bytes == pytest.approx(of_file.output_bytes, rel=0.01)


def test_the_options_of_the_output_count(model, folder):
    write_jsonl(folder / "in.jsonl", rows_of())
    options = ("-m", model, "--kv-memory", "2MiB", "--max-tokens", 5, "--json")
    found = {}
    for name, more in {
        "all": (),
        "none": ("--keep", "none"),
        "lines": ("-o", "x.jsonl"),
        "folder": ("-o", "x"),
    }.items():
        code, stdout, stderr = call("plan", "in.jsonl", *options, *more)
        assert (code, stderr) == (0, "")
        found[name] = json.loads(stdout)["disk"]
    assert found["none"]["output_bytes"] < found["all"]["output_bytes"] < found["lines"]["output_bytes"]
    assert {name: disk["kind"] for name, disk in found.items()} == {
        "all": "parquet",
        "none": "parquet",
        "lines": "jsonl",
        "folder": "folder",
    }
    assert found["folder"]["while_merging_bytes"] == found["folder"]["output_bytes"]
