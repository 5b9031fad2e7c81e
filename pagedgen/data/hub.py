"""Datasets of the `datasets` library: a Hub name, a local folder, or a folder written by `save_to_disk`; streamed."""

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from pagedgen.config import InputConfig
from pagedgen.data.columnar import batch_rows, plain_schema
from pagedgen.data.streams import first_line
from pagedgen.data.text_formats import SAMPLE_ROWS, RawRow
from pagedgen.errors import PagedgenError, UsageError

_BATCH_ROWS = 512


class DatasetRows:
    """The rows of one split. Raises UsageError when the dataset, its configuration or the split cannot be found."""

    unit = "record"

    def __init__(self, config: InputConfig) -> None:
        self.name = config.dataset or ""
        self.split, dataset = _open(config)
        self._dataset = dataset.with_format("arrow")
        self.total = _count(dataset, self.split)

    def columns(self, sample_rows: int) -> pa.Schema:
        """The split's features, or where the library does not know them, the columns of its first rows."""
        features = self._dataset.features
        if features is not None:
            return plain_schema(features.arrow_schema, self.name)
        return next((plain_schema(table.schema, self.name) for table in self._tables()), pa.schema([]))

    def head(self) -> list[RawRow]:
        return list(itertools.islice(self.rows(), SAMPLE_ROWS))

    def rows(self) -> Iterator[RawRow]:
        done = 0
        for table in self._tables():
            for batch in table.to_batches():
                yield from batch_rows(batch, done)
                done += batch.num_rows

    def _tables(self) -> Iterator[pa.Table]:
        tables = iter(self._dataset.iter(batch_size=_BATCH_ROWS))
        while True:
            try:
                table = next(tables)
            except StopIteration:
                return
            except Exception as error:  # the library and its file systems raise errors of any kind
                raise PagedgenError(
                    f"dataset {self.name} cannot be read on ({first_line(error)}); try again"
                ) from error
            yield table


def _open(config: InputConfig) -> tuple[str, Any]:
    """(split, dataset); without a split the only one is taken, and several are for the user to choose from."""
    name = config.dataset or ""
    loaded = _load(name, config.dataset_config)
    if not isinstance(loaded, dict):
        if config.split not in (None, str(loaded.split)):
            raise UsageError(f"dataset {name} is the split '{loaded.split}' alone; leave --split out")
        return str(loaded.split or "train"), loaded
    splits = sorted(map(str, loaded))
    if config.split is None:
        if len(splits) > 1:
            raise UsageError(f"dataset {name} has the splits {', '.join(splits)}; choose one with --split")
        return splits[0], loaded[splits[0]]
    if config.split not in loaded:
        raise UsageError(f"dataset {name} has no split '{config.split}'; choose --split from {', '.join(splits)}")
    return config.split, loaded[config.split]


def _load(name: str, config_name: str | None) -> Any:
    """A dataset, or a dict of them by split."""
    from datasets import load_dataset, load_from_disk
    from datasets.exceptions import DatasetNotFoundError

    folder = Path(os.path.expanduser(name))
    try:
        if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
            return load_from_disk(str(folder))
        return load_dataset(str(folder) if folder.is_dir() else name, config_name, streaming=True)
    except (DatasetNotFoundError, FileNotFoundError, ConnectionError) as error:
        raise UsageError(
            f"there is no folder {name}, and no dataset of that name can be reached on the Hub; check --dataset, the"
            " network and the login"
            if not folder.exists()
            else f"dataset {name} cannot be opened ({first_line(error)}); check the folder"
        ) from error
    except Exception as error:  # a loader raises errors of any kind; each is about what the user named
        raise UsageError(f"dataset {name} cannot be opened ({_words(error)}); check --dataset and --config") from error


def _words(error: Exception) -> str:
    """The first two lines of the message: the second names the configurations to choose from."""
    return " ".join(line.strip() for line in str(error).strip().splitlines()[:2]).rstrip(". ") or type(error).__name__


def _count(dataset: Any, split: str) -> int | None:
    if hasattr(dataset, "__len__"):
        return len(dataset)
    splits = getattr(dataset.info, "splits", None) or {}
    known = splits.get(split)
    return known.num_examples or None if known is not None else None
