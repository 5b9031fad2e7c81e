"""Configuration: frozen dataclasses. Resolving a default returns a new object; nothing is changed in place."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from pagedgen.errors import UsageError
from pagedgen.request import BeamParams, Status

Device = Literal["auto", "cuda", "cpu"]
Dtype = Literal["auto", "bfloat16", "float16", "float32"]
Quantize = Literal["int8"]
OnTooLong = Literal["error", "truncate-left", "truncate-right"]
Keep = Literal["all", "none"] | tuple[str, ...]
Format = Literal["rows", "openai"]

_LEAST = {"kv_memory": 1, "block_size": 1, "max_batch_tokens": 1, "max_seqs": 1, "max_model_len": 2}
_MOST = 1 << 60
_CHOICES = {"device": get_args(Device), "dtype": get_args(Dtype), "on_too_long": get_args(OnTooLong)}


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What the engine needs to know; the command line's engine options have the same names.

    model: a Hub id, a local folder or a `.gguf` file; None is the default model.
    kv_memory: bytes of the KV pool; None takes what is free after the weights and the measured activation peak.
    block_size: tokens a KV block holds. max_batch_tokens: most tokens computed in one step.
    max_seqs: most sequences that run at a time. max_model_len: longest prompt plus completion in tokens; None is the
    model's own limit. quantize: "int8" computes some of the linear layers in eight bits, on a CPU (W8A8, dynamic).
    overlap, cuda_graphs: on a GPU, plan steps while others run, and launch decoding steps as CUDA graphs.
    trust_remote_code: run the Python code that comes with a model's files, where it needs it.
    """

    model: str | None = None
    device: Device = "auto"
    dtype: Dtype = "auto"
    quantize: Quantize | None = None
    kv_memory: int | None = None
    block_size: int = 16
    max_batch_tokens: int = 2048
    max_seqs: int = 256
    max_model_len: int | None = None
    prefix_cache: bool = True
    overlap: bool = True
    cuda_graphs: bool = True
    on_too_long: OnTooLong = "error"
    trust_remote_code: bool = False

    def kernels_name(self, attention: str) -> str:
        """What reports call what runs, with attention by this backend."""
        return attention if self.quantize is None else f"{attention} {self.quantize}"

    def __post_init__(self) -> None:
        """Raises UsageError for a number that can never work."""
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= _MOST:
                raise UsageError(f"{name} is {value}, but it must be from {least} to {_MOST}")
        if self.quantize not in (None, *get_args(Quantize)):
            raise UsageError(f"quantize is {self.quantize!r}, but it must be one of {', '.join(get_args(Quantize))}")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise UsageError(f"{name} is {getattr(self, name)!r}, but it must be one of {', '.join(choices)}")


@dataclass(frozen=True, slots=True)
class InputConfig:
    """Where the rows come from: a path, a glob, a folder, `-` for stdin, or a dataset of the `datasets` library."""

    path: str | None = None
    dataset: str | None = None
    dataset_config: str | None = None
    split: str | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing is named, so that the bundled sample prompts are meant."""
        return self == InputConfig()


@dataclass(frozen=True, slots=True)
class PromptConfig:
    """How a row becomes a prompt; see the README on prompting.

    prompt_column: the column to use as the prompt. template: Jinja2 source over the row's columns.
    raw: send text prompts as they are, without the model's chat template. system: system message for chats.
    allow_special_tokens: text of special tokens, like `<|im_end|>`, in a row's values becomes these tokens.
    """

    prompt_column: str | None = None
    template: str | None = None
    raw: bool = False
    system: str | None = None
    allow_special_tokens: bool = False


@dataclass(frozen=True, slots=True)
class OutputConfig:
    """Where and what to write.

    path: `X.parquet` or `X.jsonl` is one file in input order, anything else a folder of Parquet parts.
    keep: the input's columns to keep: "all", "none" or their names. token_ids, logprobs, prompt_logprobs: optional
    columns.
    """

    path: Path
    overwrite: bool = False
    keep: Keep = "all"
    token_ids: bool = False
    logprobs: bool = False
    prompt_logprobs: bool = False


# Before so many rows have an outcome, a share of them says nothing.
_LEAST_FOR_SHARE = 100


@dataclass(frozen=True, slots=True)
class ErrorLimit:
    """When to give a run up: once more than `count` rows, or more than the fraction `share` of those that have an
    outcome, are not `ok`. A share counts from a hundred rows on. text: as the user wrote it."""

    text: str
    count: int | None = None
    share: float | None = None

    def is_exceeded(self, failed: int, done: int) -> bool:
        if self.count is not None:
            return failed > self.count
        return done >= _LEAST_FOR_SHARE and self.share is not None and failed > self.share * done

    @staticmethod
    def parse(text: str) -> "ErrorLimit":
        """`10` or `2.5%`. Raises ValueError for anything else."""
        stated = text.strip()
        try:
            if stated.endswith("%"):
                percent = float(stated[:-1])
                if 0 <= percent < 100:
                    return ErrorLimit(stated, share=percent / 100)
            elif (count := int(stated)) >= 0:
                return ErrorLimit(stated, count=count)
        except ValueError:
            pass
        raise ValueError(f"{text!r} is no limit; write a number of rows like 10, or a share of them like 5%")


@dataclass(frozen=True, slots=True)
class JobConfig:
    """Everything `pagedgen run` and `pagedgen beam` need.

    output_path: None is `<input stem>.completions.parquet` in the current folder. overrides: the generation options
    given on the command line, by name. beam: how to search; None is to sample. retry: run rows with these statuses
    again. max_errors: when to give up; None is never. flush_every: seconds after which what is finished is written at
    the latest. command: the command line, for the manifest.
    """

    input: InputConfig
    output_path: Path | None = None
    overwrite: bool = False
    keep: Keep = "all"
    token_ids: bool = False
    format: Format = "rows"
    prompt: PromptConfig = field(default_factory=PromptConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    overrides: Mapping[str, object] = field(default_factory=dict)
    beam: BeamParams | None = None
    retry: tuple[Status, ...] = ()
    max_errors: ErrorLimit | None = None
    flush_every: float = 30.0
    quiet: bool = False
    command: tuple[str, ...] = ()
