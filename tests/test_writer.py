"""Writer: the schema, the parts, the merge into input order, and what happens when the disk refuses."""

import json
import math
import random
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from writer_cases import TEXT, Keep, completion, writer_for

from pagedgen.config import InputConfig, OutputConfig
from pagedgen.data import merge
from pagedgen.data.readers import open_input
from pagedgen.data.schema import OutputColumns
from pagedgen.errors import UsageError
from pagedgen.request import Completion, Status, TokenLogprob

FIXED = [
    "row", "id", "sample", "status", "text", "finish_reason", "error", "prompt_tokens", "cached_tokens",
    "completion_tokens", "cumulative_logprob", "score",
]  # fmt: skip


def written(
    output: Path, rows: Sequence[Mapping[str, Any]], columns: pa.Schema, keep: Keep = "all"
) -> list[dict[str, Any]]:
    """Writes one completion for each input row and returns the output's rows."""
    writer = writer_for(output, columns, keep=keep)
    for number, row in enumerate(rows):
        writer.write([completion(number)], row)
    writer.finish()
    if output.suffix == ".jsonl":
        return [json.loads(line) for line in output.read_bytes().decode().split("\n")[:-1]]
    return list(pq.read_table(output).to_pylist())


def test_columns_in_order_and_values(tmp_path: Path) -> None:
    output = tmp_path / "out.parquet"
    writer = writer_for(output, pa.schema([("id", pa.int64()), ("prompt", pa.string())]), token_ids=True, logprobs=True)
    entry = TokenLogprob(7, -0.5, (7, 8), (-0.5, -1.5))
    writer.write(
        [completion(0, logprobs=(entry,), cumulative_logprob=-0.5, score=-0.25, cached_tokens=3, token_ids=(7,))],
        {"id": 3, "prompt": "p"},
        lambda token: f"<{token}>",
    )
    writer.write([Completion(1, "1", 0, Status.BAD_ROW, error="no \ud800")], {})
    writer.finish()
    table = pq.read_table(output)
    assert table.schema.names == [*FIXED, "token_ids", "logprobs", "input_id", "prompt", "extra"]
    token = [("token_id", pa.int32()), ("token", pa.string()), ("logprob", pa.float32())]
    types = dict(zip(table.schema.names, table.schema.types, strict=True))
    assert [str(types[name]) for name in FIXED] == [
        "int64", "string", "int32", "string", "string", "string", "string", "int32", "int32", "int32", "double",
        "double",
    ]  # fmt: skip
    assert types["token_ids"].value_type == pa.int32()
    assert types["logprobs"].value_type == pa.struct([*token, pa.field("top", pa.list_(pa.struct(token)))])
    first, second = table.to_pylist()
    assert first == {
        "row": 0, "id": "id0", "sample": 0, "status": "ok", "text": "text 0/0", "finish_reason": "stop", "error": None,
        "prompt_tokens": 5, "cached_tokens": 3, "completion_tokens": 1, "cumulative_logprob": -0.5, "score": -0.25,
        "token_ids": [7], "input_id": 3, "prompt": "p", "extra": None,
        "logprobs": [{"token_id": 7, "token": "<7>", "logprob": -0.5, "top": [
            {"token_id": 7, "token": "<7>", "logprob": -0.5}, {"token_id": 8, "token": "<8>", "logprob": -1.5}]}],
    }  # fmt: skip
    assert (second["status"], second["error"], second["text"], second["token_ids"]) == (
        "bad_row",
        "no \\ud800",
        None,
        None,
    )
    assert (second["completion_tokens"], second["prompt"], second["extra"]) == (0, None, None)


def test_prompt_logprobs_follow_logprobs_in_a_column_of_the_same_type(tmp_path: Path) -> None:
    output = tmp_path / "out.parquet"
    columns = pa.schema([("prompt_logprobs", pa.int64()), ("prompt", pa.string())])
    writer = writer_for(output, columns, logprobs=True, prompt_logprobs=True)
    entry = TokenLogprob(7, -0.5, (8,), (-0.25,))
    writer.write([completion(0, prompt_logprobs=(entry, entry))], {"prompt_logprobs": 1, "prompt": "p"}, str)
    writer.write([completion(1, prompt_logprobs=())], {}, str)
    writer.write([completion(2, logprobs=(entry,))], {}, str)
    with pytest.raises(ValueError, match="token_strings"):
        writer.write([completion(3, prompt_logprobs=(entry,))], {})
    writer.finish()
    table = pq.read_table(output)
    names = [*FIXED, "logprobs", "prompt_logprobs", "input_prompt_logprobs", "prompt", "extra"]
    assert table.schema.names == names
    assert table.schema.field("prompt_logprobs").type == table.schema.field("logprobs").type
    token = {"token_id": 7, "token": "7", "logprob": -0.5, "top": [{"token_id": 8, "token": "8", "logprob": -0.25}]}
    assert table["prompt_logprobs"].to_pylist() == [[token, token], [], None]
    assert table["logprobs"].to_pylist() == [None, None, [token]]
    without = writer_for(tmp_path / "without.parquet", columns, logprobs=True)
    without.write([completion(0, prompt_logprobs=(entry,))], {})
    without.finish()
    names.remove("prompt_logprobs")
    assert pq.read_table(tmp_path / "without.parquet").schema.names == names


