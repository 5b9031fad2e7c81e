"""From logits to the next token of each sampled sequence, or to the likeliest continuations of a beam."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import torch
from numpy.typing import NDArray

from pagedgen.execution.filters import Filters, draw_filtered, draws_of
from pagedgen.execution.logprobs import TopLogprobs
from pagedgen.execution.processors import ban, edit, edited, having
from pagedgen.step import Continuations, ExtraDraws, LogprobResult, SlotArrays, StepPlan


@dataclass(frozen=True, slots=True)
class Sampled:
    """What some rows of logits gave; the fields are those of StepResult."""

    tokens: NDArray[np.int32]
    logprobs: dict[int, LogprobResult]
    extra: dict[int, ExtraDraws]
    beams: dict[int, Continuations]


class Sampler:
    """Greedy choice, or a draw from the softmax of scores / temperature after top-k, top-p and min-p, in this order.

    The scores are the logits after biases, penalties and bans. A draw is an argmax over Gumbel noise (Maddison, Tarlow
    and Minka, 2014) that is a function of the key, the position and the token id alone. Only the rows that have biases
    or penalties are copied and widened to float32; the kernels read all others where and as the model left them.
    """

    def __init__(self, kernels: ModuleType) -> None:
        self.kernels = kernels

    def sample(self, logits: torch.Tensor, slots: NDArray[np.int32], plan: StepPlan, state: SlotArrays) -> Sampled:
        """logits [R, vocab_size] of the sequences in `slots` [R], which it may overwrite -> tokens int32 [R], -1 where
        the scores hold NaN or nothing but -inf, and what else the plan asks for these slots."""
        asked = np.flatnonzero(having(slots, plan.logprobs))
        wanted = [plan.logprobs[slot] for slot in slots[asked].tolist()]
        likeliest = TopLogprobs(self.kernels, logits, asked, wanted) if len(asked) else None
        searching, changed = having(slots, plan.beams), edited(slots, plan, state)
        beams = self._search(logits, np.flatnonzero(searching), slots, plan, state) if searching.any() else {}
        ban(logits, slots, plan)

        of, keys = _draws(slots, plan, state)
        tokens = np.full(len(of), -1, np.int32)
        for row in np.flatnonzero(searching).tolist():
            if slots[row] in beams:
                tokens[row] = beams[slots[row]].ids[0]
        plain, edits = np.flatnonzero(~searching & ~changed), np.flatnonzero(~searching & changed)
        if len(plain):
            mine, place = draws_of(plain, of, len(slots))
            tokens[mine] = self._draw(logits, plain, slots[plain], place, keys[mine], state)
        if len(edits):
            scores = logits[_tensor(edits, logits)].float()
            edit(scores, slots[edits], plan, state)
            mine, place = draws_of(edits, of, len(slots))
            tokens[mine] = self._draw(scores, np.arange(len(edits)), slots[edits], place, keys[mine], state)

        found: dict[int, LogprobResult] = {}
        if likeliest is not None:
            mine, place = draws_of(asked, of, len(slots))
            found = dict(zip(mine.tolist(), likeliest.results(tokens[mine], place), strict=True))
        logprobs = {int(slots[row]): found[row] for row in asked.tolist()}
        return Sampled(tokens[: len(slots)], logprobs, _extra_draws(slots, plan, tokens, found), beams)

    def _draw(
        self,
        scores: torch.Tensor,
        rows: NDArray[np.int64],
        slots: NDArray[np.int32],
        of: NDArray[np.int64],
        keys: NDArray[np.uint64],
        state: SlotArrays,
    ) -> NDArray[np.int32]:
        """Draw int32 [D] from the rows `rows` [N] of scores [R, vocab_size] with the settings of `slots` [N]; draw i is
        from row of[i] of these N and has the key keys[i]."""
        temperature = state.temperature[slots]
        greedy = temperature <= 0
        filtered = ~greedy & ((state.top_k[slots] > 0) | (state.top_p[slots] < 1) | (state.min_p[slots] > 0))
        tokens = np.empty(len(of), np.int32)
        if greedy.any():
            best = np.empty(len(slots), np.int32)
            # All rows in their order need no index, and so no copy in the kernels that would make one.
            index = None if greedy.all() and len(rows) == len(scores) else _tensor(rows[greedy], scores)
            best[greedy] = self.kernels.greedy_argmax(scores, index).cpu().numpy()
            tokens[:] = best[of]
        free = np.flatnonzero(~(greedy | filtered)[of])
        if len(free):
            source = of[free]
            drawn = self.kernels.gumbel_argmax(
                scores,
                _tensor(temperature[source], scores),
                _tensor(keys[free].view(np.int64), scores),
                _tensor(rows[source], scores),
            )
            tokens[free] = drawn.cpu().numpy()
        if filtered.any():
            some = np.flatnonzero(filtered)
            mine, place = draws_of(some, of, len(slots))
            filters = Filters.of(slots[some], state, scores.device)
            tokens[mine] = draw_filtered(self.kernels, scores, rows[some], filters, place, keys[mine])
        return tokens

    def _search(
        self,
        logits: torch.Tensor,
        rows: NDArray[np.int64],
        slots: NDArray[np.int32],
        plan: StepPlan,
        state: SlotArrays,
    ) -> dict[int, Continuations]:
        """The continuations of the beams in `rows` [N] of logits [R, vocab_size], by slot; none for a beam whose scores
        hold NaN or nothing but -inf. Processors act on normalised log-probabilities, as in `transformers`."""
        beams = slots[rows]
        wanted = min(max(plan.beams[slot] for slot in beams.tolist()), logits.shape[1])
        changed = edited(beams, plan, state) | having(beams, plan.banned)
        found: dict[int, Continuations] = {}
        plain = rows[~changed]
        if len(plain):
            values, ids, total = self._top(logits, plain, wanted)
            found |= _continuations(slots[plain], values - total[:, None], ids, plan)
        some = rows[changed]
        if len(some):
            scores = logits[_tensor(some, logits)].float()
            everything = np.arange(len(some))
            scores -= self._top(scores, everything, 1)[2][:, None]
            edit(scores, slots[some], plan, state)
            ban(scores, slots[some], plan)
            values, ids, _ = self._top(scores, everything, wanted)
            found |= _continuations(slots[some], values, ids, plan)
        return found

    def _top(
        self, scores: torch.Tensor, rows: NDArray[np.int64], k: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        top: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = self.kernels.top_tokens(
            scores, torch.ones(len(rows), device=scores.device), k, _tensor(rows, scores)
        )
        return top


def _draws(slots: NDArray[np.int32], plan: StepPlan, state: SlotArrays) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
    """(of [D], keys [D]): the row and the key of each draw, first the R rows' own in order, then those of
    `plan.extra_keys`, row after row."""
    rows = np.arange(len(slots))
    extra = [(row, plan.extra_keys[slot]) for row, slot in enumerate(slots.tolist()) if slot in plan.extra_keys]
    of = np.concatenate([rows, np.repeat([row for row, _ in extra], [len(keys) for _, keys in extra]).astype(np.int64)])
    keys = np.concatenate([state.key[slots], *(keys for _, keys in extra)])
    return of, position_keys(keys, state.num_tokens[slots[of]])


def _extra_draws(
    slots: NDArray[np.int32], plan: StepPlan, tokens: NDArray[np.int32], logprobs: Mapping[int, LogprobResult]
) -> dict[int, ExtraDraws]:
    """What is left of the tokens [D] of `_draws` after the rows' own. logprobs: by draw, of the rows that asked."""
    extra: dict[int, ExtraDraws] = {}
    end = len(slots)
    for slot in slots.tolist():
        if slot in plan.extra_keys:
            begin, end = end, end + len(plan.extra_keys[slot])
            found = tuple(logprobs[draw] for draw in range(begin, end) if draw in logprobs)
            extra[slot] = ExtraDraws(tokens[begin:end], found)
    return extra


def _continuations(
    slots: NDArray[np.int32], values: torch.Tensor, ids: torch.Tensor, plan: StepPlan
) -> dict[int, Continuations]:
    """values, ids: [N, K], the best of each of the beams in `slots` [N] in descending order."""
    found: dict[int, Continuations] = {}
    logprobs, tokens = values.cpu().numpy(), ids.cpu().numpy()
    possible = (logprobs > -np.inf).sum(1)
    for row, slot in enumerate(slots.tolist()):
        k = min(plan.beams[slot], int(possible[row]))
        if k:
            found[slot] = Continuations(tokens[row, :k], logprobs[row, :k])
    return found


def _tensor(array: NDArray[np.generic], like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(array).to(like.device)


def position_keys(keys: NDArray[np.uint64], positions: NDArray[np.int32]) -> NDArray[np.uint64]:
    """The key of each sequence's draw at one position: SplitMix64 of its key and the position."""
    with np.errstate(over="ignore"):
        value = keys + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed: NDArray[np.uint64] = value ^ (value >> np.uint64(31))
        return mixed
