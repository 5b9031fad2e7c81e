"""The generation options: one table for the command line, a row's own columns and the Python API.

Every value is checked here, wherever it comes from. Numbers, booleans and lists may come as text, as they do from CSV.
"""

import json
import math
import reprlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from typing import Any

from pagedgen.errors import PagedgenError, RowError, UsageError
from pagedgen.request import SamplingParams, Status

DEFAULT_MAX_TOKENS = 512
# Below this a softmax over float32 logits is an argmax, and dividing by it overflows.
SMALLEST_TEMPERATURE = 1e-5
# Each position of each row would hold this many tokens with their texts: more is a mistake.
MOST_LOGPROBS = 1000
MOST_SAMPLES = 256
_INT32_MAX = 2**31 - 1
_INT64_MAX = 2**63 - 1
# What scores may be changed by: far beyond any use, and far from where sums of them would overflow float32.
_MOST_ADDED, _LEAST_FACTOR, _MOST_FACTOR = 1e9, 1e-6, 1e6
_FLOAT32_MAX = (2 - 2.0**-23) * 2.0**127


def flag_of(name: str) -> str:
    """What the command line calls an option."""
    return "-n" if name == "n" else "--" + name.replace("_", "-")


@dataclass(frozen=True, slots=True)
class Option:
    """One generation option.

    parse: returns the checked value, or raises ValueError. allowed: the values it takes, in words.
    """

    name: str
    parse: Callable[[object], Any]
    allowed: str

    @property
    def flag(self) -> str:
        return flag_of(self.name)


def _real(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real | str):
        raise ValueError
    number = float(value)
    if not math.isfinite(number) or abs(number) > _FLOAT32_MAX:
        raise ValueError
    return number


def _whole(value: object) -> int:
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            pass
    if isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    number = _real(value)  # a column of whole numbers with gaps is read as floats
    if not number.is_integer():
        raise ValueError
    return int(number)


def _real_between(low: float, high: float, low_included: bool = True) -> Callable[[object], float]:
    def parse(value: object) -> float:
        number = _real(value)
        if not (low <= number <= high) or (number == low and not low_included):
            raise ValueError
        return number

    return parse


def _whole_between(low: int, high: int) -> Callable[[object], int]:
    def parse(value: object) -> int:
        number = _whole(value)
        if not low <= number <= high:
            raise ValueError
        return number

    return parse


def _temperature(value: object) -> float:
    number = _real_between(0.0, math.inf)(value)
    return number if number >= SMALLEST_TEMPERATURE else 0.0


def _top_k(value: object) -> int:
    return max(0, _whole_between(-1, _INT32_MAX)(value))


def _boolean(value: object) -> bool:
    if isinstance(value, str) and value.strip().lower() in ("true", "false"):
        return value.strip().lower() == "true"
    if not isinstance(value, bool):
        raise ValueError
    return value


def _from_json(value: object, opening: str) -> object:
    """The list or object, as its list of pairs, that a text with this opening bracket holds as JSON, else the value as
    it is."""
    if isinstance(value, str) and value.lstrip().startswith(tuple(opening)):
        try:
            return json.loads(value, object_pairs_hook=list)
        except (ValueError, RecursionError):
            return value
    return value


def _texts(value: object) -> tuple[str, ...]:
    value = _from_json(value, "[")
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list | tuple) or not all(isinstance(item, str) and item for item in items):
        raise ValueError
    for item in items:
        item.encode()  # half of a surrogate pair is no character: UnicodeEncodeError is a ValueError
    return tuple(items)


_token_id = _whole_between(0, _INT32_MAX)


def _token_ids(value: object) -> tuple[int, ...]:
    value = _from_json(value, "[")
    items = value if isinstance(value, list | tuple) else [value]
    return tuple(map(_token_id, items))


