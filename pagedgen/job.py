"""A whole job: read the rows, generate, write the outcomes, report."""

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from pagedgen import __version__
from pagedgen.config import JobConfig, OutputConfig
from pagedgen.data.files import FileLayer, replace_file, write_error
from pagedgen.data.layout import OutputLayout, prepare_output
from pagedgen.data.manifest import Manifest, utc_now, write_manifest
from pagedgen.data.readers import InputSource, open_bundled_prompts, open_input
from pagedgen.data.schema import OutputColumns
from pagedgen.data.writer import ShardedWriter
from pagedgen.errors import PagedgenError, RowError
from pagedgen.params import defaults_from_generation_config, resolve_params, unsupported_in_generation_config
from pagedgen.request import Completion, PromptRecord, Request, SamplingParams, Status
from pagedgen.stats.collector import RunStats
from pagedgen.stats.live import LiveDisplay, stderr_console
from pagedgen.stats.summary import print_summary
from pagedgen.stats.types import GENERATING, StepSample
from pagedgen.text.prompts import PromptRenderer, require_prompt_column

# Rows rendered and tokenized in one call.
RENDER_BATCH = 64
STATS_NAME = "stats.json"


@dataclass(frozen=True, slots=True)
class JobResult:
    """output: what was written. all_ok: whether every row has the status `ok`."""

    output: Path
    all_ok: bool


class JobInterrupted(PagedgenError):
    """The user stopped the run."""

    exit_code = 130


def run_job(config: JobConfig, stdin: BinaryIO | None = None) -> JobResult:
    """Run a job to its end, with the live display on stderr.

    What can be known to be wrong before the weights are loaded is found before: the input, its columns, the output, the
    options and the kind of the model.

    stdin: what the input path `-` reads. Raises PagedgenError, UsageError for what the command got wrong, and
    JobInterrupted after Ctrl-C.
    """
    source = open_bundled_prompts() if config.input.is_empty else open_input(config.input, stdin=stdin)
    require_prompt_column(source.columns.names, config.prompt)
    defaults_from_generation_config({}, config.overrides)
    output = OutputConfig(
        path=config.output_path or Path(f"{source.stem}.completions.parquet"),
        overwrite=config.overwrite,
        keep=config.keep,
        token_ids=config.token_ids,
        logprobs=config.overrides.get("logprobs") is not None or "logprobs" in source.columns.names,
    )
    columns = OutputColumns(source.columns, output)
    layout = prepare_output(output, source.files)
    return _Job(config, source, columns, layout).run()


