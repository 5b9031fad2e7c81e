"""What the output of a run takes on the disk: some of its rows are written to memory, as the run would write them."""

import io
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq

from pagedgen.config import JobConfig, OutputConfig
from pagedgen.data.merge import COMPRESSION, ToLines, json_lines
from pagedgen.data.openai_format import openai_lines
from pagedgen.data.readers import InputSource
from pagedgen.data.schema import OutputColumns
from pagedgen.data.writer import PART_ROWS
from pagedgen.job_setup import output_columns, output_config
from pagedgen.planning.survey import Survey
from pagedgen.request import Completion, FinishReason, PromptRecord, Status
from pagedgen.scheduling.sequence import mix64

# Completions that are written.
_WRITTEN = 2048
# Without a run to tell, a token of text has at most about so many bytes.
_BYTES_PER_TOKEN = 5.0
# What JSON takes more for a text, whose line breaks and quotes it escapes.
_ESCAPED = 1.1
# Bytes of a token's id, and of an entry of log-probabilities with its token's text.
_ID_BYTES = {"parquet": 4, "json": 8}
_LOGPROB_BYTES = {"parquet": 20, "json": 110}


@dataclass(frozen=True, slots=True)
class Amounts:
    """Of a whole run. completions; tokens: of their texts; prompt_tokens; seconds: that it generates.
    bytes_per_token: of text, None when no run has shown it. logprobs, prompt_logprobs: entries for each token."""

    completions: float
    tokens: float
    prompt_tokens: float
    seconds: float
    bytes_per_token: float | None
    logprobs: int
    prompt_logprobs: int


@dataclass(frozen=True, slots=True)
class DiskUse:
    """At most, with texts uncompressed. output_bytes: of the output. with_parts_bytes: of it and of the parts that it
    is made of. free_bytes: where the output goes."""

    kind: Literal["parquet", "jsonl", "folder"]
    output_bytes: int
    with_parts_bytes: int
    free_bytes: int


class OutputSize:
    """Checks what is to be written, and tells how much that is. Raises UsageError for what the run would refuse."""

    def __init__(self, config: JobConfig, source: InputSource) -> None:
        self._config = config
        self._output: OutputConfig = output_config(config, source)
        output_columns(config, source.columns, self._output, None)  # refuses what the run would refuse
        # Token ids and log-probabilities are reckoned, and not written.
        self._columns = OutputColumns(source.columns, replace(self._output, token_ids=False))

    def of(self, records: Sequence[PromptRecord], survey: Survey, amounts: Amounts) -> DiskUse:
        """records: rows that the survey has looked at."""
        table = self._table(records, max(1, round(survey.completions / max(1, survey.read))))
        each = amounts.completions / max(1, table.num_rows)
        rows, one = _parquet_bytes(table), _parquet_bytes(table.slice(0, 1))
        merged = rows * each + self._of_tokens(amounts, "parquet")
        count = amounts.seconds / self._config.flush_every + amounts.completions / PART_ROWS + 1
        parts = merged + one * min(count, amounts.completions)
        kind, path = self._kind(), Path(os.path.expanduser(self._output.path))
        if kind == "folder":
            output = with_parts = parts
        else:
            as_lines = sum(len(line.encode()) for line in self._lines(table)) * each if kind == "jsonl" else 0.0
            output = as_lines + self._of_tokens(amounts, "json") if kind == "jsonl" else merged
            with_parts = output + parts
        folder = next(parent for parent in path.absolute().parents if parent.is_dir())
        return DiskUse(kind, round(output), round(with_parts), shutil.disk_usage(folder).free)

    def _kind(self) -> Literal["parquet", "jsonl", "folder"]:
        suffix = self._output.path.suffix.lower()
        return "parquet" if suffix == ".parquet" else "jsonl" if suffix == ".jsonl" else "folder"

    def _table(self, records: Sequence[PromptRecord], of_one: int) -> pa.Table:
        """Rows of the output without text, spread over the records, with numbers that compress as little as real
        ones."""
        count = min(len(records), max(1, _WRITTEN // of_one))
        done = []
        for i in range(count):
            record = records[i * len(records) // count]
            for sample in range(of_one):
                key = mix64((record.row << 8) + sample + 1)
                completion = Completion(
                    record.row,
                    record.id,
                    sample,
                    Status.OK,
                    finish_reason=FinishReason.LENGTH,
                    prompt_tokens=key % 997,
                    cached_tokens=key % 13 * 16,
                    token_ids=(0,) * (key % 499),
                    cumulative_logprob=-(key % 1_000_003) / 977 if self._has_scores else None,
                    score=-(key % 999_983) / 1013 if self._config.beam is not None else None,
                )
                done.append(self._columns.row(completion, record.columns, None))
        return self._columns.table(done)

    @property
    def _has_scores(self) -> bool:
        return self._config.beam is not None or self._config.overrides.get("logprobs") is not None

    def _lines(self, table: pa.Table) -> Iterator[str]:
        to_lines: ToLines = json_lines
        if self._config.format == "openai":
            now = int(datetime.now(UTC).timestamp())
            to_lines = partial(openai_lines, default="chat", model=self._config.engine.model or "", created=now)
        return to_lines([table])

    def _of_tokens(self, amounts: Amounts, kind: Literal["parquet", "json"]) -> float:
        """Texts, token ids and log-probabilities."""
        text = amounts.tokens * (amounts.bytes_per_token or _BYTES_PER_TOKEN) * (_ESCAPED if kind == "json" else 1.0)
        ids = amounts.tokens * _ID_BYTES[kind] if self._output.token_ids else 0.0
        entries = amounts.tokens * amounts.logprobs + amounts.prompt_tokens * amounts.prompt_logprobs
        return text + ids + entries * _LOGPROB_BYTES[kind]


def _parquet_bytes(table: pa.Table) -> int:
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression=COMPRESSION, write_page_checksum=True)
    return buffer.tell()
