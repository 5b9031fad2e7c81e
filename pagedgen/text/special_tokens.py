"""Special tokens spelled by a row's own values are text: they are marked before a template sees them, and encoded so.

A mark is a private-use character that the row does not hold. One inside every special token that a value spells leaves
only the template's own special tokens whole in the rendered text.
"""

import json
import re
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from pagedgen.text.tokenizer import Tokenizer

# Marks and the stand-ins of the encoder come from different ranges, so that neither is ever taken for the other.
_MARKS = range(0xE000, 0xF900)
_STAND_INS = range(0xF0000, 0xFFFFE)
# Keys that every chat has; what spells a special token by such a word would spell it in each template, too.
_PLAIN_KEYS = frozenset({"role", "content"})


class SpecialTokenError(Exception):
    """The special token named in the message cannot be kept apart from text that spells it."""


@dataclass(frozen=True, slots=True)
class Marks:
    """What stands for what in one row's marked texts.

    edge: put into special tokens, and where texts could join to one. letters: stands for special tokens that are a
    single character, which nothing can be put into.
    """

    edge: str
    letters: Mapping[str, str]

    def are_in(self, text: str) -> bool:
        """Whether any of them is in the text."""
        return any(form in text for mark in (self.edge, *self.letters.values()) for form in _forms(mark))

    def removed_from(self, text: str) -> str:
        """The text as the row means it, also where a template wrote it in JSON or in a URL."""
        for mark, meant in [(self.edge, ""), *((mark, letter) for letter, mark in self.letters.items())]:
            for form in _forms(mark):
                text = text.replace(form, meant)
        return text


