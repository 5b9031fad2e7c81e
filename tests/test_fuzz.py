"""Whatever stands in the input, each of its rows gets exactly one outcome, and costs no other row anything."""

import io
import json
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import fuzz_inputs as inputs
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from faulty_disk import Death, FaultyDisk
from fuzz_inputs import KNOWN, Case, Row, is_name
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from tiny_models import tiny_checkpoint

import pagedgen.engine
from pagedgen.config import EngineConfig, InputConfig, JobConfig, PromptConfig
from pagedgen.data import writer as writers
from pagedgen.data.files import FileLayer
from pagedgen.data.manifest import read_manifest
from pagedgen.errors import PagedgenError
from pagedgen.job import run_job
from pagedgen.request import BeamParams, Status

LONGEST_ERROR = 600
NEVER = 1 << 60  # such a disk does not fail, and the tests' own machine stays up
OUTPUTS = ("out.parquet", "out.parquet", "out.jsonl", "out", "openai.jsonl")
PROMPT_CONFIGS = (PromptConfig(), PromptConfig(raw=True), PromptConfig(template="Q: {{ prompt }}"))

_ints, _words = st.integers(0, 80_000), inputs.texts.filter(is_name)
# Dates and times that Python does not have are among them.
_moments = st.one_of(_ints, _ints, st.sampled_from([2**62, -(2**63)]))
_SHORT_TIMES = (pa.date32(), pa.time32("ms"), pa.time32("s"))
_TIMES = (
    *(pa.timestamp("s"), pa.timestamp("s", "UTC"), pa.timestamp("ms", "Asia/Tokyo"), pa.timestamp("us", "+02:00")),
    *(pa.timestamp("ns", "Nowhere"), pa.timestamp("us"), pa.time64("us"), pa.time64("ns")),
    *(pa.duration("s"), pa.duration("ns")),
)
_TEXTS = (pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string()))
_chat = pa.list_(pa.struct([("role", pa.string()), ("content", pa.large_string())]))
_tree = pa.struct([("a", pa.list_(pa.dictionary(pa.int8(), pa.string()))), ("b", pa.struct([("c", pa.binary())]))])
_of_tree = {"a": st.lists(_words, max_size=2), "b": st.fixed_dictionaries({"c": st.binary(max_size=3)})}
_few_ids = st.lists(st.integers(0, 330), max_size=4)
TYPES: tuple[tuple[pa.DataType, st.SearchStrategy[Any]], ...] = (
    *((kind, _moments) for kind in _TIMES),
    *((kind, st.one_of(_ints, st.just(2**31 - 1))) for kind in _SHORT_TIMES),
    (pa.date64(), _ints.map(lambda day: day * 86_400_000)),
    (pa.list_(pa.timestamp("s")), st.lists(_ints, max_size=2)),
    *((kind, _words) for kind in _TEXTS),
    *((kind, st.integers(0, 9)) for kind in (pa.int8(), pa.uint16(), pa.int64(), pa.uint64())),
    *((kind, st.floats(width=32)) for kind in (pa.float32(), pa.float64())),
    *((kind, st.binary(max_size=4)) for kind in (pa.binary(), pa.large_binary(), pa.binary_view())),
    *((kind, st.decimals(-99, 99, places=2)) for kind in (pa.decimal128(10, 2), pa.decimal256(50, 2))),
    *((kind, _few_ids) for kind in (pa.list_(pa.int32()), pa.large_list(pa.int64()), pa.list_view(pa.int16()))),
    *((pa.bool_(), st.booleans()), (pa.null(), st.none()), (pa.struct([]), st.just({})), (pa.json_(), st.just("[1]"))),
    *((pa.list_(pa.int32(), 2), st.tuples(_ints, _ints)), (pa.uuid(), st.binary(min_size=16, max_size=16))),
    (pa.month_day_nano_interval(), st.tuples(_ints, _ints, _ints)),
    (_chat, st.lists(st.fixed_dictionaries({"role": inputs.roles, "content": _words}), max_size=2)),
    (_tree, st.fixed_dictionaries(_of_tree)),
    (pa.map_(pa.string(), pa.int64()), st.lists(st.tuples(_words, _ints), max_size=2)),
)


def array(values: list[Any], kind: pa.DataType) -> pa.Array:
    if kind in _TIMES:  # by what they are stored as
        return pa.array(values, pa.int64() if kind.bit_width == 64 else pa.int32()).view(kind)
    return pa.array(values, kind)


