"""Requests of OpenAI batch files as rows, and what is refused in them."""

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedgen.data.openai_batch import BatchRequest, is_batch, model_of, request_columns
from pagedgen.errors import RowError
from pagedgen.params import OPTIONS, resolve_params
from pagedgen.request import SamplingParams, Status

MESSAGES = [{"role": "user", "content": "How deep is the sea?"}]
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
WHERE = "batch.jsonl line 3"


def line(url: str = CHAT, **body: Any) -> dict[str, Any]:
    prompt = {"messages": MESSAGES} if url == CHAT else {"prompt": "The sea is"}
    return {"custom_id": "a", "method": "POST", "url": url, "body": prompt | body}


def options(url: str = CHAT, **body: Any) -> dict[str, Any]:
    """What a body gives besides its prompt."""
    columns = request_columns(line(url, **body), WHERE).columns
    return {name: value for name, value in columns.items() if name not in ("messages", "prompt")}


def refusal(columns: dict[str, Any]) -> str:
    with pytest.raises(RowError) as caught:
        request_columns(columns, WHERE)
    assert caught.value.status is Status.BAD_ROW
    message = caught.value.message
    assert message.startswith(f"{WHERE}: ")
    assert "\n" not in message
    return message.removeprefix(f"{WHERE}: ")


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["custom_id", "method", "url", "body"], True),
        (("body", "url", "custom_id", "note"), True),
        (["custom_id", "method", "url"], False),
        (["custom_id", "body", "method"], False),
        (["url", "body"], False),
        (["prompt"], False),
        ([], False),
    ],
)
def test_a_batch_has_three_columns(names: list[str], expected: bool) -> None:
    assert is_batch(iter(names)) is expected


@pytest.mark.parametrize(
    "url",
    ["{}", "{}/", " {} ", "https://api.openai.com{}", "http://localhost:8000{}/", "https://api.groq.com/openai{}"],
)
@pytest.mark.parametrize(("path", "endpoint"), [(CHAT, "chat"), (COMPLETION, "completion")])
def test_spellings_of_an_url(url: str, path: str, endpoint: str) -> None:
    columns = line(path) | {"url": url.format(path)}
    assert request_columns(columns, WHERE).endpoint == endpoint


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_an_url_may_leave_out_its_beginning(path: str) -> None:
    full = request_columns(line(path), WHERE)
    for url in (path.removeprefix("/"), path.removeprefix("/v1"), path.removeprefix("/v1/")):
        assert request_columns(line(path) | {"url": url}, WHERE) == full


def test_a_chat_request() -> None:
    assert request_columns(line(max_tokens=9), WHERE) == BatchRequest({"messages": MESSAGES, "max_tokens": 9}, "chat")


@pytest.mark.parametrize(
    ("prompt", "columns"),
    [
        ("The sea is", {"prompt": "The sea is"}),
        ("", {"prompt": ""}),
        ('["a"]', {"prompt": '["a"]'}),
        (["The sea is"], {"prompt": "The sea is"}),
        ([5, 6], {"prompt_token_ids": [5, 6]}),
        ([5], {"prompt_token_ids": [5]}),
        ([[5, 6]], {"prompt_token_ids": [5, 6]}),
        (((5, 6),), {"prompt_token_ids": (5, 6)}),
    ],
)
def test_forms_of_a_prompt(prompt: object, columns: dict[str, Any]) -> None:
    assert request_columns(line(COMPLETION, prompt=prompt), WHERE) == BatchRequest(columns, "completion")


@pytest.mark.parametrize("method", [None, "", "POST", "post"])
def test_the_method_may_be_missing(method: str | None) -> None:
    columns = line() | {"method": method}
    assert request_columns(columns, WHERE).columns == {"messages": MESSAGES}
    del columns["method"]
    assert request_columns(columns, WHERE).columns == {"messages": MESSAGES}


def test_a_body_may_be_json_text() -> None:
    columns = line(temperature=0.5, model="m")
    text = columns | {"body": json.dumps(columns["body"])}
    assert request_columns(text, WHERE) == request_columns(columns, WHERE)
    assert model_of(text) == "m"


