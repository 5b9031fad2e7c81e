"""Readers: every form of input, checked against the plain json and csv modules."""

import bz2
import csv
import gzip
import io
import json
import string
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagedgen.config import InputConfig
from pagedgen.data import json_document
from pagedgen.data.readers import InputSource, open_bundled_prompts, open_input
from pagedgen.errors import UsageError

ROWS = [{"prompt": f"prompt {number} é\u2028x", "n": number} for number in range(7)]
TMP = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def read(path: Path | str) -> InputSource:
    return open_input(InputConfig(path=str(path)))


def columns_of(path: Path | str) -> list[dict[str, Any]]:
    return [dict(record.columns) for record in read(path)]


def json_lines(rows: list[Any]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def csv_text(rows: list[dict[str, Any]], delimiter: str) -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def parquet_bytes(rows: list[dict[str, Any]]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), sink, row_group_size=3)
    return sink.getvalue()


def arrow_bytes(rows: list[dict[str, Any]], is_file: bool) -> bytes:
    sink = io.BytesIO()
    table = pa.Table.from_pylist(rows)
    with (pa.ipc.new_file if is_file else pa.ipc.new_stream)(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)
    return sink.getvalue()


FORMS = {
    "a.jsonl": json_lines(ROWS),
    "a.ndjson": json_lines(ROWS).replace(b"\n", b"\r\n"),
    "lines.json": json_lines(ROWS),
    "array.json": json.dumps(ROWS, indent=2).encode(),
    "objects.json": "\n".join(json.dumps(row, indent=1) for row in ROWS).encode(),
    "a.parquet": parquet_bytes(ROWS),
    "file.arrow": arrow_bytes(ROWS, is_file=True),
    "stream.arrow": arrow_bytes(ROWS, is_file=False),
}
TEXT_FORMS = {"a.csv": csv_text(ROWS, ","), "a.tsv": csv_text(ROWS, "\t")}
PACKERS = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}


@pytest.mark.parametrize("packing", PACKERS)
@pytest.mark.parametrize("name", [*FORMS, *TEXT_FORMS])
def test_every_form_gives_the_same_rows(tmp_path: Path, name: str, packing: str) -> None:
    path = tmp_path / (name + packing)
    path.write_bytes(PACKERS[packing]((FORMS | TEXT_FORMS)[name]))
    source = read(path)
    expected = [{**row, "n": str(row["n"])} for row in ROWS] if name in TEXT_FORMS else ROWS
    assert [dict(record.columns) for record in source] == expected
    number = pa.string() if name in TEXT_FORMS else pa.int64()
    assert source.columns == pa.schema([("prompt", pa.string()), ("n", number)])
    assert source.stem == name.split(".")[0]
    assert [record.row for record in source] == list(range(7))
    assert source.bytes_read == source.total_bytes == path.stat().st_size
    assert source.files == (path,)


@pytest.mark.parametrize("packing", PACKERS)
def test_text_is_one_prompt_a_line(tmp_path: Path, packing: str) -> None:
    path = tmp_path / f"a.txt{packing}"
    path.write_bytes(PACKERS[packing](b"\xef\xbb\xbf one \r\n\r\n \t\ntwo\xe2\x80\xa8x\rstill\n\xff\nlast"))
    records = list(read(path))
    assert [record.columns for record in records] == [
        {"prompt": " one "},
        {"prompt": "two\u2028x\rstill"},
        {},
        {"prompt": "last"},
    ]
    assert [record.where.rpartition(" ")[2] for record in records] == ["1", "4", "5", "6"]
    assert records[2].error == f"a.txt{packing} line 5 is not valid UTF-8: byte 0xff at position 1"


