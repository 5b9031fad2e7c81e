"""Output tokens a second beside transformers: a model of Llama-3.2-1B's shape with the same random weights in bfloat16,
greedy, prompts of random tokens, all completions as long as they may be.

transformers runs as continuous batching, with flash attention where it is installed and with sdpa, and as plain
`generate` on batches. All get as many requests, as the rate grows with those that are under way; what is slow gets
shorter completions, so that it ends in time.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_model import byte_tokenizer, engine_of, freeing, llama_config, random_model, transformers_model
from benchmarks.gpu_parts import Case, Figures, Setting
from pagedgen import EngineConfig, Request, SamplingParams

REQUESTS, PROMPT, OUTPUT = 512, 256, 256
TINY_REQUESTS, TINY_PROMPT, TINY_OUTPUT = 4, 8, 6
OURS, PEERS = "pagedgen", "transformers"
TARGET = 3.0
SECONDS = 20.0  # what a measured run of transformers is to take at most, by a shorter run's rate
TRIAL_REQUESTS, TRIAL_OUTPUT = 64, 32
BATCH = 256
FLASH = ("flash_attention_3", "flash_attention_2")

Generate = Callable[[list[list[int]], int], int]


class Bench:
    """The work, by the setting."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.device = setting, torch.device(setting.device)
        self.config = llama_config(setting)
        sizes = (TINY_REQUESTS, TINY_PROMPT, TINY_OUTPUT) if setting.tiny else (REQUESTS, PROMPT, OUTPUT)
        self.requests, self.prompt, self.output = sizes
        self.dtype = torch.float32 if setting.tiny else torch.bfloat16

    def prompts(self, seed: int) -> list[list[int]]:
        ids = np.random.default_rng(seed).integers(0, self.config.vocab_size, (self.requests, self.prompt))
        found: list[list[int]] = ids.tolist()
        return found

    def timed(self, generate: Generate, requests: int, output: int, seed: int) -> Figures:
        """rate: output tokens a second."""
        prompts = self.prompts(seed)[:requests]
        started = time.perf_counter()
        tokens = generate(prompts, output)
        seconds = time.perf_counter() - started
        if tokens != requests * output:
            raise ValueError(f"{tokens} tokens came back of {requests * output}")
        return {"rate": tokens / seconds, "run_s": seconds, "requests": requests, "output": output}


def cases(setting: Setting) -> list[Case]:
    runs = {
        f"{OURS}, 256 at a time": partial(ours, setting, 256),
        f"{OURS}, 512 at a time": partial(ours, setting, 512),
        f"{PEERS} continuous batching, sdpa": partial(continuous, setting, "sdpa"),
        f"{PEERS} generate, batches of {BATCH}, sdpa": partial(static, setting),
        f"{PEERS} continuous batching, flash attention": partial(continuous, setting, None),
    }
    return [Case(name, partial(freeing, torch.device(setting.device), run)) for name, run in runs.items()]


def ours(setting: Setting, max_seqs: int) -> Figures:
    """The second of two runs, so that all graphs are there; the first stands beside it."""
    bench = Bench(setting)
    config = EngineConfig(
        device=setting.device,  # type: ignore[arg-type]
        dtype="float32" if setting.tiny else "bfloat16",
        kv_memory=(1 << 22) if setting.tiny else (20 << 30),
        max_seqs=max_seqs,
        prefix_cache=False,
    )
    model = random_model(bench.config, bench.dtype, bench.device)
    notes: list[str] = []
    tokenizer = byte_tokenizer(Path(setting.folder) / "byte-tokenizer")
    engine = engine_of(model, bench.config, tokenizer, config, on_note=notes.append)

    def generate(prompts: list[list[int]], output: int) -> int:
        params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
        requests = [Request(i, str(i), prompt_token_ids=tuple(ids), params=params) for i, ids in enumerate(prompts)]
        return sum(completion.completion_tokens for completion in engine.generate(requests))

    first, second = (bench.timed(generate, bench.requests, bench.output, seed) for seed in (0, 1))
    return {**second, "first_rate": first["rate"], "attention": engine.attention_name, "notes": notes}


def peer_figures(bench: Bench, generate: Generate) -> Figures:
    """Two short runs, as in the first all is set up, then one with completions as long as fit the time by the rate of
    the second. Where not even a token each does, the second is what is measured."""
    requests, output = min(bench.requests, TRIAL_REQUESTS), min(bench.output, TRIAL_OUTPUT)
    _, trial = (bench.timed(generate, requests, output, seed) for seed in (2, 3))
    affordable = int(SECONDS * trial["rate"] / bench.requests)
    measured = bench.timed(generate, bench.requests, min(bench.output, affordable), 4) if affordable else trial
    return {**measured, "trial_rate": trial["rate"]}