SAME = {
    "temperature": 0.5,
    "top_k": 5,
    "top_p": 0.9,
    "min_p": 0.1,
    "seed": 7,
    "stop": ["a", "b"],
    "stop_token_ids": [3],
    "min_tokens": 2,
    "ignore_eos": True,
    "n": 3,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
    "logit_bias": {"11": -100},
    "bad_words": ["c"],
    "prompt_logprobs": 1,
}


def test_every_option_is_in_a_table_here() -> None:
    assert {*SAME, "max_tokens", "logprobs"} == {option.name for option in OPTIONS}


@pytest.mark.parametrize("url", [CHAT, COMPLETION])
@pytest.mark.parametrize(("name", "value"), SAME.items())
def test_options_with_the_same_name(url: str, name: str, value: Any) -> None:
    assert options(url, **{name: value}) == {name: value}
    resolved = resolve_params({name: value}, SamplingParams(), WHERE)
    assert getattr(resolved, name) != getattr(SamplingParams(), name)


@pytest.mark.parametrize(
    ("url", "body", "expected"),
    [
        (CHAT, {"max_tokens": 9}, {"max_tokens": 9}),
        (CHAT, {"max_completion_tokens": 9}, {"max_tokens": 9}),
        (CHAT, {"max_completion_tokens": 9, "max_tokens": 9}, {"max_tokens": 9}),
        (CHAT, {"max_completion_tokens": None, "max_tokens": 9}, {"max_tokens": 9}),
        (COMPLETION, {"max_tokens": 9}, {"max_tokens": 9}),
        (COMPLETION, {"max_completion_tokens": 9}, {"max_tokens": 9}),
        (CHAT, {"logprobs": True}, {"logprobs": 0}),
        (CHAT, {"logprobs": True, "top_logprobs": None}, {"logprobs": 0}),
        (CHAT, {"logprobs": True, "top_logprobs": 5}, {"logprobs": 5}),
        (CHAT, {"logprobs": False}, {}),
        (CHAT, {"logprobs": False, "top_logprobs": 0}, {}),
        (CHAT, {"logprobs": None, "top_logprobs": None}, {}),
        (COMPLETION, {"logprobs": 0}, {"logprobs": 0}),
        (COMPLETION, {"logprobs": 5}, {"logprobs": 5}),
        (COMPLETION, {"logprobs": None}, {}),
        (CHAT, {"stop": "[1]", "bad_words": "[2]"}, {"stop": ["[1]"], "bad_words": ["[2]"]}),
        (CHAT, {"best_of": 1, "n": 3}, {"n": 3}),
        (COMPLETION, {"best_of": 3, "n": 3}, {"n": 3}),
        (COMPLETION, {"best_of": 1}, {}),
    ],
)
def test_options_with_names_of_their_own(url: str, body: dict[str, Any], expected: dict[str, Any]) -> None:
    assert options(url, **body) == expected


def test_what_a_body_does_not_say_is_not_made_up() -> None:
    assert options() == options(COMPLETION) == {}
    assert options(temperature=None, stop="", n=None, tools=None, unknown=None) == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", "warm"), ("max_completion_tokens", 0), ("top_logprobs", 1.5), ("stop", 5), ("n", [1])],
)
def test_values_of_options_are_left_to_the_parameters(name: str, value: Any) -> None:
    body = {"logprobs": True, name: value} if name == "top_logprobs" else {name: value}
    with pytest.raises(RowError, match=WHERE):
        resolve_params(options(**body), SamplingParams(), WHERE)


IGNORED = """model user metadata store service_tier stream stream_options safety_identifier parallel_tool_calls
    prediction prompt_cache_key prompt_cache_options prompt_cache_retention priority request_id cache_salt"""


