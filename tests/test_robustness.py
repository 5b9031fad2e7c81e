"""What can befall a run or a row: one typed outcome or one sentence, and never a lost neighbour."""

import errno
import io
import json
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fake_engine import FakeEngine
from job_cases import job, read, write_rows

from pagedgen.config import EngineConfig, InputConfig
from pagedgen.data.files import FileLayer
from pagedgen.data.lock import RunLock
from pagedgen.errors import PagedgenError
from pagedgen.job import run_job

pytestmark = pytest.mark.usefixtures("fake_jobs")


def run_lines(folder: Path, model: str, content: bytes) -> list[dict[str, Any]]:
    (folder / "in.jsonl").write_bytes(content)
    run_job(job(folder, model))
    return read(folder / "out.parquet")


GOOD = b'{"prompt": "good"}'


@pytest.mark.parametrize(
    ("line", "status", "words"),
    [
        (b"{broken", "bad_row", "is not valid JSON"),
        (b"null", "bad_row", "is not a JSON object but a JSON null"),
        (b'["prompt"]', "bad_row", "is not a JSON object but a JSON array"),
        (b'"prompt"', "bad_row", "is not a JSON object but a JSON string"),
        (b'{"prompt": "caf\xe9"}', "bad_row", "is not valid UTF-8"),
        (b'{"prompt": "\\ud800"}', "bad_row", "half of a surrogate pair"),
        (b'{"prompt": 5}', "bad_row", "prompt must be a text"),
        (b'{"prompt": null}', "bad_row", "no value in any of messages, prompt, prompt_token_ids"),
        (b'{"prompt": ""}', "bad_row", "prompt is empty"),
        (b"[" * 200 + b"]" * 200, "bad_row", "JSON array"),
        (b'{"prompt": "x", "y": ' + b"[" * 200 + b"]" * 200 + b"}", "bad_row", "nested more than 100 levels deep"),
        (b'{"prompt": "x", "temperature": "hot"}', "bad_row", "temperature is 'hot'"),
        (b'{"prompt": "x", "n": 0}', "bad_row", "n is 0"),
        (b'{"messages": [{"role": "tool", "content": "x"}]}', "template_error", "no tools here"),
        (b'{"prompt_token_ids": [1, -1]}', "bad_row", "prompt_token_ids holds -1"),
        (b'{"prompt_token_ids": "' + b"[" * 100_000 + b'"}', "bad_row", "must be a list of token ids"),
        (b'{"prompt_token_ids": "[' + b"9" * 5000 + b']"}', "bad_row", "must be a list of token ids"),
        (b'{"messages": "' + b"[" * 100_000 + b'"}', "bad_row", "its text is not JSON"),
        (b'{"prompt": "x", "bad_words": ["\\ud800"]}', "bad_row", "bad_words is"),
        (b'{"prompt": "x", "y": ' + b"[" * 60 + b"]" * 60 + b"}", "ok", None),
        ('{"prompt": "a\u2028b"}'.encode(), "ok", None),
        (b'{"prompt": "a\\u0000b"}', "ok", None),
        (b'{"prompt": "x", "max_tokens": "7", "seed": "3", "ignore_eos": "true"}', "ok", None),
        (b'{"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}', "ok", None),
        (b'{"messages": "[{\\"role\\": \\"user\\", \\"content\\": \\"a\\"}]"}', "ok", None),
        (b'{"prompt": "x", "n": 2.0}', "ok", None),
        (b'{"prompt": "x", "prompt": "y"}', "ok", None),
    ],
)
def test_a_strange_line_gets_its_outcome_and_its_neighbours_theirs(
    tmp_path: Path, model: str, line: bytes, status: str, words: str | None
) -> None:
    rows = run_lines(tmp_path, model, GOOD + b"\n" + line + b"\n" + GOOD + b"\n")
    strange = [row for row in rows if row["row"] == 1]
    assert [row["row"] for row in rows if row["row"] != 1] == [0, 2]
    assert {row["status"] for row in strange} == {status}
    assert [row["text"] for row in rows if row["row"] != 1] == [rows[0]["text"]] * 2
    if words is not None:
        assert words in strange[0]["error"]
        assert strange[0]["error"].startswith("in.jsonl line 2")


