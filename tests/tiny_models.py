"""Tiny random checkpoints of every architecture, and a driver that runs them over a paged cache without a scheduler."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from pagedgen.execution.attention import AttentionBackend, choose_backend
from pagedgen.execution.batch import build_batch
from pagedgen.execution.kv_cache import KVCache
from pagedgen.models.base import Model
from pagedgen.step import SlotArrays, StepPlan

VOCAB_SIZE = 320
SPECIAL_TOKENS = ("<|endoftext|>", "<|begin|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CORPUS = (
    "the quick brown fox jumps over the lazy dog",
    "paged attention shares blocks",
    "12 + 30 = 42, übrigens 你好",
)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 3,
    "pad_token_id": 0,
}
_MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
_SPECIFIC: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 6},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6},
    "qwen2": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "qwen3": {"head_dim": 12},
    "qwen3_moe": {
        "head_dim": 12,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
    },
    "smollm3": {"num_hidden_layers": 4, "no_rope_layer_interval": 2},
    "gemma": {"head_dim": 12},
    "gemma2": {"head_dim": 12, "sliding_window": 6, "query_pre_attn_scalar": 12, "attn_logit_softcapping": 4.0},
    "gemma3_text": {"head_dim": 12, "sliding_window": 6, "query_pre_attn_scalar": 12, "num_hidden_layers": 6},
    "phi": {"partial_rotary_factor": 0.5},
    "phi3": {"sliding_window": 6},
    "olmo2": {},
    "granite": {"attention_multiplier": 0.4, "residual_multiplier": 0.5, "embedding_multiplier": 2.0},
    "cohere": {"logit_scale": 0.5},
    "starcoder2": {"sliding_window": 6, "use_bias": True},
    "gpt2": {"initializer_range": 0.2, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 256, "n_inner": 48},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "gpt_neox": {},
    "gpt_oss": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6},
    "deepseek_v3": _MLA,
    "glm4": {"head_dim": 8, "partial_rotary_factor": 0.5},
    "exaone4": {"head_dim": 8, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
    "falcon": {"new_decoder_architecture": False, "multi_query": True, "alibi": False, "parallel_attn": True},
    "seed_oss": {"head_dim": 12, "attention_bias": True},
    "bloom": {"hidden_size": 32, "n_head": 4, "n_layer": 2},
    "mamba": {"state_size": 4},
    "stablelm": {},
    "nemotron": {},
}
_OTHER_NAMES = frozenset({"gpt2", "bloom"})
ARCHITECTURES = tuple(name for name in _SPECIFIC if name not in {"bloom", "mamba", "stablelm", "nemotron"})
NATIVE = ("llama", "mistral", "qwen2", "qwen3", "smollm3")


def tiny_config(model_type: str, **overrides: Any) -> Any:
    """A `transformers` config of two or a few narrow layers; sliding windows are shorter than the tests' prompts."""
    common = {k: v for k, v in _COMMON.items() if model_type not in _OTHER_NAMES or k.endswith(("_id", "vocab_size"))}
    return AutoConfig.for_model(model_type, **(common | _SPECIFIC.get(model_type, {}) | overrides))


def tiny_checkpoint(tmp: Path, model_type: str, *, seed: int = 0, shard_size: str = "1GB", **overrides: Any) -> Path:
    """Save a tiny random float32 model of `model_type` with a tokenizer, and return its folder.

    tmp: the folder to write into; the model gets one of its own in it. overrides: values of its config.
    """
    folder = Path(tmp) / f"tiny-{model_type}"
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(model_type, **overrides), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms start at one and biases at zero, which would hide their absence
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder, max_shard_size=shard_size)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of VOCAB_SIZE tokens with a chat template, trained on three lines."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|begin|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
    )


def random_sequences(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(len(SPECIAL_TOKENS), VOCAB_SIZE, length).tolist() for length in lengths]


