"""The plan of a job beside the job."""

import json
from dataclasses import replace

import pytest
import torch
from plan_cases import config_of, prompts

from pagedgen import user_state
from pagedgen.data.readers import open_input
from pagedgen.job import run_job
from pagedgen.models.weights import Checkpoint
from pagedgen.planning.lengths import OutputLengths
from pagedgen.planning.plan import make_plan
from pagedgen.planning.profile import record_profile
from pagedgen.planning.store import load_plan, plan_key
from pagedgen.request import BeamParams
from pagedgen.stats.recording import read_recording


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(user_state, "state_folder", lambda: tmp_path / "cache")


@pytest.fixture
def no_weights(monkeypatch):
    def fail(*_, **__):
        raise AssertionError("weights were read")

    monkeypatch.setattr("safetensors.safe_open", fail)
    monkeypatch.setattr("safetensors.torch.load_file", fail)
    monkeypatch.setattr(torch, "load", fail)
    monkeypatch.setattr(Checkpoint, "load", fail)
    monkeypatch.setattr("pagedgen.models.loader.load_model", fail)


def recording_of(config):
    run_job(config)
    recording = read_recording(config.output_path.with_name(config.output_path.name + ".run") / "timeline.parquet")
    assert recording is not None
    return recording


# --- the plan and the run --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "engine"),
    [
        ({"max_tokens": 20, "ignore_eos": True}, {}),
        ({"max_tokens": 20, "ignore_eos": True}, {"prefix_cache": False}),
        ({"max_tokens": 12, "ignore_eos": True, "n": 3, "temperature": 1.0}, {}),
        ({"max_tokens": 40, "ignore_eos": True}, {"kv_memory": 160 << 10}),
        ({"max_tokens": 9, "ignore_eos": True}, {"max_batch_tokens": 48}),
    ],
    ids=["plain", "no prefix cache", "samples", "small pool", "chunks"],
)
def test_a_plan_is_what_the_run_does(overrides, engine, model, folder):
    """Lengths are fixed, so that the same scheduler takes the same steps."""
    config = config_of(folder, model, prompts(40), engine, overrides=overrides)
    plan = make_plan(config)
    recording = recording_of(config)
    info = recording.sessions[-1].info
    assert plan.outcome.steps == recording.total("steps")
    assert plan.outcome.prompt_tokens == recording.total("prompt_tokens")
    assert plan.outcome.cached_tokens == recording.total("cached_prompt_tokens")
    assert plan.outcome.output_tokens == recording.total("output_tokens")
    assert plan.outcome.preemptions == recording.total("preemptions")
    assert plan.outcome.peak_blocks == recording.column("peak_live_blocks").max()
    assert plan.outcome.peak_running == recording.column("peak_running").max()
    assert (plan.pool.num_blocks, plan.facts.size.weight_bytes) == (info.kv_blocks, info.weight_bytes)
    assert plan.pool.num_blocks * plan.pool.bytes_per_block == info.kv_bytes
    assert plan.kernels == info.kernels
    assert plan.pool.logits_bytes == info.logits_bytes


def test_a_plan_of_beams_is_near_the_run(model, folder):
    config = config_of(folder, model, prompts(20), overrides={"max_tokens": 24, "ignore_eos": True}, beam=BeamParams(4))
    plan = make_plan(config)
    recording = recording_of(config)
    assert plan.outcome.steps == pytest.approx(recording.total("steps"), rel=0.1)
    # How much beams share depends on how sure the model is; this one is random. SmolLM2's come within 5%.
    assert plan.outcome.peak_blocks == pytest.approx(recording.column("peak_live_blocks").max(), rel=0.25)
    assert plan.outcome.peak_running == recording.column("peak_running").max()


