"""The rows of each round, which all contestants get as the same token ids in the same files, and the run of a round."""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """A request: `n` completions of exactly `max_tokens` tokens each, past the end token. temperature: 0 is greedy."""

    prompt_token_ids: list[int]
    max_tokens: int
    n: int = 1
    temperature: float = 0.0
    top_p: float = 1.0

    @property
    def output_tokens(self) -> int:
        return self.n * self.max_tokens


# Generates the completions of the rows: of each row, in order, how many tokens each of its completions has.
Generate = Callable[[list[Row]], Sequence[Sequence[int]]]


def write_rows(folder: Path, number: int, rows: Sequence[Row]) -> None:
    _path(folder, number).write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))


def read_rows(folder: Path, number: int, most: int | None = None) -> list[Row]:
    """The rows of a round, or the first `most` of them."""
    return [Row(**json.loads(line)) for line in _path(folder, number).read_text().splitlines()[:most]]


def rounds_of(generate: Generate, folder: Path, most: int | None = None) -> Callable[[int], float]:
    """A contestant: generates what the round of a number asks for, all of it and no more, and tells the seconds."""

    def contestant(number: int) -> float:
        rows = read_rows(folder, number, most)
        started = time.perf_counter()
        lengths = generate(rows)
        seconds = time.perf_counter() - started
        check_lengths(rows, lengths)
        return seconds

    return contestant


def check_lengths(rows: Sequence[Row], lengths: Sequence[Sequence[int]]) -> None:
    """Raises ValueError where the completions' lengths are not those that the rows ask for."""
    if len(rows) != len(lengths):
        raise ValueError(f"{len(lengths)} rows came back of {len(rows)}")
    for i, (row, found) in enumerate(zip(rows, lengths, strict=True)):
        if list(found) != [row.max_tokens] * row.n:
            raise ValueError(f"row {i} has completions of {list(found)} tokens, not {row.n} of {row.max_tokens}")


def worker_parser(description: str | None) -> argparse.ArgumentParser:
    """The options that every contestant's process is started with."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", required=True, help="the folder that it loads")
    parser.add_argument("--work", type=Path, required=True, help="the folder of the rounds' rows")
    parser.add_argument("--most", type=int, help="run the first so many rows of a round")
    parser.add_argument("--prefix-cache", action="store_true", help="reuse the KV cache of prompts that begin alike")
    return parser


def _path(folder: Path, number: int) -> Path:
    return folder / f"round-{number}.jsonl"
