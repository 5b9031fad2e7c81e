"""The errors a user can cause. Each message is one sentence that names the file, row or flag and says what to do."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from pagedgen.request import Status


class PagedgenError(Exception):
    """The run cannot go on. The command line prints the message without a traceback and exits with `exit_code`."""

    exit_code = 1


class UsageError(PagedgenError):
    """The command, a flag, or a path given on the command line is wrong."""

    exit_code = 2


@contextmanager
def before_any_work() -> Iterator[None]:
    """For what looks at the input or the model that a command names: where it cannot be used, the command is wrong."""
    try:
        yield
    except UsageError:
        raise
    except PagedgenError as error:
        raise UsageError(str(error)) from error


def listed(names: Iterable[str]) -> str:
    """Names with commas between them, on one line whatever they hold."""
    return ", ".join(name if name.isprintable() else repr(name) for name in names)


class RowError(Exception):
    """One input row cannot be generated; it becomes an outcome with this status, and the run goes on."""

    def __init__(self, status: Status, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
