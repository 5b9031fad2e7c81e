"""The block manager against a brute-force model, over long random histories."""

import numpy as np
import pytest
from fake_device import FakeDevice
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagedgen.scheduling.blocks import BlockManager
from pagedgen.step import SlotArrays

MAX_SEQS, MAX_LEN = 6, 24


class BlockHistory(RuleBasedStateMachine):
    """Start, grow, fork and release sequences at random. The fake device holds a fingerprint of the prefix in each slot
    of each block and fails when a table leads to anything else; the counters are recomputed from scratch."""

    @initialize(num_blocks=st.integers(6, 40), block_size=st.sampled_from([1, 2, 3, 4, 16]), prefix_cache=st.booleans())
    def start(self, num_blocks, block_size, prefix_cache):
        self.state = SlotArrays(MAX_SEQS, MAX_LEN, block_size)
        self.blocks = BlockManager(num_blocks, self.state, prefix_cache)
        self.device = FakeDevice(num_blocks, block_size)
        self.live = set()

    def idle(self):
        return sorted(set(range(MAX_SEQS)) - self.live)

    def grow(self, slot, count):
        """Compute `count` known tokens of a slot, as a step of the scheduler does; False when blocks are short."""
        state, blocks = self.state, self.blocks
        start = int(state.num_computed[slot])
        needed = blocks.blocks_for(start + count) - int(state.num_blocks[slot])
        slots = np.array([slot], np.int32)
        if needed + int(blocks.needs_copy(slots)[0]) > blocks.num_available:
            return False
        copy = blocks.make_private(slot)
        blocks.append(slot, max(0, needed))
        self.device.copy([copy] if copy else [])
        self.device.write(state, slot, start, count)
        blocks.written(slots, np.array([start], np.int32), np.array([count], np.int32))
        state.num_computed[slot] += count
        state.num_scheduled[slot] += count
        return True

    @precondition(lambda self: len(self.live) < MAX_SEQS)
    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=MAX_LEN), chunk=st.integers(1, MAX_LEN))
    def admit(self, tokens, chunk):
        slot, state = self.idle()[0], self.state
        tokens = np.array(tokens, np.int32)
        matched, cached = self.blocks.match_prefix(tokens)
        hit = len(matched) * self.blocks.block_size
        assert hit < len(tokens)
        assert cached == sum(self.blocks.ref_count[block] == 0 for block in matched)
        state.token_ids[slot, : len(tokens)] = tokens
        state.num_tokens[slot] = len(tokens)
        state.num_computed[slot] = state.num_scheduled[slot] = hit
        self.blocks.adopt(slot, matched)
        self.live.add(slot)
        self.device.read(state, slot, hit)
        self.grow(slot, min(chunk, len(tokens) - hit))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), token=st.integers(0, 1))
    def extend(self, data, token):
        slot, state = data.draw(st.sampled_from(sorted(self.live))), self.state
        if state.num_computed[slot] == state.num_tokens[slot]:
            if state.num_tokens[slot] == MAX_LEN:
                return
            state.token_ids[slot, state.num_tokens[slot]] = token
            state.num_tokens[slot] += 1
        self.grow(slot, data.draw(st.integers(1, int(state.num_tokens[slot] - state.num_computed[slot]))))

    @precondition(lambda self: self.live and len(self.live) < MAX_SEQS)
    @rule(data=st.data())
    def fork(self, data):
        parent, child, state = data.draw(st.sampled_from(sorted(self.live))), self.idle()[0], self.state
        used = self.blocks.num_used
        state.token_ids[child] = state.token_ids[parent]
        state.num_tokens[child] = state.num_tokens[parent]
        computed, size = int(state.num_computed[parent]), self.blocks.block_size
        shared = data.draw(st.sampled_from([computed, *range(0, computed, size)]), "shared")
        state.num_computed[child] = state.num_scheduled[child] = shared
        for position in range(shared, int(state.num_tokens[child])):  # from there on they may differ
            state.token_ids[child, position] = data.draw(st.integers(0, 1), "token")
        self.blocks.fork(parent, child, shared)
        self.live.add(child)
        assert self.blocks.num_used == used

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data):
        slot = data.draw(st.sampled_from(sorted(self.live)))
        self.blocks.release(slot)
        self.live.remove(slot)

    @invariant()
    def everything_adds_up(self):
        if not hasattr(self, "blocks"):
            return
        self.blocks.check()
        blocks, state = self.blocks, self.state
        assert blocks.num_free + blocks.num_cached + blocks.num_used == blocks.num_blocks
        written = set()
        for slot in self.live:
            self.device.read(state, slot, int(state.num_computed[slot]))
            written |= {
                (int(state.block_table[slot, p // blocks.block_size]), p % blocks.block_size)
                for p in range(int(state.num_computed[slot]))
            }
        assert blocks.filled_slots == len(written)
        assert blocks.prefix_cache or blocks.num_cached == 0


BlockHistory.TestCase.settings = settings(
    max_examples=60, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
test_random_histories = BlockHistory.TestCase


def filled(num_blocks=8, block_size=2, tokens=(), prefix_cache=True, slots=2):
    """A manager whose slot 0 has computed `tokens`."""
    state = SlotArrays(slots, 32, block_size)
    blocks = BlockManager(num_blocks, state, prefix_cache)
    compute(blocks, 0, tokens)
    return blocks


def compute(blocks, slot, tokens):
    tokens = np.array(tokens, np.int32)
    state = blocks.state
    state.token_ids[slot, : len(tokens)] = tokens
    matched, _ = blocks.match_prefix(tokens)
    blocks.adopt(slot, matched)
    hit = len(matched) * blocks.block_size
    blocks.append(slot, blocks.blocks_for(len(tokens)) - len(matched))
    blocks.written(*(np.array([x], np.int32) for x in (slot, hit, len(tokens) - hit)))
    state.num_tokens[slot] = state.num_computed[slot] = state.num_scheduled[slot] = len(tokens)
    return hit


def test_a_hit_needs_the_same_tokens_and_the_same_prefix():
    blocks = filled(tokens=[1, 2, 3, 4, 5])
    assert len(blocks.match_prefix(np.array([1, 2, 3, 4, 9], np.int32))[0]) == 2
    assert len(blocks.match_prefix(np.array([1, 2, 3, 5, 9], np.int32))[0]) == 1
    assert len(blocks.match_prefix(np.array([3, 4, 1], np.int32))[0]) == 0


def test_colliding_hashes_do_not_serve_the_wrong_block(monkeypatch):
    """All keys in one hash bucket: only the comparison of the token ids keeps prefixes apart."""

    class Colliding(bytes):
        def __hash__(self):
            return 7

    class Tokens(np.ndarray):
        def tobytes(self):
            return Colliding(super().tobytes())

    def token_array(tokens):
        return np.array(tokens, np.int32).view(Tokens)

    state = SlotArrays(2, 32, 2)
    state.token_ids = state.token_ids.view(Tokens)
    blocks = BlockManager(8, state)
    for slot, tokens in ((0, [1, 2, 3, 4]), (1, [5, 6, 7, 8])):
        compute(blocks, slot, tokens)
    first, second = (state.block_table[slot, :2].tolist() for slot in (0, 1))
    assert blocks.match_prefix(token_array([1, 2, 3, 4, 0]))[0] == first
    assert blocks.match_prefix(token_array([5, 6, 7, 8, 0]))[0] == second
    assert blocks.match_prefix(token_array([1, 2, 7, 8, 0]))[0] == first[:1]
    assert blocks.match_prefix(token_array([9, 9, 9]))[0] == []


def test_tails_are_reused_before_heads_and_old_before_new():
    blocks = filled(num_blocks=4, tokens=[1, 2, 3, 4])
    compute(blocks, 1, [5, 6, 7, 8])
    head, tail = blocks.state.block_table[0, :2].tolist()
    other_head, other_tail = blocks.state.block_table[1, :2].tolist()
    blocks.release(0)
    blocks.release(1)
    assert blocks.num_cached == 4
    blocks.append(0, 4)
    assert blocks.state.block_table[0, :4].tolist() == [tail, head, other_tail, other_head]


def test_free_blocks_are_taken_before_cached_ones():
    blocks = filled(num_blocks=4, tokens=[1, 2, 3])
    blocks.release(0)
    assert (blocks.num_cached, blocks.num_free) == (1, 3)
    blocks.append(1, 3)
    assert blocks.num_cached == 1


def test_a_lone_survivor_copies_nothing():
    blocks = filled(tokens=[1, 2, 3])
    blocks.fork(0, 1, 3)
    blocks.release(0)
    blocks.state.num_scheduled[1] = 3
    assert blocks.make_private(1) is None
    assert blocks.num_copies == 0


def test_a_fork_that_shares_less_enters_the_cache_under_its_own_prefix():
    blocks = filled(num_blocks=16, tokens=[1, 2, 3, 4])
    state = blocks.state
    state.token_ids[1, :6] = [1, 2, 9, 9, 7, 7]
    state.num_tokens[1] = 6
    blocks.fork(0, 1, 2)
    blocks.append(1, 2)
    one = np.array([1], np.int32)
    blocks.written(one, np.array([2], np.int32), np.array([4], np.int32))
    blocks.check()
    assert len(blocks.match_prefix(np.array([1, 2, 9, 9, 7, 7, 0], np.int32))[0]) == 3
    assert len(blocks.match_prefix(np.array([1, 2, 3, 4, 7, 7, 0], np.int32))[0]) == 2


def test_waste_and_sharing_are_counted():
    blocks = filled(num_blocks=16, block_size=4, tokens=[1, 2, 3, 4, 5])
    assert (blocks.num_used, blocks.filled_slots, blocks.logical_blocks) == (2, 5, 2)
    blocks.fork(0, 1, 5)
    assert (blocks.num_used, blocks.filled_slots, blocks.logical_blocks) == (2, 5, 4)


@pytest.mark.parametrize("damage", ["ref_count", "filled_slots", "_free", "_cached"])
def test_check_notices_damage(damage):
    blocks = filled(tokens=[1, 2, 3])
    blocks.check()
    if damage == "ref_count":
        blocks.ref_count[5] += 1
    elif damage == "filled_slots":
        blocks.filled_slots += 1
    elif damage == "_free":
        blocks._free.pop()
    else:
        blocks._cached[0] = None
    with pytest.raises(AssertionError):
        blocks.check()