def run_packed(
    model: Model,
    sequences: Sequence[Sequence[int]],
    chunks: int | Sequence[int] = 2048,
    block_size: int = 16,
    *,
    prompt_lens: Sequence[int] | None = None,
    attention: AttentionBackend | None = None,
    only_final: bool = False,
) -> list[torch.Tensor]:
    """Run all sequences packed, each step giving every unfinished one its next chunk; the logits of all tokens,
    [length, vocab_size] in float32 for each sequence.

    chunks: most tokens of a sequence in a step, one number or a cycle over the steps (shifted by one from sequence to
        sequence). prompt_lens: tokens from there on are decoded one at a time; by default all is prompt.
    only_final: ask for the logits of each sequence's last token alone, as a prompt does; returns [1, vocab_size] each.
    """
    spec = model.spec
    cycle = [chunks] if isinstance(chunks, int) else list(chunks)
    lengths = np.array([len(ids) for ids in sequences], np.int32)
    prompts = lengths if prompt_lens is None else np.array(prompt_lens, np.int32)
    counts_of_blocks = -(-lengths // block_size)
    cache = KVCache(spec.layers, int(counts_of_blocks.sum()) + 1, block_size, spec.dtype, spec.device)
    for pool in cache.pools.values():
        pool.fill_(float("nan"))  # what is read without being written shows
    state = SlotArrays(len(sequences), int(lengths.max()), block_size)
    blocks = iter(np.random.default_rng(1).permutation(np.arange(1, cache.num_blocks)))
    for slot, ids in enumerate(sequences):
        state.token_ids[slot, : len(ids)] = ids
        state.num_tokens[slot], state.num_prompt[slot] = len(ids), prompts[slot]
        state.block_table[slot, : counts_of_blocks[slot]] = [next(blocks) for _ in range(counts_of_blocks[slot])]
    backend = attention or choose_backend(spec.device)
    logits: list[list[torch.Tensor]] = [[] for _ in sequences]
    step = 0
    while (state.num_computed < lengths).any():
        slots = np.flatnonzero(state.num_computed < lengths).astype(np.int32)
        starts = state.num_computed[slots]
        most = np.array([cycle[(step + slot) % len(cycle)] for slot in slots], np.int32)
        left = np.where(starts < prompts[slots], prompts[slots] - starts, 1)
        counts = np.minimum(most, left).astype(np.int32)
        wanted = (starts + counts == lengths[slots]).astype(np.int32) if only_final else counts
        batch = build_batch(_plan(slots, starts, counts, wanted > 0), state, spec.device)
        if not only_final:
            batch = replace(batch, logit_rows=torch.arange(batch.num_tokens, device=spec.device))
        rows = model.logits(model.forward(batch, cache, backend)).float().cpu()
        for slot, part in zip(slots, rows.split(wanted.tolist()), strict=True):
            logits[slot].append(part)
        state.num_computed[slots] += counts
        step += 1
    return [torch.cat(parts) for parts in logits]


def _plan(slots: np.ndarray, starts: np.ndarray, counts: np.ndarray, samples: np.ndarray) -> StepPlan:
    return StepPlan(
        slots=slots,
        starts=starts,
        counts=counts,
        samples=samples,
        copies=np.zeros((0, 2), np.int32),
        banned={},
        logprobs={},
    )


@torch.no_grad()
def reference_logits(module: Any, ids: Sequence[int], prompt_len: int | None = None) -> torch.Tensor:
    """[length, vocab_size]: what `transformers` computes for one sequence alone, its prompt at once and the rest one
    token at a time through its own cache."""
    prompt = len(ids) if prompt_len is None else prompt_len
    output = module(torch.tensor([ids[:prompt]]), use_cache=prompt < len(ids))
    parts = [output.logits[0]]
    for position in range(prompt, len(ids)):
        output = module(torch.tensor([[ids[position]]]), past_key_values=output.past_key_values)
        parts.append(output.logits[0])
    return torch.cat(parts).float()
