"""The command `pagedgen plan`: make the plan, print it, warn on stderr."""

import json
from typing import BinaryIO

from pagedgen.config import JobConfig
from pagedgen.planning.machine_readable import as_json
from pagedgen.planning.plan import make_plan
from pagedgen.planning.report import print_plan
from pagedgen.process import collector_paused
from pagedgen.standard_streams import printing, tell
from pagedgen.stats.live import stdout_console


def run_plan(config: JobConfig, stdin: BinaryIO | None, output_tokens: float | None, wants_json: bool) -> None:
    """Print the plan of a job to stdout. Raises what `make_plan` and `printing` raise."""
    with collector_paused():
        plan = make_plan(config, stdin, output_tokens=output_tokens, warn=_warn)
    with printing():
        if wants_json:
            print(json.dumps(as_json(plan), indent=2))
        else:
            print_plan(stdout_console(), plan)


def _warn(message: str) -> None:
    tell(f"warning: {message}")
