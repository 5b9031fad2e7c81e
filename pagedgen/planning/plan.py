"""Makes a plan: what a run would need, from its configuration and its rows, before any weights are loaded."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, BinaryIO

from pagedgen.admission import Admission, Limits
from pagedgen.config import JobConfig
from pagedgen.data.openai_batch import is_batch
from pagedgen.data.readers import InputSource
from pagedgen.errors import before_any_work
from pagedgen.execution.attention import choose_backend
from pagedgen.job_setup import check_against_vocabulary, check_options, naming_paths, open_rows
from pagedgen.models.facts import ModelFacts, model_facts
from pagedgen.params import defaults_from_generation_config, merge_eos_token_ids, unsupported_in_generation_config
from pagedgen.planning.disk import Amounts, DiskUse, OutputSize
from pagedgen.planning.lengths import ExpectedLengths, LengthCurve, MeanLength
from pagedgen.planning.machine import figures
from pagedgen.planning.memory import PoolPlan, plan_pool
from pagedgen.planning.profile import Profile, load_profile
from pagedgen.planning.rows import RowSample, sample_rows
from pagedgen.planning.steptime import REACH, BoundedTime, StepTime, roofline
from pagedgen.planning.store import plan_key, save_plan
from pagedgen.planning.survey import Survey, Surveyor
from pagedgen.planning.trial import Outcome, simulate
from pagedgen.request import SamplingParams
from pagedgen.text.prompts import PromptRenderer
from pagedgen.text.tokenizer import Tokenizer

# More of the tokens than this in steps far larger than any that were measured is worth a word.
_FAR_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that the report says. facts, pool, sample and survey: see there. max_model_len: of the run.

    outcome: of the simulated rows; good_rows: rows of the whole input that can be run, an estimate where not all were
    looked at.
    length_source, time_source: what the lengths of completions and the times of steps rest on, in words.
    measured_tokens: of the largest steps that were measured, None when none were.
    load_s: seconds before the first step, None when no run has shown it. disk: what the output takes.
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
    measured_tokens: int | None
    load_s: float | None
    disk: DiskUse

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
    def far_tokens(self) -> int | None:
        """The tokens of the largest steps, when much is computed in steps far larger than any that were measured."""
        if self.measured_tokens is None:
            return None
        tokens = self.outcome.step_tokens
        far = sum(count for count in tokens if count > REACH * self.measured_tokens)
        return max(tokens) if far > _FAR_SHARE * sum(tokens) else None

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
            "output_bytes": self.disk.output_bytes,
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
    return plan_rows(config, open_rows(config, stdin), output_tokens=output_tokens, warn=warn)


def plan_rows(
    config: JobConfig, source: InputSource, *, output_tokens: float | None, warn: Callable[[str], None]
) -> Plan:
    """`make_plan` of a job whose options were checked and whose input is open."""
    with naming_paths():
        output = OutputSize(config, source)
        key = plan_key(config, source)
    with naming_paths(), _setup(config, warn) as setup:
        sample = sample_rows(source)
        surveyor = Surveyor(config, setup.renderer, setup.admission, setup.defaults, is_batch(source.columns.names))
        survey = surveyor.survey(sample.records)
    plan = _plan(config, source.description, output, setup, sample, survey, output_tokens)
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
    with contextlib.ExitStack() as stack:
        with before_any_work():
            facts = stack.enter_context(model_facts(engine))
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
        profile = load_profile(facts.name, facts.device.type, _name(facts), engine.kernels_name(attention.name))
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
            kernels=engine.kernels_name(attention.name),
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
    input: str,
    output: OutputSize,
    setup: _Setup,
    sample: RowSample,
    survey: Survey,
    output_tokens: float | None,
) -> Plan:
    facts, engine, profile = setup.facts, config.engine, setup.profile
    lengths, length_source = _lengths(profile, survey, output_tokens, config.beam is not None)
    step_time, time_source = _step_time(facts, setup, engine.block_size)
    longest = [lengths(group.first) for group in survey.groups if group.beam is not None]
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
    tokens = outcome.sum_for(good_rows, "output_tokens")
    if config.beam is not None:  # most of what beams draw is dropped
        tokens = sum(longest) / max(1, len(longest)) * good_rows * config.beam.num_return
    amounts = Amounts(
        completions=sample.total * survey.completions / max(1, survey.read),
        tokens=tokens,
        prompt_tokens=sum(survey.lengths) / max(1, len(survey.lengths)) * good_rows,
        seconds=outcome.time_for(good_rows)[0],
        bytes_per_token=profile.bytes_per_token if profile is not None else None,
        logprobs=_entries(setup.defaults.logprobs) if config.beam is None else 0,
        prompt_logprobs=_entries(setup.defaults.prompt_logprobs) if config.beam is None else 0,
    )
    return Plan(
        input=input,
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
        measured_tokens=profile.measured_tokens if profile is not None else None,
        load_s=profile.load_s if profile is not None else None,
        disk=output.of(sample.records[: survey.read], survey, amounts),
    )


def _entries(logprobs: int | None) -> int:
    """Log-probabilities for each token: its own and those of the likeliest."""
    return 0 if logprobs is None else 1 + logprobs


def _lengths(
    profile: Profile | None, survey: Survey, output_tokens: float | None, searches: bool
) -> tuple[ExpectedLengths, str]:
    if not survey.may_stop:
        return ExpectedLengths(None), "exactly its limit, as nothing ends a completion before"
    if output_tokens is not None:
        known = MeanLength(output_tokens, survey.groups)
        source = f"a mean of {output_tokens:g} tokens, as given"
        if abs(known.mean - output_tokens) > max(0.5, 0.01 * output_tokens):
            bound = "at its limit" if known.mean < output_tokens else "as its least allows"
            source = f"{bound}: a mean of {known.mean:,.4g} tokens, and not of {output_tokens:g} as given"
        return ExpectedLengths(known), source
    stated = "--output-tokens N states a mean"
    if profile is None or not profile.lengths or searches:
        return ExpectedLengths(None), f"at most: its limit ({stated})"
    count, cut = len(profile.lengths), sum(not ended for _, ended in profile.lengths)
    if cut == count:
        seen = "the one seen in an earlier run was" if count == 1 else f"all of the {count:,} seen in earlier runs were"
        return ExpectedLengths(None), f"at most: its limit, as {seen} cut off ({stated})"
    some = f", {cut:,} of which were cut off" if cut else ""
    return ExpectedLengths(LengthCurve(profile.lengths)), f"drawn from the {count:,} seen in earlier runs{some}"


def _step_time(facts: ModelFacts, setup: _Setup, block_size: int) -> tuple[StepTime | BoundedTime, str]:
    profile = setup.profile
    found = figures(facts.device.type, _name(facts))
    rough = roofline(
        found,
        weight_bytes=facts.size.weight_bytes,
        active=facts.size.active,
        head=facts.size.head,
        kv_token_bytes=setup.pool.bytes_per_block / block_size,
        vocab_size=facts.vocab_size,
    )
    if profile is None:
        return rough, f"rough figures of the machine, not measured ({found.text})"
    busy = ", mostly busy with other work too" if profile.was_busy else ""
    source = f"measured profile of this machine ({_day(profile.date)}, {profile.steps:,} steps{busy})"
    return BoundedTime(profile.step_time, REACH * profile.measured_tokens, rough), source


def _name(facts: ModelFacts) -> str:
    return str(facts.dtype).removeprefix("torch.")


def _day(date: str) -> str:
    return date[:10]