@st.composite
def columnar_files(draw: st.DrawFn) -> Case:
    """Parquet, or Arrow, and that also where Parquet does not have a type."""
    known = draw(st.lists(st.booleans(), max_size=7))
    names = ["prompt", *draw(st.lists(st.sampled_from([*inputs.NAMES, *inputs.PROMPTS]).filter(is_name), max_size=4))]
    if draw(st.integers(0, 9)):  # else one may come twice
        names = list(dict.fromkeys(names))
    kinds = [
        draw(st.sampled_from([(kind, _words) for kind in _TEXTS] if name == "prompt" else TYPES)) for name in names
    ]
    found = [[None if is_known else draw(st.none() | items) for is_known in known] for _, items in kinds]
    found[0] = [KNOWN if is_known else value for is_known, value in zip(known, found[0], strict=True)]
    columns, others = [array(values, kind) for values, (kind, _) in zip(found, kinds, strict=True)], Row()
    if draw(st.integers(0, 5)) == 0:
        names, others = [*names, "no text"], Row("bad")
        columns.append(pa.array([None if is_known else b"\xff" for is_known in known], pa.binary()).view(pa.string()))
    suffix, data = written(pa.table(columns, names), draw(st.booleans()))
    suffix += (packed := draw(inputs.suffixes))
    rows = tuple(Row("known") if is_known else others for is_known in known)
    broken = "two columns of one name" if len(set(names)) < len(names) else None
    return Case(((f"in{suffix}", inputs.compressed(data, packed)),), rows, frozenset(names), broken)


