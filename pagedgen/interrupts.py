"""Being told to end: the first signal ends a run in good order, a second one at once."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any, Self

STOP_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
EXIT_CODE = 130
# Signals that come closer together are one request: `timeout`, a supervisor or a terminal may tell the process itself
# and its whole group.
ONE_REQUEST = 0.5
SHOW_CURSOR = "\x1b[?7h\x1b[?25h"


class Interrupts:
    """While this context lasts, the first SIGINT, SIGTERM or SIGHUP raises KeyboardInterrupt, as a batch system, a
    closed terminal and Ctrl-C all mean the same; one that comes `ONE_REQUEST` seconds after it or later ends the
    process where it stands, with exit code 130.

    Only the main thread may handle signals: in another one nothing changes. farewell: the line for stderr when the
    process is ended at once.
    """

    def __init__(self, farewell: str) -> None:
        self._farewell = farewell
        self._before: dict[signal.Signals, Any] = {}
        self._told = self._deferred = False
        self._told_at = 0.0

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in STOP_SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """For moments that must not be cut in two: the first signal raises KeyboardInterrupt at the end of the
        block."""
        told = self._told
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False
        if self._told and not told:
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._told and now - self._told_at < ONE_REQUEST:
            return
        if self._told:
            # Whatever is being written has a temporary name, so this does no damage. Python's own way out would wait
            # for threads, and for whatever made the user ask twice.
            with suppress(OSError, ValueError, AttributeError):
                terminal = SHOW_CURSOR if os.isatty(sys.stderr.fileno()) else ""
                os.write(sys.stderr.fileno(), f"{terminal}\npagedgen: {self._farewell}\n".encode())
            os._exit(EXIT_CODE)
        self._told, self._told_at = True, now
        if not self._deferred:
            raise KeyboardInterrupt
