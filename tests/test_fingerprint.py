"""Whether what a run reads is still what it was."""

import gzip
import io
from pathlib import Path

import pytest
from tiny_models import tiny_checkpoint

from pagedgen.config import InputConfig
from pagedgen.data.fingerprint import InputFingerprint, fingerprint_model
from pagedgen.data.readers import InputSource, open_input


def source(path: Path | str, stdin: bytes | None = None) -> InputSource:
    return open_input(InputConfig(str(path)), stdin=None if stdin is None else io.BytesIO(stdin))


def change(old: InputFingerprint, path: Path | str, stdin: bytes | None = None) -> str:
    now = source(path, stdin)
    return now.change_since(InputFingerprint.from_json(old.as_json()), now.fingerprint())


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (b"a\nb\n", b"a\nb\n", "same"),
        (b"a\nb\n", b"a\nb\nc\n", "grown"),
        (b"a\nb", b"a\nb\nc\n", "grown"),
        (b"a\nb", b"a\nb\r\nc", "grown"),
        (b"a\nb", b"a\nbc\n", "the last row of in.txt has changed"),
        (b"a\nb\n", b"a\nx\n", "in.txt has changed"),
        (b"a\nb\n", b"a\n", "in.txt has changed"),
        (b"a\nb\n", b"z\na\nb\n", "in.txt has changed"),
        (b"a\nb\n", b"a\nx\nc\n", "in.txt has changed"),
    ],
)
def test_a_file_of_lines(tmp_path: Path, before: bytes, after: bytes, expected: str) -> None:
    path = tmp_path / "in.txt"
    path.write_bytes(before)
    old = source(path).fingerprint()
    path.write_bytes(after)
    assert change(old, path) == expected


def test_a_large_file_that_changed_in_one_byte(tmp_path: Path) -> None:
    path = tmp_path / "in.txt"
    path.write_bytes(b"x" * 70 + b"\n" * (5 << 20))
    old = source(path).fingerprint()
    with path.open("r+b") as file:
        file.seek((4 << 20) + 5)
        file.write(b"y")
    assert change(old, path) == "in.txt has changed"


def test_files_that_cannot_grow_by_rows_must_be_the_same(tmp_path: Path) -> None:
    path = tmp_path / "in.txt.gz"
    path.write_bytes(gzip.compress(b"a\n"))
    old = source(path).fingerprint()
    assert change(old, path) == "same"
    path.write_bytes(path.read_bytes() + gzip.compress(b"b\n"))
    assert change(old, path) == "in.txt.gz has changed"


def test_a_folder_may_get_files_at_its_end(tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    for name in ("b.txt", "d.txt"):
        (folder / name).write_text("row\n")
    old = source(folder).fingerprint()
    (folder / "e.txt").write_text("row\n")
    assert change(old, folder) == "grown"
    (folder / "b.txt").write_text("row\nrow\n")
    assert change(old, folder) == "b.txt has changed", "the rows after it would move"
    (folder / "b.txt").write_text("row\n")
    (folder / "c.txt").write_text("row\n")
    assert change(old, folder) == "c.txt stands where d.txt was"
    for name in ("c.txt", "d.txt", "e.txt"):
        (folder / name).unlink()
    assert change(old, folder) == "d.txt is gone"


def test_a_stream_is_told_by_its_first_rows(tmp_path: Path) -> None:
    rows = b"".join(b"row %d\n" % number for number in range(1500))
    old = source("-", rows).fingerprint()
    assert old.head_rows == 1000
    assert change(old, "-", rows + b"more\n") == "grown"
    assert change(old, "-", b"other\n" + rows) == "the first rows of stdin have changed"
    few = source("-", b"a\nb\n").fingerprint()
    assert change(few, "-", b"a\nb\nc\n") == "grown"
    assert change(few, "-", b"a\n") == "the first rows of stdin have changed"
    (tmp_path / "in.txt").write_text("a\n")
    assert change(few, tmp_path / "in.txt") == "the input is of another kind"


def test_the_rows_of_a_stream_are_still_there_after_it_was_told(tmp_path: Path) -> None:
    stream = source("-", b"a\nb\n")
    stream.fingerprint()
    assert [record.columns["prompt"] for record in stream] == ["a", "b"]


def test_a_model_is_told_by_each_kind_of_its_files(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "llama")
    before = fingerprint_model(folder)
    assert before.keys() >= {"weights", "tokenizer", "model config"}
    (folder / "README.md").write_text("notes")
    assert fingerprint_model(folder) == before
    for name, kind in (
        ("tokenizer.json", "tokenizer"),
        ("model.safetensors", "weights"),
        ("config.json", "model config"),
    ):
        path = folder / name
        content = path.read_bytes()
        path.write_bytes(content[:-3] + b" " + content[-3:])
        assert {k for k in before if fingerprint_model(folder).get(k) != before[k]} == {kind}
        path.write_bytes(content)
    assert fingerprint_model(folder) == before
    moved = folder.rename(tmp_path / "elsewhere")
    assert fingerprint_model(moved) == before


def test_weights_too_large_to_read_whole_are_sampled(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    with path.open("wb") as file:
        file.truncate(200 << 20)
    before = fingerprint_model(path)
    for position in (1000, (16 << 20) + 10, (200 << 20) - 1):
        with path.open("r+b") as file:
            file.seek(position)
            file.write(b"x")
        after = fingerprint_model(path)
        assert after != before
        before = after
