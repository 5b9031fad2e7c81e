"""What the commands print, where standard output or standard error cannot be written, or nobody reads it."""

import os
import subprocess
import sys
from contextlib import contextmanager, nullcontext

import pytest
from cli_cases import PROMPTS, WITHOUT_CPP, run, sentence, write_jsonl

from pagedgen.cli import app

PRINTING = (
    ["--version"],
    ["--help"],
    ["run", "--help"],
    ["plan", "in.jsonl"],
    ["plan", "in.jsonl", "--json"],
    ["stats", "in.completions.parquet"],
    ["stats", "in.completions.parquet", "--json"],
    ["stats", "in.completions.parquet", "--watch"],
)


@pytest.fixture(scope="module")
def ran(model, tmp_path_factory):
    """A folder with an input and its finished run."""
    folder = tmp_path_factory.mktemp("ran")
    write_jsonl(folder / "in.jsonl", PROMPTS)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert run(model, "in.jsonl", "--max-tokens", 2)[0] == 0
    return folder


def code_of(args, model):
    """The exit code of a command in this process, whose streams are those of the test."""
    options = ["-m", model, "--kv-memory", "4MiB"] if args[0] == "plan" and "--help" not in args else []
    with pytest.raises(SystemExit) as end:
        app([*args, *options])
    return end.value.code


@contextmanager
def stream_to(descriptor):
    """A text stream over a descriptor that fails; what is left in its buffer at the end is dropped."""
    stream = os.fdopen(descriptor, "w", buffering=1)
    try:
        yield stream
    finally:
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), descriptor)
        stream.close()


def full_disk():
    return stream_to(os.open("/dev/full", os.O_WRONLY))


def pipe_without_reader():
    read, write = os.pipe()
    os.close(read)
    return stream_to(write)


@pytest.mark.parametrize("args", PRINTING, ids=" ".join)
def test_a_full_disk_behind_stdout_is_one_sentence(ran, model, args, monkeypatch, capsys):
    monkeypatch.chdir(ran)
    with full_disk() as stream, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        assert code_of(args, model) == 1
    message = sentence(capsys.readouterr().err)
    assert "standard output cannot be written (No space left on device)" in message


@pytest.mark.parametrize("args", PRINTING, ids=" ".join)
def test_a_closed_stdout_is_one_sentence(ran, model, args, monkeypatch, capsys):
    monkeypatch.chdir(ran)
    monkeypatch.setattr(sys, "stdout", None)
    assert code_of(args, model) == 1
    assert "standard output is closed" in sentence(capsys.readouterr().err)


@pytest.mark.parametrize("args", PRINTING, ids=" ".join)
def test_a_reader_of_stdout_that_went_away_is_no_failure(ran, model, args, monkeypatch, capsys):
    monkeypatch.chdir(ran)
    with pipe_without_reader() as stream, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        assert code_of(args, model) == 0
    stderr = capsys.readouterr().err
    assert WITHOUT_CPP or stderr == ""


@pytest.mark.parametrize("stream", [full_disk, nullcontext])
def test_what_stderr_cannot_take_is_no_failure_and_goes_nowhere_else(ran, model, stream, monkeypatch, capsys):
    """A plan and a page that warn or say where they are."""
    monkeypatch.chdir(ran)
    monkeypatch.setenv("PAGEDGEN_DISABLE_CPP", "1")
    with stream() as stderr, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", stderr)
        assert code_of(["plan", "in.jsonl", "--json"], model) == 0
        assert capsys.readouterr().out.startswith("{")
        assert code_of(["stats", "in.completions.parquet", "--html", "report.html"], model) == 0
        assert capsys.readouterr().out == ""


@pytest.mark.parametrize("args", [["--help"], ["stats", "in.completions.parquet"]], ids=" ".join)
def test_the_process_too_ends_with_one_sentence(ran, args):
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "pagedgen", *args]
        done = subprocess.run(command, cwd=ran, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert "standard output cannot be written" in sentence(done.stderr)
