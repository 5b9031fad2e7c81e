"""The engine: composes the policy half (scheduling) and the device half (execution)."""

import contextlib
import itertools
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pagedgen.beam_params import validate_beam
from pagedgen.config import EngineConfig
from pagedgen.errors import RowError
from pagedgen.execution.attention import choose_backend
from pagedgen.execution.kv_cache import KVCache
from pagedgen.execution.memory import free_unused_memory, is_out_of_memory, naming_memory, size_pool
from pagedgen.execution.runner import ModelRunner
from pagedgen.models.loader import load_model
from pagedgen.params import defaults_from_generation_config, merge_eos_token_ids, validate_params
from pagedgen.request import BeamParams, Completion, FinishReason, Request, SamplingParams, Status
from pagedgen.scheduling.beam import BeamSearch
from pagedgen.scheduling.blocks import BlockManager
from pagedgen.scheduling.scheduler import Scheduler
from pagedgen.scheduling.sequence import Sequence, SequenceGroup, random_key
from pagedgen.stats.types import RunInfo, StepSample
from pagedgen.step import SlotArrays, StepPlan, StepResult
from pagedgen.text.stop import StopChecker
from pagedgen.text.tokenizer import Tokenizer
from pagedgen.units import format_bytes

# Requests tokenized in one call.
TOKENIZE_BATCH = 64


@dataclass(frozen=True, slots=True)
class _CheckedParams:
    """A request's parameters as they were given and as they were found to be, the ids that end its completions, and the
    token sequences of its bad words."""

    given: SamplingParams
    params: SamplingParams
    end_ids: frozenset[int]
    bad_words: tuple[tuple[int, ...], ...]