@pytest.mark.parametrize("name", IGNORED.split())
def test_fields_that_change_nothing(name: str) -> None:
    for value in ("x", True, {"type": "content"}):
        assert options(CHAT, **{name: value}) == options(COMPLETION, **{name: value}) == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", []),
        ("tool_choice", "none"),
        ("tool_choice", "auto"),
        ("functions", []),
        ("function_call", "none"),
        ("response_format", {"type": "text"}),
        ("response_format", {"type": "text", "json_schema": None}),
        ("modalities", ["text"]),
        ("reasoning_effort", "medium"),
        ("verbosity", "medium"),
        ("echo", False),
        ("suffix", ""),
        ("add_generation_prompt", True),
        ("continue_final_message", False),
        ("include_stop_str_in_output", False),
        ("length_penalty", 1.0),
        ("skip_special_tokens", True),
        ("spaces_between_special_tokens", True),
        ("use_beam_search", False),
    ],
)
def test_fields_that_ask_for_nothing(name: str, value: Any) -> None:
    assert options(CHAT, **{name: value}) == options(COMPLETION, **{name: value}) == {}


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}], "tools cannot be called"),
        ("tool_choice", "required", "tools cannot be called"),
        ("functions", [{"name": "f"}], "tools cannot be called"),
        ("function_call", {"name": "f"}, "tools cannot be called"),
        ("web_search_options", {}, "the web cannot be searched"),
        ("response_format", {"type": "json_object"}, "only plain text is generated"),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "s"}}, "only plain text is generated"),
        ("response_format", "text", "only plain text is generated"),
        ("modalities", ["text", "audio"], "only text is generated"),
        ("audio", {"voice": "alloy", "format": "wav"}, "only text is generated"),
        ("moderation", {"model": "m"}, "nothing is moderated"),
        ("reasoning_effort", "high", "there is no such setting"),
        ("verbosity", "low", "there is no such setting"),
        ("echo", True, "the prompt is not repeated"),
        ("suffix", "END", "texts are only continued at their end"),
        ("add_generation_prompt", False, "the chat's last message decides"),
        ("continue_final_message", True, "the chat's last message decides"),
        ("include_stop_str_in_output", True, "the text is cut before a stop string"),
        ("length_penalty", 0.5, "beam search has a command of its own"),
        ("skip_special_tokens", False, "special tokens are not written"),
        ("spaces_between_special_tokens", False, "special tokens are not written"),
        ("use_beam_search", True, "beam search has a command of its own"),
        ("best_of", 2, "no more than n completions"),
        ("best_of", "x", "no more than n completions"),
    ],
)
@pytest.mark.parametrize("url", [CHAT, COMPLETION])
def test_fields_that_ask_for_what_is_not_done(url: str, name: str, value: object, reason: str) -> None:
    message = refusal(line(url, **{name: value}))
    assert message.startswith(f"body.{name} is ")
    assert reason in message


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"custom_id": None}, "custom_id must be a text"),
        ({"custom_id": ""}, "custom_id must be a text"),
        ({"custom_id": 7}, "custom_id must be a text that is not empty, not 7"),
        ({"method": "GET"}, "method is 'GET', but only POST"),
        ({"method": 1}, "method is 1"),
        ({"url": None}, "url is None"),
        ({"url": 3}, "url is 3"),
        ({"url": "/v1/embeddings"}, f"url is '/v1/embeddings', but it must be {CHAT} or {COMPLETION}"),
        ({"url": "/v1/chat/completions/x"}, "url is"),
        ({"url": "/v2/chat/completions"}, "url is"),
        ({"url": "/v1/code/completions"}, "url is"),
        ({"url": "https://x.org/v1/code/completions"}, "url is"),
        ({"url": "https://x.org/v1/chat/completions?a=b"}, "url is"),
        ({"url": "api.openai.com/v1/chat/completions"}, "url is"),
        ({"body": None}, "the request has no body"),
        ({"body": [1]}, "body must be an object, not list"),
        ({"body": 5}, "body must be an object, not int"),
        ({"body": "{"}, "body must be an object, not a text that is not JSON"),
        ({"body": "[" * 100_000}, "body must be an object, not a text that is not JSON"),
        ({"body": "[1]"}, "body must be an object, not list"),
        ({"body": '"x"'}, "body must be an object, not str"),
        ({"body": {}}, f"body has no messages, which {CHAT} needs"),
        ({"body": {"messages": None}}, "body has no messages"),
        ({"body": {"prompt": "x"}}, "body has no messages"),
        ({"url": COMPLETION, "body": {}}, f"body has no prompt, which {COMPLETION} needs"),
        ({"url": COMPLETION, "body": {"messages": MESSAGES}}, "body has no prompt"),
    ],
)
def test_broken_envelopes(columns: dict[str, Any], reason: str) -> None:
    assert reason in refusal(line() | columns)


@pytest.mark.parametrize("name", ["custom_id", "url", "body"])
def test_missing_columns(name: str) -> None:
    columns = line()
    del columns[name]
    assert name in refusal(columns)


