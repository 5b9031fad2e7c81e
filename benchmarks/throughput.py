"""Output tokens per second beside transformers' batched `generate`, on the same weights and the same work in one run.

The work, 64x128/64: 64 prompts of 128 random token ids, 64 new tokens for each, greedy, bfloat16, past the end token.
Every round has prompts of its own, the same for both, so the prefix cache finds nothing. Each runs in a process of its
own, set up as its user's would be: pagedgen as its command line does, transformers with the defaults of torch.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import Worker, compare, serve
from pagedgen.process import prepare_process

REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 64, 128, 64
KV_BYTES = 1 << 30
OURS, PEER = "pagedgen", "transformers"


def prompts(round_number: int, vocab_size: int) -> NDArray[np.int64]:
    return np.random.default_rng(round_number).integers(0, vocab_size, (REQUESTS, PROMPT_TOKENS), np.int64)


def pagedgen_contestant(model: str | None) -> Callable[[int], float]:
    prepare_process()  # before torch is loaded
    from pagedgen import Engine, EngineConfig, Request, SamplingParams

    engine = Engine(EngineConfig(model=model, dtype="bfloat16", kv_memory=KV_BYTES, max_seqs=REQUESTS))
    params = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)

    def contestant(number: int) -> float:
        rows = prompts(number, engine.spec.vocab_size).tolist()
        requests = [Request(i, str(i), prompt_token_ids=tuple(ids), params=params) for i, ids in enumerate(rows)]
        started = time.perf_counter()
        completions = list(engine.generate(requests))
        seconds = time.perf_counter() - started
        assert all(c.completion_tokens == OUTPUT_TOKENS and c.cached_tokens == 0 for c in completions)
        assert len(completions) == REQUESTS
        return seconds

    return contestant


def transformers_contestant(model_name: str | None) -> Callable[[int], float]:
    import torch

    model, _ = load_transformers(model_name)

    def contestant(number: int) -> float:
        ids = torch.from_numpy(prompts(number, model.config.vocab_size)).to(model.device)
        started = time.perf_counter()
        with torch.inference_mode():
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=OUTPUT_TOKENS,
                do_sample=False,
                pad_token_id=0,
            ).cpu()
        seconds = time.perf_counter() - started
        assert output.shape == (REQUESTS, PROMPT_TOKENS + OUTPUT_TOKENS)
        return seconds

    return contestant


def load_transformers(name: str | None) -> tuple[Any, Path]:
    """transformers' model in bfloat16, which goes on past end tokens, and the folder it comes from."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    folder = model_folder(name)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device).eval()
    model.generation_config.eos_token_id = None
    return model, folder


def model_folder(name: str | None) -> Path:
    """The folder both load their weights from; a GGUF file's is its converted one."""
    import torch

    from pagedgen.models.gguf import convert_gguf
    from pagedgen.models.source import fetch, resolve_model

    source = resolve_model(name)
    if source.kind == "gguf" and source.path is not None:
        return convert_gguf(source.path, torch.bfloat16)
    return fetch(source)


CONTESTANTS = {PEER: transformers_contestant, OURS: pagedgen_contestant}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a Hub id, a folder or a .gguf file; left out: the default model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--contestant", choices=CONTESTANTS, help=argparse.SUPPRESS)  # what a worker is started with
    arguments = parser.parse_args()
    if arguments.contestant:
        serve(CONTESTANTS[arguments.contestant](arguments.model))
    options = [] if arguments.model is None else ["--model", arguments.model]
    contestants = {name: Worker("benchmarks.throughput", "--contestant", name, *options) for name in (PEER, OURS)}
    title = f"{REQUESTS}x{PROMPT_TOKENS}/{OUTPUT_TOKENS}, bfloat16: output tokens/s"
    compare("throughput", title, contestants, amount=REQUESTS * OUTPUT_TOKENS, rounds=arguments.rounds)


if __name__ == "__main__":
    main()
