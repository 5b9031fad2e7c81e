"""What an earlier, unfinished run has left: which rows have an outcome, and which parts cannot be used."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from pagedgen.data.files import FileLayer, write_error
from pagedgen.data.layout import OutputLayout, part_number
from pagedgen.data.manifest import Retry
from pagedgen.data.streams import first_line
from pagedgen.errors import PagedgenError, UsageError
from pagedgen.request import Status

SET_ASIDE_SUFFIX = ".corrupt"
# Rows of a part that are decoded at a time.
_BATCH_ROWS = 4096
_STATUSES = tuple(Status)


class RowSet:
    """A set of row numbers, one bit each: ten million rows take 1.2 MB."""

    def __init__(self) -> None:
        self._bits: NDArray[np.uint8] = np.zeros(1 << 10, np.uint8)

    def __contains__(self, row: int) -> bool:
        return row >> 3 < len(self._bits) and bool(self._bits[row >> 3] >> (row & 7) & 1)

    def add(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Adds int64 [N] rows from 0 on; bool [N], which of them were not in the set before."""
        if not len(rows):
            return np.zeros(0, np.bool_)
        if (needed := (int(rows.max()) >> 3) + 1) > len(self._bits):
            self._bits = np.concatenate([self._bits, np.zeros(max(needed, len(self._bits)), np.uint8)])
        places, masks = rows >> 3, (1 << (rows & 7)).astype(np.uint8)
        fresh: NDArray[np.bool_] = (self._bits[places] & masks) == 0
        np.bitwise_or.at(self._bits, places, masks)
        return fresh

    def __len__(self) -> int:
        return int(np.unpackbits(self._bits).sum())


@dataclass
class Finished:
    """rows: those that have an outcome and are not run again. statuses: of their completions. set_aside: new names of
    parts that could not be read. next_part: the number of the first part to write."""

    rows: RowSet = field(default_factory=RowSet)
    statuses: Counter[Status] = field(default_factory=Counter)
    set_aside: list[Path] = field(default_factory=list)
    next_part: int = 0


def find_finished(layout: OutputLayout, schema: pa.Schema, retry: Retry | None, files: FileLayer) -> Finished:
    """Look through what is left of a run, and make it fit to go on with.

    Every part is read and its checksums are compared; one that is damaged is renamed, so that nothing takes it for a
    part and its rows run again. Files that were being written when the run ended are removed. Where a row stands in
    two parts, the newer one counts.

    Raises PagedgenError when the folder cannot be written, and UsageError when the merged output is not as it was left.
    """
    found = Finished()
    seen = RowSet()
    try:
        for path in layout.unfinished_files():
            files.remove(path)
        if layout.kind == "jsonl" and layout.was_touched():
            found.set_aside.append(_set_aside(layout.output, files))  # it is made again from the parts
        for path in reversed(layout.sources()):  # the newest first
            number = part_number(path)
            found.next_part = max(found.next_part, number + 1)
            try:
                outcomes = _read_outcomes(path, schema)
            except _OtherColumnsError:
                if path == layout.output:
                    raise UsageError(
                        f"{path} has other columns than the run wrote; use --overwrite to start again, or another -o"
                    ) from None
                outcomes = None
            if outcomes is None:
                found.set_aside.append(_set_aside(path, files))
                continue
            rows, statuses = outcomes
            again = retry.statuses if retry is not None and number < retry.before_part else ()
            _enter(found, seen, rows, statuses, again)
        for path in layout.set_aside_parts():
            found.next_part = max(found.next_part, part_number(path) + 1)
    except OSError as error:
        raise write_error(layout.parts, error, "or choose another -o") from error
    return found


@contextmanager
def naming_parts() -> Iterator[None]:
    """Around reading only: turns the error of a part that was damaged after it was written into a PagedgenError. The
    next run finds such a part, and generates its rows anew."""
    try:
        yield
    except pa.ArrowException as error:
        raise _damaged(error) from error
    except OSError as error:
        if error.errno is None:  # pyarrow's way to say that data cannot be decompressed
            raise _damaged(error) from error
        raise


