"""From an input row to the token ids of its prompt."""

import json
import reprlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from difflib import get_close_matches
from numbers import Integral
from typing import Any, TypeVar

from pagedgen.config import OnTooLong, PromptConfig
from pagedgen.errors import RowError, UsageError, listed
from pagedgen.request import PromptRecord, Status
from pagedgen.text.messages import as_messages, looks_like_messages
from pagedgen.text.row_template import RowTemplate
from pagedgen.text.sandbox import RenderLimit
from pagedgen.text.special_tokens import GuardedEncoder, Marks, SpecialTokenError, SpecialTokens
from pagedgen.text.tokenizer import Tokenizer

# The first of these that a row has, and that is not null, is its prompt.
PROMPT_COLUMNS = ("messages", "prompt", "prompt_token_ids")
# Up to so many characters are tokenized in a moment, whatever they are.
ENORMOUS = 1 << 20
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

_INTEGERS = frozenset({int})

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Text:
    """A prompt as text. is_chat: it is a rendered chat, which has all its special tokens already.

    marks: what is in the text where the row's values spell special tokens, or could; None where they do not.
    """

    text: str
    is_chat: bool
    marks: Marks | None


class PromptRenderer:
    """Renders rows to prompts as the configuration says.

    A row's prompt is what the template makes of its columns, else the prompt column, else the first of `messages`,
    `prompt` and `prompt_token_ids` that it has:

    * a chat is rendered with the model's chat template; one that ends in an assistant message is continued from there;
    * a text becomes one user message where the model has a chat template, and is sent as it is otherwise or when raw;
    * token ids are sent as they are.

    The system text leads every chat that has no system message of its own. No prompt gets a second BOS: chats take
    theirs from the template, and a text that already begins with BOS gets none from the tokenizer.

    What a row's values spell is text: only templates and the system text write special tokens, unless the configuration
    allows it to all. A template that takes too long or too much memory costs its row only.

    on_note: called once, with a sentence for the user, when the first row spells a special token that is read as text.
    now: the moment that chat templates write the date of; None is the time of this call. max_tokens: the most tokens a
    prompt may have, and on_too_long what becomes of one that has more: where its characters tell, it is not tokenized
    whole; None is to tokenize all.
    Raises UsageError when the template cannot be parsed, or the system text would have no place.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        config: PromptConfig,
        on_note: Callable[[str], None] | None = None,
        now: datetime | None = None,
        max_tokens: int | None = None,
        on_too_long: OnTooLong = "error",
    ) -> None:
        self._tokenizer = tokenizer
        self._max_tokens, self._on_too_long = max_tokens, on_too_long
        self._config = config
        self._on_note = on_note
        moment = datetime.now() if now is None else now
        self._render_chat = tokenizer.chat_renderer(lambda: moment)
        self._limit = RenderLimit()
        self._wraps_text = tokenizer.has_chat_template and not config.raw
        guards = bool(tokenizer.special_tokens) and not config.allow_special_tokens
        self._specials = SpecialTokens(tokenizer.special_tokens, tokenizer.normalize) if guards else None
        self._encoder: GuardedEncoder | None = None
        self._surroundings = "\n".join([config.system or "", config.template or "", tokenizer.chat_template_text])
        self._template = None if config.template is None else RowTemplate(config.template, self._specials)
        _check_system(config, tokenizer.has_chat_template)

    def render_batch(self, records: Sequence[PromptRecord]) -> list[tuple[int, ...] | RowError]:
        """Prompt token ids of each row, in order, or why the row has none (BAD_ROW or TEMPLATE_ERROR)."""
        outcomes: list[tuple[int, ...] | RowError | None] = [None] * len(records)
        texts: dict[int, _Text] = {}
        with self._limit.active():
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
            chosen = [i for i, draft in texts.items() if draft.is_chat is is_chat and draft.marks is None]
            encoded = self._tokenizer.encode_each([texts[i].text for i in chosen], add_special_tokens=not is_chat)
            for i, ids in zip(chosen, encoded, strict=True):
                outcomes[i] = self._checked(ids, records[i])
        for i, draft in texts.items():
            if draft.marks is not None:
                outcomes[i] = self._checked(self._encode_guarded(draft, draft.marks), records[i])
        return [outcome for outcome in outcomes if outcome is not None]

    def _draft(self, record: PromptRecord) -> _Text | tuple[int, ...]:
        """The row's prompt before it is tokenized."""
        if record.error is not None:
            raise RowError(Status.BAD_ROW, record.error)
        if self._template is not None:
            text, marks = self._from_template(self._template, record)
            return self._text(text, "the template's result", record, marks)
        column, value = self._find(record)
        if column == "prompt_token_ids":
            return self._token_ids(value, record)
        if column == "messages" or looks_like_messages(value):
            messages = as_messages(value, column, record.where)
            return self._chat(*self._guarded(messages, record), record)
        if not isinstance(value, str):
            raise RowError(
                Status.BAD_ROW,
                f"{record.where}: {column} must be a text or a list of messages, not {type(value).__name__}; "
                f"to use other values as text, write --template '{{{{ {column} }}}}'",
            )
        text, marks = self._guarded(value, record)
        return self._text(text, column, record, marks)

    def _guarded(self, value: T, record: PromptRecord) -> tuple[T, Marks | None]:
        """The row's value, marked if need be."""
        if self._specials is None or not self._specials.is_suspicious(value):
            return value, None
        marks = self._marks_for(value, record)
        return self._specials.marked(value, marks), marks

    def _marks_for(self, value: object, record: PromptRecord) -> Marks:
        assert self._specials is not None, "there are no special tokens"
        spelled = self._specials.find(value)
        if spelled is not None and self._on_note is not None:
            self._on_note(
                f"{record.where} spells the special token {spelled}, which is read as text; "
                "pass --allow-special-tokens if it is meant as the token"
            )
            self._on_note = None
        try:
            return self._specials.marks_for(value, self._surroundings)
        except SpecialTokenError as error:
            raise _inseparable(error, record) from None

    def _from_template(self, template: RowTemplate, record: PromptRecord) -> tuple[str, Marks | None]:
        """The text that the user's template makes of a row."""
        values, marks, suspicious = template.values(record.columns), None, False
        if self._specials is not None:
            suspicious = self._specials.is_suspicious(values)
            if suspicious or self._specials.is_hinted(values):
                marks = self._marks_for(values, record)
        try:
            if marks is None:
                return self._limit.run(template.render, record.columns), None
            text = self._limit.run(template.render_marked, record.columns, marks)
        except Exception as error:  # a template is a program and may raise anything
            raise RowError(Status.TEMPLATE_ERROR, f"{record.where}: the template fails: {_reason(error)}") from error
        return text, marks if suspicious or marks.are_in(text) else None

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

    def _text(self, text: str, name: str, record: PromptRecord, marks: Marks | None) -> _Text:
        wraps = self._wraps_text and not record.raw
        if not text and (wraps or not self._tokenizer.adds_bos):
            raise RowError(Status.BAD_ROW, f"{record.where}: {name} is empty")
        if wraps:
            return self._chat([{"role": "user", "content": text}], marks, record)
        (text,) = self._bounded([text], record)
        return _Text(_encodable(text, record), is_chat=False, marks=marks)

    def _chat(self, messages: list[dict[str, Any]], marks: Marks | None, record: PromptRecord) -> _Text:
        if self._config.raw:
            raise RowError(Status.BAD_ROW, f"{record.where}: --raw sends texts as they are, but the row holds a chat")
        if not self._tokenizer.has_chat_template:
            raise RowError(
                Status.BAD_ROW,
                f"{record.where}: the row holds a chat, but the model has no chat template; give the prompt as text",
            )
        if self._config.system is not None and all(m["role"] not in ("system", "developer") for m in messages):
            messages = [{"role": "system", "content": self._config.system}, *messages]
        contents = [message.get("content", "") for message in messages]
        bounded = self._bounded(contents, record)
        if bounded is not contents:
            messages = [{**message, "content": text} for message, text in zip(messages, bounded, strict=True)]
        continued = messages[-1]["role"] == "assistant"
        try:
            text = self._limit.run(self._render_chat, messages, continued)
        except Exception as error:  # a template is a program of the model's author and may raise anything
            raise RowError(
                Status.TEMPLATE_ERROR, f"{record.where}: the model's chat template refuses the chat: {_reason(error)}"
            ) from error
        return _Text(_encodable(text, record), is_chat=True, marks=marks)

    def _bounded(self, texts: list[str], record: PromptRecord) -> list[str]:
        """The texts of a prompt; where they have more characters than its tokens can hold, cut down to that, or
        refused: rendering and tokenizing tens of megabytes takes long, and gigabytes of memory."""
        length = sum(map(len, texts))
        if self._max_tokens is None or length <= ENORMOUS:
            return texts
        most = self._tokenizer.most_characters(self._max_tokens)
        if length <= most:
            return texts
        if self._on_too_long == "error":
            raise RowError(
                Status.TOO_LONG,
                f"{record.where}: the prompt has {length:,} characters, more than {self._max_tokens:,} tokens hold; "
                "shorten it, or pass --on-too-long truncate-left",
            )
        return _cut(texts, length - most, from_left=self._on_too_long == "truncate-left")

    def _token_ids(self, value: object, record: PromptRecord) -> tuple[int, ...]:
        given = value
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):  # no JSON, thousands of digits, or nested too deeply
                value = None
        if not isinstance(value, list | tuple) or not value:
            what = f"the text {reprlib.repr(given)}" if isinstance(given, str) else reprlib.repr(given)
            raise RowError(
                Status.BAD_ROW,
                f"{record.where}: prompt_token_ids is {what}, but it must be a list of token ids with at least one, "
                "like [1, 2]",
            )
        limit = self._tokenizer.vocab_size
        if _INTEGERS.issuperset(map(type, value)) and min(value) >= 0 and max(value) < limit:
            return tuple(value)
        for item in value:
            if isinstance(item, bool) or not isinstance(item, Integral) or not 0 <= int(item) < limit:
                raise RowError(
                    Status.BAD_ROW,
                    f"{record.where}: prompt_token_ids holds {reprlib.repr(item)}; the model's token ids are 0 to "
                    f"{limit - 1}",
                )
        return tuple(map(int, value))

    def _encode_guarded(self, draft: _Text, marks: Marks) -> list[int] | Exception:
        assert self._specials is not None, "only a guarded prompt has marks"
        if self._encoder is None:  # a second for a large vocabulary, so only where it is needed
            self._encoder = GuardedEncoder(self._tokenizer, self._specials)
        try:
            return self._encoder.encode(draft.text, marks, add_special_tokens=not draft.is_chat)
        except Exception as error:  # tokenizers of different kinds raise anything
            return error

    def _checked(self, ids: list[int] | Exception, record: PromptRecord) -> tuple[int, ...] | RowError:
        if isinstance(ids, SpecialTokenError):
            return _inseparable(ids, record)
        if isinstance(ids, Exception):
            return RowError(Status.BAD_ROW, f"{record.where}: the prompt cannot be tokenized: {_reason(ids)}")
        if not ids:
            return RowError(Status.BAD_ROW, f"{record.where}: the prompt has no tokens")
        return tuple(ids)


def _cut(texts: list[str], surplus: int, from_left: bool) -> list[str]:
    """The texts with `surplus` characters less, from the beginning of the first or the end of the last."""
    kept = texts if from_left else texts[::-1]
    result = []
    for text in kept:
        drop = min(surplus, len(text))
        surplus -= drop
        result.append(text[drop:] if from_left else text[: len(text) - drop])
    return result if from_left else result[::-1]


def require_prompt_column(columns: Iterable[str], config: PromptConfig) -> None:
    """Checks at the start of a job that rows with these columns can have a prompt.

    Raises UsageError that lists the columns there are and the flags to use, also for a template that cannot be parsed
    and for a system text that has no place.
    """
    _check_system(config)
    names = list(columns)
    there = "The input has the columns " + listed(names) if names else "The input has no columns"
    if config.template is not None:
        used = RowTemplate(config.template).variables
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
        example = f" (perhaps --prompt-column {listed([likely])})" if likely else ""
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


def _inseparable(error: SpecialTokenError, record: PromptRecord) -> RowError:
    return RowError(
        Status.BAD_ROW,
        f"{record.where}: the special token {error} cannot be kept apart from text that spells it; "
        "pass --allow-special-tokens if it is meant as the token",
    )


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
