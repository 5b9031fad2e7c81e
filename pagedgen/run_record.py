"""The run folder of a job under way: its lock, its manifest, and what an earlier process has left in it."""

import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pagedgen.data.files import FileLayer, write_json
from pagedgen.data.finished import Finished, find_finished
from pagedgen.data.layout import PLAN_NAME, STATS_NAME, OutputLayout, part_number
from pagedgen.data.lock import RunLock
from pagedgen.data.manifest import Manifest, Retry, RunStatus, read_manifest, write_manifest
from pagedgen.data.schema import OutputColumns
from pagedgen.errors import PagedgenError, UsageError
from pagedgen.request import Status
from pagedgen.user_state import note_run


class RunRecord:
    """What a run has on the disk besides its rows; a context that holds the run's lock.

    A run folder that is there is locked on entering, that of a new run when it is begun: a command that is refused
    before leaves nothing behind. Every method raises PagedgenError when the disk refuses.
    """

    def __init__(self, layout: OutputLayout, files: FileLayer) -> None:
        self.layout, self._files = layout, files
        self._lock = RunLock(layout.run_folder)
        self._held = ExitStack()
        self._manifest = layout.manifest

    def __enter__(self) -> Self:
        if self.layout.run_folder.is_dir():
            self._held.enter_context(self._lock)
            earlier = self.layout.manifest
            if earlier is not None and read_manifest(self.layout.run_folder) != earlier:
                raise PagedgenError(f"another pagedgen has just written to {self.layout.output}; run the command again")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._held.close()

    @property
    def manifest(self) -> Manifest:
        assert self._manifest is not None, "the run has not begun"
        return self._manifest

    def begin(self, manifest: Manifest, planned: Mapping[str, Any] | None) -> None:
        """Makes the folders of a new run, and clears what an overwritten one left. planned: what `pagedgen plan`
        expects of it, if it was asked."""
        if not self._lock.is_held:
            self._held.enter_context(self._lock)
            if read_manifest(self.layout.run_folder) is not None:  # it came while this one was getting ready
                raise PagedgenError(f"another pagedgen has just written to {self.layout.output}; run the command again")
        self.layout.create(self._files)
        self._write(manifest)
        if planned is not None:
            write_json(self.layout.run_folder / PLAN_NAME, planned, self._files)
        note_run(self.layout.run_folder)

    def find_finished(self, columns: OutputColumns, statuses: tuple[Status, ...]) -> Finished:
        """What the earlier run has left, less the rows with these statuses, which are to run again. A retry that was
        interrupted goes on: what it has run again already counts."""
        retry = self._retry(tuple(status.value for status in statuses)) if statuses else None
        found = find_finished(self.layout, columns.schema, retry, self._files)
        self._manifest = replace(self.manifest, retry=retry)
        return found

    def go_on(self, **changes: Any) -> None:
        """Notes that this process continues the run, and what is new about it."""
        self.layout.make_folders()
        changes |= {"status": "running", "finished": None, "rows": None, "statuses": None, "process": os.getpid()}
        self._write(replace(self.manifest, **changes))
        note_run(self.layout.run_folder)

    def merging(self) -> None:
        """Notes that from now on an output file that is there is the run's own."""
        if not self.manifest.replaces:
            self._write(replace(self.manifest, replaces=True))

    def finish(self, stats: Mapping[str, Any], rows: int, statuses: Mapping[Status, int]) -> None:
        """Notes that the output holds all rows."""
        write_json(self.layout.run_folder / STATS_NAME, stats, self._files)
        counts = {status.value: count for status, count in statuses.items()}
        size = self.layout.output_bytes()
        ended = replace(self.manifest.ended("finished"), merged=size is not None, output_bytes=size)
        self._write(replace(ended, rows=rows, statuses=counts, retry=None))

    def end_early(self, status: RunStatus, stats: Mapping[str, Any]) -> None:
        write_json(self.layout.run_folder / STATS_NAME, stats, self._files)
        self._write(self.manifest.ended(status))

    def check(self) -> None:
        """Raises PagedgenError when the run folder is no longer the one that was locked."""
        self._lock.check()

    def _retry(self, statuses: tuple[str, ...]) -> Retry:
        earlier = self.manifest.retry
        if earlier is not None and earlier.statuses == statuses:
            return earlier
        parts: list[Path] = [*self.layout.finished_parts(), *self.layout.set_aside_parts()]
        return Retry(statuses, max(map(part_number, parts), default=-1) + 1)

    def _write(self, manifest: Manifest) -> None:
        write_manifest(self.layout.run_folder, manifest, self._files)
        self._manifest = manifest


def require_earlier_run(layout: OutputLayout) -> None:
    """Raises UsageError when there is no run whose rows could be run again."""
    if layout.manifest is None:
        raise UsageError(f"--retry runs rows of an earlier run again, but {layout.output} has none; leave --retry out")
