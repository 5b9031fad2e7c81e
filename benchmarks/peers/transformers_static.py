"""transformers' `generate` on batches of rows in the order they come, padded on the left, as its user would script it.

A batch runs until its longest row is done; only the tokens that a row asks for count. `generate` has no prefix cache.
"""

from collections.abc import Sequence
from typing import Any

from benchmarks.peers.work import Generate, Row, rounds_of, worker_parser
from benchmarks.serving import serve


def load_model(folder: str) -> Any:
    """The model in bfloat16, which goes on past end tokens."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device).eval()
    model.generation_config.eos_token_id = None
    return model


def sampling(row: Row) -> dict[str, Any]:
    """The options of `generate` that say how to choose a token."""
    if row.temperature == 0:
        return {"do_sample": False}
    return {
        "do_sample": True,
        "temperature": row.temperature,
        "top_p": row.top_p,
        "top_k": 0,
        "num_return_sequences": row.n,
    }


def generator(folder: str, batch: int) -> Generate:
    """batch: most sequences of a batch."""
    import torch

    model = load_model(folder)

    def run_batch(rows: Sequence[Row]) -> list[list[int]]:
        width = max(len(row.prompt_token_ids) for row in rows)
        padding = [width - len(row.prompt_token_ids) for row in rows]
        padded = [[0] * pad + row.prompt_token_ids for pad, row in zip(padding, rows, strict=True)]
        mask = [[0] * pad + [1] * (width - pad) for pad in padding]
        with torch.inference_mode():
            output = model.generate(
                torch.tensor(padded, device=model.device),
                attention_mask=torch.tensor(mask, device=model.device),
                max_new_tokens=max(row.max_tokens for row in rows),
                pad_token_id=0,
                **sampling(rows[0]),
            )
        found = iter(output[:, width:].tolist())
        return [[len(next(found)[: row.max_tokens]) for _ in range(row.n)] for row in rows]

    def generate(rows: list[Row]) -> list[list[int]]:
        size = max(1, batch // rows[0].n)
        return [lengths for i in range(0, len(rows), size) for lengths in run_batch(rows[i : i + size])]

    return generate


def main() -> None:
    parser = worker_parser(__doc__)
    parser.add_argument("--batch", type=int, required=True, help="most sequences of a batch")
    arguments = parser.parse_args()
    generate = generator(arguments.model, arguments.batch)
    import transformers

    serve(rounds_of(generate, arguments.work, arguments.most), f"transformers {transformers.__version__}")


if __name__ == "__main__":
    main()
