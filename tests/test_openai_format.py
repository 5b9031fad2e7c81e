"""Completions as lines of the OpenAI batch API's output, against the shape that its clients read."""

import copy
import json
import math
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedgen.data.openai_batch import Endpoint
from pagedgen.data.openai_format import OpenAiRow, response_line


def completion(sample: int = 0, **values: Any) -> dict[str, Any]:
    """An output row's own columns, as they are read from Parquet."""
    return {
        "row": 7,
        "id": "a",
        "sample": sample,
        "status": "ok",
        "text": "deep blue",
        "finish_reason": "stop",
        "error": None,
        "prompt_tokens": 5,
        "cached_tokens": 0,
        "completion_tokens": 3,
        "cumulative_logprob": None,
        "score": None,
    } | values


def failed(sample: int = 0, **values: Any) -> dict[str, Any]:
    return completion(
        sample,
        **{"status": "nan_logits", "text": None, "finish_reason": None, "error": "The model computed NaN."} | values,
    )


def token(token_id: int, text: str, logprob: float, *top: tuple[int, str, float]) -> dict[str, Any]:
    names = ("token_id", "token", "logprob")
    return {
        **dict(zip(names, (token_id, text, logprob), strict=True)),
        "top": [dict(zip(names, one, strict=True)) for one in top],
    }


DEEP = token(3, "deep", -0.5, (3, "deep", -0.5), (4, "wide", -1.0))
BLUE = token(9, "Ġblue", -3.0, (5, "Ġgreen", -0.25), (6, "Ġgrey", -2.0))


def write(*completions: Mapping[str, Any], endpoint: Endpoint | None = "chat", custom_id: str = "a") -> dict[str, Any]:
    return response_line(OpenAiRow(7, custom_id, endpoint, completions), "some/model", 1_700_000_000)


def body_of(*completions: Mapping[str, Any], endpoint: Endpoint = "chat") -> dict[str, Any]:
    body: dict[str, Any] = write(*completions, endpoint=endpoint)["response"]["body"]
    return body


NULL = type(None)
TOKEN = {"token": str, "logprob": (float, NULL), "bytes": NULL}
CHAT_LOGPROBS = {"content": [{**TOKEN, "top_logprobs": [TOKEN]}], "refusal": NULL}
TEXT_LOGPROBS = {"tokens": [str], "token_logprobs": [(float, NULL)], "top_logprobs": [dict], "text_offset": [int]}
CHOICES: dict[Endpoint, dict[str, Any]] = {
    "chat": {
        "index": int,
        "message": {"role": {"assistant"}, "content": str, "refusal": NULL},
        "logprobs": (NULL, CHAT_LOGPROBS),
        "finish_reason": {"stop", "length"},
    },
    "completion": {
        "index": int,
        "text": str,
        "logprobs": (NULL, TEXT_LOGPROBS),
        "finish_reason": {"stop", "length"},
    },
}
USAGE = {
    "prompt_tokens": int,
    "completion_tokens": int,
    "total_tokens": int,
    "prompt_tokens_details": {"cached_tokens": int},
}


def line_schema(endpoint: Endpoint) -> dict[str, Any]:
    body = {
        "id": str,
        "object": {{"chat": "chat.completion", "completion": "text_completion"}[endpoint]},
        "created": int,
        "model": str,
        "choices": [CHOICES[endpoint]],
        "usage": USAGE,
    }
    response = {"status_code": {200}, "request_id": str, "body": body}
    return {
        "id": str,
        "custom_id": str,
        "response": (NULL, response),
        "error": (NULL, {"code": str, "message": str}),
    }


def matches(value: object, schema: Any) -> bool:
    """Whether a value has a shape: an object's fields, a list's items, one of several, a set of values, or a type."""
    if isinstance(schema, tuple):
        return any(matches(value, one) for one in schema)
    if isinstance(schema, dict):
        return (
            isinstance(value, dict)
            and value.keys() == schema.keys()
            and all(matches(value[name], member) for name, member in schema.items())
        )
    if isinstance(schema, list):
        return isinstance(value, list) and all(matches(item, schema[0]) for item in value)
    return value in schema if isinstance(schema, set) else type(value) is schema


def test_a_chat_completion() -> None:
    assert write(completion(cached_tokens=4)) == {
        "id": "batch_req_7",
        "custom_id": "a",
        "response": {
            "status_code": 200,
            "request_id": "req_7",
            "body": {
                "id": "chatcmpl-7",
                "object": "chat.completion",
                "created": 1_700_000_000,
                "model": "some/model",
                "choices": [
                    {
                        "index": 0,
                        "message": {"role": "assistant", "content": "deep blue", "refusal": None},
                        "logprobs": None,
                        "finish_reason": "stop",
                    }
                ],
                "usage": {
                    "prompt_tokens": 5,
                    "completion_tokens": 3,
                    "total_tokens": 8,
                    "prompt_tokens_details": {"cached_tokens": 4},
                },
            },
        },
        "error": None,
    }


def test_a_text_completion() -> None:
    body = body_of(completion(finish_reason="length"), endpoint="completion")
    assert (body["id"], body["object"]) == ("cmpl-7", "text_completion")
    assert body["choices"] == [{"index": 0, "text": "deep blue", "logprobs": None, "finish_reason": "length"}]


@pytest.mark.parametrize("endpoint", ["chat", "completion"])
def test_samples_are_choices_and_the_prompt_counts_once(endpoint: Endpoint) -> None:
    body = body_of(
        completion(0, text="x", cached_tokens=4),
        completion(1, text="y", completion_tokens=10),
        completion(2, text="", completion_tokens=1),
        endpoint=endpoint,
    )
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert [choice["message"]["content"] if endpoint == "chat" else choice["text"] for choice in body["choices"]] == [
        "x",
        "y",
        "",
    ]
    assert body["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 14,
        "total_tokens": 19,
        "prompt_tokens_details": {"cached_tokens": 4},
    }


