"""What a score function hides by distance, as a part of the mask: tiles of it are never visited."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from saccade.masks import UNBOUNDED, And, Blocked, Documents, Mask, Or, Prefix, Window
from saccade.problem import Problem
from saccade.scores import Score

WHOLE = ("cudnn", "reference")
"""Backends that take score functions as they were written."""


def hide(problem: Problem, backend: str) -> Problem:
    """The Problem in whose mask is what the score hides, where that is the same; else the Problem itself."""
    found = found_in(problem, backend)
    if found is None:
        return problem
    added, rest = found
    return replace(problem, mask=added if problem.mask is None else problem.mask & added, score=rest)


def found_in(problem: Problem, backend: str) -> tuple[Window, Score | None] | None:
    """What the score hides as a part of the mask, and the rest of the score; None where that would not be the same."""
    if problem.score is None or backend in WHOLE or isinstance(problem.mask, Blocked):
        return None
    found = problem.score.split()
    if found is None:
        return None
    hidden, rest = found
    off = problem.layout.common_offset(problem.q.shape[2], problem.k.shape[2])
    added = None if off is None else _window(hidden.left, hidden.right, off)
    if added is None or off is None or not (hidden.empty_rows or _every_row_sees(problem, added, off)):
        return None
    return added, rest


@lru_cache(maxsize=1024)
def _window(left: int | None, right: int | None, off: int) -> Window | None:
    """From the top left to the bottom right; None where it does not hold the diagonal there, as windows do."""
    moved = left if left is None else left + off, right if right is None else right - off
    if any(x is not None and x < 0 for x in moved):
        return None
    return Window(*(None if x is None or x >= UNBOUNDED else x for x in moved))


def _every_row_sees(problem: Problem, window: Window, off: int) -> bool:
    """Whether every row that sees a key at all sees one in the window too."""
    own = problem.mask
    if off == 0 and (own is None or _on_diagonal(own)):
        return True  # its own
    if not (own is None or isinstance(own, Window)):
        return False
    s_q, s_k = problem.q.shape[2], problem.k.shape[2]
    left, right = (UNBOUNDED, UNBOUNDED) if own is None else own.bounds
    first, last = max(0, -off - right), min(s_q - 1, s_k - 1 - off + left)  # of the rows that see a key
    left, right = min(left, window.bounds[0]), min(right, window.bounds[1])
    return first > last or (first + off + right >= 0 and last + off - left <= s_k - 1)


def _on_diagonal(mask: Mask) -> bool:
    """Whether every row sees the key of its own number, of as many rows as keys."""
    if isinstance(mask, And | Or):  # not ~, which is a Combined too, and of what holds the diagonal hides it
        return (all if isinstance(mask, And) else any)(map(_on_diagonal, mask.parts))
    return isinstance(mask, (Window, Prefix, Documents))
