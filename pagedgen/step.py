"""What the policy half and the device half exchange in each step: numpy arrays, indexed by slot. No torch."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


class SlotArrays:
    """Preallocated state of the running sequences; row `slot` belongs to one sequence while it runs.

    token_ids: int32 [max_seqs, max_model_len], the prompt then the generated tokens.
    block_table: int32 [max_seqs, ceil(max_model_len / block_size)], the physical block of each logical one.
    num_tokens, num_computed, num_blocks, num_prompt: int32 [max_seqs]: the tokens that are known, and those of them
        that finished steps have computed.
    num_scheduled: int32 [max_seqs], the tokens that steps have computed or were planned to.
    num_pending: int32 [max_seqs], the tokens that planned steps draw and the host does not know yet; they come after
        the known ones. With no step in flight, all that is scheduled is computed and nothing is pending.
    epoch: int64 [max_seqs], how many sequences have left the slot: with the slot it names a sequence.
    temperature, top_p, min_p: float32 [max_seqs]. top_k: int32 [max_seqs].
    repetition_penalty, presence_penalty, frequency_penalty: float32 [max_seqs].
    key: uint64 [max_seqs], the sequence's random key, derived from (seed, row id, sample).
    """

    def __init__(self, max_seqs: int, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        self.token_ids = np.zeros((max_seqs, max_model_len), np.int32)
        self.block_table = np.zeros((max_seqs, -(-max_model_len // block_size)), np.int32)
        self.num_tokens = np.zeros(max_seqs, np.int32)
        self.num_computed = np.zeros(max_seqs, np.int32)
        self.num_scheduled = np.zeros(max_seqs, np.int32)
        self.num_pending = np.zeros(max_seqs, np.int32)
        self.epoch = np.zeros(max_seqs, np.int64)
        self.num_blocks = np.zeros(max_seqs, np.int32)
        self.num_prompt = np.zeros(max_seqs, np.int32)
        self.temperature = np.zeros(max_seqs, np.float32)
        self.top_k = np.zeros(max_seqs, np.int32)
        self.top_p = np.ones(max_seqs, np.float32)
        self.min_p = np.zeros(max_seqs, np.float32)
        self.repetition_penalty = np.ones(max_seqs, np.float32)
        self.presence_penalty = np.zeros(max_seqs, np.float32)
        self.frequency_penalty = np.zeros(max_seqs, np.float32)
        self.key = np.zeros(max_seqs, np.uint64)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: sequence i (in `slots`) computes `counts[i]` tokens from position `starts[i]` on.

    samples: bool [S], whether the sequence's last known token is computed, so that a next one is drawn.
    copies: int32 [C, 2], (source, destination) blocks to copy before anything is written.
    banned: slot -> token ids that may not be drawn, for sampled sequences below `min_tokens` or about to complete a bad
        word.
    biases: slot -> (token ids, what to add to their logits), for the sampled sequences that have some.
    logprobs: slot -> how many top log-probabilities it wants, for the sampled sequences that asked.
    extra_keys: slot -> uint64 [n - 1], the keys of further samples that draw from the same logits.
    beams: slot -> how many of its likeliest continuations are wanted; such a sequence draws no token.
    prompt_logprobs: slot -> (the first position whose log-probability is wanted, how many top ones). For position p it
        comes from the logits of token p - 1, so a step that computes tokens [start, end) gives those of positions
        max(first, start + 1) to min(end, num_prompt - 1), both included.
    """

    slots: NDArray[np.int32]
    starts: NDArray[np.int32]
    counts: NDArray[np.int32]
    samples: NDArray[np.bool_]
    copies: NDArray[np.int32]
    banned: dict[int, tuple[int, ...]] = field(default_factory=dict)
    logprobs: dict[int, int] = field(default_factory=dict)
    biases: dict[int, tuple[NDArray[np.int64], NDArray[np.float32]]] = field(default_factory=dict)
    extra_keys: dict[int, NDArray[np.uint64]] = field(default_factory=dict)
    beams: dict[int, int] = field(default_factory=dict)
    prompt_logprobs: dict[int, tuple[int, int]] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return int(self.counts.sum())


@dataclass(frozen=True, slots=True)
class LogprobResult:
    """Log-probabilities of one drawn token: its own, and the top ids and values, best first."""

    chosen: float
    top_ids: tuple[int, ...]
    top_values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ExtraDraws:
    """What the further samples of a sequence drew. tokens: int32 [n - 1]. logprobs: one for each, if it asked."""

    tokens: NDArray[np.int32]
    logprobs: tuple[LogprobResult, ...] = ()


@dataclass(frozen=True, slots=True)
class Continuations:
    """A beam's likeliest next tokens, best first: ids int64 [k], logprobs float32 [k] after all processors. Tokens with
    -inf are left out."""

    ids: NDArray[np.int64]
    logprobs: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class StepResult:
    """The tokens drawn in a step, for the sequences with `plan.samples`, in plan order.

    slots, tokens: int32 [R]. A token of -1 means the logits held NaN or nothing but -inf; for a beam any other value
    only says that they did not.
    logprobs: slot -> log-probabilities, for the sequences that asked. extra: by slot, for `plan.extra_keys`.
    beams: slot -> continuations, for `plan.beams`, unless its token is -1.
    prompt_logprobs: slot -> those of the positions that this step gave, in order.
    seconds: what building the batch, the model, and sampling took.
    """

    slots: NDArray[np.int32]
    tokens: NDArray[np.int32]
    logprobs: dict[int, LogprobResult] = field(default_factory=dict)
    extra: dict[int, ExtraDraws] = field(default_factory=dict)
    beams: dict[int, Continuations] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[LogprobResult]] = field(default_factory=dict)
    seconds: tuple[float, float, float] = (0.0, 0.0, 0.0)
