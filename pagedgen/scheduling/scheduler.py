"""The scheduler: which sequences compute how many tokens in the next step, and what became of the last one."""

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagedgen.request import FinishReason, Status, TokenLogprob
from pagedgen.scheduling.blocks import BlockManager
from pagedgen.scheduling.sequence import Sequence, SequenceGroup
from pagedgen.step import SlotArrays, StepPlan, StepResult

MAX_UNWATCHED_END_IDS = 8


@dataclass(slots=True)
class SchedulerCounts:
    """Running totals since the start, for the statistics."""

    preemptions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


class Scheduler:
    """Continuous batching over the blocks of one pool.

    There is no prefill phase and no decode phase: a sequence has `num_computed` and `num_tokens`, and each step moves
    the first toward the second within `max_batch_tokens`. Chunked prefill, prefix hits and recomputation after a
    preemption are the same rule. Running groups go first, in order of admission; the last admitted is preempted when
    blocks run out; new groups are admitted only in a step without preemption.
    """

    def __init__(self, state: SlotArrays, blocks: BlockManager, max_batch_tokens: int) -> None:
        self.state, self.blocks, self.max_batch_tokens = state, blocks, max_batch_tokens
        self.waiting: deque[SequenceGroup] = deque()
        self.running: list[SequenceGroup] = []
        self.counts = SchedulerCounts()
        max_seqs = len(state.num_tokens)
        self._free_slots = list(range(max_seqs - 1, -1, -1))
        self._by_slot: list[Sequence | None] = [None] * max_seqs
        # Slots of the running sequences in order of priority; rebuilt only when the set of running sequences changes.
        self._order: NDArray[np.int32] | None = None
        self._max_total = np.zeros(max_seqs, np.int32)
        # The most tokens a slot's sequence has had computed, before its last preemption too.
        self._most_computed = np.zeros(max_seqs, np.int32)
        # The group that last did not fit, and the blocks there were to spare for it.
        self._refused: tuple[SequenceGroup | None, int] = (None, 0)
        # The end ids of each slot, as many as fit; -1 is no token. Slots with more, with stop strings or with
        # log-probabilities are watched: each of their tokens is looked at in Python.
        self._end_ids = np.full((max_seqs, MAX_UNWATCHED_END_IDS), -1, np.int32)
        self._watched = np.zeros(max_seqs, np.bool_)
        self._banned: dict[int, Sequence] = {}
        self._logprobs: dict[int, int] = {}

    @property
    def num_running(self) -> int:
        return len(self._by_slot) - len(self._free_slots)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def capacity(self) -> int:
        """Tokens that one sequence alone could have in the pool."""
        return self.blocks.num_blocks * self.blocks.block_size

    def add(self, group: SequenceGroup) -> None:
        self.waiting.append(group)

    def schedule(self) -> StepPlan | None:
        """The next step, or None when nothing is left to do. Whatever was finished has been taken out by `update`."""
        slots, counts, needed, preempted = self._make_room()
        copies = self._allocate(slots, counts, needed)
        if not preempted:
            slots, counts = self._admit(slots, counts)
        scheduled = counts > 0
        slots, counts = slots[scheduled], counts[scheduled]
        if not len(slots):
            assert not self.has_work, "there is work, but nothing could be scheduled"
            return None
        starts = self.state.num_computed[slots]
        samples = starts + counts == self.state.num_tokens[slots]
        sampled = slots[samples].tolist() if self._banned or self._logprobs else []
        return StepPlan(
            slots=slots,
            starts=starts,
            counts=counts,
            samples=samples,
            copies=np.array(copies, np.int32).reshape(-1, 2),
            banned=self._bans(sampled),
            logprobs={slot: self._logprobs[slot] for slot in sampled if slot in self._logprobs},
        )

    def update(self, plan: StepPlan, result: StepResult) -> list[SequenceGroup]:
        """Enter a step's tokens and return the groups that finished; their blocks are free or cached again."""
        state = self.state
        self.blocks.written(plan.slots, plan.starts, plan.counts)
        state.num_computed[plan.slots] += plan.counts
        self._count_prompt_tokens(plan)
        self.counts.output_tokens += len(result.slots)
        drawn = result.tokens >= 0
        slots, tokens = result.slots[drawn], result.tokens[drawn]
        state.token_ids[slots, state.num_tokens[slots]] = tokens
        state.num_tokens[slots] += 1
        for slot in result.slots[~drawn].tolist():
            self._sequence(slot).finish(Status.NAN_LOGITS)
        at_limit = state.num_tokens[slots] >= self._max_total[slots]
        at_end = (tokens[:, None] == self._end_ids[slots]).any(axis=1)
        for i in np.flatnonzero(at_limit | at_end | self._watched[slots]).tolist():
            self._judge(int(slots[i]), int(tokens[i]), bool(at_limit[i]), result)
        return self._collect_finished(result.slots)

    def _count_prompt_tokens(self, plan: StepPlan) -> None:
        """Count the prompt tokens of a step that were not computed before; after a preemption some are."""
        ends = plan.starts + plan.counts
        known = self._most_computed[plan.slots]
        fresh = np.minimum(ends, self.state.num_prompt[plan.slots]) - np.maximum(plan.starts, known)
        self.counts.prompt_tokens += int(np.maximum(fresh, 0).sum())
        self._most_computed[plan.slots] = np.maximum(known, ends)

    def fork(self, parent: Sequence, group: SequenceGroup, child: Sequence) -> None:
        """Add `child` to the parent's running group as a copy of it that shares all its blocks."""
        state, source = self.state, parent.slot
        slot = self._occupy(child)
        length = int(state.num_tokens[source])
        state.token_ids[slot, :length] = state.token_ids[source, :length]
        state.num_tokens[slot], state.num_computed[slot] = length, state.num_computed[source]
        self.blocks.fork(source, slot)
        group.sequences.append(child)

    def abort(self) -> None:
        """Forget all work: every block is free or cached afterwards."""
        for group in self.running:
            for sequence in group.live:
                if sequence.slot >= 0:  # not when it was interrupted while it was being admitted
                    self._vacate(sequence)
        self.running.clear()
        self.waiting.clear()

    def check(self) -> None:
        """Assert the invariants of the scheduler and of its block manager."""
        self.blocks.check()
        occupied = {sequence.slot for group in self.running for sequence in group.live}
        assert occupied == {slot for slot, sequence in enumerate(self._by_slot) if sequence is not None}
        assert occupied.isdisjoint(self._free_slots)
        assert len(occupied) + len(self._free_slots) == len(self._by_slot)
        for slot in range(len(self._by_slot)):
            if slot in occupied:
                assert self.state.num_computed[slot] < self.state.num_tokens[slot] <= self._max_total[slot]
                assert self.blocks.blocks_for(int(self.state.num_computed[slot])) <= self.state.num_blocks[slot]
            else:
                assert self.state.num_blocks[slot] == 0

    # --- what one step needs -------------------------------------------------------------------------------------

    def _running_slots(self) -> NDArray[np.int32]:
        if self._order is None:
            self._order = np.array([s.slot for group in self.running for s in group.live], np.int32)
        return self._order

    def _divide_budget(self, slots: NDArray[np.int32]) -> NDArray[np.int32]:
        """Tokens for each running sequence, in order while the budget lasts. A prompt in chunks is always the last
        admitted, so it never holds up the sequences that are generating."""
        remaining = self.state.num_tokens[slots] - self.state.num_computed[slots]
        before = np.cumsum(remaining) - remaining
        counts: NDArray[np.int32] = np.clip(self.max_batch_tokens - before, 0, remaining).astype(np.int32)
        return counts

    def _blocks_needed(self, slots: NDArray[np.int32], counts: NDArray[np.int32]) -> NDArray[np.int32]:
        ends = self.state.num_computed[slots] + counts
        fresh = -(-ends // self.blocks.block_size) - self.state.num_blocks[slots]
        return np.where(counts > 0, np.maximum(fresh, 0) + self.blocks.needs_copy(slots), 0)

    def _make_room(self) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32], bool]:
        """Preempt the last admitted groups until what the others need fits: the slots that stay, the tokens and blocks
        each gets in this step, and whether any group was preempted."""
        preempted = False
        while True:
            slots = self._running_slots()
            counts = self._divide_budget(slots)
            needed = self._blocks_needed(slots, counts)
            if needed.sum() <= self.blocks.num_available:
                return slots, counts, needed, preempted
            assert len(self.running) > 1, "a group that was admitted cannot outgrow the pool"
            self._preempt(self.running.pop())
            preempted = True

    def _allocate(
        self, slots: NDArray[np.int32], counts: NDArray[np.int32], needed: NDArray[np.int32]
    ) -> list[tuple[int, int]]:
        """Fresh blocks and private copies for the tokens about to be written."""
        copies = []
        for i in np.flatnonzero(needed).tolist():
            slot = int(slots[i])
            copy = self.blocks.make_private(slot)
            if copy is not None:
                copies.append(copy)
            end = int(self.state.num_computed[slot] + counts[i])
            self.blocks.append(slot, max(0, self.blocks.blocks_for(end) - int(self.state.num_blocks[slot])))
        return copies

    def _admit(
        self, slots: NDArray[np.int32], counts: NDArray[np.int32]
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Admit waiting groups in order while slots, budget and blocks last."""
        budget = self.max_batch_tokens - int(counts.sum())
        new_slots, new_counts = [], []
        # What the running groups were promised: the rest of their prompts, and a block each to grow into, without which
        # a full pool would preempt the newcomer at once.
        promised = int(self._blocks_needed(slots, self.state.num_tokens[slots] - self.state.num_computed[slots]).sum())
        promised += len(self.running)
        while self.waiting and budget > 0 and len(self.waiting[0].live) <= len(self._free_slots):
            group = self.waiting[0]
            if not self._fits(group, self.blocks.num_available - promised):
                break
            self.waiting.popleft()
            self.running.append(group)
            promised += 1
            for sequence in group.live:
                slot = self._start(sequence)
                remaining = int(self.state.num_tokens[slot] - self.state.num_computed[slot])
                count = min(remaining, budget)
                budget -= count
                if count:
                    end = int(self.state.num_computed[slot]) + count
                    self.blocks.append(slot, self.blocks.blocks_for(end) - int(self.state.num_blocks[slot]))
                promised += self.blocks.blocks_for(len(sequence.token_ids)) - int(self.state.num_blocks[slot])
                new_slots.append(slot)
                new_counts.append(count)
        if not new_slots:
            return slots, counts
        return (
            np.concatenate([slots, np.array(new_slots, np.int32)]),
            np.concatenate([counts, np.array(new_counts, np.int32)]),
        )

    def _fits(self, group: SequenceGroup, spare: int) -> bool:
        """Whether all tokens a group has so far fit into `spare` blocks, or into the pool when nothing else runs.

        A group that did not fit is looked at again only when there are more blocks to spare than then: looking for its
        prefix takes time in proportion to its length, in each step.
        """
        if not self.running:
            spare = self.blocks.num_available
        elif self._refused[0] is group and spare <= self._refused[1]:
            return False
        needed = 0
        for sequence in group.live:
            cached, revived = self.blocks.match_prefix(sequence.token_ids)
            needed += self.blocks.blocks_for(len(sequence.token_ids)) - len(cached) + revived
        self._refused = (group, spare) if needed > spare else (None, 0)
        return needed <= spare

    def _start(self, sequence: Sequence) -> int:
        """Give a waiting sequence a slot and the blocks of its longest cached prefix."""
        order = self._order
        state, slot, length = self.state, self._occupy(sequence), len(sequence.token_ids)
        if order is not None:  # the newly admitted come last
            self._order = np.append(order, np.int32(slot))
        state.token_ids[slot, :length] = sequence.token_ids
        state.num_tokens[slot] = length
        blocks, _ = self.blocks.match_prefix(sequence.token_ids)
        self.blocks.adopt(slot, blocks)
        hit = len(blocks) * self.blocks.block_size
        state.num_computed[slot] = hit
        if sequence.cached_tokens < 0:
            sequence.cached_tokens = min(hit, sequence.num_prompt)
            self.counts.cached_tokens += sequence.cached_tokens
        return slot

    def _bans(self, sampled: list[int]) -> dict[int, tuple[int, ...]]:
        """End ids of the sequences below `min_tokens`; a sequence that reached it leaves the list for good."""
        for slot, sequence in list(self._banned.items()):
            if self.state.num_tokens[slot] - sequence.num_prompt >= sequence.params.min_tokens:
                del self._banned[slot]
        return {slot: tuple(self._banned[slot].end_ids) for slot in sampled if slot in self._banned}

    # --- what became of a step -----------------------------------------------------------------------------------

    def _judge(self, slot: int, token: int, at_limit: bool, result: StepResult) -> None:
        sequence = self._sequence(slot)
        if slot in self._logprobs:
            found = result.logprobs[slot]
            sequence.logprobs.append(TokenLogprob(token, found.chosen, found.top_ids, found.top_values))
        if token in sequence.end_ids:
            sequence.finish(Status.OK, FinishReason.STOP)
            return
        if sequence.stop_checker is not None:
            sequence.final_text = sequence.stop_checker.append(token)
            if sequence.final_text is not None:
                sequence.finish(Status.OK, FinishReason.STOP)
                return
        if at_limit:
            sequence.finish(Status.OK, FinishReason.LENGTH)

    def _collect_finished(self, slots: NDArray[np.int32]) -> list[SequenceGroup]:
        finished = [s for slot in slots.tolist() if (s := self._sequence(slot)).is_finished]
        if not finished:
            return []
        for sequence in finished:
            self._vacate(sequence)
        done = [group for group in self.running if not group.live]
        self.running = [group for group in self.running if group.live]
        return done

    # --- slots ---------------------------------------------------------------------------------------------------

    def _sequence(self, slot: int) -> Sequence:
        sequence = self._by_slot[slot]
        assert sequence is not None
        return sequence

    def _occupy(self, sequence: Sequence) -> int:
        slot, params, state = self._free_slots.pop(), sequence.params, self.state
        sequence.slot, self._by_slot[slot], self._order = slot, sequence, None
        state.num_prompt[slot], state.key[slot] = sequence.num_prompt, sequence.key
        state.temperature[slot], state.top_k[slot] = params.temperature, params.top_k
        state.top_p[slot], state.min_p[slot] = params.top_p, params.min_p
        self._max_total[slot], self._most_computed[slot] = sequence.max_total, sequence.most_computed
        few = len(sequence.end_ids) <= MAX_UNWATCHED_END_IDS
        self._end_ids[slot] = -1
        if few:
            self._end_ids[slot, : len(sequence.end_ids)] = list(sequence.end_ids)
        self._watched[slot] = not few or sequence.stop_checker is not None or params.logprobs is not None
        if params.logprobs is not None:
            self._logprobs[slot] = params.logprobs
        if params.min_tokens and sequence.end_ids:
            self._banned[slot] = sequence
        return slot

    def _vacate(self, sequence: Sequence) -> None:
        """Take a sequence out of its slot; it keeps its tokens, its blocks are released."""
        slot = sequence.slot
        sequence.token_ids = self.state.token_ids[slot, : self.state.num_tokens[slot]].copy()
        sequence.most_computed = int(self._most_computed[slot])
        self.blocks.release(slot)
        self._banned.pop(slot, None)
        self._logprobs.pop(slot, None)
        self._by_slot[slot], sequence.slot, self._order = None, -1, None
        self._free_slots.append(slot)

    def _preempt(self, group: SequenceGroup) -> None:
        for sequence in group.live:
            self._vacate(sequence)
        self.waiting.appendleft(group)
        self.counts.preemptions += 1
