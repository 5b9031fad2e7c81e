"""Requests of an OpenAI batch file, which wraps each one in an envelope, as rows in pagedgen's own columns.

{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...], "max_tokens": 9}}
"""

import json
import re
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from pagedgen.errors import RowError
from pagedgen.params import OPTIONS
from pagedgen.request import Status

Endpoint = Literal["chat", "completion"]

_ENVELOPE = frozenset({"custom_id", "url", "body"})
_PATHS: Mapping[Endpoint, str] = {"chat": "/v1/chat/completions", "completion": "/v1/completions"}
# Azure's files leave out the `v1`; the base of a full address may have a path of its own, like `/openai/v1`.
_URL = re.compile(r"(?:https?://[^/?#\s]+(?:/[^/?#\s]+)*/v1/|/?(?:v1/)?)(chat/)?completions/?")

# Fields that change nothing of what is generated here.
_IGNORED = frozenset(
    {
        "cache_salt",
        "metadata",
        "model",
        "parallel_tool_calls",
        "prediction",
        "priority",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "service_tier",
        "store",
        "stream",
        "stream_options",
        "user",
    }
)
# Fields that ask for what is not done here: why, and the values that ask for nothing.
_NO_TOOLS, _ONLY_TEXT = "tools cannot be called", "only text is generated"
_NOT_STEERED = "there is no such setting; write it into the prompt"
_UNSUPPORTED: Mapping[str, tuple[str, tuple[object, ...]]] = {
    "tools": (_NO_TOOLS, ([],)),
    "tool_choice": (_NO_TOOLS, ("none", "auto")),
    "functions": (_NO_TOOLS, ([],)),
    "function_call": (_NO_TOOLS, ("none", "auto")),
    "web_search_options": ("the web cannot be searched", ()),
    "response_format": ("only plain text is generated, like with {'type': 'text'}", ({"type": "text"},)),
    "modalities": (_ONLY_TEXT, ([], ["text"])),
    "audio": (_ONLY_TEXT, ()),
    "moderation": ("nothing is moderated", ()),
    "reasoning_effort": (_NOT_STEERED, ("medium",)),
    "verbosity": (_NOT_STEERED, ("medium",)),
    "echo": ("the prompt is not repeated in the completion", (False,)),
    "suffix": ("texts are only continued at their end", ()),
    # What vLLM adds to the two endpoints, with its defaults.
    "add_generation_prompt": ("the chat's last message decides what is continued", (True,)),
    "continue_final_message": ("the chat's last message decides what is continued", (False,)),
    "include_stop_str_in_output": ("the text is cut before a stop string", (False,)),
    "length_penalty": ("beam search has a command of its own", (1,)),
    "skip_special_tokens": ("special tokens are not written", (True,)),
    "spaces_between_special_tokens": ("special tokens are not written", (True,)),
    "use_beam_search": ("beam search has a command of its own", (False,)),
}
# Options whose name and meaning are the same in a body and in a row.
_SAME = frozenset(option.name for option in OPTIONS) - {"logprobs", "max_tokens"}
_COMMON = _SAME | _IGNORED | {"best_of", "logprobs", "max_completion_tokens", "max_tokens"}
_FIELDS: Mapping[Endpoint, frozenset[str]] = {
    "chat": _COMMON | {"messages", "top_logprobs"},
    "completion": _COMMON | {"prompt"},
}


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """A request as a row.

    columns: `messages`, `prompt` or `prompt_token_ids`, and the options that the body gives, by pagedgen's names; their
        values are the body's own objects. endpoint: "completion" means that `prompt` is to be continued as it is,
        without the model's chat template.
    """

    columns: dict[str, Any]
    endpoint: Endpoint


def is_batch(names: Iterable[str]) -> bool:
    """Whether rows with columns of these names are batch requests; `method` may be missing."""
    return set(names) >= _ENVELOPE


def request_columns(columns: Mapping[str, Any], where: str) -> BatchRequest:
    """The request in the row of a batch file.

    What the body does not say comes, as for any row, from the command line and then from the model's generation config,
    not from OpenAI's defaults (temperature 1, or 16 tokens at /v1/completions). Null and empty text mean not given. The
    values of options, and the messages, are checked where those of any row are; a chat that ends in an assistant's
    message is continued there, too.

    columns: the row's columns; the body is an object or the JSON text of one.
    where: the row's place in the input, for the error.
    Raises RowError(BAD_ROW) that names the field which cannot be used: a broken envelope, no prompt or several of them,
    a field that is unknown, or one that asks for what is not done here.
    """
    endpoint = _check_envelope(columns, where)
    body = {
        name: value
        for name, value in _body(columns["body"], where).items()
        # An empty prompt is one: it has a BOS token with models that begin with one.
        if value is not None and (value != "" or name == "prompt")
    }
    prompt = _prompt(body, endpoint, where)
    _check_fields(body, endpoint, where)
    same = {name: value for name, value in body.items() if name in _SAME}
    for name in ("stop", "bad_words"):
        if isinstance(same.get(name), str):  # a list, as a lone text in a column may be the JSON text of one
            same[name] = [same[name]]
    options = _max_tokens(body, where) | same | _logprobs(body, endpoint, where)
    return BatchRequest(prompt | options, endpoint)


