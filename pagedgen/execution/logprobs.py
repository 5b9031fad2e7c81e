"""Log-probabilities for the rows that ask for them, taken from the model's own logits."""

from collections.abc import Sequence
from types import ModuleType

import numpy as np
import torch
from numpy.typing import NDArray

from pagedgen.step import LogprobResult


class TopLogprobs:
    """The likeliest tokens of some rows of logits [R, vocab_size] of any dtype, and the log-probability of any other.

    rows: int64 [N]. wanted: for each of them how many of its likeliest tokens are wanted; those of probability zero are
    left out. The logits may have tokens banned afterwards, but must not change otherwise before `results`.
    """

    def __init__(
        self, kernels: ModuleType, logits: torch.Tensor, rows: NDArray[np.int64], wanted: Sequence[int]
    ) -> None:
        self._logits, self._wanted = logits, wanted
        self._rows = torch.from_numpy(rows).to(logits.device)
        k = max(1, min(max(wanted), logits.shape[1]))
        values, ids, self._total = kernels.top_tokens(
            logits, torch.ones(len(rows), device=logits.device), k, self._rows
        )
        values -= self._total[:, None]
        self._possible: list[int] = (values > -torch.inf).sum(1).tolist()
        self._ids, self._values = ids.tolist(), values.tolist()

    def results(self, tokens: NDArray[np.int32], of: NDArray[np.int64]) -> list[LogprobResult]:
        """tokens int32 [D], each drawn from the row of[d], counted among `rows` -> one result for each. A token of -1
        has the log-probability NaN."""
        drawn, source = (torch.from_numpy(x.astype(np.int64)).to(self._logits.device) for x in (tokens, of))
        chosen = self._logits[self._rows[source], drawn.clamp(min=0)].float() - self._total[source]
        results = []
        for row, logprob in zip(of.tolist(), chosen.masked_fill(drawn < 0, torch.nan).tolist(), strict=True):
            k = min(self._wanted[row], self._possible[row])
            results.append(LogprobResult(logprob, tuple(self._ids[row][:k]), tuple(self._values[row][:k])))
        return results
