"""Readers: what a user can get wrong, datasets, and memory."""

import gzip
import io
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from pagedgen.config import InputConfig
from pagedgen.data.readers import open_input
from pagedgen.errors import PagedgenError, UsageError


def open_path(path: Path | str) -> None:
    open_input(InputConfig(path=str(path)))


def test_wrong_path_suggests_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text("{}\n")
    with pytest.raises(UsageError, match=r"there is no file .*prompt\.jsonl; did you mean .*prompts\.jsonl\?"):
        open_path(tmp_path / "prompt.jsonl")
    with pytest.raises(UsageError, match=r"nor a folder .*nowhere; check the path"):
        open_path(tmp_path / "nowhere" / "x.jsonl")


def test_only_what_can_be_read_is_suggested(tmp_path: Path) -> None:
    for name in ("promptx.jsonl", "prompty.jsonl.run"):
        (tmp_path / name).mkdir()
    (tmp_path / "promptz.jsonl").symlink_to("nowhere")
    (tmp_path / "prompt.jsonlx").touch()
    with pytest.raises(UsageError, match=r"there is no file .*prompt\.jsonl; check the path"):
        open_path(tmp_path / "prompt.jsonl")
    (tmp_path / "promptx.jsonl" / "a.jsonl").write_text("{}\n")
    with pytest.raises(UsageError, match=r"did you mean [^ ]*promptx\.jsonl\?"):
        open_path(tmp_path / "prompt.jsonl")


def test_a_link_that_leads_nowhere_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").symlink_to(tmp_path / "gone.jsonl")
    with pytest.raises(UsageError, match=r"a\.jsonl is a link to .*gone\.jsonl, which does not exist"):
        open_path(tmp_path / "a.jsonl")


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.jsonl", b"", "is empty"),
        ("a.jsonl", b"\n \n\r\n", "has no rows"),
        ("a.jsonl.gz", gzip.compress(b"", mtime=0), "has no rows"),
        ("a.json", b"[]", "has no rows"),
        ("a.csv", b"prompt\n", "has no rows"),
        ("a.csv", b"\n", "has no rows"),
        ("a.txt", b" \n", "has no rows"),
        ("a.docx", b"x", "kind that cannot be read; give one of .jsonl"),
        ("a.gz", b"x", "kind that cannot be read"),
        ("a.jsonl", "x".encode("utf-16"), "UTF-16"),
        ("a.json", b"[{]", "not valid JSON at item 1"),
        ("a.json", b'[{"a": 1} {"a": 2}]', "after item 1: ',' or ']' expected"),
        ("a.json", b'[{"a": 1}', "cut off after item 1"),
        ("a.json", b'[{"a": 1},', "item 2: a value is missing"),
        ("a.json", b"[1] 2", "something after the end"),
        ("a.parquet", b"PAR1 no", "truncated or corrupt"),
        ("a.arrow", b"no", "truncated or corrupt"),
        ("a.jsonl.gz", b"no", "truncated or corrupt"),
        ("a.jsonl.zst", b"no gzip either", "truncated or corrupt"),
    ],
)
def test_unusable_files_are_named(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(PagedgenError) as caught:
        open_path(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_empty_parquet_and_folders(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "a.parquet")
    with pytest.raises(UsageError, match="has no rows"):
        open_path(tmp_path / "a.parquet")
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(UsageError, match="holds no file of a known kind"):
        open_path(folder)
    for name in ("x.jsonl", "y.csv"):
        (folder / name).touch()
    with pytest.raises(UsageError, match="has no rows"):
        open_path(folder)
    with pytest.raises(UsageError, match="no file matches"):
        open_path(folder / "*.parquet")
    (folder / "x.md").touch()
    with pytest.raises(UsageError, match="matches no file of a known kind"):
        open_path(folder / "*.md")


def test_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("{}\n")
    monkeypatch.setattr(os, "access", lambda *_: False)  # permissions do not bind the superuser
    with pytest.raises(UsageError, match="cannot be read; check its permissions"):
        open_path(path)


LINES = b"".join(b'{"prompt": "%d"}\n' % number for number in range(60_000))


def arrow_file() -> bytes:
    sink = io.BytesIO()
    table = pa.table({"prompt": [str(number) for number in range(60_000)]})
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=1000)
    return sink.getvalue()


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.jsonl.gz", gzip.compress(LINES, mtime=0)),
        ("a.jsonl.zst", zstandard.compress(LINES)),
        ("a.arrow", arrow_file()),
        ("a.json", b"[" + LINES.strip().replace(b"\n", b",") + b"]"),
    ],
)
def test_truncated_under_way(tmp_path: Path, name: str, data: bytes) -> None:
    path = tmp_path / name
    for kept in (len(data) * 9 // 10, len(data) - 1):
        path.write_bytes(data[:kept])
        source = open_input(InputConfig(path=str(path)))
        records = iter(source)
        assert len(list(itertools.islice(records, 1001))) == 1001
        with pytest.raises(PagedgenError) as caught:
            list(records)
        assert str(path) in str(caught.value)


def test_corrupt_parquet_under_way(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"prompt": [os.urandom(20).hex() for _ in range(5000)]})
    pq.write_table(table, path, row_group_size=1000, compression="zstd", use_dictionary=False)
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 2000] = bytes(2000)
    path.write_bytes(data)
    source = open_input(InputConfig(path=str(path)))
    with pytest.raises(PagedgenError, match=r"a\.parquet is truncated or corrupt"):
        list(source)