def test_a_part_is_closed_by_the_size_of_prompt_logprobs_too(tmp_path: Path) -> None:
    writer = writer_for(tmp_path / "out.parquet", part_bytes=10_000, prompt_logprobs=True)
    entry = TokenLogprob(7, -0.5, tuple(range(100)), (-0.5,) * 100)
    writer.write([completion(0, prompt_logprobs=(entry,) * 10)], {}, str)
    assert writer.parts_written == 1


keys = st.lists(
    st.tuples(st.integers(0, 6), st.integers(0, 6)), unique=True, min_size=1, max_size=49
) | st.permutations([(row, 0) for row in range(40)])


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(keys, st.integers(1, 12), st.integers(2, 5), st.integers(1, 5), st.sampled_from(["out.parquet", "out.jsonl"]))
def test_merge_restores_input_order(
    tmp_path_factory: pytest.TempPathFactory,
    done: list[tuple[int, int]],
    part_rows: int,
    fan_in: int,
    batch_rows: int,
    name: str,
) -> None:
    output = tmp_path_factory.mktemp("merge") / name
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merge, "FAN_IN", fan_in)
        patch.setattr(merge, "BATCH_ROWS", batch_rows)
        patch.setattr(merge, "GROUP_ROWS", 7)
        writer = writer_for(output, part_rows=part_rows)
        for row in dict.fromkeys(row for row, _ in done):  # a row comes with all its samples
            samples = [sample for other, sample in done if other == row]
            writer.write([completion(row, sample) for sample in samples], {"prompt": f"p{row}"})
        writer.finish()
        writer.discard_parts()
    if name == "out.jsonl":
        rows = [json.loads(line) for line in output.read_bytes().decode().split("\n")[:-1]]
    else:
        rows = pq.read_table(output).to_pylist()
    assert [(row["row"], row["sample"]) for row in rows] == sorted(done)
    assert all(row["text"] == f"text {row['row']}/{row['sample']}" for row in rows)
    assert all(row["prompt"] == f"p{row['row']}" for row in rows)
    left = sorted(path.name for path in output.with_name(name + ".run").rglob("*"))
    if name == "out.parquet":
        assert left == ["parts"]
    else:
        assert left == sorted(["parts", *(f"part-{number:05d}.parquet" for number in range(writer.parts_written))])