def test_total_is_known_for_parquet_and_small_files_only(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(parquet_bytes(ROWS * 500))
    (tmp_path / "small.jsonl").write_bytes(json_lines(ROWS))
    (tmp_path / "large.jsonl").write_bytes(json_lines(ROWS * 500))
    assert read(tmp_path / "a.parquet").total == 3500
    assert read(tmp_path / "small.jsonl").total == 7
    source = read(tmp_path / "large.jsonl")
    assert source.total is None
    assert source.bytes_read == 0
    for record in source:
        if record.row == 2000:
            assert source.bytes_read / source.total_bytes == pytest.approx(2001 / 3500, rel=0.05)
    assert source.bytes_read == source.total_bytes
    assert source.rows_read == 3500


scalars = (
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(st.characters())
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
)
objects = st.dictionaries(st.text(string.ascii_letters + "é\u2028 ", max_size=4), values, max_size=4)


@TMP
@given(st.lists(objects, min_size=1, max_size=8), st.booleans(), st.sampled_from(["\n", "\r\n"]), st.booleans())
def test_json_lines_round_trip(
    tmp_path: Path, rows: list[dict[str, Any]], ascii_only: bool, newline: str, last_newline: bool
) -> None:
    lines = [json.dumps(row, ensure_ascii=ascii_only) for row in rows]
    text = newline.join(lines) + (newline if last_newline else "")
    path = tmp_path / "rows.jsonl"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    for record, line in zip(read(path), lines, strict=True):
        try:
            line.encode()
        except UnicodeEncodeError:
            assert "UTF-8" in str(record.error)
            continue
        assert record.columns == json.loads(line)
        record.id.encode()


@TMP
@given(
    st.lists(objects | st.integers() | st.none(), min_size=1, max_size=8),
    st.sampled_from([None, 2]),
    st.sampled_from([1, 3, 50, 1 << 20]),
)
def test_json_array_round_trip(tmp_path: Path, items: list[Any], indent: int | None, chunk_bytes: int) -> None:
    path = tmp_path / "rows.json"
    text = json.dumps(items, indent=indent)
    path.write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_document, "_CHUNK_BYTES", chunk_bytes)
        records = list(read(path))
    assert [record.columns for record in records] == [
        item if isinstance(item, dict) else {} for item in json.loads(text)
    ]
    assert [record.error is None for record in records] == [isinstance(item, dict) for item in items]


def test_a_bad_item_of_an_array_is_a_row_with_an_error(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_bytes(b'[{"a": 1}, {"a": "\xff"}, [2], {"a": 3}]')
    assert [(record.columns, record.error) for record in read(path)] == [
        ({"a": 1}, None),
        ({}, "rows.json item 2 is not valid UTF-8"),
        ({}, "rows.json item 3 is not a JSON object but a JSON array"),
        ({"a": 3}, None),
    ]


cells = st.text(st.characters(codec="utf-8") | st.sampled_from(',";\n\r\t \u2028\0'), max_size=8)


@TMP
@given(st.lists(st.lists(cells, min_size=2, max_size=2), min_size=1, max_size=8), st.sampled_from([",", "\t"]))
def test_csv_round_trip(tmp_path: Path, rows: list[list[str]], delimiter: str) -> None:
    text = io.StringIO(newline="")
    csv.writer(text, delimiter=delimiter).writerows([["first", "second"], *rows])
    path = tmp_path / ("rows.csv" if delimiter == "," else "rows.tsv")
    path.write_bytes(b"\xef\xbb\xbf" + text.getvalue().encode())
    text.seek(0)
    assert columns_of(path) == list(csv.DictReader(text, delimiter=delimiter))


def test_json_array_streams_items_larger_than_a_chunk(tmp_path: Path) -> None:
    rows = [
        {"prompt": character * size} for character, size in zip("aé\u2028x", (3_000_000, 10, 1_500_000, 1), strict=True)
    ]
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(rows, ensure_ascii=False) + " \n")
    assert columns_of(path) == rows


BAD_LINES = [
    (b"{", "is not valid JSON: Expecting property name enclosed in double quotes at column 2"),
    (b"[1]", "is not a JSON object but a JSON array"),
    (b'"text"', "is not a JSON object but a JSON string"),
    (b"null", "is not a JSON object but a JSON null"),
    (b"3", "is not a JSON object but a JSON number"),
    (b"true", "is not a JSON object but a JSON boolean"),
    (b'{"a": 1} {"b": 2}', "is not valid JSON: Extra data at column 10"),
    (b'{"a": "\xff"}', "is not valid UTF-8: byte 0xff at position 8"),
    (b'{"a": "\xed\xa0\x80"}', "is not valid UTF-8: byte 0xed at position 8"),
    (b'{"a": ' + b"1" * 5000 + b"}", "holds a number with too many digits"),
    (b"[" * 100_000, "is nested more than 100 levels deep"),
    (b'{"a": ' + b"[" * 200 + b"]" * 200 + b"}", "is nested more than 100 levels deep"),
]


