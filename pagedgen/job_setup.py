"""What a job checks before it begins: its options, and where and what it writes."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa

from pagedgen.beam_params import beam_flag, validate_beam
from pagedgen.config import JobConfig, OutputConfig
from pagedgen.data.manifest import Manifest, unpack_schema
from pagedgen.data.openai_batch import is_batch
from pagedgen.data.readers import InputSource, open_bundled_prompts, open_input
from pagedgen.data.schema import OutputColumns
from pagedgen.errors import UsageError, before_any_work
from pagedgen.params import defaults_from_generation_config
from pagedgen.request import SamplingParams
from pagedgen.text.prompts import require_prompt_column


@contextmanager
def naming_paths() -> Iterator[None]:
    """Turn what the system says of a path, like a name that is too long, into a UsageError."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{error.filename} cannot be used: {error.strerror}; check the path") from error


def open_rows(config: JobConfig, stdin: BinaryIO | None) -> InputSource:
    """The job's input, which has a column that can be its prompt. stdin: what the path `-` reads. Raises UsageError."""
    with naming_paths(), before_any_work():
        source = open_bundled_prompts() if config.input.is_empty else open_input(config.input, stdin=stdin)
    if (names := source.columns.names) and not is_batch(names):  # there are none where no row can be read
        try:
            require_prompt_column(names, config.prompt)
        except UsageError as error:
            raise UsageError(re.sub("^The input ", lambda _: f"{source.description} ", str(error))) from None
    return source


def check_options(config: JobConfig) -> JobConfig:
    """The configuration with its beam options checked. Raises UsageError for what cannot work together."""
    n, max_seqs = defaults_from_generation_config({}, config.overrides).n, config.engine.max_seqs
    if n > max_seqs:
        raise UsageError(f"-n is {n}, but only {max_seqs} sequences run at a time; lower it or raise --max-seqs.")
    if config.beam is None:
        return config
    try:
        return replace(config, beam=validate_beam(config.beam, max_seqs, beam_flag))
    except ValueError as error:
        raise UsageError(f"{error}.") from None


def check_against_vocabulary(defaults: SamplingParams, overrides: Mapping[str, object], vocab_size: int) -> None:
    """Raises UsageError for an option of the command line that names a token the model does not have."""
    last = vocab_size - 1
    biased = (token_id for token_id, _ in defaults.logit_bias)
    for flag, token_ids in (("--stop-token-ids", defaults.stop_token_ids), ("--logit-bias", biased)):
        if (token_id := max(token_ids, default=0)) > last:
            raise UsageError(f"{flag} {token_id} is no token of the model; its ids are 0 to {last}")
    if overrides.get("top_k") is not None and defaults.top_k > vocab_size:
        raise UsageError(
            f"--top-k is {defaults.top_k}, but the model has {vocab_size} tokens; leave it out to keep all of them"
        )


def output_config(config: JobConfig, source: InputSource) -> OutputConfig:
    """Where and what to write. Raises UsageError when the format does not go with the rest."""
    path, keep = config.output_path or Path(f"{source.stem}.completions.parquet"), config.keep
    if config.format == "openai":
        if path.suffix.lower() != ".jsonl":
            raise UsageError(f"--format openai is for JSON lines, but the output is {path}; name one with -o X.jsonl")
        if keep != "all":
            raise UsageError("--format openai has no place for the input's columns; leave --keep out")
        keep = ("url",) if is_batch(source.columns.names) else "none"  # it tells what the answer looks like
    return OutputConfig(
        path=path,
        overwrite=config.overwrite,
        keep=keep,
        token_ids=config.token_ids,
    )


def output_columns(
    config: JobConfig, input_columns: pa.Schema, output: OutputConfig, earlier: Manifest | None
) -> OutputColumns:
    """The columns of the output: those of the earlier run that goes on, whatever later rows of its input look like."""
    known = unpack_schema(earlier.input_schema) if earlier is not None else input_columns
    names = set(known.names)
    if is_batch(names):
        body = known.field("body").type
        names = {field.name for field in body} if pa.types.is_struct(body) else {"logprobs", "prompt_logprobs"}

    def is_asked_for(option: str) -> bool:
        """Whether any row may have what only a draw can give."""
        return config.beam is None and (config.overrides.get(option) is not None or option in names)

    asked = replace(output, logprobs=is_asked_for("logprobs"), prompt_logprobs=is_asked_for("prompt_logprobs"))
    return OutputColumns(known, asked)
