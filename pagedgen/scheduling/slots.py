"""Which running sequence lives in which row of the SlotArrays."""

import numpy as np
from numpy.typing import NDArray

from pagedgen.request import SamplingParams
from pagedgen.scheduling.asks import DeviceAsks
from pagedgen.scheduling.sequence import Sequence, SequenceGroup
from pagedgen.step import SlotArrays

MAX_UNWATCHED_END_IDS = 8


class RunningSlots:
    """The slots and the sequences in them: `running[slot]`.

    max_total: int32 [max_seqs], the most tokens each may have. most_computed: int32 [max_seqs], the most tokens it has
    had computed, before its last preemption too. pause_at: int32 [max_seqs], where its computation pauses for a copy to
    be made of it, or NEVER. end_ids: int32 [max_seqs, 8], as many as fit; -1 is no token. watched: bool [max_seqs],
    those with more end ids, with stop strings or with log-probabilities, whose tokens are looked at in Python, each of
    them. waits: bool [max_seqs], those for which nothing more can be planned before the token that they drew last is
    known: with bad words, or about to have copies. rows: int64 [max_seqs], samples: int32 [max_seqs], the request and
    the sample of it that each is.
    """

    NEVER = np.iinfo(np.int32).max

    def __init__(self, state: SlotArrays) -> None:
        self.state = state
        max_seqs = len(state.num_tokens)
        self.max_total = np.zeros(max_seqs, np.int32)
        self.most_computed = np.zeros(max_seqs, np.int32)
        self.pause_at = np.full(max_seqs, self.NEVER, np.int32)
        self.end_ids = np.full((max_seqs, MAX_UNWATCHED_END_IDS), -1, np.int32)
        self.watched = np.zeros(max_seqs, np.bool_)
        self.waits = np.zeros(max_seqs, np.bool_)
        self.rows = np.zeros(max_seqs, np.int64)
        self.samples = np.zeros(max_seqs, np.int32)
        self.asks = DeviceAsks(state)
        # What each slot's parameters were last written from.
        self._written: list[tuple[SamplingParams, frozenset[int]] | None] = [None] * max_seqs
        self.free = list(range(max_seqs - 1, -1, -1))
        self._sequences: list[Sequence | None] = [None] * max_seqs
        self._groups: list[SequenceGroup | None] = [None] * max_seqs

    @property
    def num_running(self) -> int:
        return len(self._sequences) - len(self.free)

    @property
    def occupied(self) -> set[int]:
        return {slot for slot, sequence in enumerate(self._sequences) if sequence is not None}

    def __contains__(self, slot: int) -> bool:
        return self._sequences[slot] is not None

    def __getitem__(self, slot: int) -> Sequence:
        sequence = self._sequences[slot]
        assert sequence is not None
        return sequence

    def group(self, slot: int) -> SequenceGroup:
        group = self._groups[slot]
        assert group is not None
        return group

    def occupy(self, sequence: Sequence, group: SequenceGroup) -> int:
        """Give a sequence of the group a slot, with its parameters but none of its tokens."""
        slot, state = self.free.pop(), self.state
        sequence.slot, self._sequences[slot], self._groups[slot] = slot, sequence, group
        state.num_prompt[slot], state.key[slot] = sequence.num_prompt, sequence.key
        self.max_total[slot], self.most_computed[slot] = sequence.max_total, sequence.most_computed
        self.rows[slot], self.samples[slot] = sequence.request.row, sequence.sample
        written = self._written[slot]
        # Most sequences of a job share these objects; writing a dozen numbers again takes longer than all the rest.
        if written is None or written[0] is not sequence.params or written[1] is not sequence.end_ids:
            self._write(slot, sequence.params, sequence.end_ids)
        self.watched[slot] = (
            len(sequence.end_ids) > MAX_UNWATCHED_END_IDS
            or sequence.stop_checker is not None
            or sequence.params.logprobs is not None
        )
        self.waits[slot] = bool(sequence.bad_words)
        self.asks.add(sequence)
        return slot

    def _write(self, slot: int, params: SamplingParams, end_ids: frozenset[int]) -> None:
        state = self.state
        state.temperature[slot], state.top_k[slot] = params.temperature, params.top_k
        state.top_p[slot], state.min_p[slot] = params.top_p, params.min_p
        state.repetition_penalty[slot] = params.repetition_penalty
        state.presence_penalty[slot], state.frequency_penalty[slot] = params.presence_penalty, params.frequency_penalty
        self.end_ids[slot] = -1
        if len(end_ids) <= MAX_UNWATCHED_END_IDS:
            self.end_ids[slot, : len(end_ids)] = list(end_ids)
        self._written[slot] = params, end_ids

    def vacate(self, sequence: Sequence) -> int:
        """Take a sequence out of its slot, which is returned; it keeps its tokens."""
        slot = sequence.slot
        sequence.token_ids = self.tokens(sequence).copy()
        sequence.most_computed = int(self.most_computed[slot])
        sequence.continuations = None
        self.asks.remove(slot)
        self.pause_at[slot] = self.NEVER
        self.state.num_pending[slot] = 0
        self.state.epoch[slot] += 1
        self._sequences[slot], self._groups[slot], sequence.slot = None, None, -1
        self.free.append(slot)
        return slot

    def tokens(self, sequence: Sequence) -> NDArray[np.int32]:
        """The tokens of a running sequence that are known."""
        return self.state.token_ids[sequence.slot, : self.state.num_tokens[sequence.slot]]
