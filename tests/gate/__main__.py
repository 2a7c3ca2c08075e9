"""The command: compiles the rows in as many processes as there are cores, and prints what ptxas says of each."""

from __future__ import annotations

import datetime
import os
import sys
from typing import Any

import triton

from saccade.testing.offline import Died, in_processes
from tests.gate import fit


def main() -> None:
    seed = os.environ.setdefault("SEED", str(datetime.date.today()))
    drawn = f", drawn by SEED={seed}" if {fit.TODAY, fit.OTHERS} & {*sys.argv} else ""
    print(f"triton {triton.__version__}, sm_{fit.CAPABILITY}a{drawn}")
    failed = total = 0
    work: Any = fit.read if fit.READ in sys.argv[1:] else fit.fit
    for key, found in in_processes(work, fit.keys(sys.argv[1:]), os.cpu_count() or 1):
        died = isinstance(found, Died)
        print(f"FAIL  {key}  {found}" if died else found, flush=True)
        total += 1
        failed += died or not found.ok
    print(f"{total - failed} passed, {failed} failed")
    sys.exit(bool(failed) or not total)


if __name__ == "__main__":
    main()
