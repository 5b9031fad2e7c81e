"""The command line: parses, calls, and maps errors to exit codes. No logic, and no heavy import."""

import os
import stat
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from pagedgen import __version__, options
from pagedgen.config import EngineConfig, InputConfig, JobConfig, Keep, PromptConfig
from pagedgen.errors import PagedgenError, UsageError
from pagedgen.params import OPTIONS
from pagedgen.process import prepare_process

DEFAULTS = EngineConfig()
SAMPLING = tuple(option.name for option in OPTIONS)

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pagedgen {__version__}")
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


def _stdin_is_piped() -> bool:
    """Whether something was piped or redirected into the command: a terminal and /dev/null are neither."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError, AttributeError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)


@app.command()
def run(
    input: options.Input = None,
    output: options.Output = None,
    model: options.Model = None,
    dataset: options.Dataset = None,
    config: options.DatasetConfig = None,
    split: options.Split = None,
    prompt_column: options.PromptColumn = None,
    template: options.Template = None,
    system: options.System = None,
    raw: options.Raw = False,
    on_too_long: options.OnTooLongOption = "error",
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    top_k: options.TopK = None,
    min_p: options.MinP = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    stop_token_ids: options.StopTokenIds = None,
    min_tokens: options.MinTokens = None,
    ignore_eos: options.IgnoreEos = None,
    logprobs: options.Logprobs = None,
    overwrite: options.Overwrite = False,
    keep: options.KeepOption = "all",
    token_ids: options.TokenIds = False,
    strict: options.Strict = False,
    quiet: options.Quiet = False,
    device: options.DeviceOption = "auto",
    dtype: options.DtypeOption = "auto",
    kv_memory: options.KvMemory = None,
    block_size: options.BlockSize = DEFAULTS.block_size,
    max_batch_tokens: options.MaxBatchTokens = DEFAULTS.max_batch_tokens,
    max_seqs: options.MaxSeqs = DEFAULTS.max_seqs,
    max_model_len: options.MaxModelLen = None,
    no_prefix_cache: options.NoPrefixCache = False,
) -> None:
    """Generate a completion for every row of INPUT."""
    given = locals()  # the options by name, nothing else yet
    _exit_with(lambda: _run(given))


def _run(given: dict[str, Any]) -> int:
    """Run the job that the options ask for; the exit code."""
    wanted = InputConfig(given["input"], given["dataset"], given["config"], given["split"])
    if wanted.is_empty:
        if _stdin_is_piped():
            wanted = InputConfig("-")
        elif sys.stdin is not None and sys.stdin.isatty():
            typer.echo("no input given: running the bundled sample prompts", err=True)
        else:
            raise UsageError("there is no input; name a file, a folder or a dataset, or pipe the prompts in")
    config = JobConfig(
        input=wanted,
        output_path=given["output"],
        overwrite=given["overwrite"],
        keep=_parse_keep(given["keep"]),
        token_ids=given["token_ids"],
        prompt=PromptConfig(given["prompt_column"], _read_template(given["template"]), given["raw"], given["system"]),
        engine=_engine_config(given),
        overrides={name: given[name] for name in SAMPLING if given[name] not in (None, [])},
        quiet=given["quiet"],
        command=tuple(sys.argv),
    )
    prepare_process()
    from pagedgen.job import run_job  # pyarrow, torch and transformers are imported only when there is a job

    result = run_job(config, getattr(sys.stdin, "buffer", None))
    return 3 if given["strict"] and not result.all_ok else 0


def _engine_config(given: dict[str, Any]) -> EngineConfig:
    names = {field.name for field in fields(EngineConfig)} & given.keys()
    return EngineConfig(**{name: given[name] for name in names}, prefix_cache=not given["no_prefix_cache"])


def _exit_with(job: Callable[[], int]) -> NoReturn:
    """Run a job and exit with its code; what a user can cause is one line on stderr."""
    message = None
    try:
        code = job()
    except PagedgenError as error:
        message, code = str(error), error.exit_code
    except KeyboardInterrupt:
        message, code = "interrupted", 130
    if message is not None:
        with suppress(OSError):  # nobody reads it any more
            typer.echo(f"pagedgen: {message}", err=True)
    raise typer.Exit(code)


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
