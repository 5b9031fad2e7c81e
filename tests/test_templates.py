"""Templates that never end or grow without end cost their row; what they write does not depend on the day."""

import signal
import threading
import time
from datetime import datetime
from typing import Any

import pytest
from tokenizers_for_tests import CHAT_TEMPLATE, byte_level, llama3_like

from pagedgen.config import PromptConfig
from pagedgen.errors import RowError, UsageError
from pagedgen.request import PromptRecord, Status
from pagedgen.text import sandbox
from pagedgen.text.prompts import PromptRenderer
from pagedgen.text.sandbox import BoundedEnvironment, RenderLimit, TemplateLimitError
from pagedgen.text.tokenizer import Tokenizer

TOO_LARGE = [
    "{{ 'x' * 10**10 }}",
    "{{ 10**10 * 'x' }}",
    "{{ [1] * 10**10 }}",
    "{{ 10**(10**8) }}",
    "{{ (10**10)**(10**8) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%.1000000000f' % 1 }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ '%(a)1000000000s' % {'a': 1} }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 1000000000) }}",
    "{{ '{a:1000000000}'.format_map({'a': 1}) }}",
    "{{ '%1000000000d' | format(1) }}",
    "{{ 'x' | center(10**10) }}",
    "{{ 'x'.center(10**10) }}",
    "{{ 'x'.ljust(10**10) ~ 'x'.rjust(10**10) }}",
    "{{ 'x'.zfill(10**10) }}",
    "{{ '\t'.expandtabs(10**10) }}",
    "{{ 'a\nb' | indent(10**10) }}",
    "{{ [1] | batch(10**10, 0) | list }}",
    "{{ 1 | round(10**9) }}",
    "{{ 1.5 | round(precision=10**9) }}",
    "{{ {'a': 1} | tojson(indent=10**9) }}",
    "{% set x = 'x' * 10**6 %}{{ x | replace('x', x) }}",
    "{% set x = 'x' * 10**6 %}{{ x.replace('x', x) }}",
    "{% set x = 'x' * 10**6 %}{{ ([x] * 1000) | join }}",
    "{% set x = 'x' * 10**6 %}{{ x.join(['a'] * 1000) }}",
    "{% set x = 'x' * 10**6 %}{{ ([x] * 1000) | map('upper') | join(',') }}",
    "{% set x = 'x' * 10**6 %}{{ ('%(a)s' * 1000) % {'a': x} }}",
    "{% set x = 'x' * 10**6 %}{{ ('{0}' * 1000).format(x) }}",
    "{% set x = [1] * 10**6 %}{{ ([x] * 1000) | sum(start=[]) }}",
    "{% set x = [1] * 10**4 %}{% set y = [x] * 10**4 %}{{ y | tojson }}",
    "{% set n = namespace(x='xx') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n.x }}",
    "{% set n = namespace(x='xx') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
    "{% set x = 'x' * 10**6 %}{% for i in range(1000) %}{{ x }}{% endfor %}",
    "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
]
ENDLESS = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"


def records(count: int = 1) -> list[PromptRecord]:
    columns = [{"prompt": "sea", "x": "sea", "n": i} for i in range(count)]
    return [PromptRecord(row=i, id=str(i), columns=c, where=f"p.jsonl line {i + 1}") for i, c in enumerate(columns)]


def renderer(template: str, own: bool) -> PromptRenderer:
    """own: it is the user's template, and the model's otherwise."""
    hf = byte_level(chat_template=CHAT_TEMPLATE if own else template)
    return PromptRenderer(Tokenizer(hf), PromptConfig(template=template if own else None))


def refused(template: str, own: bool) -> str:
    (outcome,) = renderer(template, own).render_batch(records())
    assert isinstance(outcome, RowError)
    assert outcome.status is Status.TEMPLATE_ERROR
    return outcome.message


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("template", TOO_LARGE)
def test_what_grows_beyond_bounds_is_refused_at_once(template: str, own: bool) -> None:
    began = time.monotonic()
    message = refused(template, own)
    assert time.monotonic() - began < 5
    assert message.startswith("p.jsonl line 1: the ")
    assert any(word in message for word in ("more than", "width", "rounds", "recursion")), message


