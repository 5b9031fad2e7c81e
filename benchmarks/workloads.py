"""The named workloads of `benchmarks.throughput`: the rows of each round, the same for all contestants.

Every round has prompts of its own, as long as there are chats that none had: of an earlier round's prompts a prefix
cache finds no more than what the chat template puts before each. Lengths that are drawn or given, not those of chats,
are the same in every round.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.paper_lengths import CHAT
from benchmarks.peers.work import Row, write_rows
from benchmarks.prompts import Chat, gsm8k_chats, mt_bench_chats, of_round

# Enough tokens for every contestant to meet a round's prompts and its largest batch before the clock runs.
WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class Source:
    """What token ids are made of. encode: the ids of each chat, rendered by the model's template."""

    vocab_size: int
    encode: Callable[[Sequence[Chat]], list[list[int]]]


@dataclass(frozen=True)
class Workload:
    """The work of a round. Each of `rows` requests gets `n` completions, greedy at temperature 0, past the end token.

    chats: where the prompts come from; None is random token ids. prompt, output: tokens of each prompt (of random ids)
    and completion; None draws them from the long-tailed lengths of the chat trace. prefix_cache: on for whoever has
    one, else off for all.
    """

    rows: int
    chats: Callable[[], tuple[str, list[Chat]]] | None = None
    prompt: int | None = None
    output: int | None = None
    n: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    prefix_cache: bool = False

    def rows_of_round(self, source: Source, number: int) -> list[Row]:
        drawn = CHAT.draw(self.rows)
        outputs = drawn.outputs[:, 0].tolist() if self.output is None else [self.output] * self.rows
        if self.chats is not None:
            prompts = source.encode(of_round(self.chats()[1], self.rows, number))
        else:
            lengths = drawn.prompts if self.prompt is None else np.full(self.rows, self.prompt)
            ids = np.random.default_rng(number).integers(0, source.vocab_size, int(lengths.sum()), np.int64)
            prompts = [part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])]
        return [
            Row(prompt, output, self.n, self.temperature, self.top_p)
            for prompt, output in zip(prompts, outputs, strict=True)
        ]

    def repeats(self, rounds: int) -> bool:
        """Whether rounds and warm-up have to share prompts, which prefix caches then find whole."""
        return self.chats is not None and self.rows * (rounds + 1) > len(self.chats()[1])

    def describe(self) -> str:
        drawn = CHAT.draw(self.rows)
        if self.chats is not None:
            prompts = f"{self.rows} of {self.chats()[0]}"
        elif self.prompt is not None:
            prompts = f"{self.rows} prompts of {self.prompt} random tokens"
        else:
            prompts = f"{self.rows} prompts of {drawn.prompts.mean():.0f} random tokens on average"
        tokens = f"{self.output}" if self.output is not None else f"{drawn.outputs.mean():.0f} on average"
        samples = f"{self.n} samples of " if self.n > 1 else ""
        cache = ", with prefix caches" if self.prefix_cache else ""
        return f"{prompts}, {samples}{tokens} new tokens each{cache}"


WORKLOADS = {
    "fixed": Workload(256, prompt=128, output=128),
    "gsm8k": Workload(256, gsm8k_chats, output=256, prefix_cache=True),
    "mix": Workload(256),
    "samples": Workload(32, mt_bench_chats, output=64, n=8, temperature=1.0, top_p=0.95),
}


def write_rounds(workload: Workload, source: Source, folder: Path, rounds: int) -> list[list[Row]]:
    """Write the rows of each round for the contestants, and as one more those of the warm-up: of all that a round has,
    with few new tokens. What is written for the measured rounds."""
    measured = [workload.rows_of_round(source, number) for number in range(rounds)]
    warm_up = workload.rows_of_round(source, rounds)
    warm_up = [replace(row, max_tokens=min(row.max_tokens, WARM_UP_TOKENS)) for row in warm_up]
    for number, rows in enumerate([*measured, warm_up]):
        write_rows(folder, number, rows)
    return measured


def model_source(folder: Path) -> Source:
    """folder: of a model as transformers saves one, with its tokenizer."""
    from pagedgen.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(str(folder))

    def encode(chats: Sequence[Chat]) -> list[list[int]]:
        texts = [tokenizer.render_chat(chat, False) for chat in chats]
        return [list(ids) for ids in tokenizer.encode_batch(texts, False)]

    return Source(int(model_config(folder)["vocab_size"]), encode)


def model_config(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text("utf-8"))
    return found


def model_folder(name: str | None) -> Path:
    """The folder of a model that all load their weights from; a GGUF file's is its converted one."""
    import torch

    from pagedgen.models.gguf import convert_gguf
    from pagedgen.models.source import fetch, resolve_model

    source = resolve_model(name)
    if source.kind == "gguf" and source.path is not None:
        return convert_gguf(source.path, torch.bfloat16)
    return fetch(source)
