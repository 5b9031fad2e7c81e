"""Makes a plan: what a run would need, from its configuration and its rows, before any weights are loaded."""

import contextlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

from pagedgen.admission import Admission, Limits
from pagedgen.config import JobConfig
from pagedgen.data.openai_batch import is_batch
from pagedgen.data.readers import InputSource, open_bundled_prompts, open_input
from pagedgen.execution.attention import choose_backend
from pagedgen.job_setup import check_against_vocabulary, check_options, naming_paths
from pagedgen.models.facts import ModelFacts, model_facts
from pagedgen.params import defaults_from_generation_config, merge_eos_token_ids, unsupported_in_generation_config
from pagedgen.planning.lengths import ExpectedLengths, LengthCurve, MeanLength
from pagedgen.planning.machine import figures
from pagedgen.planning.memory import PoolPlan, plan_pool
from pagedgen.planning.profile import Profile, load_profile
from pagedgen.planning.rows import RowSample, sample_rows
from pagedgen.planning.steptime import StepTime, roofline
from pagedgen.planning.store import plan_key, save_plan
from pagedgen.planning.survey import Survey, Surveyor
from pagedgen.planning.trial import Outcome, simulate
from pagedgen.request import SamplingParams
from pagedgen.text.prompts import PromptRenderer, require_prompt_column
from pagedgen.text.tokenizer import Tokenizer

# Without a run to tell, a token of text has about so many bytes.
_BYTES_PER_TOKEN = 4.0
# What a row of the output takes besides its text and the input's columns.
_BYTES_PER_COMPLETION = 64


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that the report says. facts, pool, sample and survey: see there. max_model_len: of the run.

    outcome: of the simulated rows; good_rows: rows of the whole input that can be run, an estimate where not all were
    looked at.
    length_source, time_source: what the lengths of completions and the times of steps rest on, in words.
    load_s: seconds before the first step, None when no run has shown it. output_bytes: of the output, at most.
    free_disk: bytes in the current folder's file system.
    """

    input: str
    facts: ModelFacts
    kernels: str
    block_size: int
    max_seqs: int
    max_model_len: int
    width: int | None
    pool: PoolPlan
    sample: RowSample
    survey: Survey
    outcome: Outcome
    good_rows: float
    length_source: str
    time_source: str
    load_s: float | None
    output_bytes: int
    free_disk: int

    @property
    def is_sampled(self) -> bool:
        """Whether figures of all rows come from a part of them."""
        return self.outcome.rows < self.good_rows

    def of_all(self, name: str) -> int:
        """A sum of the outcome, for all rows."""
        return round(self.outcome.sum_for(self.good_rows, name))

    @property
    def generating_s(self) -> float:
        return self.outcome.time_for(self.good_rows)[0]

    @property
    def steps(self) -> int:
        return round(self.outcome.time_for(self.good_rows)[1])

    @property
    def peak_kv_bytes(self) -> int:
        return self.outcome.peak_blocks * self.pool.bytes_per_block

    @property
    def typical_tokens(self) -> int:
        """The mean length of a sequence at its end."""
        survey = self.survey
        output = self.outcome.output_tokens / max(1, self.outcome.rows)
        per_sequence = output * len(survey.groups) / max(1, survey.sequences)
        return round(sum(survey.lengths) / max(1, len(survey.lengths)) + per_sequence)

    @property
    def fitting_typical(self) -> int:
        """Sequences of the typical length that the pool holds at a time, were they to share nothing."""
        return self._fitting(self.typical_tokens)

    @property
    def fitting_full(self) -> int:
        """The same at the run's full length."""
        return self._fitting(self.max_model_len)

    def _fitting(self, tokens: int) -> int:
        return self.pool.num_blocks // max(1, -(-tokens // self.block_size))

    def expected(self) -> dict[str, Any]:
        """What `save_plan` keeps."""
        return {
            "made": datetime.now(UTC).isoformat(timespec="seconds"),
            "rows": self.sample.total,
            "prompt_tokens": self.of_all("prompt_tokens"),
            "output_tokens": self.of_all("output_tokens"),
            "steps": self.steps,
            "generating_s": self.generating_s,
            "peak_kv_bytes": self.peak_kv_bytes,
            "peak_running": self.outcome.peak_running,
            "output_bytes": self.output_bytes,
        }


def make_plan(
    config: JobConfig,
    stdin: BinaryIO | None = None,
    *,
    output_tokens: float | None = None,
    warn: Callable[[str], None] = lambda _: None,
) -> Plan:
    """Plan a job and keep what is expected of it for the run's report.

    stdin: what the input path `-` reads. output_tokens: the mean length of completions; None takes what an earlier run
    has shown, else the most that each may have. warn: called with sentences for the user. Raises PagedgenError and
    UsageError for what the run itself would refuse.
    """
    config = check_options(config)
    with naming_paths():
        source = open_bundled_prompts() if config.input.is_empty else open_input(config.input, stdin=stdin)
        in_batches = is_batch(source.columns.names)
        if not in_batches:
            require_prompt_column(source.columns.names, config.prompt)
        key = plan_key(config, source)
    with naming_paths(), _setup(config, warn) as setup:
        sample = sample_rows(source)
        surveyor = Surveyor(config, setup.renderer, setup.admission, setup.defaults, in_batches)
        survey = surveyor.survey(sample.records)
    plan = _plan(config, source, setup, sample, survey, output_tokens)
    if survey.groups:
        save_plan(key, plan.expected())
    return plan


