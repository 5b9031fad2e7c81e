"""OpenVINO GenAI in beam search, as a contestant of `benchmarks.beam`; it runs in an environment of its own.

    pip install torch openvino-genai optimum-intel
    optimum-cli export openvino -m MODEL --task text-generation-with-past --weight-format fp16 FOLDER

MODEL is a folder of `transformers`, like the one that pagedgen converts a GGUF file to. Nothing of pagedgen's code is
imported.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

from benchmarks.prompts import gsm8k_chats, of_round
from benchmarks.serving import serve

PROMPTS, WIDTH, OUTPUT_TOKENS = 16, 8, 64
KV_GIB = 6


def contestant_for(folder: str) -> Callable[[int], float]:
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_seqs, scheduler.max_num_batched_tokens = KV_GIB, 256, 2048
    scheduler.dynamic_split_fuse, scheduler.enable_prefix_caching = True, False
    pipeline = genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", {"INFERENCE_PRECISION_HINT": "bf16"})
    config = genai.GenerationConfig()
    config.num_beams, config.num_return_sequences, config.stop_criteria = WIDTH, 1, genai.StopCriteria.HEURISTIC
    config.max_new_tokens = config.min_new_tokens = OUTPUT_TOKENS
    config.ignore_eos, config.do_sample = True, False
    tokenizer = pipeline.get_tokenizer()
    _, chats = gsm8k_chats()

    def contestant(number: int) -> float:
        started = time.perf_counter()
        texts = [tokenizer.apply_chat_template(chat, True) for chat in of_round(chats, PROMPTS, number)]
        prompts = [tokenizer.encode(text, add_special_tokens=False).input_ids for text in texts]
        results = pipeline.generate(prompts, [config] * PROMPTS)
        for result in results:
            tokenizer.decode(result.m_generation_ids[0])
        seconds = time.perf_counter() - started
        print_mean_score("openvino-genai", [result.m_scores[0] for result in results])
        return seconds

    return contestant


def print_mean_score(name: str, scores: Sequence[float]) -> None:
    assert len(scores) == PROMPTS
    print(f"{name}: mean score {statistics.mean(scores):.4f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="the exported model")
    serve(contestant_for(parser.parse_args().folder))
