"""What a plan learns of the prompts: their lengths and prefixes, and which rows cannot be run."""

import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from pagedgen.admission import Admission
from pagedgen.config import JobConfig
from pagedgen.data.openai_batch import request_columns
from pagedgen.errors import RowError
from pagedgen.params import resolve_params
from pagedgen.request import BeamParams, PromptRecord, Request, SamplingParams, Status
from pagedgen.scheduling.sequence import SequenceGroup
from pagedgen.text.prompts import PromptRenderer

# Rows rendered and tokenized in one call.
_BATCH = 64
# Tokens of prompts that are looked at; what is left of a sample is then not.
MOST_TOKENS = 8 << 20
# Errors kept to be shown: so many in all, and so many of one status.
_MOST_EXAMPLES, _MOST_OF_ONE = 6, 2
# What ends a simulated completion that may stop by itself: an id that no vocabulary has.
END_ID = (1 << 30) - 1


@dataclass(frozen=True, slots=True)
class Example:
    """A row that cannot be run."""

    status: Status
    error: str


@dataclass(slots=True)
class Survey:
    """read: rows looked at. statuses: of those that cannot be run. lengths: of the prompts of the others, in tokens.
    shared_tokens: prompt tokens in full blocks whose prefix an earlier row has too. groups: the requests, ready to be
    simulated. may_stop: how many of them may end before their limit. sequences: samples and beams of all of them.
    completions: that all rows give; one that cannot be run gives one too."""

    read: int = 0
    statuses: Counter[Status] = field(default_factory=Counter)
    examples: list[Example] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    shared_tokens: int = 0
    groups: list[SequenceGroup] = field(default_factory=list)
    may_stop: int = 0
    sequences: int = 0
    completions: int = 0

    def refuse(self, error: RowError) -> None:
        self.statuses[error.status] += 1
        self.completions += 1
        if len(self.examples) < _MOST_EXAMPLES and self.statuses[error.status] <= _MOST_OF_ONE:
            self.examples.append(Example(error.status, error.message))


class Surveyor:
    """Puts rows through the checks of a run: rendering, parameters, admission."""

    def __init__(
        self,
        config: JobConfig,
        renderer: PromptRenderer,
        admission: Admission,
        defaults: SamplingParams,
        is_batch: bool,
    ) -> None:
        self._renderer, self._admission, self._defaults = renderer, admission, defaults
        self._beam: BeamParams | None = config.beam
        self._block_size = config.engine.block_size
        self._is_batch = is_batch
        self._prefixes: set[int] = set()

    def survey(self, records: Iterable[PromptRecord]) -> Survey:
        """The rows in order, as far as MOST_TOKENS reach."""
        found = Survey()
        rows, tokens = iter(records), 0
        while tokens < MOST_TOKENS and (batch := list(itertools.islice(rows, _BATCH))):
            meant = list(map(self._from_batch_file, batch)) if self._is_batch else batch
            for record, prompt in zip(meant, self._renderer.render_batch(meant), strict=True):
                found.read += 1
                try:
                    if isinstance(prompt, RowError):
                        raise prompt
                    group = self._group(record, prompt)
                except RowError as error:
                    found.refuse(error)
                    continue
                found.groups.append(group)
                found.sequences += group.num_slots
                found.completions += group.first.params.n if group.beam is None else group.beam.params.num_return
                found.may_stop += bool(group.first.end_ids)
                found.lengths.append(group.first.num_prompt)
                found.shared_tokens += self._shared(group)
                tokens += group.first.num_prompt
        return found

    def _group(self, record: PromptRecord, prompt: tuple[int, ...]) -> SequenceGroup:
        """Only what decides about length, sharing and time is left of its parameters. Raises RowError."""
        params = resolve_params(record.columns, self._defaults, record.where)
        request = Request(record.row, record.id, prompt_token_ids=prompt, params=params, beam=self._beam)
        try:
            group = self._admission.group(request, prompt)
        except RowError as error:
            raise RowError(error.status, f"{record.where}: {error.message}") from None
        sequence = group.first
        may_stop = bool(sequence.end_ids or sequence.stop_checker is not None)
        sequence.params = replace(sequence.params, stop=(), logprobs=None, prompt_logprobs=None, logit_bias=())
        sequence.stop_checker, sequence.bad_words = None, ()
        if group.beam is None:  # a search counts them, and draws none
            sequence.end_ids = frozenset({END_ID} if may_stop else ())
        return group

    @staticmethod
    def _from_batch_file(record: PromptRecord) -> PromptRecord:
        """A line of an OpenAI batch file, in our own columns."""
        if record.error is not None:
            return record
        try:
            request = request_columns(record.columns, record.where)
        except RowError as error:
            return record._replace(error=error.message)
        return record._replace(columns=request.columns, raw=request.endpoint == "completion")

    def _shared(self, group: SequenceGroup) -> int:
        """Tokens of the prompt's full blocks that begin as an earlier prompt does; the prompt's prefixes count from now
        on. The last token is always computed."""
        token_ids, size = group.first.token_ids, self._block_size
        node, shared, is_shared = 0, 0, True
        for start in range(0, (len(token_ids) - 1) // size * size, size):
            node = hash((node, token_ids[start : start + size].tobytes()))
            is_shared = is_shared and node in self._prefixes
            shared += size * is_shared
            self._prefixes.add(node)
        return shared
