"""The options of the commands, each declared once: its type, its help and the panel of `--help` it stands in."""

from pathlib import Path
from typing import Annotated, Any

import typer

from pagedgen.config import Device, Dtype, OnTooLong
from pagedgen.units import parse_bytes

ENGINE, SAMPLING, PROMPT, OUTPUT = "Engine", "Generation (a row's own columns win)", "Prompts", "Output"


def _option(flag: str, help: str, panel: str, **more: Any) -> Any:
    return typer.Option(flag, help=help, rich_help_panel=panel, show_default=False, **more)


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


Input = Annotated[
    str | None,
    typer.Argument(
        help="A .jsonl, .json, .csv, .tsv, .parquet, .arrow or .txt file (or .gz/.zst of one), a glob, a folder, "
        "or - for stdin. Left out: stdin when something is piped in, else the bundled sample prompts.",
        show_default=False,
    ),
]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
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
Logprobs = Annotated[
    int | None, _option("--logprobs", "Add log-probabilities of each token and of the K likeliest.", SAMPLING)
]
Overwrite = Annotated[bool, _option("--overwrite", "Replace an output that exists.", OUTPUT)]
KeepOption = Annotated[
    str, typer.Option(help="Input columns to keep: all, none, or names with commas.", rich_help_panel=OUTPUT)
]
TokenIds = Annotated[bool, _option("--token-ids", "Add the generated token ids.", OUTPUT)]
Strict = Annotated[bool, _option("--strict", "Exit with 3 when any row's status is not ok.", OUTPUT)]
Quiet = Annotated[bool, _option("--quiet", "Show nothing but errors.", OUTPUT)]
DeviceOption = Annotated[Device, typer.Option(help="Where to run.", rich_help_panel=ENGINE)]
DtypeOption = Annotated[Dtype, typer.Option(help="The dtype of weights and KV cache.", rich_help_panel=ENGINE)]
KvMemory = Annotated[
    int | None,
    typer.Option(
        parser=_size,
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
NoPrefixCache = Annotated[bool, _option("--no-prefix-cache", "Compute every prompt in full.", ENGINE)]