class _Job:
    """The state of a job under way. Rows whose completion is still to come wait in `_records`, as many as the engine
    has taken, so that memory does not grow with the input."""

    def __init__(self, config: JobConfig, source: InputSource, columns: OutputColumns, layout: OutputLayout) -> None:
        self._config, self._source, self._columns, self._layout = config, source, columns, layout
        self._stats = RunStats()
        self._display = LiveDisplay(self._stats, quiet=config.quiet)
        self._records: dict[int, PromptRecord] = {}
        self._all_ok = True

    def run(self) -> JobResult:
        try:
            with self._display:
                self._generate()
        except KeyboardInterrupt:
            raise JobInterrupted("interrupted while starting; nothing was written") from None
        if not self._config.quiet:
            print_summary(stderr_console(), self._stats.snapshot(), self._layout.output)
        return JobResult(self._layout.output, self._all_ok)

    def _generate(self) -> None:
        self._display.phase("loading the model")
        from pagedgen.engine import Engine  # torch and transformers are imported only now
        from pagedgen.models.loader import check_model, resolve_model

        check_model(resolve_model(self._config.engine.model))
        engine = Engine(self._config.engine, on_phase=self._display.phase, on_step=self._on_step)
        self._stats.set_info(engine.info)
        self._stats.set_total(self._source.total)
        for warning in unsupported_in_generation_config(engine.generation_config, self._config.overrides):
            self._display.warn(
                f"the model's generation_config.json asks for {warning}, which this version does not apply"
            )
        if engine.kernels_note is not None:
            self._display.warn(engine.kernels_note)
        renderer = PromptRenderer(engine.tokenizer, self._config.prompt)
        defaults = defaults_from_generation_config(engine.generation_config, self._config.overrides)
        self._layout.create()
        self._writer = ShardedWriter(self._layout, self._columns)
        manifest = self._manifest(defaults)
        write_manifest(self._layout.run_folder, manifest)
        self._token_strings = engine.tokenizer.token_string
        try:
            self._display.phase(GENERATING)
            for completion in engine.generate(self._requests(renderer, defaults)):
                self._write(completion, self._records.pop(completion.row))
            self._display.phase("writing")
            self._writer.finish()
        except BaseException as error:
            self._end_early(error, manifest)
            raise
        self._stats.set_total(self._source.rows_read)
        self._stats.set_phase(None)
        self._write_stats()
        write_manifest(self._layout.run_folder, manifest.ended("finished"))

    def _end_early(self, error: BaseException, manifest: Manifest) -> None:
        """Keep what is finished, and say how it ended."""
        interrupted = isinstance(error, KeyboardInterrupt)
        try:
            self._writer.flush()
            self._stats.set_phase(None)
            self._write_stats()
            write_manifest(self._layout.run_folder, manifest.ended("interrupted" if interrupted else "failed"))
        except PagedgenError:
            if not interrupted:
                raise error from None
        if interrupted:
            raise JobInterrupted(
                f"interrupted after {self._writer.rows_written} rows, which are in {self._layout.parts}; to start "
                f"again, run the same command with --overwrite"
            ) from None

    def _requests(self, renderer: PromptRenderer, defaults: SamplingParams) -> Iterator[Request]:
        """The rows as requests; those that cannot be one get their outcome here."""
        rows = iter(self._source)
        while batch := list(itertools.islice(rows, RENDER_BATCH)):
            for record, prompt in zip(batch, renderer.render_batch(batch), strict=True):
                try:
                    if isinstance(prompt, RowError):
                        raise prompt
                    params = resolve_params(record.columns, defaults, record.where)
                except RowError as error:
                    self._write(Completion(record.row, record.id, 0, error.status, error=error.message), record)
                    continue
                self._records[record.row] = record
                yield Request(record.row, record.id, prompt_token_ids=prompt, params=params)
            self._stats.set_input_progress(self._fraction_read(), self._source.rows_read)

    def _write(self, completion: Completion, record: PromptRecord) -> None:
        self._all_ok &= completion.status is Status.OK
        self._stats.add_completion(completion)
        self._writer.write(completion, record.columns, self._token_strings)

    def _on_step(self, sample: StepSample) -> None:
        self._stats.add_step(sample)
        self._display.refresh()

    def _fraction_read(self) -> float | None:
        total = self._source.total_bytes
        return self._source.bytes_read / total if total else None

    def _manifest(self, defaults: SamplingParams) -> Manifest:
        schema = {field.name: str(field.type) for field in self._columns.schema}
        engine, prompt = self._config.engine, self._config.prompt
        parameters = {name: getattr(part, name) for part in (defaults, engine, prompt) for name in part.__slots__}
        return Manifest(
            version=__version__,
            command=self._config.command,
            model=engine.model or "default",
            input=self._source.description,
            output=str(self._layout.output),
            started=utc_now(),
            schema=schema,
            parameters=parameters,
        )

    def _write_stats(self) -> None:
        path = self._layout.run_folder / STATS_NAME
        text = json.dumps(self._stats.summary(), indent=2, default=str)
        try:
            with replace_file(FileLayer(), path) as file:
                file.write(text.encode() + b"\n")
        except OSError as error:
            raise write_error(path, error, "make room, or choose another -o") from error
