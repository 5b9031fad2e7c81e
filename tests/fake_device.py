"""A stand-in for the device half: it keeps, for every slot of every block, a fingerprint of the prefix whose key and
value would be there, and refuses to read anything but the fingerprint that must be there."""

from types import SimpleNamespace

import numpy as np

from pagedgen.pipeline import Pipeline
from pagedgen.request import BeamParams, Request, SamplingParams
from pagedgen.scheduling.beam import BeamSearch
from pagedgen.scheduling.blocks import BlockManager
from pagedgen.scheduling.scheduler import Scheduler
from pagedgen.scheduling.sequence import Sequence, SequenceGroup
from pagedgen.step import Continuations, ExtraDraws, SlotArrays, StepPlan, StepResult

SPOILED = -2
NEXT = 1  # not a text: their hashes differ from one process to the next


def fingerprint(token_ids):
    return hash(tuple(int(token) for token in token_ids))


def next_token(token_ids, vocab_size=5, key=0):
    """A deterministic "model": the next token is a function of the prefix (and the sequence's key) alone."""
    return hash((fingerprint(token_ids), key, NEXT)) % vocab_size


def next_logprobs(token_ids, vocab_size=5):
    """The same for beams: float32 [vocab_size], a function of the prefix alone."""
    logits = np.random.default_rng(fingerprint(token_ids) % 2**32).normal(size=vocab_size)
    return (logits - np.log(np.exp(logits).sum())).astype(np.float32)


