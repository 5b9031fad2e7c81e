"""Whether a model gives the same tokens on the GPU, with CUDA graphs and steps planned ahead and without, and on the
CPU: greedy completions, samples with top-p, beams and penalised samples, in float32.

Where tokens differ, the first place, and how far apart the two tokens are there in log-probability: a gap of some 1e-5
is the rounding of sums in another order.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_model import graphs_of, model_to_run
from benchmarks.gpu_parts import Case, Figures, Setting
from benchmarks.prompts import DATA, Chat, gsm8k_chats
from pagedgen import BeamParams, Completion, Engine, EngineConfig, Request, SamplingParams
from pagedgen.execution.capture import NotCapturable, capture_graph

PROMPTS, OUTPUT, KV_BYTES = 32, 64, 1 << 30
TINY_PROMPTS, TINY_OUTPUT, TINY_KV_BYTES = 3, 8, 1 << 22
LIKELIEST = 20  # tokens whose log-probabilities are asked for where completions part

# "graphs" is the GPU by default, "plain" without CUDA graphs and steps planned ahead. Each is held to the second.
PAIRS = (("graphs", "plain"), ("plain", "cpu"), ("graphs", "cpu"))
KINDS: dict[str, tuple[dict[str, Any], BeamParams | None]] = {
    "greedy": ({"temperature": 0.0}, None),
    "sampled": ({"temperature": 0.8, "top_p": 0.95, "n": 2}, None),
    "beams": ({}, BeamParams(width=4, num_return=4)),
    "penalised": ({"temperature": 0.8, "top_k": 50, "repetition_penalty": 1.2}, None),
}

Tokens = Mapping[tuple[int, int], tuple[int, ...]]


class Runs:
    """Engines by name, and what each has completed of each kind; all are made when they are first asked for."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self._engines: dict[str, Engine] = {}
        self.notes: list[str] = []
        self._completed: dict[tuple[str, str], list[Completion]] = {}

    def engine(self, name: str) -> Engine:
        if name not in self._engines:
            config = EngineConfig(
                model=model_to_run(self.setting)[0],
                device="cpu" if name == "cpu" else self.setting.device,  # type: ignore[arg-type]
                dtype="float32",
                kv_memory=TINY_KV_BYTES if self.setting.tiny else KV_BYTES,
            )
            if name == "plain":
                config = replace(config, cuda_graphs=False, overlap=False)
            self._engines[name] = Engine(config, on_note=self.notes.append)
        return self._engines[name]

    def prompts(self, name: str) -> list[tuple[int, ...]]:
        tokenizer = self.engine(name).tokenizer
        texts = [tokenizer.render_chat(chat, False) for chat in chats(self.setting)]
        return [tuple(ids) for ids in tokenizer.encode_batch(texts, add_special_tokens=True)]

    def completed(self, name: str, kind: str) -> list[Completion]:
        if (name, kind) not in self._completed:
            options, beam = KINDS[kind]
            output = TINY_OUTPUT if self.setting.tiny else OUTPUT
            params = replace(SamplingParams(max_tokens=output, seed=5, ignore_eos=True), **options)
            requests = [
                Request(i, str(i), prompt_token_ids=ids, params=params, beam=beam)
                for i, ids in enumerate(self.prompts(name))
            ]
            self._completed[name, kind] = list(self.engine(name).generate(requests))
        return self._completed[name, kind]


def cases(setting: Setting) -> list[Case]:
    runs = Runs(setting)
    return [
        *(Case(f"start {name}", partial(start, runs, name)) for name in ("graphs", "plain")),
        *(
            Case(f"{kind}: {name} as {base}", partial(compare, runs, kind, name, base))
            for name, base in PAIRS
            for kind in KINDS
        ),
        Case("a capture that fails", partial(failed_capture, setting)),
    ]


def start(runs: Runs, name: str) -> Figures:
    engine = runs.engine(name)
    return {
        "attention": engine.attention_name,
        "model": model_to_run(runs.setting)[1],
        "runs_ahead": engine.runner.device_state is not None,
    }


def graphs_used(runs: Runs) -> Figures:
    """Whether what "graphs" has completed came from graphs, as far as decoding goes; true where there are none. notes:
    of all engines."""
    figures = graphs_of(runs.engine("graphs"))
    used = bool(figures.get("graphs") and figures["graph_sizes"])
    return {"graphs_used": used or not has_graphs(runs.setting), **figures, "notes": list(runs.notes)}


def has_graphs(setting: Setting) -> bool:
    return setting.device != "cpu"


