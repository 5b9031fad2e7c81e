"""Beam search in plain Python, clear and slow: every step computes every beam from its prompt on.

The rules are those of the vectorised search of `transformers`. Where that has nothing to compare with, this is the
definition: stop strings end a hypothesis as end tokens do, and groups of beams keep apart as in its older versions.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from pagedgen import BeamParams, SamplingParams

Ids = tuple[int, ...]
# The log-probabilities of the next token after each of some beams' generated ids, processors applied: [beams, vocab].
NextLogprobs = Callable[[list[Ids]], torch.Tensor]


@dataclass(frozen=True)
class Hypothesis:
    """The generated ids, the sum of what they were ranked by, the score, and why they end."""

    ids: Ids
    total: float
    score: float
    reason: str


@dataclass
class _Group:
    beams: list[tuple[Ids, float]] = field(default_factory=lambda: [((), 0.0)])
    finished: list[Hypothesis] = field(default_factory=list)
    is_done: bool = False


class BeamOracle:
    """One search. margin: the least difference between two numbers that a decision hung on, so that a search whose
    margin is large has one outcome only, whatever the rounding."""

    def __init__(
        self,
        next_logprobs: NextLogprobs,
        beam: BeamParams,
        max_tokens: int,
        end_ids: Sequence[int] = (),
        ends: Callable[[Ids], bool] = lambda ids: False,
    ) -> None:
        """ends: whether generated ids complete a stop string."""
        self.next_logprobs, self.beam, self.max_tokens = next_logprobs, beam, max_tokens
        self.end_ids, self.ends = frozenset(end_ids), ends
        self.width = beam.width // beam.diversity_groups
        self.num_ranked = max(2, 1 + len(self.end_ids)) * self.width
        self.margin = math.inf

    def search(self) -> list[Hypothesis]:
        groups = [_Group() for _ in range(self.beam.diversity_groups)]
        for length in range(1, self.max_tokens + 1):
            chosen: Counter[int] = Counter()
            for group in groups:
                if not group.is_done:
                    self._step(group, length, chosen)
        found = sorted((h for group in groups for h in group.finished), key=lambda h: -h.score)
        for better, worse in itertools.pairwise(found):
            self._hangs_on(better.score, worse.score)
        return found[: self.beam.num_return]

    def _step(self, group: _Group, length: int, chosen: Counter[int]) -> None:
        """Let a group's beams grow by one token. chosen: the tokens of earlier groups in this step; ours are added."""
        ranked = self._ranked(group, chosen)
        reasons = [self._reason(ids) for ids, _ in ranked]
        ended = [
            Hypothesis(ids, total, total / length**self.beam.length_penalty, reason)
            for (ids, total), reason in zip(ranked[: self.width], reasons, strict=False)
            if reason is not None
        ]
        going_on = [candidate for candidate, reason in zip(ranked, reasons, strict=True) if reason is None]
        if reasons[self.width - 1] or reasons[self.width]:
            self._hangs_on(ranked[self.width - 1][1], ranked[self.width][1])
        if len(going_on) > self.width:
            self._hangs_on(going_on[self.width - 1][1], going_on[self.width][1])
        # Where the last step ends all continuations, those that would have gone on count as chosen.
        stays = [ids[-1] for (ids, _), reason in zip(ranked, reasons, strict=True) if reason != "stop"]
        chosen.update(stays[: self.width])
        group.beams = going_on[: self.width]
        self._finish(group, ended)
        group.is_done = not group.beams or self._is_settled(group, length)

    def _reason(self, ids: Ids) -> str | None:
        """Why a continuation is finished, if it is."""
        if ids[-1] in self.end_ids or self.ends(ids):
            return "stop"
        return "length" if len(ids) == self.max_tokens else None

    def _ranked(self, group: _Group, chosen: Counter[int]) -> list[tuple[Ids, float]]:
        """The best continuations of a group's beams with their totals, best first. As many as transformers looks at:
        enough for the end tokens of each beam and as many others."""
        logprobs = self.next_logprobs([ids for ids, _ in group.beams]).double()
        totals = logprobs + torch.tensor([total for _, total in group.beams]).double()[:, None]
        for token, times in chosen.items():
            totals[:, token] -= self.beam.diversity_penalty * times
        best = totals.flatten().topk(self.num_ranked)
        places = [divmod(place, totals.shape[1]) for place in best.indices.tolist()]
        return [
            ((*group.beams[number][0], token), total)
            for (number, token), total in zip(places, best.values.tolist(), strict=True)
        ]

    def _finish(self, group: _Group, ended: list[Hypothesis]) -> None:
        """Keep the best of what was finished before and now."""
        finished = sorted(group.finished + ended, key=lambda h: -h.score)
        if len(finished) > self.width:
            self._hangs_on(finished[self.width - 1].score, finished[self.width].score)
        group.finished = finished[: self.width]

    def _is_settled(self, group: _Group, length: int) -> bool:
        if len(group.finished) < self.width:
            return False
        if self.beam.early_stopping == "true":
            return True
        if self.beam.early_stopping == "never" and self.beam.length_penalty > 0:
            length = self.max_tokens
        possible, worst = group.beams[0][1] / length**self.beam.length_penalty, group.finished[-1].score
        self._hangs_on(possible, worst)
        return possible <= worst

    def _hangs_on(self, first: float, second: float) -> None:
        self.margin = min(self.margin, abs(first - second))


class FullForward:
    """The next log-probabilities of `model` after `prompt` and some beams' ids, by full forward passes in float32.
    end_ids are held back while a beam has fewer than min_tokens."""

    def __init__(
        self,
        model: torch.nn.Module,
        prompt: Sequence[int],
        end_ids: Sequence[int] = (),
        params: SamplingParams | None = None,
    ) -> None:
        self.model, self.prompt = model, list(prompt)
        self.end_ids, self.min_tokens = list(end_ids), params.min_tokens if params else 0

    @torch.inference_mode()
    def __call__(self, beams: list[Ids]) -> torch.Tensor:
        logits = self.model(torch.tensor([[*self.prompt, *ids] for ids in beams])).logits[:, -1]
        logprobs = torch.log_softmax(logits.float(), dim=-1)
        if len(beams[0]) < self.min_tokens:
            logprobs[:, self.end_ids] = -math.inf
        return logprobs


class Replay:
    """The log-probabilities that a search of `transformers` met with, step by step, in the order of its beams."""

    def __init__(self, scores: Sequence[torch.Tensor]) -> None:
        self._scores = iter(scores)

    def __call__(self, beams: list[Ids]) -> torch.Tensor:
        return next(self._scores)[: len(beams)]


def cut_before_stop(text: str, stops: Sequence[str]) -> str | None:
    """The text before its first stop string, or None when it has none."""
    places = [text.index(stop) for stop in stops if stop in text]
    return text[: min(places)] if places else None
