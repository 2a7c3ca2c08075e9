"""Hopper's kernels on a CPU. A sample by default; with `--everything` all named problems, and more seeds."""

from __future__ import annotations

import os

collect_ignore_glob = ["*"] if os.environ.get("TRITON_INTERPRET") == "1" else []