class SpecialTokens:
    """Finds special tokens in the values of rows, which may be nested lists and dicts, and marks them.

    normalize: what the tokenizer does to a text first, where that may turn another text into a special token.
    """

    def __init__(self, texts: Iterable[str], normalize: Callable[[str], str] | None = None) -> None:
        self._normalize = normalize
        self._texts = sorted(texts, key=len, reverse=True)
        self._letters = [text for text in self._texts if len(text) == 1]
        longer = [text for text in self._texts if len(text) > 1]
        whole = _any_of(self._texts)
        self._whole = re.compile(whole)
        self._starts = re.compile(f"(?=(?:{_any_of(longer)}))(?s:.)")
        firsts, lasts = {text[0] for text in longer}, {text[-1] for text in longer}
        # Most texts hold none of these characters, which is the fastest to find out.
        self._hint = re.compile(_any_of(firsts | lasts | set(self._letters)))
        self._firsts, self._lasts = re.compile(_any_of(firsts)), re.compile(_any_of(lasts))
        self._beginnings = tuple({text[:i] for text in longer for i in range(1, len(text))})
        self._endings = tuple({text[i:] for text in longer for i in range(1, len(text))})
        self._reach = max(map(len, longer), default=1) - 1

    def find(self, value: object) -> str | None:
        """The first special token that the value spells."""
        found = (self._whole.search(text) for text in strings_in(value) if self._hint.search(text))
        return next((match.group() for match in found if match), None)

    def within(self, text: str) -> list[str]:
        """The special tokens that a text spells."""
        return [special for special in self._texts if special in text]

    def is_hinted(self, value: object) -> bool:
        """Whether the value holds a character that a special token begins or ends with.

        Every value of every row is asked for this, so it goes without generators.
        """
        if isinstance(value, str):
            return self._hint.search(value) is not None
        if isinstance(value, dict):
            search = self._hint.search
            for key, item in value.items():
                if search(item) if type(item) is str else self.is_hinted(item):
                    return True
                if key not in _PLAIN_KEYS and self.is_hinted(key):
                    return True
            return False
        if isinstance(value, list | tuple):
            return any(map(self.is_hinted, value))
        return isinstance(value, Mapping) and self.is_hinted(dict(value))

    def is_suspicious(self, value: object) -> bool:
        """Whether the value spells a special token, or begins or ends as if to join with others to one."""
        if self._normalize is not None:
            normal = map(self._normalize, strings_in(value))
            if any(self._whole.search(text) is not None for text in normal):
                return True
        if not self.is_hinted(value):
            return False
        for text in strings_in(value):
            if self._whole.search(text) or self._ends_open(text) or self._begins_open(text):
                return True
        return False

    def marks_for(self, value: object, surroundings: str) -> Marks:
        """Marks that neither the value nor the surroundings hold.

        Raises SpecialTokenError when they hold every character that could be one.
        """
        held = "\n".join([surroundings, *strings_in(value)])
        lowered = held.lower()
        chosen: list[str] = []
        for code in _MARKS:
            mark = chr(code)
            if mark not in held and all(form.lower() not in lowered for form in _forms(mark)):
                chosen.append(mark)
                if len(chosen) > len(self._letters):
                    return Marks(chosen[0], dict(zip(self._letters, chosen[1:], strict=True)))
        raise SpecialTokenError(self.find(value) or self._texts[0])

    def marked(self, value: Any, marks: Marks) -> Any:
        """The value with marks in the special tokens that its texts spell, and at edges that could join to one."""
        if isinstance(value, str):
            return self.marked_edges(self.marked_inside(value, marks), marks)
        if isinstance(value, Mapping):
            return {self.marked(key, marks): self.marked(item, marks) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.marked(item, marks) for item in value]
        return value

    def marked_inside(self, text: str, marks: Marks, trusted: Sequence[str] = ()) -> str:
        """The text with a mark in each special token, also where they overlap, except in the trusted ones."""
        if trusted:
            kept = re.compile(f"({_any_of(sorted(trusted, key=len, reverse=True))})")
            pieces = kept.split(text)
            pieces[::2] = [self.marked_inside(piece, marks) for piece in pieces[::2]]
            return "".join(pieces)
        text = self._starts.sub(rf"\g<0>{marks.edge}", text)
        for letter, mark in marks.letters.items():
            text = text.replace(letter, mark)
        return text

    def marked_edges(self, text: str, marks: Marks) -> str:
        """The text with a mark where it begins or ends with a part of a special token."""
        before = marks.edge if self._begins_open(text) else ""
        return before + text + (marks.edge if self._ends_open(text) else "")

    def split(self, text: str) -> Iterator[tuple[str, bool]]:
        """The pieces of a text in order, and of each whether it is a special token."""
        done = 0
        for match in self._whole.finditer(text):
            yield text[done : match.start()], False
            yield match.group(), True
            done = match.end()
        yield text[done:], False

    def _begins_open(self, text: str) -> bool:
        return self._lasts.search(text, 0, self._reach) is not None and text.startswith(self._endings)

    def _ends_open(self, text: str) -> bool:
        start = max(0, len(text) - self._reach)
        return self._firsts.search(text, start) is not None and text.endswith(self._beginnings)


class GuardedEncoder:
    """Encodes texts in which only unmarked special tokens are tokens.

    A Rust tokenizer is encoded with by a twin, in which every special token is called by a name that nobody can guess,
    and keeps its id. The template's own special tokens take these names, and then all of the text is encoded at once,
    so that ordinary text gives the ids that it always gives. Where there is no such twin, the text is encoded in the
    pieces between the template's special tokens.
    """

    def __init__(self, tokenizer: Tokenizer, specials: SpecialTokens) -> None:
        self._tokenizer = tokenizer
        self._specials = specials
        self._twin, self._names, unknown = _build_twin(tokenizer)
        # The id of unknown text is an ordinary outcome of ordinary text.
        self._watched = {i: text for text, i in tokenizer.special_tokens.items() if text != unknown}

    def encode(self, text: str, marks: Marks, add_special_tokens: bool) -> list[int]:
        """Token ids of a marked text, as `Tokenizer.encode_batch` gives them for an unmarked one.

        Raises SpecialTokenError when the special tokens in them are not those that the text has unmarked.
        """
        pieces = [
            (piece if special else marks.removed_from(piece), special) for piece, special in self._specials.split(text)
        ]
        expected = Counter(self._tokenizer.special_tokens[piece] for piece, special in pieces if special)
        if self._twin is None:
            ids = self._encode_pieces(pieces)
            if add_special_tokens:
                before, after = self._tokenizer.added_ids
                ids = [*before, *ids, *after]
        else:
            named = "".join(self._names[piece] if special else piece for piece, special in pieces)
            ids = list(self._twin.encode(named, add_special_tokens=add_special_tokens).ids)
        if add_special_tokens:
            expected.update(i for side in self._tokenizer.added_ids for i in side)
            bos = self._tokenizer.bos_token_id
            if bos is not None and self._tokenizer.adds_bos and ids[:2] == [bos, bos]:
                ids = ids[1:]
                expected[bos] -= 1
        found = Counter(i for i in ids if i in self._watched)
        for i, special in self._watched.items():
            if found[i] != expected[i]:
                raise SpecialTokenError(special)
        return ids

    def _encode_pieces(self, pieces: Iterable[tuple[str, bool]]) -> list[int]:
        ids: list[int] = []
        for piece, special in pieces:
            if special:
                ids.append(self._tokenizer.special_tokens[piece])
            elif piece and self._specials.find(piece) is None:
                ids += self._tokenizer.encode_batch([piece], add_special_tokens=False)[0]
            elif piece:
                ids += self._tokenizer.encode_literally(piece)
        return ids


