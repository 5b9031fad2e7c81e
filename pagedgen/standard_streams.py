"""The streams a command is started with: whether there is input on them, and what becomes of what cannot be printed."""

import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from pagedgen.errors import PagedgenError


def stdin_is_piped() -> bool:
    """Whether something was piped or redirected into the command: a terminal and /dev/null are neither."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError, AttributeError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)


class ReaderGone(PagedgenError):
    """Whoever read standard output has read enough, like `head`: that is no failure, and there is nothing to say."""

    exit_code = 0


@contextmanager
def printing() -> Iterator[None]:
    """For a block that prints to standard output and does nothing else that could raise OSError.

    Raises PagedgenError when that cannot be written, and ReaderGone when nobody reads it any more.
    """
    if sys.stdout is None:  # closed by whoever started the process
        raise PagedgenError("standard output is closed; leave it open, or redirect it to a file")
    try:
        yield
        sys.stdout.flush()
    except (BrokenPipeError, SystemExit):  # of --help, which ends the process by itself then
        raise ReaderGone from None
    except OSError as error:
        raise PagedgenError(
            f"standard output cannot be written ({error.strerror or error}); redirect it to a file on a disk with room"
        ) from error


def tell(line: str) -> None:
    """Print a line to standard error, if it can be written: a command does not fail for what it says besides."""
    if sys.stderr is not None:
        with suppress(OSError):
            print(line, file=sys.stderr, flush=True)
