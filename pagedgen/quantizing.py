"""Quantizes a native model: shows it some text, so that it knows how large the inputs of its layers get."""

import importlib.resources
import json

import numpy as np
import torch

from pagedgen.execution.attention import choose_backend
from pagedgen.execution.batch import build_batch
from pagedgen.execution.kv_cache import KVCache
from pagedgen.models.llama import LlamaModel
from pagedgen.step import SlotArrays, StepPlan
from pagedgen.text.tokenizer import Tokenizer

# Chats to look at, and the most tokens of each.
CHATS, TOKENS = 16, 256


def quantize_model(model: LlamaModel, tokenizer: Tokenizer) -> None:
    """Quantizes the model in place, by the bundled sample prompts: the same ones each time, so that runs repeat."""
    prompts = [ids for ids in _sample_ids(tokenizer) if ids]

    def run() -> None:
        for ids in prompts:
            _run(model, [token_id for token_id in ids if token_id < model.spec.vocab_size][:TOKENS])

    model.quantize(run)


def _sample_ids(tokenizer: Tokenizer) -> list[list[int]]:
    lines = importlib.resources.files("pagedgen.sample_prompts").joinpath("prompts.jsonl").read_text("utf-8")
    rows = [json.loads(line) for line in lines.splitlines()[:CHATS]]
    chats = [row.get("messages") or [{"role": "user", "content": str(row.get("prompt", ""))}] for row in rows]
    if tokenizer.has_chat_template:
        texts = [tokenizer.render_chat(chat, False) for chat in chats]
    else:
        texts = [str(message["content"]) for chat in chats for message in chat]
    return [list(ids) for ids in tokenizer.encode_batch(texts, add_special_tokens=not tokenizer.has_chat_template)]


@torch.inference_mode()
def _run(model: LlamaModel, ids: list[int]) -> None:
    """One sequence through layers and head."""
    spec, length, size = model.spec, min(len(ids), model.spec.max_position), 16
    state = SlotArrays(1, length, size)
    state.token_ids[0] = ids[:length]
    state.num_tokens[0] = state.num_prompt[0] = length
    blocks = -(-length // size)
    state.num_blocks[0], state.block_table[0] = blocks, np.arange(blocks)
    zero = np.zeros(1, np.int32)
    plan = StepPlan(zero, zero, zero + length, np.ones(1, np.bool_), np.empty((0, 2), np.int32))
    cache = KVCache(spec.layers, blocks, size, spec.dtype, spec.device)
    model.logits(model.forward(build_batch(plan, state, spec.device), cache, choose_backend(spec.device)))
