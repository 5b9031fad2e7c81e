"""A plan as people read it."""

import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate

from rich.console import Console
from rich.text import Text

from pagedgen.planning.plan import Plan
from pagedgen.stats.dashboard import ALARM, named, value
from pagedgen.stats.summary import FRAME_WIDTH, LABEL_WIDTH, MAX_WIDTH, Section, print_sections
from pagedgen.stats.text import Glyphs, flow, format_percent, format_rate, format_seconds, plural
from pagedgen.units import format_bytes, format_bytes_finely

_BAR_WIDTH = 24
_BINS = 8


def print_plan(console: Console, plan: Plan) -> None:
    """A table on a terminal, else the same as plain lines."""
    glyphs = Glyphs.of(console)
    width = max(min(console.width, MAX_WIDTH) - LABEL_WIDTH - FRAME_WIDTH, 20)
    print_sections(console, plan_sections(plan, width, glyphs))


def plan_sections(plan: Plan, width: int, glyphs: Glyphs) -> list[Section]:
    """Each part's label and lines of at most `width` cells."""

    def lines(*items: Text) -> list[Text]:
        return flow(_broken(items, width), width, glyphs.separator, glyphs.ellipsis)

    def wrapped(text: str) -> list[Text]:
        return [Text(line) for line in textwrap.wrap(text, width, subsequent_indent="  ", break_on_hyphens=False)]

    sections: list[Section] = [("model", lines(*_model(plan)))]
    sections.append(("rows", lines(*_rows(plan)) + _notes(plan, wrapped)))
    if plan.survey.lengths:
        sections.append(("prompts", lines(*_prompts(plan)) + _bars(plan.survey.lengths, width, glyphs)))
    sections.append(("memory", lines(*_memory(plan))))
    if plan.survey.groups:
        sections[-1][1].extend(lines(*_fitting(plan)) + lines(*_peak(plan)))
        sections.append(("outputs", wrapped(f"each completion {plan.length_source}")))
        sections.append(("work", lines(*_work(plan)) + wrapped(_step_times(plan))))
        sections.append(("disk", lines(*_disk(plan))))
    return sections


def _broken(items: Iterable[Text], width: int) -> Iterator[Text]:
    """The items, those that are longer than a line in pieces."""
    wrap = textwrap.TextWrapper(width, drop_whitespace=False, break_on_hyphens=False).wrap
    for item in items:
        pieces = wrap(item.plain) if item.cell_len > width else [item.plain]
        for piece in item.divide(list(accumulate(map(len, pieces)))[:-1]):
            piece.rstrip()
            yield piece


def _model(plan: Plan) -> list[Text]:
    facts, pool = plan.facts, plan.pool
    about = "" if facts.layers_are_exact else " (estimate)"
    return [
        Text(facts.name, "bold"),
        Text(f"{facts.architecture}, {facts.path} path"),
        value(_count(facts.size.parameters), "parameters"),
        Text(f"{facts.device.type} {str(facts.dtype).removeprefix('torch.')}, {plan.kernels} kernels"),
        named("weights", format_bytes(facts.size.weight_bytes)),
        named(f"KV{about}", f"{format_bytes_finely(pool.bytes_per_block / plan.block_size)} a token"),
        value(format_bytes(pool.bytes_per_block), f"a block of {plan.block_size}"),
    ]


def _rows(plan: Plan) -> list[Text]:
    sample, survey = plan.sample, plan.survey
    total = {
        "exact": f"{sample.total:,}",
        "estimate": f"about {_rounded(sample.total):,}",
        "at least": f"more than {sample.total:,}",
    }[sample.kind]
    items = [value(total, f"in {plan.input}")]
    if sample.how is not None or survey.read < sample.total:
        items.append(value(f"{survey.read:,}", "looked at"))
    items += [value(f"{count:,}", str(status), ALARM) for status, count in survey.statuses.most_common()]
    return items


def _notes(plan: Plan, wrapped: Callable[[str], list[Text]]) -> list[Text]:
    texts = [f"{example.status}: {example.error}" for example in plan.survey.examples]
    if plan.sample.how is not None:
        texts.insert(0, f"figures are estimates from {plan.sample.how}, in proportion")
    elif plan.is_sampled:
        texts.insert(0, f"figures are estimates from {plan.outcome.rows:,} rows, simulated in proportion")
    return [line for text in texts for line in wrapped(text)]


def _prompts(plan: Plan) -> list[Text]:
    lengths = sorted(plan.survey.lengths)
    total = sum(lengths)
    return [
        named("mean", f"{total / len(lengths):,.0f}"),
        named("median", f"{lengths[len(lengths) // 2]:,}"),
        named("max", f"{lengths[-1]:,} tokens"),
        named("shared prefixes", f"{plan.survey.shared_tokens:,} of {total:,} tokens"),
        Text(format_percent(plan.survey.shared_tokens / total)),
    ]