def _logit_bias(value: object) -> tuple[tuple[int, float], ...]:
    value = _from_json(value, "[{")
    pairs = value.items() if isinstance(value, Mapping) else value
    if not isinstance(pairs, Iterable) or isinstance(pairs, str):
        raise ValueError
    biases: dict[int, float] = {}
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise ValueError
        token_id, bias = pair
        if bias is None:  # a column of structs has all ids of all rows as its fields
            continue
        token_id = _token_id(token_id)
        if token_id in biases:
            raise ValueError
        biases[token_id] = _real_between(-_MOST_ADDED, _MOST_ADDED)(bias)
    return tuple(sorted(biases.items()))


OPTIONS: tuple[Option, ...] = (
    Option("max_tokens", _whole_between(1, _INT32_MAX), f"a whole number from 1 to {_INT32_MAX}"),
    Option("temperature", _temperature, "a finite number from 0 (0 is greedy)"),
    Option("top_k", _top_k, "a whole number from 1, or 0 or -1 for off"),
    Option("top_p", _real_between(0.0, 1.0, low_included=False), "a number above 0 and at most 1"),
    Option("min_p", _real_between(0.0, 1.0), "a number from 0 to 1"),
    Option("seed", _whole_between(0, _INT64_MAX), "a whole number from 0 to 2**63 - 1"),
    Option("stop", _texts, "a text or a list of texts, none of them empty"),
    Option("stop_token_ids", _token_ids, "a token id or a list of them"),
    Option("min_tokens", _whole_between(0, _INT32_MAX), f"a whole number from 0 to {_INT32_MAX}"),
    Option("ignore_eos", _boolean, "true or false"),
    Option("n", _whole_between(1, MOST_SAMPLES), f"a whole number from 1 to {MOST_SAMPLES}"),
    Option("repetition_penalty", _real_between(_LEAST_FACTOR, _MOST_FACTOR), "a number from 1e-6 to 1e6 (1 is off)"),
    Option(
        "presence_penalty",
        _real_between(0.0, _MOST_ADDED),
        "a number from 0 to 1e9; negative penalties are not supported",
    ),
    Option(
        "frequency_penalty",
        _real_between(0.0, _MOST_ADDED),
        "a number from 0 to 1e9; negative penalties are not supported",
    ),
    Option(
        "logit_bias",
        _logit_bias,
        'a mapping of token ids to numbers from -1e9 to 1e9, like {"11": -5}, with no id twice',
    ),
    Option("bad_words", _texts, "a text or a list of texts, none of them empty"),
    Option("logprobs", _whole_between(0, MOST_LOGPROBS), f"a whole number from 0 to {MOST_LOGPROBS}"),
    Option("prompt_logprobs", _whole_between(0, MOST_LOGPROBS), f"a whole number from 0 to {MOST_LOGPROBS}"),
)
_BY_NAME: Mapping[str, Option] = {option.name: option for option in OPTIONS}

# Parameters that may be None, which is a value of its own.
_OPTIONAL = ("max_tokens", "logprobs", "prompt_logprobs")

# The generation config's names for what the options call otherwise.
_CONFIG_NAMES: Mapping[str, str] = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_strings": "stop",
    "repetition_penalty": "repetition_penalty",
}
# What else changes the tokens that `transformers` would generate, with the value that changes nothing.
_UNSUPPORTED_IN_CONFIG: Mapping[str, float | None] = {
    "no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1,
    "typical_p": 1,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "top_h": None,
    "guidance_scale": 1,
    "num_beams": 1,
    "min_length": 0,
    "bad_words_ids": None,
    "sequence_bias": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
    "watermarking_config": None,
}


def resolve_params(columns: Mapping[str, object], defaults: SamplingParams, where: str) -> SamplingParams:
    """The row's own parameters: its columns win over the defaults; null and empty text mean not given.

    where: the row's place in the input, for the error.
    Raises RowError(BAD_ROW) that names the row, the option, its value and what is allowed.
    """
    try:
        return _apply(columns, defaults)
    except ValueError as error:
        raise RowError(Status.BAD_ROW, f"{where}: {error}") from None