def test_several_prompts_are_as_many_lines() -> None:
    for prompt in (["a", "b"], [[1], [2, 3]]):
        message = refusal(line(COMPLETION, prompt=prompt))
        assert message == "body.prompt holds 2 prompts, but a row is one; write one line for each"


@pytest.mark.parametrize("prompt", [[], [[]], [["a"]], [1, "a"], [1, 2.0], [True], [None], {"text": "a"}, 5])
def test_prompts_of_no_known_form(prompt: object) -> None:
    message = refusal(line(COMPLETION, prompt=prompt))
    assert message == f"body.prompt is {prompt!r}, but it must be a text or a list of token ids, not empty"


@pytest.mark.parametrize(
    ("url", "body", "reason"),
    [
        (CHAT, {"max_token": 5}, f"body has 'max_token', which is no field of {CHAT}"),
        (CHAT, {"prompt": "x"}, "body has 'prompt'"),
        (CHAT, {"chat_template_kwargs": {"enable_thinking": False}}, "body has 'chat_template_kwargs'"),
        (COMPLETION, {"messages": MESSAGES}, "body has 'messages'"),
        (COMPLETION, {"top_logprobs": 3}, "body has 'top_logprobs'"),
        (CHAT, {"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens is 6, but body.max_tokens 5"),
        (CHAT, {"logprobs": 5}, "body.logprobs is 5, but"),
        (CHAT, {"logprobs": "true"}, "body.logprobs is 'true', but"),
        (CHAT, {"top_logprobs": 5}, "body.top_logprobs is 5, but body.logprobs is not true"),
        (CHAT, {"logprobs": False, "top_logprobs": 5}, "body.top_logprobs is 5, but body.logprobs is not true"),
    ],
)
def test_fields_that_cannot_be_understood(url: str, body: dict[str, Any], reason: str) -> None:
    assert reason in refusal(line(url, **body))


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"body": {"model": "m"}}, "m"),
        ({"body": '{"model": "m"}'}, "m"),
        ({"body": {"model": ""}}, None),
        ({"body": {"model": 5}}, None),
        ({"body": {}}, None),
        ({"body": "{"}, None),
        ({"body": None}, None),
        ({}, None),
    ],
)
def test_the_model_that_a_request_names(columns: dict[str, Any], expected: str | None) -> None:
    assert model_of(columns) == expected


KNOWN = [*SAME, "messages", "prompt", "max_tokens", "max_completion_tokens", "logprobs", "top_logprobs", "best_of"]
KNOWN += ["model", "tools", "tool_choice", "response_format", "modalities", "echo", "suffix", "audio", "stream"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)
BODIES = st.dictionaries(st.sampled_from(KNOWN) | st.text(max_size=8), JSON, max_size=6)
URLS = st.sampled_from([CHAT, COMPLETION])


def outcome(columns: dict[str, Any]) -> BatchRequest | RowError:
    try:
        request = request_columns(columns, WHERE)
        resolve_params(request.columns, SamplingParams(), WHERE)
    except RowError as error:
        return error
    return request


def check_any(columns: dict[str, Any]) -> None:
    before = copy.deepcopy(columns)
    result = outcome(columns)
    if isinstance(result, RowError):
        assert result.status is Status.BAD_ROW
        assert result.message.startswith(f"{WHERE}: ")
    else:
        prompts = {"messages", "prompt", "prompt_token_ids"}
        assert len(result.columns.keys() & prompts) == 1
        assert result.columns.keys() <= prompts | {option.name for option in OPTIONS}
    assert model_of(columns) is None or isinstance(model_of(columns), str)
    assert repr(columns) == repr(before)  # repr, as NaN is not equal to itself


@given(BODIES | JSON, URLS)
def test_any_body_is_a_request_or_a_bad_row(body: Any, url: str) -> None:
    check_any({"custom_id": "a", "url": url, "body": body})
    check_any({"custom_id": "a", "url": url, "body": json.dumps(body)})


@given(st.dictionaries(st.sampled_from(KNOWN), JSON, max_size=4), URLS)
def test_any_values_beside_a_good_prompt(body: dict[str, Any], url: str) -> None:
    check_any(line(url, **body))


@given(st.dictionaries(st.sampled_from(["custom_id", "method", "url", "body"]), JSON))
def test_any_envelope(columns: dict[str, Any]) -> None:
    check_any(columns)
    check_any(line() | columns)