def continuous(setting: Setting, attention: str | None) -> Figures:
    """attention: the name of an implementation; None is the best flash attention that is installed."""
    import transformers
    from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

    if attention is None:
        flash = [is_flash_attn_3_available(), is_flash_attn_2_available()]
        if not any(flash):
            return {"left_out": "flash attention is not installed"}
        attention = FLASH[flash.index(True)]
    transformers.logging.set_verbosity_error()
    bench = Bench(setting)
    model = transformers_model(bench.config, bench.dtype, bench.device, attention)
    with _session(model, bench, attention) as manager:

        def generate(prompts: list[list[int]], output: int) -> int:
            for ids in prompts:
                manager.add_request(ids, max_new_tokens=output, eos_token_id=-1)
            return sum(len(result.generated_tokens) for result in _results(manager, len(prompts)))

        return peer_figures(bench, generate) | {"attention": model.config._attn_implementation}


def _session(model: Any, bench: Bench, attention: str) -> Any:
    """The context of a manager; how it batches and what it keeps is left to itself, but for prefixes."""
    from transformers import ContinuousBatchingConfig, GenerationConfig
    from transformers.generation.continuous_batching.utils import WorkloadHints

    return model.continuous_batching_context_manager(
        GenerationConfig(eos_token_id=-1, pad_token_id=0, do_sample=False, max_new_tokens=bench.output),
        continuous_batching_config=batching_config(ContinuousBatchingConfig, attention, bench.setting.tiny),
        workload_hints=WorkloadHints(bench.prompt, bench.output, bench.requests),
        timeout=10,
    )


def batching_config(kind: Any, attention: str, tiny: bool) -> Any:
    """kind: the class of the settings. Later versions take flash attention for sdpa where it is installed."""
    options: dict[str, Any] = {"num_blocks": 64, "max_batch_tokens": 256} if tiny else {}
    if attention == "sdpa" and "auto_switch_to_flash" in {field.name for field in fields(kind)}:
        options["auto_switch_to_flash"] = False
    return kind(allow_block_sharing=False, **options)


def _results(manager: Any, count: int) -> Iterable[Any]:
    """The finished results of so many requests."""
    while count:
        result = manager.get_result(timeout=1)
        if result is None and not manager.is_running():
            raise RuntimeError("the thread that generates ended early")
        if result is not None and result.is_finished():
            if result.error is not None:
                raise RuntimeError(str(result.error))
            yield result
            count -= 1


def static(setting: Setting) -> Figures:
    """All prompts of a batch are equally long, so that nothing is padded."""
    bench = Bench(setting)
    model = transformers_model(bench.config, bench.dtype, bench.device, "sdpa")
    model.generation_config.eos_token_id = None

    @torch.inference_mode()
    def generate(prompts: list[list[int]], output: int) -> int:
        tokens = 0
        for begin in range(0, len(prompts), BATCH):
            ids = torch.tensor(prompts[begin : begin + BATCH], device=bench.device)
            options = {"max_new_tokens": output, "do_sample": False, "pad_token_id": 0}
            out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
            tokens += out[:, ids.shape[1] :].numel()
        return tokens

    return peer_figures(bench, generate) | {"attention": "sdpa"}


def summary(found: Sequence[Figures]) -> Figures:
    """ratio: of our faster rate to transformers' fastest as continuous batching; ratio_to_all: to its fastest."""
    rates = {figures["case"]: figures["rate"] for figures in found if "rate" in figures}
    mine = max((rate for name, rate in rates.items() if name.startswith(OURS)), default=None)
    theirs = {name: rate for name, rate in rates.items() if name.startswith(PEERS)}
    batching = [rate for name, rate in theirs.items() if "continuous" in name]
    ratio = mine / max(batching) if mine and batching else None
    return {
        "target": TARGET,
        "ratio": ratio,
        "met": ratio >= TARGET if ratio is not None else None,
        "ratio_to_all": mine / max(theirs.values()) if mine and theirs else None,
        "rates": rates,
    }


def table(found: Sequence[Figures]) -> tuple[Sequence[str], list[Sequence[object]]]:
    headers = ("output tokens/s", "rate", "requests", "tokens each", "seconds", "attention")
    rows: list[Sequence[object]] = [
        (f["case"], *(f.get(name, "") for name in ("rate", "requests", "output", "run_s", "attention")))
        for f in found
        if "rate" in f or "left_out" in f
    ]
    return headers, rows
