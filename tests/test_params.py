"""Generation options from rows, the command line, Python and generation_config.json."""

import math
import subprocess
import sys
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedgen.errors import PagedgenError, RowError, UsageError
from pagedgen.params import (
    DEFAULT_MAX_TOKENS,
    MOST_LOGPROBS,
    OPTIONS,
    defaults_from_generation_config,
    flag_of,
    merge_eos_token_ids,
    resolve_params,
    unsupported_in_generation_config,
    validate_params,
)
from pagedgen.request import SamplingParams, Status

DEFAULTS = SamplingParams(max_tokens=100, temperature=0.5, stop=("x",))


def test_every_parameter_is_an_option() -> None:
    assert {option.name for option in OPTIONS} == {field.name for field in fields(SamplingParams)}


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("max_tokens", 7, 7),
        ("max_tokens", "7", 7),
        ("max_tokens", 7.0, 7),
        ("max_tokens", "7.0", 7),
        ("temperature", "0.7", 0.7),
        ("temperature", 0, 0.0),
        ("temperature", 1e-9, 0.0),
        ("top_p", 1, 1.0),
        ("top_p", "0.05", 0.05),
        ("min_p", 0, 0.0),
        ("top_k", -1, 0),
        ("top_k", 0, 0),
        ("top_k", "40", 40),
        ("seed", 2**63 - 1, 2**63 - 1),
        ("seed", str(2**63 - 1), 2**63 - 1),
        ("stop", "END", ("END",)),
        ("stop", ["a", "b"], ("a", "b")),
        ("stop", '["a", "b\\n"]', ("a", "b\n")),
        ("stop", "[", ("[",)),
        ("stop", "[/INST]", ("[/INST]",)),
        ("stop", [], ()),
        ("stop_token_ids", 5, (5,)),
        ("stop_token_ids", [5, 6.0], (5, 6)),
        ("stop_token_ids", "[5, 6]", (5, 6)),
        ("stop_token_ids", "5", (5,)),
        ("min_tokens", "3", 3),
        ("ignore_eos", "true", True),
        ("ignore_eos", "False", False),
        ("ignore_eos", True, True),
        ("logprobs", 0, 0),
        ("logprobs", "5", 5),
        ("prompt_logprobs", MOST_LOGPROBS, MOST_LOGPROBS),
        ("n", "4", 4),
        ("n", 256, 256),
        ("repetition_penalty", "1.1", 1.1),
        ("repetition_penalty", 0.5, 0.5),
        ("presence_penalty", 0, 0.0),
        ("frequency_penalty", "2.5", 2.5),
        ("bad_words", "heck", ("heck",)),
        ("bad_words", ["heck", " [darn"], ("heck", " [darn")),
        ("bad_words", '["heck", "["]', ("heck", "[")),
        ("logit_bias", {}, ()),
        ("logit_bias", "{}", ()),
        ("logit_bias", {11: -5, 3: 0.5}, ((3, 0.5), (11, -5.0))),
        ("logit_bias", {"11": -5, "3": "0.5"}, ((3, 0.5), (11, -5.0))),
        ("logit_bias", ' {"11": -5, "3": 0.5}', ((3, 0.5), (11, -5.0))),
        ("logit_bias", {"11": -5, "12": None}, ((11, -5.0),)),
        ("logit_bias", [(11, -5), [3, 0.5]], ((3, 0.5), (11, -5.0))),
        ("logit_bias", "[[11, -5]]", ((11, -5.0),)),
    ],
)
def test_good_values(name: str, value: object, expected: object) -> None:
    params = resolve_params({name: value, "prompt": "x"}, DEFAULTS, "p.csv line 3")
    assert getattr(params, name) == expected
    assert type(getattr(params, name)) is type(expected)
    others = [field.name for field in fields(params) if field.name != name]
    assert [getattr(params, other) for other in others] == [getattr(DEFAULTS, other) for other in others]


