"""How the threads of the CPU path wait for one another."""

import os

# About 0.2 ms on the machines this was measured on: longer than the gaps between the parallel regions of a step.
SPIN_COUNT = 5000


def limit_spinning() -> None:
    """Let a thread that waits for the others of a parallel region spin for a moment only, then give its core away.

    GNU OpenMP, which torch brings, spins for milliseconds: then one other busy process on the machine slows each of the
    hundreds of short regions of a step down, by a factor of ten and more. Not spinning at all would cost a sleep and a
    wake-up for each region. Read when torch is loaded, so this comes before; what the user has set stays.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))
