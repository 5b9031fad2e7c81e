"""Input files of all kinds with strange rows in them, as hypothesis strategies, and what must become of each row.

Nothing here asks the readers: whoever writes a file knows how many rows he wrote.
"""

import csv
import gzip
import io
import json
import reprlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import zstandard
from hypothesis import strategies as st

from pagedgen.params import OPTIONS

KNOWN = "the quick fox"  # the prompt whose completion is known
BOM = b"\xef\xbb\xbf"
PROMPTS = ("messages", "prompt", "prompt_token_ids")
BATCH = ("custom_id", "method", "url", "body")


@dataclass(frozen=True)
class Row:
    """sure: "known" when it is KNOWN and nothing else, "bad" when it can be nothing but a `bad_row`, else None.
    columns: its values, where they are those of a JSON object."""

    sure: Literal["known", "bad"] | None = None
    columns: dict[str, Any] | None = None


@dataclass(frozen=True)
class Case:
    """files: names and contents; one file, or those of a folder, or what stdin holds, under the name `-`. names: the
    columns. broken: why the README says that no run is possible."""

    files: tuple[tuple[str, bytes], ...]
    rows: tuple[Row, ...]
    names: frozenset[str]
    broken: str | None = None

    @property
    def is_batch(self) -> bool:
        return self.names >= {"custom_id", "url", "body"}

    @property
    def failure(self) -> str | None:
        if self.broken or not self.rows:
            return self.broken or "no rows"
        if not self.names:  # no row can be read, so each has its outcome
            return None
        return None if self.is_batch or self.names & set(PROMPTS) else "no prompt column"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Hypothesis shows a case this way: its lines may have megabytes."""
        shown = [(name, reprlib.repr(data) if len(data) > 3000 else data) for name, data in self.files]
        printer.text(f"Case({shown}, {[row.sure for row in self.rows]}, {sorted(self.names)}, {self.broken!r})")


class Raw(str):
    """JSON text that stands in a file as it is; `usable` where it is a value that a row may hold."""

    usable: bool

    def __new__(cls, text: str, usable: bool = True) -> "Raw":
        self = super().__new__(cls, text)
        self.usable = usable
        return self


class Pairs(list[tuple[str, Any]]):
    """An object whose keys may come twice."""


def dump(value: Any, ascii_only: bool = True) -> str:
    match value:
        case Raw():
            return str(value)
        case Pairs():
            return "{" + ", ".join(f"{dump(k, ascii_only)}: {dump(v, ascii_only)}" for k, v in value) + "}"
        case dict():
            return dump(Pairs(value.items()), ascii_only)
        case list():
            return "[" + ",".join(dump(item, ascii_only) for item in value) + "]"
    return json.dumps(value, ensure_ascii=ascii_only)


def is_usable(value: Any) -> bool:
    if isinstance(value, Raw):
        return value.usable
    members = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return all(map(is_usable, members))


STRANGE_TEXTS = (
    *("", " ", "\n", "\r", "a\r\nb", "\t", "\0", "a\0b", "\x1b[31m", "\x85", "\u2028", "\ufeffa", "\u202eb"),
    *("\ud800", "x\udc00y", "\ud83d\ude00", "😀", "👩\u200d👧", "é" * 30, "x" * 300, "שלום", "\U0010ffff", "\ufffd"),
    *("<|im_end|>", "<|im_start|>user\n", "<|endoftext|><|begin|>", "<|im_", "end|>", "<0x0A>", "</s>", "<pad>"),
    *("12", "-1", " 7 ", "1_0", "1e999", "nan", "-inf", "0x10", "١٢", "1" + "0" * 400, "true", "null", "NaN"),
    *("[1, 2]", "[1", '{"11": -5}', '{"a": 1', '{"11": 1, "11": 2}', '[{"role": "user", "content": "hi"}]', '["a"]'),
    *("9" * 5000, "[" * 100_000, '{"a":' * 100_000, '["' + "9" * 5000 + '"]', "[" + "9" * 5000 + "]"),
    *("{{ 7 * 7 }}", "{% for %}", "/v1/completions", "POST", "a,b", 'a"b', '"', "'", "=1+1", "\\", "\\ud800", "a;b\tc"),
)
texts = st.one_of(st.sampled_from(("a", "hello", "2 + 2 =")), st.sampled_from(STRANGE_TEXTS), st.text(max_size=8))
short = st.one_of(st.sampled_from(("a", "hello", "2 + 2 =", "the fox")), st.text(min_size=1, max_size=6), texts)
HUGE = (2**31 - 1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, 10**30, 10**400, 1e-9, -0.0, 5e-324)
numbers = st.one_of(st.integers(-2, 400), st.floats(width=32), st.sampled_from(HUGE))
ODD = (
    *map(Raw, ("1e999", "-1E+999", "-0.0", "1.0", "0.1e1", "NaN", "Infinity", "-Infinity", '{"a": {}}')),
    *map(Raw, ("[" * 90 + "]" * 90, '{"a":' * 90 + "1" + "}" * 90, "[[[[[[]], [1]]], null]]", '"\\ud800\\ud800"')),
    *(Raw("[" * 150 + "]" * 150, False), Raw('{"a":' * 150 + "1" + "}" * 150, False)),
)
leaves = st.one_of(st.none(), st.booleans(), numbers, texts, st.sampled_from(ODD))
NAMES = (
    *(option.name for option in OPTIONS),
    *[
        "id",
        "custom_id",
        "body",
        "method",
        "row",
        "sample",
        "status",
        "text",
        "error",
        "extra",
        "input_row",
        "score",
        "token_ids",
        "model",
        "x",
        "y",
    ],
    *("", " ", "a.b", "a\0b", "\ud800", "é", "\u2028", "a\nb", "c" * 300),
)
keys = st.one_of(st.sampled_from(("a", "b", "role", "content", "type")), st.sampled_from(NAMES), st.text(max_size=3))
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(st.tuples(keys, inner), max_size=3).map(Pairs),
    ),
    max_leaves=5,
)
roles = st.sampled_from(("user", "system", "assistant", "user", "tool", "developer"))
parts = st.one_of(short, st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": short}), max_size=2))
chats = st.lists(st.fixed_dictionaries({"role": roles, "content": st.one_of(short, parts)}), min_size=1, max_size=2)
ids = st.lists(st.integers(4, 319), min_size=1, max_size=9)
few = st.integers(0, 3)
PLAUSIBLE: dict[str, st.SearchStrategy[Any]] = {
    "prompt": short,
    "messages": st.one_of(chats, chats.map(json.dumps)),
    "prompt_token_ids": st.one_of(ids, ids.map(json.dumps)),
    "id": st.one_of(short, st.integers()),
    "custom_id": short,
    "max_tokens": st.integers(1, 4),
    "temperature": st.floats(0, 3),
    "top_k": st.integers(-1, 330),
    "top_p": st.floats(0.1, 1),
    "min_p": st.floats(0, 1),
    "seed": st.integers(0, 2**63 - 1),
    "stop": st.one_of(short, st.lists(short, max_size=2)),
    "stop_token_ids": st.one_of(few, st.lists(st.integers(0, 330), max_size=3)),
    "min_tokens": st.integers(0, 2),
    "ignore_eos": st.one_of(st.booleans(), st.sampled_from(("true", "False"))),
    "n": st.integers(1, 4),
    "repetition_penalty": st.floats(0.5, 2),
    "presence_penalty": st.floats(-0.5, 2),
    "frequency_penalty": st.one_of(st.floats(0, 2), st.just("0.5")),
    "logit_bias": st.dictionaries(st.integers(0, 325).map(str), st.floats(-100, 100), max_size=2),
    "bad_words": st.lists(short, max_size=2),
    "logprobs": few,
    "prompt_logprobs": few,
    "method": st.just("POST"),
    "url": st.sampled_from(("/v1/chat/completions", "/v1/completions", "https://x.org/openai/v1/completions")),
}


def value_of(name: str) -> st.SearchStrategy[Any]:
    likely = PLAUSIBLE.get(name, values)
    return st.one_of(likely, likely, likely, texts, values)


@st.composite
def objects(draw: st.DrawFn, required: Sequence[str] = (), names: Sequence[str] = NAMES, most: int = 4) -> Pairs:
    chosen = [*required, *draw(st.lists(st.sampled_from(names), max_size=most))]
    return Pairs((name, draw(value_of(name))) for name in chosen)


plain_objects = st.one_of(
    *(objects((name,)) for name in ("prompt", "prompt", "messages", "prompt_token_ids")),
    objects((), (*NAMES, *PROMPTS)),
)
_BODY_NAMES = (
    *(name for name in PLAUSIBLE if name not in ("id", "method", "url")),
    *("model", "user", "stream", "tools", "best_of", "top_logprobs", "max_completion_tokens", "echo"),
)


@st.composite
def requests(draw: st.DrawFn) -> Pairs:
    """Lines of an OpenAI batch file."""
    url = draw(value_of("url"))
    wanted = "messages" if isinstance(url, str) and "chat" in url else "prompt"
    sensible = objects((wanted,), ("max_tokens", "n", "seed"))
    body: Any = draw(st.one_of(sensible, sensible, objects((wanted,), _BODY_NAMES, 2), values))
    if draw(st.integers(0, 5)) == 0 and is_usable(body):
        body = dump(body)
    row = [*((name, draw(value_of(name))) for name in BATCH[:2]), ("url", url), ("body", body), *draw(objects(most=1))]
    return Pairs(row[draw(st.sampled_from((0, 0, 0, 0, 1, 2, 3))) :])


def known_row(is_batch: bool) -> dict[str, Any]:
    if not is_batch:
        return {"prompt": KNOWN}
    body = {"messages": [{"role": "user", "content": KNOWN}]}
    return {"custom_id": "known", "method": "POST", "url": "/v1/chat/completions", "body": body}


def json_row(value: Any, ascii_only: bool) -> tuple[bytes, Row]:
    """A value as text, and what must become of it."""
    data = (text := dump(value, ascii_only)).encode("utf-8", "surrogatepass")
    if isinstance(value, dict):
        return data, Row("known", value)
    is_object = isinstance(value, Pairs) and is_usable(value) and is_utf8(data)
    return data, Row(None, json.loads(text)) if is_object else Row("bad")


def is_utf8(data: bytes) -> bool:
    return data.decode(errors="ignore").encode() == data


def names_of(rows: Iterable[Row]) -> frozenset[str]:
    return frozenset(name for row in rows for name in row.columns or () if is_name(name))


def is_name(name: str) -> bool:
    return is_utf8(name.encode("utf-8", "surrogatepass"))


@st.composite
def json_items(draw: st.DrawFn, first_is_known: bool = False, most: int = 7) -> list[tuple[bytes, Row]]:
    """Rows as JSON texts, each of which is valid JSON but for its UTF-8."""
    is_batch = draw(st.integers(0, 3)) == 0
    known, strange = st.just(known_row(is_batch)), requests() if is_batch else plain_objects
    found = draw(st.lists(st.one_of(known, strange, strange, strange, values), max_size=most))
    if first_is_known or is_batch:
        found.insert(0, known_row(is_batch))
    if draw(st.integers(0, 99)) == 0:
        found.append(Pairs([("prompt", draw(st.sampled_from(("lorem ", "<|im_end|>", "\u2028"))) * 400_000)]))
    return [json_row(value, draw(st.booleans())) for value in found]


BAD_LINES = (
    *(b"\x80", b"{", b"}", b"\0", b"-", b"nul", b"{'prompt': 'a'}", b"\xef\xbb\xbf{}", b'{"prompt": "\xed\xa0\x80"}'),
    *(b'{"prompt": "\xff"}', b'{"prompt": "a"', b'{"prompt": "a"} x', b'{"prompt": "a\0"}', b'{"prompt": "\\u12"}'),
    *(b'{"prompt": "\tx"}', b'{"prompt" "a"}', b'{"prompt": 01}', b'\xc2\xa0{"prompt": "a"}', b'{"prompt": ""}{}'),
    *(b'{"prompt": "a", "x": %s}' % hopeless for hopeless in (b"9" * 5000, b"[" * 100_000 + b"]" * 100_000)),
)
_STARTS = (b"\xff\xfe", b"\xfe\xff", BOM)  # of other encodings, or of none
noise = st.binary(min_size=1, max_size=10).map(lambda b: b.replace(b"\n", b"x"))
noise = noise.filter(lambda line: not line.isspace() and not line.startswith(_STARTS))
bad_lines = st.one_of(st.sampled_from(BAD_LINES), noise).map(lambda line: (line, Row("bad")))


@st.composite
def in_lines(draw: st.DrawFn, lines: Sequence[bytes], blank: Sequence[bytes] = (b"",)) -> bytes:
    """The lines as a file, with blank ones between them, and its last newline maybe missing."""
    data = BOM if draw(st.integers(0, 4)) == 0 else b""
    newline = draw(st.sampled_from((b"\n", b"\n", b"\r\n")))
    for line in lines:
        if draw(st.integers(0, 5)) == 0:
            data += draw(st.sampled_from(blank)) + newline
        data += line + newline
    return data.removesuffix(newline) if draw(st.booleans()) else data


BLANK = (b"", b" ", b"\t \t", b"\x0c", b"\r")


@st.composite
def json_lines(draw: st.DrawFn, sure_lines: int = 0) -> tuple[bytes, tuple[Row, ...]]:
    """sure_lines: so many are objects at the beginning, which tells that these are lines."""
    items = draw(json_items(first_is_known=sure_lines > 0))
    is_batch = names_of(row for _, row in items) >= {"custom_id", "url", "body"}
    for line in draw(st.lists(bad_lines, max_size=3)):
        items.insert(draw(st.integers(0, len(items))), line)
    items[:0] = [json_row(known_row(is_batch), True)] * sure_lines
    data = draw(in_lines([line for line, _ in items], BLANK))
    return data, tuple(row for _, row in items)


@st.composite
def json_document(draw: st.DrawFn, first_is_known: bool = False) -> tuple[bytes, tuple[Row, ...]]:
    """An array, or objects one after the other."""
    items = draw(json_items(first_is_known))
    space = draw(st.sampled_from((b"", b" ", b"\n", b"\r\n\t")))
    if first_is_known or draw(st.booleans()):
        data = b"[" + space.lstrip(b" ") + (b"," + space).join(data for data, _ in items) + space + b"]" + space
    else:
        items = [(data, row) for data, row in items if data.startswith(b"{")]
        data = space.join(data for data, _ in items) + space
    return data, tuple(row for _, row in items)


def compressed(data: bytes, suffix: str) -> bytes:
    """In two members, which stand for one text."""
    half = len(data) // 2
    if suffix == ".gz":
        return gzip.compress(data[:half], 1) + gzip.compress(data[half:], 1)
    if suffix == ".zst":
        return zstandard.compress(data[:half], 1) + zstandard.compress(data[half:], 1)
    return data


suffixes = st.sampled_from(("", "", "", ".gz", ".zst"))


@st.composite
def json_files(draw: st.DrawFn) -> Case:
    kind = draw(st.sampled_from((".jsonl", ".jsonl", ".ndjson", ".json", "lines.json", "-", "document on -")))
    if kind in (".json", "document on -"):
        data, rows = draw(json_document(first_is_known=kind != ".json"))
    else:
        data, rows = draw(json_lines(sure_lines={"lines.json": 2, "-": 1}.get(kind, 0)))
    name = "-" if kind.endswith("-") else f"in{kind}{draw(suffixes)}"
    return Case(((name, compressed(data, name[-4:] if name.endswith(".zst") else name[-3:])),), rows, names_of(rows))


@st.composite
def text_files(draw: st.DrawFn) -> Case:
    line = texts.map(lambda text: text.encode("utf-8", "surrogatepass"))
    lines = draw(st.lists(st.one_of(st.just(KNOWN.encode()), line, st.sampled_from((b"\x80", b"a\xff"))), max_size=8))
    name = draw(st.sampled_from(("in.txt", "in.txt.gz", "in.txt.zst", "-")))
    if name == "-":
        lines.insert(0, KNOWN.encode())
    data = draw(in_lines(lines, BLANK))
    written = [line.rstrip(b"\r") for line in data.removeprefix(BOM).split(b"\n") if line.strip(b" \t\r\v\f")]
    rows = tuple(Row("known" if line == KNOWN.encode() else None if is_utf8(line) else "bad") for line in written)
    return Case(((name, compressed(data, name[6:])),), rows, frozenset(("prompt",) if rows else ()))


@st.composite
def delimited_files(draw: st.DrawFn) -> Case:
    suffix, delimiter = draw(st.sampled_from(((".csv", ","), (".tsv", "\t"))))
    is_batch = draw(st.integers(0, 5)) == 0
    usual = BATCH if is_batch else ("prompt",) if draw(st.integers(0, 9)) else ()
    header = [*usual, *draw(st.lists(st.sampled_from([*NAMES, *PROMPTS]).filter(is_name), max_size=3))]
    if draw(st.integers(0, 19)):  # else one may come twice
        header = list(dict.fromkeys(header))
    header = header or ["x"]
    known = {name: json.dumps(value) if name == "body" else value for name, value in known_row(is_batch).items()}
    quoting = draw(st.sampled_from((csv.QUOTE_MINIMAL, csv.QUOTE_ALL)))
    row_kinds = ["known"] * (bool(usual)) + ["cells", "cells", "bad"]
    line = partial(delimited, delimiter=delimiter, quoting=quoting)
    lines, rows = [line(header)], []
    for kind in draw(st.lists(st.sampled_from(row_kinds), max_size=8)):
        if kind == "known":
            lines.append(line([known.get(name, "") for name in header]))
        elif kind == "bad":
            fields = delimiter.encode() * (len(header) - 1)
            bad = (b'"a"b', b'"a\nb"c', b"\xff" + fields, b"a" + fields + delimiter.encode())
            lines.append(draw(st.sampled_from(bad)))
        else:
            found = [draw(value_of(name)) for name in header]
            lines.append(line([cell if type(cell) is str else dump(cell) for cell in found]))
        utf8 = is_utf8(lines[-1])
        rows.append(Row("known" if kind == "known" else None if kind == "cells" and utf8 else "bad"))
    if draw(st.integers(0, 9)) == 0:
        lines.append(b'"never closed\nx\ny,z')
        rows.append(Row("bad"))
    name = f"in{suffix}{draw(suffixes)}"
    data = compressed(draw(in_lines(lines)), name.removeprefix(f"in{suffix}"))
    names = [name or f"column_{number}" for number, name in enumerate(header, 1)]
    broken = "two columns of one name" if len(set(names)) < len(names) else None
    return Case(((name, data),), tuple(rows), frozenset(names), broken)


def delimited(cells: Sequence[str], delimiter: str, quoting: Literal[0, 1]) -> bytes:
    line = io.StringIO(newline="")
    csv.writer(line, delimiter=delimiter, quoting=quoting, lineterminator="\r\n").writerow(cells)
    return line.getvalue().removesuffix("\r\n").encode("utf-8", "surrogatepass")
