"""The output's columns: one explicit schema, and how a completion and its input row become a row of it."""

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from pagedgen.config import OutputConfig
from pagedgen.data.columns import fits, is_json_field, json_field, to_json
from pagedgen.data.streams import encodable
from pagedgen.errors import UsageError, listed
from pagedgen.request import Completion, Status, TokenLogprob

_FIXED = pa.schema(
    [
        pa.field("row", pa.int64(), nullable=False),
        pa.field("id", pa.string(), nullable=False),
        pa.field("sample", pa.int32(), nullable=False),
        pa.field("status", pa.string(), nullable=False),
        pa.field("text", pa.string()),
        pa.field("finish_reason", pa.string()),
        pa.field("error", pa.string()),
        pa.field("prompt_tokens", pa.int32(), nullable=False),
        pa.field("cached_tokens", pa.int32(), nullable=False),
        pa.field("completion_tokens", pa.int32(), nullable=False),
        pa.field("cumulative_logprob", pa.float64()),
        pa.field("score", pa.float64()),
    ]
)
_TOKEN = [("token_id", pa.int32()), ("token", pa.string()), ("logprob", pa.float32())]
_TOKEN_IDS = pa.field("token_ids", pa.list_(pa.int32()))
_LOGPROBS = pa.field("logprobs", pa.list_(pa.struct([*_TOKEN, ("top", pa.list_(pa.struct(_TOKEN)))])))
_PROMPT_LOGPROBS = _LOGPROBS.with_name("prompt_logprobs")
_EXTRA = pa.field("extra", pa.string())

TokenStrings = Callable[[int], str]


class OutputRow(NamedTuple):
    """A completion with its input row's columns; logprobs already hold their tokens' text."""

    completion: Completion
    columns: Mapping[str, Any]
    logprobs: list[dict[str, Any]] | None
    prompt_logprobs: list[dict[str, Any]] | None


@dataclass(frozen=True)
class _KeptColumn:
    source: str
    field: pa.Field
    is_json: bool
    fits: Callable[[Any], bool]


class OutputColumns:
    """The output's schema, fixed for the whole run: pagedgen's columns, those kept from the input, and `extra`.

    input_columns: the columns known before the run, as `InputSource.columns`. Raises UsageError when `keep` names
    a column that is not among them.
    """

    def __init__(self, input_columns: pa.Schema, config: OutputConfig) -> None:
        own = [*_FIXED]
        if config.token_ids:
            own.append(_TOKEN_IDS)
        if config.logprobs:
            own.append(_LOGPROBS)
        if config.prompt_logprobs:
            own.append(_PROMPT_LOGPROBS)
        self._token_ids = config.token_ids
        self._logprobs = config.logprobs
        self._prompt_logprobs = config.prompt_logprobs
        self._keeps_late = config.keep == "all"
        # Names are reserved whether or not a column was asked for, so that a name means the same in every run.
        reserved = {*_FIXED.names, _TOKEN_IDS.name, _LOGPROBS.name, _PROMPT_LOGPROBS.name, _EXTRA.name}
        self._kept = _kept_columns(_select(input_columns, config.keep), reserved)
        self._known = frozenset(column.source for column in self._kept)
        self.schema = pa.schema([*own, *(column.field for column in self._kept), _EXTRA])

    def row(self, completion: Completion, columns: Mapping[str, Any], token_strings: TokenStrings | None) -> OutputRow:
        """Joins a completion with its row. token_strings: the text of a token id, needed for log-probabilities."""
        return OutputRow(
            completion,
            columns,
            _logprobs(completion.logprobs, token_strings) if self._logprobs else None,
            _logprobs(completion.prompt_logprobs, token_strings) if self._prompt_logprobs else None,
        )

    def table(self, rows: Sequence[OutputRow]) -> pa.Table:
        """The rows as a table of `schema`, in the order given."""
        done = [row.completion for row in rows]
        values: list[list[Any]] = [
            [c.row for c in done],
            [encodable(c.id) for c in done],
            [c.sample for c in done],
            [c.status.value for c in done],
            [c.text if c.text is None else encodable(c.text) for c in done],
            [c.finish_reason and c.finish_reason.value for c in done],
            [c.error if c.error is None else encodable(c.error) for c in done],
            [c.prompt_tokens for c in done],
            [c.cached_tokens for c in done],
            [c.completion_tokens for c in done],
            [c.cumulative_logprob for c in done],
            [c.score for c in done],
        ]
        if self._token_ids:
            values.append([c.token_ids if c.status is Status.OK else c.token_ids or None for c in done])
        if self._logprobs:
            values.append([row.logprobs for row in rows])
        if self._prompt_logprobs:
            values.append([row.prompt_logprobs for row in rows])
        extra: dict[int, dict[str, Any]] = {}
        inputs = [row.columns for row in rows]
        self._collect_late(inputs, extra)
        values += [_column_values(column, inputs, extra) for column in self._kept]
        values.append([to_json(extra[index]) if index in extra else None for index in range(len(rows))])
        arrays = [pa.array(column, field.type) for column, field in zip(values, self.schema, strict=True)]
        return pa.Table.from_arrays(arrays, schema=self.schema)

    def _collect_late(self, inputs: Sequence[Mapping[str, Any]], extra: dict[int, dict[str, Any]]) -> None:
        """Columns nobody knew of before the run; where only some were asked for, nobody asked for these."""
        if not self._keeps_late:
            return
        for index, columns in enumerate(inputs):
            if columns.keys() <= self._known:
                continue
            late = {name: value for name, value in columns.items() if name not in self._known and value is not None}
            if late:
                extra[index] = late


