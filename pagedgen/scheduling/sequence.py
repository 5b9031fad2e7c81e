"""Sequences and their groups: what the scheduler moves between waiting, running and finished."""

import hashlib
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pagedgen.request import FinishReason, Request, SamplingParams, Status, TokenLogprob

_MASK = (1 << 64) - 1


class StopChecker(Protocol):
    """Looks for stop strings in a sequence's text; see `pagedgen.text.stop`."""

    def append(self, token_id: int) -> str | None:
        """The final text, cut before the stop string, once there is one."""
        ...


def mix64(value: int) -> int:
    """The SplitMix64 finaliser (Steele, Lea and Flood, 2014): a bijection of 64-bit integers that mixes every bit."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def random_key(seed: int, row_id: str, sample: int) -> int:
    """The 64-bit key of one sample's random draws. It depends on nothing else: not on the batch, not on the
    schedule."""
    row = int.from_bytes(hashlib.blake2b(row_id.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")
    return mix64(mix64(mix64(seed & _MASK) ^ row) ^ sample)


@dataclass(slots=True, eq=False)
class Sequence:
    """One sample of a request.

    token_ids: int32, the prompt and what had been generated when the sequence last waited; while it runs, its tokens
    live in row `slot` of the SlotArrays.
    most_computed: the most of its tokens that were computed at one time, before a preemption too.
    end_ids: the ids that end it. max_total: the most tokens it may have, prompt included.
    """

    request: Request
    params: SamplingParams
    token_ids: NDArray[np.int32]
    num_prompt: int
    max_total: int
    end_ids: frozenset[int]
    key: int
    sample: int = 0
    slot: int = -1
    cached_tokens: int = -1
    most_computed: int = 0
    stop_checker: StopChecker | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    status: Status | None = None
    finish_reason: FinishReason | None = None
    final_text: str | None = None

    @property
    def is_finished(self) -> bool:
        return self.status is not None

    @property
    def generated(self) -> NDArray[np.int32]:
        """The generated ids of a sequence that is not running."""
        return self.token_ids[self.num_prompt :]

    def finish(self, status: Status, reason: FinishReason | None = None) -> None:
        assert self.status is None
        self.status, self.finish_reason = status, reason


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """The samples of one request; admitted, preempted and resumed whole."""

    sequences: list[Sequence]

    @property
    def live(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if not sequence.is_finished]
