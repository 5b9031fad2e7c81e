"""Completions in the shape of the OpenAI batch API's output: one line a request."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from operator import itemgetter
from typing import Any

import pyarrow as pa

from pagedgen.data.columns import to_json
from pagedgen.data.merge import plain_rows
from pagedgen.data.openai_batch import Endpoint
from pagedgen.request import Status

# The API's own number for a token that is as good as impossible.
_VERY_UNLIKELY = -9999.0


@dataclass(frozen=True, slots=True)
class OpenAiRow:
    """One input row with all its completions.

    row: position in the input, from 0. custom_id: the request's own, else the row's id.
    endpoint: which of the two the request is for; None where the row is not good enough to tell, and so has no
        completion that is `ok`.
    completions: one or more, in order of `sample`, each the values of the output's columns of that name: `sample`,
        `status`, `text`, `finish_reason`, `error`, `prompt_tokens`, `cached_tokens`, `completion_tokens` and, where it
        has any, `logprobs`: a list of {token_id, token, logprob, top: [{token_id, token, logprob}]} or None.
    """

    row: int
    custom_id: str
    endpoint: Endpoint | None
    completions: Sequence[Mapping[str, Any]]


def response_line(row: OpenAiRow, model: str, created: int) -> dict[str, Any]:
    """The line for a row: a pure function of its arguments, made of what JSON can hold, without NaN or infinities.

    The choices are the completions that are `ok`, with their sample as index; where others of the row failed, indexes
    are missing. A row of which none is `ok` has a null response and, as error, the status and reason of its first one.
    In the usage the prompt counts once, and completion tokens are those of the choices.

    model: the model's name. created: seconds since 1970, the same for the whole run.
    """
    completed = [completion for completion in row.completions if completion["status"] == Status.OK]
    line = {"id": f"batch_req_{row.row}", "custom_id": row.custom_id, "response": None, "error": None}
    if not completed:
        first = row.completions[0]
        return line | {"error": {"code": first["status"], "message": first["error"]}}
    assert row.endpoint is not None, "a row that was completed has an endpoint"
    chat = row.endpoint == "chat"
    body = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{row.row}",
        "object": "chat.completion" if chat else "text_completion",
        "created": created,
        "model": model,
        "choices": [_chat_choice(completion) if chat else _text_choice(completion) for completion in completed],
        "usage": _usage(completed),
    }
    return line | {"response": {"status_code": 200, "request_id": f"req_{row.row}", "body": body}}


def openai_lines(tables: Iterable[pa.Table], *, default: Endpoint, model: str, created: int) -> Iterator[str]:
    """The lines for merged output tables, which hold the input's `url` where it has one. default: the endpoint of rows
    without one. model, created: as for `response_line`."""
    completions = chain.from_iterable(map(plain_rows, tables))
    for number, of_row in groupby(completions, key=itemgetter("row")):
        found = list(of_row)
        url = found[0].get("url")
        endpoint: Endpoint = ("chat" if "chat" in url else "completion") if isinstance(url, str) else default
        yield to_json(response_line(OpenAiRow(number, found[0]["id"], endpoint, found), model, created)) + "\n"


def _usage(completed: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    prompt_tokens = completed[0]["prompt_tokens"]
    completion_tokens = sum(completion["completion_tokens"] for completion in completed)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        # The samples share one computation of the prompt, so that their numbers must not be added.
        "prompt_tokens_details": {"cached_tokens": max(completion["cached_tokens"] for completion in completed)},
    }


def _chat_choice(completion: Mapping[str, Any]) -> dict[str, Any]:
    entries = completion.get("logprobs")
    return {
        "index": completion["sample"],
        "message": {"role": "assistant", "content": completion["text"], "refusal": None},
        "logprobs": None if entries is None else {"content": [*map(_chat_logprob, entries)], "refusal": None},
        "finish_reason": completion["finish_reason"],
    }


def _text_choice(completion: Mapping[str, Any]) -> dict[str, Any]:
    entries = completion.get("logprobs")
    return {
        "index": completion["sample"],
        "text": completion["text"],
        "logprobs": None if entries is None else _text_logprobs(entries),
        "finish_reason": completion["finish_reason"],
    }


def _chat_logprob(entry: Mapping[str, Any]) -> dict[str, Any]:
    return _token(entry) | {"top_logprobs": [_token(other) for other in entry["top"]]}


def _token(entry: Mapping[str, Any]) -> dict[str, Any]:
    # Bytes are what the token's text is in UTF-8; the vocabulary's spelling of a token does not tell.
    return {"token": entry["token"], "logprob": _number(entry["logprob"]), "bytes": None}


def _text_logprobs(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Four lists with an item for each token. Offsets count the characters of the tokens as they are spelt here."""
    offsets, offset = [], 0
    for entry in entries:
        offsets.append(offset)
        offset += len(entry["token"])
    return {
        "tokens": [entry["token"] for entry in entries],
        "token_logprobs": [_number(entry["logprob"]) for entry in entries],
        "top_logprobs": [_top(entry) for entry in entries],
        "text_offset": offsets,
    }


def _top(entry: Mapping[str, Any]) -> dict[str, float | None]:
    """The likeliest tokens, best first, and the chosen one, as in the API; of two with one spelling, the likelier."""
    top: dict[str, float | None] = {}
    for other in (*entry["top"], entry):
        top.setdefault(other["token"], _number(other["logprob"]))
    return top


def _number(logprob: float | None) -> float | None:
    """The log-probability as JSON can hold it: null for NaN."""
    if logprob is None or math.isfinite(logprob):
        return logprob
    return _VERY_UNLIKELY if logprob == -math.inf else None
