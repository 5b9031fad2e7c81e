"""How many blocks the KV pool gets: what is asked for, or what is free after the weights and the activations."""

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import torch
from pagedgen_kernels import reference

from pagedgen.config import EngineConfig
from pagedgen.errors import PagedgenError, UsageError
from pagedgen.execution.attention import AttentionBackend
from pagedgen.execution.batch import build_batch
from pagedgen.execution.failures import free_unused_memory, is_out_of_memory
from pagedgen.execution.kv_cache import KVCache, LayerKV
from pagedgen.execution.runner import PROMPT_LOGIT_ROWS, logit_rows_per_chunk
from pagedgen.models.base import Model
from pagedgen.step import SlotArrays, StepPlan
from pagedgen.units import format_bytes

# The activation peak is measured on this many tokens and scaled: activations grow in proportion to the tokens of a
# step. A GPU computes the whole of a usual step at once.
_PROBE_TOKENS = {"cpu": 256, "cuda": 8192}
# Left alone, for the rest of the process and of the machine: a share of the total, and no less than this. A GPU is used
# by nobody else as a rule; the graphs of decoding steps take some of it.
_RESERVE_SHARES = {"cpu": 0.2, "cuda": 0.08}
_RESERVE_BYTES = 1 << 30
# The numbers of a sequence in SlotArrays and RunningSlots besides its tokens and blocks, roughly.
SLOT_BYTES = 160
CONTROL_GROUPS, OWN_GROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def available_memory(device: torch.device) -> tuple[int, int]:
    """(free, total) bytes of the device's memory: on a CPU what can be used without swapping, within the limit of the
    control group the process runs in, if there is one. What this process only keeps of an accelerator for later is
    given back before."""
    if device.type == "cuda":
        free_unused_memory(device)
        free, total = torch.cuda.mem_get_info(device)
        return free, total
    memory = psutil.virtual_memory()
    free, total = int(memory.available), int(memory.total)
    for group in _control_groups():
        with contextlib.suppress(OSError, ValueError):
            allowed = int((group / "memory.max").read_text())
            used = int((group / "memory.current").read_text())
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            reclaimable = int(stat.get("inactive_file", 0))
            free, total = min(free, allowed - used + reclaimable), min(total, allowed)
    return max(free, 0), total


def reserve_bytes(device: torch.device, total: int) -> int:
    """What of the `total` bytes of its memory is left alone."""
    return max(_RESERVE_BYTES, int(_RESERVE_SHARES[device.type] * total))


def device_bytes(device: torch.device) -> int:
    """The bytes that torch's allocator holds on an accelerator."""
    return int(torch.cuda.memory_reserved(device))


def _control_groups() -> list[Path]:
    """The process's control group and those above it, any of which may hold a limit (Linux, version 2)."""
    path = ""
    with contextlib.suppress(OSError):
        for line in OWN_GROUP.read_text().splitlines():
            if line.startswith("0::/"):
                path = line.removeprefix("0::/")
    own = CONTROL_GROUPS / path
    return [group for group in (own, *own.parents) if group.is_relative_to(CONTROL_GROUPS)]