@pytest.mark.parametrize("own", [True, False])
def test_an_endless_template_costs_its_row_only(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_SECONDS", 0.3)
    condition = "n == 1" if own else "messages[0].content == 'forever'"
    rows = records(4)
    if not own:
        rows[1] = PromptRecord(row=1, id="1", columns={"prompt": "forever"}, where="p.jsonl line 2")
    template = "{% if " + condition + " %}" + ENDLESS + "{% endif %}sea"
    began = time.monotonic()
    outcomes = renderer(template, own).render_batch(rows)
    assert time.monotonic() - began < 5
    assert [isinstance(outcome, RowError) for outcome in outcomes] == [False, True, False, False]
    assert "it ran for more than 0.3 seconds" in str(outcomes[1])


def test_a_template_that_gathers_memory_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_GROWTH", 100 << 20)
    template = (
        "{% set n = namespace(x=[]) %}{% for i in range(1000) %}"
        "{% set n.x = n.x + [('x' * 10**7) ~ i] %}{% endfor %}{{ n.x | length }}"
    )
    assert "MiB of memory" in refused(template, own=True)


def test_the_timer_of_others_is_set_again() -> None:
    calls: list[int] = []
    handler = signal.signal(signal.SIGALRM, lambda *_: calls.append(1))
    try:
        signal.setitimer(signal.ITIMER_REAL, 30, 7)
        limit = RenderLimit()
        with limit.active():
            assert limit.run(lambda: 5) == 5
        delay, interval = signal.setitimer(signal.ITIMER_REAL, 0)
        assert 25 < delay <= 30
        assert interval == 7
        assert signal.getsignal(signal.SIGALRM) is not limit._tick
        with limit.active():
            pass
        assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
    finally:
        signal.signal(signal.SIGALRM, handler)


def test_only_rendering_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_SECONDS", 0.05)
    limit = RenderLimit()

    def spin(seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            pass

    with limit.active():
        limit.run(lambda: None)
        spin(0.4)
        with pytest.raises(TemplateLimitError):
            limit.run(lambda: spin(5))


def test_in_another_thread_there_is_no_timer() -> None:
    results: list[Any] = []
    template = renderer("{{ x }}", own=True)
    thread = threading.Thread(target=lambda: results.extend(template.render_batch(records(2))))
    thread.start()
    thread.join()
    assert [type(result) for result in results] == [tuple, tuple]


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ 'ab' * 3 }}{{ 2 ** 10 }}{{ 7 % 3 }}{{ '%03d|%s' % (5, 'x') }}", "ababab10241005|x"),
        ("{{ 'a' ~ 1 ~ none }}{{ 1 + 2 }}{{ [1] + [2] }}", "a1None3[1, 2]"),
        ("{{ [1, 2] | join(', ') }}{{ [] | join }}{{ [{'a': 1}, {'a': 2}] | join('-', attribute='a') }}", "1, 21-2"),
        ("{{ [1, 2] | sum }}{{ [{'a': 1}] | sum(attribute='a') }}{{ [[1], [2]] | sum(start=[]) }}", "31[1, 2]"),
        ("{{ '{:>4}|{a}'.format(1, a=2) }}{{ ','.join(['a', 'b']) }}", "   1|2a,b"),
        ("{{ 'aXa' | replace('X', '-') }}{{ 'a.a.a'.replace('.', '-', 1) }}", "a-aa-a.a"),
        ("{{ 'a\nb' | indent(2) }}{{ 'x' | center(3) }}{{ 3.14159 | round(2) }}", "a\n  b x 3.14"),
        ("{{ {'a': [1]} | tojson }}{{ '%s!' | format('a') }}", '{"a": [1]}a!'),
    ],
)
def test_ordinary_templates_give_what_jinja_gives(template: str, text: str) -> None:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    assert BoundedEnvironment().from_string(template).render() == text
    assert ImmutableSandboxedEnvironment().from_string(template).render() == text


def test_a_template_nested_too_deeply_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="nested too deeply"):
        renderer("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", own=True)


def test_all_chats_of_a_run_have_its_date() -> None:
    tokenizer = Tokenizer(llama3_like())
    moment = datetime(2031, 2, 3, 23, 59)
    outcomes = PromptRenderer(tokenizer, PromptConfig(), now=moment).render_batch(records(2))
    for outcome in outcomes:
        assert isinstance(outcome, tuple)
        assert "Today Date: 03 Feb 2031" in tokenizer.decode(outcome)
    (today,) = PromptRenderer(tokenizer, PromptConfig()).render_batch(records(1))
    assert isinstance(today, tuple)
    assert "Today Date: 03 Feb 2031" not in tokenizer.decode(today)
