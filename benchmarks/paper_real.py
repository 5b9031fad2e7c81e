"""What is really run with the default model: beam searches, and paging beside contiguous reservations."""

from collections.abc import Callable
from typing import cast
from unittest import mock

from benchmarks.common import alternate
from benchmarks.paper_lengths import CHAT, MAX_MODEL_LEN, Lengths
from benchmarks.paper_reserve import RESERVATIONS, PackedSpace, ReservingScheduler
from benchmarks.paper_simulate import Accelerator, Measured
from benchmarks.prompts import gsm8k_chats, mt_bench_chats
from pagedgen import BeamParams, EngineConfig, Request, SamplingParams
from pagedgen.process import prepare_process
from pagedgen.stats.types import StepSample

# Of SmolLM2-135M in bfloat16: keys and values of 3 heads of 64 in 30 layers.
TOKEN_BYTES = 2 * 2 * 30 * 3 * 64
BLOCK_SIZE = 16
BEAM_TOKENS = 1 << 16
# The throughput runs have all lengths, and the pool, divided by it: as many sequences fit as at the published scale.
DIVISOR = 4
THROUGHPUT_ROWS = 80
PAGED = "paged"


class RealRuns:
    """An engine with the scheduler of this benchmark, whose steps go to the `Measured` of the run under way.

    kv_tokens: the slots of the pool.
    """

    def __init__(self, kv_tokens: int, max_model_len: int) -> None:
        prepare_process()  # before torch is loaded
        from pagedgen import Engine

        self._listener: Callable[[StepSample], None] = lambda _: None
        config = EngineConfig(
            dtype="bfloat16",
            kv_memory=kv_tokens // BLOCK_SIZE * BLOCK_SIZE * TOKEN_BYTES,
            block_size=BLOCK_SIZE,
            max_model_len=max_model_len,
            prefix_cache=False,
        )
        with mock.patch("pagedgen.engine.Scheduler", ReservingScheduler):
            self.engine = Engine(config, on_step=lambda sample: self._listener(sample))
        assert self.engine.blocks.num_blocks == kv_tokens // BLOCK_SIZE
        self.scheduler = cast(ReservingScheduler, self.engine.scheduler)
        self._prompts = self._tokenized()

    def run(self, lengths: Lengths, policy: str = PAGED, beam: BeamParams | None = None) -> Measured:
        """Complete real texts of these lengths, past the end token, with `policy`'s reservations."""
        capacity = self.scheduler.capacity
        self.scheduler.use(RESERVATIONS.get(policy), PackedSpace(capacity))
        self._listener = measured = Measured(lengths, self.engine.max_model_len, whole=beam is not None)
        requests = [
            Request(
                row,
                str(row),
                prompt_token_ids=self._prompt(row, prompt),
                params=SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True),
                beam=beam,
            )
            for row, (prompt, output) in enumerate(
                zip(lengths.prompts.tolist(), lengths.outputs[:, 0].tolist(), strict=True)
            )
        ]
        for completion in self.engine.generate(requests):
            assert completion.completion_tokens == lengths.outputs[completion.row, 0], completion.error
        return measured

    def _tokenized(self) -> list[list[int]]:
        chats = mt_bench_chats()[1] + gsm8k_chats()[1][:200]
        texts = [chat[-1]["content"] + "\n\n" for chat in chats]
        return [list(ids) for ids in self.engine.tokenizer.encode_batch(texts, add_special_tokens=False)]

    def _prompt(self, row: int, length: int) -> tuple[int, ...]:
        """The row's text, and as many that follow it as it takes, cut to the length."""
        ids: list[int] = []
        while len(ids) < length:
            ids += self._prompts[row % len(self._prompts)]
            row += 1
        return tuple(ids[:length])


def beam_sharing(cases: dict[str, Lengths], widths: tuple[int, ...]) -> dict[str, dict[int, float]]:
    """Sharing saved by beams of each width, for each case's lengths."""
    runs = RealRuns(BEAM_TOKENS, MAX_MODEL_LEN)
    found: dict[str, dict[int, float]] = {}
    for name, lengths in cases.items():
        found[name] = {}
        for width in widths:
            measured = runs.run(lengths, beam=BeamParams(width))
            found[name][width] = measured.mean("saved")
            print(f"{name}, {width} beams: {found[name][width]:.1%}, {measured.seconds:.0f} s", flush=True)
    return found


def throughput(rounds: int) -> dict[str, dict[str, list[float]]]:
    """Chats with each policy by turns: policy -> output tokens per second, mean running sequences and tokens held of
    the pool, of each round."""
    runs = RealRuns(Accelerator().kv_tokens // DIVISOR, MAX_MODEL_LEN // DIVISOR)
    found: dict[str, dict[str, list[float]]] = {}
    runs.run(CHAT.draw(16).scaled(2 * DIVISOR))  # warm up

    def contestant(policy: str) -> Callable[[int], float]:
        found[policy] = {"tokens_per_second": [], "running": [], "pool": [], "preemptions": []}

        def run(number: int) -> float:
            measured = runs.run(CHAT.draw(THROUGHPUT_ROWS, seed=number).scaled(DIVISOR), policy)
            found[policy]["tokens_per_second"].append(measured.tokens_per_second)
            found[policy]["running"].append(measured.mean("running"))
            found[policy]["pool"].append(measured.mean("pool"))
            found[policy]["preemptions"].append(measured.preemptions)
            return measured.seconds

        return run

    alternate({policy: contestant(policy) for policy in (*RESERVATIONS, PAGED)}, rounds)
    return found
