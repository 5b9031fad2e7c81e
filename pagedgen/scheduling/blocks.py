"""The block manager: which physical block holds which tokens, who refers to it, and what may be reused."""

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from pagedgen.step import SlotArrays

ROOT = 0


class BlockManager:
    """Reference-counted blocks behind the block tables of `state`, with a prefix cache and copy-on-write.

    A block is *free* (no content worth keeping), *cached* (no references, full, content and prefix known, reusable) or
    *used* (referenced by at least one table). A full block is immutable and may be shared; writing into a partly filled
    one that has more than one reference copies it first.

    The prefix cache is a dictionary from (node of the parent block's prefix, the block's token ids) to a block. A node
    is a number given once to each distinct prefix, so equal keys mean equal prefixes: dictionaries compare the token
    ids as well as their hash, and a collision can never serve the wrong block.
    """

    def __init__(self, num_blocks: int, state: SlotArrays, prefix_cache: bool = True) -> None:
        self.num_blocks, self.block_size, self.state, self.prefix_cache = (
            num_blocks,
            state.block_size,
            state,
            prefix_cache,
        )
        self.ref_count = np.zeros(num_blocks, np.int32)
        self.fill = np.zeros(num_blocks, np.int32)
        self.filled_slots = 0
        self.logical_blocks = 0
        self.num_copies = 0
        self.num_touched = 0
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._block_of: dict[tuple[int, bytes], int] = {}
        self._key_of: dict[int, tuple[int, bytes]] = {}
        self._node_of: dict[int, int] = {}
        self._next_node = ROOT + 1
        # The node each slot's table has been registered up to, and how many of its blocks that covers.
        self._slot_node = [ROOT] * len(state.num_blocks)
        self._slot_registered = [0] * len(state.num_blocks)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_available(self) -> int:
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_available

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def next_prefix(self, token_ids: NDArray[np.int32], blocks: list[int]) -> tuple[int, bytes] | None:
        """The first block of `token_ids` after `blocks`, which `match_prefix` found, as the key it would have in the
        prefix cache; None when there is no such full block to match."""
        return self._prefix_key(self._node_of[blocks[-1]] if blocks else ROOT, token_ids[:-1], len(blocks))

    def prefix_under_way(self, slot: int) -> tuple[int, bytes] | None:
        """The key under which the next block of `slot` enters the prefix cache, when all its tokens are known."""
        tokens = self.state.token_ids[slot, : self.state.num_tokens[slot]]
        return self._prefix_key(self._slot_node[slot], tokens, self._slot_registered[slot])

    def _prefix_key(self, node: int, token_ids: NDArray[np.int32], index: int) -> tuple[int, bytes] | None:
        tokens = token_ids[index * self.block_size : (index + 1) * self.block_size]
        return (node, tokens.tobytes()) if len(tokens) == self.block_size else None

    def match_prefix(self, token_ids: NDArray[np.int32]) -> tuple[list[int], int]:
        """The blocks that hold the longest cached prefix of `token_ids`, and how many of them are cached (not used).

        At least the last token is left out of the match, because its logits have to be computed.
        """
        blocks: list[int] = []
        if not self.prefix_cache:
            return blocks, 0
        node = ROOT
        for i in range((len(token_ids) - 1) // self.block_size):
            tokens = token_ids[i * self.block_size : (i + 1) * self.block_size]
            block = self._block_of.get((node, tokens.tobytes()))
            if block is None:
                break
            node = self._node_of[block]
            blocks.append(block)
        return blocks, sum(block in self._cached for block in blocks)

    def adopt(self, slot: int, blocks: list[int]) -> None:
        """Start the empty table of `slot` with the blocks `match_prefix` found."""
        assert self.state.num_blocks[slot] == 0
        for block in blocks:
            self._add_reference(block)
        self._append_to_table(slot, blocks)
        self._slot_registered[slot] = len(blocks)
        self._slot_node[slot] = self._node_of[blocks[-1]] if blocks else ROOT

    def append(self, slot: int, count: int) -> None:
        """Append `count` fresh blocks to the table of `slot`. The caller has checked `num_available`."""
        self._append_to_table(slot, [self._take() for _ in range(count)])

    def fork(self, parent: int, child: int, num_tokens: int) -> None:
        """Give the empty table of `child` the blocks of `parent` that hold its first `num_tokens` tokens: only
        references are added."""
        state = self.state
        assert state.num_blocks[child] == 0
        count, partial = self.blocks_for(num_tokens), num_tokens % self.block_size
        blocks = state.block_table[parent, :count]
        assert not partial or self.fill[blocks[-1]] == partial, "a block can only be shared as far as it is filled"
        np.add.at(self.ref_count, blocks, 1)
        self._append_to_table(child, blocks.tolist())
        if self._slot_registered[parent] <= num_tokens // self.block_size:
            self._slot_node[child] = self._slot_node[parent]
            self._slot_registered[child] = self._slot_registered[parent]

    def count_by_group(self, slots: NDArray[np.int32], groups: NDArray[np.int64]) -> int:
        """The distinct blocks that the tables of each group's slots refer to, summed over the groups. groups: int64
        [S], one number for the slots that belong together."""
        state = self.state
        counts = state.num_blocks[slots]
        inside = np.arange(counts.max(initial=0)) < counts[:, None]
        blocks = state.block_table[slots, : inside.shape[1]][inside].astype(np.int64)
        _, numbers = np.unique(groups, return_inverse=True)
        return len(np.unique(np.repeat(numbers, counts) * self.num_blocks + blocks))

    def needs_copy(self, slots: NDArray[np.int32]) -> NDArray[np.bool_]:
        """For each of the slots that are about to write, whether it has to copy its block first.

        Where nobody else refers to a block that several of them are about to write into, the last one keeps it.
        """
        state = self.state
        index = state.num_scheduled[slots] // self.block_size
        inside = index < state.num_blocks[slots]
        last = state.block_table[slots, np.where(inside, index, 0)]
        needs: NDArray[np.bool_] = inside & (self.ref_count[last] > 1)
        if needs.any():
            shared = np.flatnonzero(needs)[::-1]
            blocks, first, writers = np.unique(last[shared], return_index=True, return_counts=True)
            needs[shared[first[writers == self.ref_count[blocks]]]] = False
        return needs

    def make_private(self, slot: int) -> tuple[int, int] | None:
        """Copy-on-write of the block that the next token of `slot` goes into: (source, destination), or None when the
        block is the slot's own."""
        state = self.state
        index = int(state.num_scheduled[slot]) // self.block_size
        source = int(state.block_table[slot, index])
        if index >= state.num_blocks[slot] or self.ref_count[source] == 1:
            return None
        destination = self._take()
        state.block_table[slot, index] = destination
        self.ref_count[source] -= 1
        self.fill[destination] = self.fill[source]
        self.filled_slots += int(self.fill[source])
        self.num_copies += 1
        return source, destination

    def written(self, slots: NDArray[np.int32], starts: NDArray[np.int32], counts: NDArray[np.int32]) -> None:
        """Note that `counts` tokens from `starts` on are now in the blocks; blocks that became full enter the cache."""
        ends = starts + counts
        last = self.state.block_table[slots, (ends - 1) // self.block_size]
        new_fill = (ends - 1) % self.block_size + 1
        single = starts // self.block_size == (ends - 1) // self.block_size
        self.filled_slots += int((new_fill - self.fill[last])[single].sum())
        self.fill[last[single]] = new_fill[single]
        for i in np.flatnonzero(~single):
            self._fill_range(int(slots[i]), int(starts[i]), int(ends[i]))
        if self.prefix_cache:
            for i in np.flatnonzero((ends % self.block_size == 0) | ~single):
                self._register(int(slots[i]), int(ends[i]) // self.block_size)

    def release(self, slot: int) -> None:
        """Drop all references of `slot`, tail first, so that the tail of a cached prefix is reused before its head."""
        state = self.state
        count = int(state.num_blocks[slot])
        for block in state.block_table[slot, :count][::-1].tolist():
            self._drop_reference(block)
        state.num_blocks[slot] = 0
        self.logical_blocks -= count
        self._slot_node[slot], self._slot_registered[slot] = ROOT, 0

    def check(self) -> None:
        """Assert the invariants: references of tables equal the counts, and free + cached + used = total."""
        state = self.state
        counted = np.zeros(self.num_blocks, np.int32)
        for slot in np.flatnonzero(state.num_blocks):
            np.add.at(counted, state.block_table[slot, : state.num_blocks[slot]], 1)
        assert (counted == self.ref_count).all(), "reference counts differ from the block tables"
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & cached, "a block is both free and cached"
        assert free | cached == set(np.flatnonzero(self.ref_count == 0).tolist()), "a block is lost"
        assert cached <= self._key_of.keys(), "a cached block has no key"
        assert all(self._block_of[key] == block for block, key in self._key_of.items()), (
            "the prefix index is inconsistent"
        )
        assert len(self._block_of) == len(self._key_of) == len(self._node_of)
        assert not free & self._key_of.keys(), "a free block is still in the prefix index"
        used = self.ref_count > 0
        assert self.filled_slots == self.fill[used].sum(), "filled slots are miscounted"
        assert self.logical_blocks == state.num_blocks.sum(), "logical blocks are miscounted"
        assert all(self.fill[block] == self.block_size for block in self._key_of), "a block in the cache is not full"

    def _append_to_table(self, slot: int, blocks: list[int]) -> None:
        if not blocks:
            return
        start = int(self.state.num_blocks[slot])
        self.state.block_table[slot, start : start + len(blocks)] = blocks
        self.state.num_blocks[slot] = start + len(blocks)
        self.logical_blocks += len(blocks)

    def _take(self) -> int:
        """A block with one reference and no content: a free one, else the least recently used cached one."""
        if self._free:
            block = self._free.pop()
            self.num_touched = max(self.num_touched, block + 1)
        else:
            block, _ = self._cached.popitem(last=False)
            del self._block_of[self._key_of.pop(block)]
            del self._node_of[block]
        self.ref_count[block] = 1
        self.fill[block] = 0
        return block

    def _add_reference(self, block: int) -> None:
        if self.ref_count[block] == 0:
            del self._cached[block]
            self.filled_slots += int(self.fill[block])
        self.ref_count[block] += 1

    def _drop_reference(self, block: int) -> None:
        self.ref_count[block] -= 1
        if self.ref_count[block] == 0:
            self.filled_slots -= int(self.fill[block])
            if block in self._key_of:
                self._cached[block] = None
            else:
                self._free.append(block)

    def _fill_range(self, slot: int, start: int, end: int) -> None:
        for index in range(start // self.block_size, self.blocks_for(end)):
            block = self.state.block_table[slot, index]
            new_fill = min(self.block_size, end - index * self.block_size)
            self.filled_slots += int(new_fill - self.fill[block])
            self.fill[block] = new_fill

    def _register(self, slot: int, num_full: int) -> None:
        """Enter the full blocks of `slot` into the prefix index. A prefix that is there already keeps its block; this
        slot's own copy stays outside the index and is free once released."""
        node, size, state = self._slot_node[slot], self.block_size, self.state
        for index in range(self._slot_registered[slot], num_full):
            block = int(state.block_table[slot, index])
            key = (node, state.token_ids[slot, index * size : (index + 1) * size].tobytes())
            owner = self._block_of.get(key)
            if owner is None:
                assert block not in self._key_of, "a block has two prefixes"
                self._block_of[key], self._key_of[block] = block, key
                self._node_of[block] = self._next_node
                self._next_node += 1
            node = self._node_of[block if owner is None else owner]
        self._slot_node[slot], self._slot_registered[slot] = node, num_full
