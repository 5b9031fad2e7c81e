"""Reading a chat out of a row: a list of messages, or the JSON text of one."""

import json
import reprlib
from collections.abc import Mapping
from typing import Any, NoReturn

from pagedgen.errors import RowError
from pagedgen.request import Status


def looks_like_messages(value: object) -> bool:
    """Whether a value in a text column is meant as a chat: a list of objects."""
    return isinstance(value, list | tuple) and len(value) > 0 and all(isinstance(item, Mapping) for item in value)


def as_messages(value: object, column: str, where: str) -> list[dict[str, Any]]:
    """The chat in a column: dicts with a `role`, a text `content`, and whatever else they carry, without nulls.

    Contents in parts (`[{"type": "text", "text": ...}]`) are joined as they are.
    Raises RowError(BAD_ROW) that says which message is wrong, and how.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:  # no JSON, a number of thousands of digits, or nested too deeply
            reason = error if isinstance(error, json.JSONDecodeError) else "it is beyond what can be read"
            _refuse(where, f"{column} must be a list of messages, but its text is not JSON ({reason})")
    if not isinstance(value, list | tuple):
        _refuse(where, f"{column} must be a list of messages, not {type(value).__name__}")
    if not value:
        _refuse(where, f"{column} has no messages")
    return [_as_message(item, f"{column}[{i}]", where) for i, item in enumerate(value)]


def _as_message(item: object, name: str, where: str) -> dict[str, Any]:
    if not isinstance(item, Mapping):
        _refuse(where, f"{name} must be an object with role and content, not {type(item).__name__}")
    role = item.get("role")
    if not isinstance(role, str) or not role:
        _refuse(where, f"{name} has no role (such as system, user or assistant)")
    message = {str(key): value for key, value in item.items() if value is not None}
    if item.get("content") is not None:
        message["content"] = _as_text(item["content"], name, where)
    elif not item.get("tool_calls"):  # a call stands in for the content of an assistant's message
        _refuse(where, f"{name} has no content")
    return message


def _as_text(content: object, name: str, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        _refuse(where, f"the content of {name} must be a text or a list of text parts, not {type(content).__name__}")
    texts: list[str] = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text":
            _refuse(
                where, f"the content of {name} has a part of type {reprlib.repr(kind)}, but only text parts can be used"
            )
        text = part.get("text")
        if not isinstance(text, str):
            _refuse(where, f"the content of {name} has a text part without text")
        texts.append(text)
    return "".join(texts)


def _refuse(where: str, reason: str) -> NoReturn:
    raise RowError(Status.BAD_ROW, f"{where}: {reason}")
