"""Incremental text against decoding everything at once, stop strings against searching the whole text each time."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers_for_tests import CORPUS, metaspace, of_every_kind

from pagedgen.text.detokenizer import REPLACEMENT, IncrementalDetokenizer
from pagedgen.text.stop import StopChecker
from pagedgen.text.tokenizer import Tokenizer

KINDS = ["byte_level", "sentencepiece_like", "metaspace", "words", "byt5"]
PIECES = [
    "👩‍🔬",
    "🇩🇪",
    "é",
    "e\u0301",
    "日本",
    "  ",
    " ",
    "\n",
    "STOP",
    "END",
    "E",
    "N",
    "€",
    "a",
    "\ufffd",
]
TEXTS = st.one_of(st.text(max_size=40), st.lists(st.sampled_from(PIECES), max_size=40).map("".join))


def token_lists(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Ids of real texts, any ids at all, and both in turn, special and unknown ids included."""
    encoded = TEXTS.map(lambda text: [] if _kind(tokenizer) == "words" else tokenizer.encode_batch([text], False)[0])
    any_id = st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=30)
    lists = [encoded, any_id]
    if tokenizer.byte_values:
        lists.append(st.lists(st.sampled_from(sorted(tokenizer.byte_values)), max_size=12))
    return st.lists(st.one_of(lists), max_size=5).map(lambda parts: [i for part in parts for i in part])


def _kind(tokenizer: Tokenizer) -> str:
    return next(kind for kind, other in of_every_kind().items() if other is tokenizer)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_incremental_text_is_the_whole_text(kind: str, data: st.DataObject) -> None:
    tokenizer = of_every_kind()[kind]
    ids = data.draw(token_lists(tokenizer))
    detokenizer = IncrementalDetokenizer(tokenizer)
    returned = ""
    for i, token_id in enumerate(ids):
        returned += detokenizer.append(token_id)
        now = tokenizer.decode(ids[: i + 1])
        # What is held back is a run of byte tokens or one unfinished character, never settled text.
        if token_id not in tokenizer.byte_values.keys() | tokenizer.special_ids and tokenizer.token_string(token_id):
            assert now in (returned, returned + REPLACEMENT)
        assert tokenizer.decode(ids).startswith(returned)
    assert returned + detokenizer.finish() == tokenizer.decode(ids) == detokenizer.text()


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece_like", "byt5"])
def test_no_broken_character_is_returned(kind: str) -> None:
    tokenizer = of_every_kind()[kind]
    text = "family 👨‍👩‍👧‍👦, flags 🇯🇵🇧🇷, 漢字, e\u0301 and ไทย"
    detokenizer = IncrementalDetokenizer(tokenizer)
    parts = [detokenizer.append(i) for i in tokenizer.encode_batch([text], False)[0]]
    assert not any(REPLACEMENT in part for part in parts)
    assert "".join(parts) + detokenizer.finish() == text


def record_decodes(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows by the number of ids of each call of `decode`."""
    sizes: list[int] = []
    decode = tokenizer.decode

    def recorded(ids: Sequence[int]) -> str:
        sizes.append(len(ids))
        return decode(ids)

    monkeypatch.setattr(tokenizer, "decode", recorded)
    return sizes


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece_like", "byt5", "metaspace"])
def test_a_token_decodes_a_bounded_window(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = of_every_kind()[kind]
    ids = tokenizer.encode_batch([" ".join(CORPUS) * 20], False)[0]
    decoded = record_decodes(tokenizer, monkeypatch)
    checker = StopChecker(tokenizer, ("never in it",))
    assert [checker.append(i) for i in ids] == [None] * len(ids)
    longest_run = 60  # byte tokens are decoded once, when their run ends
    assert max(decoded) <= 20 + longest_run
    assert sum(decoded) <= 25 * len(ids)


def test_garbage_costs_no_more_than_text(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = of_every_kind()["byte_level"]
    lead, cont = tokenizer.encode_batch(["é"], False)[0][:2]
    assert tokenizer.decode([lead, lead, cont, cont]) == REPLACEMENT + "é" + REPLACEMENT
    expected = tokenizer.decode([lead] * 1000)
    sizes = record_decodes(tokenizer, monkeypatch)
    detokenizer = IncrementalDetokenizer(tokenizer)
    returned = "".join(detokenizer.append(i) for i in [lead] * 1000)
    assert max(sizes) <= 70
    assert returned + detokenizer.finish() == expected


@pytest.mark.parametrize("kind", ["byte_level", "byt5"])
@pytest.mark.parametrize("length", range(58, 68))
def test_a_character_after_long_garbage_is_whole(kind: str, length: int) -> None:
    tokenizer = of_every_kind()[kind]
    if kind == "byte_level":
        spelling = ByteLevelSpelling(tokenizer)
        ids = spelling.ids(b"\x80" * length + "a😀b".encode())
    else:
        ids = [byte + 3 for byte in b"\x80" * length + "a😀b".encode()]
    detokenizer = IncrementalDetokenizer(tokenizer)
    returned = "".join(detokenizer.append(i) for i in ids)
    assert returned == tokenizer.decode(ids)
    assert returned.endswith("a😀b")
    without_a = [*ids[:length], *ids[length + 1 :]]
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert "".join(detokenizer.append(i) for i in without_a) == tokenizer.decode(without_a)


class ByteLevelSpelling:
    """The single-byte tokens of a byte-level vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._id_of = {tokenizer.token_string(i): i for i in range(tokenizer.vocab_size)}
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [byte for byte in range(256) if byte not in printable]
        self._spelling = {byte: chr(byte) for byte in printable} | {b: chr(256 + i) for i, b in enumerate(others)}

    def ids(self, data: bytes) -> list[int]:
        return [self._id_of[self._spelling[byte]] for byte in data]


class Stripping(Tokenizer):
    """Decodes as tokenizers in pure Python over sentencepiece do: spaces at both ends of a text are dropped."""

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(self.token_string, ids)).replace("▁", " ").strip()