def save(rows: int) -> "pa.Table":
    return pa.table({"prompt": [f"p{number}" for number in range(rows)], "n": list(range(rows))})


def test_dataset_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = tmp_path / "mine"
    folder.mkdir()
    pq.write_table(save(1200), folder / "train.parquet")
    source = open_input(InputConfig(dataset=str(folder)))
    assert [record.columns["n"] for record in source] == list(range(1200))
    assert source.columns == pa.schema([("prompt", pa.string()), ("n", pa.int64())])
    assert (source.stem, source.files, source.total_bytes) == ("mine", (), None)

    pq.write_table(save(3), folder / "test.parquet")
    with pytest.raises(UsageError, match="has the splits test, train; choose one with --split"):
        open_input(InputConfig(dataset=str(folder)))
    with pytest.raises(UsageError, match="no split 'dev'; choose --split from test, train"):
        open_input(InputConfig(dataset=str(folder), split="dev"))
    source = open_input(InputConfig(dataset=str(folder), split="test"))
    assert [record.columns["prompt"] for record in source] == ["p0", "p1", "p2"]
    assert source.description == f"dataset {folder} (test)"
    with pytest.raises(UsageError, match=r"cannot be opened .*nothing"):
        open_input(InputConfig(dataset=str(folder), dataset_config="nothing"))


def test_dataset_of_json_lines(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"prompt": "a", "messages": [{"role": "user"}]}\n{"prompt": "b"}\n')
    source = open_input(InputConfig(dataset=str(tmp_path)))
    assert source.columns.names == ["prompt", "messages"]
    assert [record.columns["prompt"] for record in source] == ["a", "b"]


def test_dataset_saved_to_disk(tmp_path: Path) -> None:
    import datasets

    rows = datasets.Dataset(save(5))
    rows.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": rows, "test": rows.select(range(2))}).save_to_disk(tmp_path / "two")
    source = open_input(InputConfig(dataset=str(tmp_path / "one")))
    assert (source.total, [record.columns["n"] for record in source]) == (5, [0, 1, 2, 3, 4])
    assert open_input(InputConfig(dataset=str(tmp_path / "two"), split="test")).total == 2
    as_folder = open_input(InputConfig(path=str(tmp_path / "one")))
    assert [record.columns["n"] for record in as_folder] == [0, 1, 2, 3, 4]


def test_dataset_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets.config
    import huggingface_hub.constants

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for name in (str(tmp_path / "nowhere"), "nobody/has-this-dataset"):
        with pytest.raises(UsageError) as caught:
            open_input(InputConfig(dataset=name))
        assert f"there is no folder {name}" in str(caught.value)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="cannot be opened"):
        open_input(InputConfig(dataset=str(tmp_path / "empty")))


PEAK = """
import resource, sys
from pagedgen.config import InputConfig
from pagedgen.data.readers import open_input
rows = sum(1 for _ in open_input(InputConfig(path=sys.argv[1])))
print(rows, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def peak_kib(path: Path, rows: int) -> int:
    """Peak resident memory of a process that reads `rows` trivial rows."""
    with path.open("w") as file:
        file.writelines(json.dumps({"id": number, "prompt": f"say {number}"}) + "\n" for number in range(rows))
    result = subprocess.run([sys.executable, "-c", PEAK, str(path)], capture_output=True, text=True, check=True)
    count, peak = map(int, result.stdout.split())
    assert count == rows
    return peak


@pytest.mark.parametrize("rows", [200_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_memory_does_not_grow_with_the_rows(tmp_path: Path, rows: int) -> None:
    small = peak_kib(tmp_path / "small.jsonl", rows // 10)
    large = peak_kib(tmp_path / "large.jsonl", rows)
    assert large - small < 4096, (small, large)
