"""The options of a beam search, checked wherever they come from: the command line or Python."""

from collections.abc import Callable
from numbers import Integral, Real
from typing import get_args

from pagedgen.request import BeamParams, EarlyStopping

MAX_WIDTH = 64
# A length to such a power is a number for any length, and so is what is divided by it.
MOST_PENALTY = 10.0
MOST_DIVERSITY = 1e9


def beam_flag(name: str) -> str:
    """The flag of a field of BeamParams, or of another option that a sentence about it names."""
    return "--return" if name == "num_return" else "--" + name.replace("_", "-")


def validate_beam(params: BeamParams, max_seqs: int | None = None, spell: Callable[[str], str] = str) -> BeamParams:
    """Checks how to search; returns the parameters with every value in its own type.

    max_seqs: the sequences that can run at a time, where that is known. spell: what the user calls a field.
    Raises ValueError, one sentence without its full stop, that names the field, its value and what is allowed.
    """

    def whole(name: str, most: int, why: str = "") -> int:
        value = getattr(params, name)
        if not isinstance(value, Integral) or isinstance(value, bool) or not 1 <= int(value) <= most:
            raise ValueError(f"{spell(name)} is {value!r}, but it must be a whole number from 1 to {most}{why}")
        return int(value)

    def real(name: str, least: float, most: float) -> float:
        value = getattr(params, name)
        is_real = isinstance(value, Real) and not isinstance(value, bool)
        if not is_real or not least <= value <= most:
            raise ValueError(f"{spell(name)} is {value!r}, but it must be a number from {least:g} to {most:g}")
        return float(value)

    width = whole("width", MAX_WIDTH)
    if max_seqs is not None and width > max_seqs:
        raise ValueError(
            f"{spell('width')} is {width}, but only {max_seqs} sequences run at a time; lower it or raise "
            f"{spell('max_seqs')}"
        )
    groups = whole("diversity_groups", width, f", which is {spell('width')}")
    if width % groups:
        raise ValueError(
            f"{spell('width')} is {width}, but it must be a multiple of {spell('diversity_groups')}, which is {groups}"
        )
    penalty = real("diversity_penalty", 0.0, MOST_DIVERSITY)
    if penalty and groups == 1:
        raise ValueError(
            f"{spell('diversity_penalty')} is {penalty:g}, but it acts between groups of beams and there is one; "
            f"set {spell('diversity_groups')} to 2 or more, or leave the penalty out"
        )
    return BeamParams(
        width=width,
        num_return=whole("num_return", width, f", which is {spell('width')}"),
        length_penalty=real("length_penalty", -MOST_PENALTY, MOST_PENALTY),
        early_stopping=_early_stopping(params.early_stopping, spell),
        diversity_groups=groups,
        diversity_penalty=penalty,
    )


def _early_stopping(value: object, spell: Callable[[str], str]) -> EarlyStopping:
    text = str(value).lower() if isinstance(value, bool) else value  # `transformers` takes True and False
    for allowed in get_args(EarlyStopping):
        if text == allowed:
            return allowed  # type: ignore[no-any-return]
    raise ValueError(f"{spell('early_stopping')} is {value!r}, but it must be true, false or never")