def written(table: pa.Table, as_parquet: bool) -> tuple[str, bytes]:
    file = io.BytesIO()
    with suppress(pa.ArrowException):
        if as_parquet:
            pq.write_table(table, file, row_group_size=3)
            return ".parquet", file.getvalue()
    with pa.ipc.new_file(file := io.BytesIO(), table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return ".arrow", file.getvalue()


@st.composite
def folders(draw: st.DrawFn) -> Case:
    """Files of several kinds, which are read in the order of their names."""
    kinds = st.one_of(inputs.json_files(), inputs.text_files(), inputs.delimited_files(), columnar_files())
    cases = [case for case in draw(st.lists(kinds, min_size=1, max_size=3)) if case.files[0][0] != "-"]
    cases = [case for case in cases if not case.is_batch and not case.broken]
    held = [case.files[0] for case in cases]
    files = [(f"{'abc'[at]}/{at}{name.removeprefix('in')}", data) for at, (name, data) in enumerate(held)]
    ignored = (("a/.in.jsonl", b"{"), ("a/notes.md", b"x"), ("a/empty.csv", b""))
    rows = tuple(row for case in cases for row in case.rows)
    return Case((*files, *ignored), rows, frozenset().union(*(case.names for case in cases)))


@st.composite
def broken_files(draw: st.DrawFn) -> Case:
    """Files of which nobody can tell where the next row begins."""
    case = draw(st.one_of(inputs.json_files(), columnar_files()))
    (name, data), *_ = case.files
    kind = draw(st.sampled_from(("cut", "tail", "UTF-16")))
    if kind == "UTF-16":
        return Case((("in.jsonl", '{"prompt": "a"}'.encode("utf-16")),), case.rows, case.names, "UTF-16")
    if kind == "tail":
        tail = draw(st.sampled_from((b"x", b", 1", b"]", b"{}", b"\0")))
        return Case((("in.json", b'[{"prompt": "a"}]' + tail),), case.rows, case.names, "text after the array")
    if not name.endswith((".gz", ".zst", ".parquet")):
        name, data = "in.json", b'[{"prompt": "a"}, {"prompt": "b"} ]'
    return Case(((name, data[: draw(st.integers(1, len(data) - 1))]),), case.rows, case.names, "cut off")


class OneEngine:
    """Hands out one engine, again and again."""

    def __init__(self, model: str) -> None:
        config = EngineConfig(model=model, device="cpu", kv_memory=1 << 20, max_seqs=8, max_model_len=64)
        self._engine, self.made = pagedgen.engine.Engine(config), 0

    def __call__(self, config: EngineConfig, *, on_phase: Any, on_step: Any, on_note: Any) -> pagedgen.engine.Engine:
        self.made += 1
        engine = self._engine
        if engine.scheduler.has_work:  # of a run that died
            engine._pipeline.abort()
        engine._pipeline.on_step, engine._pipeline.on_note = on_step, on_note
        return engine


@dataclass(frozen=True)
class How:
    """How a file is run. then: what happens after, or on the way."""

    output: str = "out.parquet"
    prompt: PromptConfig = PROMPT_CONFIGS[0]
    beam: BeamParams | None = None
    then: str = "nothing"
    dies_at: int = 0


hows = st.builds(
    How,
    st.sampled_from(OUTPUTS),
    st.sampled_from([PROMPT_CONFIGS[0]] * 4 + [*PROMPT_CONFIGS]),
    st.sampled_from([None] * 6 + [BeamParams(2, 1), BeamParams(3, 2)]),
    st.sampled_from(("nothing",) * 6 + ("again", "death")),
    st.integers(1, 40),
)


class Fuzz:
    """Runs cases and checks what comes of them; counts the statuses."""

    def __init__(self, model: str, engines: OneEngine) -> None:
        self._model, self._engines = model, engines
        self.statuses: Counter[str] = Counter()
        self.known_text = cache(self._known_text)

    def _known_text(self, prompt: PromptConfig, beam: BeamParams | None) -> str:
        with tempfile.TemporaryDirectory() as folder:
            case = Case((("in.jsonl", json.dumps({"prompt": KNOWN}).encode()),), (Row(),), frozenset({"prompt"}))
            run, output = self._prepare(Path(folder), case, How(prompt=prompt, beam=beam))
            run(FaultyDisk(NEVER, "killed"))
            return str(pq.read_table(output)["text"][0].as_py())

    def _prepare(self, folder: Path, case: Case, how: How) -> tuple[Callable[[FileLayer], object], Path]:
        (first, data), output = case.files[0], folder / how.output
        for name, content in case.files:
            if name != "-":
                (folder / "in" / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / "in" / name).write_bytes(content)
        path = "-" if first == "-" else str(folder / "in" / first if len(case.files) == 1 else folder / "in")
        config = JobConfig(
            InputConfig(path),
            output_path=output,
            format="openai" if how.output == "openai.jsonl" else "rows",
            prompt=how.prompt,
            engine=EngineConfig(model=self._model),
            overrides={"max_tokens": 2},
            beam=how.beam,
            quiet=True,
        )
        return lambda files: run_job(config, stdin=io.BytesIO(data) if first == "-" else None, files=files), output

    def check(self, case: Case, how: How) -> None:
        if case.is_batch or "prompt" not in case.names:
            how = replace(how, prompt=PROMPT_CONFIGS[0])
        with tempfile.TemporaryDirectory() as name:
            run, output = self._prepare(Path(name), case, how)
            if case.failure is not None:
                with pytest.raises(PagedgenError) as caught:
                    run(FaultyDisk(NEVER, "killed"))
                check_sentence(str(caught.value))
                event(f"{case.files[0][0]}: {case.failure}")
                return
            if how.then == "death":
                try:
                    run(FaultyDisk(how.dies_at, "killed"))
                except Death:
                    event("died and went on")
            result = run(FaultyDisk(NEVER, "killed"))
            rows = read(output, case, how)
            self._check_rows(case, how, rows)
            if how.then == "again":
                made, before = self._engines.made, contents(output)
                assert run(FaultyDisk(NEVER, "killed")) == result
                assert (self._engines.made, contents(output)) == (made, before)
        event(f"{case.files[0][0]} to {how.output}")

    def _check_rows(self, case: Case, how: How, rows: list[list[dict[str, Any]]]) -> None:
        assert len(rows) == len(case.rows)
        for number, (expected, found) in enumerate(zip(case.rows, rows, strict=True)):
            self.statuses.update(row["status"] for row in found)
            assert [row["sample"] for row in found] == list(range(len(found)))
            assert {row["row"] for row in found} == {number}
            assert len({row["id"] for row in found}) == 1
            for row in found:
                check_outcome(row)
            if expected.sure == "bad":
                assert [row["status"] for row in found] == ["bad_row"], found
            if expected.sure == "known":
                assert {row["status"] for row in found} == {"ok"}, found
                assert len(found) <= (how.beam.num_return if how.beam else 1)
                assert found[0]["text"] == self.known_text(how.prompt, how.beam)
            if expected.columns is not None and how.output in ("out.parquet", "out"):
                check_columns(expected.columns, found[0], case.names)


def check_outcome(row: dict[str, Any]) -> None:
    assert isinstance(row["id"], str)
    if Status(row["status"]) is Status.OK:
        assert isinstance(row["text"], str)
        assert row["finish_reason"] in ("stop", "length")
        assert row["error"] is None
    else:
        assert row["text"] is None
        check_sentence(row["error"])


def check_sentence(message: str) -> None:
    assert message.strip(), "it says something"
    assert len(message) <= LONGEST_ERROR, message[:LONGEST_ERROR]
    assert "\n" not in message, message


RESERVED = (
    *("row", "id", "sample", "status", "text", "finish_reason", "error", "prompt_tokens", "cached_tokens", "extra"),
    *("completion_tokens", "cumulative_logprob", "score", "token_ids", "logprobs", "prompt_logprobs"),
)


def check_columns(columns: dict[str, Any], row: dict[str, Any], names: Set[str]) -> None:
    """Each value of the input is somewhere in the output."""
    extra = json.loads(row["extra"] or "{}")
    for name, value in columns.items():
        if value is None:
            continue
        kept = name
        while kept in RESERVED or (kept != name and kept in names):
            kept = f"input_{kept}"
        found = row.get(kept)
        assert found is not None or name in extra, (name, value)
        if type(value) in (str, int) and found != value and extra.get(name) != value:
            assert json.loads(found) == value, (name, value)


def read(output: Path, case: Case, how: How) -> list[list[dict[str, Any]]]:
    """The output's rows with all samples of each, in order; in pagedgen's columns also where it is in others."""
    manifest = read_manifest(output.with_name(f"{output.name}.run"))
    assert manifest is not None
    assert (manifest.status, manifest.rows) == ("finished", len(case.rows))
    declared = {name: plain(kind) for name, kind in manifest.schema.items()}
    if output.suffix == ".jsonl":
        written = [line for line in output.read_bytes().split(b"\n") if line]
        lines = [json.loads(line, parse_constant=pytest.fail) for line in written]
        if how.output == "openai.jsonl":
            return [list(from_openai(line)) for line in lines]
        assert all(list(line) == list(declared) for line in lines)
        return grouped(lines)
    paths = [output] if output.is_file() else sorted(output.iterdir())
    tables = [pq.read_table(path) for path in paths]
    for table in tables:
        table.validate(full=True)
        assert {field.name: plain(field.type) for field in table.schema} == declared
        assert table.schema.equals(tables[0].schema, check_metadata=True)
    table = pa.concat_tables(tables)
    order = table.select(["row", "sample"])
    if output.is_file():
        assert order.equals(order.sort_by([("row", "ascending"), ("sample", "ascending")]))
    columns = [column.to_pylist() for column in table.columns]
    rows = [dict(zip(declared, values, strict=True)) for values in zip(*columns, strict=True)]
    return grouped(sorted(rows, key=itemgetter("row", "sample")))


def plain(kind: object) -> str:
    """A type without what Parquet calls the items of lists and maps."""
    return re.sub(r"(?s) \('.*?'\)", "", re.sub(r"list<\w+: ", "list<", str(kind)))


def grouped(rows: Iterable[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    return [list(group) for _, group in groupby(rows, itemgetter("row"))]


def from_openai(line: dict[str, Any]) -> Iterator[dict[str, Any]]:
    assert list(line) == ["id", "custom_id", "response", "error"]
    common = {"row": int(line["id"].removeprefix("batch_req_")), "id": line["custom_id"]}
    if line["response"] is None:
        status, message = line["error"]["code"], line["error"]["message"]
        yield common | {"sample": 0, "status": status, "error": message, "text": None, "finish_reason": None}
        return
    for choice in line["response"]["body"]["choices"]:
        text, reason = choice.get("message", {}).get("content", choice.get("text")), choice["finish_reason"]
        yield common | {"sample": choice["index"], "status": "ok", "error": None, "text": text, "finish_reason": reason}


def contents(output: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in ([output] if output.is_file() else output.iterdir())}


@pytest.fixture(scope="module")
def fuzz(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fuzz]:
    model = str(tiny_checkpoint(tmp_path_factory.mktemp("model"), "llama"))
    engines = OneEngine(model)
    defaults = writers.ShardedWriter.__init__.__kwdefaults__
    assert defaults is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pagedgen.engine.Engine", engines)
        patch.setitem(defaults, "part_rows", 4)
        yield Fuzz(model, engines)


KINDS: dict[str, tuple[st.SearchStrategy[Case], int, float]] = {
    "json": (inputs.json_files(), 150, 0.3),
    "text": (inputs.text_files(), 40, 0.5),
    "delimited": (inputs.delimited_files(), 70, 0.2),
    "columnar": (columnar_files(), 80, 0.2),
    "folders": (folders(), 30, 0.2),
    "broken": (broken_files(), 40, 0.0),
}
"""Files of a kind, how many of them, and the share of their rows that must be ok, so that something is tested."""


def run(fuzz: Fuzz, cases: st.SearchStrategy[Case], examples: int, least_ok: float) -> None:
    fuzz.statuses.clear()

    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(cases, hows)
    def check(case: Case, how: How) -> None:
        fuzz.check(case, how)

    check()
    rows = fuzz.statuses.total()
    print(f"{rows} rows: {dict(fuzz.statuses)}")
    assert least_ok * rows <= fuzz.statuses["ok"] <= 0.99 * rows


@pytest.mark.parametrize("kind", KINDS)
def test_each_row_has_an_outcome(fuzz: Fuzz, kind: str) -> None:
    run(fuzz, *KINDS[kind])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_each_of_many_rows_has_an_outcome(fuzz: Fuzz, kind: str) -> None:
    cases, examples, least_ok = KINDS[kind]
    run(fuzz, cases, 25 * examples, least_ok)
