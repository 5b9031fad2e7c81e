"""CTranslate2's batched generation with weights of eight bits; it runs in an environment of its own.

    pip install ctranslate2 torch transformers
    ct2-transformers-converter --model MODEL --quantization int8 --output_dir FOLDER

Batches are of rows with prompts of like length, as CTranslate2 makes them itself: a prompt's tokens beyond the shortest
prompt of its batch are computed one by one. A row that is done leaves its batch. The prefix cache is its static prompt,
what all prompts begin with.
"""

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.work import Generate, Row, rounds_of, worker_parser
from benchmarks.serving import serve


def generator(folder: str, prefix_cache: bool, batch: int) -> Generate:
    """batch: most sequences of a batch."""
    import ctranslate2

    vocabulary = json.loads((Path(folder) / "vocabulary.json").read_text("utf-8"))
    threads = os.cpu_count() or 1
    model = ctranslate2.Generator(folder, device="cpu", inter_threads=1, intra_threads=threads)

    def run_batch(rows: Sequence[Row], common: Sequence[int]) -> list[list[int]]:
        longest = max(row.max_tokens for row in rows)
        options: dict[str, Any] = {"static_prompt": [vocabulary[i] for i in common]} if common else {}
        if any(row.max_tokens < longest for row in rows):
            options["callback"] = ends_rows(rows)
        if rows[0].temperature > 0:
            options |= {"sampling_topk": 0, "sampling_topp": rows[0].top_p, "sampling_temperature": rows[0].temperature}
        results = model.generate_batch(
            [[vocabulary[i] for i in row.prompt_token_ids[len(common) :]] for row in rows],
            max_length=longest,
            num_hypotheses=rows[0].n,
            include_prompt_in_result=False,
            end_token=[],
            **options,
        )
        return [[len(ids) for ids in result.sequences_ids] for result in results]

    def generate(rows: list[Row]) -> Sequence[Sequence[int]]:
        common = common_beginning(rows) if prefix_cache else []
        size = max(1, batch // rows[0].n)
        order = sorted(range(len(rows)), key=lambda i: len(rows[i].prompt_token_ids))
        lengths: list[list[int]] = [[] for _ in rows]
        for start in range(0, len(rows), size):
            part = order[start : start + size]
            for i, found in zip(part, run_batch([rows[i] for i in part], common), strict=True):
                lengths[i] = found
        return lengths

    return generate


def ends_rows(rows: Sequence[Row]) -> Callable[[Any], bool]:
    """What is called with each token of a batch, and tells whether it is its row's last."""
    left = [row.max_tokens for row in rows]

    def is_last(step: Any) -> bool:
        row: int = step.batch_id
        left[row] -= 1
        return left[row] == 0

    return is_last


def common_beginning(rows: Sequence[Row]) -> list[int]:
    """The tokens that all prompts begin with, short of a whole prompt."""
    prompts = [row.prompt_token_ids for row in rows]
    first, last = min(prompts), max(prompts)
    most = min(map(len, prompts)) - 1
    return first[: next((i for i in range(most) if first[i] != last[i]), most)]


def main() -> None:
    parser = worker_parser(__doc__)
    parser.add_argument("--batch", type=int, required=True, help="most sequences of a batch")
    arguments = parser.parse_args()
    generate = generator(arguments.model, arguments.prefix_cache, arguments.batch)
    import ctranslate2

    serve(rounds_of(generate, arguments.work, arguments.most), f"ctranslate2 {ctranslate2.__version__}")


if __name__ == "__main__":
    main()
