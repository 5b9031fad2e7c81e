"""How far bfloat16 and eight bits are from float32: the models' next-token distributions on the same text.

GSM8K's questions with their published answers go through the model as chats, each token being given, whatever the model
would have written (teacher forcing). At every position of the answers the distribution is compared with float32's:
Kullback-Leibler divergence, and whether the likeliest token is the same.
"""

import argparse
import json
import sys
from typing import Any

import torch
from torch.nn import functional

from benchmarks.common import print_table, write_results
from benchmarks.prompts import DATA
from pagedgen.config import EngineConfig
from pagedgen.execution.attention import choose_backend
from pagedgen.execution.batch import build_batch
from pagedgen.execution.kv_cache import KVCache
from pagedgen.models.base import Model
from pagedgen.models.llama import LlamaModel
from pagedgen.models.loader import load_model
from pagedgen.process import prepare_process
from pagedgen.quantizing import quantize_model
from pagedgen.step import SlotArrays, StepPlan
from pagedgen.text.tokenizer import Tokenizer

CONTESTANTS = {
    "bfloat16": {"dtype": "bfloat16"},
    "int8 (W8A8)": {"dtype": "bfloat16", "quantize": "int8"},
}


def texts(tokenizer: Tokenizer, count: int) -> list[tuple[list[int], int]]:
    """(token ids of question and answer, where the answer begins)."""
    path = DATA / "gsm8k_test.jsonl"
    if not path.is_file():
        sys.exit(f"{path} is not here; it holds the questions and answers")
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()[:count]]
    found = []
    for row in rows:
        question = [{"role": "user", "content": row["question"]}]
        prompt = tokenizer.render_chat(question, False)
        first, whole = tokenizer.encode_batch([prompt, prompt + row["answer"]], add_special_tokens=False)
        found.append((list(whole), len(first)))
    return found


def answer_logits(model: Model, ids: list[int], begin: int) -> torch.Tensor:
    """Float32 [A, V]: the logits before each token of the answer, which begins at `begin`."""
    import numpy as np

    attention, length, size = choose_backend(torch.device("cpu")), len(ids), 16
    state = SlotArrays(1, length, size)
    state.token_ids[0] = ids
    state.num_tokens[0], state.num_prompt[0] = length, length
    blocks = -(-length // size)
    state.num_blocks[0], state.block_table[0] = blocks, np.arange(blocks)
    cache = KVCache(model.spec.layers, blocks, size, model.spec.dtype, model.spec.device)
    zero = np.zeros(1, np.int32)
    # Asking for the prompt's log-probabilities is what makes the model give the rows before its last one.
    plan = StepPlan(
        zero, zero, zero + length, np.ones(1, np.bool_), np.empty((0, 2), np.int32), prompt_logprobs={0: (begin, 0)}
    )
    with torch.inference_mode():
        batch = build_batch(plan, state, model.spec.device)
        logits = model.logits(model.forward(batch, cache, attention)).float()
    return logits[1:]  # the first row is that of what comes after the answer


def load(name: str | None, **options: Any) -> Model:
    """The model as the engine has it."""
    loaded = load_model(EngineConfig(model=name, **options))
    if options.get("quantize") is not None and isinstance(loaded.model, LlamaModel):
        quantize_model(loaded.model, Tokenizer.load(loaded.tokenizer_path))
    return loaded.model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a Hub id, a folder or a .gguf file; the default model when left out")
    parser.add_argument("--rows", type=int, default=64)
    arguments = parser.parse_args()
    prepare_process()
    loaded = load_model(EngineConfig(model=arguments.model, dtype="float32"))
    work = texts(Tokenizer.load(loaded.tokenizer_path), arguments.rows)
    exact = [functional.log_softmax(answer_logits(loaded.model, ids, begin), -1) for ids, begin in work]
    table, results = [], {}
    for name, options in CONTESTANTS.items():
        model = load(arguments.model, **options)
        divergences, same = [], []
        for (ids, begin), expected in zip(work, exact, strict=True):
            found = functional.log_softmax(answer_logits(model, ids, begin), -1)
            divergences.append((expected.exp() * (expected - found)).sum(-1))
            same.append(expected.argmax(-1) == found.argmax(-1))
        mean, share = float(torch.cat(divergences).mean()), float(torch.cat(same).float().mean())
        table.append((name, mean, f"{share:.2%}"))
        results[name] = {"mean_kl": mean, "same_top_token": share, "positions": sum(map(len, divergences))}
    title = f"against float32, {sum(len(x) for x in exact)} positions of {arguments.rows} GSM8K answers"
    print_table(title, ("", "mean KL", "same top token"), table)
    write_results("quality", {"contestants": results})


if __name__ == "__main__":
    main()
