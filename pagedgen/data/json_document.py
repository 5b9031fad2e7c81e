"""`.json` files: an array of objects, one object or several, or JSON lines under the wrong name; streamed."""

import codecs
import io
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from pagedgen.data.streams import MAX_LINE_BYTES, is_encodable, numbered_lines, open_stream
from pagedgen.data.text_formats import MAX_DEPTH, RawRow, RowFile, check_object, json_rows, parse_object
from pagedgen.errors import PagedgenError

_CHUNK_BYTES = 1 << 20
_SPACE = re.compile(r"[ \t\r\n]*")


class JsonFile(RowFile):
    """`.json`; places are lines when it holds JSON lines, else items of the array."""

    def __init__(self, path: Path, name: str) -> None:
        super().__init__(path, name)
        with open_stream(path, self.progress) as stream:
            self._is_lines = _holds_json_lines(stream)
        self.unit = "line" if self._is_lines else "item"

    def rows(self) -> Iterator[RawRow]:
        with open_stream(self.path, self.progress) as stream:
            yield from json_rows(numbered_lines(stream)) if self._is_lines else document_rows(stream, str(self.path))


def _holds_json_lines(stream: io.BufferedReader) -> bool:
    """Whether the first two lines are each an object: one line alone may as well be read as one object."""
    if stream.peek(_CHUNK_BYTES).lstrip().startswith(b"["):
        return False  # and an array on one line is not read whole
    lines = numbered_lines(stream)
    for _ in range(2):
        _, line = next(lines, (0, None))
        if line is None or not line.lstrip().startswith(b"{") or parse_object(line.decode("utf-8", "replace"))[1]:
            return False
    return True


def document_rows(stream: io.BufferedReader, name: str) -> Iterator[RawRow]:
    """The items of the array in `stream`, or the objects in it one after the other.

    Raises PagedgenError where the text is not JSON: unlike with lines, there is no telling where the next item begins.
    """
    text = _Buffer(stream)
    is_array = text.take("[")
    place = 0
    while not text.at_end() and not (is_array and text.take("]")):
        place += 1
        if is_array and place > 1 and not text.take(","):
            raise PagedgenError(f"{name} is not valid JSON after item {place - 1}: ',' or ']' expected; mend the file")
        try:
            yield text.item(place)
        except (ValueError, RecursionError) as error:
            what = _words(error)
            raise PagedgenError(f"{name} is not valid JSON at item {place}: {what}; mend the file") from error
        if is_array and text.at_end():
            raise PagedgenError(f"{name} is cut off after item {place}: the array is not closed; make it again")
    if is_array and not text.at_end():
        raise PagedgenError(f"{name} has something after the end of its array; mend the file")


def _words(error: ValueError | RecursionError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return error.msg
    if isinstance(error, RecursionError):
        return f"it is nested more than {MAX_DEPTH} levels deep"
    return "a number has too many digits" if "digits" in str(error) else str(error)


class _Buffer:
    """The part of the document around the reading position, decoded. Bytes that are not UTF-8 become surrogates."""

    def __init__(self, stream: io.BufferedReader) -> None:
        self._stream = stream
        self._decode: Callable[[bytes, bool], str] = codecs.getincrementaldecoder("utf-8")("surrogateescape").decode
        self._scan = json.JSONDecoder().raw_decode
        self._text = ""
        self._position = 0
        self._ended = False

    def at_end(self) -> bool:
        """Whether nothing but whitespace is left."""
        while True:
            match = _SPACE.match(self._text, self._position)
            self._position = match.end() if match else self._position
            if self._position < len(self._text):
                return False
            if not self._fill():
                return True

    def take(self, character: str) -> bool:
        """Moves past `character` if it is the next one after whitespace."""
        if self.at_end() or self._text[self._position] != character:
            return False
        self._position += 1
        return True

    def item(self, place: int) -> RawRow:
        """The next value; reads on while it may be cut off by the end of the buffer."""
        if self.at_end():
            raise ValueError("a value is missing")
        while True:
            start = self._position
            try:
                value, end = self._scan(self._text, start)
                # At the very end of the buffer a number may still go on.
                if end < len(self._text) or not self._fill():
                    break
            except json.JSONDecodeError:
                if not self._fill():
                    raise
        raw = self._text[start:end]
        self._position = end
        if not is_encodable(raw):
            return RawRow({}, place, "is not valid UTF-8")
        columns, problem = check_object(value, raw)
        return RawRow(columns, place, problem)

    def _fill(self) -> bool:
        """Drops what was read and doubles the rest; False at the end of the stream."""
        rest = self._text[self._position :]
        if len(rest) > MAX_LINE_BYTES:
            raise ValueError(f"no complete value within {MAX_LINE_BYTES >> 20} MiB")
        if self._ended:
            return False
        data = self._stream.read(max(_CHUNK_BYTES, len(rest)))
        self._ended = not data
        self._text = rest + self._decode(data, self._ended)
        self._position = 0
        return True
