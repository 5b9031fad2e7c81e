"""How large the KV pool will be, and what else a run holds: as `execution.memory.size_pool`, but before loading."""

from dataclasses import dataclass

from pagedgen.config import EngineConfig, JobConfig
from pagedgen.errors import PagedgenError, UsageError
from pagedgen.execution.memory import available_memory, bytes_per_block, check_tables, logits_bytes, reserve_bytes
from pagedgen.job_setup import check_against_vocabulary
from pagedgen.models.facts import ModelFacts
from pagedgen.models.support import check_memory
from pagedgen.params import defaults_from_generation_config
from pagedgen.planning.profile import Profile
from pagedgen.units import format_bytes

# What an activation peak consists of, for each token: so many rows of the hidden size and of the inner one. Of SmolLM2
# that is 42 kB in bfloat16 and 84 kB in float32; measured were 55 and 76.
_HIDDEN_ROWS, _INNER_ROWS = 15, 8


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """num_blocks: of the KV pool. is_given: by --kv-memory; else it is an estimate. activation_bytes: the most that a
    step takes besides weights, KV and logits; is_measured: by an earlier run. free_bytes: on the device, now."""

    num_blocks: int
    bytes_per_block: int
    is_given: bool
    activation_bytes: int
    is_measured: bool
    logits_bytes: int
    free_bytes: int


def check_early(config: JobConfig, facts: ModelFacts) -> None:
    """Raises UsageError for options that do not go with the model, before it is loaded."""
    check_against_vocabulary(defaults_from_generation_config({}, config.overrides), config.overrides, facts.vocab_size)
    bytes_per_block(config.engine, facts.layers, facts.dtype)
    check_tables(config.engine, config.engine.max_model_len or facts.max_position)


def plan_pool(config: EngineConfig, facts: ModelFacts, max_model_len: int, profile: Profile | None) -> PoolPlan:
    """Raises UsageError or PagedgenError for what cannot work, as loading the model would."""
    per_block = bytes_per_block(config, facts.layers, facts.dtype)
    check_tables(config, max_model_len)
    weights = facts.size.weight_bytes
    check_memory(facts.name, weights, facts.device, facts.dtype)
    free, total = available_memory(facts.device)
    logits = logits_bytes(config, facts.vocab_size)
    per_token = profile.activation_bytes if profile is not None else _activation_bytes(facts)
    activations = round(per_token * config.max_batch_tokens)
    left = free - weights - activations - logits
    usable = left - reserve_bytes(facts.device, total)
    if config.kv_memory is not None:
        if config.kv_memory > left:
            raise UsageError(
                f"--kv-memory {format_bytes(config.kv_memory)} does not fit: {format_bytes(free)} of memory are free, "
                f"of which the weights take {format_bytes(weights)} and a step of --max-batch-tokens an estimated "
                f"{format_bytes(activations + logits)}; the most that fits is about {format_bytes(max(0, usable))}"
            )
        num_blocks = config.kv_memory // per_block
    elif usable < per_block:
        raise PagedgenError(
            f"no memory would be left for the KV pool: {format_bytes(free)} are free, the weights take "
            f"{format_bytes(weights)} and a step an estimated {format_bytes(activations + logits)}; free some memory, "
            "or lower --max-batch-tokens"
        )
    else:
        num_blocks = min(usable // per_block, config.max_seqs * -(-max_model_len // config.block_size))
    return PoolPlan(num_blocks, per_block, config.kv_memory is not None, activations, profile is not None, logits, free)


def _activation_bytes(facts: ModelFacts) -> float:
    """Of one token, by a formula."""
    return (_HIDDEN_ROWS * facts.hidden_size + _INNER_ROWS * facts.intermediate_size) * float(facts.dtype.itemsize)
