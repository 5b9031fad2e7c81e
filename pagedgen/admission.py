"""From a request to the sequences that the scheduler runs: what is checked before anything is computed."""

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pagedgen.beam_params import validate_beam
from pagedgen.config import EngineConfig
from pagedgen.errors import RowError
from pagedgen.params import flag_of, validate_params
from pagedgen.request import BeamParams, Request, SamplingParams, Status
from pagedgen.scheduling.beam import BeamSearch
from pagedgen.scheduling.sequence import Sequence, SequenceGroup, random_key
from pagedgen.text.stop import StopChecker
from pagedgen.text.tokenizer import Tokenizer
from pagedgen.units import format_bytes_finely

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class _CheckedParams:
    """A request's parameters as they were given and as they were found to be, the ids that end its completions, and the
    token sequences of its bad words."""

    given: SamplingParams
    params: SamplingParams
    end_ids: frozenset[int]
    bad_words: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Limits:
    """What requests have to fit into. max_position: the longest sequence that the model allows; max_model_len: that
    the run allows. num_blocks: of the KV pool; bytes_per_block: of all layers together."""

    vocab_size: int
    max_position: int
    max_model_len: int
    num_blocks: int
    block_size: int
    bytes_per_block: int


class Admission:
    """Turns requests into groups of sequences, or says why they cannot be run.

    end_ids: the model's own end tokens. default_params: of requests that have none.
    """

    def __init__(
        self,
        config: EngineConfig,
        limits: Limits,
        tokenizer: Tokenizer,
        end_ids: Collection[int],
        default_params: SamplingParams,
    ) -> None:
        self._config, self._limits, self._tokenizer = config, limits, tokenizer
        self._end_ids, self._default_params = frozenset(end_ids), default_params
        self._last_checked: _CheckedParams | None = None

    def group(self, request: Request, prompt: Collection[int]) -> SequenceGroup:
        """prompt: its token ids. Raises RowError with status bad_row, too_long or unfit when it cannot be run."""
        try:
            checked = self._check_params(request.params or self._default_params)
            beam = None if request.beam is None else validate_beam(request.beam)
        except ValueError as error:
            raise RowError(Status.BAD_ROW, str(error)) from None
        params = checked.params
        if beam is not None:  # what only a draw could follow
            params = replace(params, n=1, logprobs=None, prompt_logprobs=None)
        token_ids = self._fit(self._token_ids(prompt), params)
        max_total = self._max_total(len(token_ids), params, beam)
        sequence = Sequence(
            request=request,
            params=params,
            token_ids=token_ids,
            num_prompt=len(token_ids),
            max_total=max_total,
            end_ids=checked.end_ids,
            key=random_key(params.seed, str(request.id), 0) if params.temperature else 0,
            stop_checker=StopChecker(self._tokenizer, params.stop, params.min_tokens) if params.stop else None,
            bad_words=checked.bad_words,
        )
        if beam is None:
            return SequenceGroup([sequence])
        search = BeamSearch(beam, len(token_ids), max_total - len(token_ids), len(checked.end_ids))
        sequence.num_continuations = search.num_continuations
        return SequenceGroup([sequence], search)

    def _check_params(self, given: SamplingParams) -> _CheckedParams:
        """Most requests of a job share one object, so the last one is remembered.

        Raises ValueError or RowError when the parameters cannot be used.
        """
        last = self._last_checked
        if last is not None and last.given is given:
            return last
        params = validate_params(given)
        self._check_vocabulary(params)
        end_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            end_ids |= self._end_ids
        checked = _CheckedParams(given, params, end_ids, self._bad_words(params))
        if given == params:  # otherwise it may hold a list, which may have other items the next time
            self._last_checked = checked
        return checked

    def _check_vocabulary(self, params: SamplingParams) -> None:
        """Raises RowError when a parameter goes beyond the model's vocabulary."""
        vocab_size = self._limits.vocab_size
        named = {"stop_token_ids": params.stop_token_ids, "logit_bias": [token_id for token_id, _ in params.logit_bias]}
        for name, token_ids in named.items():
            beyond = [token_id for token_id in token_ids if token_id >= vocab_size]
            if beyond:
                raise RowError(
                    Status.BAD_ROW, f"{name} holds {beyond[0]}, but the vocabulary has {vocab_size} tokens, from 0 on"
                )
        if params.top_k > vocab_size:
            raise RowError(
                Status.BAD_ROW,
                f"top_k is {params.top_k}, but the vocabulary has {vocab_size} tokens; 0 keeps all of them",
            )

    def _max_total(self, length: int, params: SamplingParams, beam: BeamParams | None) -> int:
        """The most tokens that each sequence of a request may have, its prompt of `length` tokens included.

        Raises RowError with status unfit when they could need more slots or more blocks than there are: all of them run
        at a time, and past the prompt they may share nothing.
        """
        width, option = (params.n, "n") if beam is None else (beam.width, "width")
        if width > self._config.max_seqs:
            raise RowError(
                Status.UNFIT,
                f"{option} is {width}, but at most {self._config.max_seqs} sequences run at a time; lower it or raise "
                f"--max-seqs",
            )
        limits, max_total = self._limits, self._limits.max_model_len
        size, shared = limits.block_size, length // limits.block_size
        room = (shared + (limits.num_blocks - shared) // width) * size
        if params.max_tokens is not None:
            max_total = min(max_total, length + params.max_tokens)
        elif length < room:
            max_total = min(max_total, room)
        # The last token is drawn, but its key and value are never computed.
        if max_total - 1 > room:
            needed = shared + width * (-(-(max_total - 1) // size) - shared)
            several = "" if width == 1 else f" in each of {width} sequences"
            pool, need = limits.num_blocks * limits.bytes_per_block, needed * limits.bytes_per_block
            most = room + 1 - length
            fits = f"lower --max-tokens to {most}" if most > 0 else "shorten the prompt and lower --max-tokens"
            fewer = "" if width == 1 else f", lower {flag_of(option)}"
            raise RowError(
                Status.UNFIT,
                f"{length} prompt tokens and up to {max_total - length} new ones{several} need "
                f"{format_bytes_finely(need)} of KV memory, but the pool has {format_bytes_finely(pool)} "
                f"({limits.num_blocks * size} tokens); raise --kv-memory to {-(-need // _MIB)}MiB{fewer} or {fits}",
            )
        return max_total

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """The token sequences of the bad words, at the start of a text and after a space."""
        if not params.bad_words:
            return ()
        spellings = [spelling for word in params.bad_words for spelling in (word, " " + word.lstrip())]
        encoded = self._tokenizer.encode_batch(spellings, add_special_tokens=False)
        return tuple(dict.fromkeys(tuple(ids) for ids in encoded if ids))

    def _token_ids(self, prompt: Collection[int]) -> NDArray[np.int32]:
        """Raises RowError when the prompt is empty or holds what is no token id of the model."""
        if not prompt:
            raise RowError(Status.BAD_ROW, "the prompt is empty; give it at least one token")
        given = np.array(list(prompt))
        # Python's own min and max: numpy's take longer to begin than a short prompt takes to go through.
        if given.dtype.kind not in "iu" or min(prompt) < 0 or max(prompt) >= self._limits.vocab_size:
            raise RowError(
                Status.BAD_ROW, f"the prompt's token ids must be whole numbers from 0 to {self._limits.vocab_size - 1}"
            )
        return given.astype(np.int32)

    def _fit(self, token_ids: NDArray[np.int32], params: SamplingParams) -> NDArray[np.int32]:
        """Refuse or truncate a prompt that leaves no room for one new token. Truncation makes room for max_tokens, as
        far as that leaves at least half of the model's length to the prompt."""
        longest, how = self._limits.max_model_len, self._config.on_too_long
        if len(token_ids) < longest:
            return token_ids
        raise_it = ", raise --max-model-len" if longest < self._limits.max_position else ""
        if how == "error":
            raise RowError(
                Status.TOO_LONG,
                f"the prompt has {len(token_ids)} tokens, but at most {longest - 1} fit beside one new token; "
                f"shorten it{raise_it}, or pass --on-too-long truncate-left",
            )
        keep = max(longest - (params.max_tokens or 1), longest // 2)
        return token_ids[-keep:] if how == "truncate-left" else token_ids[:keep]
