"""Stop strings: the text of a completion ends exactly before the first one, wherever the token edges are."""

from copy import copy

from pagedgen.text.detokenizer import IncrementalDetokenizer
from pagedgen.text.tokenizer import Tokenizer


class StopChecker:
    """Watches one sequence's generated tokens (never its prompt) for its stop strings.

    A stop string counts when its last character is complete at token number `min_tokens` or later; one that completes
    earlier is part of the text and is never looked at again. Each token costs a look at a bounded tail of the text.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...], min_tokens: int = 0) -> None:
        assert stop, "a checker needs stop strings"
        assert all(stop), "an empty stop string is everywhere"
        self._detokenizer = IncrementalDetokenizer(tokenizer)
        self._stop = stop
        self._longest = max(map(len, stop))
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._ignored = 0  # stop strings that end within the first so many characters came too early
        self._recent = ""  # the end of the settled text, one character short of the longest stop string

    def append(self, token_id: int) -> str | None:
        """Takes the next generated token; the final text, cut before the earliest stop string, once one is complete."""
        self._num_tokens += 1
        detokenizer = self._detokenizer
        settled = self._recent + detokenizer.append(token_id)
        pending = detokenizer.pending(self._longest)
        visible = settled + pending
        length = detokenizer.settled_length + (detokenizer.pending_length if pending else 0)
        self._recent = settled[len(settled) - self._longest + 1 :] if len(settled) >= self._longest else settled
        if self._num_tokens < self._min_tokens:
            self._ignored = max(self._ignored, length)
            return None
        if self._earliest(visible, self._ignored - (length - len(visible))) is None:
            return None
        # The tail may say yes wrongly, where a run of byte tokens is longer than what it shows of it. The answer is
        # cut from the text that the completion would have without stop strings.
        text = detokenizer.text()
        cut = self._earliest(text, self._ignored)
        return None if cut is None else text[:cut]

    def fork(self) -> "StopChecker":
        """A copy that goes on by itself."""
        twin = copy(self)
        twin._detokenizer = self._detokenizer.fork()
        return twin

    def _earliest(self, text: str, ignored: int) -> int | None:
        """Where the first stop string begins that ends after the first `ignored` characters."""
        found = [text.find(stop, max(0, ignored - len(stop) + 1)) for stop in self._stop]
        return min((at for at in found if at >= 0), default=None)
