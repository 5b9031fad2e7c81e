"""A contestant's side of `benchmarks.common.Worker`. Standard library only: peers run in environments of their own."""

import sys
from collections.abc import Callable
from typing import NoReturn

ANSWER = "answer: "


def serve(contestant: Callable[[int], float], about: str = "") -> NoReturn:
    """Be a `Worker`'s process: run the rounds that are asked for and report their seconds.

    about: what runs and its version, for the results.
    """
    print(f"{ANSWER}{about}", flush=True)
    for line in sys.stdin:
        print(f"{ANSWER}{contestant(int(line))}", flush=True)
    sys.exit(0)