@pytest.mark.parametrize(
    "content",
    [
        b"\xef\xbb\xbf" + GOOD + b"\n" + GOOD,
        GOOD + b"\r\n" + GOOD + b"\r\n",
        b"\n\n" + GOOD + b"\n  \n" + GOOD + b"\n\n",
    ],
    ids=["BOM", "CRLF", "blank lines"],
)
def test_marks_line_ends_and_blank_lines_are_no_rows(tmp_path: Path, model: str, content: bytes) -> None:
    assert [(row["row"], row["status"]) for row in run_lines(tmp_path, model, content)] == [(0, "ok"), (1, "ok")]


TYPES = [
    pa.array([1, 2], pa.timestamp("s")),
    pa.array([1, 2], pa.timestamp("s", "UTC")),
    pa.array([[1], [2]], pa.list_(pa.timestamp("s"))),
    pa.array([1, 2], pa.time32("s")),
    pa.array([86_400_000, 0], pa.date64()),
    pa.UnionArray.from_dense(
        pa.array([0, 1], pa.int8()), pa.array([0, 0], pa.int32()), [pa.array([1]), pa.array(["a"])]
    ),
    pa.array([["a"], ["b"]], pa.list_(pa.dictionary(pa.int8(), pa.string()))),
]


@pytest.mark.parametrize("column", TYPES, ids=lambda column: str(column.type).split("<")[0])
def test_columns_of_any_arrow_type_come_through(tmp_path: Path, model: str, column: pa.Array) -> None:
    table = pa.table({"prompt": ["a", "b"], "x": column})
    with pa.ipc.new_file(tmp_path / "in.arrow", table.schema) as writer:
        writer.write_table(table)
    run_job(job(tmp_path, model, input=InputConfig(str(tmp_path / "in.arrow"))))
    rows = read(tmp_path / "out.parquet")
    assert [row["status"] for row in rows] == ["ok", "ok"]
    assert all(row["x"] is not None for row in rows)


def test_a_date_that_python_does_not_have_costs_its_row(tmp_path: Path, model: str) -> None:
    table = pa.table({"prompt": ["a", "b", "c"], "x": pa.array([1, 2**31 - 1, 2], pa.date32())})
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=1)
    run_job(job(tmp_path, model, input=InputConfig(str(tmp_path / "in.parquet"))))
    assert [row["status"] for row in read(tmp_path / "out.parquet")] == ["ok", "bad_row", "ok"]


def test_an_arrow_file_without_rows_is_refused(tmp_path: Path, model: str) -> None:
    with pa.ipc.new_file(tmp_path / "in.arrow", pa.schema([("prompt", pa.string())])):
        pass
    with pytest.raises(PagedgenError, match=r"in\.arrow has no rows"):
        run_job(job(tmp_path, model, input=InputConfig(str(tmp_path / "in.arrow"))))


def test_an_array_on_stdin_may_begin_with_a_space(tmp_path: Path, model: str) -> None:
    document = io.BytesIO(b'[ {"prompt": "a"}, {"prompt": "b"}]')
    run_job(job(tmp_path, model, input=InputConfig("-")), document)
    assert [row["prompt"] for row in read(tmp_path / "out.parquet")] == ["a", "b"]


def test_ids_that_are_not_unique_lose_nobody(tmp_path: Path, model: str) -> None:
    lines = [json.dumps({"id": "same", "prompt": "x" * number}).encode() for number in range(1, 8)]
    rows = run_lines(tmp_path, model, b"\n".join(lines))
    assert [row["row"] for row in rows] == list(range(7))
    assert {row["id"] for row in rows} == {"same"}
    assert len({row["text"] for row in rows}) == 7


