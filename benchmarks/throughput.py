"""Output tokens per second beside other engines, on the same weights and the same token ids in one run.

    fixed     256 prompts of 128 random token ids, 128 new tokens each; --rows, --prompt and --output change the numbers
    gsm8k     256 questions of GSM8K as chats, 256 new tokens each, with prefix caches
    mix       256 prompts and outputs with the long-tailed lengths of a chat trace, 161 and 338 tokens on average
    samples   32 first turns of MT-bench as chats, 8 samples of 64 tokens each, temperature 1 and top-p 0.95
    beam      `benchmarks.beam`: 16 questions of GSM8K, 8 beams, 64 new tokens; prompts per second

All go on past the end token, greedily where nothing else is said, and every completion has exactly the tokens asked
for. transformers runs as batched `generate` and, on a few rows, as continuous batching. OpenVINO GenAI, vLLM and
CTranslate2 run where an interpreter is given that has them; their modules in `benchmarks.peers` say how to install them
and convert the model. Each contestant is loaded and warmed up in a process of its own before the clock runs, pagedgen's
set up as by its command line, and they take turns, round by round. But for beam all get token ids, and only pagedgen's
time includes making text of what it generates. Prefix caches are off where nothing is said of them.
"""

import argparse
import math
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks import beam
from benchmarks.common import Worker, compare
from benchmarks.openvino_beam import PROMPTS
from benchmarks.peers.work import Generate, Row, rounds_of, worker_parser
from benchmarks.serving import serve
from benchmarks.workloads import WORKLOADS, Workload, model_config, model_folder, model_source, write_rounds
from pagedgen import EngineConfig, Request, SamplingParams
from pagedgen.process import prepare_process

BLOCK_TOKENS = 16
MAX_SEQS = 256
BATCH = 64
CB_ROWS = 4
INT8_GROUP = 576
OURS, TRANSFORMERS, TRANSFORMERS_CB = "pagedgen", "transformers", "transformers-cb"
OPENVINO, OPENVINO_INT8, VLLM, CTRANSLATE2 = "openvino", "openvino-int8", "vllm", "ctranslate2"
PEERS = (TRANSFORMERS, TRANSFORMERS_CB, OPENVINO, OPENVINO_INT8, VLLM, CTRANSLATE2)
PEER_MODULES = "benchmarks.peers."
CONTESTANT = "--contestant"  # makes a process pagedgen's worker


@dataclass(frozen=True)
class Contestant:
    """How to start a contestant's process. options: besides those that all have. most: run the first so many rows."""

    name: str
    module: str
    model: str
    options: tuple[str, ...] = ()
    python: str = sys.executable
    most: int | None = None

    def start(self, work: Path, prefix_cache: bool) -> Worker:
        most = [] if self.most is None else ["--most", str(self.most)]
        cache = ["--prefix-cache"] if prefix_cache else []
        options = ["--model", self.model, "--work", str(work), *most, *cache, *self.options]
        return Worker(self.module, *options, python=self.python)

    def label(self, rows: int) -> str:
        return self.name if self.most is None or self.most >= rows else f"{self.name} ({self.most} rows)"


def generator(config: EngineConfig) -> Generate:
    prepare_process()  # before torch is loaded
    from pagedgen import Engine

    engine = Engine(config)

    def params(row: Row) -> SamplingParams:
        return SamplingParams(
            max_tokens=row.max_tokens, temperature=row.temperature, top_p=row.top_p, n=row.n, ignore_eos=True
        )

    def generate(rows: list[Row]) -> Sequence[Sequence[int]]:
        lengths: list[list[int]] = [[] for _ in rows]
        requests = [
            Request(i, str(i), prompt_token_ids=tuple(row.prompt_token_ids), params=params(row))
            for i, row in enumerate(rows)
        ]
        for completion in engine.generate(requests):
            lengths[completion.row].append(completion.completion_tokens)
        return lengths

    return generate


def serve_pagedgen() -> None:
    parser = worker_parser(__doc__)
    parser.add_argument(CONTESTANT, action="store_true")
    parser.add_argument("--kv-memory", type=int, required=True)
    parser.add_argument("--quantize", choices=("int8",))
    arguments = parser.parse_args()
    config = EngineConfig(
        model=arguments.model,
        dtype="bfloat16",
        quantize=arguments.quantize,
        kv_memory=arguments.kv_memory,
        max_seqs=MAX_SEQS,
        prefix_cache=arguments.prefix_cache,
    )
    serve(rounds_of(generator(config), arguments.work, arguments.most), "pagedgen")


def kv_bytes(rows: Sequence[Row], folder: Path) -> int:
    """The most that the KV of running completions of `rows` takes in bfloat16, none of them sharing a block."""
    config = model_config(folder)
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    token_bytes = 2 * config["num_hidden_layers"] * heads * head_dim * 2
    lengths = [len(row.prompt_token_ids) + row.max_tokens for row in rows for _ in range(row.n)]
    blocks = sum(math.ceil(length / BLOCK_TOKENS) + 1 for length in sorted(lengths)[-MAX_SEQS:])
    return int(blocks * BLOCK_TOKENS * token_bytes)