def test_samples_that_failed_are_left_out_of_the_choices() -> None:
    written = write(failed(0, completion_tokens=8), completion(1), failed(2))
    assert written["error"] is None
    assert [choice["index"] for choice in written["response"]["body"]["choices"]] == [1]
    assert written["response"]["body"]["usage"]["total_tokens"] == 8


@pytest.mark.parametrize("endpoint", ["chat", "completion", None])
def test_a_row_that_failed_is_an_error(endpoint: Endpoint | None) -> None:
    written = write(failed(), failed(1, status="unfit", error="It does not fit."), endpoint=endpoint, custom_id="b")
    assert written == {
        "id": "batch_req_7",
        "custom_id": "b",
        "response": None,
        "error": {"code": "nan_logits", "message": "The model computed NaN."},
    }


def test_chat_logprobs() -> None:
    (choice,) = body_of(completion(logprobs=[DEEP, BLUE]))["choices"]
    assert choice["logprobs"] == {
        "content": [
            {
                "token": "deep",
                "logprob": -0.5,
                "bytes": None,
                "top_logprobs": [
                    {"token": "deep", "logprob": -0.5, "bytes": None},
                    {"token": "wide", "logprob": -1.0, "bytes": None},
                ],
            },
            {
                "token": "Ġblue",
                "logprob": -3.0,
                "bytes": None,
                "top_logprobs": [
                    {"token": "Ġgreen", "logprob": -0.25, "bytes": None},
                    {"token": "Ġgrey", "logprob": -2.0, "bytes": None},
                ],
            },
        ],
        "refusal": None,
    }


def test_text_logprobs() -> None:
    (choice,) = body_of(completion(logprobs=[DEEP, BLUE, token(2, "<end>", -0.125)]), endpoint="completion")["choices"]
    assert choice["logprobs"] == {
        "tokens": ["deep", "Ġblue", "<end>"],
        "token_logprobs": [-0.5, -3.0, -0.125],
        "top_logprobs": [
            {"deep": -0.5, "wide": -1.0},
            {"Ġgreen": -0.25, "Ġgrey": -2.0, "Ġblue": -3.0},
            {"<end>": -0.125},
        ],
        "text_offset": [0, 4, 9],
    }


def test_of_two_top_tokens_with_one_spelling_the_likelier_is_kept() -> None:
    entry = token(8, "x", -3.0, (5, "x", -0.25), (6, "x", -2.0))
    (choice,) = body_of(completion(logprobs=[entry]), endpoint="completion")["choices"]
    assert choice["logprobs"]["top_logprobs"] == [{"x": -0.25}]


@pytest.mark.parametrize("endpoint", ["chat", "completion"])
def test_logprobs_of_no_tokens(endpoint: Endpoint) -> None:
    (choice,) = body_of(completion(logprobs=[]), endpoint=endpoint)["choices"]
    assert choice["logprobs"] is not None
    assert matches(choice, CHOICES[endpoint])


@pytest.mark.parametrize(
    ("logprob", "expected"), [(-math.inf, -9999.0), (math.nan, None), (math.inf, None), (None, None), (-0.5, -0.5)]
)
def test_logprobs_that_json_cannot_hold(logprob: float | None, expected: float | None) -> None:
    entry = token(8, "x", -1.0, (5, "y", -1.0)) | {"logprob": logprob}
    (choice,) = body_of(completion(logprobs=[entry]))["choices"]
    assert choice["logprobs"]["content"][0]["logprob"] == expected
    (choice,) = body_of(completion(logprobs=[entry]), endpoint="completion")["choices"]
    assert choice["logprobs"]["token_logprobs"] == [expected]
    assert choice["logprobs"]["top_logprobs"] == [{"y": -1.0, "x": expected}]


LOGPROB = st.floats(allow_nan=True, allow_infinity=True)
TOP = st.fixed_dictionaries({"token_id": st.integers(0, 9), "token": st.text(max_size=3), "logprob": LOGPROB})
ENTRY = st.builds(lambda one, top: one | {"top": top}, TOP, st.lists(TOP, max_size=3))
COUNT = st.integers(0, 1000)
OK = st.fixed_dictionaries(
    {
        "text": st.text(max_size=9),
        "finish_reason": st.sampled_from(["stop", "length"]),
        "prompt_tokens": COUNT,
        "cached_tokens": COUNT,
        "completion_tokens": COUNT,
    },
    optional={"logprobs": st.none() | st.lists(ENTRY, max_size=4)},
).map(lambda values: completion() | values)
FAILED = st.builds(
    lambda status, error: failed(status=status, error=error), st.sampled_from(["bad_row", "unfit"]), st.text()
)


@given(st.lists(OK | FAILED, min_size=1, max_size=4), st.sampled_from(["chat", "completion"]), st.text())
def test_any_line_has_the_shape_that_clients_read(
    completions: list[dict[str, Any]], endpoint: Endpoint, custom_id: str
) -> None:
    completions = [one | {"sample": sample} for sample, one in enumerate(completions)]
    before = copy.deepcopy(completions)
    written = write(*completions, endpoint=endpoint, custom_id=custom_id)
    assert matches(written, line_schema(endpoint))
    assert (written["response"] is None) is all(one["status"] != "ok" for one in completions)
    assert (written["response"] is None) is not (written["error"] is None)
    assert json.loads(json.dumps(written, allow_nan=False)) == written
    assert json.dumps(write(*completions, endpoint=endpoint, custom_id=custom_id)) == json.dumps(written)
    assert repr(completions) == repr(before)
