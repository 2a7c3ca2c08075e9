"""A Call whose score function masks keys by their distance, with a window in its place: tiles that the window masks
are never visited."""

from __future__ import annotations

from functools import lru_cache

from saccade.call import Call
from saccade.masks import UNBOUNDED, And, Blocked, Documents, Mask, Or, Prefix, Window
from saccade.ops.score_windows import split_score
from saccade.scores import Score

WHOLE_SCORES = ("cudnn", "reference")
"""Backends that take score functions as they were written."""


def move_to_mask(call: Call, backend: str) -> Call:
    """The same Call with what its score masks in its mask, where that is possible."""
    split = window_and_rest(call, backend)
    if split is None:
        return call
    window, rest = split
    return call.replace(mask=window if call.mask is None else call.mask & window, score=rest)


def window_and_rest(call: Call, backend: str) -> tuple[Window, Score | None] | None:
    """The window that the score masks by, and the rest of the score; None where a window would not be the same."""
    if call.score is None or backend in WHOLE_SCORES or isinstance(call.mask, Blocked):
        return None
    split = split_score(call.score)
    positioned = call.positions is not None or call.layout.has_pages  # functions and windows alike
    off = 0 if positioned else call.layout.common_offset(call.q.shape[2], call.k.shape[2])
    if split is None or off is None:
        return None
    band, rest = split
    if positioned and not band.empty_rows:
        return None
    window = _window(band.left, band.right, off)
    if window is None or not (band.empty_rows or _every_row_sees_a_key(call, window, off)):
        return None
    return window, rest


@lru_cache(maxsize=1024)
def _window(left: int | None, right: int | None, off: int) -> Window | None:
    """A band that is aligned at the top left as a window, which is aligned at the bottom right. None if the window's
    diagonal is outside of the band."""
    bounds = left if left is None else left + off, right if right is None else right - off
    if any(x is not None and x < 0 for x in bounds):
        return None
    return Window(*(None if x is None or x >= UNBOUNDED else x for x in bounds))


def _every_row_sees_a_key(call: Call, window: Window, off: int) -> bool:
    """Whether every row that sees a key at all sees one in the window too."""
    own = call.mask
    if off == 0 and (own is None or _on_diagonal(own)):
        return True
    if not (own is None or isinstance(own, Window)):
        return False
    s_q, s_k = call.q.shape[2], call.k.shape[2]
    left, right = (UNBOUNDED, UNBOUNDED) if own is None else own.bounds
    first, last = max(0, -off - right), min(s_q - 1, s_k - 1 - off + left)  # of the rows that see a key
    left, right = min(left, window.bounds[0]), min(right, window.bounds[1])
    return first > last or (first + off + right >= 0 and last + off - left <= s_k - 1)


def _on_diagonal(mask: Mask) -> bool:
    """Whether every row sees the key of its own number, of as many rows as keys."""
    if isinstance(mask, And | Or):  # ~ is a Combined too, and masks the diagonal of what contains it
        return (all if isinstance(mask, And) else any)(map(_on_diagonal, mask.parts))
    return isinstance(mask, (Window, Prefix, Documents))