def test_a_profiled_run_tells_the_time_of_the_next(model, folder):
    config = config_of(folder, model, prompts(60), overrides={"max_tokens": 30, "ignore_eos": True})
    before = make_plan(config)
    assert "not measured" in before.time_source
    assert before.load_s is None
    recording = recording_of(config)
    record_profile(recording, OutputLengths())
    after = make_plan(config)
    took = recording.column("end_s")[-1] - recording.column("start_s")[0]
    assert after.time_source.startswith("measured profile of this machine")
    assert after.generating_s == pytest.approx(took, rel=0.3)
    assert after.load_s > 0
    assert after.pool.is_measured
    assert after.pool.activation_bytes == recording.sessions[-1].info.activation_bytes


def test_lengths_of_earlier_runs_are_expected_again(model, folder):
    config = config_of(folder, model, prompts(60), overrides={"max_tokens": 60})
    at_most = make_plan(config)
    assert at_most.outcome.output_tokens == 60 * 60
    assert at_most.length_source.startswith("at most")
    lengths = OutputLengths()
    lengths.pairs = [(tokens, True) for tokens in range(1, 21)] * 3
    record_profile(recording_of(config), lengths)
    plan = make_plan(config)
    assert plan.outcome.output_tokens / 60 == pytest.approx(10.5, rel=0.2)
    assert "earlier runs" in plan.length_source
    fixed = make_plan(config_of(folder, model, prompts(60), overrides={"max_tokens": 60, "ignore_eos": True}))
    assert fixed.outcome.output_tokens == 60 * 60
    stated = make_plan(config, output_tokens=30)
    assert stated.outcome.output_tokens / 60 == pytest.approx(30, rel=0.01)


def test_a_stated_mean_holds_after_the_cut_or_is_said_not_to(model, folder):
    config = config_of(folder, model, prompts(40), overrides={"max_tokens": 32})
    within = make_plan(config, output_tokens=10)
    assert within.outcome.output_tokens == pytest.approx(400, abs=2)
    assert within.length_source == "a mean of 10 tokens, as given"
    beyond = make_plan(config, output_tokens=1000)
    assert beyond.outcome.output_tokens == 40 * 32
    assert beyond.length_source == "at its limit: a mean of 32 tokens, and not of 1000 as given"


def test_earlier_completions_that_were_all_cut_off_are_said_to_be(model, folder):
    config = config_of(folder, model, prompts(20), overrides={"max_tokens": 60})
    lengths = OutputLengths()
    lengths.pairs = [(32, False)] * 40
    record_profile(recording_of(config), lengths)
    plan = make_plan(config)
    assert plan.outcome.output_tokens == 20 * 60
    assert plan.length_source.startswith("at most: its limit, as all of the 40 seen in earlier runs were cut off")
    lengths.pairs = [(32, False)] * 30 + [(5, True)] * 10
    record_profile(recording_of(replace(config, overwrite=True)), lengths)
    assert make_plan(config).length_source == "drawn from the 40 seen in earlier runs, 30 of which were cut off"


def test_what_a_plan_expects_is_kept_for_the_run(model, folder):
    config = config_of(folder, model, prompts(30), overrides={"max_tokens": 5})
    plan = make_plan(config)
    expected = load_plan(plan_key(config, open_input(config.input)))
    assert expected == plan.expected() | {"made": expected["made"]}
    assert set(expected) == {
        "made",
        "rows",
        "prompt_tokens",
        "output_tokens",
        "steps",
        "generating_s",
        "peak_kv_bytes",
        "peak_running",
        "output_bytes",
    }
    assert (expected["rows"], expected["output_tokens"]) == (30, 150)


def test_nothing_is_loaded(model, folder, no_weights):
    plan = make_plan(config_of(folder, model, prompts(10)))
    assert plan.outcome.rows == 10


def test_the_output_takes_at_most_what_the_plan_says(model, folder):
    overrides = {"max_tokens": 20, "ignore_eos": True, "n": 2, "temperature": 1.0}
    config = config_of(folder, model, prompts(50), overrides=overrides, output_path=folder / "out.jsonl")
    assert (folder / "in.jsonl").is_file()
    plan = make_plan(config)
    run_job(config)
    text = sum(len(json.loads(line)["text"]) for line in (folder / "out.jsonl").read_text().splitlines())
    assert text < plan.disk.output_bytes