def failed_capture(setting: Setting) -> Figures:
    """recovers: whether the device goes on after a capture of work that waits for it, and the graphs before and after
    do."""
    if not has_graphs(setting):
        return {"left_out": "a CPU captures nothing"}
    x, pool = torch.zeros(8, device=setting.device), torch.cuda.graph_pool_handle()
    works = (lambda: x.add_(1), lambda: x.sum().item(), lambda: x.mul_(3))
    for work in works:  # compiles
        work()
    x.zero_()
    before, refused = capture_graph(works[0], pool), ""
    try:
        capture_graph(works[1], pool)
    except NotCapturable as error:
        refused = str(error).split("\n", 1)[0]
    torch.cuda.empty_cache()
    torch.randn(8, device=setting.device)
    after = capture_graph(works[2], pool)
    before.replay()
    after.replay()
    return {"recovers": bool(refused) and x.tolist() == [3.0] * 8, "refused": refused}


def chats(setting: Setting) -> list[Chat]:
    """Questions of GSM8K where they are, else the sample prompts."""
    if (DATA / "gsm8k_test.jsonl").is_file():
        found = gsm8k_chats()[1]
    else:
        text = (Path(__file__).resolve().parent.parent / "sample_prompts" / "prompts.jsonl").read_text("utf-8")
        rows = [json.loads(line) for line in text.splitlines()]
        found = [row.get("messages") or [{"role": "user", "content": row["prompt"]}] for row in rows]
    return found[: TINY_PROMPTS if setting.tiny else PROMPTS]


def compare(runs: Runs, kind: str, name: str, base: str) -> Figures:
    """equal: how many completions are those of `base`. first: see `first_difference`."""
    ours, expected = runs.completed(name, kind), runs.completed(base, kind)
    tokens = [{(c.row, c.sample): c.token_ids for c in completions} for completions in (ours, expected)]
    equal = sum(tokens[0].get(place) == ids for place, ids in tokens[1].items())
    figures: Figures = {
        "completions": len(expected),
        "equal": equal,
        "not_ok": [f"{c.row}: {c.error}"[:200] for c in (*ours, *expected) if c.error is not None][:5],
    }
    if name == "graphs":
        figures |= graphs_used(runs)
    if KINDS[kind][1] is not None:
        scores = {(c.row, c.sample): c.score or 0.0 for c in expected}
        apart = [abs((c.score or 0.0) - scores.get((c.row, c.sample), 0.0)) for c in ours]
        figures["largest_score_difference"] = max(apart, default=0.0)
    if equal < len(expected):
        figures["first"] = first_difference(runs.engine(base), runs.prompts(base), *tokens)
    return figures


def first_difference(engine: Engine, prompts: Sequence[tuple[int, ...]], ours: Tokens, expected: Tokens) -> Figures:
    """The earliest place at which a completion differs: its row and sample, the two tokens there, and how far apart
    they are by the engine's log-probabilities; None where one of them is not among the likeliest."""
    places = []
    for place, theirs in expected.items():
        mine = ours.get(place, ())
        if mine != theirs:
            same = [a == b for a, b in zip(mine, theirs, strict=False)]
            places.append((same.index(False) if False in same else len(same), place))
    index, (row, sample) = min(places)
    pair = [x.get((row, sample), ())[index : index + 1] for x in (ours, expected)]
    found: Figures = {"row": row, "sample": sample, "place": index, "tokens": [*pair[0], *pair[1]], "gap": None}
    if len(found["tokens"]) == 2:
        prompt = (*prompts[row], *expected[row, sample][:index])
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=LIKELIEST)
        (completion,) = engine.generate([Request(0, "0", prompt_token_ids=prompt, params=params)])
        for likeliest in completion.logprobs or ():
            values = dict(zip(likeliest.top_ids, likeliest.top_logprobs, strict=True))
            if set(found["tokens"]) <= set(values):
                found["gap"] = values[found["tokens"][1]] - values[found["tokens"][0]]
    return found


def summary(found: Sequence[Figures]) -> Figures:
    """passed: whether all completions are equal, those that are to come from graphs did, and captures may fail."""
    compared = [figures for figures in found if "completions" in figures]
    all_equal = bool(compared) and all(f["equal"] == f["completions"] for f in compared)
    used = [figures["graphs_used"] for figures in found if "graphs_used" in figures]
    return {
        "passed": all_equal and bool(used) and all(used) and all(f.get("recovers", "error" not in f) for f in found),
        "all_equal": all_equal,
        "graphs_used": bool(used) and all(used),
        "notes": sorted({note for figures in found for note in figures.get("notes", ())}),
        "equal": {f["case"]: f"{f['equal']} of {f['completions']}" for f in compared},
        "not_ok": [line for figures in compared for line in figures["not_ok"]][:5],
    }


def table(found: Sequence[Figures]) -> tuple[Sequence[str], list[Sequence[object]]]:
    rows: list[Sequence[object]] = []
    for figures in found:
        if "completions" in figures:
            first = figures.get("first")
            where = f"row {first['row']} token {first['place']} gap {first['gap']}" if first else ""
            rows.append((figures["case"], figures["completions"], figures["equal"], where))
    return ("completions", "all", "equal", "first difference"), rows
