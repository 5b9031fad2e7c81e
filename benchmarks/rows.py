"""Rows per second of everything but the model: reading, scheduling, sampling, detokenizing and writing.

A file of 200,000 rows goes through a whole run on one core, with a model that costs nothing: it says the same token at
every place. Each row gets one token. Prompts are 16 token ids, or with `--text` texts that go through the chat template
and the tokenizer of the default model. Prints the rate, and how the resident memory grew between a tenth of the rows
and the end.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pyarrow.parquet as pq

from benchmarks.common import print_table, write_results
from pagedgen.config import EngineConfig, InputConfig, JobConfig
from pagedgen.process import prepare_process
from pagedgen.stats.collector import RunStats
from pagedgen.stats.types import StepSample
from pagedgen.units import format_bytes

ROWS, PROMPT_TOKENS, VOCAB_SIZE, TOKEN = 200_000, 16, 64, 17
MAX_SEQS = 256
# 4096 blocks: as many as a real model has, and full of cached prefixes before the first tenth of the rows is done.
KV_BYTES = 4 << 20


@contextmanager
def model_that_costs_nothing(vocab_size: int | None) -> Iterator[None]:
    """Let engines run a model without weights, with the default model's tokenizer, and its vocabulary when None."""
    import torch

    from pagedgen.execution.kv_cache import LayerKV
    from pagedgen.models.base import ModelSpec
    from pagedgen.models.loader import load_model

    class Nothing:
        likeliest: Callable[[torch.Tensor], torch.Tensor] | None = None

        def __init__(self, spec: ModelSpec) -> None:
            self.spec = spec
            self._logits = torch.zeros(MAX_SEQS, spec.vocab_size)
            self._logits[:, TOKEN] = 1.0

        def forward(self, batch: Any, kv_cache: Any, attention: Any) -> torch.Tensor:
            return torch.zeros(len(batch.logit_rows), 1)

        def logits(self, hidden: torch.Tensor) -> torch.Tensor:
            return self._logits[: len(hidden)]

    def load(config: EngineConfig) -> Any:
        loaded = load_model(config)
        spec = replace(loaded.model.spec, layers=(LayerKV(1, 8, 8),), dtype=torch.float32)
        return replace(loaded, model=Nothing(replace(spec, vocab_size=vocab_size or spec.vocab_size)))

    with patch("pagedgen.engine.load_model", load):
        yield


def write_input(path: Path, rows: int, is_text: bool) -> None:
    with path.open("w") as file:
        for row in range(rows):
            ids = [(row >> 6 * place) % VOCAB_SIZE for place in range(PROMPT_TOKENS)]
            prompt = {"prompt": f"What is {row} plus {row % 7}?"} if is_text else {"prompt_token_ids": ids}
            file.write(json.dumps({"id": f"row-{row}", **prompt, "kind": "benchmark"}) + "\n")


def run(rows: int, is_text: bool) -> dict[str, float]:
    """Seconds from reading the first row to the finished file, rows per second, and the growth of the resident memory
    in bytes."""
    from pagedgen import job

    process = psutil.Process()
    marks: list[int] = []

    class Watching(RunStats):
        def add_step(self, sample: StepSample) -> None:
            super().add_step(sample)
            if len(marks) < (self._rows_done + sample.running) * 10 // rows:  # all that run end with their first token
                marks.append(process.memory_info().rss)

    with (
        tempfile.TemporaryDirectory() as folder,
        model_that_costs_nothing(None if is_text else VOCAB_SIZE),
        patch("pagedgen.job.RunStats", Watching),
    ):
        source, output = Path(folder, "in.jsonl"), Path(folder, "out.parquet")
        write_input(source, rows, is_text)
        config = JobConfig(
            InputConfig(str(source)),
            output_path=output,
            engine=EngineConfig(kv_memory=KV_BYTES, max_seqs=MAX_SEQS, max_batch_tokens=8192, max_model_len=256),
            overrides={"max_tokens": 1, "temperature": 0.0, "ignore_eos": True},
            quiet=True,
        )
        job.run_job(config)
        stats = json.loads((output.with_name("out.parquet.run") / "stats.json").read_text())
        assert pq.read_metadata(output).num_rows == rows
    seconds = stats["phases_s"]["generating"] + stats["phases_s"]["writing"]
    return {"seconds": seconds, "rows_per_s": rows / seconds, "memory_growth": marks[-1] - marks[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--text", action="store_true", help="prompts as text instead of token ids")
    arguments = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    os.environ["OMP_NUM_THREADS"] = "1"
    prepare_process()  # before torch is loaded
    found = run(arguments.rows, arguments.text)
    prompts = "texts" if arguments.text else f"{PROMPT_TOKENS} token ids"
    values = (f"{found['seconds']:.1f} s", f"{found['rows_per_s']:,.0f}", format_bytes(found["memory_growth"]))
    print_table(
        f"{arguments.rows:,} rows on one core", ("prompts", "time", "rows/s", "memory grew"), [(prompts, *values)]
    )
    write_results("rows", found)


if __name__ == "__main__":
    main()
