"""The sandbox that templates run in: what one of them can take of time and memory is bounded.

Templates are programs, of the user or of a model's author, and run over rows that nobody has looked at. One that never
ends, or that makes a text of gigabytes, costs its row and not the run.
"""

import functools
import re
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

import jinja2
import psutil
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.filters import make_attrgetter
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter

MAX_SECONDS = 10.0  # of rendering one row
MAX_SIZE = 1 << 24  # characters of a text, elements of a list: far beyond the context of any model
MAX_GROWTH = 1 << 30  # bytes that the process may grow by while it renders
_MAX_BITS = 1 << 17  # of an integer that a product or a power gives
_MAX_DIGITS = 1000  # of a rounded number
_TICK_SECONDS = 0.1

T = TypeVar("T")


class TemplateLimitError(jinja2.TemplateRuntimeError):
    """A template wants more time or memory than a row is given."""


class RenderLimit:
    """Bounds the time, and by looking at it often the memory, of what is rendered through `run`.

    A timer interrupts Python between two of its instructions. So a single long operation of a builtin is not
    interrupted (the environment bounds those that a small input makes large), and nothing is bounded outside the main
    thread, where Python delivers no signals, or on a system without such timers.
    """

    def __init__(self) -> None:
        self._started = 0.0
        self._memory = 0
        self._process = psutil.Process()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Has the timer going; what it was set to before is set again after. Once a batch, since it costs some µs."""
        if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
            yield
            return
        entered = time.monotonic()
        self._memory = self._process.memory_info().rss
        handler = signal.signal(signal.SIGALRM, self._tick)
        delay, interval = signal.setitimer(signal.ITIMER_REAL, _TICK_SECONDS, _TICK_SECONDS)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, signal.SIG_DFL if handler is None else handler)
            if delay:
                left = max(delay - (time.monotonic() - entered), 1e-3)
                signal.setitimer(signal.ITIMER_REAL, left, interval)

    def run(self, render: Callable[..., T], *args: Any) -> T:
        """What `render(*args)` returns. Raises TemplateLimitError out of the middle of it when it takes too much."""
        self._started = time.monotonic()
        return render(*args)

    def _tick(self, _signal: int, frame: FrameType | None) -> None:
        reason = None
        if time.monotonic() - self._started > MAX_SECONDS:
            reason = f"it ran for more than {MAX_SECONDS:g} seconds"
        elif self._process.memory_info().rss - self._memory > MAX_GROWTH:
            reason = f"it took more than {MAX_GROWTH >> 20} MiB of memory"
        # Between two rows there is nothing to interrupt, however long ago the last one began.
        if reason is not None and _within(RenderLimit.run, frame):
            raise TemplateLimitError(reason)


def _within(function: Callable[..., Any], frame: FrameType | None) -> bool:
    code = function.__code__
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


class _Generator(CodeGenerator):
    """Compiles `+` and `~` to calls of the environment; chat templates are full of `+`, so its way is the shortest."""

    def visit_Add(self, node: nodes.BinExpr, frame: Frame) -> None:
        self.write("environment.added(")
        self.visit(node.left, frame)
        self.write(", ")
        self.visit(node.right, frame)
        self.write(")")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, in which no single operation gives something beyond the limits above.

    Bounded are the operators `+ * ** % ~`, the methods of str, bytes and int that pad, repeat or join, `format`, the
    filters that do the same, and every text that is put together. What takes many operations is left to RenderLimit.
    """

    code_generator_class: type[CodeGenerator] = _Generator
    intercepted_binops = frozenset({"*", "**", "%"})

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.bound_filters()

    def bound_filters(self) -> None:
        """Wraps the filters that can grow their input; to be called again after others were put in their places."""
        for name, check in _FILTER_CHECKS.items():
            self.filters[name] = _checked(self.filters[name], check)
        self.filters |= {"join": _join, "sum": _sum}

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """The parts of a template's output as one text."""
        kept = list(parts)
        _refuse_size(sum(map(len, kept)))
        return "".join(kept)

    @staticmethod
    def added(left: Any, right: Any) -> Any:
        """What `+` gives: at most twice the size of what is not too large."""
        result = left + right
        if isinstance(result, _SIZED) and len(result) > MAX_SIZE:
            _refuse_size(len(result))
        return result

    def joined(self, parts: tuple[object, ...]) -> str:
        """What `~` gives."""
        return self.concat(map(str, parts))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """What one of the operators gives, if it is not too large."""
        _OPERATOR_CHECKS[operator](left, right)
        return self.binop_table[operator](left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls from a template; the underscores keep its keyword arguments free, as in the class above."""
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str | bytes | int):
            check = _METHOD_CHECKS.get(__obj.__name__)
            if check is not None:
                check(owner, *args, **kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`str.format` and `str.format_map`, with bounded widths as well as in the sandbox."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        formatter = _Formatter(self)
        text, is_map = value.__self__, value.__name__ == "format_map"

        def bounded(*args: Any, **kwargs: Any) -> str:
            formatter.size = 0
            formatter.vformat(text, () if is_map else args, args[0] if is_map else kwargs)
            return wrapped(*args, **kwargs)

        return bounded


class _Formatter(SandboxedFormatter):
    """Formats, and counts what comes out of it."""

    size = 0

    def format_field(self, value: Any, format_spec: str) -> str:
        for digits in re.findall(r"\d+", format_spec):
            _refuse_digits(digits)
            _refuse_size(int(digits))
        field: str = super().format_field(value, format_spec)
        self.size += len(field)
        _refuse_size(self.size)
        return field


_SIZED = (str, bytes, list, tuple)


def _refuse_size(size: int) -> None:
    if size > MAX_SIZE:
        raise TemplateLimitError(f"it makes a text or a list of more than {MAX_SIZE} elements")


def _refuse_bits(bits: float) -> None:
    if bits > _MAX_BITS:
        raise TemplateLimitError(f"it computes a number of more than {_MAX_BITS} bits")


def _check_product(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _refuse_bits(left.bit_length() + right.bit_length())
    elif isinstance(left, _SIZED) and isinstance(right, int):
        _refuse_size(len(left) * right)
    elif isinstance(right, _SIZED) and isinstance(left, int):
        _refuse_size(len(right) * left)


def _check_power(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _refuse_bits(left.bit_length() * right)


def _check_format(left: Any, *right: Any, **named: Any) -> None:
    """For `%`: widths in the text, a width given as `*`, and arguments that are used many times."""
    if not isinstance(left, str | bytes):
        return
    text = left.decode("latin-1") if isinstance(left, bytes) else left
    for width, precision in _WIDTHS.findall(text):
        _refuse_digits(width or precision)
    _refuse_size(sum(int(number) for found in _WIDTHS.findall(text) for number in found if number))
    values = [*right, *named.values()]
    if len(values) == 1 and isinstance(values[0], tuple | Mapping):
        values = list(values[0].values() if isinstance(values[0], Mapping) else values[0])
    for value in values:
        if isinstance(value, int):
            _refuse_bits(value.bit_length())
            _refuse_size(value * text.count("*"))
    longest = max((len(value) for value in values if isinstance(value, _SIZED)), default=0)
    _refuse_size(text.count("%") * longest)


def _refuse_digits(digits: str) -> None:
    """For one width or precision in a format specification."""
    if len(digits) > len(str(MAX_SIZE)):
        raise TemplateLimitError(f"it formats with the width {digits[:20]}")


def _check_padding(owner: Any, *args: Any, **named: Any) -> None:
    """For what pads each line, each tab or all of a text to a width, or makes so many of something."""
    lines = 1
    if isinstance(owner, str):
        lines += len(owner.splitlines()) + owner.count("\t")
    elif isinstance(owner, bytes):
        lines += owner.count(b"\t")
    for arg in (*args, *named.values()):
        if isinstance(arg, int):
            _refuse_size(arg * lines)
        elif isinstance(arg, str):  # an indentation given as text
            _refuse_size(len(arg) * lines)


def _check_replace(owner: Any, old: Any = "", new: Any = "", *_: Any, **__: Any) -> None:
    if isinstance(owner, bytes):
        _refuse_size((len(owner) + 1) * len(new))
        return
    text, old, new = str(owner), str(old), str(new)
    if (len(text) + 1) * len(new) > MAX_SIZE:
        _refuse_size(text.count(old) * len(new))


def _check_translate(owner: Any, table: Any = None) -> None:
    if isinstance(table, Mapping):
        _refuse_size(len(owner) * max((len(new) for new in table.values() if isinstance(new, str)), default=1))


def _check_join(owner: Any, parts: Any = ()) -> None:
    if not isinstance(parts, _SIZED):  # looking at the parts of another kind may use them up
        raise TemplateLimitError("it joins what is no list; write it with the filter `join`")
    _refuse_size(sum(len(owner) + (len(part) if isinstance(part, str | bytes) else 1) for part in parts))


def _check_round(_value: Any, precision: Any = 0, *_: Any, **__: Any) -> None:
    if isinstance(precision, int) and abs(precision) > _MAX_DIGITS:
        raise TemplateLimitError(f"it rounds to {precision} digits")


def _check_json(value: Any, *args: Any, **named: Any) -> None:
    """A small structure that holds another many times is large as text, and so is a wide indentation of each line."""
    widest = 1
    for option in (*args, *named.values()):
        for part in option if isinstance(option, tuple | list) else (option,):
            if isinstance(part, str | int):
                widest = max(widest, len(part) if isinstance(part, str) else part)
    count = 0
    waiting: list[tuple[Sequence[Any], int]] = [([value], 1)]
    while waiting:
        items, depth = waiting.pop()
        count += len(items) * (widest * depth if widest > 1 else 1)
        count += sum(len(item) for item in items if isinstance(item, str | list | tuple | dict))
        _refuse_size(count)
        waiting += [([*item, *item.values()], depth + 1) for item in items if isinstance(item, dict)]
        waiting += [(item, depth + 1) for item in items if isinstance(item, list | tuple)]


@jinja2.pass_environment
def _join(environment: BoundedEnvironment, value: Iterable[Any], d: str = "", attribute: Any = None) -> str:
    """The filter `join`, with a bounded result."""
    if attribute is not None:
        value = map(make_attrgetter(environment, attribute), value)
    parts: Iterator[str] = (part for item in value for part in (str(d), str(item)))
    next(parts, None)  # no separator before the first
    return environment.concat(parts)


@jinja2.pass_environment
def _sum(environment: BoundedEnvironment, iterable: Iterable[Any], attribute: Any = None, start: Any = 0) -> Any:
    """The filter `sum`, with a bounded result where that is a list."""
    if attribute is not None:
        iterable = map(make_attrgetter(environment, attribute), iterable)
    for item in iterable:
        start = environment.added(start, item)
    return start


def _checked(function: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
    """The filter, run only on arguments that pass."""
    first = int(hasattr(function, "jinja_pass_arg"))  # jinja's own argument comes first

    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        check(*args[first:], **kwargs)
        return function(*args, **kwargs)

    return bounded


_WIDTHS = re.compile(r"%(?:\([^)]*\))?[-#0 +]*(\d*)(?:\.(\d+))?")
_OPERATOR_CHECKS: Mapping[str, Callable[[Any, Any], None]] = {
    "*": _check_product,
    "**": _check_power,
    "%": _check_format,
}
_METHOD_CHECKS: Mapping[str, Callable[..., None]] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill", "expandtabs", "to_bytes"), _check_padding),
    "replace": _check_replace,
    "translate": _check_translate,
    "join": _check_join,
}
_FILTER_CHECKS: Mapping[str, Callable[..., None]] = {
    **dict.fromkeys(("center", "indent", "batch"), _check_padding),
    "replace": _check_replace,
    "format": _check_format,
    "round": _check_round,
    "tojson": _check_json,
}
