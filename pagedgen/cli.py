"""The command line: parses, calls, and maps errors to exit codes. No logic, and no heavy import."""

import os
import sys
from collections.abc import Callable, Collection
from contextlib import suppress
from copy import copy
from dataclasses import fields
from inspect import Parameter, Signature, get_annotations
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from pagedgen import __version__, options
from pagedgen.beam_params import beam_flag
from pagedgen.config import EngineConfig, InputConfig, JobConfig, Keep, PromptConfig
from pagedgen.errors import PagedgenError, UsageError, listed
from pagedgen.params import OPTIONS
from pagedgen.process import prepare_process
from pagedgen.request import BeamParams
from pagedgen.standard_streams import printing, stdin_is_piped, tell

DEFAULTS = EngineConfig()
SEARCH = BeamParams()
SAMPLING = tuple(option.name for option in OPTIONS)


class _Command(TyperCommand):
    def format_help(self, ctx: Any, formatter: Any) -> None:
        _print_or_exit(lambda: super(_Command, self).format_help(ctx, formatter))


class _Group(TyperGroup):
    def format_help(self, ctx: Any, formatter: Any) -> None:
        _print_or_exit(lambda: super(_Group, self).format_help(ctx, formatter))


app = typer.Typer(
    cls=_Group,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        _print_or_exit(lambda: typer.echo(f"pagedgen {__version__}"))
        raise typer.Exit


@app.callback()
def pagedgen(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Offline batch generation: a file of prompts in, a Parquet file of completions out."""


def _parse_keep(text: str) -> Keep:
    if text == "all":
        return "all"
    if text == "none":
        return "none"
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _read_template(template: str | None) -> str | None:
    """The template itself, or what the file of that name holds."""
    if template is None or "\n" in template or "{" in template:
        return template
    path = Path(template)
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise UsageError(
            f"--template {template} is no template text (it has no {{{{ }}}}) and cannot be read as a file: {error}"
        ) from None


class Rows:
    """Which rows to read, and how each becomes a prompt."""

    input: options.Input = None
    dataset: options.Dataset = None
    config: options.DatasetConfig = None
    split: options.Split = None
    prompt_column: options.PromptColumn = None
    template: options.Template = None
    system: options.System = None
    raw: options.Raw = False
    allow_special_tokens: options.AllowSpecialTokens = False
    on_too_long: options.OnTooLongOption = "error"


class Limits:
    """Where a completion ends, and which tokens it may have."""

    max_tokens: options.MaxTokens = None
    min_tokens: options.MinTokens = None
    stop: options.Stop = None
    stop_token_ids: options.StopTokenIds = None
    ignore_eos: options.IgnoreEos = None
    repetition_penalty: options.RepetitionPenalty = None
    presence_penalty: options.PresencePenalty = None
    frequency_penalty: options.FrequencyPenalty = None
    logit_bias: options.LogitBias = None
    bad_words: options.BadWords = None


class Sampling:
    """How tokens are drawn."""

    n: options.N = None
    temperature: options.Temperature = None
    top_p: options.TopP = None
    top_k: options.TopK = None
    min_p: options.MinP = None
    seed: options.Seed = None
    logprobs: options.Logprobs = None
    prompt_logprobs: options.PromptLogprobs = None


class Beams:
    """How to search with beams."""

    width: options.Width = SEARCH.width
    num_return: options.NumReturn = SEARCH.num_return
    length_penalty: options.LengthPenalty = SEARCH.length_penalty
    early_stopping: options.EarlyStoppingOption = SEARCH.early_stopping
    diversity_groups: options.DiversityGroups = SEARCH.diversity_groups
    diversity_penalty: options.DiversityPenalty = SEARCH.diversity_penalty


class Results:
    """What to write and where, and what to show."""

    output: options.Output = None
    overwrite: options.Overwrite = False
    keep: options.KeepOption = "all"
    token_ids: options.TokenIds = False
    format: options.FormatOption = "rows"
    retry: options.Retry = None
    flush_every: options.FlushEvery = "30s"  # type: ignore[assignment]
    max_errors: options.MaxErrors = None
    strict: options.Strict = False
    quiet: options.Quiet = False


class Machine:
    """What runs on what."""

    model: options.Model = None
    device: options.DeviceOption = "auto"
    dtype: options.DtypeOption = "auto"
    quantize: options.QuantizeOption = None
    kv_memory: options.KvMemory = None
    block_size: options.BlockSize = DEFAULTS.block_size
    max_batch_tokens: options.MaxBatchTokens = DEFAULTS.max_batch_tokens
    max_seqs: options.MaxSeqs = DEFAULTS.max_seqs
    max_model_len: options.MaxModelLen = None
    no_prefix_cache: options.NoPrefixCache = False
    no_overlap: options.NoOverlap = False
    no_cuda_graphs: options.NoCudaGraphs = False
    trust_remote_code: options.TrustRemoteCode = False


class PlannedBeams:
    """The options of `Beams`, any of which asks for the plan of a search."""

    width: options.PlanWidth = None
    num_return: options.NumReturn = None  # type: ignore[assignment]
    length_penalty: options.LengthPenalty = None  # type: ignore[assignment]
    early_stopping: options.EarlyStoppingOption = None  # type: ignore[assignment]
    diversity_groups: options.DiversityGroups = None  # type: ignore[assignment]
    diversity_penalty: options.DiversityPenalty = None  # type: ignore[assignment]


class Planning:
    """What a plan is told besides."""

    output_tokens: options.OutputTokens = None
    json: options.PlanJson = False


# Options of runs that change nothing of a plan: it takes them, so that the command of a run can be planned as it is.
WITHOUT_EFFECT = ("overwrite", "retry", "max_errors", "strict", "quiet")


Command = Callable[..., None]


def _taking(*groups: type, hidden: Collection[str] = ()) -> Callable[[Command], Command]:
    """Give a command the options of these groups; it receives them by name. hidden: those that --help leaves out."""

    def shown(name: str, annotation: Any) -> Any:
        if name not in hidden:
            return annotation
        option = copy(annotation.__metadata__[0])
        option.hidden = True
        return Annotated[annotation.__origin__, option]

    parameters = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=getattr(group, name), annotation=shown(name, annotation))
        for group in groups
        for name, annotation in get_annotations(group).items()
    ]

    def give(command: Command) -> Command:
        command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        return command

    return give


@app.command(cls=_Command)
@_taking(Rows, Limits, Sampling, Results, Machine)
def run(**given: Any) -> None:
    """Generate a completion for every row of INPUT."""
    _exit_with(lambda: _run(given))


@app.command(cls=_Command)
@_taking(Rows, Beams, Limits, Results, Machine)
def beam(**given: Any) -> None:
    """Search for the likeliest completions of every row of INPUT, with beams."""
    search = BeamParams(**{field.name: given[field.name] for field in fields(BeamParams)})
    _exit_with(lambda: _run(given, search))


@app.command(cls=_Command)
@_taking(Rows, Planning, Limits, Sampling, PlannedBeams, Results, Machine, hidden=WITHOUT_EFFECT)
def plan(**given: Any) -> None:
    """Say what a run over INPUT would need and take, before any weights are loaded.

    All options of `pagedgen run` and `pagedgen beam` can be given; those that change nothing are not listed.
    """
    _exit_with(lambda: _plan(given))


def _plan(given: dict[str, Any]) -> int:
    """Plan the job that the options ask for; the exit code."""
    config = _job_config(given, _planned_beams(given))
    prepare_process()
    from pagedgen.planning.command import run_plan

    run_plan(config, getattr(sys.stdin, "buffer", None), given["output_tokens"], given["json"])
    return 0


def _planned_beams(given: dict[str, Any]) -> BeamParams | None:
    """The search that a plan is asked for. Raises UsageError for options that `pagedgen beam` does not have."""
    search = {field.name: given[field.name] for field in fields(BeamParams) if given[field.name] is not None}
    if not search:
        return None
    drawn = [name for name in get_annotations(Sampling) if given[name] is not None]
    if drawn:
        flags = listed([option.flag for option in OPTIONS if option.name in drawn])
        raise UsageError(
            f"a beam search has no {flags}; leave {'it' if len(drawn) == 1 else 'them'} out, or leave "
            f"{beam_flag(next(iter(search)))} out to plan a run that samples"
        )
    return BeamParams(**search)


def _input_config(given: dict[str, Any]) -> InputConfig:
    wanted = InputConfig(given["input"], given["dataset"], given["config"], given["split"])
    if wanted.is_empty:
        if stdin_is_piped():
            return InputConfig("-")
        if sys.stdin is None or not sys.stdin.isatty():
            raise UsageError("there is no input; name a file, a folder or a dataset, or pipe the prompts in")
        tell("no input given: running the bundled sample prompts")
    return wanted


def _prompt_config(given: dict[str, Any]) -> PromptConfig:
    return PromptConfig(
        prompt_column=given["prompt_column"],
        template=_read_template(given["template"]),
        raw=given["raw"],
        system=given["system"],
        allow_special_tokens=given["allow_special_tokens"],
    )


def _overrides(given: dict[str, Any]) -> dict[str, Any]:
    return {name: given[name] for name in SAMPLING if given.get(name) not in (None, [])}


@app.command(cls=_Command)
def stats(
    run: options.Runs = None,
    as_json: options.AsJson = False,
    html: options.Html = None,
    watch: options.Watch = False,
) -> None:
    """Show where the memory and the time of a run went; of several runs, side by side."""

    def show() -> int:
        options.refuse_empty({"html": html})
        from pagedgen.reports.show import show_stats

        show_stats(run or [], as_json=as_json, html=None if html is None else Path(html), watch=watch)
        return 0

    _exit_with(show)


def _run(given: dict[str, Any], beam: BeamParams | None = None) -> int:
    """Run the job that the options ask for; the exit code."""
    config = _job_config(given, beam)
    prepare_process()
    from pagedgen.job import run_job  # pyarrow, torch and transformers are imported only when there is a job

    result = run_job(config, getattr(sys.stdin, "buffer", None))
    return 3 if given["strict"] and not result.all_ok else 0


def _job_config(given: dict[str, Any], beam: BeamParams | None) -> JobConfig:
    options.refuse_empty(given)
    return JobConfig(
        input=_input_config(given),
        output_path=None if given["output"] is None else Path(given["output"]),
        overwrite=given["overwrite"],
        keep=_parse_keep(given["keep"]),
        token_ids=given["token_ids"],
        format=given["format"],
        retry=given["retry"] or (),
        max_errors=given["max_errors"],
        flush_every=given["flush_every"],
        prompt=_prompt_config(given),
        engine=_engine_config(given),
        overrides=_overrides(given),
        beam=beam,
        quiet=given["quiet"],
        command=tuple(sys.argv),
    )


def _engine_config(given: dict[str, Any]) -> EngineConfig:
    names = {field.name for field in fields(EngineConfig)}
    settings = {name: given[name] for name in names & given.keys()}
    settings |= {name: not given[f"no_{name}"] for name in names if f"no_{name}" in given}
    return EngineConfig(**settings)


def _print_or_exit(show: Callable[[], None]) -> None:
    """Print something on standard output; where that fails the process ends as a command's does."""

    def job() -> int:
        with printing():
            show()
        return 0

    if code := _code_of(job):
        raise typer.Exit(code)


def _exit_with(job: Callable[[], int]) -> NoReturn:
    raise typer.Exit(_code_of(job))


def _code_of(job: Callable[[], int]) -> int:
    """Run a job; its exit code. What a user can cause is one line on stderr."""
    message = ""
    try:
        code = job()
    except PagedgenError as error:
        message, code = str(error), error.exit_code
    except KeyboardInterrupt:
        message, code = "interrupted", 130
    if message:
        tell(f"pagedgen: {message}")
    return code


def main() -> NoReturn:
    """The entry point of the `pagedgen` command.

    The process ends as soon as its output is flushed: everything that matters is on the disk by then, and taking torch,
    transformers and the KV pool apart again would take the better part of a second.
    """
    try:
        app()
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed, or never there
            stream.flush()
    os._exit(code)
