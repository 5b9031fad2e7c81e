"""Where the `pagedgen` command begins. It imports next to nothing, so that Ctrl-C is never answered with a traceback,
not even while the rest is imported."""

import os
import signal
from types import FrameType
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line. Before a job handles signals itself, there is nothing on the disk that could be spoilt."""
    signal.signal(signal.SIGINT, _leave)
    from pagedgen.cli import main as run_command_line

    run_command_line()


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    os.write(2, b"\npagedgen: interrupted\n")
    os._exit(130)