def validate_params(params: SamplingParams) -> SamplingParams:
    """Checks parameters given in Python; returns them with every value in its own type (a single `stop` as a tuple).

    Raises ValueError that names the option, its value and what is allowed.
    """
    values = {field.name: getattr(params, field.name) for field in fields(params)}
    for name, value in values.items():
        if value == "" or (value is None and name not in _OPTIONAL):
            raise ValueError(_refusal(name, value, _BY_NAME[name].allowed))
    return _apply(values, params)


def defaults_from_generation_config(
    generation_config: Mapping[str, object], overrides: Mapping[str, object]
) -> SamplingParams:
    """The run's parameters: what the model's generation config states, then the command line's options.

    generation_config: generation_config.json as it is, without the defaults that transformers would fill in. As there,
        a config that does not say `do_sample: true` is greedy; a `temperature` among the overrides turns sampling on.
        Its `max_length` (prompt included) is not used.
    overrides: options by name; None is not given.
    Raises UsageError that names the flag, or PagedgenError that names the generation config.
    """
    stated = {ours: generation_config.get(theirs) for theirs, ours in _CONFIG_NAMES.items()}
    if not generation_config.get("do_sample"):
        stated["temperature"] = 0.0
    try:
        params = _apply(stated, SamplingParams(max_tokens=DEFAULT_MAX_TOKENS), together=False)
    except ValueError as error:
        raise PagedgenError(f"The model's generation_config.json cannot be used: {error}.") from None
    try:
        return _apply(overrides, params, spell=flag_of)
    except ValueError as error:
        raise UsageError(f"{error}.") from None


def unsupported_in_generation_config(
    generation_config: Mapping[str, object], searching: bool = False
) -> tuple[str, ...]:
    """What the generation config asks for that no run applies, like `typical_p 0.9`: worth a warning.

    searching: the user asks for a beam search, and so has decided on `num_beams`.
    """
    return tuple(
        f"{name} {_show(generation_config[name])}"
        for name, neutral in _UNSUPPORTED_IN_CONFIG.items()
        if not _is_neutral(generation_config.get(name), neutral) and not (searching and name == "num_beams")
    )


def merge_eos_token_ids(*sources: object) -> tuple[int, ...]:
    """All end tokens of a model, each once, in order; a source is an id, a list of ids or None, as configs state it."""
    merged: dict[int, None] = {}
    for source in sources:
        items: Iterable[object] = source if isinstance(source, list | tuple) else (source,)
        merged.update((int(item), None) for item in items if isinstance(item, Integral))
    return tuple(merged)


def _apply(
    given: Mapping[str, object],
    defaults: SamplingParams,
    spell: Callable[[str], str] = str,
    together: bool = True,
) -> SamplingParams:
    """The defaults with the given options in their place. spell: how an option is called in the ValueError's text."""
    values: dict[str, Any] = {}
    for name in () if _BY_NAME.keys().isdisjoint(given) else given.keys() & _BY_NAME.keys():
        value = given[name]
        if value is None or value == "":
            continue
        try:
            values[name] = _BY_NAME[name].parse(value)
        except (ValueError, OverflowError):
            raise ValueError(_refusal(spell(name), value, _BY_NAME[name].allowed)) from None
    params = replace(defaults, **values) if values else defaults
    if together and params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise ValueError(
            f"{spell('min_tokens')} is {params.min_tokens}, but it must not be above {spell('max_tokens')}, "
            f"which is {params.max_tokens}"
        )
    return params


def _is_neutral(value: object, neutral: float | None) -> bool:
    """Whether the value of a setting that is not supported asks for nothing."""
    return value is None or value == neutral or value in ([], {})


def _refusal(name: str, value: object, allowed: str) -> str:
    return f"{name} is {_show(value)}, but it must be {allowed}"


def _show(value: object) -> str:
    return reprlib.repr(value)