BAD: dict[str, tuple[Any, ...]] = {
    "max_tokens": (0, -1, 1.5, "many", True, math.inf, [5], 2**40),
    "temperature": (-0.1, "nan", math.nan, math.inf, "-inf", True, "hot", [0.5]),
    "top_p": (0, 1.01, -0.5, math.nan, "all"),
    "min_p": (-0.01, 1.01, math.nan),
    "top_k": (-2, 1.5, "few", 2**31),
    "seed": (-1, 2**63, 0.5, "s", math.nan),
    "stop": (5, [""], ["a", 5], '["a", ""]', {"a": 1}, [["a"]]),
    "stop_token_ids": (-1, [5, "x"], "[5, -1]", "five", [True], 2**31),
    "min_tokens": (-1, 0.5, "none"),
    "ignore_eos": (1, "yes", 0.0, []),
    "logprobs": (-1, True, "all", 1.5, 1001),
    "prompt_logprobs": (-1, True, "all", 1.5, "1001"),
    "n": (0, -1, 257, 1.5, True, "many", [2]),
    "repetition_penalty": (0, -1.1, math.nan, "inf", True, 1e-50, 1e50),
    "presence_penalty": (-0.5, "-2", math.nan, "inf", True, 1e39),
    "frequency_penalty": (-0.5, "-2", math.nan, math.inf, [1], 1e39),
    "bad_words": (5, [""], ["a", 5], '["a", ""]', {"a": 1}),
    "logit_bias": (
        5,
        "5",
        "{5: 1}",
        {-1: 1},
        {"x": 1},
        {2**31: 1},
        {5: "much"},
        {5: math.nan},
        {5: 1e39},
        '{"5": NaN}',
        '{"5": Infinity}',
        '{"5": 1, "5": 2}',
        {5: 1, "5": 1},
        [5, 1],
        [[5, 1], [5, 1]],
        [[5, 1, 2]],
        '[{"5": 1}]',
        {5: True},
        {5: {"a": 1}},
        '{"5": ' * 100_000,
    ),
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_bad_values_name_row_option_value_and_range(name: str, value: Any) -> None:
    with pytest.raises(RowError) as caught:
        resolve_params({name: value}, DEFAULTS, "p.csv line 3")
    allowed = next(option.allowed for option in OPTIONS if option.name == name)
    assert caught.value.status is Status.BAD_ROW
    assert caught.value.message.startswith(f"p.csv line 3: {name} is ")
    assert caught.value.message.endswith(allowed)
    if isinstance(value, str) and len(value) < 20:
        assert value in caught.value.message
    with pytest.raises(ValueError, match=f"^{name} is "):
        validate_params(SamplingParams(**{name: value}))
    with pytest.raises(UsageError, match=f"^{flag_of(name)} is "):
        defaults_from_generation_config({}, {name: value})


@given(st.sampled_from([o.name for o in OPTIONS]), st.one_of(st.floats(), st.integers(), st.text(), st.none()))
def test_any_value_is_taken_or_refused_in_one_sentence(name: str, value: object) -> None:
    try:
        params = resolve_params({name: value}, SamplingParams(), "row 1")
    except RowError as error:
        message = error.message
    else:
        assert validate_params(params) == params
        return
    assert message.startswith(f"row 1: {name} is ")
    assert len(message) < 250


@pytest.mark.parametrize("nothing", [None, ""])
def test_null_and_empty_mean_not_given(nothing: object) -> None:
    columns = {option.name: nothing for option in OPTIONS}
    assert resolve_params(columns, DEFAULTS, "row 1") == DEFAULTS


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
def test_negative_penalties_are_refused_in_as_many_words(name: str) -> None:
    with pytest.raises(RowError, match=f"row 1: {name} is -1.5, but .* negative penalties are not supported") as caught:
        resolve_params({name: -1.5}, DEFAULTS, "row 1")
    assert caught.value.status is Status.BAD_ROW


def test_nested_json_text_is_no_crash() -> None:
    """Deeper than the parser can follow, it is a text like any other."""
    assert resolve_params({"stop": "[" * 100_000}, DEFAULTS, "row 1").stop == ("[" * 100_000,)


def test_min_tokens_above_max_tokens() -> None:
    with pytest.raises(RowError, match=r"row 1: min_tokens is 101, .* max_tokens, which is 100"):
        resolve_params({"min_tokens": 101}, DEFAULTS, "row 1")
    assert resolve_params({"min_tokens": 101, "max_tokens": 101}, DEFAULTS, "row 1").min_tokens == 101
    with pytest.raises(ValueError, match="min_tokens is 5"):
        validate_params(SamplingParams(min_tokens=5, max_tokens=4))
    assert validate_params(SamplingParams(min_tokens=5, max_tokens=None)).min_tokens == 5


def test_validate_params_gives_values_their_types() -> None:
    loose: Any = {"stop": "END", "top_k": -1, "temperature": 1, "stop_token_ids": [3]}
    params = validate_params(SamplingParams(**loose))
    assert params == SamplingParams(stop=("END",), top_k=0, temperature=1.0, stop_token_ids=(3,))
    loose = {"logit_bias": {11: -5, 3: 1}, "bad_words": ["heck"], "presence_penalty": 1}
    params = validate_params(SamplingParams(**loose))
    assert params == SamplingParams(logit_bias=((3, 1.0), (11, -5.0)), bad_words=("heck",), presence_penalty=1.0)
    assert validate_params(params) == params
    broken: Any = {"temperature": None}
    with pytest.raises(ValueError, match="temperature is None"):
        validate_params(SamplingParams(**broken))


def test_generation_config() -> None:
    stated = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "max_new_tokens": 64}
    assert defaults_from_generation_config(stated, {}) == SamplingParams(
        max_tokens=64, temperature=0.6, top_p=0.9, top_k=20, min_p=0.1
    )
    assert defaults_from_generation_config({}, {}) == SamplingParams(max_tokens=DEFAULT_MAX_TOKENS, temperature=0.0)
    assert defaults_from_generation_config({"repetition_penalty": 1.1}, {}).repetition_penalty == 1.1
    assert defaults_from_generation_config({"temperature": 0.6}, {}).temperature == 0  # do_sample is what counts
    assert defaults_from_generation_config({"do_sample": False, "temperature": 0.6}, {}).temperature == 0
    assert defaults_from_generation_config({"do_sample": True}, {}).temperature == 1.0
    assert defaults_from_generation_config({"do_sample": True}, {}).top_k == 0  # not what transformers fills in
    assert defaults_from_generation_config({"max_length": 20}, {}).max_tokens == DEFAULT_MAX_TOKENS


