"""From logits to the next token of each sampled sequence, or to the likeliest continuations of a beam."""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import torch
from numpy.typing import NDArray

from pagedgen.execution.device_state import DeviceState
from pagedgen.execution.filters import Filters, draw_filtered, draws_of
from pagedgen.execution.logprobs import TopLogprobs
from pagedgen.execution.processors import add_biases, ban, edited, having, penalise
from pagedgen.execution.transfer import to_device, to_host
from pagedgen.step import Continuations, ExtraDraws, LogprobResult, SlotArrays, StepPlan


@dataclass(frozen=True, slots=True)
class Sampled:
    """What some rows of logits gave; the fields are those of StepResult."""

    tokens: NDArray[np.int32]
    logprobs: dict[int, LogprobResult]
    extra: dict[int, ExtraDraws]
    beams: dict[int, Continuations]


@dataclass(frozen=True, slots=True)
class FoundBeams:
    """The best continuations of the beams in some rows [N], in descending order: logprobs, ids [N, K], on the host."""

    rows: NDArray[np.int64]
    logprobs: torch.Tensor
    ids: torch.Tensor


@dataclass(frozen=True, slots=True)
class PendingSample:
    """What a sampler has the device do for the sequences in `slots` [R].

    tokens: int64 [R] on the device, what each draws; -1 for those that search. draws: int64 [D] on the host, these and
    those of the plan's further samples. logprobs: which of the draws ask for theirs, and what gives them.
    """

    slots: NDArray[np.int32]
    plan: StepPlan
    tokens: torch.Tensor
    draws: torch.Tensor
    logprobs: tuple[NDArray[np.int64], Callable[[], list[LogprobResult]]] | None
    beams: list[FoundBeams]

    @staticmethod
    def of_tokens(plan: StepPlan, tokens: torch.Tensor) -> "PendingSample":
        """One token for each sequence of the step that is sampled, and nothing else."""
        return PendingSample(plan.slots[plan.samples], plan, tokens, to_host(tokens), None, [])

    def result(self) -> Sampled:
        """Once the device has come so far: all there is."""
        tokens = self.draws.numpy().astype(np.int32)
        beams: dict[int, Continuations] = {}
        for found in self.beams:
            beams |= self._continuations(found)
        for row, slot in enumerate(self.slots.tolist()) if beams else ():
            if slot in beams:
                tokens[row] = beams[slot].ids[0]
        by_draw: dict[int, LogprobResult] = {}
        if self.logprobs is not None:
            by_draw = dict(zip(self.logprobs[0].tolist(), self.logprobs[1](), strict=True))
        own = {int(self.slots[draw]): found for draw, found in by_draw.items() if draw < len(self.slots)}
        return Sampled(tokens[: len(self.slots)], own, self._extra_draws(tokens, by_draw), beams)

    def _continuations(self, found: FoundBeams) -> dict[int, Continuations]:
        """By slot; none for a beam whose scores hold NaN or nothing but -inf."""
        logprobs, ids = found.logprobs.numpy(), found.ids.numpy()
        possible = (logprobs > -np.inf).sum(1)
        best: dict[int, Continuations] = {}
        for row, slot in enumerate(self.slots[found.rows].tolist()):
            if k := min(self.plan.beams[slot], int(possible[row])):
                best[slot] = Continuations(ids[row, :k], logprobs[row, :k])
        return best

    def _extra_draws(self, tokens: NDArray[np.int32], logprobs: dict[int, LogprobResult]) -> dict[int, ExtraDraws]:
        """What is left of the tokens [D] after the rows' own."""
        extra: dict[int, ExtraDraws] = {}
        end = len(self.slots)
        for slot in self.slots.tolist():
            if slot in self.plan.extra_keys:
                begin, end = end, end + len(self.plan.extra_keys[slot])
                found = tuple(logprobs[draw] for draw in range(begin, end) if draw in logprobs)
                extra[slot] = ExtraDraws(tokens[begin:end], found)
        return extra


