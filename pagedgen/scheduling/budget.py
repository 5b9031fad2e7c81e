"""How many tokens a step may compute: all that are allowed, or fewer for a while after a step ran out of memory."""

# Good steps before a budget that was lowered is doubled again: few enough that a passing shortage costs minutes of a
# long run, many enough that what a failed step throws away is small beside them.
GOOD_STEPS = 256


class StepBudget:
    """most: the tokens allowed. tokens: those of the next step. least: the fewest that `tokens` ever was.

    A step that runs out of memory halves the budget, good steps double it back. Where the doubled budget fails again,
    the next doubling waits for twice as many good steps: what the running sequences recompute after each failure could
    otherwise take longer than the time between two failures, and nothing would ever be finished.
    """

    def __init__(self, most: int) -> None:
        self.most = self.tokens = self.least = most
        self._good, self._patience, self._was_raised = 0, GOOD_STEPS, False

    @property
    def is_least(self) -> bool:
        """Whether there is no smaller step to try."""
        return self.tokens == 1

    def step_succeeded(self) -> None:
        self._good += 1
        if self._good < self._patience:
            return
        self._good = 0
        if self.tokens == self.most:
            self._patience = GOOD_STEPS
        self._was_raised = self.tokens < self.most
        self.tokens = min(2 * self.tokens, self.most)

    def step_failed(self, num_tokens: int) -> None:
        """num_tokens: how many the failed step had."""
        if self._was_raised:
            self._patience *= 2
        self._good, self._was_raised = 0, False
        self.tokens = max(1, num_tokens // 2)
        self.least = min(self.least, self.tokens)

    def restore(self) -> None:
        """Allow all again: what did not fit is gone."""
        self.tokens, self._good, self._patience, self._was_raised = self.most, 0, GOOD_STEPS, False
