"""The command `pagedgen plan`: make the plan, print it, warn on stderr."""

import json
from typing import BinaryIO

from pagedgen.config import JobConfig
from pagedgen.job_setup import check_options, open_rows
from pagedgen.process import collector_paused
from pagedgen.standard_streams import printing, tell
from pagedgen.stats.live import stdout_console


def run_plan(config: JobConfig, stdin: BinaryIO | None, output_tokens: float | None, wants_json: bool) -> None:
    """Print the plan of a job to stdout. Raises what `make_plan` and `printing` raise."""
    config = check_options(config)
    source = open_rows(config, stdin)
    with collector_paused():
        from pagedgen.planning.machine_readable import as_json  # torch and transformers are imported only now
        from pagedgen.planning.plan import plan_rows
        from pagedgen.planning.report import print_plan

        plan = plan_rows(config, source, output_tokens=output_tokens, warn=_warn)
    with printing():
        if wants_json:
            print(json.dumps(as_json(plan), indent=2))
        else:
            print_plan(stdout_console(), plan)


def _warn(message: str) -> None:
    tell(f"warning: {message}")
