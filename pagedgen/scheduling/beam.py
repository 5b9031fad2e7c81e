"""Beam search over the sequences of one group: which continuations live on, which are finished, and when to end.

The rules are those of `transformers` (its vectorised beam search), so that sequences and scores agree; with divisions
it is the diverse beam search of Vijayakumar et al., 2018. Plain numpy: the device half finds the likeliest next tokens
of each beam, and everything else happens here.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from pagedgen.request import BeamParams, FinishReason, Status
from pagedgen.scheduling.sequence import Sequence, StopChecker

TokensOf = Callable[[Sequence], NDArray[np.int32]]


@dataclass(frozen=True, slots=True)
class Branch:
    """One more token for the beam `parent`. running_score, cumulative_logprob: with that token."""

    parent: Sequence
    token: int
    division: int
    running_score: np.float32
    cumulative_logprob: float
    stop_checker: StopChecker | None = None


@dataclass(slots=True)
class _Division:
    """A part of the beams that is searched by itself. hypotheses: finished sequences, the best first, at most as many
    as it has beams. is_done: nothing can change them any more."""

    hypotheses: list[Sequence] = field(default_factory=list)
    is_done: bool = False


class BeamSearch:
    """The state of one request's search.

    num_prompt: tokens of the prompt. max_new: the most tokens that may follow it. num_end_ids: how many ids end it.
    """

    def __init__(self, params: BeamParams, num_prompt: int, max_new: int, num_end_ids: int) -> None:
        self.params, self._num_prompt, self._max_new = params, num_prompt, max_new
        self._width = params.width // params.diversity_groups
        # Each beam's end tokens may be among the best continuations, and enough others have to remain.
        self._num_ranked = max(2, 1 + num_end_ids) * self._width
        self._divisions = [_Division() for _ in range(params.diversity_groups)]

    @property
    def num_continuations(self) -> int:
        """How many of a beam's likeliest next tokens `advance` needs: those that are ranked, and as many as the penalty
        for the choices of earlier divisions may push out of them."""
        return self._num_ranked + self.params.width - self._width

    @property
    def results(self) -> list[Sequence]:
        """The best hypotheses so far, in order of their score, as many as were asked for."""
        found = [hypothesis for division in self._divisions for hypothesis in division.hypotheses]
        found.sort(key=lambda hypothesis: -(hypothesis.score or 0.0))
        return [replace(found[rank], sample=rank) for rank in range(min(len(found), self.params.num_return))]

    def advance(self, beams: list[Sequence], tokens_of: TokensOf) -> list[Branch]:
        """One step. beams: the live ones, best first, all with their continuations. tokens_of: a beam's tokens so far.

        Returns the beams of the next step; those that ended have become hypotheses. None are left at the end.
        """
        is_first = len(tokens_of(beams[0])) == self._num_prompt  # one sequence yet, which all divisions begin with
        branches: list[Branch] = []
        chosen: Counter[int] = Counter()
        for index, division in enumerate(self._divisions):
            if division.is_done:
                continue
            own = beams if is_first else [beam for beam in beams if beam.division == index]
            kept = self._advance_division(index, own, chosen, tokens_of)
            if not division.is_done:
                branches += kept
        return branches

    def _advance_division(
        self, index: int, beams: list[Sequence], chosen: Counter[int], tokens_of: TokensOf
    ) -> list[Branch]:
        """The division's beams for the next step, after its hypotheses have been brought up to date. chosen: the tokens
        of earlier divisions in this step; this one's are added, those too that only the length limit ends."""
        division, length = self._divisions[index], len(tokens_of(beams[0])) - self._num_prompt + 1
        kept: list[Branch] = []
        ended: list[Sequence] = []
        going_on: list[int] = []
        for rank, branch in enumerate(self._ranked(index, beams, chosen)):
            if len(kept) == self._width and rank >= self._width:
                break
            reason, text = None, None
            if branch.token in branch.parent.end_ids:
                reason = FinishReason.STOP
            elif branch.parent.stop_checker is not None:
                checker = branch.parent.stop_checker.fork()
                text = checker.append(branch.token)
                reason = None if text is None else FinishReason.STOP
                branch = replace(branch, stop_checker=checker)
            if reason is None:
                going_on.append(branch.token)
            if reason is None and length == self._max_new:
                reason = FinishReason.LENGTH
            if reason is None:
                if len(kept) < self._width:
                    kept.append(branch)
            elif rank < self._width:  # the ranks behind are there only so that enough beams live on
                ended.append(self._hypothesis(branch, length, reason, text, tokens_of(branch.parent)))
        chosen.update(going_on[: self._width])
        division.hypotheses = sorted(division.hypotheses + ended, key=lambda h: -(h.score or 0.0))[: self._width]
        division.is_done = not kept or self._is_settled(division, kept[0], length)
        return kept

    def _ranked(self, division: int, beams: list[Sequence], chosen: Counter[int]) -> list[Branch]:
        """The best continuations of all the beams, best first; a tie goes to the better beam, then the likelier token.

        Sums are in float32, as in `transformers`, so that near ties fall the same way.
        """
        own, ids, scores, logprobs = [], [], [], []
        for number, beam in enumerate(beams):
            found = beam.continuations
            assert found is not None
            penalty = np.array([chosen[token] for token in found.ids.tolist()] if chosen else 0, np.float32)
            ids.append(found.ids)
            logprobs.append(found.logprobs)
            scores.append(
                found.logprobs - penalty * np.float32(self.params.diversity_penalty) + np.float32(beam.running_score)
            )
            own.append(np.full(len(found.ids), number))
        all_scores = np.concatenate(scores)
        best = np.argsort(-all_scores, kind="stable")[: self._num_ranked]
        beam_of, token_of, logprob_of = np.concatenate(own), np.concatenate(ids), np.concatenate(logprobs)
        return [
            Branch(
                parent=beams[beam_of[i]],
                token=int(token_of[i]),
                division=division,
                running_score=all_scores[i],
                cumulative_logprob=beams[beam_of[i]].cumulative_logprob + float(logprob_of[i]),
            )
            for i in best.tolist()
        ]

    def _hypothesis(
        self, branch: Branch, length: int, reason: FinishReason, text: str | None, tokens: NDArray[np.int32]
    ) -> Sequence:
        hypothesis = branch.parent.copy()
        hypothesis.token_ids = np.append(tokens, np.int32(branch.token))
        hypothesis.cumulative_logprob = branch.cumulative_logprob
        hypothesis.score = float(branch.running_score) / length**self.params.length_penalty
        hypothesis.final_text = text
        hypothesis.finish(Status.OK, reason)
        return hypothesis

    def _is_settled(self, division: _Division, best: Branch, length: int) -> bool:
        """Whether no beam can change the hypotheses any more, by the rule that `early_stopping` names."""
        if len(division.hypotheses) < self._width:
            return False
        if self.params.early_stopping == "true":
            return True
        longest = self.params.early_stopping == "never" and self.params.length_penalty > 0
        possible = float(best.running_score) / (self._max_new if longest else length) ** self.params.length_penalty
        worst = division.hypotheses[-1].score
        assert worst is not None
        return bool(possible <= worst)
