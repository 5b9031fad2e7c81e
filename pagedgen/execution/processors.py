"""What changes a row's scores before a token is chosen: biases, penalties and bans, in the order of `transformers`.

The penalty on repetition comes from Keskar et al., 2019 (CTRL). A score of -inf stays -inf through all of them, so bans
may be written first.
"""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from pagedgen.execution.transfer import to_device
from pagedgen.step import SlotArrays, StepPlan


def having(slots: NDArray[np.int32], wanted: Mapping[int, object]) -> NDArray[np.bool_]:
    """bool [N], which of the slots [N] are among the keys of `wanted`."""
    return np.array([slot in wanted for slot in slots.tolist()], np.bool_) if wanted else np.zeros(len(slots), np.bool_)


def edited(slots: NDArray[np.int32], plan: StepPlan, state: SlotArrays) -> NDArray[np.bool_]:
    """bool [N], which of the slots [N] have a bias or a penalty."""
    changed = having(slots, plan.biases)
    changed |= state.repetition_penalty[slots] != 1
    changed |= (state.presence_penalty[slots] != 0) | (state.frequency_penalty[slots] != 0)
    return changed


def penalise(scores: torch.Tensor, slots: NDArray[np.int32], state: SlotArrays) -> None:
    """Apply the penalties to scores float32 [N, vocab_size] of the sequences in `slots` [N], in place."""
    _penalise_repetition(scores, slots, state)
    _penalise_occurrences(scores, slots, state)


def ban(scores: torch.Tensor, slots: NDArray[np.int32], plan: StepPlan) -> None:
    """Set the scores [N, vocab_size], of any dtype, of the tokens banned for the sequences in `slots` [N] to -inf, in
    place."""
    found = [(row, plan.banned[slot]) for row, slot in enumerate(slots.tolist()) if slot in plan.banned]
    if found:
        rows = np.repeat([row for row, _ in found], [len(ids) for _, ids in found])
        scores[_place(scores, rows, np.concatenate([ids for _, ids in found]))] = -torch.inf


def add_biases(scores: torch.Tensor, slots: NDArray[np.int32], plan: StepPlan) -> None:
    """Add the biases to scores float32 [N, vocab_size] of the sequences in `slots` [N], in place."""
    found = [(row, *plan.biases[slot]) for row, slot in enumerate(slots.tolist()) if slot in plan.biases]
    if found:
        rows = np.repeat([row for row, _, _ in found], [len(ids) for _, ids, _ in found])
        place = _place(scores, rows, np.concatenate([ids for _, ids, _ in found]))
        scores[place] += to_device(np.concatenate([values for _, _, values in found]), scores.device)


def _penalise_repetition(scores: torch.Tensor, slots: NDArray[np.int32], state: SlotArrays) -> None:
    penalty = state.repetition_penalty[slots]
    some = np.flatnonzero(penalty != 1)
    if not len(some):
        return
    occurring, ids, _ = _occurrences(slots[some], np.zeros(len(some), np.int32), state, scores.shape[1])
    rows = some[occurring]
    place, factor = _place(scores, rows, ids), to_device(penalty[rows], scores.device)
    before = scores[place]
    scores[place] = torch.where(before < 0, before * factor, before / factor)


def _penalise_occurrences(scores: torch.Tensor, slots: NDArray[np.int32], state: SlotArrays) -> None:
    presence, frequency = state.presence_penalty[slots], state.frequency_penalty[slots]
    some = np.flatnonzero((presence != 0) | (frequency != 0))
    if not len(some):
        return
    occurring, ids, counts = _occurrences(slots[some], state.num_prompt[slots[some]], state, scores.shape[1])
    rows = some[occurring]
    penalty = counts.astype(np.float32) * frequency[rows] + presence[rows]
    scores[_place(scores, rows, ids)] -= to_device(penalty, scores.device)


def _occurrences(
    slots: NDArray[np.int32], starts: NDArray[np.int32], state: SlotArrays, vocab_size: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """(rows, ids, counts): each distinct token from position `starts` [N] of its sequence on, with the row of `slots`
    [N] that it occurs in, and how often it does."""
    lengths = (state.num_tokens[slots] - starts).astype(np.int64)
    row = np.repeat(np.arange(len(slots)), lengths)
    positions = np.arange(len(row)) + (starts - (np.cumsum(lengths) - lengths))[row]
    pairs, counts = np.unique(row * vocab_size + state.token_ids[slots[row], positions], return_counts=True)
    return pairs // vocab_size, pairs % vocab_size, counts


def _place(
    scores: torch.Tensor, rows: NDArray[np.integer], ids: NDArray[np.integer]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The index of one score for each of the (row, id) pairs, which are distinct."""
    return to_device(rows.astype(np.int64), scores.device), to_device(ids.astype(np.int64), scores.device)
