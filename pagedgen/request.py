"""The values that travel the data path, from an input row to its completion; no torch.

Frozen dataclasses, and named tuples where each row makes its own: those are made in a third of the time."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, NamedTuple


class Status(StrEnum):
    """The outcome of one row; see the README for what each means."""

    OK = "ok"
    TOO_LONG = "too_long"
    BAD_ROW = "bad_row"
    TEMPLATE_ERROR = "template_error"
    NAN_LOGITS = "nan_logits"
    UNFIT = "unfit"
    OUT_OF_MEMORY = "out_of_memory"


class FinishReason(StrEnum):
    """Why a completion ended: at an end token or stop string, or at its length limit."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to generate one completion. The fields have the same names as the command line's options and a row's columns.

    max_tokens: most tokens to generate; None means up to the model's maximum length.
    temperature: 0 is greedy. top_k: 0 is off. top_p: 1 is off. min_p: 0 is off.
    seed: the run's or row's seed; draws are keyed on (seed, row id, sample, position).
    stop: strings that end the text; the text is cut just before the first one.
    stop_token_ids: ids that end the completion, besides the model's own end tokens.
    min_tokens: end tokens and stop strings are held back until this many tokens exist.
    ignore_eos: generate past the model's end tokens (stop_token_ids still apply).
    n: samples of the prompt; sample i draws with its own key, and shares the prompt's blocks with the others.
    repetition_penalty: 1 is off; divides positive and multiplies negative scores of every token that occurs in the
        prompt or the completion so far (Keskar et al., 2019).
    presence_penalty, frequency_penalty: 0 is off; subtracted once, and once for each occurrence, from the scores of the
        tokens that the completion holds so far (not the prompt).
    logit_bias: (token id, what to add to its logit) pairs.
    bad_words: texts whose token sequences are never completed.
    logprobs: None is off; k >= 0 asks for the log-probability of each chosen token and the k most likely ones, taken
        from the model's logits before processors, temperature and filters.
    prompt_logprobs: None is off; k >= 0 asks for the same of each prompt token but the first.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    n: int = 1
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[str, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None


EarlyStopping = Literal["true", "false", "never"]


@dataclass(frozen=True, slots=True)
class BeamParams:
    """How to search with beams, as in `transformers`; SamplingParams gives lengths, ends and the repetition penalty.

    width: beams. num_return: hypotheses to return, the best first, at most `width`.
    length_penalty: a hypothesis scores its summed log-probability divided by its length to this power.
    early_stopping: "true" ends once there are `width` hypotheses; "false" once the best beam, at its present length,
        cannot beat the worst of them; "never" once it could not at any length.
    diversity_groups: groups the beams are divided into (Vijayakumar et al., 2018); width is a multiple of it.
    diversity_penalty: subtracted from a token's score for each beam of an earlier group that chose it in this step.
    """

    width: int = 4
    num_return: int = 1
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = "false"
    diversity_groups: int = 1
    diversity_penalty: float = 0.0


class PromptRecord(NamedTuple):
    """One input row as a reader found it.

    row: position in the input, from 0. id: the input's `id` or `custom_id`, else the row number, as text.
    columns: the row's own columns. where: the place in the input for error messages, like `prompts.jsonl line 17`.
    error: why the row cannot be used at all (a line that is no JSON, say); its columns are then empty.
    raw: its text is to be sent as it is, without the model's chat template, whatever the configuration says.
    """

    row: int
    id: str
    columns: Mapping[str, Any]
    where: str
    error: str | None = None
    raw: bool = False


class Request(NamedTuple):
    """What the engine is asked to complete: exactly one of `prompt` (sent as it is) and `prompt_token_ids`.

    `id` keys the random draws, so a request draws the same numbers wherever and with whomever it runs. Without `params`
    the engine's defaults apply, which come from the model's generation config. With `beam` the completions are the best
    hypotheses of a beam search, in order of their score.
    """

    row: int
    id: str
    prompt: str | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    params: SamplingParams | None = None
    beam: BeamParams | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability of one generated token, and the most likely tokens at its position, best first."""

    token_id: int
    logprob: float
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


class Completion(NamedTuple):
    """One outcome. A row that could not be generated has a status other than `ok`, an error in words and no text."""

    row: int
    id: str
    sample: int
    status: Status
    text: str | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    token_ids: tuple[int, ...] = ()
    cumulative_logprob: float | None = None
    score: float | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None

    @property
    def completion_tokens(self) -> int:
        return len(self.token_ids)
