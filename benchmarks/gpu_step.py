"""A decoding step of 256 sequences at a context of 1024 tokens: a model of Llama-3.2-1B's shape in bfloat16.

How long a step takes beside the least it could, which is one read of the weights and of the keys and values; what the
host does in it; what the device does, kernel by kernel, and how long it waits between them. With and without CUDA
graphs, and with and without planning a step while the last one runs.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.gpu_model import byte_tokenizer, engine_of, freeing, graphs_of, llama_config, random_model
from benchmarks.gpu_parts import Case, Figures, Setting, described
from benchmarks.gpu_trace import Trace, by_name, gaps, warm_up
from pagedgen import Engine, EngineConfig, Request, SamplingParams
from pagedgen.models.llama import LlamaModel
from pagedgen.stats.types import StepSample


class Steps(NamedTuple):
    """Steps in which all sequences decode: before anything counts, timed, and in the trace; the first of these are left
    out of it, as the profiler starts in them; and after it."""

    warm: int = 16
    timed: int = 48
    traced: int = 24
    unsettled: int = 4
    after: int = 4

    @property
    def before_trace(self) -> int:
        return self.warm + self.timed

    @property
    def settled(self) -> int:
        return self.traced - self.unsettled


class Size(NamedTuple):
    sequences: int
    context: int
    batch_tokens: int


FULL, TINY = Size(256, 1024, 16384), Size(4, 32, 64)
TINY_STEPS = Steps(2, 4, 6, 2, 2)
TARGET_RATIO, TARGET_GAP_US = 1.6, 50.0

CONFIGS: dict[str, dict[str, Any]] = {
    "graphs, overlap": {},
    "graphs, overlap, max_model_len 2048": {"max_model_len": 2048},
    "graphs, no overlap": {"overlap": False},
    "no graphs, overlap": {"cuda_graphs": False},
    "no graphs, no overlap": {"cuda_graphs": False, "overlap": False},
}


class Bench:
    """What the cases share. The model is made when it is first needed."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.device = setting, torch.device(setting.device)
        self.sequences, self.context, self.batch_tokens = TINY if setting.tiny else FULL
        self.steps = TINY_STEPS if setting.tiny else Steps()
        self.dtype = torch.float32 if setting.tiny else torch.bfloat16

    @cached_property
    def config(self) -> Any:
        return llama_config(self.setting)

    @cached_property
    def model(self) -> LlamaModel:
        with suppress(Exception):  # without a profiler there are still the times
            warm_up(self.device)
        return random_model(self.config, self.dtype, self.device)

    @property
    def prompt(self) -> int:
        """Tokens of each prompt: in the middle of the timed steps the context is as long as it is to be."""
        return self.context - self.steps.warm - self.steps.timed // 2

    @property
    def output(self) -> int:
        """Tokens of each completion. Some sequences decode while others' prompts are computed: one token more for each
        step of prompts."""
        wanted = self.steps.before_trace + self.steps.traced + self.steps.after
        return wanted + 2 + -(-self.sequences * self.prompt // (self.batch_tokens - self.sequences))

    def engine(self, settings: dict[str, Any], **hooks: Callable[[Any], None]) -> Engine:
        """hooks: further arguments of Engine."""
        layers = self.model.spec.layers
        token_bytes = sum(x.num_kv_heads * (x.key_dim + x.value_dim) for x in layers) * self.dtype.itemsize
        longest = self.prompt + self.output
        config = EngineConfig(
            device=self.setting.device,  # type: ignore[arg-type]
            dtype="float32" if self.setting.tiny else "bfloat16",
            kv_memory=self.sequences * (-(-longest // 16) + 1) * 16 * token_bytes,
            max_batch_tokens=self.batch_tokens,
            max_seqs=self.sequences,
            prefix_cache=False,
            **settings,
        )
        tokenizer = byte_tokenizer(Path(self.setting.folder) / "byte-tokenizer")
        return engine_of(self.model, self.config, tokenizer, config, **hooks)

    def requests(self) -> list[Request]:
        ids = np.random.default_rng(0).integers(0, self.config.vocab_size, (self.sequences, self.prompt)).tolist()
        params = SamplingParams(max_tokens=self.output, temperature=0.0, ignore_eos=True)
        return [Request(i, str(i), prompt_token_ids=tuple(row), params=params) for i, row in enumerate(ids)]


def cases(setting: Setting) -> list[Case]:
    bench = Bench(setting)
    runs = {name: partial(measure, bench, settings) for name, settings in CONFIGS.items()}
    return [Case(name, partial(freeing, bench.device, run)) for name, run in runs.items()]


class Watch:
    """Takes the steps in which all sequences decode, and has a trace of the later ones made."""

    def __init__(self, bench: Bench) -> None:
        self._device, self._steps, self._sequences = bench.device, bench.steps, bench.sequences
        self.samples: list[StepSample] = []
        self.launches: list[float] = []
        self._launched = 0.0
        self._trace: Trace | None = None  # while it is being made
        self.traced: Figures = {}

    def time_launches(self, engine: Engine) -> None:
        """Measure how long the host takes to launch a step."""
        runner: Any = engine.runner
        launch = runner.launch

        def timed(*arguments: Any) -> Any:
            started = time.perf_counter()
            result = launch(*arguments)
            self._launched = time.perf_counter() - started
            return result

        runner.launch = timed

    def on_step(self, sample: StepSample) -> None:
        if not sample.computed_tokens == sample.running == self._sequences:
            return
        self.samples.append(sample)
        self.launches.append(self._launched)
        with self._noting():
            if len(self.samples) == self._steps.before_trace:
                self._trace = Trace(self._device)
                self._trace.start()
            elif len(self.samples) == self._steps.before_trace + self._steps.traced:
                self._take_trace()

    def end(self) -> None:
        """To be called after the last step: a trace that is still being made ends with an error."""
        if self._trace is not None:
            with self._noting():
                self._take_trace()
            self.traced["trace_error"] = "the sequences ended before the trace did"

    def _take_trace(self) -> None:
        trace, self._trace = self._trace, None
        if trace is None:  # it could not be started
            return
        spans = trace.stop()
        begin, end = (spans[0].start, spans[-1].end) if spans else (0.0, 0.0)
        unsettled = (end - begin) * self._steps.unsettled / self._steps.traced
        settled, steps = [span for span in spans if span.start >= begin + unsettled], self._steps.settled
        of_names = by_name(settled, steps)
        self.traced = {**gaps(settled, steps), "kernels_a_step": len(settled) / steps, "by_name": of_names}

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Without a trace there are still the times."""
        try:
            yield
        except Exception as error:
            self.traced = {"trace_error": described(error)["error"]}


def measure(bench: Bench, settings: dict[str, Any]) -> Figures:
    """step_ms: the median of a step, all sequences decoding. floor_ms: one read of the weights and of the keys and
    values at the rate at which the device reads. host_ms: planning, launching and entering a step."""
    watch = Watch(bench)
    started = time.perf_counter()
    notes: list[str] = []
    engine = bench.engine(settings, on_step=watch.on_step, on_note=notes.append)
    watch.time_launches(engine)
    ready = time.perf_counter()
    completed = sum(completion.completion_tokens for completion in engine.generate(bench.requests()))
    watch.end()
    return {
        "attention": engine.attention_name,
        "start_s": ready - started,
        "run_s": time.perf_counter() - ready,
        "completed_tokens": completed,
        "notes": notes,
        **graphs_of(engine),
        **times(bench, engine, watch),
        **watch.traced,
    }


def times(bench: Bench, engine: Engine, watch: Watch) -> Figures:
    timed = slice(bench.steps.warm, bench.steps.before_trace)
    samples, launches = watch.samples[timed], watch.launches[timed]
    if not samples:
        return {"error": "all sequences never decoded in one step"}
    lasted = [1e3 * (sample.end - sample.start) for sample in samples]
    held = statistics.median(sample.held_tokens for sample in samples)
    spec = engine.spec
    token_bytes = engine.kv_bytes // (engine.blocks.num_blocks * engine.blocks.block_size)
    read = spec.weight_bytes + held * token_bytes
    rate = bench.setting.rates.get("read")
    floor = 1e3 * read / rate if rate else None
    step = statistics.median(lasted)
    host = {
        "schedule_ms": 1e3 * statistics.median(sample.schedule_s for sample in samples),
        "launch_ms": 1e3 * statistics.median(launches),
        "update_ms": 1e3 * statistics.median(sample.update_s for sample in samples),
    }
    return {
        "step_ms": step,
        "p99_step_ms": float(np.percentile(lasted, 99)),
        "floor_ms": floor,
        "ratio": step / floor if floor else None,
        "host_ms": sum(host.values()),
        **host,
        "steps": len(samples),
        "sequences": bench.sequences,
        "context": held / bench.sequences,
        "weight_bytes": spec.weight_bytes,
        "kv_bytes": held * token_bytes,
    }


def summary(found: Sequence[Figures]) -> Figures:
    """met: whether the default configuration reaches what is aimed at."""
    first = next((figures for figures in found if figures["case"] == "graphs, overlap"), {})
    ratio, gap = first.get("ratio"), first.get("largest_gap_us")
    return {
        "target_ratio": TARGET_RATIO,
        "ratio": ratio,
        "met": ratio <= TARGET_RATIO if ratio is not None else None,
        "target_gap_us": TARGET_GAP_US,
        "largest_gap_us": gap,
        "gap_met": gap <= TARGET_GAP_US if gap is not None else None,
        "step_ms": {figures["case"]: figures.get("step_ms") for figures in found},
        "notes": sorted({note for figures in found for note in figures.get("notes", ())}),
    }


def table(found: Sequence[Figures]) -> tuple[Sequence[str], list[Sequence[object]]]:
    """And below, what the step of the first case is made of."""
    names = ("step_ms", "floor_ms", "ratio", "host_ms", "largest_gap_us", "p99_gap_us", "long_gaps", "busy")
    rows: list[Sequence[object]] = [
        (figures["case"], *(figures.get(name, "") for name in names)) for figures in found if "step_ms" in figures
    ]
    for kernel in next((figures["by_name"] for figures in found if "by_name" in figures), []):
        rows.append((f"  {kernel['us']:.0f} us, {kernel['times']:g} x {kernel['name'][:48]}", *[""] * len(names)))
    return ("decoding", *names), rows
