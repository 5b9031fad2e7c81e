"""Starts `pagedgen` commands in no time, for tests that kill many: one process imports everything, its children are it.

    python zygote.py     reads lines, each a JSON list of arguments: for each it forks a child that runs the command and
                         answers two lines: the child's process id, and once it has ended, its return code (-9: killed)

Nothing may have been computed before a fork: the threads of OpenMP do not survive one.
"""

import json
import os
import sys

from pagedgen.process import prepare_process


def main() -> None:
    prepare_process()  # before torch is loaded
    import pagedgen.engine
    import pagedgen.job
    from pagedgen import cli

    assert pagedgen.job.run_job is not None
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            sys.argv = ["pagedgen", *json.loads(line)]
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            cli.main()
        print(child, flush=True)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