def test_the_merge_opens_few_parts_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nearly ordered parts need no intermediate files and two or three open parts; random order stays in its bound."""
    opened: list[int] = []
    real = merge._sorted

    def spy(tables: Sequence[pa.Table]) -> pa.Table:
        opened.append(len(tables))
        return real(tables)

    monkeypatch.setattr(merge, "_sorted", spy)
    monkeypatch.setattr(merge, "FAN_IN", 4)
    rows = list(range(600))
    for name, order, most in (
        ("near.parquet", sorted(rows, key=lambda row: row + random.Random(row).random() * 15), 3),
        ("random.parquet", random.Random(0).sample(rows, 600), 4),
    ):
        opened.clear()
        writer = writer_for(tmp_path / name, part_rows=20)
        for row in order:
            writer.write([completion(row)], {})
        writer.finish()
        assert pq.read_table(tmp_path / name)["row"].to_pylist() == rows
        assert max(opened) <= most


def test_parts_have_one_schema_and_are_sorted(tmp_path: Path) -> None:
    output = tmp_path / "out"
    writer = writer_for(output, part_rows=10)
    order = random.Random(1).sample(range(95), 95)
    for row in order:
        writer.write([completion(row)], {"prompt": None if row % 2 else "p", "late": row} if row > 50 else {})
    writer.flush()
    assert (writer.parts_written, writer.rows_written) == (10, 95)
    writer.finish()
    parts = sorted(output.iterdir())
    assert [part.name for part in parts] == [f"part-{number:05d}.parquet" for number in range(10)]
    assert all(pq.read_schema(part).equals(pq.read_schema(parts[0]), check_metadata=True) for part in parts)
    tables = [pq.read_table(part) for part in parts]
    assert [table["row"].to_pylist() for table in tables] == [
        sorted(order[start : start + 10]) for start in range(0, 95, 10)
    ]


def test_parts_close_by_size(tmp_path: Path) -> None:
    writer = writer_for(tmp_path / "out", part_bytes=10_000)
    for row in range(10):
        writer.write([completion(row, text="x" * 3000)], {"messages": [{"content": "y" * 3000}]})
    assert writer.parts_written == 5


def test_a_run_without_rows_still_has_the_schema(tmp_path: Path) -> None:
    for name in ("out", "out.parquet", "out.jsonl"):
        writer = writer_for(tmp_path / name)
        writer.finish()
    assert pq.read_table(tmp_path / "out").schema.names == [*FIXED, "prompt", "extra"]
    assert pq.read_table(tmp_path / "out.parquet").num_rows == 0
    assert (tmp_path / "out.jsonl").read_bytes() == b""


def test_late_columns_and_misfits_go_to_extra(tmp_path: Path) -> None:
    columns = pa.schema(
        [("n", pa.int64()), ("f", pa.float64()), ("s", pa.string()), ("b", pa.bool_()), ("small", pa.int8())]
    )
    nested = pa.struct([("role", pa.string())])
    columns = columns.append(pa.field("m", pa.list_(nested))).append(pa.field("when", pa.timestamp("us", "UTC")))
    when = datetime(2025, 1, 1, tzinfo=UTC)
    fitting = {"n": 1, "f": 2, "s": "é", "b": True, "small": -128, "m": [{"role": "a"}, {"role": None}], "when": when}
    misfits: list[dict[str, Any]] = [
        {"n": 1.0}, {"n": True}, {"n": "1"}, {"n": 2**63}, {"f": 2**53 + 1}, {"f": "x"}, {"s": 1}, {"s": ["x"]},
        {"b": 1}, {"small": 128}, {"m": [{"role": "a", "name": "x"}]}, {"m": [{}]}, {"m": {"role": "a"}},
        {"m": ["a"]}, {"when": "yesterday"}, {"late": {"x": [1, None]}}, {"late": "\ud800"}, {"": 0},
    ]  # fmt: skip
    rows = written(tmp_path / "out.parquet", [fitting, *misfits, {"late": None}, {"s": "\ud800", "n": 5}], columns)
    assert {name: rows[0][name] for name in fitting} == fitting
    assert rows[0]["extra"] is None
    for row, misfit in zip(rows[1:-2], misfits, strict=True):
        assert json.loads(row["extra"]) == misfit
        assert all(row[name] is None for name in fitting)
    assert rows[-2]["extra"] is None
    assert (rows[-1]["n"], json.loads(rows[-1]["extra"])) == (5, {"s": "\ud800"})


def test_extra_is_valid_json_whatever_is_in_it(tmp_path: Path) -> None:
    late = {"nan": math.nan, "deep": [{"x": math.inf}], "bytes": b"\xff", "when": datetime(2025, 1, 1)}
    (row,) = written(tmp_path / "out.parquet", [late], TEXT)

    def reject(constant: str) -> None:
        raise AssertionError(constant)

    assert json.loads(row["extra"], parse_constant=reject) == {
        "nan": None, "deep": [{"x": None}], "bytes": "\\xff", "when": "2025-01-01T00:00:00",
    }  # fmt: skip


def test_keep(tmp_path: Path) -> None:
    columns = pa.schema([("a", pa.string()), ("b", pa.string()), ("c", pa.string())])
    row = {"a": "1", "b": "2", "c": 3, "late": 4}
    everything = written(tmp_path / "all.parquet", [row], columns)[0]
    assert list(everything) == [*FIXED, "a", "b", "c", "extra"]
    assert json.loads(everything["extra"]) == {"late": 4, "c": 3}
    nothing = written(tmp_path / "none.parquet", [row], columns, keep="none")[0]
    assert list(nothing) == [*FIXED, "extra"]
    some = written(tmp_path / "some.parquet", [row], columns, keep=("c", "a"))[0]
    assert list(some) == [*FIXED, "c", "a", "extra"]
    assert (nothing["extra"], json.loads(some["extra"])) == (None, {"c": 3})
    with pytest.raises(UsageError, match="--keep names 'x', which the input does not have; its columns are a, b, c"):
        OutputColumns(columns, OutputConfig(tmp_path / "x.parquet", keep=("a", "x")))


def test_names_that_clash(tmp_path: Path) -> None:
    names = ["text", "input_text", "input_input_text", "extra", "token_ids", "row", "other"]
    (row,) = written(
        tmp_path / "o.parquet", [{name: name for name in names}], pa.schema([(n, pa.string()) for n in names])
    )
    assert list(row)[len(FIXED) :] == [
        "input_input_input_text", "input_text", "input_input_text", "input_extra", "input_token_ids", "input_row",
        "other", "extra",
    ]  # fmt: skip
    assert row["input_input_input_text"] == "text"
    assert (row["input_text"], row["text"]) == ("input_text", "text 0/0")
    assert row["input_extra"] == "extra"


def test_types_parquet_cannot_hold_become_json(tmp_path: Path) -> None:
    columns = pa.schema([("e", pa.struct([])), ("i", pa.month_day_nano_interval()), ("null", pa.null())])
    (row,) = written(tmp_path / "o.parquet", [{"e": {}, "i": pa.MonthDayNano([1, 2, 3]), "null": None}], columns)
    assert (row["e"], row["i"], row["null"], row["extra"]) == ("{}", "[1, 2, 3]", None, None)


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**65), 2**65)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters())
)
json_values = st.recursive(
    scalars, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=3), v, max_size=3), max_leaves=6
)
json_rows = st.lists(st.dictionaries(st.sampled_from(["a", "b", "text", ""]), json_values), min_size=1, max_size=6)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(json_rows, json_rows)
def test_no_value_is_lost_between_input_and_output(
    tmp_path_factory: pytest.TempPathFactory, known: list[dict[str, Any]], later: list[dict[str, Any]]
) -> None:
    """The columns are learned from some rows, and others follow: each value is in its column or in extra."""
    folder = tmp_path_factory.mktemp("flow")
    rows = [*known, *later]
    (folder / "known.jsonl").write_text("".join(json.dumps(row) + "\n" for row in known))
    (folder / "all.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = open_input(InputConfig(path=str(folder / "known.jsonl"))).columns
    read = [record.columns for record in open_input(InputConfig(path=str(folder / "all.jsonl")))]
    assert read == rows
    for name in ("out.parquet", "out.jsonl"):
        as_json = [field.name for field in columns if field.metadata] if name == "out.parquet" else []
        for row, result in zip(rows, written(folder / name, read, columns), strict=True):
            extra = json.loads(result["extra"] or "{}")
            for key, value in row.items():
                found = result[f"input_{key}" if key == "text" else key] if key in columns.names else None
                found = json.loads(found) if key in as_json and found is not None else found
                assert extra.get(key, found) == value


def test_json_lines_are_plain(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    columns = open_columns(tmp_path, [{"mixed": "é\u2028"}, {"mixed": [1]}, {"x": 1.5}])
    writer = writer_for(output, columns)
    writer.write(
        [completion(0, text='é\u2028\n"', cumulative_logprob=math.nan, score=-math.inf)], {"mixed": {"k": [1]}}
    )
    writer.write([completion(1)], {"mixed": "text", "x": math.nan})
    writer.finish()
    data = output.read_bytes().decode()
    assert data.count("\n") == 2
    assert "é\u2028" in data
    assert "NaN" not in data
    assert "Infinity" not in data
    first, second = map(json.loads, data.rstrip("\n").split("\n"))
    assert list(first) == [*FIXED, "mixed", "x", "extra"]
    assert (first["cumulative_logprob"], first["score"], first["mixed"]) == (None, None, {"k": [1]})
    assert (second["mixed"], second["x"]) == ("text", None)


def open_columns(folder: Path, rows: list[dict[str, Any]]) -> pa.Schema:
    path = folder / "in.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return open_input(InputConfig(path=str(path))).columns


def test_a_part_is_closed_when_its_first_row_is_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("pagedgen.data.writer.time.monotonic", lambda: now)
    writer = writer_for(tmp_path / "out.parquet")
    for row, seconds in enumerate([0.0, 29.0, 30.0, 31.0, 70.0]):
        now = 100.0 + seconds
        writer.write([completion(row)], {"prompt": "p"})
        writer.flush_if_due()
    assert [writer.parts_written, writer.rows_written] == [2, 5]
