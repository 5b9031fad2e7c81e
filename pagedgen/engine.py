"""The engine: composes the policy half (scheduling) and the device half (execution)."""

import contextlib
import itertools
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial

from pagedgen.admission import Admission, Limits
from pagedgen.config import EngineConfig
from pagedgen.errors import RowError
from pagedgen.execution.attention import choose_backend
from pagedgen.execution.failures import free_unused_memory
from pagedgen.execution.kv_cache import KVCache
from pagedgen.execution.memory import device_bytes, naming_memory, size_pool
from pagedgen.execution.runner import make_runner
from pagedgen.models.llama import LlamaModel
from pagedgen.models.loader import load_model
from pagedgen.params import defaults_from_generation_config, merge_eos_token_ids
from pagedgen.pipeline import Pipeline
from pagedgen.quantizing import quantize_model
from pagedgen.request import Completion, FinishReason, Request, Status
from pagedgen.scheduling.blocks import BlockManager
from pagedgen.scheduling.scheduler import Scheduler
from pagedgen.scheduling.sequence import Sequence
from pagedgen.stats.types import RunInfo, StepSample
from pagedgen.step import SlotArrays
from pagedgen.text.tokenizer import Tokenizer

# Requests tokenized in one call.
TOKENIZE_BATCH = 64


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
        phase, on_note = on_phase or (lambda _: None), on_note or (lambda _: None)
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
        if config.quantize is not None and isinstance(self.model, LlamaModel):
            phase("quantizing")
            quantize_model(self.model, self.tokenizer)
            self.spec = spec = self.model.spec
        phase("measuring memory")
        attention = choose_backend(spec.device)
        self.attention_name, self.kernels_note = attention.name, attention.note
        self._pool = size_pool(config, self.model, attention, self.max_model_len)
        num_blocks = self._pool.num_blocks
        self.kv_bytes = num_blocks * KVCache.bytes_per_block(spec.layers, config.block_size, spec.dtype)
        with naming_memory(config, self.kv_bytes, self.max_model_len):
            cache = KVCache(spec.layers, num_blocks, config.block_size, spec.dtype, spec.device)
            self.state = SlotArrays(config.max_seqs, self.max_model_len, config.block_size)
            self.runner = make_runner(config, self.model, cache, attention, self.state, on_note)
            self.blocks = BlockManager(num_blocks, self.state, config.prefix_cache and not spec.kv_depends_on_length)
        self.scheduler = Scheduler(self.state, self.blocks, config.max_batch_tokens)
        self._pipeline = Pipeline(
            self.scheduler,
            self.runner,
            ahead=config.overlap and self.runner.device_state is not None,
            free_memory=partial(free_unused_memory, spec.device),
            on_step=on_step,
            on_note=on_note,
        )
        limits = Limits(
            vocab_size=spec.vocab_size,
            max_position=spec.max_position,
            max_model_len=self.max_model_len,
            num_blocks=num_blocks,
            block_size=config.block_size,
            bytes_per_block=self.kv_bytes // num_blocks,
        )
        self.admission = Admission(config, limits, self.tokenizer, self.end_ids, self.default_params)

    @property
    def info(self) -> RunInfo:
        """What runs on what, for reports."""
        spec = self.spec
        return RunInfo(
            model=spec.name,
            device=spec.device.type,
            dtype=str(spec.dtype).removeprefix("torch."),
            kernels=self.config.kernels_name(self.attention_name),
            kv_bytes=self.kv_bytes,
            kv_blocks=self.blocks.num_blocks,
            block_size=self.blocks.block_size,
            max_model_len=self.max_model_len,
            max_seqs=self.config.max_seqs,
            max_batch_tokens=self.config.max_batch_tokens,
            weight_bytes=spec.weight_bytes,
            activation_bytes=self._pool.activation_bytes,
            logits_bytes=self._pool.logits_bytes,
            vocab_size=spec.vocab_size,
        )

    @property
    def device_bytes(self) -> Callable[[], int] | None:
        """Tells the bytes that torch holds on an accelerator; None on a CPU, where the process tells them."""
        return None if self.spec.device.type == "cpu" else partial(device_bytes, self.spec.device)

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
                for group in self._pipeline.step():
                    yield [self._completion(sequence) for sequence in group.sequences]
        finally:
            self._pipeline.abort()

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
                    self.scheduler.add(self.admission.group(request, ids))
                except RowError as error:
                    length = 0 if isinstance(ids, Exception) else len(ids)
                    yield Completion(
                        request.row, request.id, 0, error.status, error=error.message, prompt_tokens=length
                    )

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