def test_an_enormous_prompt_is_too_long_without_being_tokenized(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest: list[int] = []
    real = FakeEngine.tokenizer.encode_each

    def spy(self: Any, texts: list[str], **options: Any) -> Any:
        longest.extend(map(len, texts))
        return real(texts, **options)

    monkeypatch.setattr(type(FakeEngine.tokenizer), "encode_each", spy)
    enormous = json.dumps({"prompt": "word " * 10_000_000}).encode()
    too_long_a_line = b'{"prompt": "' + b"x" * (65 << 20) + b'"}'
    rows = run_lines(tmp_path, model, b"\n".join([GOOD, enormous, GOOD, too_long_a_line, GOOD]))
    assert [row["status"] for row in rows] == ["ok", "too_long", "ok", "bad_row", "ok"]
    assert "50,000,000 characters" in rows[1]["error"]
    assert "longer than 64 MiB" in rows[3]["error"]
    assert max(longest) < 1000


@pytest.mark.parametrize("how", ["truncate-left", "truncate-right"])
def test_an_enormous_prompt_is_cut_as_one_that_is_tokenized_whole(
    tmp_path: Path, model: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the engine keeps of the tokens is the same; here, it is the tokens at the end that count."""
    seen: list[list[int]] = []
    real = FakeEngine.complete

    def spy(self: Any, requests: Any) -> Any:
        return real(self, (seen.append(list(request.prompt_token_ids)) or request for request in requests))

    monkeypatch.setattr(FakeEngine, "complete", spy)
    monkeypatch.setattr(FakeEngine, "max_model_len", 64)
    text = "".join(f"word {number} " for number in range(150_000))
    row = json.dumps({"messages": [{"role": "user", "content": text}, {"role": "user", "content": "and more"}]})
    (tmp_path / "in.jsonl").write_text(row)
    engine = EngineConfig(model=model, on_too_long=how)
    for name, enormous in (("cut", 1 << 10), ("whole", 1 << 30)):
        monkeypatch.setattr("pagedgen.text.prompts.ENORMOUS", enormous)
        run_job(job(tmp_path, model, f"{name}.parquet", engine=engine))
    cut, whole = seen
    assert len(cut) < len(whole) / 3
    assert cut[-60:] == whole[-60:] if how == "truncate-left" else cut[:60] == whole[:60]


def test_two_processes_that_start_together_do_not_meet(tmp_path: Path, model: str) -> None:
    """The other one begins while this one loads its model."""
    write_rows(tmp_path / "in.jsonl", [{"prompt": "x"} for _ in range(20)])
    config, began = job(tmp_path, model), []

    class Late(FakeEngine):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            if not began:
                began.append(True)
                run_job(config)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pagedgen.engine.Engine", Late)
        with pytest.raises(PagedgenError, match="another pagedgen has just written"):
            run_job(config)
    assert len(read(tmp_path / "out.parquet")) == 20
    (tmp_path / "out.parquet").unlink()
    with RunLock(tmp_path / "new.parquet.run"), pytest.raises(PagedgenError, match="another pagedgen"):
        run_job(job(tmp_path, model, "new.parquet"))


def test_a_second_process_is_refused(tmp_path: Path, model: str) -> None:
    write_rows(tmp_path / "in.jsonl", [{"prompt": "x"}])
    config = job(tmp_path, model)
    run_job(config)
    with RunLock(tmp_path / "out.parquet.run"), pytest.raises(PagedgenError, match=r"another pagedgen \(process \d+\)"):
        run_job(config)
    run_job(config)


def test_a_disk_that_becomes_read_only_ends_the_run_in_a_sentence(tmp_path: Path, model: str) -> None:
    write_rows(tmp_path / "in.jsonl", [{"prompt": "x"} for _ in range(50)])

    class ReadOnly(FileLayer):
        def create(self, path: Path) -> BinaryIO:
            if path.name.startswith(".part"):
                raise OSError(errno.EROFS, "Read-only file system")
            return super().create(path)

    with pytest.raises(PagedgenError, match=r"cannot be written \(Read-only file system\); make it writable, then run"):
        run_job(job(tmp_path, model), files=ReadOnly())
    run_job(job(tmp_path, model))
    assert len(read(tmp_path / "out.parquet")) == 50


def test_an_output_that_someone_else_changed_is_not_merged(tmp_path: Path, model: str) -> None:
    write_rows(tmp_path / "in.jsonl", [{"prompt": "x"}])
    run_job(job(tmp_path, model))
    theirs = pa.table({"mine": [1]})
    pq.write_table(theirs, tmp_path / "out.parquet")
    write_rows(tmp_path / "in.jsonl", [{"prompt": "x"}, {"prompt": "y"}])
    with pytest.raises(PagedgenError, match=r"out\.parquet has other columns than the run wrote"):
        run_job(job(tmp_path, model))
    assert pq.read_table(tmp_path / "out.parquet").equals(theirs)


def test_a_merged_output_that_is_damaged_is_set_aside(tmp_path: Path, model: str) -> None:
    write_rows(tmp_path / "in.jsonl", [{"prompt": "x"}])
    run_job(job(tmp_path, model))
    (tmp_path / "out.parquet").write_bytes(b"PAR1 nothing PAR1")
    write_rows(tmp_path / "in.jsonl", [{"prompt": "x"}, {"prompt": "y"}])
    run_job(job(tmp_path, model))
    assert [row["row"] for row in read(tmp_path / "out.parquet")] == [0, 1]
    assert (tmp_path / "out.parquet.corrupt").is_file()
