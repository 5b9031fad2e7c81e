"""What the tests of the command line share: a command run in this process, its error, an input file."""

import json
import os

from typer.testing import CliRunner

from pagedgen.cli import app

WITHOUT_CPP = "PAGEDGEN_DISABLE_CPP" in os.environ
FIRST_COLUMNS = [
    "row",
    "id",
    "sample",
    "status",
    "text",
    "finish_reason",
    "error",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "cumulative_logprob",
    "score",
]


def call(*args, **options):
    """(exit code, stdout, stderr) of a command in this process."""
    result = CliRunner().invoke(app, [str(arg) for arg in args], **options)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, "".join(_without_kernels(result.stderr))


def _without_kernels(stderr):
    """The lines but the one that says so when the whole suite runs without the C++ kernels."""
    disabled = "the C++ kernels are not used: PAGEDGEN_DISABLE_CPP is set" if WITHOUT_CPP else None
    return [line for line in stderr.splitlines(keepends=True) if disabled is None or disabled not in line]


def run(model, *args, **options):
    return call("run", *args, "-m", model, "--kv-memory", "4MiB", "--max-model-len", "128", **options)


def sentence(stderr):
    """The one line of an error, which is no traceback."""
    lines = [line for line in stderr.splitlines() if not line.startswith(("[", "warning: "))]
    assert len(lines) == 1, stderr
    assert lines[0].startswith("pagedgen: ")
    return lines[0]


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


PROMPTS = [{"prompt": f"the quick brown fox {i}", "kind": "text"} for i in range(5)]
