"""Where the time of a decoding step goes, beside what the same matrix products and the same reads of memory take alone.

A batch of sequences decodes in the engine; the calls of its model's layers, of the kernels and of the sampler are timed
one by one. In the same process: the matrix products of a step, each by itself and by the faster of our kernel and
oneDNN (ours with the gate of the MLP, which is part of that product), and a plain read of as many bytes in a row as the
step reads of keys and values. Their sum is the roofline.
"""

import argparse
import ctypes
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.common import print_table, write_results
from pagedgen.process import prepare_process

if TYPE_CHECKING:
    import torch
    from pagedgen_kernels.cpu.decoder import Decoder

    from pagedgen import Engine

KERNELS = (
    "rms_norm",
    "add_rms_norm",
    "rotary_write_kv",
    "write_kv",
    "paged_attention",
    "greedy_argmax",
)
REPEATS = 20
LINEARS = ("qkv", "output", "gate_up", "down")


class Timers:
    """Seconds by name, since the last `take`."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._parts: tuple[str, ...] = ()
        self._of_decoder: Any = []

    def wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            started = time.perf_counter()
            result = call(*arguments, **options)
            self._seconds[name] += time.perf_counter() - started
            return result

        return timed

    def watch(self, decoder: "Decoder") -> None:
        """The parts of a decoder that times itself."""
        self._of_decoder = decoder.seconds = (ctypes.c_double * len(decoder.parts))()
        self._parts = decoder.parts

    def take(self) -> dict[str, float]:
        taken = dict(self._seconds) | dict(zip(self._parts, self._of_decoder, strict=True))
        self._seconds.clear()
        self._of_decoder[:] = [0.0] * len(self._parts)
        return taken


def instrument(engine: "Engine") -> Timers:
    """Time the calls of a native model's layers and of the kernels."""
    from dataclasses import fields, replace

    timers, runner = Timers(), engine.runner
    model: Any = engine.model
    attention = runner.attention
    decoder = model.whole_decoder(runner.kv_cache, attention)
    if decoder is not None:
        timers.watch(decoder)
    wrapped = SimpleNamespace(**{name: getattr(attention.kernels, name) for name in dir(attention.kernels)})
    for name in KERNELS:
        setattr(wrapped, name, timers.wrap(name, getattr(attention.kernels, name)))
    kernels: ModuleType = wrapped  # type: ignore[assignment]
    runner.sampler.kernels = kernels
    model._head = timers.wrap("head", model._head)
    if model.likeliest is not None:
        model.likeliest = timers.wrap("head", model.likeliest)
    if decoder is None:
        runner.attention = replace(attention, kernels=kernels)
        model._layers = tuple(
            replace(
                layer,
                **{f.name: timers.wrap(f.name, getattr(layer, f.name)) for f in fields(layer) if f.name in LINEARS},
            )
            for layer in model._layers
        )
    return timers


