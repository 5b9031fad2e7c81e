"""transformers' continuous batching: what its `generate_batch` does, with an output length for each row and one manager
for all rounds, so that making its KV pool is part of the start-up.

On a CPU it is slower than `generate` by an order of magnitude, so it gets the first rows of a round only.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any

from benchmarks.peers.transformers_static import load_model, sampling
from benchmarks.peers.work import Row, read_rows, rounds_of, worker_parser
from benchmarks.serving import serve

PAGE_TOKENS = 256


def start_session(folder: str, rows: Sequence[Row], prefix_cache: bool) -> Any:
    """The context of a manager for work like `rows`, with twice the KV pool that they can fill."""
    from transformers import ContinuousBatchingConfig, GenerationConfig
    from transformers.generation.continuous_batching.utils import WorkloadHints

    most_tokens = [len(row.prompt_token_ids) + row.max_tokens for row in rows]
    pages = sum(row.n * math.ceil(most / PAGE_TOKENS) for row, most in zip(rows, most_tokens, strict=True))
    return load_model(folder).continuous_batching_context_manager(
        GenerationConfig(eos_token_id=-1, pad_token_id=0, **sampling(rows[0])),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=PAGE_TOKENS, num_blocks=2 * pages, allow_block_sharing=prefix_cache
        ),
        workload_hints=WorkloadHints(
            max_prompt_length=max(len(row.prompt_token_ids) for row in rows),
            max_generated_length=max(row.max_tokens for row in rows),
            num_requests=sum(row.n for row in rows),
        ),
    )


def generate(manager: Any, rows: list[Row]) -> Sequence[Sequence[int]]:
    ids = [manager.add_request(row.prompt_token_ids, max_new_tokens=row.max_tokens, eos_token_id=-1) for row in rows]
    lengths: dict[str, list[int]] = defaultdict(list)
    unfinished = sum(row.n for row in rows)
    while unfinished:
        result = manager.get_result(timeout=1)
        if result is None and not manager.is_running():
            raise RuntimeError("its generation thread ended early")
        if result is not None and result.is_finished():
            lengths[result.request_id.partition("__child#")[0]].append(len(result.generated_tokens))
            unfinished -= 1
    return [lengths[request_id] for request_id in ids]


def main() -> None:
    arguments = worker_parser(__doc__).parse_args()
    first_round = read_rows(arguments.work, 0, arguments.most)
    with start_session(arguments.model, first_round, arguments.prefix_cache) as manager:
        import transformers

        contestant = rounds_of(partial(generate, manager), arguments.work, arguments.most)
        serve(contestant, f"transformers {transformers.__version__}")


if __name__ == "__main__":
    main()