def histogram(lengths: Sequence[int]) -> list[tuple[int, int, int]]:
    """(from, to, count) in tokens, both ends included, of bins of one round width."""
    low, high = min(lengths), max(lengths)
    exact = max(1, -(-(high - low + 1) // _BINS))
    magnitude = 10 ** (len(str(exact)) - 1)
    width = next(step * magnitude for step in (1, 2, 5, 10) if step * magnitude >= exact)
    first, last = low // width, high // width
    counts = [0] * (last - first + 1)
    for length in lengths:
        counts[length // width - first] += 1
    return [((first + i) * width, (first + i + 1) * width - 1, count) for i, count in enumerate(counts)]


def _bars(lengths: Sequence[int], width: int, glyphs: Glyphs) -> list[Text]:
    bins = histogram(lengths)
    if len(bins) < 2:
        return []
    most = max(count for _, _, count in bins)
    digits = len(f"{bins[-1][1]:,}")
    cells = max(1, min(_BAR_WIDTH, width - 2 * digits - len(f"- {most:,} ")))
    result = []
    for start, end, count in bins:
        bar = glyphs.done * max(bool(count), round(cells * count / most))
        result.append(Text(f"{start:>{digits},}-{end:<{digits},} {bar:<{cells}} {count:,}"))
    return result


def _memory(plan: Plan) -> list[Text]:
    pool = plan.pool
    size = format_bytes(pool.num_blocks * pool.bytes_per_block)
    source = "as given" if pool.is_given else f"an estimate; {format_bytes(pool.free_bytes)} of memory are free"
    measured = "as measured" if pool.is_measured else "estimate"
    return [
        Text.assemble("KV pool ", (size, "bold"), f" ({source})"),
        named("a step", f"{format_bytes(pool.activation_bytes + pool.logits_bytes)} at most ({measured})"),
    ]


def _fitting(plan: Plan) -> list[Text]:
    return [
        value(
            f"{plan.fitting_typical:,}",
            f"{plural(plan.fitting_typical, 'sequence')} of {plan.typical_tokens:,} "
            f"{plural(plan.typical_tokens, 'token')} {'fits' if plan.fitting_typical == 1 else 'fit'} at a time",
        ),
        value(f"{plan.fitting_full:,}", f"of the full {plan.max_model_len:,}"),
        Text(f"--max-seqs {plan.max_seqs:,}"),
    ]


def _peak(plan: Plan) -> list[Text]:
    outcome = plan.outcome
    items = [
        named("peak KV", f"{format_bytes(plan.peak_kv_bytes)} (estimate)"),
        value(f"{outcome.peak_running:,}", f"{plural(outcome.peak_running, 'sequence')} at a time"),
    ]
    if outcome.preemptions:
        preemptions = plan.of_all("preemptions")
        items.append(value(f"{preemptions:,}", plural(preemptions, "preemption")))
    return items


def _work(plan: Plan) -> list[Text]:
    tokens_in, tokens_out = plan.of_all("prompt_tokens"), plan.of_all("output_tokens")
    cached = plan.of_all("cached_tokens")
    seconds = max(plan.generating_s, 1e-9)
    items = [
        named("time", f"{format_seconds(plan.generating_s)} (estimate)"),
        value(f"{plan.steps:,}", plural(plan.steps, "step")),
        value(f"{tokens_in:,}", f"prompt {plural(tokens_in, 'token')} to compute"),
        value(f"{cached:,}", "from the prefix cache"),
        value(f"{tokens_out:,}", f"output {plural(tokens_out, 'token')}"),
        value(f"{format_rate(tokens_out / seconds)}/s", "out"),
    ]
    if plan.load_s is not None:
        items.append(named("loading", f"{format_seconds(plan.load_s)} before"))
    return items


def _step_times(plan: Plan) -> str:
    text = f"step times: {plan.time_source}"
    if (far := plan.far_tokens) is not None:
        text += (
            f"; measured up to {plan.measured_tokens:,} {plural(plan.measured_tokens or 0, 'token')} a step, but this "
            f"plan has steps of {far:,}: what is beyond comes from rough figures of the machine"
        )
    return text


def _disk(plan: Plan) -> list[Text]:
    disk = plan.disk
    short = ALARM if disk.with_parts_bytes > disk.free_bytes else "bold"
    name = {"parquet": "a Parquet file", "jsonl": "a JSON lines file", "folder": "a folder"}[disk.kind]
    items = [named(name, f"{format_bytes(disk.output_bytes)} at most, text uncompressed (estimate)")]
    if disk.kind != "folder":
        items.append(named("with its parts", format_bytes(disk.with_parts_bytes)))
    return [*items, named("free there", format_bytes(disk.free_bytes), short)]


def _count(number: int) -> str:
    """`134.5 M`."""
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:,.1f} {unit}"
    return str(number)


def _rounded(number: int) -> int:
    """Three figures of it: an estimate has no more."""
    size = int(10 ** max(0, len(str(number)) - 3))
    return round(number / size) * size