def measure(engine: "Engine", sequences: int, prompt: int, output: int) -> tuple[dict[str, float], float, float]:
    """(milliseconds of each part, of the whole step, KV tokens read): medians over the middle steps, all sequences
    decoding."""
    from pagedgen import Request, SamplingParams

    steps: list[tuple[Any, dict[str, float]]] = []
    timers = instrument(engine)
    for pool in engine.runner.kv_cache.pools.values():
        pool.zero_()  # in a long run all blocks were used before: taking memory from the system is not measured
    engine._pipeline.on_step = lambda sample: steps.append((sample, timers.take()))
    ids = np.random.default_rng(0).integers(0, engine.spec.vocab_size, (sequences, prompt)).tolist()
    params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
    requests = [Request(i, str(i), prompt_token_ids=tuple(row), params=params) for i, row in enumerate(ids)]
    for _ in engine.generate(requests):
        pass
    decoding = [(s, parts) for s, parts in steps if s.computed_tokens == s.running == sequences]
    middle = decoding[len(decoding) // 4 : -max(1, len(decoding) // 4)]
    names = sorted({name for _, parts in middle for name in parts})
    parts = {name: 1e3 * statistics.median(p.get(name, 0.0) for _, p in middle) for name in names}
    parts |= {
        name: 1e3 * statistics.median(getattr(s, f"{name}_s") for s, _ in middle)
        for name in ("schedule", "build", "update")
    }
    whole = 1e3 * statistics.median(s.end - s.start for s, _ in middle)
    return parts, whole, statistics.median(s.held_tokens for s, _ in middle)


def alone(engine: "Engine", sequences: int, kv_bytes: float) -> dict[str, float]:
    """Milliseconds of the step's matrix products, each alone and by the faster of our kernel and oneDNN, and of reading
    `kv_bytes`: the fastest of some repetitions."""
    import torch

    model: Any = engine.model
    layer = model._layers[0]
    vocab_size, hidden = model._embedding.shape
    heads = model._num_heads * model._head_dim
    found: dict[str, float] = {}
    with torch.inference_mode():
        narrow = torch.randn(sequences, hidden, dtype=engine.spec.dtype)
        inner = layer.gate_up(narrow).shape[1]
        shapes = {
            "qkv": (layer.qkv(narrow).shape[1], hidden),
            "output": (hidden, heads),
            "gate_up": (2 * inner, hidden),
            "down": (hidden, inner),
        }
        for name, (outputs, inputs) in shapes.items():
            ours = [getattr(layer, name) for layer in model._layers]
            found[name] = fastest_product(sequences, outputs, inputs, ours, engine.spec.dtype)
        heads_of = [head for head in (model._head, model.likeliest) if head is not None]
        found["head"] = min(fastest_product(sequences, vocab_size, hidden, [h], engine.spec.dtype) for h in heads_of)
        memory = torch.ones(int(kv_bytes) // 8, dtype=torch.int64)
        found["reading KV"] = fastest(memory.sum)
    return found


def fastest_product(
    rows: int, outputs: int, inputs: int, ours: Sequence[Callable[["torch.Tensor"], object]], dtype: "torch.dtype"
) -> float:
    """Milliseconds for all of the layers, each with a weight of its own, which is read anew as in a step.

    ours: those of the model itself, because how fast a weight is read depends on where it lies.
    """
    import torch

    x = torch.randn(rows, inputs, dtype=dtype)
    weights = (torch.randn(outputs, inputs, dtype=dtype) for _ in ours)
    others = [torch.ops.mkldnn._reorder_linear_weight(weight, None) for weight in weights]
    multiply = torch.ops.mkldnn._linear_pointwise

    def by_ours() -> None:
        for linear in ours:
            linear(x)

    def by_onednn() -> None:
        for weight in others:
            multiply(x, weight, None, "none", [], "")

    return min(fastest(by_ours), fastest(by_onednn))


def fastest(call: Callable[[], object]) -> float:
    """Milliseconds."""
    times = []
    for _ in range(REPEATS + 3):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return 1e3 * min(times[3:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a Hub id, a folder or a .gguf file of the Llama family; else the default")
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    arguments = parser.parse_args()
    prepare_process()
    from pagedgen import Engine, EngineConfig

    engine = Engine(
        EngineConfig(model=arguments.model, dtype=arguments.dtype, kv_memory=2 << 30, max_seqs=arguments.sequences)
    )
    limits = alone(engine, arguments.sequences, 0)
    parts, whole, held = measure(engine, arguments.sequences, arguments.prompt, arguments.output)
    kv_bytes = held * engine.kv_bytes / engine.blocks.num_blocks / engine.blocks.block_size
    limits |= {"reading KV": alone(engine, arguments.sequences, kv_bytes)["reading KV"]}
    parts["other"] = whole - sum(parts.values())
    rows = [
        (name, ms, f"{ms / whole:.1%}", limits.get("reading KV" if name == "paged_attention" else name, "-"))
        for name, ms in sorted(parts.items(), key=lambda part: -part[1])
    ]
    least = sum(limits.values())
    rows.append(("whole step", whole, "100%", least))
    title = f"{arguments.sequences} sequences decode, {held / arguments.sequences:.0f} tokens each, {arguments.dtype}"
    print_table(title, ("part", "ms", "share", "alone, ms"), rows)
    print(f"{least / whole:.0%} of the roofline; {1e3 * arguments.sequences / whole:.0f} tokens/s in such steps")
    write_results("step", {"parts_ms": parts, "alone_ms": limits, "whole_ms": whole, "held_tokens": held})


if __name__ == "__main__":
    main()
