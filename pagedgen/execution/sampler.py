"""From logits to the next token of each sampled sequence."""

from dataclasses import dataclass
from types import ModuleType

import numpy as np
import torch
from numpy.typing import NDArray

from pagedgen.step import LogprobResult, SlotArrays, StepPlan

# Enough candidates that the filters of nearly every row are decided among them; the others fall back to a full sort.
NUM_CANDIDATES = 64


class Sampler:
    """Greedy choice, or a draw from the softmax of logits / temperature after top-k, top-p and min-p, in this order.

    A draw is an argmax over Gumbel noise (Maddison, Tarlow and Minka, 2014) that is a function of the sequence's key,
    the position and the token id alone. The filters keep the tokens at or above a threshold, so ties are kept together,
    and a row is sorted only when its threshold is not found among its most likely tokens.
    """

    def __init__(self, kernels: ModuleType) -> None:
        self.kernels = kernels

    def sample(
        self, logits: torch.Tensor, slots: NDArray[np.int32], plan: StepPlan, state: SlotArrays
    ) -> tuple[NDArray[np.int32], dict[int, LogprobResult]]:
        """logits [R, vocab_size] of the sequences in `slots` [R], which it may overwrite -> tokens int32 [R], -1 where
        the logits hold NaN or nothing but -inf; and the log-probabilities of the slots that asked for them."""
        logprobs = _Logprobs.of(logits, slots, plan) if plan.logprobs else None
        if plan.banned:
            for row, slot in enumerate(slots.tolist()):
                if slot in plan.banned:
                    logits[row, list(plan.banned[slot])] = -torch.inf
        temperature = state.temperature[slots]
        random = np.flatnonzero(temperature > 0)
        if len(random) < len(slots):
            tokens = self.kernels.greedy_argmax(logits).cpu().numpy().astype(np.int32)
        else:
            tokens = np.empty(len(slots), np.int32)
        if len(random):
            rows = logits if len(random) == len(slots) else logits[torch.from_numpy(random).to(logits.device)]
            tokens[random] = self._draw(rows.float(), slots[random], state)
        return tokens, logprobs.results(tokens) if logprobs is not None else {}

    def _draw(self, logits: torch.Tensor, slots: NDArray[np.int32], state: SlotArrays) -> NDArray[np.int32]:
        device = logits.device
        temperature = torch.from_numpy(state.temperature[slots]).to(device)
        filtered = (state.top_k[slots] > 0) | (state.top_p[slots] < 1) | (state.min_p[slots] > 0)
        if filtered.any():
            rows = torch.from_numpy(np.flatnonzero(filtered)).to(device)
            some = logits[rows] if not filtered.all() else logits
            scaled = some / temperature[rows, None]
            lowest = self._thresholds(scaled, slots[filtered], state)
            some = some.masked_fill(scaled < lowest[:, None], -torch.inf)
            logits = some if filtered.all() else logits.index_copy(0, rows, some)
        keys = position_keys(state.key[slots], state.num_tokens[slots])
        drawn = self.kernels.gumbel_argmax(logits, temperature, torch.from_numpy(keys.view(np.int64)).to(device))
        tokens: NDArray[np.int32] = drawn.cpu().numpy().astype(np.int32)
        return tokens

    def _thresholds(self, scaled: torch.Tensor, slots: NDArray[np.int32], state: SlotArrays) -> torch.Tensor:
        """scaled [N, vocab_size], logits / temperature -> [N], the lowest value that the row's filters keep."""
        device, vocab_size = scaled.device, scaled.shape[1]
        top_k = torch.from_numpy(state.top_k[slots]).to(device).long()
        top_k = torch.where(top_k > 0, top_k.clamp(max=vocab_size), vocab_size)
        top_p = torch.from_numpy(state.top_p[slots]).to(device)
        min_p = torch.from_numpy(state.min_p[slots]).to(device)
        width = min(NUM_CANDIDATES, vocab_size)
        values = scaled.topk(width, dim=1).values
        # The mass that top-p counts is relative to what top-k left: all of the row, or its first k candidates.
        total = torch.logsumexp(scaled, dim=1)
        lowest, decided = _lowest_kept(values, total, vocab_size, top_k, top_p, min_p)
        undecided = torch.nonzero(~decided).flatten()
        if width < vocab_size and len(undecided):
            values = scaled[undecided].sort(dim=1, descending=True).values
            rest = (part[undecided] for part in (top_k, top_p, min_p))
            lowest[undecided], _ = _lowest_kept(values, total[undecided], vocab_size, *rest)
        return lowest


