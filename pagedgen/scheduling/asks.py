"""What running sequences ask of the device half besides a token: bans, biases, log-probabilities, continuations."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagedgen.scheduling.sequence import Sequence
from pagedgen.step import SlotArrays

Asking = tuple[int, Sequence]


class DeviceAsks:
    """The running sequences that ask for something, by slot: a step looks at these alone."""

    def __init__(self, state: SlotArrays) -> None:
        self._state = state
        self._by_slot: dict[int, Sequence] = {}
        self._biases: dict[int, tuple[NDArray[np.int64], NDArray[np.float32]]] = {}

    def add(self, sequence: Sequence) -> None:
        params = sequence.params
        if params.logit_bias:
            ids, values = zip(*params.logit_bias, strict=True)
            self._biases[sequence.slot] = np.array(ids, np.int64), np.array(values, np.float32)
        wants_logprobs = params.logprobs is not None or params.prompt_logprobs is not None
        held_back = bool(params.min_tokens and sequence.end_ids)
        if params.logit_bias or wants_logprobs or held_back or sequence.bad_words or sequence.num_continuations:
            self._by_slot[sequence.slot] = sequence

    def remove(self, slot: int) -> None:
        self._by_slot.pop(slot, None)
        self._biases.pop(slot, None)

    def of_step(
        self,
        slots: NDArray[np.int32],
        starts: NDArray[np.int32],
        counts: NDArray[np.int32],
        samples: NDArray[np.bool_],
    ) -> dict[str, dict[int, Any]]:
        """The fields of a StepPlan that say what its sequences ask for."""
        if not self._by_slot:
            return {}
        sampled = [(slot, self._by_slot[slot]) for slot in slots[samples].tolist() if slot in self._by_slot]
        return {
            "banned": _without_empty(sampled, self._banned),
            "biases": {slot: self._biases[slot] for slot, _ in sampled if slot in self._biases},
            "logprobs": {slot: s.params.logprobs for slot, s in sampled if s.params.logprobs is not None},
            "beams": {slot: s.num_continuations for slot, s in sampled if s.num_continuations},
            "prompt_logprobs": dict(self._prompt_logprobs(slots, starts, starts + counts)),
        }

    def _banned(self, slot: int, sequence: Sequence) -> tuple[int, ...]:
        """End ids below `min_tokens`, and the tokens that would complete a bad word."""
        length = int(self._state.num_tokens[slot] + self._state.num_pending[slot])
        banned: list[int] = []
        if length - sequence.num_prompt < sequence.params.min_tokens:
            banned += sequence.end_ids
        for *beginning, last in sequence.bad_words:
            tail = self._state.token_ids[slot, length - len(beginning) : length]
            if length >= len(beginning) and tail.tolist() == beginning:
                banned.append(last)
        return tuple(banned)

    def _prompt_logprobs(
        self, slots: NDArray[np.int32], starts: NDArray[np.int32], ends: NDArray[np.int32]
    ) -> Iterator[tuple[int, tuple[int, int]]]:
        for slot, start, end in zip(slots.tolist(), starts.tolist(), ends.tolist(), strict=True):
            sequence = self._by_slot.get(slot)
            if sequence is None or sequence.params.prompt_logprobs is None:
                continue
            first = len(sequence.prompt_logprobs) + 1
            if max(first, start + 1) <= min(end, sequence.num_prompt - 1):
                yield slot, (first, sequence.params.prompt_logprobs)


def _without_empty(asking: list[Asking], ask: Callable[[int, Sequence], tuple[int, ...]]) -> dict[int, tuple[int, ...]]:
    asked = {slot: ask(slot, sequence) for slot, sequence in asking}
    return {slot: what for slot, what in asked.items() if what}
