"""Prompts per second in beam search beside transformers' `generate(num_beams=8)`, on the same weights and prompts, and
beside OpenVINO GenAI where an interpreter is given that has it (see `benchmarks.openvino_beam`).

The work of a round: 16 questions as chats, 8 beams, 64 new tokens past the end token, bfloat16, the best hypothesis of
each. transformers gets them in one batch with padding on the left, as its user would script it, and scripts have no
prefix cache: pagedgen's is off. Each runs in a process of its own, and prints the mean score of what it found: both
search by the same rules, so the means differ by rounding alone.
"""

import argparse
import time
from collections.abc import Callable

from benchmarks.common import Worker, compare
from benchmarks.openvino_beam import OUTPUT_TOKENS, PROMPTS, WIDTH, print_mean_score
from benchmarks.peers.transformers_static import load_model
from benchmarks.prompts import Chat, gsm8k_chats, of_round
from benchmarks.serving import serve
from benchmarks.workloads import model_folder
from pagedgen import BeamParams, EngineConfig, Request, SamplingParams
from pagedgen.process import prepare_process

KV_BYTES = 1 << 30
OURS, PEER, OPENVINO = "pagedgen", "transformers", "openvino-genai"


def pagedgen_contestant(model: str | None, batch: int) -> Callable[[int], float]:
    prepare_process()  # before torch is loaded
    from pagedgen import Engine

    engine = Engine(EngineConfig(model=model, dtype="bfloat16", kv_memory=KV_BYTES, prefix_cache=False))
    params = SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    _, chats = gsm8k_chats()

    def contestant(number: int) -> float:
        started = time.perf_counter()
        texts = [engine.tokenizer.render_chat(chat, False) for chat in of_round(chats, PROMPTS, number)]
        requests = [
            Request(i, str(i), prompt=text, params=params, beam=BeamParams(WIDTH)) for i, text in enumerate(texts)
        ]
        found = list(engine.generate(requests))
        seconds = time.perf_counter() - started
        assert [c.completion_tokens for c in found] == [OUTPUT_TOKENS] * PROMPTS
        print_mean_score(OURS, [c.score for c in found if c.score is not None])
        return seconds

    return contestant


def transformers_contestant(model_name: str | None, batch: int) -> Callable[[int], float]:
    import torch
    import transformers

    folder = model_folder(model_name)
    model = load_model(str(folder))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    _, chats = gsm8k_chats()

    def search(some: list[Chat]) -> list[float]:
        inputs = tokenizer.apply_chat_template(
            some, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        ).to(model.device)
        with torch.inference_mode():
            output = model.generate(
                **inputs,
                num_beams=WIDTH,
                max_new_tokens=OUTPUT_TOKENS,
                do_sample=False,
                pad_token_id=tokenizer.pad_token_id,
                return_dict_in_generate=True,
                output_scores=True,
            )
        new_ids = output.sequences[:, inputs["input_ids"].shape[1] :]
        assert new_ids.shape == (len(some), OUTPUT_TOKENS)
        tokenizer.batch_decode(new_ids, skip_special_tokens=True)
        scores: list[float] = output.sequences_scores.tolist()
        return scores

    def contestant(number: int) -> float:
        started = time.perf_counter()
        of_this_round = of_round(chats, PROMPTS, number)
        scores = [score for i in range(0, PROMPTS, batch) for score in search(of_this_round[i : i + batch])]
        seconds = time.perf_counter() - started
        print_mean_score(PEER, scores)
        return seconds

    return contestant


CONTESTANTS = {PEER: transformers_contestant, OURS: pagedgen_contestant}


def run(
    result: str,
    model: str | None,
    rounds: int,
    *,
    batch: int = PROMPTS,
    openvino_python: str | None = None,
    openvino_model: str | None = None,
) -> None:
    """Compare the contestants. result: the name of the result file. batch: prompts that transformers gets at a time."""
    options = ["--batch", str(batch), *([] if model is None else ["--model", model])]
    contestants = {PEER: Worker("benchmarks.beam", "--contestant", PEER, *options)}
    if openvino_python is not None and openvino_model is not None:
        contestants[OPENVINO] = Worker("benchmarks.openvino_beam", openvino_model, python=openvino_python)
    contestants[OURS] = Worker("benchmarks.beam", "--contestant", OURS, *options)
    source, _ = gsm8k_chats()
    title = f"{PROMPTS} of {source}, {WIDTH} beams, {OUTPUT_TOKENS} tokens, bfloat16: prompts/s"
    compare(result, title, contestants, amount=PROMPTS, rounds=rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a Hub id, a folder or a .gguf file; left out: the default model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=PROMPTS, help="prompts that transformers gets at a time")
    parser.add_argument("--openvino-python", help="an interpreter that has openvino-genai")
    parser.add_argument("--openvino-model", help="the folder of the exported model")
    parser.add_argument("--contestant", choices=CONTESTANTS, help=argparse.SUPPRESS)  # what a worker is started with
    arguments = parser.parse_args()
    if (arguments.openvino_python is None) != (arguments.openvino_model is None):
        parser.error("--openvino-python and --openvino-model go together")
    if arguments.contestant:
        serve(CONTESTANTS[arguments.contestant](arguments.model, arguments.batch))
    run(
        "beam",
        arguments.model,
        arguments.rounds,
        batch=arguments.batch,
        openvino_python=arguments.openvino_python,
        openvino_model=arguments.openvino_model,
    )


if __name__ == "__main__":
    main()
