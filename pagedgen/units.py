"""Sizes in bytes and times in seconds, as people write and read them."""

import re

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_TIME = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(ms|s|m|min|h)?", re.IGNORECASE)
_SIZE = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([kmgt]?)(i?)b?", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """`8GiB`, `512MB`, `1.5 g`, `4096` -> bytes. KiB, MiB, ... are powers of 1024, KB, MB, ... of 1000, and a bare
    letter is a power of 1024.

    Raises ValueError for anything else, and for nothing at all.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no size; write it like 8GiB or 512MiB")
    number, letter, binary = match.groups()
    decimal = letter and not binary and text.strip()[-1] in "bB"
    count = int(float(number) * (1000 if decimal else 1024) ** " kmgt".index(letter.lower() or " "))
    if count < 1:
        raise ValueError(f"{text!r} is no size; it must be at least one byte")
    return count


def parse_seconds(text: str) -> float:
    """`30s`, `500ms`, `2m`, `1.5h`, `45` -> seconds.

    Raises ValueError for anything else, and for nothing at all.
    """
    match = _TIME.fullmatch(text.strip())
    seconds = float(match[1]) * _SECONDS[(match[2] or "s").lower()] if match else 0.0
    if seconds <= 0:
        raise ValueError(f"{text!r} is no time; write it like 30s or 5m")
    return seconds


def format_bytes(count: float) -> str:
    """`812 MiB`, `2.0 GiB`: three figures at most."""
    value, unit = float(count), "B"
    for bigger in _UNITS[1:]:
        if value < 999.5:
            break
        value, unit = value / 1024, bigger
    return f"{value:.1f} {unit}" if unit != "B" and value < 9.95 else f"{value:,.0f} {unit}"


def format_bytes_finely(count: float) -> str:
    """`22.5 KiB`: with a digit more than `format_bytes`, so that it can be multiplied."""
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count:,.0f} B"