class FakeDevice:
    def __init__(self, num_blocks, block_size, vocab_size=5):
        self.memory = np.full((num_blocks, block_size), -1, np.int64)
        self.block_size, self.vocab_size = block_size, vocab_size
        self.poisoned = set()

    def copy(self, copies):
        sources, destinations = {source for source, _ in copies}, {destination for _, destination in copies}
        assert len(destinations) == len(copies), "a block is copied to twice"
        assert sources.isdisjoint(destinations), "the copies depend on their order"
        for source, destination in copies:
            self.memory[destination] = self.memory[source]

    def read(self, state, slot, upto):
        for position in range(upto):
            block = state.block_table[slot, position // self.block_size]
            expected = fingerprint(state.token_ids[slot, : position + 1])
            assert self.memory[block, position % self.block_size] == expected, (
                f"slot {slot} reads wrong KV at {position}"
            )

    def write(self, state, slot, start, count):
        for position in range(start, start + count):
            block = state.block_table[slot, position // self.block_size]
            self.memory[block, position % self.block_size] = fingerprint(state.token_ids[slot, : position + 1])

    def execute(self, plan: StepPlan, state: SlotArrays) -> StepResult:
        self.copy(plan.copies.tolist())
        rows = list(zip(plan.slots.tolist(), plan.starts.tolist(), plan.counts.tolist(), strict=True))
        for slot, start, count in rows:
            self.write(state, slot, start, count)
        for slot, start, count in rows:
            self.read(state, slot, start + count)
        slots = plan.slots[plan.samples]
        tokens = [self.draw(plan, state, slot, int(state.key[slot])) for slot in slots.tolist()]
        extra = {
            slot: ExtraDraws(np.array([self.draw(plan, state, slot, int(key)) for key in keys], np.int32))
            for slot, keys in plan.extra_keys.items()
        }
        usable = dict(zip(slots.tolist(), tokens, strict=True))
        beams = {slot: self.continuations(state, slot, k) for slot, k in plan.beams.items() if usable[slot] >= 0}
        return StepResult(slots, np.array(tokens, np.int32).reshape(-1), extra=extra, beams=beams)

    def draw(self, plan, state, slot, key):
        banned = plan.banned.get(slot, ())
        token = next_token(state.token_ids[slot, : state.num_tokens[slot]], self.vocab_size, key)
        while token in banned:
            token = (token + 1) % self.vocab_size
        return -1 if int(state.key[slot]) in self.poisoned else token

    def continuations(self, state, slot, k):
        logprobs = next_logprobs(state.token_ids[slot, : state.num_tokens[slot]], self.vocab_size)
        best = np.argsort(-logprobs, kind="stable")[:k]
        return Continuations(best, logprobs[best])


class FailingDevice(FakeDevice):
    """Runs out of memory in the steps for which `fails(plan)`, after it has done half of them and spoiled the rest.

    failed, failed_alone: how many did, and how many of these had a single token.
    """

    def __init__(self, num_blocks, block_size, fails, vocab_size=5):
        super().__init__(num_blocks, block_size, vocab_size)
        self.fails, self.failed, self.failed_alone = fails, 0, 0

    def execute(self, plan, state):
        if not self.fails(plan):
            return super().execute(plan, state)
        self.failed += 1
        self.failed_alone += plan.num_tokens == 1
        for i, (source, destination) in enumerate(plan.copies.tolist()):
            self.memory[destination] = self.memory[source] if i % 2 else SPOILED
        rows = zip(plan.slots.tolist(), plan.starts.tolist(), plan.counts.tolist(), strict=True)
        for i, (slot, start, count) in enumerate(rows):
            self.write(state, slot, start, count)
            for position in range(start, start + count) if i % 2 else ():
                self.memory[state.block_table[slot, position // self.block_size], position % self.block_size] = SPOILED
        raise MemoryError


class DelayedDevice(FailingDevice):
    """Draws tokens that the host learns only from the result: each step works on what the device was told or drew
    itself before, never on what the host has learned meanwhile.

    launched: how many steps were, and launched_ahead: how many of them while another was in flight.
    """

    def __init__(self, num_blocks, block_size, fails=lambda plan: False, vocab_size=5):
        super().__init__(num_blocks, block_size, fails, vocab_size)
        self.tokens, self.in_flight, self.launched, self.launched_ahead = {}, 0, 0, 0

    def launch(self, plan, state):
        self.launched += 1
        self.launched_ahead += self.in_flight > 0
        view = self.view(plan, state)
        result = self.execute(plan, view)
        for slot, token in zip(result.slots.tolist(), result.tokens.tolist(), strict=True):
            if slot not in plan.beams:
                self.tokens[slot][1].append(token)
        self.in_flight += 1

        def wait():
            self.in_flight -= 1
            return result

        return wait

    def view(self, plan, state):
        """The state as the device knows it: tokens that the host does not know are those drawn here."""
        token_ids, num_tokens = np.full_like(state.token_ids, -7), np.zeros_like(state.num_tokens)
        for slot, end in zip(plan.slots.tolist(), (plan.starts + plan.counts).tolist(), strict=True):
            epoch, known = int(state.epoch[slot]), state.token_ids[slot, : state.num_tokens[slot]].tolist()
            if self.tokens.get(slot, (-1,))[0] != epoch:
                self.tokens[slot] = epoch, known
            drawn = self.tokens[slot][1]
            assert drawn[: len(known)] == known[: len(drawn)]
            drawn += known[len(drawn) :]
            token_ids[slot, : len(drawn)], num_tokens[slot] = drawn, len(drawn)
            assert end <= len(drawn), "a token is computed that nobody knows"
        return SimpleNamespace(
            token_ids=token_ids, num_tokens=num_tokens, block_table=state.block_table.copy(), key=state.key.copy()
        )


def make_scheduler(num_blocks, block_size, max_seqs=8, max_model_len=64, max_batch_tokens=32, prefix_cache=True):
    state = SlotArrays(max_seqs, max_model_len, block_size)
    blocks = BlockManager(num_blocks, state, prefix_cache)
    return Scheduler(state, blocks, max_batch_tokens)


def make_sequence(prompt, max_tokens=8, end_ids=(), key=0, **params):
    params = SamplingParams(max_tokens=max_tokens, **params)
    return Sequence(
        request=Request(row=key, id=str(key)),
        params=params,
        token_ids=np.array(prompt, np.int32),
        num_prompt=len(prompt),
        max_total=len(prompt) + max_tokens,
        end_ids=frozenset(end_ids),
        key=key,
    )


def make_group(prompt, **options):
    return SequenceGroup([make_sequence(prompt, **options)])


def make_search(prompt, max_tokens=8, end_ids=(), key=0, stop_checker=None, **beam):
    sequence = make_sequence(prompt, max_tokens=max_tokens, end_ids=end_ids, key=key)
    sequence.stop_checker = stop_checker
    search = BeamSearch(BeamParams(**beam), len(prompt), max_tokens, len(end_ids))
    sequence.num_continuations = search.num_continuations
    return SequenceGroup([sequence], search)


def expected_tokens(prompt, max_tokens, end_ids=(), min_tokens=0, key=0, vocab_size=5):
    """What a sequence generates alone: the oracle for every schedule."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_tokens:
        token = next_token(tokens, vocab_size, key)
        while len(tokens) - len(prompt) < min_tokens and token in end_ids:
            token = (token + 1) % vocab_size
        tokens.append(token)
        if token in end_ids:
            break
    return tokens[len(prompt) :]


def run_to_end(scheduler, device, limit=10_000, on_step=None):
    """Step until all work is done, with `check()` after every operation; the finished groups. A step in which the
    device raises MemoryError is taken back."""
    finished = []
    for _ in range(limit):
        plan = scheduler.schedule()
        scheduler.check()
        if plan is None:
            return finished
        assert plan.num_tokens <= scheduler.budget.tokens
        try:
            result = device.execute(plan, scheduler.state)
        except MemoryError:
            finished += scheduler.step_failed(plan)
        else:
            finished += scheduler.update(plan, result)
        scheduler.check()
        if on_step is not None:
            on_step(plan)
    raise AssertionError("the scheduler does not come to an end")


def run_ahead(scheduler, device, limit=10_000, on_step=None):
    """The same with steps that are planned before the result of the last one is known."""
    pipeline = Pipeline(
        scheduler, device, ahead=True, free_memory=lambda: None, on_step=on_step, on_note=lambda text: None
    )
    finished = []
    for _ in range(limit):
        if not scheduler.has_work:
            pipeline.abort()
            return finished
        finished += pipeline.step()
        scheduler.check()
    raise AssertionError("the scheduler does not come to an end")
