"""The registered operators, and everything between a Call and a backend."""

from saccade.ops.execution import execute
from saccade.ops.operators import (
    OVERLOADS,
    fake_forward,
    gradients,
    implement,
    library,
    replayed,
    run,
    run_by_operator,
    run_directly,
    runs_directly,
)

__all__ = [
    "OVERLOADS", "execute", "fake_forward", "gradients", "implement", "library", "replayed", "run", "run_by_operator",
    "run_directly", "runs_directly",
]  # fmt: skip
