"""The scheduler: which sequences compute how many tokens in the next step, and what became of the last one."""

from collections import deque

import numpy as np
from numpy.typing import NDArray

from pagedgen.request import Status
from pagedgen.scheduling.blocks import BlockManager
from pagedgen.scheduling.budget import StepBudget
from pagedgen.scheduling.in_flight import StepsInFlight
from pagedgen.scheduling.running import RunningGroups, SchedulerCounts
from pagedgen.scheduling.sequence import Sequence, SequenceGroup, random_key
from pagedgen.scheduling.slots import RunningSlots
from pagedgen.step import LogprobResult, SlotArrays, StepPlan, StepResult

# Waiting groups that may be passed over in a step because what they begin with is just being computed.
MAX_PASSED_OVER = 64


class Scheduler:
    """Continuous batching over the blocks of one pool.

    There is no prefill phase and no decode phase: a sequence has `num_computed` and `num_tokens`, and each step moves
    the first toward the second within a budget of tokens. Chunked prefill, prefix hits and recomputation after a
    preemption are the same rule. Running groups go first, in order of admission; the last admitted is preempted when
    blocks run out; new groups are admitted only in a step without preemption.

    A group begins as one sequence that computes the prompt. Its samples are copies made when the first token is drawn,
    its beams copies made at each branching: a copy adds references to blocks, and a block is copied only when one of
    several sequences writes into it.

    A step may be planned while others are in flight, whose tokens are not known yet: whoever drew one goes on from it,
    wherever it is. Beams wait for their continuations, and so do the few others of `RunningSlots.waits`.
    """

    def __init__(self, state: SlotArrays, blocks: BlockManager, max_batch_tokens: int) -> None:
        self.state, self.blocks, self.budget = state, blocks, StepBudget(max_batch_tokens)
        self.waiting: deque[SequenceGroup] = deque()
        self.slots = RunningSlots(state)
        self.counts = SchedulerCounts()
        self.running = RunningGroups(self.slots, blocks, self.counts)
        self.in_flight = StepsInFlight(state)
        # The group that last did not fit, and the blocks there were to spare for it.
        self._refused: tuple[SequenceGroup | None, int] = (None, 0)
        # The slots of first samples whose others do not exist yet.
        self._first_samples: set[int] = set()

    @property
    def num_running(self) -> int:
        return self.slots.num_running

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running.groups)

    @property
    def capacity(self) -> int:
        """Tokens that one sequence alone could have in the pool."""
        return self.blocks.num_blocks * self.blocks.block_size

    def add(self, group: SequenceGroup) -> None:
        self.waiting.append(group)

    def schedule(self) -> StepPlan | None:
        """The next step, or None when nothing is left to do; with steps in flight also when their results have to be
        entered first. Whatever was finished has been taken out by `update`."""
        room = self._make_room()
        if room is None:
            return None
        slots, counts, needed, preempted = room
        copies = self.running.allocate(slots, counts, needed)
        if not preempted:
            slots, counts = self._admit(slots, counts)
        scheduled = counts > 0
        slots, counts = slots[scheduled], counts[scheduled]
        if not len(slots):
            assert self.in_flight or not self.has_work, "there is work, but nothing could be scheduled"
            return None
        starts = self.state.num_scheduled[slots]
        samples = starts + counts == self.state.num_tokens[slots] + self.state.num_pending[slots]
        plan = StepPlan(
            slots=slots,
            starts=starts,
            counts=counts,
            samples=samples,
            copies=np.array(copies, np.int32).reshape(-1, 2),
            extra_keys=self._extra_keys(slots[samples]),
            **self.slots.asks.of_step(slots, starts, counts, samples),
        )
        self.in_flight.enter(plan)
        return plan

    def update(self, plan: StepPlan, result: StepResult) -> list[SequenceGroup]:
        """Enter the tokens of the oldest step in flight and return the groups that finished; their blocks are free or
        cached again."""
        state = self.state
        plan, result = self.in_flight.leave(plan, result)
        self.budget.step_succeeded()
        self.blocks.written(plan.slots, plan.starts, plan.counts)
        state.num_computed[plan.slots] += plan.counts
        self._count_prompt_tokens(plan)
        for slot, found in result.prompt_logprobs.items():
            self.slots[slot].enter_prompt_logprobs(found, state.token_ids[slot])
        # Slots name their sequences only until the first is given back, so what came for beams is handed out before.
        searches = self._hand_out_continuations(result)
        drawn = result.tokens >= 0
        ended = self._end_unusable(result.slots[~drawn].tolist())
        if plan.beams:
            drawn &= ~np.isin(result.slots, list(plan.beams))
        slots, tokens, logprobs = result.slots[drawn], result.tokens[drawn], result.logprobs
        if result.extra:
            slots, tokens, logprobs = self._add_samples(slots, tokens, result)
        ended += self._advance(searches)
        state.token_ids[slots, state.num_tokens[slots]] = tokens
        state.num_tokens[slots] += 1
        self.counts.output_tokens += len(slots)
        at_limit = state.num_tokens[slots] >= self.slots.max_total[slots]
        at_end = (tokens[:, None] == self.slots.end_ids[slots]).any(axis=1)
        for i in np.flatnonzero(at_limit | at_end | self.slots.watched[slots]).tolist():
            sequence = self.slots[int(slots[i])]
            sequence.enter_token(int(tokens[i]), bool(at_limit[i]), logprobs.get(sequence.slot))
            if sequence.is_finished:
                ended.append(self._take_out(sequence))
        for group in self.running.groups:
            if group.forks:
                self.running.make_forks(group)
        return self._retire(ended)

    def step_failed(self, plan: StepPlan) -> list[SequenceGroup]:
        """Take back the only step in flight, which ran out of memory, and make the next ones smaller.

        All running groups wait again, in their order and before all others: that gives back the blocks of the step and
        forgets its copies, whether or not the device came to them, while what earlier steps computed stays in the
        prefix cache. Nothing of the step itself is ever taken for computed. Where the step could not be smaller, its
        group does not fit even alone: it ends, and is returned.
        """
        self.counts.out_of_memory += 1
        ended = []
        slots = self.in_flight.take_back(plan)
        if self.budget.is_least:
            ended += [self._end_out_of_memory(self.slots.group(slot)) for slot in slots.tolist()]
            self.budget.restore()
        else:
            self.budget.step_failed(plan.num_tokens)
        for group in reversed(self.running.groups):
            self._put_back(group)
        return ended

    def abort(self) -> None:
        """Forget all work: every block is free or cached afterwards."""
        self.in_flight.clear()
        for group in list(self.running.groups):
            self.running.leave(group)
        for slot in self.slots.occupied:  # of a group that was interrupted while it was being admitted
            self.running.vacate(self.slots[slot])
        self.running.unheld_slots = len(self.state.num_tokens)
        self._first_samples.clear()
        self.waiting.clear()

    def check(self) -> None:
        """Assert the invariants of the running groups and of the block manager."""
        self.running.check()
        assert self._first_samples <= self.slots.occupied

    # --- what one step needs -------------------------------------------------------------------------------------

    def _divide_budget(self, slots: NDArray[np.int32]) -> NDArray[np.int32]:
        """Tokens for each running sequence, in order while the budget lasts. A prompt in chunks is always the last
        admitted, so it never holds up the sequences that are generating."""
        remaining = self.running.remaining(slots)
        before = np.cumsum(remaining) - remaining
        counts: NDArray[np.int32] = np.clip(self.budget.tokens - before, 0, remaining).astype(np.int32)
        return counts

    def _make_room(self) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32], bool] | None:
        """Preempt the last admitted groups until what the others need fits: the slots that stay, the tokens and blocks
        each gets in this step, and whether any group was preempted. None where steps in flight have to end first."""
        preempted = False
        while True:
            slots = self.running.order
            counts = self._divide_budget(slots)
            needed = self.running.blocks_needed(slots, counts)
            if needed.sum() <= self.blocks.num_available:
                return slots, counts, needed, preempted
            if self.in_flight:
                return None
            assert len(self.running.groups) > 1, "a group that was admitted cannot outgrow the pool"
            self._preempt(self.running.groups[-1])
            preempted = True

    def _extra_keys(self, sampled: NDArray[np.int32]) -> dict[int, NDArray[np.uint64]]:
        """The keys of the samples that come about in this step."""
        keys = {}
        for slot in self._first_samples.intersection(sampled.tolist()):
            first = self.slots[slot]
            seed, row = first.params.seed, str(first.request.id)
            keys[slot] = np.array([random_key(seed, row, i) for i in range(1, first.params.n)], np.uint64)
        return keys

    # --- admission -----------------------------------------------------------------------------------------------

    def _admit(
        self, slots: NDArray[np.int32], counts: NDArray[np.int32]
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Admit waiting groups in order while slots, budget and blocks last. One that begins with a block that is just
        being computed is passed over: in a later step it finds it in the prefix cache."""
        budget = self.budget.tokens - int(counts.sum())
        if not self.waiting or budget <= 0:
            return slots, counts
        # What the running groups were promised: the rest of their prompts and copies, and a block for each sequence to
        # grow into, without which a full pool would preempt the newcomer at once.
        promised = int(self.running.blocks_needed(slots, self.running.remaining(slots)).sum()) + self.running.num_held
        promised += sum(self.running.blocks_of_forks(group) for group in self.running.groups if group.forks)
        computing = slots[self.state.num_computed[slots] < self.state.num_prompt[slots]]
        under_way = self._prefixes_under_way(computing.tolist())
        new_slots, new_counts, position = [], [], 0
        while position < min(len(self.waiting), MAX_PASSED_OVER) and budget > 0:
            group = self.waiting[position]
            if group.num_slots > self.running.unheld_slots:
                break
            first = group.first
            cached = self._fit(group, first, self.blocks.num_available - promised)
            if cached is None:
                break
            if under_way and self.blocks.next_prefix(first.token_ids, cached) in under_way:
                position += 1
                continue
            del self.waiting[position]
            slot = self._start(group, first, cached)
            computed, known = len(cached) * self.blocks.block_size, len(first.token_ids)
            count = min(known - computed, int(self.slots.pause_at[slot]) - computed, budget)
            budget -= count
            fresh = self.blocks.blocks_for(computed + count) - len(cached)
            self.blocks.append(slot, fresh)
            promised += self.blocks.blocks_for(known) - len(cached) - fresh
            promised += self.running.blocks_of_forks(group) + group.held_slots
            if computed < first.num_prompt:
                under_way |= self._prefixes_under_way([slot])
            new_slots.append(slot)
            new_counts.append(count)
        if not new_slots:
            return slots, counts
        return self.running.append_to_order(slots, new_slots), np.concatenate([counts, np.array(new_counts, np.int32)])

    def _prefixes_under_way(self, slots: list[int]) -> set[tuple[int, bytes]]:
        """The next block of each of these slots, as its key in the prefix cache, where it is known."""
        if not self.blocks.prefix_cache:
            return set()
        keys = map(self.blocks.prefix_under_way, slots)
        return {key for key in keys if key is not None}

    def _fit(self, group: SequenceGroup, first: Sequence, spare: int) -> list[int] | None:
        """The prefix cache's blocks for the first sequence of a waiting group; None when not all tokens the group has
        so far fit into `spare` blocks, or into the pool when nothing else runs.

        A group that did not fit is looked at again only when there are more blocks to spare than then: looking for its
        prefix takes time in proportion to its length, in each step.
        """
        if not self.running.groups:
            spare = self.blocks.num_available
        elif self._refused[0] is group and spare <= self._refused[1]:
            return None
        cached, revived = self._match_prefix(first)
        needed = self.blocks.blocks_for(len(first.token_ids)) - len(cached) + revived
        needed += self.running.blocks_of_forks(group)
        self._refused = (group, spare) if needed > spare else (None, 0)
        return cached if needed <= spare else None

    def _match_prefix(self, sequence: Sequence) -> tuple[list[int], int]:
        """The prefix cache's blocks for a waiting sequence; none while all of its prompt has to be computed."""
        if sequence.params.prompt_logprobs is not None and len(sequence.prompt_logprobs) < sequence.num_prompt - 1:
            return [], 0
        return self.blocks.match_prefix(sequence.token_ids)

    def _start(self, group: SequenceGroup, first: Sequence, blocks: list[int]) -> int:
        """Let a waiting group run, from its longest cached prefix on; the slot of its first sequence."""
        slot = self.running.start(group, first, blocks)
        if group.num_unborn:
            self._first_samples.add(slot)
            self.slots.waits[slot] = True
        if first.cached_tokens < 0:
            first.cached_tokens = min(len(blocks) * self.blocks.block_size, first.num_prompt)
            self.counts.cached_tokens += first.cached_tokens
        return slot

    # --- what became of a step -----------------------------------------------------------------------------------

    def _count_prompt_tokens(self, plan: StepPlan) -> None:
        """Count the prompt tokens of a step that were not computed before; after a preemption some are."""
        ends = plan.starts + plan.counts
        known = self.slots.most_computed[plan.slots]
        fresh = np.minimum(ends, self.state.num_prompt[plan.slots]) - np.maximum(plan.starts, known)
        self.counts.prompt_tokens += int(np.maximum(fresh, 0).sum())
        self.slots.most_computed[plan.slots] = np.maximum(known, ends)

    def _end_unusable(self, slots: list[int]) -> list[SequenceGroup]:
        """End what drew no token because its logits were not usable; a search ends as a whole."""
        ended = []
        for slot in slots:
            if slot not in self.slots:  # its search has ended already
                continue
            sequence, group = self.slots[slot], self.slots.group(slot)
            sequence.finish(Status.NAN_LOGITS)
            if group.beam is not None:
                self.running.vacate(sequence)
                self.running.branch(group, [])
                group.sequences = [sequence]
                ended.append(group)
            else:
                ended.append(self._take_out(sequence))
        return ended

    def _add_samples(
        self, slots: NDArray[np.int32], tokens: NDArray[np.int32], result: StepResult
    ) -> tuple[NDArray[np.int32], NDArray[np.int32], dict[int, LogprobResult]]:
        """The further samples of the prompts that were finished in this step: slots, tokens and log-probabilities with
        theirs added."""
        more_slots, more_tokens, logprobs = [slots], [tokens], dict(result.logprobs)
        for slot, extra in result.extra.items():
            if slot not in self._first_samples:  # its logits were not usable
                continue
            self._first_samples.remove(slot)
            first, group = self.slots[slot], self.slots.group(slot)
            self.slots.waits[slot] = bool(first.bad_words)
            for number in range(len(extra.tokens)):
                sample = first.sibling(number + 1)
                self.running.fork(first, sample)
                group.sequences.append(sample)
                if extra.logprobs:
                    logprobs[sample.slot] = extra.logprobs[number]
            more_slots.append(np.array([sample.slot for sample in group.sequences[1:]], np.int32))
            more_tokens.append(extra.tokens)
        return np.concatenate(more_slots), np.concatenate(more_tokens), logprobs

    def _hand_out_continuations(self, result: StepResult) -> list[SequenceGroup]:
        """Give beams their continuations; the groups all of whose beams now have theirs."""
        for slot, continuations in result.beams.items():
            self.slots[slot].continuations = continuations
        groups = dict.fromkeys(self.slots.group(slot) for slot in result.beams)
        return [g for g in groups if not g.forks and all(beam.continuations is not None for beam in g.running)]

    def _advance(self, searches: list[SequenceGroup]) -> list[SequenceGroup]:
        """One step of each search; the groups of those that ended."""
        ended = []
        for group in searches:
            assert group.beam is not None
            branches = group.beam.advance(group.running, self.slots.tokens)
            group.sequences = self.running.branch(group, branches)
            self.counts.output_tokens += len(branches)
            if not branches:
                group.sequences = group.beam.results
                ended.append(group)
        return ended

    def _take_out(self, sequence: Sequence) -> SequenceGroup:
        """Take a finished sequence out of its slot; its group."""
        group = self.slots.group(sequence.slot)
        self._first_samples.discard(sequence.slot)
        self.running.vacate(sequence)
        return group

    def _retire(self, ended: list[SequenceGroup]) -> list[SequenceGroup]:
        """Let go of the slots that groups with ended sequences need no more; the groups that are done."""
        done = []
        for group in dict.fromkeys(ended):
            if group.live:
                self.running.release_slots(group, group.held_slots - group.num_slots)
            else:
                self.running.leave(group)
                done.append(group)
        return done

    def _preempt(self, group: SequenceGroup) -> None:
        self._put_back(group)
        self.counts.preemptions += 1

    def _put_back(self, group: SequenceGroup) -> None:
        """Let a running group wait again, before all others; all it has drawn is kept, what it computed is not."""
        self._leave(group)
        group.plan_forks()
        first = group.first
        if not first.most_computed:  # it was admitted for nothing: what it finds cached is what counts next time
            self.counts.cached_tokens -= first.cached_tokens
            first.cached_tokens = -1
        self.waiting.appendleft(group)

    def _end_out_of_memory(self, group: SequenceGroup) -> SequenceGroup:
        """End what is live of a group; a search ends as a whole."""
        self._leave(group)
        if group.beam is not None:
            group.sequences = group.sequences[:1]
        for sequence in group.live:
            sequence.finish(Status.OUT_OF_MEMORY)
        return group

    def _leave(self, group: SequenceGroup) -> None:
        self._first_samples.difference_update(sequence.slot for sequence in group.running)
        self.running.leave(group)
