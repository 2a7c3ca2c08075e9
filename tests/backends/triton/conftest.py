"""What only the Triton kernels have, in Triton's interpreter: `make test` runs it with TRITON_INTERPRET=1, which Triton
reads when it is imported. Without it only files for a GPU are collected."""

from __future__ import annotations

from pathlib import Path

from tests.support.devices import INTERPRETED

FILES = Path(__file__).parent.glob("test_*.py")
collect_ignore = [x.name for x in FILES if x.stem.endswith("_gpu") == INTERPRETED]
