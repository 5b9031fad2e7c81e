"""From an input row to the token ids of its prompt."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from numbers import Integral
from typing import Any

import jinja2
import jinja2.meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pagedgen.config import PromptConfig
from pagedgen.errors import RowError, UsageError
from pagedgen.request import PromptRecord, Status
from pagedgen.text.messages import as_messages, looks_like_messages
from pagedgen.text.tokenizer import Tokenizer

# The first of these that a row has, and that is not null, is its prompt.
PROMPT_COLUMNS = ("messages", "prompt", "prompt_token_ids")
# Columns that hold the prompt in many public datasets, likeliest first.
_LIKELY_COLUMNS = (
    "question",
    "text",
    "instruction",
    "query",
    "input",
    "problem",
    "content",
    "user",
    "request",
    "conversations",
    "conversation",
    "chat",
)


@dataclass(frozen=True, slots=True)
class _Text:
    """A prompt as text. is_chat: it is a rendered chat, which has all its special tokens already."""

    text: str
    is_chat: bool


class PromptRenderer:
    """Renders rows to prompts as the configuration says.

    A row's prompt is what the template makes of its columns, else the prompt column, else the first of `messages`,
    `prompt` and `prompt_token_ids` that it has:

    * a chat is rendered with the model's chat template; one that ends in an assistant message is continued from there;
    * a text becomes one user message where the model has a chat template, and is sent as it is otherwise or when raw;
    * token ids are sent as they are.

    The system text leads every chat that has no system message of its own. No prompt gets a second BOS: chats take
    theirs from the template, and a text that already begins with BOS gets none from the tokenizer.

    Raises UsageError when the template cannot be parsed, or the system text would have no place.
    """

    def __init__(self, tokenizer: Tokenizer, config: PromptConfig) -> None:
        self._tokenizer = tokenizer
        self._config = config
        self._wraps_text = tokenizer.has_chat_template and not config.raw
        self._template = None if config.template is None else _compile(config.template)
        _check_system(config, tokenizer.has_chat_template)

    def render_batch(self, records: Sequence[PromptRecord]) -> list[tuple[int, ...] | RowError]:
        """Prompt token ids of each row, in order, or why the row has none (BAD_ROW or TEMPLATE_ERROR)."""
        outcomes: list[tuple[int, ...] | RowError | None] = [None] * len(records)
        texts: dict[int, _Text] = {}
        for i, record in enumerate(records):
            try:
                draft = self._draft(record)
                if isinstance(draft, _Text):
                    texts[i] = draft
                else:
                    outcomes[i] = draft
            except RowError as error:
                outcomes[i] = error
        for is_chat in (True, False):
            chosen = [i for i, draft in texts.items() if draft.is_chat is is_chat]
            encoded = self._tokenizer.encode_each([texts[i].text for i in chosen], add_special_tokens=not is_chat)
            for i, ids in zip(chosen, encoded, strict=True):
                outcomes[i] = self._checked(ids, records[i])
        return [outcome for outcome in outcomes if outcome is not None]

    def _draft(self, record: PromptRecord) -> _Text | tuple[int, ...]:
        """The row's prompt before it is tokenized."""
        if record.error is not None:
            raise RowError(Status.BAD_ROW, record.error)
        if self._template is not None:
            return self._text(_render(self._template, record), "the template's result", record)
        column, value = self._find(record)
        if column == "prompt_token_ids":
            return self._token_ids(value, record)
        if column == "messages" or looks_like_messages(value):
            return self._chat(as_messages(value, column, record.where), record)
        if not isinstance(value, str):
            raise RowError(
                Status.BAD_ROW,
                f"{record.where}: {column} must be a text or a list of messages, not {type(value).__name__}; "
                f"to use other values as text, write --template '{{{{ {column} }}}}'",
            )
        return self._text(value, column, record)

    def _find(self, record: PromptRecord) -> tuple[str, Any]:
        """The column that holds the row's prompt, and its value."""
        wanted = PROMPT_COLUMNS if self._config.prompt_column is None else (self._config.prompt_column,)
        for column in wanted:
            value = record.columns.get(column)
            # Text formats have no null: there an empty cell in one of the others leaves the choice to the next.
            if value is not None and not (value == "" and column in ("messages", "prompt_token_ids")):
                return column, value
        names = wanted[0] if len(wanted) == 1 else "any of " + ", ".join(wanted)
        raise RowError(Status.BAD_ROW, f"{record.where}: the row has no value in {names}")

    def _text(self, text: str, name: str, record: PromptRecord) -> _Text:
        if not text and (self._wraps_text or not self._tokenizer.adds_bos):
            raise RowError(Status.BAD_ROW, f"{record.where}: {name} is empty")
        if self._wraps_text:
            return self._chat([{"role": "user", "content": text}], record)
        return _Text(_encodable(text, record), is_chat=False)

    def _chat(self, messages: list[dict[str, Any]], record: PromptRecord) -> _Text:
        if self._config.raw:
            raise RowError(Status.BAD_ROW, f"{record.where}: --raw sends texts as they are, but the row holds a chat")
        if not self._tokenizer.has_chat_template:
            raise RowError(
                Status.BAD_ROW,
                f"{record.where}: the row holds a chat, but the model has no chat template; give the prompt as text",
            )
        if self._config.system is not None and all(m["role"] not in ("system", "developer") for m in messages):
            messages = [{"role": "system", "content": self._config.system}, *messages]
        try:
            text = self._tokenizer.render_chat(messages, continue_final_message=messages[-1]["role"] == "assistant")
        except Exception as error:  # a template is a program of the model's author and may raise anything
            raise RowError(
                Status.TEMPLATE_ERROR, f"{record.where}: the model's chat template refuses the chat: {_reason(error)}"
            ) from error
        return _Text(_encodable(text, record), is_chat=True)

    def _token_ids(self, value: object, record: PromptRecord) -> tuple[int, ...]:
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except json.JSONDecodeError:
                value = None
        if not isinstance(value, list | tuple) or not value:
            raise RowError(Status.BAD_ROW, f"{record.where}: prompt_token_ids must be a list of token ids, not empty")
        limit = self._tokenizer.vocab_size
        for item in value:
            if isinstance(item, bool) or not isinstance(item, Integral) or not 0 <= int(item) < limit:
                raise RowError(
                    Status.BAD_ROW,
                    f"{record.where}: prompt_token_ids holds {item!r}; the model's token ids are 0 to {limit - 1}",
                )
        return tuple(map(int, value))

    def _checked(self, ids: list[int] | Exception, record: PromptRecord) -> tuple[int, ...] | RowError:
        if isinstance(ids, Exception):
            return RowError(Status.BAD_ROW, f"{record.where}: the prompt cannot be tokenized: {_reason(ids)}")
        if not ids:
            return RowError(Status.BAD_ROW, f"{record.where}: the prompt has no tokens")
        return tuple(ids)