@pytest.mark.parametrize(("line", "problem"), BAD_LINES, ids=range(len(BAD_LINES)))
def test_a_bad_line_is_a_row_with_an_error(tmp_path: Path, line: bytes, problem: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"id": 4, "a": 1}\n\n' + line + b'\n{"a": 2}\n')
    good, bad, last = read(path)
    assert (good.row, good.id, good.where) == (0, "4", "rows.jsonl line 1")
    assert bad.error == f"rows.jsonl line 3 {problem}"
    assert (bad.row, bad.id, bad.columns) == (1, "1", {})
    assert (last.row, last.id, last.columns, last.error) == (2, "2", {"a": 2}, None)


def test_many_brackets_are_not_deep(tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": "[" * 300}] * 150}
    path = tmp_path / "rows.jsonl"
    path.write_bytes(json_lines([row]))
    assert columns_of(path) == [row]


def test_a_line_too_long_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagedgen.data.streams.MAX_LINE_BYTES", 64)
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": "' + b"x" * 500 + b'"}\n{"a": 2}\n')
    assert [(record.columns, record.where) for record in read(path)] == [
        ({"a": 1}, "rows.jsonl line 1"),
        ({}, "rows.jsonl line 2"),
        ({"a": 2}, "rows.jsonl line 3"),
    ]


def test_repeated_keys_nan_and_lone_surrogates(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1, "a": NaN, "b": -Infinity, "id": "\\ud800x", "\\udfff": 1}\n')
    (record,) = read(path)
    assert repr(record.columns["a"]) == "nan"
    assert record.columns["b"] == float("-inf")
    assert record.id == "\\ud800x"
    assert read(path).columns.names == ["a", "b", "id"]


def test_bad_csv_records(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(
        b'a,b\r\n1,2\r\n\r\n3\r\n"x\ny",4\r\n5,6,7\r\n\xff,8\r\n"9"9,1\r\n' + b"z" * 200_000 + b',2\r\n"open,1\n3,4'
    )
    records = list(read(path))
    assert [(record.columns.get("b"), record.error) for record in records] == [
        ("2", None),
        (None, "rows.csv line 4 has 1 field where the header has 2"),
        ("4", None),
        (None, "rows.csv line 7 has 3 fields where the header has 2"),
        (None, "rows.csv line 8 is not valid UTF-8"),
        (None, "rows.csv line 9 is not valid CSV: ',' expected after '\"'"),
        ("2", None),
        (
            None,
            "rows.csv line 11 is not valid CSV: unexpected end of data; a quote was opened on it that takes in the "
            "lines up to 12, which are lost",
        ),
    ]
    assert records[2].columns["a"] == "x\ny"
    assert records[2].where == "rows.csv line 5"


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"a,a\n1,2\n", "two columns named 'a'"),
        (b"\xffa\n1\n", "not valid UTF-8"),
        (b'"a"b\n1\n', "not valid CSV"),
    ],
)
def test_csv_header_must_be_usable(tmp_path: Path, header: bytes, message: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(header)
    with pytest.raises(Exception, match=message) as caught:
        read(path)
    assert str(path) in str(caught.value)


def test_csv_column_without_a_name(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(",prompt\n0,x\n")
    assert columns_of(path) == [{"column_1": "0", "prompt": "x"}]


def test_ids(tmp_path: Path) -> None:
    rows: list[Any] = [
        {"id": 7}, {"id": "a", "custom_id": "b"}, {"custom_id": "c"}, {"id": None, "custom_id": "d"}, {"id": ""},
        {"id": 1.5}, {"id": True}, {"id": [1, "é"]}, {"id": 2**70}, {}, {"id": 0},
    ]  # fmt: skip
    path = tmp_path / "rows.jsonl"
    path.write_bytes(json_lines(rows))
    expected = ["7", "a", "c", "d", "4", "1.5", "true", '[1, "é"]', str(2**70), "9", "0"]
    assert [record.id for record in read(path)] == expected


def test_column_inference(tmp_path: Path) -> None:
    message = {"role": "user", "content": "x"}
    rows = [
        {"i": 1, "f": 1, "b": True, "mixed": "x", "messages": [message], "meta": {"k": 1}, "never": None, "big": 2**70},
        {"i": None, "f": 2.5, "mixed": [message], "messages": [], "meta": {"j": 1}, "tools": [], "late": "x", "e": {}},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_bytes(json_lines(rows))
    columns = read(path).columns
    text = pa.string()
    assert dict(zip(columns.names, columns.types, strict=True)) == {
        "i": pa.int64(), "f": pa.float64(), "b": pa.bool_(), "mixed": text,
        "messages": pa.list_(pa.struct([("role", text), ("content", text)])), "meta": text, "never": text,
        "big": text, "tools": pa.list_(text), "late": text, "e": text,
    }  # fmt: skip
    as_json = [field.name for field in columns if field.metadata]
    assert as_json == ["mixed", "meta", "big", "e"]


def test_parquet_keeps_its_types_and_survives_bad_text(tmp_path: Path) -> None:
    broken = pa.Array.from_buffers(
        pa.string(), 2, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0"), pa.py_buffer(b"a\xff")]
    )
    when = pa.array([1, 2], pa.timestamp("ns", "UTC"))
    kind = pa.array(["x", "y"]).dictionary_encode()
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"prompt": broken, "when": when, "kind": kind}), path)
    source = read(path)
    assert source.columns.types == [pa.string(), pa.timestamp("ns", "UTC"), pa.string()]
    good, bad = source
    assert (good.columns["prompt"], good.columns["kind"], good.error) == ("a", "x", None)
    assert bad.error == "rows.parquet record 2 holds text that is not valid UTF-8"


