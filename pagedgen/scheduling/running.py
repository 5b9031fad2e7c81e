"""The running groups: which slots and blocks their sequences have, and how copies of sequences come about."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagedgen.scheduling.beam import Branch
from pagedgen.scheduling.blocks import BlockManager
from pagedgen.scheduling.sequence import Sequence, SequenceGroup
from pagedgen.scheduling.slots import RunningSlots


@dataclass(slots=True)
class SchedulerCounts:
    """Running totals since the start, for the statistics. branchings: copies made of running sequences. out_of_memory:
    steps that ran out of memory."""

    preemptions: int = 0
    out_of_memory: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    branchings: int = 0


class RunningGroups:
    """The groups that were admitted, in order of admission.

    A group holds as many slots as it will ever need at one time, whether its sequences exist yet or not: it can never
    come to a stop for want of one. unheld_slots: slots that no group holds.
    """

    def __init__(self, slots: RunningSlots, blocks: BlockManager, counts: SchedulerCounts) -> None:
        self.groups: list[SequenceGroup] = []
        self.slots, self.blocks, self.counts, self.state = slots, blocks, counts, slots.state
        self.unheld_slots = len(slots.state.num_tokens)
        # Slots of the running sequences in order of priority; rebuilt only when the set of running sequences changes.
        self._order: NDArray[np.int32] | None = None

    @property
    def num_held(self) -> int:
        return len(self.state.num_tokens) - self.unheld_slots

    @property
    def order(self) -> NDArray[np.int32]:
        """The slots of the running sequences in order of priority, int32 [S]."""
        if self._order is None:
            self._order = np.array([s.slot for group in self.groups for s in group.running], np.int32)
        return self._order

    def append_to_order(self, order: NDArray[np.int32], slots: list[int]) -> NDArray[np.int32]:
        """`order` with the slots of newly admitted groups, which come last."""
        longer = np.concatenate([order, np.array(slots, np.int32)])
        if self._order is not None:  # else copies have come about, and it is rebuilt
            self._order = longer
        return longer

    def start(self, group: SequenceGroup, first: Sequence, blocks: list[int]) -> int:
        """Let a waiting group run: `first`, its first live sequence, gets a slot, which is returned, and `blocks`,
        which hold its first tokens."""
        state = self.state
        group.held_slots = group.num_slots
        self.unheld_slots -= group.held_slots
        self.groups.append(group)
        slot, length = self.slots.occupy(first, group), len(first.token_ids)
        state.token_ids[slot, :length] = first.token_ids
        state.num_tokens[slot] = length
        self._adopt(slot, blocks)
        if group.forks:
            self.make_forks(group)
        return slot

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let `child`, a copy of a running sequence, run beside it: it shares all its blocks."""
        state, source = self.state, parent.slot
        length, computed = int(state.num_tokens[source]), int(state.num_computed[source])
        slot = self._occupy(child, self.slots.group(source), state.token_ids[source, :length])
        self.blocks.fork(source, slot, computed)
        self._set_computed(slot, computed)
        self.slots.most_computed[slot] = self.slots.most_computed[source]
        self.counts.branchings += 1

    def branch(self, group: SequenceGroup, branches: list[Branch]) -> list[Sequence]:
        """The beams of the next step: those without a branch give their blocks back first, so that a lone survivor
        writes on where it was; then each further branch of a beam is a copy of it."""
        parents = {branch.parent for branch in branches}
        for beam in group.running:
            if beam not in parents:
                self.vacate(beam)
        beams: list[Sequence] = []
        for branch in branches:
            beam = branch.parent
            if beam in parents:
                parents.remove(beam)
            else:
                beam = branch.parent.copy()
                self.fork(branch.parent, beam)
            beams.append(beam)
        for beam, branch in zip(beams, branches, strict=True):
            beam.running_score, beam.cumulative_logprob = float(branch.running_score), branch.cumulative_logprob
            beam.division, beam.stop_checker, beam.continuations = branch.division, branch.stop_checker, None
            self.state.token_ids[beam.slot, self.state.num_tokens[beam.slot]] = branch.token
            self.state.num_tokens[beam.slot] += 1
        self._order = None
        return beams

    def make_forks(self, group: SequenceGroup) -> None:
        """Let the copies run whose parents have computed what they share, after a preemption."""
        state, size = self.state, self.blocks.block_size
        waiting, made = group.forks, True
        while made:
            made = False
            for fork in list(waiting):
                source = fork.parent.slot
                if source < 0 or state.num_computed[source] < fork.at:
                    continue
                # Past the point where they part, the parent's last block may be full already: only whole ones are
                # shared.
                shared = fork.at if state.num_computed[source] == fork.at else fork.at // size * size
                slot = self._occupy(fork.child, group, fork.child.token_ids)
                blocks, _ = self.blocks.match_prefix(fork.child.token_ids)
                if len(blocks) * size > shared:  # its own tokens are still in the prefix cache
                    self._adopt(slot, blocks)
                else:
                    self.blocks.fork(source, slot, shared)
                    self._set_computed(slot, shared)
                self.counts.branchings += 1
                waiting.remove(fork)
                made = True
        for sequence in group.running:
            pauses = [fork.at for fork in waiting if fork.parent is sequence]
            self.slots.pause_at[sequence.slot] = min(pauses, default=self.slots.NEVER)

    def vacate(self, sequence: Sequence) -> None:
        """Take a sequence out of its slot; it keeps its tokens, its blocks are released."""
        self.blocks.release(self.slots.vacate(sequence))
        self._order = None

    def leave(self, group: SequenceGroup) -> None:
        """Take a group out: it holds no slots and no blocks any more."""
        for sequence in group.running:
            self.vacate(sequence)
        self.groups.remove(group)
        self.release_slots(group, group.held_slots)
        group.forks = []

    def release_slots(self, group: SequenceGroup, count: int) -> None:
        """Slots that the group will not need any more."""
        group.held_slots -= count
        self.unheld_slots += count

    def blocks_of_forks(self, group: SequenceGroup) -> int:
        """Blocks for what the group's copies that are still to be made do not share with their parents."""
        if not group.forks:
            return 0
        blocks = self.blocks
        return sum(blocks.blocks_for(len(fork.child.token_ids)) - fork.at // blocks.block_size for fork in group.forks)

    def remaining(self, slots: NDArray[np.int32]) -> NDArray[np.int32]:
        """The tokens of each that can be planned for: to its end, or to where it pauses for a copy to be made of it.
        The last token that a sequence may have is never computed."""
        state, pending = self.state, self.state.num_pending[slots]
        upto = np.minimum(state.num_tokens[slots] + pending, self.slots.max_total[slots] - 1)
        upto = np.minimum(upto, self.slots.pause_at[slots])
        remaining: NDArray[np.int32] = upto - state.num_scheduled[slots]
        remaining[(pending > 0) & self.slots.waits[slots]] = 0
        return remaining

    def blocks_needed(self, slots: NDArray[np.int32], counts: NDArray[np.int32]) -> NDArray[np.int32]:
        """The blocks, private copies included, that each has to take to compute `counts` tokens."""
        ends = self.state.num_scheduled[slots] + counts
        writes = counts > 0
        needed = np.where(writes, np.maximum(-(-ends // self.blocks.block_size) - self.state.num_blocks[slots], 0), 0)
        needed[writes] += self.blocks.needs_copy(slots[writes])
        return needed

    def allocate(
        self, slots: NDArray[np.int32], counts: NDArray[np.int32], needed: NDArray[np.int32]
    ) -> list[tuple[int, int]]:
        """Fresh blocks and private copies for the tokens about to be written; (source, destination) of each copy."""
        copies = []
        for i in np.flatnonzero(needed).tolist():
            slot = int(slots[i])
            copy = self.blocks.make_private(slot)
            if copy is not None:
                copies.append(copy)
            end = int(self.state.num_scheduled[slot] + counts[i])
            self.blocks.append(slot, max(0, self.blocks.blocks_for(end) - int(self.state.num_blocks[slot])))
        return copies

    def check(self) -> None:
        """Assert the invariants of the groups, of their slots and of the block manager."""
        self.blocks.check()
        state, max_seqs = self.state, len(self.state.num_tokens)
        running = [sequence for group in self.groups for sequence in group.running]
        occupied = {sequence.slot for sequence in running}
        assert occupied == self.slots.occupied
        assert occupied.isdisjoint(self.slots.free)
        assert len(occupied) + len(self.slots.free) == max_seqs
        assert self.unheld_slots + sum(group.held_slots for group in self.groups) == max_seqs
        for group in self.groups:
            assert len(group.running) + len(group.forks) == len(group.live) <= group.held_slots
        for sequence in running:
            slot = sequence.slot
            computed, scheduled = state.num_computed[slot], state.num_scheduled[slot]
            known, pending = state.num_tokens[slot], state.num_pending[slot]
            assert computed + (sequence.continuations is None) <= known <= sequence.max_total
            assert computed <= scheduled <= known + pending <= sequence.max_total
            assert self.blocks.blocks_for(int(scheduled)) <= state.num_blocks[slot]
        assert not state.num_blocks[self.slots.free].any()

    def _occupy(self, sequence: Sequence, group: SequenceGroup, token_ids: NDArray[np.int32]) -> int:
        slot = self.slots.occupy(sequence, group)
        self.state.token_ids[slot, : len(token_ids)] = token_ids
        self.state.num_tokens[slot] = len(token_ids)
        self._order = None
        return slot

    def _adopt(self, slot: int, blocks: list[int]) -> None:
        self.blocks.adopt(slot, blocks)
        self._set_computed(slot, len(blocks) * self.blocks.block_size)

    def _set_computed(self, slot: int, count: int) -> None:
        self.state.num_computed[slot] = self.state.num_scheduled[slot] = count
