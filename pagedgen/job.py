"""A whole job: read the rows, generate, write the outcomes, report."""

import gc
import itertools
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, BinaryIO

from pagedgen import __version__
from pagedgen.beam_params import beam_flag, validate_beam
from pagedgen.config import JobConfig, OutputConfig
from pagedgen.data.files import write_json
from pagedgen.data.layout import OutputLayout, prepare_output
from pagedgen.data.manifest import Manifest, utc_now, write_manifest
from pagedgen.data.readers import InputSource, open_bundled_prompts, open_input
from pagedgen.data.schema import OutputColumns
from pagedgen.data.writer import ShardedWriter
from pagedgen.errors import PagedgenError, RowError, UsageError
from pagedgen.params import defaults_from_generation_config, resolve_params, unsupported_in_generation_config
from pagedgen.request import Completion, PromptRecord, Request, SamplingParams, Status
from pagedgen.stats.collector import RunStats
from pagedgen.stats.live import LiveDisplay, stderr_console
from pagedgen.stats.summary import print_summary
from pagedgen.stats.types import GENERATING, StepSample
from pagedgen.text.prompts import PromptRenderer, require_prompt_column

if TYPE_CHECKING:
    from pagedgen.engine import Engine

# Rows rendered and tokenized in one call.
RENDER_BATCH = 64
STATS_NAME = "stats.json"
STOP_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


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
    with _naming_paths():
        source = open_bundled_prompts() if config.input.is_empty else open_input(config.input, stdin=stdin)
    require_prompt_column(source.columns.names, config.prompt)
    n, max_seqs = defaults_from_generation_config({}, config.overrides).n, config.engine.max_seqs
    if n > max_seqs:
        raise UsageError(f"--n is {n}, but only {max_seqs} sequences run at a time; lower it or raise --max-seqs.")
    config = _with_checked_beam(config)
    output = OutputConfig(
        path=config.output_path or Path(f"{source.stem}.completions.parquet"),
        overwrite=config.overwrite,
        keep=config.keep,
        token_ids=config.token_ids,
        logprobs=_is_asked_for("logprobs", config, source),
        prompt_logprobs=_is_asked_for("prompt_logprobs", config, source),
    )
    columns = OutputColumns(source.columns, output)
    with _naming_paths():
        layout = prepare_output(output, source.files)
    with _terminated_like_interrupted():
        return _Job(config, source, columns, layout).run()


def _is_asked_for(option: str, config: JobConfig, source: InputSource) -> bool:
    """Whether any row may have what only a draw can give."""
    return config.beam is None and (config.overrides.get(option) is not None or option in source.columns.names)


def _with_checked_beam(config: JobConfig) -> JobConfig:
    if config.beam is None:
        return config
    try:
        return replace(config, beam=validate_beam(config.beam, config.engine.max_seqs, beam_flag))
    except ValueError as error:
        raise UsageError(f"{error}.") from None


@contextmanager
def _naming_paths() -> Iterator[None]:
    """Turn what the system says of a path, like a name that is too long, into a UsageError."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{error.filename} cannot be used: {error.strerror}; check the path") from error


@contextmanager
def _handling(handlers: Mapping[signal.Signals, Any]) -> Iterator[None]:
    """Handle signals in another way meanwhile. Only the main thread may; in others nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _terminated_like_interrupted() -> AbstractContextManager[None]:
    """A run that is told to end, as a batch system or a closed terminal does, ends as by Ctrl-C."""
    return _handling(dict.fromkeys(STOP_SIGNALS, _interrupt_once))


def _interrupt_once(number: int, frame: FrameType | None) -> None:
    """Signals that follow are ignored: seeing to the first one takes moments, and must not be cut short."""
    for stop_signal in STOP_SIGNALS:
        signal.signal(stop_signal, signal.SIG_IGN)
    raise KeyboardInterrupt