def require_prompt_column(columns: Iterable[str], config: PromptConfig) -> None:
    """Checks at the start of a job that rows with these columns can have a prompt.

    Raises UsageError that lists the columns there are and the flags to use, also for a template that cannot be parsed
    and for a system text that has no place.
    """
    _check_system(config)
    names = list(columns)
    there = "The input has the columns " + ", ".join(names) if names else "The input has no columns"
    if config.template is not None:
        _compile(config.template)
        used = _template_variables(config.template)
        if used and not used & {*names, "row"}:
            raise UsageError(f"{there}, but --template uses only {', '.join(sorted(used))}.")
        return
    if config.prompt_column is not None:
        if config.prompt_column not in names:
            close = get_close_matches(config.prompt_column, names, n=1)
            hint = f"; did you mean {close[0]}?" if close else "."
            raise UsageError(f"{there}, but no {config.prompt_column} as --prompt-column says{hint}")
        return
    if not any(column in names for column in PROMPT_COLUMNS):
        likely = _likely_column(names)
        example = f" (perhaps --prompt-column {likely})" if likely else ""
        raise UsageError(
            f"{there}, but none of {', '.join(PROMPT_COLUMNS)}: "
            f"name the one to use with --prompt-column{example}, or combine columns with --template."
        )


def _check_system(config: PromptConfig, has_chat_template: bool = True) -> None:
    """Raises UsageError when the system text would have no place."""
    if config.system is not None and (config.raw or not has_chat_template):
        reason = "--raw sends prompts as they are" if config.raw else "the model has no chat template"
        raise UsageError(f"--system has no effect because {reason}; write it into the prompts, or use --template.")


def _likely_column(names: list[str]) -> str | None:
    lowered = {name.lower(): name for name in reversed(names)}
    return next((lowered[likely] for likely in (*PROMPT_COLUMNS, *_LIKELY_COLUMNS) if likely in lowered), None)


def _environment() -> ImmutableSandboxedEnvironment:
    return ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined, finalize=_no_null)


def _no_null(value: object) -> object:
    """A null would be printed as `None`, in the middle of a prompt."""
    if value is None:
        raise jinja2.TemplateRuntimeError("it prints a null value; give a default, like {{ column or '' }}")
    return value


def _compile(source: str) -> jinja2.Template:
    try:
        return _environment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise UsageError(f"--template cannot be parsed: {error.message} (line {error.lineno}).") from error


def _template_variables(source: str) -> set[str]:
    environment = _environment()
    return jinja2.meta.find_undeclared_variables(environment.parse(source)) - environment.globals.keys()


def _render(template: jinja2.Template, record: PromptRecord) -> str:
    """The template over the row's columns; `row` is all of them, for names that are no Jinja names."""
    columns: Mapping[str, Any] = {"row": record.columns, **record.columns}
    try:
        return template.render(columns)
    except Exception as error:  # a template is a program and may raise anything
        raise RowError(Status.TEMPLATE_ERROR, f"{record.where}: the template fails: {_reason(error)}") from error


def _encodable(text: str, record: PromptRecord) -> str:
    """The text, unless it holds half of a surrogate pair, which is no character and has no UTF-8 form."""
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RowError(
                Status.BAD_ROW,
                f"{record.where}: the prompt holds half of a surrogate pair, {text[error.start]!a}, "
                "which is no character",
            ) from None
    return text


def _reason(error: Exception) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__