@dataclass(frozen=True, slots=True)
class _Logprobs:
    """Log-probabilities before temperature and filters of the rows that asked: values [N, vocab_size] of `rows` [N],
    and for each how many of the likeliest it wants."""

    slots: list[int]
    rows: list[int]
    wanted: list[int]
    values: torch.Tensor

    @staticmethod
    def of(logits: torch.Tensor, slots: NDArray[np.int32], plan: StepPlan) -> "_Logprobs | None":
        asked = [(slot, row) for row, slot in enumerate(slots.tolist()) if slot in plan.logprobs]
        if not asked:
            return None
        rows = [row for _, row in asked]
        chosen = logits if len(rows) == len(slots) else logits[torch.tensor(rows, device=logits.device)]
        values = torch.log_softmax(chosen.float(), 1)
        return _Logprobs([slot for slot, _ in asked], rows, [plan.logprobs[slot] for slot, _ in asked], values)

    def results(self, tokens: NDArray[np.int32]) -> dict[int, LogprobResult]:
        """tokens: int32 [R], what each row drew; -1 has no log-probability."""
        drawn = torch.from_numpy(tokens[self.rows].astype(np.int64)).to(self.values.device)
        chosen = (
            self.values.gather(1, drawn.clamp(min=0)[:, None]).squeeze(1).masked_fill(drawn < 0, torch.nan).tolist()
        )
        top = self.values.topk(min(max(self.wanted), self.values.shape[1]), dim=1)
        ids, values = top.indices.tolist(), top.values.tolist()
        return {
            slot: LogprobResult(chosen[i], tuple(ids[i][:k]), tuple(values[i][:k]))
            for i, (slot, k) in enumerate(zip(self.slots, self.wanted, strict=True))
        }


def _lowest_kept(
    values: torch.Tensor,
    total: torch.Tensor,
    vocab_size: int,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """values [N, K], each row's K largest, in descending order; total [N], the logsumexp of the whole row -> the lowest
    value the filters keep [N], and whether these K values were enough to know it [N].

    Top-p keeps a token when the mass of the tokens before it is below p; the first one is always kept.
    """
    width = values.shape[1]
    rank = torch.arange(width, device=values.device)
    among_k = rank < top_k[:, None]
    within = top_k <= width
    kept_total = torch.where(within, torch.logsumexp(values.masked_fill(~among_k, -torch.inf), dim=1), total)
    mass = (values - kept_total[:, None]).exp()
    before = mass.cumsum(1) - mass
    keep = among_k & ((before < top_p[:, None]) | (top_p[:, None] >= 1))
    keep &= values >= values[:, :1] + min_p.log()[:, None]
    keep[:, 0] = True
    count = keep.sum(1)
    lowest = values.gather(1, (count - 1)[:, None]).squeeze(1)
    # Once one candidate fails a filter, everything below it fails too. With more than `width` tokens in the top k,
    # though, the mass that top-p counts is not known from these.
    known_mass = within | (top_k >= vocab_size) | (top_p >= 1)
    return lowest, within | ((count < width) & known_mass)


def position_keys(keys: NDArray[np.uint64], positions: NDArray[np.int32]) -> NDArray[np.uint64]:
    """The key of each sequence's draw at one position: SplitMix64 of its key and the position."""
    with np.errstate(over="ignore"):
        value = keys + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed: NDArray[np.uint64] = value ^ (value >> np.uint64(31))
        return mixed
