"""Contiguous allocation with the real scheduler: a request is admitted only if its whole reservation finds a place."""

from collections.abc import Callable
from typing import Protocol

from pagedgen.scheduling.blocks import BlockManager
from pagedgen.scheduling.scheduler import Scheduler
from pagedgen.scheduling.sequence import Sequence, SequenceGroup
from pagedgen.step import SlotArrays

# (prompt tokens, final tokens, the longest allowed) -> token slots.
Reserve = Callable[[int, int, int], int]


def next_power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


RESERVATIONS: dict[str, Reserve] = {
    "max": lambda _prompt, _final, longest: longest,
    "pow2": lambda _prompt, final, longest: min(next_power_of_two(final), longest),
    "oracle": lambda _prompt, final, _longest: final,
}
# With a buddy allocator all sizes are powers of two, and "pow2" is known for the output only.
BUDDY_RESERVATIONS: dict[str, Reserve] = {
    "max": RESERVATIONS["max"],
    "pow2": lambda prompt, final, longest: min(
        next_power_of_two(prompt + next_power_of_two(final - prompt)), next_power_of_two(longest)
    ),
    "oracle": lambda _prompt, final, _longest: next_power_of_two(final),
}


class Space(Protocol):
    """Where reservations lie."""

    used: int

    def find(self, size: int) -> int | None:
        """An address where `size` slots are free; None when there is none."""
        ...

    def take(self, address: int, size: int) -> None: ...

    def give(self, address: int, size: int) -> None: ...


class PackedSpace:
    """Reservations lie side by side with no gap between them, as if moving them cost nothing."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.used = capacity, 0

    def find(self, size: int) -> int | None:
        return 0 if self.used + size <= self.capacity else None

    def take(self, address: int, size: int) -> None:
        self.used += size

    def give(self, address: int, size: int) -> None:
        self.used -= size


class BuddySpace:
    """A buddy allocator: sizes are powers of two, and each lies at a multiple of itself."""

    def __init__(self, capacity: int) -> None:
        self.used = 0
        self._free: dict[int, set[int]] = {1 << power: set() for power in range(capacity.bit_length())}
        address = 0
        for size in sorted(self._free, reverse=True):
            if capacity & size:
                self._free[size].add(address)
                address += size

    def find(self, size: int) -> int | None:
        """In the smallest piece that is large enough."""
        larger = [piece for piece, addresses in self._free.items() if piece >= size and addresses]
        return min(self._free[min(larger)]) if larger else None

    def take(self, address: int, size: int) -> None:
        """At an address that `find` gave: split its piece in halves until one has the size."""
        piece = min(piece for piece, addresses in self._free.items() if piece >= size and address in addresses)
        self._free[piece].remove(address)
        while piece > size:
            piece //= 2
            self._free[piece].add(address + piece)
        self.used += size

    def give(self, address: int, size: int) -> None:
        self.used -= size
        while address ^ size in self._free[size]:
            self._free[size].remove(address ^ size)
            address, size = min(address, address ^ size), size * 2
        self._free[size].add(address)


class ReservingScheduler(Scheduler):
    """The scheduler, admitting a request only if what it reserves finds a place in `space`; its blocks, batches and all
    else are as ever. Each request is one sequence whose `max_total` is its final length, known in advance.

    Until `use` names a way to reserve, it is the scheduler itself: paged.
    """

    def __init__(self, state: SlotArrays, blocks: BlockManager, max_batch_tokens: int) -> None:
        super().__init__(state, blocks, max_batch_tokens)
        self._reserve: Reserve | None = None
        self.space: Space = PackedSpace(0)
        # The running groups' reservations: (address, size).
        self._places: dict[SequenceGroup, tuple[int, int]] = {}

    def use(self, reserve: Reserve | None, space: Space) -> None:
        """Reserve in this way from now on, while nothing runs; None is paged."""
        assert not self.has_work
        self._reserve, self.space, self._places = reserve, space, {}

    def reserved_for(self, sequence: Sequence) -> int:
        """The token slots that the sequence reserves."""
        assert self._reserve is not None
        return self._reserve(sequence.num_prompt, sequence.max_total, self.state.token_ids.shape[1])

    def _fit(self, group: SequenceGroup, first: Sequence, spare: int) -> list[int] | None:
        cached = super()._fit(group, first, spare)
        if self._reserve is None or cached is None:
            return cached
        for ended in [other for other in self._places if not other.held_slots]:
            self.space.give(*self._places.pop(ended))
        return None if self.space.find(self.reserved_for(first)) is None else cached

    def _start(self, group: SequenceGroup, first: Sequence, blocks: list[int]) -> int:
        if self._reserve is not None:
            assert group.num_slots == 1, "reservations are for single sequences"
            size = self.reserved_for(first)
            address = self.space.find(size)
            assert address is not None
            self.space.take(address, size)
            self._places[group] = address, size
        return super()._start(group, first, blocks)
