"""What it is worth that the samples or beams of a prompt share its blocks: tokens per second, and memory.

Speed: 8 samples of each prompt (`n=8`) beside each prompt submitted 8 times, with the prefix cache off for both, so
that sharing within a request is all that differs. Each runs in a process of its own.

Memory: *sharing saved*, the mean over time, and the pool's peak beside the peak of what the same sequences would have
taken without sharing. The prefix cache is off here too: with it, the chats' common system message would count as well.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from benchmarks.common import Worker, compare, print_table, serve
from benchmarks.prompts import Chat, gsm8k_chats, mt_bench_chats, of_round
from pagedgen import BeamParams, EngineConfig, Request, SamplingParams
from pagedgen.process import prepare_process
from pagedgen.stats.collector import RunStats
from pagedgen.stats.types import StepSample
from pagedgen.units import format_bytes

if TYPE_CHECKING:
    from pagedgen import Engine

PROMPTS, SAMPLES, WIDTH, OUTPUT_TOKENS = 32, 8, 8, 64
KV_BYTES = 2 << 30
SHARED, SEPARATE = f"n={SAMPLES}", f"{SAMPLES} requests"
# Kwon et al., 2023, section 6.3: for short instructions (Alpaca), and for chats (ShareGPT).
PUBLISHED = {"samples": ("6.1-9.8%", "16.2-30.5%"), "beams": ("37.6-55.2%", "44.3-66.3%")}


def make_engine(model: str | None, on_step: Callable[[StepSample], None] | None = None) -> "Engine":
    prepare_process()  # before torch is loaded
    from pagedgen import Engine

    config = EngineConfig(model=model, dtype="bfloat16", kv_memory=KV_BYTES, prefix_cache=False)
    return Engine(config, on_step=on_step)


def generate(engine: "Engine", chats: list[Chat], n: int = 1, beam: BeamParams | None = None) -> int:
    """Complete the chats past the end token; how many tokens that gave."""
    params = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.8, ignore_eos=True, n=n)
    texts = [engine.tokenizer.render_chat(chat, False) for chat in chats]
    requests = [Request(i, str(i), prompt=text, params=params, beam=beam) for i, text in enumerate(texts)]
    return sum(completion.completion_tokens for completion in engine.generate(requests))


def contestant_for(name: str, model: str | None) -> Callable[[int], float]:
    engine = make_engine(model)
    _, all_chats = mt_bench_chats()

    def contestant(number: int) -> float:
        chats = of_round(all_chats, PROMPTS, number)
        started = time.perf_counter()
        if name == SHARED:
            tokens = generate(engine, chats, n=SAMPLES)
        else:
            tokens = generate(engine, [chat for chat in chats for _ in range(SAMPLES)])
        seconds = time.perf_counter() - started
        assert tokens == PROMPTS * SAMPLES * OUTPUT_TOKENS
        return seconds

    return contestant


@dataclass(frozen=True)
class Memory:
    """What a run held. saved: the fraction of blocks that sharing avoids, its mean over time. peak: the most bytes of
    the pool in use. peak_alone: the most that its sequences would have used without sharing."""

    saved: float
    peak: int
    peak_alone: int


def measure_memory(model: str | None, chats: list[Chat], n: int = 1, beam: BeamParams | None = None) -> Memory:
    stats, most_logical = RunStats(), 0

    def on_step(sample: StepSample) -> None:
        nonlocal most_logical
        stats.add_step(sample)
        most_logical = max(most_logical, sample.logical_blocks)

    engine = make_engine(model, on_step)
    generate(engine, chats, n, beam)
    found, block_bytes = stats.snapshot(), engine.info.kv_bytes // engine.info.kv_blocks
    assert found.mean_sharing_saved is not None
    return Memory(found.mean_sharing_saved, found.peak_used_blocks * block_bytes, most_logical * block_bytes)


def report_memory(model: str | None) -> dict[str, dict[str, float]]:
    """Measure samples and beams, and print them beside the published figures."""
    (bench, turns), (maths, questions) = mt_bench_chats(), gsm8k_chats()
    samples = measure_memory(model, turns, n=SAMPLES)
    beams = measure_memory(model, of_round(questions, PROMPTS, 0), beam=BeamParams(WIDTH))
    measured = {
        "samples": (f"{bench}, {SAMPLES} samples", samples),
        "beams": (f"{maths}, {WIDTH} beams", beams),
    }
    rows = [
        (work, f"{memory.saved:.1%}", *PUBLISHED[kind], format_bytes(memory.peak), format_bytes(memory.peak_alone))
        for kind, (work, memory) in measured.items()
    ]
    headers = ("work", "sharing saved", "published, Alpaca", "ShareGPT", "KV peak", "without sharing")
    print_table("memory, means over time", headers, rows)
    return {kind: asdict(memory) for kind, (_, memory) in measured.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a Hub id, a folder or a .gguf file; left out: the default model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--contestant", choices=(SHARED, SEPARATE), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.contestant:
        serve(contestant_for(arguments.contestant, arguments.model))
    memory = report_memory(arguments.model)
    options = [] if arguments.model is None else ["--model", arguments.model]
    contestants = {name: Worker("benchmarks.sharing", "--contestant", name, *options) for name in (SEPARATE, SHARED)}
    work = f"{PROMPTS} of {mt_bench_chats()[0]}, {SAMPLES} samples of {OUTPUT_TOKENS} tokens"
    compare(
        "sharing",
        f"{work}, bfloat16: output tokens/s",
        contestants,
        amount=PROMPTS * SAMPLES * OUTPUT_TOKENS,
        rounds=arguments.rounds,
        label="each prompt as",
        memory=memory,
    )


if __name__ == "__main__":
    main()
