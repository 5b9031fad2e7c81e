"""The options of the commands, each declared once: its type, its help and the panel of `--help` it stands in."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from pagedgen.config import Device, Dtype, ErrorLimit, Format, OnTooLong, Quantize
from pagedgen.errors import UsageError
from pagedgen.request import EarlyStopping, Status
from pagedgen.units import parse_bytes, parse_seconds

ENGINE, SAMPLING, PROMPT, OUTPUT = "Engine", "Generation (a row's own columns win)", "Prompts", "Output"
BEAM = "Beam search"
PLAN = "Plan"

# What names something or is a value: an empty text is a variable of a script that was not set, and must not be taken
# for the current folder or for what is left out.
_NEVER_EMPTY = {
    "input": ("the name of the input", "name a file, a folder or a glob, or - for stdin"),
    "dataset": ("--dataset", "give a Hub name or a folder"),
    "config": ("--config", "name a configuration, or leave it out"),
    "split": ("--split", "name a split, or leave it out"),
    "prompt_column": ("--prompt-column", "name a column, or leave it out"),
    "template": ("--template", "give a Jinja2 template or a file that holds one"),
    "output": ("-o", "name a file X.parquet or X.jsonl, or a folder"),
    "keep": ("--keep", "write all, none, or the names of columns"),
    "model": ("--model", "give a Hub id, a local folder or a .gguf file, or leave it out"),
    "logit_bias": ("--logit-bias", """give JSON like '{"11": -5}', or leave it out"""),
    "html": ("--html", "name a file, like report.html"),
}


def refuse_empty(given: Mapping[str, Any]) -> None:
    """Raises UsageError for an option that is given as an empty text where that means nothing."""
    for name, (flag, remedy) in _NEVER_EMPTY.items():
        value = given.get(name)
        if isinstance(value, str) and not value.strip():
            raise UsageError(f"{flag} is empty; {remedy}")


def _option(flag: str, help: str, panel: str, **more: Any) -> Any:
    return typer.Option(flag, help=help, rich_help_panel=panel, show_default=False, **more)


def _parsed(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """What Typer calls for an option's text; a ValueError of `parse` is the user's mistake."""

    def parsed(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    return parsed


def _statuses(text: str) -> tuple[Status, ...]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    known = [status.value for status in Status]
    if not names or not set(names) <= set(known):
        raise ValueError(f"{text!r} must be one or more of {', '.join(known)}, with commas")
    return tuple(Status(name) for name in dict.fromkeys(names))


Input = Annotated[
    str | None,
    typer.Argument(
        help="A .jsonl, .json, .csv, .tsv, .parquet, .arrow or .txt file (or .gz/.zst of one), a glob, a folder, "
        "or - for stdin. Left out: stdin when something is piped in, else the bundled sample prompts.",
        show_default=False,
    ),
]
Output = Annotated[
    str | None,
    typer.Option(
        "--output",
        "-o",
        metavar="PATH",
        help="X.parquet or X.jsonl: one file in input order. A folder: Parquet parts. "
        "Default: INPUT's name with .completions.parquet, in this folder.",
        rich_help_panel=OUTPUT,
        show_default=False,
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        help="A Hub id, a local folder or a .gguf file. Default: SmolLM2-135M-Instruct.",
        rich_help_panel=ENGINE,
        show_default=False,
    ),
]
Dataset = Annotated[
    str | None, typer.Option(help="Read a dataset instead: its Hub name or folder.", rich_help_panel=PROMPT)
]
DatasetConfig = Annotated[
    str | None, typer.Option(help="The dataset's configuration.", rich_help_panel=PROMPT, show_default=False)
]
Split = Annotated[str | None, typer.Option(help="The dataset's split.", rich_help_panel=PROMPT, show_default=False)]
PromptColumn = Annotated[
    str | None,
    _option("--prompt-column", "The column to use as prompt. Default: messages, prompt or prompt_token_ids.", PROMPT),
]
Template = Annotated[
    str | None, _option("--template", "A Jinja2 template over the row's columns, or a file that holds one.", PROMPT)
]
System = Annotated[str | None, _option("--system", "System message of chats that have none.", PROMPT)]
AllowSpecialTokens = Annotated[
    bool,
    _option(
        "--allow-special-tokens", "Let special tokens spelled out in a row's values be tokens, and not text.", PROMPT
    ),
]
Raw = Annotated[bool, _option("--raw", "Send text prompts as they are, without the chat template.", PROMPT)]
OnTooLongOption = Annotated[
    OnTooLong,
    typer.Option(help="What to do with a prompt that does not fit the model's length.", rich_help_panel=PROMPT),
]
MaxTokens = Annotated[
    int | None,
    _option("--max-tokens", "Most tokens to generate for a row. Default: the model's, or 512.", SAMPLING),
]
Temperature = Annotated[float | None, _option("--temperature", "0 is greedy. Default: the model's.", SAMPLING)]
TopP = Annotated[
    float | None, _option("--top-p", "Keep the most likely tokens up to this mass. Default: the model's.", SAMPLING)
]
TopK = Annotated[
    int | None, _option("--top-k", "Keep this many of the most likely tokens. Default: the model's.", SAMPLING)
]
MinP = Annotated[
    float | None, _option("--min-p", "Keep tokens at least this likely, relative to the most likely.", SAMPLING)
]
Seed = Annotated[
    int | None,
    _option("--seed", "Draws depend on seed, row id and position only. Default: 0.", SAMPLING),
]
Stop = Annotated[list[str] | None, _option("--stop", "End the text before this string; may be repeated.", SAMPLING)]
StopTokenIds = Annotated[
    list[int] | None, _option("--stop-token-ids", "End at this token id; may be repeated.", SAMPLING)
]
MinTokens = Annotated[int | None, _option("--min-tokens", "Hold back ends until this many tokens exist.", SAMPLING)]
IgnoreEos = Annotated[bool | None, _option("--ignore-eos", "Generate past the model's end tokens.", SAMPLING)]
N = Annotated[
    int | None,
    typer.Option(
        "-n",
        "--n",
        help="Samples of each row, 1 to 256. Default: 1.",
        rich_help_panel=SAMPLING,
        show_default=False,
    ),
]
RepetitionPenalty = Annotated[
    float | None,
    _option("--repetition-penalty", "Above 1: fewer tokens of prompt and completion again. 1 is off.", SAMPLING),
]
PresencePenalty = Annotated[
    float | None,
    _option("--presence-penalty", "Taken off the score of each token that the completion holds.", SAMPLING),
]
FrequencyPenalty = Annotated[
    float | None,
    _option("--frequency-penalty", "Taken off once for each time that the completion holds it.", SAMPLING),
]
LogitBias = Annotated[
    str | None,
    _option("--logit-bias", """What to add to the scores of token ids, like '{"11": -5}'.""", SAMPLING, metavar="JSON"),
]
BadWords = Annotated[list[str] | None, _option("--bad-words", "Never complete this text; may be repeated.", SAMPLING)]
Logprobs = Annotated[
    int | None, _option("--logprobs", "Add log-probabilities of each token and of the K likeliest.", SAMPLING)
]
PromptLogprobs = Annotated[
    int | None, _option("--prompt-logprobs", "Add the same of each prompt token but the first.", SAMPLING)
]
Overwrite = Annotated[bool, _option("--overwrite", "Replace an output that exists.", OUTPUT)]
KeepOption = Annotated[
    str, typer.Option(help="Input columns to keep: all, none, or names with commas.", rich_help_panel=OUTPUT)
]
TokenIds = Annotated[bool, _option("--token-ids", "Add the generated token ids.", OUTPUT)]
Retry = Annotated[
    Any,
    _option(
        "--retry",
        "Run the rows of an earlier run that have one of these statuses again.",
        OUTPUT,
        parser=_parsed(_statuses),
        metavar="STATUS[,STATUS]",
    ),
]
MaxErrors = Annotated[
    Any,
    _option(
        "--max-errors",
        "Give up once more rows than this are not ok.",
        OUTPUT,
        parser=_parsed(ErrorLimit.parse),
        metavar="N|P%",
    ),
]
FlushEvery = Annotated[
    float,
    typer.Option(
        parser=_parsed(parse_seconds),
        metavar="TIME",
        help="Write what is finished at least this often, like 30s or 5m.",
        rich_help_panel=OUTPUT,
        show_default="30s",
    ),
]
FormatOption = Annotated[
    Format,
    typer.Option(help="What -o X.jsonl holds: rows, or OpenAI's batch output.", rich_help_panel=OUTPUT),
]
Strict = Annotated[bool, _option("--strict", "Exit with 3 when any row's status is not ok.", OUTPUT)]
Quiet = Annotated[bool, _option("--quiet", "Show nothing but errors.", OUTPUT)]
DeviceOption = Annotated[Device, typer.Option(help="Where to run.", rich_help_panel=ENGINE)]
DtypeOption = Annotated[Dtype, typer.Option(help="The dtype of weights and KV cache.", rich_help_panel=ENGINE)]
QuantizeOption = Annotated[
    Quantize | None,
    typer.Option(
        "--quantize",
        help="Compute some of the decoder's layers in eight bits (CPU): half the memory for them, faster, less exact.",
        rich_help_panel=ENGINE,
        show_default=False,
    ),
]
KvMemory = Annotated[
    int | None,
    typer.Option(
        parser=_parsed(parse_bytes),
        metavar="SIZE",
        help="Size of the KV pool, like 8GiB. Default: what is free after the weights and activations.",
        rich_help_panel=ENGINE,
        show_default=False,
    ),
]
BlockSize = Annotated[int, typer.Option(min=1, max=1024, help="Tokens in a KV block.", rich_help_panel=ENGINE)]
MaxBatchTokens = Annotated[int, typer.Option(min=1, help="Most tokens computed in a step.", rich_help_panel=ENGINE)]
MaxSeqs = Annotated[int, typer.Option(min=1, help="Most sequences that run at a time.", rich_help_panel=ENGINE)]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        min=2,
        help="Longest prompt and completion in tokens. Default: the model's.",
        rich_help_panel=ENGINE,
        show_default=False,
    ),
]
TrustRemoteCode = Annotated[
    bool, _option("--trust-remote-code", "Run the Python code that comes with the model, where it needs it.", ENGINE)
]
NoPrefixCache = Annotated[bool, _option("--no-prefix-cache", "Compute every prompt in full.", ENGINE)]
NoOverlap = Annotated[bool, _option("--no-overlap", "On a GPU, plan each step after the last one has ended.", ENGINE)]
NoCudaGraphs = Annotated[
    bool, _option("--no-cuda-graphs", "On a GPU, launch each kernel of a decoding step by itself.", ENGINE)
]
Width = Annotated[int, typer.Option(help="Sequences that each row's search keeps, 1 to 64.", rich_help_panel=BEAM)]
NumReturn = Annotated[
    int,
    typer.Option("--return", help="Completions of a row, the best first; at most --width.", rich_help_panel=BEAM),
]
LengthPenalty = Annotated[
    float,
    typer.Option(help="Scores are log-probabilities divided by length to this power.", rich_help_panel=BEAM),
]
EarlyStoppingOption = Annotated[
    EarlyStopping,
    typer.Option(
        help="When to end a search that has as many completions as beams: at once (true), when its best beam scores no "
        "better than the worst of them (false), or when it could not at any length (never).",
        rich_help_panel=BEAM,
    ),
]
DiversityGroups = Annotated[
    int, typer.Option(help="Groups of beams that avoid each other's tokens.", rich_help_panel=BEAM)
]
DiversityPenalty = Annotated[
    float,
    typer.Option(
        help="Taken off a token's score for each beam of an earlier group that chose it in this step.",
        rich_help_panel=BEAM,
    ),
]
PlanWidth = Annotated[int | None, _option("--width", "Plan a beam search of this width, as of `pagedgen beam`.", BEAM)]
OutputTokens = Annotated[
    float | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Mean length of completions to expect. Default: what earlier runs of the model on this machine had, else "
        "the most that is allowed.",
        rich_help_panel=PLAN,
        show_default=False,
    ),
]
PlanJson = Annotated[bool, _option("--json", "Print the plan as JSON.", PLAN)]
Runs = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RUN]",
        help="The output of a run, or its folder X.run; running, interrupted or finished. Default: the latest run.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the report as JSON.", show_default=False)]
Html = Annotated[
    str | None,
    typer.Option(
        metavar="PATH", help="Write the report as one self-contained page into this file.", show_default=False
    ),
]
Watch = Annotated[bool, typer.Option("--watch", help="Show a running job until it ends.", show_default=False)]
