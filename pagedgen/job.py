"""A whole job: read the rows, skip what is done, generate, write the outcomes, report."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from pagedgen import __version__
from pagedgen.config import JobConfig
from pagedgen.data.files import FileLayer
from pagedgen.data.fingerprint import InputFingerprint, fingerprint_model
from pagedgen.data.finished import Finished
from pagedgen.data.layout import OutputLayout, prepare_output
from pagedgen.data.manifest import Manifest, pack_schema, utc_now
from pagedgen.data.merge import ToLines, json_lines
from pagedgen.data.openai_batch import Endpoint, is_batch, model_of, request_columns
from pagedgen.data.openai_format import openai_lines
from pagedgen.data.readers import InputSource
from pagedgen.data.schema import OutputColumns, TokenStrings
from pagedgen.data.writer import ShardedWriter
from pagedgen.errors import PagedgenError, RowError, UsageError, before_any_work
from pagedgen.interrupts import EXIT_CODE, Interrupts
from pagedgen.job_setup import (
    check_against_vocabulary,
    check_options,
    naming_paths,
    open_rows,
    output_columns,
    output_config,
)
from pagedgen.params import defaults_from_generation_config, resolve_params, unsupported_in_generation_config
from pagedgen.planning.store import load_plan, plan_key
from pagedgen.process import collector_paused, collector_restored
from pagedgen.request import Completion, PromptRecord, Request, SamplingParams, Status
from pagedgen.resume import check_same_run, command_to_go_on, run_identity
from pagedgen.run_log import RunLog
from pagedgen.run_record import RunRecord, require_earlier_run
from pagedgen.stats.collector import RunStats
from pagedgen.stats.live import LiveDisplay, stderr_console
from pagedgen.stats.summary import print_summary
from pagedgen.stats.text import plural
from pagedgen.stats.types import GENERATING, StepSample
from pagedgen.text.prompts import PromptRenderer

if TYPE_CHECKING:
    from pagedgen.engine import Engine

# Rows rendered and tokenized in one call.
RENDER_BATCH = 64


@dataclass(frozen=True, slots=True)
class JobResult:
    """output: what was written. all_ok: whether every row has the status `ok`."""

    output: Path
    all_ok: bool


class JobInterrupted(PagedgenError):
    """The user stopped the run."""

    exit_code = EXIT_CODE


def run_job(config: JobConfig, stdin: BinaryIO | None = None, files: FileLayer | None = None) -> JobResult:
    """Run a job to its end, with the live display on stderr; where an earlier process was stopped, go on.

    What can be known to be wrong before the weights are loaded is found before: the input, its columns, the output, the
    options and the kind of the model.

    stdin: what the input path `-` reads. files: what everything is written through. Raises PagedgenError, UsageError
    for what the command got wrong, and JobInterrupted after Ctrl-C.
    """
    config = check_options(config)
    source = open_rows(config, stdin)
    output = output_config(config, source)
    with naming_paths():
        layout = prepare_output(output, source.files)
    if config.retry:
        require_earlier_run(layout)
    columns = output_columns(config, source.columns, output, layout.manifest)
    with Interrupts(f"ended at once; to go on: {command_to_go_on(config)}") as interrupts:
        return _Job(config, source, columns, layout, interrupts, files or FileLayer()).run()


class _Job:
    """The state of a job under way. Rows whose completion is still to come wait in `_records`, as many as the engine
    has taken, so that memory does not grow with the input."""

    def __init__(
        self,
        config: JobConfig,
        source: InputSource,
        columns: OutputColumns,
        layout: OutputLayout,
        interrupts: Interrupts,
        files: FileLayer,
    ) -> None:
        self._config, self._source, self._columns, self._layout = config, source, columns, layout
        self._interrupts, self._files = interrupts, files
        self._stats = RunStats()
        self._display = LiveDisplay(self._stats, quiet=config.quiet)
        self._log = RunLog(self._stats, layout.run_folder, utc_now(), self._display.warn)
        self._record = RunRecord(layout, files)
        self._writer: ShardedWriter
        self._records: dict[int, PromptRecord] = {}
        self._token_strings: TokenStrings | None = None
        self._is_batch, self._warned_of_model = is_batch(source.columns.names), False
        earlier = layout.manifest
        self._began = datetime.fromisoformat(earlier.started) if earlier is not None else datetime.now(UTC)

    def run(self) -> JobResult:
        try:
            with collector_restored(), self._display, self._record:
                is_complete = self._run()
        except KeyboardInterrupt:
            again = command_to_go_on(self._config)
            raise JobInterrupted(f"interrupted before it had begun, and nothing is lost; to go on: {again}") from None
        snapshot, output = self._stats.snapshot(), self._layout.output
        if not self._config.quiet:
            with suppress(OSError):  # nobody reads it any more
                console = stderr_console()
                if is_complete:
                    console.out(f"{output} is complete already; nothing was run (--overwrite begins again)")
                else:
                    print_summary(console, snapshot, output)
        return JobResult(output, not snapshot.failed)

    def _run(self) -> bool:
        """Do what is left to do; whether that was nothing."""
        earlier = self._layout.manifest
        self._display.phase("looking at the input")
        # Before a stream's first rows are gone.
        fingerprint, planned = self._source.fingerprint(), load_plan(plan_key(self._config, self._source))
        rows: Iterator[PromptRecord] = iter(self._source)
        finished = Finished()
        if earlier is not None:
            if self._is_complete(earlier, fingerprint):
                return True
            finished = self._look_back(earlier)
            done = finished.rows
            rows = (record for record in rows if record.row not in done)
        first = next(rows, None)
        if first is None and earlier is None:
            raise UsageError(f"{self._source.description} has no rows; give an input with at least one row")
        if first is None and earlier is not None and earlier.status == "finished" and not finished.set_aside:
            return True
        if first is None:
            generate = None
        else:
            with collector_paused():
                engine, renderer, defaults = self._prepare()
            generate = partial(self._generate, engine, self._requests(chain([first], rows), renderer, defaults))
        with self._interrupts.deferred():
            if earlier is not None:
                self._record.go_on(input_fingerprint=fingerprint.as_json())
            else:
                self._record.begin(self._manifest(engine, defaults, fingerprint.as_json()), planned)
        self._complete(finished.next_part, generate)
        return False

    def _is_complete(self, earlier: Manifest, fingerprint: InputFingerprint) -> bool:
        """Whether the earlier run has finished, and nothing is asked for or has come to the input since."""
        self._display.phase("checking what has changed")
        unchanged = check_same_run(self._layout, earlier, self._identity(), self._source, fingerprint)
        # Of a folder, each part is looked at.
        is_whole = self._layout.kind != "folder" and not self._layout.was_touched()
        if earlier.status != "finished" or not unchanged or self._config.retry or not is_whole:
            return False
        statuses = {Status(name): count for name, count in (earlier.statuses or {}).items()}
        self._stats.add_earlier(earlier.rows or 0, statuses)
        return True

    def _look_back(self, earlier: Manifest) -> Finished:
        """What the earlier run has left; the run is numbered on from there."""
        self._display.phase("reading what is finished")
        finished = self._record.find_finished(self._columns, self._config.retry)
        for path in finished.set_aside:
            self._display.warn(f"a finished file was damaged or changed; it is now {path}, and made anew")
        self._stats.add_earlier(len(finished.rows), finished.statuses)
        return finished

    def _prepare(self) -> tuple["Engine", PromptRenderer, SamplingParams]:
        """Load the model and check what only it can tell."""
        self._display.phase("loading the model")
        from pagedgen.engine import Engine  # torch and transformers are imported only now
        from pagedgen.models.facts import quick_facts
        from pagedgen.models.loader import check_model, resolve_model
        from pagedgen.planning.memory import check_early

        with naming_paths(), before_any_work():
            source = resolve_model(self._config.engine.model)
            check_model(source, self._config.engine.trust_remote_code)
            if (facts := quick_facts(self._config.engine)) is not None:
                check_early(self._config, facts)
        warn = self._display.warn
        engine = Engine(self._config.engine, on_phase=self._display.phase, on_step=self._on_step, on_note=warn)
        self._check_dtype(engine.info.dtype)
        self._stats.set_total(self._source.total)
        searching = self._config.beam is not None
        for unsupported in unsupported_in_generation_config(engine.generation_config, searching=searching):
            warn(f"the model's generation_config.json asks for {unsupported}, which this version does not apply")
        if engine.kernels_note is not None:
            warn(engine.kernels_note)
        defaults = defaults_from_generation_config(engine.generation_config, self._config.overrides)
        check_against_vocabulary(defaults, self._config.overrides, engine.spec.vocab_size)
        self._log.begin(
            engine.info,
            goes_on=self._layout.manifest is not None,
            may_stop=not defaults.ignore_eos,
            device_bytes=engine.device_bytes,
        )
        renderer = PromptRenderer(
            engine.tokenizer,
            self._config.prompt,
            on_note=warn,
            now=self._began.astimezone(),
            max_tokens=engine.max_model_len,
            on_too_long=self._config.engine.on_too_long,
        )
        return engine, renderer, defaults

    def _check_dtype(self, dtype: str) -> None:
        earlier = self._layout.manifest
        if earlier is not None and earlier.dtype not in (None, dtype):
            raise UsageError(
                f"the run in {self._layout.run_folder} was begun in {earlier.dtype}, but here the model runs in "
                f"{dtype}; pass --dtype {earlier.dtype}, or use --overwrite to start again"
            )

    def _complete(self, first_part: int, generate: Callable[[], None] | None) -> None:
        """Generate what is missing and make the output of it."""
        try:
            self._writer = self._make_writer(first_part)
            if generate is not None:
                generate()
            self._display.phase("writing")
            self._record.merging()
            self._writer.finish()
        except BaseException as error:
            with self._interrupts.deferred():
                self._end_early(error)
            raise
        with suppress(KeyboardInterrupt), self._interrupts.deferred():  # all is written
            self._stats.set_total(self._source.rows_read)
            self._stats.set_phase(None)
            self._log.end()
            self._record.finish(self._stats.summary(), self._source.rows_read, self._stats.snapshot().statuses)
            self._writer.discard_parts()

    def _make_writer(self, first_part: int) -> ShardedWriter:
        to_lines: ToLines = json_lines
        if self._config.format == "openai":
            endpoint: Endpoint = "completion" if self._config.prompt.raw else "chat"
            model = self._record.manifest.model
            to_lines = partial(openai_lines, default=endpoint, model=model, created=int(self._began.timestamp()))
        return ShardedWriter(
            self._layout,
            self._columns,
            first_part=first_part,
            part_seconds=self._config.flush_every,
            to_lines=to_lines,
            before_part=self._record.check,
            files=self._files,
        )

    def _generate(self, engine: "Engine", requests: Iterator[Request]) -> None:
        tokenizer = engine.tokenizer
        self._token_strings = tokenizer.token_text if self._config.format == "openai" else tokenizer.token_string
        self._display.phase(GENERATING)
        for completions in engine.complete(requests):
            record = self._records.pop(completions[0].row)
            if any(completion.error for completion in completions):  # the engine does not know where the row stands
                completions = [c._replace(error=f"{record.where}: {c.error}") if c.error else c for c in completions]
            self._write(completions, record)

    def _end_early(self, error: BaseException) -> None:
        """Keep what is finished, and say how it ended."""
        interrupted = isinstance(error, KeyboardInterrupt)
        try:
            self._writer.flush()
            self._stats.set_phase(None)
            self._log.end()
            self._record.end_early("interrupted" if interrupted else "failed", self._stats.summary())
        except PagedgenError:
            if not interrupted:
                raise error from None
        if interrupted:
            rows = self._stats.rows_earlier + self._writer.rows_written
            kept = f"after {rows:,} {plural(rows, 'row')}, which are safe" if rows else "before a row was finished"
            raise JobInterrupted(f"interrupted {kept}; to go on: {command_to_go_on(self._config)}") from None

    def _requests(
        self, rows: Iterator[PromptRecord], renderer: PromptRenderer, defaults: SamplingParams
    ) -> Iterator[Request]:
        """The rows as requests; those that cannot be one get their outcome here."""
        for batch, meant, prompts in self._log.timed(self._rendered(rows, renderer), "input"):
            for record, row, prompt in zip(batch, meant, prompts, strict=True):
                try:
                    if isinstance(prompt, RowError):
                        raise prompt
                    params = resolve_params(row.columns, defaults, row.where)
                except RowError as error:
                    self._write([Completion(record.row, record.id, 0, error.status, error=error.message)], record)
                    continue
                self._records[record.row] = record
                yield Request(record.row, record.id, prompt_token_ids=prompt, params=params, beam=self._config.beam)
            self._stats.set_input_progress(self._fraction_read(), self._source.rows_read)
            self._writer.flush_if_due()  # for rows that never come to a step

    def _rendered(
        self, rows: Iterator[PromptRecord], renderer: PromptRenderer
    ) -> Iterator[tuple[list[PromptRecord], list[PromptRecord], list[Any]]]:
        """The rows, what each means, and its prompt's token ids or why there are none, a batch at a time."""
        while batch := list(islice(rows, RENDER_BATCH)):
            meant = list(map(self._from_batch_file, batch)) if self._is_batch else batch
            yield batch, meant, list(renderer.render_batch(meant))

    def _from_batch_file(self, record: PromptRecord) -> PromptRecord:
        """A line of an OpenAI batch file, in our own columns."""
        if record.error is not None:
            return record
        try:
            request = request_columns(record.columns, record.where)
        except RowError as error:
            return record._replace(error=error.message)
        named = model_of(record.columns)
        if named not in (None, self._config.engine.model) and not self._warned_of_model:
            self._warned_of_model = True
            self._display.warn(
                f"{record.where} asks for the model {named}; all rows are completed by the one of --model"
            )
        return record._replace(columns=request.columns, raw=request.endpoint == "completion")

    def _write(self, completions: Sequence[Completion], record: PromptRecord) -> None:
        self._log.add_row(completions)
        with self._log.timing("write"):
            self._writer.write(completions, record.columns, self._token_strings)
        limit = self._config.max_errors
        if limit is None:
            return
        failed, done = self._stats.failed_of
        if limit.is_exceeded(failed, done):
            raise PagedgenError(
                f"{failed:,} of {done:,} rows are not ok, more than --max-errors {limit.text} (the last: "
                f"{completions[0].error}); what is finished is kept, and the same command with a higher limit goes on"
            )

    def _on_step(self, sample: StepSample) -> None:
        self._log.add_step(sample)
        self._display.refresh()
        with self._log.timing("write"):
            self._writer.flush_if_due()
        self._log.save_if_due()

    def _fraction_read(self) -> float | None:
        total = self._source.total_bytes
        return self._source.bytes_read / total if total else None

    def _identity(self) -> dict[str, Any]:
        from pagedgen.models.source import fetch, resolve_model

        with naming_paths(), before_any_work():
            source = resolve_model(self._config.engine.model)
            path = source.path if source.kind == "gguf" and source.path is not None else fetch(source)
        return run_identity(self._config, fingerprint_model(path))

    def _manifest(self, engine: "Engine", defaults: SamplingParams, fingerprint: Mapping[str, Any]) -> Manifest:
        engine_config, prompt, beam = self._config.engine, self._config.prompt, self._config.beam
        parts = (defaults, engine_config, prompt, *(() if beam is None else (beam,)))
        return Manifest(
            version=__version__,
            command=self._config.command,
            model=engine.info.model,
            input=self._source.description,
            output=str(self._layout.output),
            started=self._began.isoformat(timespec="seconds"),
            schema={field.name: str(field.type) for field in self._columns.schema},
            parameters={name: getattr(part, name) for part in parts for name in part.__slots__},
            identity=self._identity(),
            input_schema=pack_schema(self._source.columns),
            input_fingerprint=fingerprint,
            dtype=engine.info.dtype,
            process=os.getpid(),
            replaces=self._config.overwrite,
        )
