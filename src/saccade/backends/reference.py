"""The oracle as a backend. It runs outside of the registered operator, so that PyTorch differentiates it, as often as
one likes; it has no backward of its own."""

from __future__ import annotations

from saccade import reference
from saccade.backends import EVERYTHING, Launches, Outputs
from saccade.call import Call
from saccade.layouts import ordered_like
from saccade.spec import Spec

SUPPORT = EVERYTHING
GRADIENT = None


def obstacle() -> str | None:
    return None


def workspace(spec: Spec) -> str:
    return "several times the score matrix b h_q s_q s_k"


def run_forward(call: Call, launches: Launches, lse: bool) -> Outputs:
    out, row_lse, max_scores = reference.attention(call)
    return ordered_like(out, call.q), row_lse, max_scores
