"""The user's own template over a row's columns."""

from collections.abc import Mapping
from typing import Any

import jinja2
import jinja2.meta

from pagedgen.errors import UsageError
from pagedgen.text.sandbox import BoundedEnvironment
from pagedgen.text.special_tokens import Marks, SpecialTokens

_MARKS = " marks"  # a variable that no template can name


class RowTemplate:
    """A Jinja2 template over the columns of a row; `row` is all of them, for names that are no Jinja names.

    Raises UsageError when it cannot be parsed.
    """

    def __init__(self, source: str, specials: SpecialTokens | None = None) -> None:
        self._source = source
        self._specials = specials
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            used = jinja2.meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateSyntaxError as error:
            raise UsageError(f"--template cannot be parsed: {error.message} (line {error.lineno}).") from error
        except RecursionError:
            raise UsageError("--template cannot be parsed: it is nested too deeply.") from None
        self.variables = frozenset(used - environment.globals.keys())
        self._guarded = None if specials is None else self._compile_guarded(specials)

    def values(self, columns: Mapping[str, Any]) -> object:
        """What the template uses of a row."""
        return columns if "row" in self.variables else [columns.get(name) for name in self.variables]

    def render(self, columns: Mapping[str, Any]) -> str:
        """The text for a row. Raises what the template raises."""
        return self._template.render({"row": columns, **columns})

    def render_marked(self, columns: Mapping[str, Any], marks: Marks) -> str:
        """The same text with marks in the special tokens that come from the columns; the template's own stay whole.

        What the template prints is marked as well as the columns, because it may take values apart before.
        """
        assert self._specials is not None, "only a guarded template marks"
        assert self._guarded is not None, "only a guarded template marks"
        used = columns if "row" in self.variables else {k: v for k, v in columns.items() if k in self.variables}
        marked = self._specials.marked(used, marks)
        return self._guarded.render({"row": marked, **marked, _MARKS: marks})

    def _compile_guarded(self, specials: SpecialTokens) -> jinja2.Template:
        environment = _environment()
        trusted = specials.within(self._source)

        @jinja2.pass_context
        def marked(context: jinja2.runtime.Context, value: object) -> object:
            value = _no_null(value)
            marks: Any = context.resolve(_MARKS)
            if isinstance(value, jinja2.Undefined):
                return value
            return specials.marked_edges(specials.marked_inside(str(value), marks, trusted), marks)

        environment.finalize = marked
        return environment.from_string(self._source)


def _environment() -> BoundedEnvironment:
    return BoundedEnvironment(undefined=jinja2.StrictUndefined, finalize=_no_null)


def _no_null(value: object) -> object:
    """A null would be printed as `None`, in the middle of a prompt."""
    if value is None:
        raise jinja2.TemplateRuntimeError("it prints a null value; give a default, like {{ column or '' }}")
    return value