def test_the_command_line_wins_over_the_generation_config() -> None:
    stated = {"do_sample": False, "top_p": 0.9, "max_new_tokens": 64}
    params = defaults_from_generation_config(stated, {"temperature": 0.8, "max_tokens": 5, "seed": None, "stop": "END"})
    assert params == SamplingParams(temperature=0.8, top_p=0.9, max_tokens=5, stop=("END",))
    assert defaults_from_generation_config({"do_sample": True, "temperature": 0.6}, {"temperature": 0}).temperature == 0
    # The model's limits are checked together with the user's, not alone.
    assert defaults_from_generation_config({"min_new_tokens": 600}, {"max_tokens": 700}).min_tokens == 600


def test_a_broken_generation_config_is_named() -> None:
    with pytest.raises(PagedgenError, match=r"generation_config\.json cannot be used: top_p is 3") as caught:
        defaults_from_generation_config({"top_p": 3}, {})
    assert caught.value.exit_code == 1


def test_what_the_generation_config_asks_in_vain_is_told() -> None:
    stated: dict[str, Any] = {"repetition_penalty": 1.1, "typical_p": 1.0, "bad_words_ids": None, "do_sample": True}
    assert unsupported_in_generation_config(stated) == ()
    stated |= {"num_beams": 4, "typical_p": 0.9, "suppress_tokens": [], "begin_suppress_tokens": [220, 50256]}
    told = ("typical_p 0.9", "num_beams 4", "begin_suppress_tokens [220, 50256]")
    assert unsupported_in_generation_config(stated) == told
    assert unsupported_in_generation_config(stated, searching=True) == (told[0], told[2])


def test_what_transformers_fills_in_asks_for_nothing() -> None:
    from transformers import GenerationConfig

    assert unsupported_in_generation_config(GenerationConfig().to_dict()) == ()


def test_eos_token_ids_are_merged() -> None:
    assert merge_eos_token_ids([5, 3], 3, None, (7,)) == (5, 3, 7)
    assert merge_eos_token_ids(None) == ()


def test_params_import_neither_torch_nor_transformers() -> None:
    code = "import pagedgen.params, sys; sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'jinja2')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
