"""What an earlier run has left: the set of rows, and which of several outcomes counts."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from writer_cases import completion, writer_for

from pagedgen.data.files import FileLayer
from pagedgen.data.finished import RowSet, find_finished, find_superseded
from pagedgen.data.layout import OutputLayout
from pagedgen.data.manifest import Manifest, Retry
from pagedgen.request import Completion, Status

rows = st.lists(st.integers(0, 5000), max_size=30)


@given(st.lists(rows, max_size=6), rows)
def test_a_row_set_is_a_set(batches: list[list[int]], asked: list[int]) -> None:
    ours, theirs = RowSet(), set[int]()
    for batch in batches:
        unique = np.unique(np.array(batch, np.int64))
        fresh = ours.add(unique)
        assert fresh.tolist() == [row not in theirs for row in unique.tolist()]
        theirs |= set(batch)
        assert len(ours) == len(theirs)
    assert [row in ours for row in asked] == [row in theirs for row in asked]


def test_ten_million_rows_take_little_memory() -> None:
    found = RowSet()
    found.add(np.arange(10_000_000, dtype=np.int64))
    assert len(found) == 10_000_000
    assert found._bits.nbytes < 3 << 20


def failed(row: int, status: Status) -> Completion:
    return Completion(row, f"id{row}", 0, status, error="no")


def write_parts(folder: Path, *parts: list[list[Completion]]) -> OutputLayout:
    output = folder / "out"
    writer = writer_for(output)
    for part in parts:
        for completions in part:
            writer.write(completions, {"prompt": "p"})
        writer.flush()
    manifest = Manifest("0", (), "m", "in", "out", "2026-01-01T00:00:00+00:00", {})
    return OutputLayout(output, "folder", False, manifest)


def look(layout: OutputLayout, retry: Retry | None = None) -> tuple[list[int], dict[str, int], int]:
    from writer_cases import TEXT

    from pagedgen.config import OutputConfig
    from pagedgen.data.schema import OutputColumns

    schema = OutputColumns(TEXT, OutputConfig(layout.output)).schema
    found = find_finished(layout, schema, retry, FileLayer())
    return [row for row in range(20) if row in found.rows], dict(found.statuses), found.next_part


def test_the_newest_outcome_of_a_row_counts(tmp_path: Path) -> None:
    old = [[completion(0)], [failed(1, Status.NAN_LOGITS)], [completion(2, 0), completion(2, 1)]]
    new = [[completion(1)], [completion(3)]]
    layout = write_parts(tmp_path, old, new)
    assert look(layout) == ([0, 1, 2, 3], {Status.OK: 5}, 2)
    parts = layout.finished_parts()
    assert {path: found.tolist() for path, found in find_superseded(parts).items()} == {parts[0]: [1]}


def test_rows_to_retry_are_those_of_parts_before_it(tmp_path: Path) -> None:
    nan, unfit = Status.NAN_LOGITS, Status.UNFIT
    old = [[completion(0)], [failed(1, nan)], [failed(2, unfit)], [completion(4, 0), failed(4, nan), completion(4, 2)]]
    old[3][1] = Completion(4, "id4", 1, nan, error="no")
    new = [[failed(1, nan)]]
    layout = write_parts(tmp_path, old, new)
    assert look(layout, Retry(("nan_logits",), 1)) == ([0, 1, 2], {Status.OK: 1, nan: 1, unfit: 1}, 2)
    assert look(layout, Retry(("nan_logits", "unfit"), 2)) == ([0], {Status.OK: 1}, 2)
    assert look(layout) == ([0, 1, 2, 4], {Status.OK: 3, nan: 2, unfit: 1}, 2)


@pytest.mark.parametrize("damage", ["empty", "cut", "flipped", "text", "another kind"])
def test_a_damaged_part_is_renamed(tmp_path: Path, damage: str) -> None:
    layout = write_parts(tmp_path, [[completion(0)]], [[completion(1)]])
    part = layout.finished_parts()[1]
    content = bytearray(part.read_bytes())
    if damage == "flipped":
        content[40] ^= 1
    damaged = {
        "empty": b"",
        "cut": bytes(content[: len(content) // 2]),
        "flipped": bytes(content),
        "text": b"hello\n" * 100,
        "another kind": _other_parquet(),
    }
    part.write_bytes(damaged[damage])
    assert look(layout) == ([0], {Status.OK: 1}, 2)
    assert part.with_name("part-00001.parquet.corrupt").read_bytes() == damaged[damage]
    part.write_bytes(damaged[damage])
    assert look(layout) == ([0], {Status.OK: 1}, 2)
    assert part.with_name("part-00001.parquet.corrupt1").is_file()


def _other_parquet() -> bytes:
    import io

    import pyarrow as pa
    import pyarrow.parquet as pq

    buffer = io.BytesIO()
    pq.write_table(pa.table({"row": [1]}), buffer)
    return buffer.getvalue()
