"""Draws after top-k, top-p and min-p, among the few tokens that they keep."""

from dataclasses import dataclass
from types import ModuleType

import numpy as np
import torch
from numpy.typing import NDArray

from pagedgen.step import SlotArrays

# How many of a row's largest logits are looked at first: enough to decide the filters of most rows.
CANDIDATES = 64
# What the candidates of one chunk of draws may take, at about 32 bytes each.
CHUNK_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Filters:
    """The settings of N rows, each a tensor [N]: temperature, top_p and min_p float32, top_k int64 (0 is off)."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor

    @staticmethod
    def of(slots: NDArray[np.int32], state: SlotArrays, device: torch.device) -> "Filters":
        settings = (state.temperature, state.top_k, state.top_p, state.min_p)
        temperature, top_k, top_p, min_p = (torch.from_numpy(setting[slots]).to(device) for setting in settings)
        return Filters(temperature, top_k.long(), top_p, min_p)

    def take(self, rows: torch.Tensor) -> "Filters":
        return Filters(self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows])


def draw_filtered(
    kernels: ModuleType,
    scores: torch.Tensor,
    rows: NDArray[np.int64],
    filters: Filters,
    of: NDArray[np.int64],
    keys: NDArray[np.uint64],
) -> NDArray[np.int32]:
    """Draw D tokens from the filtered rows `rows` [N] of scores [R, vocab_size], of any dtype -> int32 [D].

    of: int64 [D], the row of each draw, counted among `rows`. keys: uint64 [D]. A token is the one that `gumbel_argmax`
    would give for the row with everything that its filters drop at -inf; -1 for a row with NaN or nothing above -inf.
    """
    vocab_size = scores.shape[1]
    tokens = np.full(len(of), -1, np.int32)
    index = torch.from_numpy(rows).to(scores.device)
    values, ids, total = kernels.top_tokens(scores, filters.temperature, min(CANDIDATES, vocab_size), index)
    values /= filters.temperature[:, None]
    count, known = count_kept(values, total, vocab_size, filters)
    usable = total > -torch.inf
    decided = np.flatnonzero((usable & known).cpu().numpy())
    drawn, place = draws_of(decided, of, len(rows))
    tokens[drawn] = _draw_among(kernels, values, ids, count, decided[place], keys[drawn])
    undecided = np.flatnonzero((usable & ~known).cpu().numpy())
    if len(undecided):
        left = torch.from_numpy(undecided).to(scores.device)
        settings = filters.take(left)
        lowest = kernels.lowest_kept(
            scores, settings.temperature, settings.top_k, settings.top_p, settings.min_p, index[left]
        )
        drawn, place = draws_of(undecided, of, len(rows))
        source = torch.from_numpy(place).to(scores.device)
        own = torch.from_numpy(keys[drawn].view(np.int64)).to(scores.device)
        found = kernels.gumbel_argmax(scores, settings.temperature[source], own, index[left[source]], lowest[source])
        tokens[drawn] = found.cpu().numpy()
    return tokens


def draws_of(
    members: NDArray[np.int64], of: NDArray[np.int64], count: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(draws [E], places [E]): those of the D draws that are from one of the members [N], rows below `count`, and which
    of the members it is. of: int64 [D], the row of each draw."""
    place = np.full(count, -1)
    place[members] = np.arange(len(members))
    place = place[of]
    draws = np.flatnonzero(place >= 0)
    return draws, place[draws]


def count_kept(
    values: torch.Tensor, total: torch.Tensor, vocab_size: int, filters: Filters
) -> tuple[torch.Tensor, torch.Tensor]:
    """values float32 [N, K], each row's K largest logits / temperature in descending order; total [N], the logsumexp of
    the whole row of these -> how many of them the filters keep [N], and whether that is all they keep of the row [N].

    The filters apply in the order top-k, top-p, min-p. Top-p keeps a token when the mass of the tokens before it is
    below p of what top-k left. The first token is always kept, and tokens that tie with one that is kept are kept too.
    """
    width = values.shape[1]
    top, last = values[:, :1], values[:, -1]
    top_k = torch.where(filters.top_k > 0, filters.top_k, vocab_size)
    top_p = filters.top_p[:, None]
    kth = values.gather(1, (top_k.clamp(max=width) - 1)[:, None])
    among_k = values >= kth
    mass = (values - top).exp()
    up_to = mass.cumsum(1)
    mass_of_k = up_to.gather(1, _last(among_k))
    left = torch.where((top_k >= vocab_size)[:, None], (total[:, None] - top).exp(), mass_of_k)
    keep = among_k & ((up_to - mass < top_p * left) | (top_p >= 1)) & (values >= top + filters.min_p.log()[:, None])
    lowest = values.gather(1, _last(keep))
    count = (values >= lowest).sum(1)
    # Nothing past the candidates is kept when one of them is dropped, or when there is nothing more above -inf.
    ends = torch.full_like(last, width == vocab_size, dtype=torch.bool) | (last == -torch.inf)
    knows_mass = (top_p[:, 0] >= 1) | (top_k >= vocab_size) | (kth[:, 0] > last) | ends
    return count, (ends | (lowest[:, 0] > last)) & knows_mass


def _last(kept: torch.Tensor) -> torch.Tensor:
    """[N, 1]: the last of the kept in each row [N, K], where these come first; 0 where NaN left none."""
    return kept.sum(1, keepdim=True).clamp(min=1) - 1


def _draw_among(
    kernels: ModuleType,
    values: torch.Tensor,
    ids: torch.Tensor,
    count: torch.Tensor,
    of: NDArray[np.int64],
    keys: NDArray[np.uint64],
) -> NDArray[np.int32]:
    """Draw int32 [D] from the first `count` [N] of the candidates ids [N, K] with the scaled logits values [N, K]."""
    device = values.device
    tokens = np.empty(len(of), np.int32)
    size = max(1, CHUNK_BYTES // (32 * values.shape[1]))
    rank = torch.arange(values.shape[1], device=device)
    for begin in range(0, len(of), size):
        part = slice(begin, begin + size)
        source = torch.from_numpy(of[part]).to(device)
        most = int(count[source].max())
        candidates = ids[source, :most]
        noise = kernels.gumbel_noise(torch.from_numpy(keys[part].view(np.int64)).to(device), candidates)
        scores = (values[source, :most] + noise).masked_fill_(rank[:most] >= count[source, None], -torch.inf)
        is_best = scores == scores.amax(1, keepdim=True)
        tokens[part] = torch.where(is_best, candidates, torch.iinfo(torch.int64).max).amin(1).cpu().numpy()
    return tokens