def _column_values(
    column: _KeptColumn, inputs: Sequence[Mapping[str, Any]], extra: dict[int, dict[str, Any]]
) -> list[Any]:
    name = column.source
    values = [columns.get(name) for columns in inputs]
    if column.is_json:
        return [value if value is None else to_json(value) for value in values]
    accepts = column.fits
    for index, value in enumerate(values):
        if value is not None and not accepts(value):
            extra.setdefault(index, {})[name] = value
            values[index] = None
    return values


def _select(columns: pa.Schema, keep: Literal["all", "none"] | tuple[str, ...]) -> list[pa.Field]:
    if keep == "all":
        return list(columns)
    if keep == "none":
        return []
    unknown = next((name for name in keep if name not in columns.names), None)
    if unknown is not None:
        known = listed(columns.names) or "none"
        raise UsageError(f"--keep names '{unknown}', which the input does not have; its columns are {known}")
    return [columns.field(name) for name in dict.fromkeys(keep)]


def _kept_columns(fields: Sequence[pa.Field], reserved: set[str]) -> tuple[_KeptColumn, ...]:
    """A name that is taken gets the prefix `input_` until it is free; columns whose name is free keep it."""
    taken = reserved | {field.name for field in fields}
    kept = []
    for field in fields:
        name = field.name
        while name in reserved or (name != field.name and name in taken):
            name = f"input_{name}"
        taken.add(name)
        is_json = is_json_field(field) or not _is_writable(field.type)
        output = json_field(name) if is_json else pa.field(name, field.type)
        kept.append(_KeptColumn(field.name, output, is_json, fits(field.type)))
    return tuple(kept)


def _is_writable(type_: pa.DataType) -> bool:
    """Whether Parquet and the merge can hold the type and give it back; Arrow only says so when one tries."""
    file = io.BytesIO()
    try:
        pq.write_table(pa.table([pa.array([None], type_)], names=["column"]).take([0]), file)
        file.seek(0)
        return bool(pq.read_table(file).schema.field("column").type == type_)
    except (pa.ArrowException, TypeError):
        return False


def _logprobs(
    entries: tuple[TokenLogprob, ...] | None, token_strings: TokenStrings | None
) -> list[dict[str, Any]] | None:
    if entries is None:
        return None
    if token_strings is None:
        raise ValueError("a completion with log-probabilities needs token_strings")
    return [_logprob(entry, token_strings) for entry in entries]


def _logprob(entry: TokenLogprob, token_strings: TokenStrings) -> dict[str, Any]:
    top = zip(entry.top_ids, entry.top_logprobs, strict=True)
    return {
        **_token(entry.token_id, entry.logprob, token_strings),
        "top": [_token(token_id, logprob, token_strings) for token_id, logprob in top],
    }


def _token(token_id: int, logprob: float, token_strings: TokenStrings) -> dict[str, Any]:
    return {"token_id": token_id, "token": encodable(token_strings(token_id)), "logprob": logprob}