def model_of(columns: Mapping[str, Any]) -> str | None:
    """The model that a batch request names, which does not choose the model here; None where it names none."""
    body = _parsed(columns.get("body"))
    model = body.get("model") if isinstance(body, Mapping) else None
    return model if isinstance(model, str) and model else None


def _check_envelope(columns: Mapping[str, Any], where: str) -> Endpoint:
    custom_id, method, url = columns.get("custom_id"), columns.get("method"), columns.get("url")
    if not isinstance(custom_id, str) or not custom_id:
        _refuse(where, f"custom_id must be a text that is not empty, not {reprlib.repr(custom_id)}")
    if method is not None and not (isinstance(method, str) and method.upper() in ("POST", "")):
        _refuse(where, f"method is {reprlib.repr(method)}, but only POST can be used")
    match = _URL.fullmatch(url.strip()) if isinstance(url, str) else None
    if match is None:
        _refuse(where, f"url is {reprlib.repr(url)}, but it must be {' or '.join(_PATHS.values())}")
    if columns.get("body") is None:
        _refuse(where, "the request has no body")
    return "chat" if match[1] else "completion"


def _parsed(body: object) -> object:
    """The value of a body that is JSON text, else the body as it is."""
    if isinstance(body, str):
        try:
            return json.loads(body)
        except (ValueError, RecursionError):
            return body
    return body


def _body(body: object, where: str) -> Mapping[str, Any]:
    parsed = _parsed(body)
    if not isinstance(parsed, Mapping):
        kind = "a text that is not JSON" if parsed is body and isinstance(body, str) else type(parsed).__name__
        _refuse(where, f"body must be an object, not {kind}")
    return parsed


def _prompt(body: Mapping[str, Any], endpoint: Endpoint, where: str) -> dict[str, Any]:
    """The one column that holds the request's prompt."""
    name = "messages" if endpoint == "chat" else "prompt"
    if name not in body:
        _refuse(where, f"body has no {name}, which {_PATHS[endpoint]} needs")
    value = body[name]
    if endpoint == "chat":
        return {"messages": value}
    if isinstance(value, list | tuple) and value and all(isinstance(item, str | list | tuple) for item in value):
        if len(value) > 1:
            _refuse(where, f"body.prompt holds {len(value)} prompts, but a row is one; write one line for each")
        value = value[0]
    if isinstance(value, str):
        return {"prompt": value}
    if not isinstance(value, list | tuple) or not value or not all(map(_is_whole, value)):
        shown = reprlib.repr(body[name])
        _refuse(where, f"body.prompt is {shown}, but it must be a text or a list of token ids, not empty")
    return {"prompt_token_ids": value}


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_fields(body: Mapping[str, Any], endpoint: Endpoint, where: str) -> None:
    for name, value in body.items():
        if name in _UNSUPPORTED:
            why, neutral = _UNSUPPORTED[name]
            if _without_nulls(value) not in neutral:
                _refuse(where, f"body.{name} is {reprlib.repr(value)}, but {why}")
        elif name not in _FIELDS[endpoint]:
            # OpenAI refuses these too; a misspelt option would change every completion and nobody would know.
            _refuse(where, f"body has {reprlib.repr(name)}, which is no field of {_PATHS[endpoint]}; leave it out")
    best_of = body.get("best_of", 1)
    if best_of not in (1, body.get("n", 1)):
        _refuse(
            where,
            f"body.best_of is {reprlib.repr(best_of)}, but no more than n completions are drawn; leave it out",
        )


def _without_nulls(value: object) -> object:
    """A column of structs has the members of all rows' objects, null where a row does not have them."""
    if isinstance(value, Mapping):
        return {name: member for name, member in value.items() if member is not None}
    return value


def _max_tokens(body: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Both names mean the same; which of two numbers is meant, nobody can tell (OpenAI refuses both at once)."""
    given = [body[name] for name in ("max_completion_tokens", "max_tokens") if name in body]
    if not given:
        return {}
    if given[0] != given[-1]:
        _refuse(
            where,
            f"body.max_completion_tokens is {reprlib.repr(given[0])}, but body.max_tokens {reprlib.repr(given[1])}; "
            "give one of them",
        )
    return {"max_tokens": given[0]}


def _logprobs(body: Mapping[str, Any], endpoint: Endpoint, where: str) -> dict[str, Any]:
    """A number at /v1/completions; at /v1/chat/completions whether there are any, and how many in `top_logprobs`."""
    wanted, top = body.get("logprobs"), body.get("top_logprobs", 0)
    if endpoint == "completion":
        return {} if wanted is None else {"logprobs": wanted}
    if wanted is True:
        return {"logprobs": top}
    if wanted is not None and wanted is not False:
        _refuse(where, f"body.logprobs is {reprlib.repr(wanted)}, but at {_PATHS[endpoint]} it must be true or false")
    if top != 0:
        _refuse(where, f"body.top_logprobs is {reprlib.repr(top)}, but body.logprobs is not true")
    return {}


def _refuse(where: str, reason: str) -> NoReturn:
    raise RowError(Status.BAD_ROW, f"{where}: {reason}")
