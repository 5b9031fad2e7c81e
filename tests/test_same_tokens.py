"""The real model in float32, greedy: token for token what transformers generates for each prompt alone."""

import pytest
from oracle import TransformersOracle

from pagedgen import Engine, EngineConfig, Request, SamplingParams

AMPLE = 1 << 30
# SmolLM2 in float32 takes 45 KiB of KV a token: 400 tokens, enough for two or three of the sequences at a time.
TIGHT = 400 * 46080

SHORT_PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time there was a fox who",
    "Once upon a time there was a fox and",
    "1, 2, 3, 4,",
    "Ein Haus am See ist",
]


def run(prompts, max_tokens, **config):
    """(the new ids of each prompt, its cached tokens, preemptions)"""
    engine = Engine(EngineConfig(dtype="float32", **config))
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    requests = [Request(i, str(i), prompt_token_ids=tuple(p), params=params) for i, p in enumerate(prompts)]
    found = {c.row: c for c in engine.generate(requests)}
    engine.scheduler.check()
    assert engine.blocks.num_used == 0
    assert engine.spec.path == "native"
    ids = [list(found[i].token_ids) for i in range(len(prompts))]
    return ids, [found[i].cached_tokens for i in range(len(prompts))], engine.scheduler.counts.preemptions


@pytest.fixture(scope="module")
def oracle(smollm2_folder):
    return TransformersOracle(smollm2_folder)


@pytest.fixture(scope="module")
def tokenizer(smollm2_folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2_folder)


@pytest.fixture(scope="module")
def short(oracle, tokenizer):
    prompts = [tokenizer(text).input_ids for text in SHORT_PROMPTS]
    return prompts, [oracle.generate(prompt, 24) for prompt in prompts]


@pytest.mark.parametrize(
    ("block_size", "chunk", "prefix_cache", "kv_memory"),
    [(16, 2048, True, AMPLE), (1, 7, True, AMPLE), (4, 7, False, 24 * 4 * 46080)],
)
def test_short_prompts(oracle, short, block_size, chunk, prefix_cache, kv_memory):
    prompts, expected = short
    actual, cached, preemptions = run(
        prompts, 24, block_size=block_size, max_batch_tokens=chunk, prefix_cache=prefix_cache, kv_memory=kv_memory
    )
    ties = sum(oracle.assert_same(*row) for row in zip(prompts, expected, actual, strict=True))
    assert ties <= 1
    assert prefix_cache or not any(cached)
    assert (preemptions > 0) == (kv_memory < AMPLE)


@pytest.fixture(scope="module")
def chats(gsm8k, oracle, tokenizer):
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": q}], add_generation_prompt=True).input_ids
        for q in gsm8k[:64]
    ]
    return prompts, [oracle.generate(prompt, 64) for prompt in prompts]


@pytest.mark.slow
@pytest.mark.parametrize("kv_memory", [AMPLE, TIGHT])
@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("chunk", [7, 2048])
@pytest.mark.parametrize("block_size", [1, 16, 32])
def test_gsm8k(oracle, chats, block_size, chunk, prefix_cache, kv_memory):
    prompts, expected = chats
    actual, cached, preemptions = run(
        prompts, 64, block_size=block_size, max_batch_tokens=chunk, prefix_cache=prefix_cache, kv_memory=kv_memory
    )
    ties = sum(oracle.assert_same(*row) for row in zip(prompts, expected, actual, strict=True))
    print(f"{ties} of 64 sequences differ after a tie; {preemptions} preemptions")
    assert ties <= 4
    assert any(cached) == prefix_cache or block_size == 32
    assert kv_memory == AMPLE or preemptions > 0