def _uninterrupted() -> AbstractContextManager[None]:
    """For the moments in which what is on the disk must come to agree with itself."""
    return _handling(dict.fromkeys(STOP_SIGNALS, signal.SIG_IGN))


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Keep the garbage collector from going through all that is imported and loaded, over and over while it grows, and
    again during the run: none of it is garbage."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


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
                with _collector_paused():
                    prepared = self._prepare()
                self._generate(*prepared)
        except KeyboardInterrupt:
            raise JobInterrupted("interrupted before the first row; nothing was written") from None
        if not self._config.quiet:
            with suppress(OSError):  # nobody reads it any more
                print_summary(stderr_console(), self._stats.snapshot(), self._layout.output)
        return JobResult(self._layout.output, self._all_ok)

    def _prepare(self) -> tuple["Engine", PromptRenderer, SamplingParams]:
        """Load the model and check what only it can tell."""
        self._display.phase("loading the model")
        from pagedgen.engine import Engine  # torch and transformers are imported only now
        from pagedgen.models.loader import check_model, resolve_model

        with _naming_paths():
            source = resolve_model(self._config.engine.model)
        check_model(source)
        engine = Engine(self._config.engine, on_phase=self._display.phase, on_step=self._on_step)
        self._stats.set_info(engine.info)
        self._stats.set_total(self._source.total)
        for warning in unsupported_in_generation_config(
            engine.generation_config, searching=self._config.beam is not None
        ):
            self._display.warn(
                f"the model's generation_config.json asks for {warning}, which this version does not apply"
            )
        if engine.kernels_note is not None:
            self._display.warn(engine.kernels_note)
        defaults = defaults_from_generation_config(engine.generation_config, self._config.overrides)
        last = engine.spec.vocab_size - 1
        biased = (token_id for token_id, _ in defaults.logit_bias)
        for flag, token_ids in (("--stop-token-ids", defaults.stop_token_ids), ("--logit-bias", biased)):
            if (token_id := max(token_ids, default=0)) > last:
                raise UsageError(f"{flag} {token_id} is no token of the model; its ids are 0 to {last}")
        if self._config.overrides.get("top_k") is not None and defaults.top_k > last + 1:
            raise UsageError(
                f"--top-k is {defaults.top_k}, but the model has {last + 1} tokens; leave it out to keep all of them"
            )
        return engine, PromptRenderer(engine.tokenizer, self._config.prompt), defaults

    def _generate(self, engine: "Engine", renderer: PromptRenderer, defaults: SamplingParams) -> None:
        self._token_strings = engine.tokenizer.token_string
        manifest = self._manifest(defaults)
        with _uninterrupted():
            self._layout.create()
            self._writer = ShardedWriter(self._layout, self._columns)
            write_manifest(self._layout.run_folder, manifest)
        try:
            self._display.phase(GENERATING)
            completions = engine.generate(self._requests(renderer, defaults))
            for row, of_row in itertools.groupby(completions, key=attrgetter("row")):  # they come together
                record = self._records.pop(row)
                for completion in of_row:
                    self._write(completion, record)
            self._display.phase("writing")
            self._writer.finish()
        except BaseException as error:
            with _uninterrupted():
                self._end_early(error, manifest)
            raise
        with _uninterrupted():
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
            rows, output = self._writer.rows_written, self._layout.output
            kept = f"after {rows} rows, which are in {self._layout.parts}" if rows else "before a row was finished"
            earlier = f"; {output} is still that of an earlier run" if output.is_file() else ""
            raise JobInterrupted(
                f"interrupted {kept}{earlier}; to start again, run the same command with --overwrite"
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
                yield Request(record.row, record.id, prompt_token_ids=prompt, params=params, beam=self._config.beam)
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
        engine, prompt, beam = self._config.engine, self._config.prompt, self._config.beam
        parts = (defaults, engine, prompt, *(() if beam is None else (beam,)))
        parameters = {name: getattr(part, name) for part in parts for name in part.__slots__}
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
        write_json(self._layout.run_folder / STATS_NAME, self._stats.summary())
