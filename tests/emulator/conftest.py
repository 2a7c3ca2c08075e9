"""Hopper's kernels on a CPU, by Triton 3.9. A sample by default; with `--everything` all problems, and more seeds."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version


def _runs() -> bool:
    try:
        triton = version("triton")
    except PackageNotFoundError:
        return False
    return tuple(map(int, triton.split(".")[:2])) >= (3, 9) and os.environ.get("TRITON_INTERPRET") != "1"


collect_ignore_glob = [] if _runs() else ["*"]
