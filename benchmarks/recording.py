"""What recording costs: the share of a run's time that goes into observing its steps, summing them up and writing the
file, measured inside one run of the default model. Two runs side by side could not show so small a difference.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common import print_table, write_results
from benchmarks.prompts import gsm8k_chats
from pagedgen import BeamParams, EngineConfig, Request, SamplingParams
from pagedgen.process import prepare_process
from pagedgen.run_log import RunLog
from pagedgen.stats.collector import RunStats
from pagedgen.stats.types import StepSample

OUTPUT_TOKENS = 64
WORK: dict[str, dict[str, Any]] = {
    "256 rows": {"rows": 256},
    "64 rows, 4 samples": {"rows": 64, "n": 4},
    "32 rows, 8 beams": {"rows": 32, "beam": BeamParams(8)},
}


class Stopwatch:
    """Adds up the seconds that wrapped calls take."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def wrap(self, owner: object, name: str) -> None:
        call: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **options: Any) -> Any:
            started = time.perf_counter()
            try:
                return call(*args, **options)
            finally:
                self.seconds += time.perf_counter() - started

        setattr(owner, name, timed)


def measure(
    model: str | None, rows: int, n: int = 1, beam: BeamParams | None = None
) -> tuple[int, float, float, float]:
    """(steps, seconds of the run, seconds spent on watching and summing up, seconds spent on writing)."""
    from pagedgen import Engine

    with tempfile.TemporaryDirectory() as folder:
        stats = RunStats()
        log = RunLog(stats, Path(folder), "now", print)
        summing, writing = Stopwatch(), Stopwatch()
        summing.wrap(log, "add_step")
        writing.wrap(log, "save_if_due")

        def on_step(sample: StepSample) -> None:
            log.add_step(sample)
            log.save_if_due()

        engine = Engine(EngineConfig(model=model), on_step=on_step)
        for name in ("holding", "after"):
            summing.wrap(engine._pipeline._observer, name)
        log.begin(engine.info, goes_on=False)
        params = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.8, ignore_eos=True, n=n)
        texts = [engine.tokenizer.render_chat(chat, False) for chat in gsm8k_chats()[1][:rows]]
        requests = [Request(i, str(i), prompt=text, params=params, beam=beam) for i, text in enumerate(texts)]
        started = time.perf_counter()
        for _ in engine.generate(requests):
            pass
        seconds = time.perf_counter() - started
        return stats.snapshot().steps, seconds, summing.seconds, writing.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a Hub id, a folder or a .gguf file; the default model when left out")
    model = parser.parse_args().model
    prepare_process()
    table, results = [], {}
    for name, work in WORK.items():
        steps, seconds, summing, writing = measure(model, **work)
        table.append((name, steps, seconds, 1e6 * summing / steps, f"{(summing + writing) / seconds:.2%}"))
        results[name] = {"steps": steps, "seconds": seconds, "summing_s": summing, "writing_s": writing}
    headers = ("work", "steps", "seconds", "us a step, without writing", "of the run, with writing")
    print_table(f"recording, {OUTPUT_TOKENS} new tokens a row", headers, table)
    write_results("recording", {"work": results})


if __name__ == "__main__":
    main()
