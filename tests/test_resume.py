"""A job that was stopped goes on: the result is that of one that was not."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fake_engine import FakeEngine
from faulty_disk import Death, FaultyDisk
from job_cases import KINDS, ROWS, job, read, rows_of, uninterrupted, write_rows
from tiny_models import tiny_checkpoint

from pagedgen.config import EngineConfig, ErrorLimit, InputConfig
from pagedgen.errors import PagedgenError, UsageError
from pagedgen.job import JobResult, run_job
from pagedgen.request import Status

pytestmark = pytest.mark.usefixtures("fake_jobs")


def test_finished_rows_are_not_run_again(tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows(tmp_path / "in.jsonl", rows_of())
    config = job(tmp_path, model)
    with pytest.raises(Death):
        run_job(config, files=FaultyDisk(20, "killed"))
    parts = sorted((tmp_path / "out.parquet.run" / "parts").glob("part-*"))
    done = {row for part in parts for row in pq.read_table(part)["row"].to_pylist()}
    asked: list[int] = []
    real = FakeEngine.complete

    def spy(self: FakeEngine, requests: Any) -> Any:
        return real(self, (asked.append(request.row) or request for request in requests))

    monkeypatch.setattr(FakeEngine, "complete", spy)
    rendered: list[int] = []
    render = FakeEngine.tokenizer.encode_each
    monkeypatch.setattr(
        type(FakeEngine.tokenizer), "encode_each", lambda _, texts, **kw: rendered.extend(texts) or render(texts, **kw)
    )
    run_job(config)
    assert done
    assert not done & set(asked)
    assert len(rendered) == len(asked)
    assert len(asked) + len(done) <= ROWS


def test_the_same_command_on_a_finished_run_does_nothing(tmp_path: Path, model: str) -> None:
    for kind in KINDS:
        write_rows(tmp_path / "in.jsonl", rows_of())
        config = job(tmp_path, model, kind)
        first = run_job(config)
        made, before = FakeEngine.made, sorted((p, p.stat().st_mtime_ns) for p in tmp_path.rglob("*") if p.is_file())
        assert run_job(config) == first == JobResult(tmp_path / kind, False)
        assert FakeEngine.made == made, "no model was loaded"
        after = sorted((p, p.stat().st_mtime_ns) for p in tmp_path.rglob("*") if p.is_file())
        assert [entry for entry in after if entry[0].name != "lock"] == [e for e in before if e[0].name != "lock"]


@pytest.mark.parametrize("kind", ["out.parquet", "out.jsonl"])
def test_an_output_that_is_not_as_it_was_left_is_made_again(tmp_path: Path, model: str, kind: str) -> None:
    write_rows(tmp_path / "in.jsonl", rows_of())
    run_job(job(tmp_path, model, kind))
    before = (tmp_path / kind).read_bytes()
    (tmp_path / kind).write_bytes(before[:500])
    run_job(job(tmp_path, model, kind))
    assert (tmp_path / kind).read_bytes() == before
    assert (tmp_path / f"{kind}.corrupt").read_bytes() == before[:500]


def test_what_is_piped_in_is_compared(tmp_path: Path, model: str) -> None:
    lines = b"".join(b"prompt %d\n" % number for number in range(30))
    config = job(tmp_path, model, input=InputConfig("-"))
    with pytest.raises(Death):
        run_job(config, io.BytesIO(lines), FaultyDisk(20, "killed"))
    for other in (lines[10:], lines.replace(b"prompt 3\n", b"prompt 4\n"), lines[:-10]):
        with pytest.raises(UsageError, match="the first rows of stdin have changed"):
            run_job(config, io.BytesIO(other))
    run_job(config, io.BytesIO(lines))
    assert [row["prompt"] for row in read(tmp_path / "out.parquet")] == lines.decode().splitlines()
    run_job(config, io.BytesIO(lines + b"one more\n"))
    assert len(read(tmp_path / "out.parquet")) == 31


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("finished", [True, False])
def test_an_input_that_grew_goes_on_with_the_new_rows(tmp_path: Path, model: str, kind: str, finished: bool) -> None:
    expected = uninterrupted(tmp_path / "whole", model, kind)
    write_rows(tmp_path / "in.jsonl", rows_of()[:40])
    if finished:
        run_job(job(tmp_path, model, kind))
    else:
        with pytest.raises(Death):
            run_job(job(tmp_path, model, kind), files=FaultyDisk(20, "killed"))
    write_rows(tmp_path / "in.jsonl", rows_of())
    run_job(job(tmp_path, model, kind))
    assert read(tmp_path / kind) == expected
    if kind == "out.parquet":
        assert list((tmp_path / f"{kind}.run" / "parts").iterdir()) == []


def test_new_rows_of_other_types_fit_the_columns_that_are_there(tmp_path: Path, model: str) -> None:
    write_rows(tmp_path / "in.jsonl", [{"prompt": "a", "x": 1}])
    run_job(job(tmp_path, model))
    write_rows(tmp_path / "in.jsonl", [{"prompt": "a", "x": 1}, {"prompt": "b", "x": "text", "y": 2}])
    run_job(job(tmp_path, model))
    table = pq.read_table(tmp_path / "out.parquet")
    assert table.schema.field("x").type == pa.int64()
    assert table["x"].to_pylist() == [1, None]
    assert json.loads(table["extra"].to_pylist()[1]) == {"x": "text", "y": 2}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"overrides": {"temperature": 0.5}}, ["--temperature was not given, now it is 0.5"]),
        ({"overrides": {"seed": 3}, "token_ids": True}, ["--seed was not given", "--token-ids was False"]),
        ({"keep": ("number",)}, ["--keep was 'all', now it is ['number']"]),
        ({"engine": {"dtype": "float32"}}, ["--dtype was 'auto', now it is 'float32'"]),
        ({"engine": {"on_too_long": "truncate-left"}}, ["--on-too-long"]),
    ],
)
def test_what_determines_results_must_be_the_same(
    tmp_path: Path, model: str, changes: dict[str, Any], words: list[str]
) -> None:
    write_rows(tmp_path / "in.jsonl", rows_of())
    run_job(job(tmp_path, model))
    if "engine" in changes:
        changes = {"engine": EngineConfig(model=model, **changes["engine"])}
    with pytest.raises(UsageError) as caught:
        run_job(job(tmp_path, model, **changes))
    for word in [*words, "--overwrite", "another -o"]:
        assert word in str(caught.value)
    run_job(job(tmp_path, model, overwrite=True, **changes))


def test_what_does_not_determine_results_may_change(tmp_path: Path, model: str) -> None:
    expected = uninterrupted(tmp_path / "whole", model, "out.parquet")
    write_rows(tmp_path / "in.jsonl", rows_of())
    with pytest.raises(Death):
        run_job(job(tmp_path, model), files=FaultyDisk(20, "killed"))
    engine = EngineConfig(model=model, max_seqs=3, kv_memory=1 << 20, block_size=8, prefix_cache=False)
    run_job(job(tmp_path, model, engine=engine, flush_every=1.0, max_errors=ErrorLimit.parse("50%")))
    assert read(tmp_path / "out.parquet") == expected


def test_another_model_is_refused(tmp_path: Path, model: str) -> None:
    write_rows(tmp_path / "in.jsonl", rows_of())
    run_job(job(tmp_path, model))
    other = tiny_checkpoint(tmp_path / "other", "llama", seed=1)
    with pytest.raises(UsageError, match="the model's weights is another"):
        run_job(job(tmp_path, str(other)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda rows: [{"prompt": "other"}, *rows[1:]], "in.jsonl has changed"),
        (lambda rows: rows[:-1], "in.jsonl has changed"),
        (lambda rows: [*rows[:-1], {**rows[-1], "late": 1}], "in.jsonl has changed"),
    ],
)
def test_an_input_that_changed_is_refused(tmp_path: Path, model: str, change: Any, words: str) -> None:
    write_rows(tmp_path / "in.jsonl", rows_of())
    run_job(job(tmp_path, model))
    write_rows(tmp_path / "in.jsonl", change(rows_of()))
    with pytest.raises(UsageError, match=words):
        run_job(job(tmp_path, model))


@pytest.mark.parametrize("kind", KINDS)
def test_retry_runs_rows_of_a_status_again(
    tmp_path: Path, model: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(tmp_path / "in.jsonl", rows_of())
    config = job(tmp_path, model, kind)
    run_job(config)
    before = read(tmp_path / kind)
    bad = [row["row"] for row in before if row["status"] == "nan_logits"]
    assert bad
    monkeypatch.setattr("fake_engine.completions", lambda request: [_mended(request)])
    run_job(replace(config, retry=(Status.NAN_LOGITS, Status.UNFIT)))
    after = read(tmp_path / kind)
    assert [row["row"] for row in after if row["text"] == "mended"] == bad
    assert [(row["row"], row["sample"]) for row in after] == [(row["row"], row["sample"]) for row in before]
    assert [row for row in after if row["row"] not in bad] == [row for row in before if row["row"] not in bad]
    assert run_job(config).all_ok is False, "there are rows without a prompt"


def test_a_retry_that_is_interrupted_goes_on_where_it_was(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(tmp_path / "in.jsonl", rows_of())
    config = job(tmp_path, model)
    run_job(config)
    retry = replace(config, retry=(Status.BAD_ROW, Status.OK, Status.NAN_LOGITS))
    with pytest.raises(Death):
        run_job(retry, files=FaultyDisk(25, "killed"))
    done = {row for part in (tmp_path / "out.parquet.run" / "parts").glob("part-*") for row in _rows_in(part)}
    assert done
    asked: list[int] = []
    real = FakeEngine.complete
    monkeypatch.setattr(
        FakeEngine, "complete", lambda self, requests: real(self, (asked.append(r.row) or r for r in requests))
    )
    run_job(retry)
    assert asked
    assert not done & set(asked)


def test_retry_needs_an_earlier_run(tmp_path: Path, model: str) -> None:
    write_rows(tmp_path / "in.jsonl", rows_of())
    with pytest.raises(UsageError, match="--retry runs rows of an earlier run again"):
        run_job(job(tmp_path, model, retry=(Status.BAD_ROW,)))


def test_a_run_with_too_many_errors_ends_early_and_goes_on_with_a_higher_limit(tmp_path: Path, model: str) -> None:
    rows = [{"prompt": "x"} if number % 2 else {} for number in range(300)]
    write_rows(tmp_path / "in.jsonl", rows)
    with pytest.raises(PagedgenError, match=r"more than --max-errors 10 .*no value in any of messages, prompt"):
        run_job(job(tmp_path, model, max_errors=ErrorLimit.parse("10")))
    kept = sum(map(len, map(_rows_in, (tmp_path / "out.parquet.run" / "parts").glob("part-*"))))
    assert kept >= 11
    with pytest.raises(PagedgenError, match=r"more than --max-errors 40%"):
        run_job(job(tmp_path, model, max_errors=ErrorLimit.parse("40%")))
    result = run_job(job(tmp_path, model, max_errors=ErrorLimit.parse("60%")))
    assert not result.all_ok
    found = [row["status"] for row in read(tmp_path / "out.parquet")]
    assert len(found) == 300
    assert set(found[::2]) == {"bad_row"}
    assert "bad_row" not in found[1::2]


def _mended(request: Any) -> Any:
    from pagedgen.request import Completion

    return Completion(request.row, request.id, 0, Status.OK, text="mended")


def _rows_in(part: Path) -> list[int]:
    rows: list[int] = pq.read_table(part)["row"].to_pylist()
    return rows