def test_folder_and_glob_read_every_kind_in_order(tmp_path: Path) -> None:
    files: dict[str, bytes] = {
        "b/2.csv.gz": gzip.compress(b"prompt,extra_col\nfive,x\n"),
        "b/1.parquet": parquet_bytes([{"prompt": "four", "n": 1}]),
        "a.jsonl": b'{"prompt": "one", "n": 1.5}\n{"prompt": "two"}\n',
        "a2.txt": b"three\n",
        "empty.jsonl": b"",
        "README.md": b"no",
        ".hidden.jsonl": b'{"prompt": "no"}\n',
        ".git/x.jsonl": b'{"prompt": "no"}\n',
        "out.parquet": parquet_bytes([{"prompt": "no"}]),
        "out.parquet.run/parts/part-00000.parquet": b"no",
        "b/state.json": b"{}",
        "notes.bz2": bz2.compress(b"no"),
    }
    for name, data in files.items():
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(data)
    source = read(tmp_path / "in")
    records = list(source)
    assert [record.columns["prompt"] for record in records] == ["one", "two", "three", "four", "five"]
    assert [record.where for record in records][1::2] == ["a.jsonl line 2", "b/1.parquet record 1"]
    assert [record.row for record in records] == [0, 1, 2, 3, 4]
    assert source.columns == pa.schema([("prompt", pa.string()), ("n", pa.float64()), ("extra_col", pa.string())])
    assert (source.stem, source.total) == ("in", 5)

    globbed = read(str(tmp_path / "in" / "**" / "*.[cp]*"))
    assert [record.columns["prompt"] for record in globbed] == ["four", "five"]


def test_an_empty_text_file_does_not_make_a_prompt_column(tmp_path: Path) -> None:
    """Else a folder whose other files have none would be run, row for row in vain."""
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf")
    (tmp_path / "b.csv").write_text("question\nWhy?\n")
    source = open_input(InputConfig(str(tmp_path)))
    assert source.columns.names == ["question"]
    (tmp_path / "a.txt").write_text("a prompt\n")
    assert open_input(InputConfig(str(tmp_path))).columns.names == ["prompt", "question"]


def test_types_that_differ_between_files_become_json(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(parquet_bytes([{"x": 1, "y": {"k": [1]}}]))
    (tmp_path / "b.jsonl").write_text('{"x": "text", "y": {"k": [2.5]}}\n')
    columns = read(tmp_path).columns
    assert [bool(field.metadata) for field in columns] == [True, False]
    assert columns.field("y").type == pa.struct([("k", pa.list_(pa.float64()))])


@pytest.mark.parametrize("name", ["a[1].jsonl", "a*.jsonl"])
def test_a_name_with_glob_characters_is_a_name_first(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('{"prompt": "x"}\n')
    assert read(tmp_path / name).total == 1


def test_bundled_prompts() -> None:
    source = open_bundled_prompts()
    assert source.stem == "sample_prompts"
    assert source.total == len([record for record in source if record.error is None]) > 0


def test_input_must_be_one_thing() -> None:
    for config in (InputConfig(), InputConfig(path="a", dataset="b"), InputConfig(path="a.txt", split="train")):
        with pytest.raises(UsageError):
            open_input(config)
