"""The command: draws calls, runs them in many processes, prints failures as they come and a table at the end."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from functools import partial

from saccade.ops.dispatch import NAMES
from tests.random_calls import calls
from tests.random_calls.outcome import Tally
from tests.random_calls.worker import Draw, outcomes

GRACE = 30
"""Seconds in which the last calls may end."""
FAILURES = 40
"""After so many the rest says nothing new."""


def numbers(first: int, most: int | None, until: float) -> Iterator[int]:
    number = first
    while time.monotonic() < until and (most is None or number < first + most):
        yield number
        number += 1


def random_calls(draw: Draw, given: argparse.Namespace) -> Tally:
    """Runs calls and prints what fails."""
    tally, begun = Tally(), time.monotonic()
    drawn = numbers(given.first, given.calls, begun + given.seconds)
    threads = given.threads or 1
    for outcome in outcomes(draw, drawn, given.processes, given.limit, threads, GRACE):
        if failure := tally.add(draw(outcome.number), outcome):
            print(f"{failure}\n", flush=True)
        if len(tally.failures) >= FAILURES:
            print(f"{FAILURES} failures: this is the end\n")
            break
        if tally.calls % 200 == 0:
            print(f"{tally.calls} calls, {time.monotonic() - begun:.0f} s, {len(tally.failures)} failures", flush=True)
    print(tally.report(time.monotonic() - begun))
    return tally


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.random_calls", description=sys.modules[__package__].__doc__)
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:1")
    parser.add_argument("--backend", default="auto", choices=["auto", *NAMES])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first call")
    parser.add_argument("--calls", type=int, default=None, help="how many at most")
    parser.add_argument("--seconds", type=float, default=400)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--limit", type=float, default=180, help="seconds that a call may take, or it hangs")
    parser.add_argument("--show", action="store_true", help="print the program of the first call, and run nothing")
    parser.add_argument("--modes", action="store_true", help="run each call compiled, captured, exported and so on")
    given = parser.parse_args(arguments)
    draw = partial(calls.draw, given.seed, device=given.device, backend=given.backend, by_modes=given.modes)
    if given.show:
        print(draw(given.first).text)
        return 0
    return int(random_calls(draw, given).failed())


if __name__ == "__main__":
    sys.exit(main())
