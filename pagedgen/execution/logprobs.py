"""Log-probabilities for the rows that ask for them, taken from the model's own logits."""

from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType

import numpy as np
import torch
from numpy.typing import NDArray

from pagedgen.execution.transfer import to_device, to_host
from pagedgen.step import LogprobResult


class TopLogprobs:
    """The likeliest tokens of some rows of logits [R, vocab_size] of any dtype, and the log-probability of any other.

    rows: int64 [N]. wanted: for each of them how many of its likeliest tokens are wanted; those of probability zero are
    left out. The logits may have tokens banned afterwards, but must not change otherwise before `of_tokens`.
    """

    def __init__(
        self, kernels: ModuleType, logits: torch.Tensor, rows: NDArray[np.int64], wanted: Sequence[int]
    ) -> None:
        self._logits, self._wanted = logits, wanted
        self._rows = to_device(rows, logits.device)
        k = max(1, min(max(wanted), logits.shape[1]))
        values, ids, self._total = kernels.top_tokens(
            logits, torch.ones(len(rows), device=logits.device), k, self._rows
        )
        values -= self._total[:, None]
        self._ids, self._values = to_host(ids), to_host(values)

    def of_tokens(self, tokens: torch.Tensor, of: NDArray[np.int64]) -> Callable[[], list[LogprobResult]]:
        """tokens int64 [D] on the device, each drawn from the row of[d], counted among `rows` -> what gives one result
        for each, once the device has come so far. A token of -1 has the log-probability NaN."""
        source = to_device(of, tokens.device)
        chosen = self._logits[self._rows[source], tokens.clamp(min=0)].float() - self._total[source]
        own = to_host(chosen.masked_fill(tokens < 0, torch.nan))
        return partial(_results, own, of, self._ids, self._values, self._wanted)  # and not the logits


def _results(
    own: torch.Tensor, of: NDArray[np.int64], ids: torch.Tensor, values: torch.Tensor, wanted: Sequence[int]
) -> list[LogprobResult]:
    possible = (values > -torch.inf).sum(1).tolist()
    all_ids, all_values = ids.tolist(), values.tolist()
    found = []
    for row, logprob in zip(of.tolist(), own.tolist(), strict=True):
        k = min(wanted[row], possible[row])
        found.append(LogprobResult(logprob, tuple(all_ids[row][:k]), tuple(all_values[row][:k])))
    return found
