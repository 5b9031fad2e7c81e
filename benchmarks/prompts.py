"""Chats to measure with: published questions from a folder beside the checkout where it is there, else the samples."""

import importlib.resources
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"

Chat = list[dict[str, str]]


def gsm8k_chats() -> tuple[str, list[Chat]]:
    """(what they are, the chats): the questions of GSM8K's test split, each as one user message."""
    return _chats("GSM8K", "gsm8k_test.jsonl", lambda row: row["question"])


def mt_bench_chats() -> tuple[str, list[Chat]]:
    """(what they are, the chats): the first turns of MT-bench, each as one user message."""
    return _chats("MT-bench", "mt_bench.jsonl", lambda row: row["turns"][0])


def of_round(chats: list[Chat], count: int, number: int) -> list[Chat]:
    """The `count` chats of a round: other ones in each until all have been used."""
    return [chats[(number * count + i) % len(chats)] for i in range(count)]


def _chats(name: str, file: str, question: Callable[[dict[str, Any]], str]) -> tuple[str, list[Chat]]:
    if (DATA / file).is_file():
        return name, [_as_chat(question(row)) for row in _rows((DATA / file).read_text("utf-8"))]
    bundled = importlib.resources.files("pagedgen.sample_prompts").joinpath("prompts.jsonl").read_text("utf-8")
    return "the sample prompts", [row.get("messages") or _as_chat(row["prompt"]) for row in _rows(bundled)]


def _rows(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def _as_chat(text: str) -> Chat:
    return [{"role": "user", "content": text}]