def _damaged(error: Exception) -> PagedgenError:
    return PagedgenError(
        f"a finished part was damaged since it was written ({first_line(error)}); run the same command again: it finds "
        "the part, and generates its rows anew"
    )


def find_superseded(paths: Sequence[Path]) -> dict[Path, NDArray[np.int64]]:
    """The rows to leave out of each file because a newer one has them too; files without any are left out.

    paths: the oldest first. Raises OSError, and PagedgenError for a part that is damaged.
    """
    seen, superseded = RowSet(), {}
    for path in reversed(paths):
        with naming_parts():
            old = [rows[~_first_seen(seen, rows)] for rows in _whole_rows(_row_numbers(path))]
        if any(map(len, old)):
            superseded[path] = np.unique(np.concatenate(old))
    return superseded


class _OtherColumnsError(Exception):
    """A file that is in order, but was not written by this run."""


def _enter(
    found: Finished, seen: RowSet, rows: NDArray[np.int64], codes: NDArray[np.int8], again: Sequence[str]
) -> None:
    newest = _first_seen(seen, rows)
    rows, codes = rows[newest], codes[newest]
    if again:
        wanted = [code for code, status in enumerate(_STATUSES) if status in again]
        stays = ~np.isin(rows, rows[np.isin(codes, wanted)])
        rows, codes = rows[stays], codes[stays]
    found.rows.add(rows)
    counts = np.bincount(codes, minlength=len(_STATUSES)).tolist()
    found.statuses.update({status: count for status, count in zip(_STATUSES, counts, strict=True) if count})


def _first_seen(seen: RowSet, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Adds rows, of which several may be equal (the samples of a row); bool [N], whether they were new."""
    unique, inverse = np.unique(rows, return_inverse=True)
    fresh: NDArray[np.bool_] = seen.add(unique)[inverse]
    return fresh


def _read_outcomes(path: Path, schema: pa.Schema) -> tuple[NDArray[np.int64], NDArray[np.int8]] | None:
    """The rows of a part, int64 [N], and the places of their statuses in `_STATUSES`, int8 [N]; all of the part is read
    and checked. None when it is damaged. Raises OSError when the disk fails, and _OtherColumnsError."""
    rows, codes = [np.empty(0, np.int64)], [np.empty(0, np.int8)]
    names = pa.array([status.value for status in _STATUSES])
    try:
        with pq.ParquetFile(path, page_checksum_verification=True, buffer_size=1 << 16, pre_buffer=False) as file:
            if not file.schema_arrow.equals(schema):
                raise _OtherColumnsError
            for batch in file.iter_batches(batch_size=_BATCH_ROWS):
                batch.validate(full=True)
                rows.append(batch.column("row").to_numpy())
                codes.append(pc.index_in(batch.column("status"), names).cast(pa.int8()).to_numpy())
    except (pa.ArrowException, ValueError):
        return None
    except OSError as error:
        if error.errno is None:  # how pyarrow reports data that cannot be decompressed or has a wrong checksum
            return None
        raise
    return np.concatenate(rows), np.concatenate(codes)


def _row_numbers(path: Path) -> Iterator[NDArray[np.int64]]:
    with pq.ParquetFile(path, buffer_size=1 << 16, pre_buffer=False) as file:
        for batch in file.iter_batches(batch_size=1 << 16, columns=["row"]):
            yield batch.column(0).to_numpy()


def _whole_rows(batches: Iterator[NDArray[np.int64]]) -> Iterator[NDArray[np.int64]]:
    """The batches of a sorted file, cut so that the samples of a row come in one of them."""
    rest = np.empty(0, np.int64)
    for batch in batches:
        rows = np.concatenate([rest, batch])
        cut = int(np.searchsorted(rows, rows[-1])) if len(rows) else 0
        rest = rows[cut:]
        yield rows[:cut]
    yield rest


def _set_aside(path: Path, files: FileLayer) -> Path:
    """Renames a file that cannot be used; its new name."""
    names = (path.with_name(f"{path.name}{SET_ASIDE_SUFFIX}{suffix}") for suffix in ("", *map(str, range(1, 1000))))
    aside = next(name for name in names if not name.exists())
    files.rename(path, aside)
    return aside