class Sampler:
    """Greedy choice, or a draw from the softmax of scores / temperature after top-k, top-p and min-p, in this order.

    The scores are the logits after biases, penalties and bans. A draw is an argmax over Gumbel noise (Maddison, Tarlow
    and Minka, 2014) that is a function of the key, the position and the token id alone. Only the rows that have biases
    or penalties are copied and widened to float32; the kernels read all others where and as the model left them.
    """

    def __init__(self, kernels: ModuleType, device_state: DeviceState | None = None) -> None:
        """device_state: where the device keeps what the sequences ask for; without one, the host's arrays tell it."""
        self.kernels, self._device_state = kernels, device_state

    def sample(
        self,
        logits: torch.Tensor,
        slots: NDArray[np.int32],
        lengths: NDArray[np.int32],
        plan: StepPlan,
        state: SlotArrays,
    ) -> PendingSample:
        """Draw a token for each row, -1 where its scores hold NaN or nothing but -inf, and find what else is asked.

        logits: [R, vocab_size] of the sequences in `slots` [R]; they may be overwritten. lengths: int32 [R], the tokens
        that each sequence has.
        """
        asked = np.flatnonzero(having(slots, plan.logprobs))
        wanted = [plan.logprobs[slot] for slot in slots[asked].tolist()]
        likeliest = TopLogprobs(self.kernels, logits, asked, wanted) if len(asked) else None
        searching, changed = having(slots, plan.beams), edited(slots, plan, state)
        beams = self._search(logits, np.flatnonzero(searching), slots, plan, state) if searching.any() else []
        ban(logits, slots, plan)

        of, keys = _draws(slots, lengths, plan, state)
        tokens = torch.full((len(of),), -1, dtype=torch.int64, device=logits.device)
        plain, edits = np.flatnonzero(~searching & ~changed), np.flatnonzero(~searching & changed)
        if len(plain):
            mine, place = draws_of(plain, of, len(slots))
            drawn = self._draw(logits, plain, slots[plain], place, keys[mine], state)
            tokens = drawn if len(mine) == len(of) else tokens.index_copy_(0, to_device(mine, tokens.device), drawn)
        if len(edits):
            scores = logits[to_device(edits, logits.device)].float()
            self._edit(scores, slots[edits], plan, state)
            mine, place = draws_of(edits, of, len(slots))
            drawn = self._draw(scores, np.arange(len(edits)), slots[edits], place, keys[mine], state)
            tokens.index_copy_(0, to_device(mine, tokens.device), drawn)

        logprobs = None
        if likeliest is not None:
            mine, place = draws_of(asked, of, len(slots))
            logprobs = mine, likeliest.of_tokens(tokens[to_device(mine, tokens.device)], place)
        return PendingSample(slots, plan, tokens[: len(slots)], to_host(tokens), logprobs, beams)

    def _draw(
        self,
        scores: torch.Tensor,
        rows: NDArray[np.int64],
        slots: NDArray[np.int32],
        of: NDArray[np.int64],
        keys: NDArray[np.uint64],
        state: SlotArrays,
    ) -> torch.Tensor:
        """Draw int64 [D] from the rows `rows` [N] of scores [R, vocab_size] with the settings of `slots` [N]; draw i is
        from row of[i] of these N and has the key keys[i]."""
        if self._device_state is not None:
            return self._draw_unseen(scores, rows[of], slots[of], keys, self._device_state)
        temperature = state.temperature[slots]
        greedy = temperature <= 0
        filtered = ~greedy & ((state.top_k[slots] > 0) | (state.top_p[slots] < 1) | (state.min_p[slots] > 0))
        tokens = np.empty(len(of), np.int64)
        if greedy.any():
            best = np.empty(len(slots), np.int64)
            # All rows in their order need no index, and so no copy in the kernels that would make one.
            index = None if greedy.all() and len(rows) == len(scores) else to_device(rows[greedy], scores.device)
            best[greedy] = self.kernels.greedy_argmax(scores, index).cpu().numpy()
            tokens[:] = best[of]
        free = np.flatnonzero(~(greedy | filtered)[of])
        if len(free):
            source = of[free]
            settings = (temperature[source], keys[free].view(np.int64), rows[source])
            drawn = self.kernels.gumbel_argmax(scores, *(to_device(each, scores.device) for each in settings))
            tokens[free] = drawn.cpu().numpy()
        if filtered.any():
            some = np.flatnonzero(filtered)
            mine, place = draws_of(some, of, len(slots))
            filters = Filters.of(slots[some], state, scores.device)
            tokens[mine] = draw_filtered(self.kernels, scores, rows[some], filters, place, keys[mine])
        return to_device(tokens, scores.device)

    def _draw_unseen(
        self,
        scores: torch.Tensor,
        rows: NDArray[np.int64],
        slots: NDArray[np.int32],
        keys: NDArray[np.uint64],
        settings: DeviceState,
    ) -> torch.Tensor:
        """The same without looking at anything that the device computes; rows, slots, keys: of each draw [D]."""
        index, of, own = to_device(np.stack([rows, slots.astype(np.int64), keys.view(np.int64)]), scores.device)
        in_place = len(rows) == len(scores) and bool((rows == np.arange(len(rows))).all())
        tokens = []
        for begin in range(0, len(rows), len(scores)):  # as many copied rows at a time as there are
            part = slice(begin, begin + len(scores))
            source = of[part]
            some = scores if in_place else scores[index[part]]
            filters = (settings.temperature, settings.top_k, settings.top_p, settings.min_p)
            tokens.append(self.kernels.choose_tokens(some, *(each[source] for each in filters), own[part]))
        return torch.cat(tokens)

    def _edit(self, scores: torch.Tensor, slots: NDArray[np.int32], plan: StepPlan, state: SlotArrays) -> None:
        """Apply biases and penalties to scores float32 [N, vocab_size] of the sequences in `slots` [N], in place."""
        add_biases(scores, slots, plan)
        known = self._device_state
        if known is None:
            penalise(scores, slots, state)
            return
        rows = to_device(slots.astype(np.int64), scores.device)
        penalties = (known.repetition_penalty, known.presence_penalty, known.frequency_penalty)
        of_rows = (each[rows] for each in (known.num_tokens, known.num_prompt, *penalties))
        self.kernels.penalise(scores, known.token_ids, *of_rows, rows)

    def _search(
        self,
        logits: torch.Tensor,
        rows: NDArray[np.int64],
        slots: NDArray[np.int32],
        plan: StepPlan,
        state: SlotArrays,
    ) -> list[FoundBeams]:
        """The continuations of the beams in `rows` [N] of logits [R, vocab_size]. Processors act on normalised
        log-probabilities, as in `transformers`."""
        beams = slots[rows]
        wanted = min(max(plan.beams[slot] for slot in beams.tolist()), logits.shape[1])
        changed = edited(beams, plan, state) | having(beams, plan.banned)
        found: list[FoundBeams] = []
        plain = rows[~changed]
        if len(plain):
            values, ids, total = self._top(logits, plain, wanted)
            found.append(FoundBeams(plain, to_host(values - total[:, None]), to_host(ids)))
        some = rows[changed]
        if len(some):
            scores = logits[to_device(some, logits.device)].float()
            everything = np.arange(len(some))
            scores -= self._top(scores, everything, 1)[2][:, None]
            self._edit(scores, slots[some], plan, state)
            ban(scores, slots[some], plan)
            values, ids, _ = self._top(scores, everything, wanted)
            found.append(FoundBeams(some, to_host(values), to_host(ids)))
        return found

    def _top(
        self, scores: torch.Tensor, rows: NDArray[np.int64], k: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        top: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = self.kernels.top_tokens(
            scores, torch.ones(len(rows), device=scores.device), k, to_device(rows, scores.device)
        )
        return top


def _draws(
    slots: NDArray[np.int32], lengths: NDArray[np.int32], plan: StepPlan, state: SlotArrays
) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
    """(of [D], keys [D]): the row and the key of each draw, first the R rows' own in order, then those of
    `plan.extra_keys`, row after row."""
    rows = np.arange(len(slots))
    extra = [(row, plan.extra_keys[slot]) for row, slot in enumerate(slots.tolist()) if slot in plan.extra_keys]
    of = np.concatenate([rows, np.repeat([row for row, _ in extra], [len(keys) for _, keys in extra]).astype(np.int64)])
    keys = np.concatenate([state.key[slots], *(keys for _, keys in extra)])
    return of, position_keys(keys, lengths[of])


def position_keys(keys: NDArray[np.uint64], positions: NDArray[np.int32]) -> NDArray[np.uint64]:
    """The key of each sequence's draw at one position: SplitMix64 of its key and the position."""
    with np.errstate(over="ignore"):
        value = keys + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed: NDArray[np.uint64] = value ^ (value >> np.uint64(31))
        return mixed
