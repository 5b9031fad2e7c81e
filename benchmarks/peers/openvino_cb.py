"""OpenVINO GenAI's continuous batching, in bfloat16; it runs in an environment of its own.

    pip install torch openvino-genai optimum-intel
    optimum-cli export openvino -m MODEL --task text-generation-with-past --weight-format fp16 FOLDER

MODEL is a folder of `transformers`, like the one that pagedgen converts a GGUF file to. With `--weight-format int8` the
weights have eight bits, and with `--group-size` the activations are quantized too, by groups of so many.
"""

from collections.abc import Sequence
from typing import Any

from benchmarks.peers.work import Generate, Row, rounds_of, worker_parser
from benchmarks.serving import serve

KV_GIB = 6


def generator(folder: str, prefix_cache: bool, group_size: int | None) -> Generate:
    import numpy as np
    import openvino
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_seqs, scheduler.max_num_batched_tokens = KV_GIB, 256, 2048
    scheduler.dynamic_split_fuse, scheduler.enable_prefix_caching = True, prefix_cache
    properties = {"INFERENCE_PRECISION_HINT": "bf16"}
    if group_size is not None:
        properties["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = str(group_size)
    pipeline = genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", properties)

    def config_for(row: Row) -> Any:
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = row.max_tokens, True, row.temperature > 0
        if config.do_sample:
            config.temperature, config.top_p, config.num_return_sequences = row.temperature, row.top_p, row.n
        return config

    def generate(rows: list[Row]) -> Sequence[Sequence[int]]:
        prompts = [openvino.Tensor(np.array([row.prompt_token_ids], dtype=np.int64)) for row in rows]
        results = pipeline.generate(prompts, [config_for(row) for row in rows])
        return [[len(ids) for ids in result.m_generation_ids] for result in results]

    return generate


def main() -> None:
    parser = worker_parser(__doc__)
    parser.add_argument("--group-size", type=int, help="quantize activations too, by groups of so many")
    arguments = parser.parse_args()
    generate = generator(arguments.model, arguments.prefix_cache, arguments.group_size)
    import openvino_genai

    serve(rounds_of(generate, arguments.work, arguments.most), f"openvino-genai {openvino_genai.__version__}")


if __name__ == "__main__":
    main()
