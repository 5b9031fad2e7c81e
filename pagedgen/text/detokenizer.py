"""Incremental detokenization: the text of a growing list of token ids, at a cost linear in its length."""

from copy import copy

from pagedgen.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
# An unfinished UTF-8 character holds at most 3 bytes, so this many tokens of context settle everything before them.
_CONTEXT_TOKENS = 8
_WINDOW_TOKENS = 8
_LONGEST_WINDOW = 64


class IncrementalDetokenizer:
    """Returns text as it becomes certain; all that was returned, joined, is a prefix of `text()`.

    It decodes a short window of tokens and returns what that adds. Tokens decode differently at the start of a text
    (a leading space is dropped) and in the middle of a character, so the window begins with tokens already returned,
    and moves only to a place from where its text ends as before.

    Tokens that stand for single bytes (byte fallback) are held until their run ends: a run that is not valid UTF-8 as a
    whole decodes to one replacement character a byte, those already complete included.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []  # without special and unknown tokens, which leave no text
        self._start = 0  # the window is ids[start:]
        self._clean = 0  # ids[:clean] was the last point before this token at which no character was unfinished
        self._done = 0  # characters of the window's text already returned
        self._run = bytearray()  # bytes of the byte tokens at the end
        self.pending_length = 0  # characters begun in that run
        self.settled_length = 0  # characters returned so far

    def append(self, token_id: int) -> str:
        """Takes the next token and returns the text that is now certain, often none."""
        if token_id in self._tokenizer.special_ids or not self._tokenizer.token_string(token_id):
            return ""
        self._ids.append(token_id)
        byte = self._tokenizer.byte_values.get(token_id)
        if byte is not None:
            self._run.append(byte)
            self.pending_length += _begins_character(byte)
            return ""
        self._run.clear()
        self.pending_length = 0
        text = self._tokenizer.decode(self._ids[self._start :])
        settled = len(text) - text.endswith(REPLACEMENT)
        new = text[self._done : settled]
        self._done = max(self._done, settled)
        self.settled_length += len(new)
        self._move_window(text, grew=bool(new))
        return new

    def fork(self) -> "IncrementalDetokenizer":
        """A copy that goes on by itself."""
        twin = copy(self)
        twin._ids, twin._run = self._ids.copy(), self._run.copy()
        return twin

    def pending(self, max_chars: int) -> str:
        """The end of the unreturned text of a run of byte tokens, at least max_chars of it if there is so much.

        Empty while the run's last character is unfinished or when the run is not valid UTF-8.
        """
        tail = self._run[-4 * max_chars :]
        if len(tail) < len(self._run):
            while tail and not _begins_character(tail[0]):
                del tail[0]
        try:
            return tail.decode("utf-8")
        except UnicodeDecodeError:
            return ""

    def text(self) -> str:
        """The text of all tokens, decoded at once."""
        return self._tokenizer.decode(self._ids)

    def finish(self) -> str:
        """The text not returned so far, when no more tokens come."""
        return self.text()[self.settled_length :]

    def _move_window(self, text: str, grew: bool) -> None:
        """Keeps the window short. text: the window's text."""
        count = len(self._ids)
        unfinished = text.endswith(REPLACEMENT)
        clean = grew and not unfinished
        if count - self._start > _LONGEST_WINDOW:
            self._start_at(self._clean if clean else count - _CONTEXT_TOKENS, text)
        elif clean and count - self._start > _WINDOW_TOKENS:
            self._start_at(self._clean, text)
        if clean:
            self._clean = count

    def _start_at(self, start: int, text: str) -> None:
        context = self._tokenizer.decode(self._ids[start:])
        # Nothing but leading spaces, dropped at the start of a text, is no context to go on from.
        if context and text.endswith(context.lstrip(REPLACEMENT)):
            self._start = start
            self._done = len(context) - context.endswith(REPLACEMENT)


def _begins_character(byte: int) -> bool:
    return byte & 0xC0 != 0x80