def strings_in(value: object) -> Iterator[str]:
    """Every text in nested lists and dicts, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if key not in _PLAIN_KEYS:
                yield from strings_in(key)
            yield from strings_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from strings_in(item)


def _build_twin(tokenizer: Tokenizer) -> tuple[Any | None, Mapping[str, str], str | None]:
    """The twin, the new name of each special token, and the token that stands for unknown text."""
    source = tokenizer.backend_json()
    if source is None:
        return None, {}, tokenizer.unknown_token
    unknown = _unknown_token(json.loads(source)["model"])
    # Normalizers drop or change one kind of name or the other.
    for template in ("{}", "[{}]"):
        names = {}
        for text in tokenizer.special_tokens:
            if template == "{}":
                name = "".join(chr(_STAND_INS[secrets.randbelow(len(_STAND_INS))]) for _ in range(6))
            else:
                name = template.format(secrets.token_hex(12))
            names[text] = name
        twin = _renamed(source, names)
        if twin is not None and _is_twin(twin, tokenizer, names):
            return twin, names, unknown
    return None, {}, unknown


def _renamed(source: str, names: Mapping[str, str]) -> Any | None:
    """The Rust tokenizer of this JSON with other names of its special tokens, in its vocabulary as well."""
    from tokenizers import Tokenizer as RustTokenizer

    parts = json.loads(source)
    for token in parts["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = parts["model"]
    vocab = model["vocab"]
    if isinstance(vocab, Mapping):
        model["vocab"] = {names.get(text, text): i for text, i in vocab.items()}
    else:
        model["vocab"] = [[names.get(text, text), score] for text, score in vocab]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
        # Without these, plain text cannot come to a special token; one that leads on to longer tokens fails below.
        model["merges"] = [pair for pair in pairs if pair[0] + pair[1] not in names]
    try:
        return RustTokenizer.from_str(json.dumps(parts))
    except Exception:  # Rust's error has no type of its own
        return None


def _is_twin(twin: Any, tokenizer: Tokenizer, names: Mapping[str, str]) -> bool:
    """Whether a special token by its new name gives what it gives by its own."""
    for text, name in names.items():
        ids = twin.encode(name, add_special_tokens=False).ids
        if twin.token_to_id(name) != tokenizer.special_tokens[text]:
            return False
        if ids != tokenizer.encode_batch([text], add_special_tokens=False)[0]:
            return False
    return True


def _unknown_token(model: Mapping[str, Any]) -> str | None:
    if model.get("unk_id") is not None:
        return str(model["vocab"][model["unk_id"]][0])
    return model.get("unk_token")


def _any_of(texts: Iterable[str]) -> str:
    """The pattern that any of these texts matches, or nothing where there are none."""
    return "|".join(map(re.escape, texts)) or "(?!)"


def _forms(mark: str) -> tuple[str, ...]:
    """A private-use character, and how JSON and URLs write it."""
    return mark, f"\\u{ord(mark):04x}", quote(mark)