def peer_contestants(arguments: argparse.Namespace, folder: str) -> list[Contestant]:
    """All peers that there is an interpreter for."""
    batch = ("--batch", str(arguments.batch or BATCH))
    found = [
        Contestant(TRANSFORMERS, f"{PEER_MODULES}transformers_static", folder, batch),
        Contestant(TRANSFORMERS_CB, f"{PEER_MODULES}transformers_cb", folder, most=arguments.cb_rows),
    ]
    openvino, module = arguments.openvino_python, f"{PEER_MODULES}openvino_cb"
    if openvino and arguments.openvino_model:
        found.append(Contestant(OPENVINO, module, arguments.openvino_model, python=openvino))
    if openvino and arguments.openvino_int8_model:
        group = ("--group-size", str(INT8_GROUP))
        found.append(Contestant(OPENVINO_INT8, module, arguments.openvino_int8_model, group, openvino))
    if arguments.vllm_python:
        compiled = ("--compile",) if arguments.vllm_compile else ()
        model = arguments.vllm_model or folder
        found.append(Contestant(VLLM, f"{PEER_MODULES}vllm_cpu", model, compiled, arguments.vllm_python))
    if arguments.ctranslate2_python:
        module, model = f"{PEER_MODULES}ctranslate2_batch", arguments.ctranslate2_model
        found.append(Contestant(CTRANSLATE2, module, model, batch, arguments.ctranslate2_python))
    return [peer for peer in found if arguments.peers is None or peer.name in arguments.peers]


def run(name: str, workload: Workload, arguments: argparse.Namespace) -> None:
    rounds = arguments.rounds
    folder = model_folder(arguments.model)
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        measured = write_rounds(workload, model_source(folder), work, rounds)
        kv_memory = max(kv_bytes(rows, folder) for rows in measured)
        options, module = (CONTESTANT, "--kv-memory", str(kv_memory)), "benchmarks.throughput"
        ours = [Contestant(OURS, module, str(folder), options)]
        if arguments.quantize:
            quantize = ("--quantize", arguments.quantize)
            ours.append(Contestant(f"{OURS}-{arguments.quantize}", module, str(folder), (*options, *quantize)))
        contestants = {c.label(workload.rows): c for c in (*peer_contestants(arguments, str(folder)), *ours)}
        workers = {label: c.start(work, workload.prefix_cache) for label, c in contestants.items()}
        compare(
            f"throughput-{name}",
            f"{workload.describe()}: output tokens/s",
            workers,
            amount={label: sum(r.output_tokens for r in measured[0][: c.most]) for label, c in contestants.items()},
            rounds=rounds,
            ours=[c.label(workload.rows) for c in ours],
            versions={label: worker.about for label, worker in workers.items()},
        )
    if workload.prefix_cache and workload.repeats(rounds):
        print("there are fewer chats than the rounds ask for: prefix caches found prompts of earlier rounds")


def parse() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=(*WORKLOADS, "beam"), default="fixed")
    parser.add_argument("--model", help="a Hub id, a folder or a .gguf file; left out: the default model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, help="requests of a round")
    parser.add_argument("--prompt", type=int, help="tokens of each prompt, of random ones")
    parser.add_argument("--output", type=int, help="new tokens of each completion")
    parser.add_argument("--batch", type=int, help=f"most sequences of a static batch; left out: {BATCH}")
    parser.add_argument("--cb-rows", type=int, default=CB_ROWS, help=f"rows of {TRANSFORMERS_CB}")
    parser.add_argument("--quantize", choices=("int8",), help="pagedgen runs with it too")
    parser.add_argument("--peers", type=lambda text: text.split(","), help=f"only these of {','.join(PEERS)}")
    parser.add_argument("--openvino-python", help="an interpreter that has openvino-genai")
    parser.add_argument("--openvino-model", help="the folder of the exported model")
    parser.add_argument("--openvino-int8-model", help="the folder of the model exported with weights of eight bits")
    parser.add_argument("--vllm-python", help="an interpreter that has vLLM for CPUs")
    parser.add_argument("--vllm-model", help="a folder that it loads; left out: the one that all load")
    parser.add_argument("--vllm-compile", action="store_true", help="let vLLM compile its graphs at the start")
    parser.add_argument("--ctranslate2-python", help="an interpreter that has CTranslate2")
    parser.add_argument("--ctranslate2-model", help="the folder of the converted model")
    return parser, parser.parse_args()


def check(arguments: argparse.Namespace, error: Callable[[str], object]) -> None:
    """Tell of options that do not fit each other."""
    if unknown := set(arguments.peers or ()) - set(PEERS):
        error(f"--peers: {', '.join(sorted(unknown))} is none of {', '.join(PEERS)}")
    if (arguments.ctranslate2_python is None) != (arguments.ctranslate2_model is None):
        error("--ctranslate2-python and --ctranslate2-model go together")
    if (arguments.openvino_python is None) != (not (arguments.openvino_model or arguments.openvino_int8_model)):
        error("--openvino-python goes with --openvino-model or --openvino-int8-model")
    sizes = {name: getattr(arguments, name) for name in ("rows", "prompt", "output")}
    if any(size is not None and size < 1 for size in (*sizes.values(), arguments.batch, arguments.cb_rows)):
        error("sizes are at least 1")
    others = ("peers", "quantize", "openvino_int8_model", "vllm_python", "ctranslate2_python")
    if arguments.workload == "beam" and any(getattr(arguments, name) for name in (*sizes, *others)):
        error("the work of beam and its contestants are those of benchmarks.beam")
    if arguments.workload in ("gsm8k", "samples") and arguments.prompt:
        error("--prompt is for random prompts")


def main() -> None:
    if CONTESTANT in sys.argv:
        serve_pagedgen()
    parser, arguments = parse()
    check(arguments, parser.error)
    if arguments.workload == "beam":
        openvino = {"openvino_python": arguments.openvino_python, "openvino_model": arguments.openvino_model}
        batch = arguments.batch or PROMPTS
        beam.run("throughput-beam", arguments.model, arguments.rounds, batch=batch, **openvino)
    else:
        given = {name: getattr(arguments, name) for name in ("rows", "prompt", "output")}
        workload = replace(WORKLOADS[arguments.workload], **{k: v for k, v in given.items() if v is not None})
        run(arguments.workload, workload, arguments)


if __name__ == "__main__":
    main()