@pytest.mark.parametrize("spaces", [1, 10, 100])
def test_spaces_that_show_only_later(spaces: int) -> None:
    tokenizer = Stripping(metaspace())
    sea, space, calm = (tokenizer.encode_batch([text], False)[0] for text in ("▁sea", "▁", "▁calm"))
    ids = [*sea, *space * spaces, *calm]
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert "".join(detokenizer.append(i) for i in ids) == tokenizer.decode(ids) == "sea" + " " * (spaces + 1) + "calm"


def expected_stop(
    tokenizer: Tokenizer, ids: list[int], stop: tuple[str, ...], min_tokens: int
) -> tuple[int, str] | None:
    """Decodes everything after each token: how many tokens until a stop string is complete, and the text before it.

    A character is there when it is whole: replacement characters at the end may yet become others.
    """
    too_early = 0
    for count in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:count]).rstrip(REPLACEMENT)
        if count < min_tokens:
            too_early = max(too_early, len(text))
            continue
        ends = [(at, at + len(s)) for s in stop for at in range(len(text)) if text.startswith(s, at)]
        late = [at for at, end in ends if end > too_early]
        if late:
            return count, text[: min(late)]
    return None


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_stop_strings_against_the_whole_text(kind: str, data: st.DataObject) -> None:
    tokenizer = of_every_kind()[kind]
    ids = data.draw(token_lists(tokenizer))
    text = tokenizer.decode(ids)
    spans = st.tuples(st.integers(0, max(0, len(text) - 1)), st.integers(1, 6)).map(lambda s: text[s[0] : s[0] + s[1]])
    candidates = st.one_of(spans, st.sampled_from(PIECES), st.text(min_size=1, max_size=2))
    candidates = candidates.filter(lambda s: s and REPLACEMENT not in s)
    stop = tuple(data.draw(st.lists(candidates, min_size=1, max_size=4)))
    min_tokens = data.draw(st.integers(0, 12))
    checker = StopChecker(tokenizer, stop, min_tokens)
    found = None
    for count, token_id in enumerate(ids, start=1):
        final = checker.append(token_id)
        if final is not None:
            found = (count, final)
            break
    assert found == expected_stop(tokenizer, ids, stop, min_tokens)


def run_checker(tokenizer: Tokenizer, text: str, stop: tuple[str, ...], min_tokens: int = 0) -> str | None:
    checker = StopChecker(tokenizer, stop, min_tokens)
    for token_id in tokenizer.encode_batch([text], False)[0]:
        final = checker.append(token_id)
        if final is not None:
            return final
    return None


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece_like", "byt5"])
@pytest.mark.parametrize(
    ("text", "stop", "final"),
    [
        ("one two three", ("two",), "one "),
        ("one two three", ("three", "two th"), "one "),
        ("aaab", ("aab",), "a"),
        ("abcd", ("abcd", "bc"), "a"),
        ("say ENDING", ("ENDING", "END"), "say "),
        ("x 漢字 y", ("字",), "x 漢"),
        ("x 👩‍🔬 y", ("\u200d",), "x 👩"),
        ("nothing here", ("STOP",), None),
        ("STOP", ("STOP",), ""),
    ],
)
def test_stop_string_cases(kind: str, text: str, stop: tuple[str, ...], final: str | None) -> None:
    assert run_checker(of_every_kind()[kind], text, stop) == final


def test_stop_string_before_min_tokens_is_ignored() -> None:
    tokenizer = of_every_kind()["byt5"]  # one token a byte
    assert run_checker(tokenizer, "ab.cd.ef", (".",), min_tokens=3) == "ab"
    assert run_checker(tokenizer, "ab.cd.ef", (".",), min_tokens=4) == "ab.cd"
    assert run_checker(tokenizer, "ab##cd", ("##",), min_tokens=4) == "ab"  # begins before, completes in time
    assert run_checker(tokenizer, "ab###cd", ("##",), min_tokens=5) == "ab#"


def test_stop_string_in_a_run_of_bytes_that_later_breaks() -> None:
    tokenizer = of_every_kind()["sentencepiece_like"]
    ids = {byte: i for i, byte in tokenizer.byte_values.items()}
    run = [ids[byte] for byte in "日本".encode()]
    checker = StopChecker(tokenizer, ("本",))
    assert [checker.append(i) for i in run] == [None] * 5 + ["日"]
    broken = StopChecker(tokenizer, ("本",))
    assert [broken.append(i) for i in [ids[0xFF], *run]] == [None] * 7
    long_run = [ids[byte] for byte in ("日" * 50 + "本").encode()]
    checker = StopChecker(tokenizer, ("本",))
    assert [checker.append(i) for i in long_run][-1] == "日" * 50