@dataclass(frozen=True, slots=True)
class _Setup:
    """What the engine would have set up by its first step."""

    facts: ModelFacts
    kernels: str
    max_model_len: int
    profile: Profile | None
    pool: PoolPlan
    defaults: SamplingParams
    admission: Admission
    renderer: PromptRenderer


@contextlib.contextmanager
def _setup(config: JobConfig, warn: Callable[[str], None]) -> Iterator[_Setup]:
    engine = config.engine
    with model_facts(engine) as facts:
        attention = choose_backend(facts.device)
        if attention.note is not None:
            warn(attention.note)
        max_model_len = engine.max_model_len or facts.max_position
        tokenizer = Tokenizer.load(str(facts.tokenizer_path), engine.trust_remote_code)
        defaults = defaults_from_generation_config(facts.generation_config, config.overrides)
        check_against_vocabulary(defaults, config.overrides, facts.vocab_size)
        searching = config.beam is not None
        for unsupported in unsupported_in_generation_config(facts.generation_config, searching=searching):
            warn(f"the model's generation_config.json asks for {unsupported}, which this version does not apply")
        profile = load_profile(facts.name, facts.device.type, _name(facts), attention.name)
        pool = plan_pool(engine, facts, max_model_len, profile)
        end_ids = merge_eos_token_ids(facts.stated_eos, tokenizer.eos_token_ids)
        limits = Limits(
            vocab_size=facts.vocab_size,
            max_position=facts.max_position,
            max_model_len=max_model_len,
            num_blocks=pool.num_blocks,
            block_size=engine.block_size,
            bytes_per_block=pool.bytes_per_block,
        )
        known_ends = [token_id for token_id in end_ids if 0 <= token_id < facts.vocab_size]
        yield _Setup(
            facts=facts,
            kernels=attention.name,
            max_model_len=max_model_len,
            profile=profile,
            pool=pool,
            defaults=defaults,
            admission=Admission(engine, limits, tokenizer, known_ends, defaults),
            renderer=PromptRenderer(
                tokenizer, config.prompt, on_note=warn, max_tokens=max_model_len, on_too_long=engine.on_too_long
            ),
        )


def _plan(
    config: JobConfig,
    source: InputSource,
    setup: _Setup,
    sample: RowSample,
    survey: Survey,
    output_tokens: float | None,
) -> Plan:
    facts, engine, profile = setup.facts, config.engine, setup.profile
    searches = config.beam is not None
    lengths, length_source = _lengths(profile, survey, output_tokens, searches)
    step_time, time_source = _step_time(facts, setup, engine.block_size)
    outcome = simulate(
        survey.groups,
        engine,
        num_blocks=setup.pool.num_blocks,
        max_model_len=setup.max_model_len,
        prefix_cache=engine.prefix_cache and not facts.kv_depends_on_length,
        cost=step_time,
        lengths=lengths,
    )
    good_rows = sample.total * len(survey.groups) / max(1, survey.read)
    return Plan(
        input=source.description,
        facts=facts,
        kernels=setup.kernels,
        block_size=engine.block_size,
        max_seqs=engine.max_seqs,
        max_model_len=setup.max_model_len,
        width=config.beam.width if config.beam is not None else None,
        pool=setup.pool,
        sample=sample,
        survey=survey,
        outcome=outcome,
        good_rows=good_rows,
        length_source=length_source,
        time_source=time_source,
        load_s=profile.load_s if profile is not None else None,
        output_bytes=_output_bytes(source, sample, survey, outcome.sum_for(good_rows, "output_tokens"), profile),
        free_disk=shutil.disk_usage(Path.cwd()).free,
    )


def _lengths(
    profile: Profile | None, survey: Survey, output_tokens: float | None, searches: bool
) -> tuple[ExpectedLengths, str]:
    if not survey.may_stop:
        return ExpectedLengths(None), "exactly its limit, as nothing ends a completion before"
    if output_tokens is not None:
        return ExpectedLengths(MeanLength(output_tokens)), f"a mean of {output_tokens:g} tokens, as given"
    if profile is not None and profile.lengths and not searches:
        count = len(profile.lengths)
        return ExpectedLengths(LengthCurve(profile.lengths)), f"drawn from the {count:,} of earlier runs"
    return ExpectedLengths(None), "at most: its limit (--output-tokens N states a mean)"


def _step_time(facts: ModelFacts, setup: _Setup, block_size: int) -> tuple[StepTime, str]:
    profile = setup.profile
    if profile is not None:
        busy = ", busy with other work too" if profile.was_busy else ""
        source = f"measured profile of this machine ({_day(profile.date)}, {profile.steps:,} steps{busy})"
        return profile.step_time, source
    found = figures(facts.device.type, _name(facts))
    time = roofline(
        found,
        weight_bytes=facts.size.weight_bytes,
        active=facts.size.active,
        head=facts.size.head,
        kv_token_bytes=setup.pool.bytes_per_block / block_size,
        vocab_size=facts.vocab_size,
    )
    return time, f"rough figures of the machine, not measured ({found.text})"


def _output_bytes(
    source: InputSource, sample: RowSample, survey: Survey, output_tokens: float, profile: Profile | None
) -> int:
    """The text, the columns of the result, and the input's columns once for each completion, all uncompressed."""
    per_row = survey.completions / max(1, survey.read)
    per_token = (profile.bytes_per_token if profile is not None else None) or _BYTES_PER_TOKEN
    return round(
        output_tokens * per_token + per_row * (sample.total * _BYTES_PER_COMPLETION + (source.total_bytes or 0))
    )


def _name(facts: ModelFacts) -> str:
    return str(facts.dtype).removeprefix("torch.")


def _day(date: str) -> str:
    return date[:10]