@contextlib.contextmanager
def naming_memory(config: EngineConfig, kv_bytes: int, max_model_len: int) -> Iterator[None]:
    """Turn running out of memory in setting up the KV pool and the sequences into a PagedgenError that says what each
    of them takes, and which settings to lower."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise PagedgenError(
                f"setting up ran out of memory: the KV pool takes {format_bytes(kv_bytes)} (--kv-memory), the tables "
                f"of {config.max_seqs} sequences of up to {max_model_len} tokens take "
                f"{format_bytes(config.max_seqs * sequence_bytes(config, max_model_len))} (--max-seqs, "
                "--max-model-len); lower one of them"
            ) from error
        raise


def sequence_bytes(config: EngineConfig, max_model_len: int) -> int:
    """What the tables of one sequence take in the machine's memory: its token ids and block numbers."""
    return 4 * (max_model_len + -(-max_model_len // config.block_size)) + SLOT_BYTES


def check_tables(config: EngineConfig, max_model_len: int) -> None:
    """Raises UsageError when the tables of `max_seqs` sequences do not fit into the machine's memory."""
    each = sequence_bytes(config, max_model_len)
    free, _ = available_memory(torch.device("cpu"))
    if config.max_seqs * each > free:
        raise UsageError(
            f"--max-seqs {config.max_seqs} does not fit: the tables of that many sequences of up to {max_model_len} "
            f"tokens take {format_bytes(config.max_seqs * each)}, and {format_bytes(free)} of memory are free; the "
            f"most that fits is --max-seqs {free // each}, or lower --max-model-len"
        )


def bytes_per_block(config: EngineConfig, layers: Sequence[LayerKV], dtype: torch.dtype) -> int:
    """What a KV block takes. Raises UsageError when `kv_memory` does not hold one."""
    per_block = KVCache.bytes_per_block(layers, config.block_size, dtype)
    if config.kv_memory is not None and config.kv_memory < per_block:
        raise UsageError(
            f"--kv-memory {format_bytes(config.kv_memory)} is less than one KV block of {config.block_size} tokens, "
            f"which takes {format_bytes(per_block)} for this model; raise --kv-memory, or lower --block-size"
            f"{_at_most(config.kv_memory // (per_block // config.block_size))}"
        )
    return per_block


@dataclass(frozen=True, slots=True)
class PoolSize:
    """num_blocks: of the KV pool. activation_bytes, logits_bytes: the most that a step takes besides weights and KV."""

    num_blocks: int
    activation_bytes: int
    logits_bytes: int


def size_pool(config: EngineConfig, model: Model, attention: AttentionBackend, max_model_len: int) -> PoolSize:
    """The number of KV blocks, and what is kept for the steps.

    With `kv_memory`, as many as it holds. Without, what is free on the device less the measured activation peak and a
    reserve, and no more than all sequences at full length could use.

    Raises UsageError when `kv_memory` is less than a block or more than there is, PagedgenError when no block fits.
    """
    spec = model.spec
    per_block = bytes_per_block(config, spec.layers, spec.dtype)
    check_tables(config, max_model_len)
    logits = logits_bytes(config, spec.vocab_size)
    activations = measure_activations(config, model, attention, max_model_len)
    step = activations + logits
    free, total = available_memory(spec.device)
    usable = free - step - reserve_bytes(spec.device, total)
    if config.kv_memory is not None:
        if config.kv_memory > free - step:
            raise UsageError(
                f"--kv-memory {format_bytes(config.kv_memory)} does not fit: {format_bytes(free)} of "
                f"{spec.device.type} memory are free after the weights ({format_bytes(spec.weight_bytes)}), of which a "
                f"step of --max-batch-tokens {config.max_batch_tokens} takes {format_bytes(step)}; "
                + _what_fits(usable, per_block, config, activations)
            )
        return PoolSize(config.kv_memory // per_block, activations, logits)
    useful = config.max_seqs * -(-max_model_len // config.block_size)
    if usable < per_block:
        raise PagedgenError(
            f"no memory is left for the KV pool: {format_bytes(free)} of {spec.device.type} memory are free after the "
            f"weights ({format_bytes(spec.weight_bytes)}), a step of --max-batch-tokens {config.max_batch_tokens} "
            f"takes {format_bytes(step)}, {format_bytes(free - step - usable)} are left to the machine, and "
            f"one block takes {format_bytes(per_block)}; " + _what_fits(usable, per_block, config, activations)
        )
    return PoolSize(min(usable // per_block, useful), activations, logits)


def _what_fits(usable: int, per_block: int, config: EngineConfig, activations: int) -> str:
    """What to do, with the largest setting that leaves room. usable: bytes for the pool; negative where they lack."""
    if usable >= per_block:
        return f"the most that fits is --kv-memory {usable >> 20}MiB" if usable >> 20 else "free some memory"
    lacking, per_token = per_block - usable, max(1, activations // config.max_batch_tokens)
    tokens = config.max_batch_tokens - -(-lacking // per_token)
    lower = f"lower --max-batch-tokens{_at_most(tokens)}, or " if tokens >= 1 else ""
    return f"{lower}free {format_bytes(lacking)} or more"


def _at_most(setting: int) -> str:
    return f" to {setting} at most" if setting >= 1 else ""


def logits_bytes(config: EngineConfig, vocab_size: int) -> int:
    """The largest chunk of float32 logits in a step, with two working copies."""
    most_rows = max(config.max_seqs, PROMPT_LOGIT_ROWS)
    return 3 * 4 * vocab_size * min(most_rows, config.max_batch_tokens, logit_rows_per_chunk(vocab_size))


def measure_activations(config: EngineConfig, model: Model, attention: AttentionBackend, max_model_len: int) -> int:
    """Bytes that the largest step needs besides weights, KV and logits: the measured peak of a forward pass over random
    tokens, scaled to `max_batch_tokens`."""
    spec = model.spec
    tokens = min(_PROBE_TOKENS[spec.device.type], config.max_batch_tokens, spec.max_position)
    state = SlotArrays(1, tokens, config.block_size)
    state.token_ids[0] = np.random.default_rng(0).integers(0, spec.vocab_size, tokens)
    state.num_tokens[0] = state.num_prompt[0] = tokens
    num_blocks = -(-tokens // config.block_size)
    state.num_blocks[0] = num_blocks
    state.block_table[0] = np.arange(num_blocks)
    cache = KVCache(spec.layers, num_blocks, config.block_size, spec.dtype, spec.device)
    first = np.zeros(1, np.int32)
    plan = StepPlan(first, first, first + tokens, np.ones(1, np.bool_), np.empty((0, 2), np.int32), {}, {})
    batch = build_batch(plan, state, spec.device)
    with torch.inference_mode():
        before = _start_peak(spec.device)
        model.logits(model.forward(batch, cache, attention))
        peak = _read_peak(spec.device) - before
    return max(0, peak) * -(-config.max_batch_tokens // tokens) + _context_bytes(model, attention, max_model_len)


def _context_bytes(model: Model, attention: AttentionBackend, max_model_len: int) -> int:
    """What attention takes in proportion to the context: the torch path gathers one sequence's keys and values and
    widens them to float32, and holds a few copies of a bounded number of scores. The C++ kernels read the blocks in
    place."""
    if attention.kernels is not reference:
        return 0
    widest = max(x.num_kv_heads * (x.key_dim + x.value_dim) for x in model.spec.layers)
    return 3 * 4 * widest * max_model_len + 4 * int(reference.SCORE_BYTES)


def _start_peak(device: torch.device) -> int:
    """Reset the peak counter; the bytes in use now. On Linux a process's peak resident size can be reset.

    What the C library keeps for later is given back first: memory that was freed before would hide the peak.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return int(psutil.Process().memory_info().rss)


def _read_peak(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return int(psutil.Process().memory_info().rss)
