"""Sizes as people write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedgen.units import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4096", 4096),
        ("1KiB", 1024),
        ("1kb", 1000),
        ("1k", 1024),
        ("1.5GiB", 3 << 29),
        ("8 GB", 8 * 10**9),
        ("2g", 2 << 30),
        ("1TiB", 1 << 40),
        ("100B", 100),
        (" 3MiB ", 3 << 20),
    ],
)
def test_sizes(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "-1", "0", "8 apples", "1e9", "8GiBB", "nan", "0.1"])
def test_what_is_no_size(text):
    with pytest.raises(ValueError, match=r"is no size"):
        parse_bytes(text)


@given(st.integers(1, 10**15))
def test_a_formatted_size_reads_back_to_three_figures(count):
    assert parse_bytes(format_bytes(count).replace(",", "")) == pytest.approx(count, rel=0.06)
