"""Readers: standard input and pipes."""

import io
import os
from typing import Any

import pytest

from pagedgen.config import InputConfig
from pagedgen.data.readers import open_input
from pagedgen.errors import UsageError

STDIN = [
    (b'\n \n{"prompt": "a"}\nbad\n', [{"prompt": "a"}, {}], "line 4"),
    (b'{"prompt": broken\n{"prompt": "b"}\n', [{}, {"prompt": "b"}], "line 2"),
    (b"{name} is a name\n\nsecond\r\n", [{"prompt": "{name} is a name"}, {"prompt": "second"}], "line 3"),
    (b'\xef\xbb\xbf{"prompt": "a"}', [{"prompt": "a"}], "line 1"),
    (b'[{"prompt": "a"},\n {"prompt": "b"}]', [{"prompt": "a"}, {"prompt": "b"}], "item 2"),
    (b'{\n "prompt": "a"\n}\n', [{"prompt": "a"}], "item 1"),
    (b"[INST] hello\n", [{"prompt": "[INST] hello"}], "line 1"),
]


@pytest.mark.parametrize(("data", "rows", "last"), STDIN, ids=range(len(STDIN)))
def test_stdin(data: bytes, rows: list[dict[str, Any]], last: str) -> None:
    source = open_input(InputConfig(path="-"), stdin=io.BytesIO(data))
    records = list(source)
    assert [record.columns for record in records] == rows
    assert records[-1].where == f"stdin {last}"
    assert (source.stem, source.total, source.total_bytes, source.files) == ("stdin", len(rows), None, ())


def test_stdin_streams_past_the_sample_and_a_pipe_has_a_path() -> None:
    rows = [{"n": number} for number in range(2500)]
    reading, writing = os.pipe()
    with open(writing, "wb") as pipe:
        pipe.write(b"".join(b'{"n": %d}\n' % number for number in range(2500)))
    with open(reading, "rb"):
        source = open_input(InputConfig(path=f"/dev/fd/{reading}"))
        assert source.total is None
        assert [record.columns for record in source] == rows


def test_empty_stdin() -> None:
    for data in (b"", b"\n \n"):
        with pytest.raises(UsageError, match="stdin is empty"):
            open_input(InputConfig(path="-"), stdin=io.BytesIO(data))
    with pytest.raises(UsageError, match="has no rows"):
        open_input(InputConfig(path="-"), stdin=io.BytesIO(b"[\n]\n"))
    with pytest.raises(UsageError, match="standard input"):
        open_input(InputConfig(path="-"))