class Engine:
    """Generates completions for a stream of requests with continuous batching over one paged KV pool.

    on_phase is called with a word on what the start-up is doing; on_step with a StepSample after every step that did
    not run out of memory; on_note with a sentence when steps have to become smaller than ever, because one did.

    Raises PagedgenError when the model cannot be loaded or the memory does not suffice, UsageError for a wrong setting.
    """

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        on_phase: Callable[[str], None] | None = None,
        on_step: Callable[[StepSample], None] | None = None,
        on_note: Callable[[str], None] | None = None,
    ) -> None:
        self.config = config = config or EngineConfig()
        self._on_step, self._on_note = on_step, on_note or (lambda _: None)
        phase = on_phase or (lambda _: None)
        phase("loading the model")
        loaded = load_model(config)
        self.model = loaded.model
        self.spec = spec = loaded.model.spec
        self.generation_config = loaded.generation_config
        self.tokenizer = Tokenizer.load(loaded.tokenizer_path, config.trust_remote_code)
        stated = loaded.generation_config.get("eos_token_id", getattr(loaded.hf_config, "eos_token_id", None))
        end_ids = merge_eos_token_ids(stated, self.tokenizer.eos_token_ids)
        self.end_ids = frozenset(token_id for token_id in end_ids if 0 <= token_id < spec.vocab_size)
        self.default_params = defaults_from_generation_config(self.generation_config, {})
        self.max_model_len = config.max_model_len or spec.max_position
        phase("measuring memory")
        attention = choose_backend(spec.device)
        self.attention_name, self.kernels_note = attention.name, attention.note
        num_blocks = size_pool(config, self.model, attention, self.max_model_len)
        self.kv_bytes = num_blocks * KVCache.bytes_per_block(spec.layers, config.block_size, spec.dtype)
        with naming_memory("setting up the KV pool and the sequences"):
            cache = KVCache(spec.layers, num_blocks, config.block_size, spec.dtype, spec.device)
            self.runner = ModelRunner(self.model, cache, attention)
            self.state = SlotArrays(config.max_seqs, self.max_model_len, config.block_size)
            self.blocks = BlockManager(num_blocks, self.state, config.prefix_cache and not spec.kv_depends_on_length)
        self.scheduler = Scheduler(self.state, self.blocks, config.max_batch_tokens)
        self._last_checked: _CheckedParams | None = None

    @property
    def info(self) -> RunInfo:
        """What runs on what, for reports."""
        spec = self.spec
        return RunInfo(
            model=spec.name,
            device=spec.device.type,
            dtype=str(spec.dtype).removeprefix("torch."),
            kernels=self.attention_name,
            kv_bytes=self.kv_bytes,
            kv_blocks=self.blocks.num_blocks,
            block_size=self.blocks.block_size,
        )

    def generate(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """The completions of `complete`, one by one; those of one request come together."""
        with contextlib.closing(self.complete(requests)) as completed:
            for completions in completed:
                yield from completions

    def complete(self, requests: Iterable[Request]) -> Generator[list[Completion]]:
        """Complete the requests and yield all completions of each as soon as it ends, so not in the requests' order.

        Requests are pulled as they are needed: memory does not grow with their number. A request that cannot be
        completed yields one Completion with a status other than `ok`. Only one `complete` or `generate` may be under
        way at a time; one that ends early, by an error or by being closed, forgets its requests.
        """
        if self.scheduler.has_work:
            raise RuntimeError("another generate() of this engine is still under way; close it first")
        source = iter(requests)
        try:
            while True:
                for refused in self._fill(source):
                    yield [refused]
                if not self.scheduler.has_work:
                    return
                for group in self._step():
                    yield [self._completion(sequence) for sequence in group.sequences]
        finally:
            self.scheduler.abort()

    def _step(self) -> list[SequenceGroup]:
        """Schedule, execute, update: one step of all running sequences. The groups that finished in it."""
        before = replace(self.scheduler.counts)
        started = time.perf_counter()
        plan = self.scheduler.schedule()
        assert plan is not None, "a step was asked for, but there is no work"
        scheduled = time.perf_counter()
        memory = self._memory(plan)
        result = self._execute(plan)
        if result is None:
            return self._take_back(plan)
        executed = time.perf_counter()
        finished = self.scheduler.update(plan, result)
        if self._on_step is not None:
            ended, counts = time.perf_counter(), self.scheduler.counts
            self._on_step(
                StepSample(
                    start=started,
                    end=ended,
                    **memory,
                    total_blocks=self.blocks.num_blocks,
                    block_size=self.blocks.block_size,
                    prompt_tokens=counts.prompt_tokens - before.prompt_tokens,
                    output_tokens=counts.output_tokens - before.output_tokens,
                    cached_prompt_tokens=counts.cached_tokens - before.cached_tokens,
                    preemptions=counts.preemptions - before.preemptions,
                    block_copies=len(plan.copies),
                    schedule_s=scheduled - started,
                    build_s=result.seconds[0],
                    model_s=result.seconds[1],
                    sample_s=result.seconds[2],
                    update_s=ended - executed,
                )
            )
        return finished

    def _execute(self, plan: StepPlan) -> StepResult | None:
        """None when the step ran out of memory."""
        try:
            return self.runner.execute(plan, self.state)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
        free_unused_memory(self.spec.device)  # only here is the error gone, whose frames held the step's tensors
        return None

    def _take_back(self, plan: StepPlan) -> list[SequenceGroup]:
        """Go on after a step that ran out of memory; the groups that it ends."""
        budget = self.scheduler.budget
        least = budget.least
        ended = self.scheduler.step_failed(plan)
        if budget.least < least:
            tokens = "1 token" if plan.num_tokens == 1 else f"{plan.num_tokens} tokens"
            self._on_note(f"a step of {tokens} ran out of memory; going on with {budget.tokens}")
        return ended

    def _memory(self, plan: StepPlan) -> dict[str, int]:
        """The blocks while the step's sequences hold them; each token of the step fills one more slot."""
        return {
            "used_blocks": self.blocks.num_used,
            "cached_blocks": self.blocks.num_cached,
            "free_blocks": self.blocks.num_free,
            "filled_slots": self.blocks.filled_slots + plan.num_tokens,
            "logical_blocks": self.blocks.logical_blocks,
            "running": self.scheduler.num_running,
            "waiting": len(self.scheduler.waiting),
        }

    def _fill(self, source: Iterator[Request]) -> Iterator[Completion]:
        """Tokenize requests ahead of the scheduler, in batches; yields those that cannot be run."""
        while len(self.scheduler.waiting) < max(TOKENIZE_BATCH, self.config.max_seqs):
            batch = list(itertools.islice(source, TOKENIZE_BATCH))
            if not batch:
                return
            texts = [request.prompt or "" for request in batch if request.prompt_token_ids is None]
            encoded = iter(self.tokenizer.encode_each(texts, add_special_tokens=True))
            for request in batch:
                ids = request.prompt_token_ids if request.prompt_token_ids is not None else next(encoded)
                try:
                    if isinstance(ids, Exception):
                        raise RowError(Status.BAD_ROW, f"the prompt cannot be tokenized: {ids}")
                    self.scheduler.add(self._group(request, ids))
                except RowError as error:
                    length = 0 if isinstance(ids, Exception) else len(ids)
                    yield Completion(
                        request.row, request.id, 0, error.status, error=error.message, prompt_tokens=length
                    )

    def _group(self, request: Request, prompt: Collection[int]) -> SequenceGroup:
        """Raises RowError with status bad_row, too_long or unfit when the request cannot be run."""
        try:
            checked = self._check_params(request.params or self.default_params)
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
            stop_checker=StopChecker(self.tokenizer, params.stop, params.min_tokens) if params.stop else None,
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
            end_ids |= self.end_ids
        checked = _CheckedParams(given, params, end_ids, self._bad_words(params))
        if given == params:  # otherwise it may hold a list, which may have other items the next time
            self._last_checked = checked
        return checked

    def _check_vocabulary(self, params: SamplingParams) -> None:
        """Raises RowError when a parameter goes beyond the model's vocabulary."""
        vocab_size = self.spec.vocab_size
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
        if width > self.config.max_seqs:
            raise RowError(
                Status.UNFIT,
                f"{option} is {width}, but at most {self.config.max_seqs} sequences run at a time; lower it or raise "
                f"--max-seqs",
            )
        blocks, max_total = self.blocks, self.max_model_len
        shared = length // blocks.block_size
        room = (shared + (blocks.num_blocks - shared) // width) * blocks.block_size
        if params.max_tokens is not None:
            max_total = min(max_total, length + params.max_tokens)
        elif length < room:
            max_total = min(max_total, room)
        # The last token is drawn, but its key and value are never computed.
        if max_total - 1 > room:
            several = "" if width == 1 else f" in each of {width} sequences"
            raise RowError(
                Status.UNFIT,
                f"{length} prompt tokens and up to {max_total - length} new ones{several} need more than the KV pool "
                f"of {self.scheduler.capacity} tokens ({format_bytes(self.kv_bytes)}); raise --kv-memory or lower "
                f"--max-tokens{'' if width == 1 else f' or {option}'}",
            )
        return max_total

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """The token sequences of the bad words, at the start of a text and after a space."""
        if not params.bad_words:
            return ()
        spellings = [spelling for word in params.bad_words for spelling in (word, " " + word.lstrip())]
        encoded = self.tokenizer.encode_batch(spellings, add_special_tokens=False)
        return tuple(dict.fromkeys(tuple(ids) for ids in encoded if ids))

    def _token_ids(self, prompt: Collection[int]) -> NDArray[np.int32]:
        """Raises RowError when the prompt is empty or holds what is no token id of the model."""
        if not prompt:
            raise RowError(Status.BAD_ROW, "the prompt is empty; give it at least one token")
        given = np.array(list(prompt))
        # Python's own min and max: numpy's take longer to begin than a short prompt takes to go through.
        if given.dtype.kind not in "iu" or min(prompt) < 0 or max(prompt) >= self.spec.vocab_size:
            raise RowError(
                Status.BAD_ROW, f"the prompt's token ids must be whole numbers from 0 to {self.spec.vocab_size - 1}"
            )
        return given.astype(np.int32)

    def _fit(self, token_ids: NDArray[np.int32], params: SamplingParams) -> NDArray[np.int32]:
        """Refuse or truncate a prompt that leaves no room for one new token. Truncation makes room for max_tokens, as
        far as that leaves at least half of the model's length to the prompt."""
        limit, how = self.max_model_len - 1, self.config.on_too_long
        if len(token_ids) <= limit:
            return token_ids
        raise_it = ", raise --max-model-len" if self.max_model_len < self.spec.max_position else ""
        if how == "error":
            raise RowError(
                Status.TOO_LONG,
                f"the prompt has {len(token_ids)} tokens, but with one new token at most {self.max_model_len} fit; "
                f"shorten it{raise_it}, or pass --on-too-long truncate-left",
            )
        keep = max(self.max_model_len - (params.max_tokens or 1), self.max_model_len // 2)
        return token_ids[-keep:] if how == "truncate-left" else token_ids[:keep]

    def _completion(self, sequence: Sequence) -> Completion:
        request, status = sequence.request, sequence.status
        assert status is not None
        generated = sequence.generated.tolist()
        error = None
        if status is Status.NAN_LOGITS:
            error = f"the model's logits were NaN or all -inf at position {len(sequence.token_ids)}"
        elif status is Status.OUT_OF_MEMORY:
            error = (
                f"it ran out of memory alone and one token at a time, at {len(sequence.token_ids)} tokens; free some "
                "memory, lower --kv-memory, or shorten the prompt or --max-tokens"
            )
        text = sequence.final_text
        if text is None and status is Status.OK:
            ended_by_id = sequence.finish_reason is FinishReason.STOP
            text = self.tokenizer.decode(generated[:-1] if ended_by_id else generated)
        logprobs = tuple(sequence.logprobs) if sequence.params.logprobs is not None else None
        return Completion(
            row=request.row,
            id=request.id,
            sample=sequence.sample,
            status=status,
            text=text,
            finish_reason=sequence.finish_reason,
            error=error,
            prompt_tokens=sequence.num_prompt,
            cached_tokens=max(0, sequence.cached_tokens),
            token_ids=tuple(generated),
            cumulative_logprob=self._cumulative_logprob(sequence),
            score=sequence.score,
            logprobs=logprobs,
            prompt_logprobs=tuple(sequence.prompt_logprobs) if sequence.params.prompt_logprobs is not None else None,
        )

    @staticmethod
    def _cumulative_logprob(sequence: Sequence) -> float | None:
        if sequence.score is not None:
            return sequence.cumulative_logprob
        return None if sequence.params.logprobs is None else sum(found.logprob for found in sequence.logprobs)
