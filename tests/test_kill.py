"""Real processes, killed at random moments and started again, give what one that was left alone gives."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

ROWS, KILLS = 240, 20


class Zygote:
    """Runs commands as children of a process that has imported everything; see `zygote.py`."""

    def __init__(self) -> None:
        script = Path(__file__).with_name("zygote.py")
        self._process = subprocess.Popen(
            [sys.executable, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def start(self, *arguments: str) -> int:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(arguments) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def wait(self) -> int:
        return self._answer()

    def _answer(self) -> int:
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    zygote = Zygote()
    yield zygote
    zygote.close()


def command(folder: Path, model: str, kind: str, *options: str) -> list[str]:
    # Without the prefix cache, so that even `cached_tokens` cannot differ.
    fixed = ["--max-seqs", "12", "--kv-memory", "2MiB", "--no-prefix-cache", "--flush-every", "40ms", "--token-ids"]
    return ["run", str(folder / "in.jsonl"), "-o", str(folder / kind), "-m", model, *fixed, *options]


def write_input(folder: Path) -> None:
    words = random.Random(5)
    rows = []
    for number in range(ROWS):
        text = " ".join(words.choices(["the", "quick", "brown", "fox", "jumps", "42", "你好"], k=words.randint(1, 12)))
        row = {"id": f"r{number}", "prompt": text, "max_tokens": words.randint(1, 60)}
        rows.append(row | ({"n": 3} if number % 9 == 0 else {}) | ({"prompt": None} if number % 17 == 0 else {}))
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def table(folder: Path, kind: str) -> pa.Table:
    if kind.endswith(".jsonl"):
        return pa.Table.from_pylist([json.loads(line) for line in (folder / kind).read_text().splitlines()])
    return pq.read_table(folder / kind).sort_by([("row", "ascending"), ("sample", "ascending")])


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("out.parquet", ["--temperature", "0", "--ignore-eos"]),
        pytest.param("out.jsonl", ["--temperature", "0.9", "--seed", "7"], marks=pytest.mark.slow),
        ("out", ["--temperature", "0.9", "--seed", "7", "--top-p", "0.9"]),
    ],
)
def test_a_job_that_is_killed_twenty_times_gives_the_same(
    tmp_path: Path, model: str, zygote: Zygote, kind: str, options: list[str]
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
        write_input(folder)
    zygote.start(*command(whole, model, kind, *options))
    assert zygote.wait() == 0
    moments, rows_at = random.Random(kind), []
    for number in range(KILLS):
        child = zygote.start(*command(killed, model, kind, *options))
        if number % 4:
            wait_for_parts(killed, kind, moments.randint(1, 2))
        time.sleep(moments.uniform(0.0, 0.06 if number % 4 else 1.2))
        os.kill(child, signal.SIGKILL)
        assert zygote.wait() == -signal.SIGKILL, "the job is too short"
        rows_at.append(sum(pq.read_metadata(part).num_rows for part in parts(killed, kind)))
    zygote.start(*command(killed, model, kind, *options))
    assert zygote.wait() == 0
    assert table(killed, kind).equals(table(whole, kind))
    assert rows_at == sorted(rows_at), "what was finished stayed"
    assert len(set(rows_at)) > KILLS // 2, "the kills met it at different places"
    assert not [path for path in killed.rglob("*") if path.name.endswith((".tmp", ".corrupt"))]


def parts(folder: Path, kind: str) -> list[Path]:
    return list((folder / kind if kind == "out" else folder / f"{kind}.run" / "parts").glob("part-*.parquet"))


def wait_for_parts(folder: Path, kind: str, more: int) -> None:
    wanted, deadline = len(parts(folder, kind)) + more, time.monotonic() + 60
    while len(parts(folder, kind)) < wanted and time.monotonic() < deadline:
        time.sleep(0.002)
