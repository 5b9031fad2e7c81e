"""Sequences and their groups: what the scheduler moves between waiting, running and finished."""

import hashlib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from pagedgen.request import FinishReason, Request, SamplingParams, Status, TokenLogprob
from pagedgen.step import Continuations, LogprobResult

if TYPE_CHECKING:
    from pagedgen.scheduling.beam import BeamSearch

_MASK = (1 << 64) - 1


class StopChecker(Protocol):
    """Looks for stop strings in a sequence's text; see `pagedgen.text.stop`."""

    def append(self, token_id: int) -> str | None:
        """The final text, cut before the stop string, once there is one."""
        ...

    def fork(self) -> "StopChecker":
        """A copy that goes on by itself."""
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
    """One sample of a request, or one beam of its search.

    token_ids: int32, the prompt and what had been generated when the sequence last waited; while it runs, its tokens
    live in row `slot` of the SlotArrays.
    most_computed: the most of its tokens that were computed at one time, before a preemption too.
    end_ids: the ids that end it. max_total: the most tokens it may have, prompt included. bad_words: token sequences
    that are never completed.
    num_continuations: of a beam, how many of its likeliest next tokens its search needs; else 0. running_score: what
    the search ranks it by; cumulative_logprob: the sum of its log-probabilities; division: the part of the beams it is
    of; continuations: its likeliest next tokens, while it waits for those of the other beams.
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
    bad_words: tuple[tuple[int, ...], ...] = ()
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    num_continuations: int = 0
    running_score: float = 0.0
    cumulative_logprob: float = 0.0
    division: int = 0
    continuations: Continuations | None = None
    score: float | None = None
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

    def copy(self) -> "Sequence":
        """The same beam once more, without a slot."""
        return replace(self, slot=-1, continuations=None, prompt_logprobs=[])

    def enter_prompt_logprobs(self, found: list[LogprobResult], token_ids: NDArray[np.int32]) -> None:
        """Add those of the next prompt positions. token_ids: the sequence's tokens."""
        for result in found:
            token = int(token_ids[len(self.prompt_logprobs) + 1])
            self.prompt_logprobs.append(TokenLogprob(token, result.chosen, result.top_ids, result.top_values))

    def enter_token(self, token: int, at_limit: bool, found: LogprobResult | None) -> None:
        """Take in a drawn token and its log-probabilities, if they were asked for; finish if it ends the sequence."""
        if self.params.logprobs is not None:
            assert found is not None
            self.logprobs.append(TokenLogprob(token, found.chosen, found.top_ids, found.top_values))
        if token in self.end_ids:
            self.finish(Status.OK, FinishReason.STOP)
            return
        if self.stop_checker is not None:
            self.final_text = self.stop_checker.append(token)
            if self.final_text is not None:
                self.finish(Status.OK, FinishReason.STOP)
                return
        if at_limit:
            self.finish(Status.OK, FinishReason.LENGTH)

    def sibling(self, sample: int) -> "Sequence":
        """Another sample of the request, as far as this one has come, with random draws of its own."""
        return replace(
            self,
            sample=sample,
            slot=-1,
            key=random_key(self.params.seed, str(self.request.id), sample),
            stop_checker=None if self.stop_checker is None else self.stop_checker.fork(),
            logprobs=list(self.logprobs),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Fork:
    """`child` goes on from a copy of `parent` once that has `at` tokens computed."""

    child: Sequence
    parent: Sequence
    at: int


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """The samples of one request, or the beams of its search; admitted, preempted and resumed whole.

    It begins with one sequence, which computes the prompt; the others are copies of it. forks: the copies that are
    still to be made after a preemption. held_slots: how many slots are kept for it while it runs.
    """

    sequences: list[Sequence]
    beam: "BeamSearch | None" = None
    forks: list[Fork] = field(default_factory=list)
    held_slots: int = 0

    @property
    def live(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if not sequence.is_finished]

    @property
    def first(self) -> Sequence:
        """The first live sequence."""
        return next(sequence for sequence in self.sequences if not sequence.is_finished)

    @property
    def running(self) -> list[Sequence]:
        """The live sequences that have a slot."""
        return [sequence for sequence in self.sequences if sequence.slot >= 0 and not sequence.is_finished]

    @property
    def num_unborn(self) -> int:
        """Samples that do not exist yet."""
        return 0 if self.beam is not None else self.sequences[0].params.n - len(self.sequences)

    @property
    def num_slots(self) -> int:
        """Slots that it takes to run it to its end."""
        return self.beam.params.width if self.beam is not None else len(self.live) + self.num_unborn

    def plan_forks(self) -> None:
        """After a preemption: run the first live sequence, and let each other one go on from where it parts from an
        earlier one; samples part from the first where the prompt ends, beams form a tree."""
        first, *others = self.live
        self.forks = []
        for i, child in enumerate(others):
            candidates = [first, *others[:i]] if self.beam is not None else [first]
            shared = [_common_length(child, parent) for parent in candidates]
            best = max(range(len(candidates)), key=shared.__getitem__)
            self.forks.append(Fork(child, candidates[best], shared[best]))


def _common_length(a: Sequence, b: Sequence) -> int:
    """How many tokens both begin with, the last of each left out: its logits have to be computed."""
    length = min(len(a.token_ids), len(b.token_ids)) - 1
    differ = np.flatnonzero(a.token_ids[:length] != b.token_ids[:length])
    return int(differ[0]) if len(differ) else length
