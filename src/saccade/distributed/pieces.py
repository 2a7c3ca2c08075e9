"""Pieces of documents, and what a mask makes of them: which keys their rows see, and how many scores that is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import reduce
from typing import NamedTuple

from saccade import masks
from saccade.masks import Mask


class Piece(NamedTuple):
    """The rows `start` to `stop` of one document."""

    document: int
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start


class Reach(NamedTuple):
    """Row p sees keys `p - left` to `p + right` at most; None is unbounded.

    >>> Reach(None, 0).area(10, 0, 10), Reach(2, 0).area(10, 0, 10), Reach(None, None).area(10, 4, 6)
    (55, 27, 20)
    >>> Reach(2, 0).keys(10, 4, 6), Reach(None, None).keys(10, 4, 6)
    ((2, 6), (0, 10))
    """

    left: int | None
    right: int | None

    def keys(self, length: int, start: int, stop: int) -> tuple[int, int]:
        """The keys that the rows `start` to `stop` of a document see."""
        return (
            0 if self.left is None else max(0, start - self.left),
            length if self.right is None else min(length, stop + self.right),
        )

    def area(self, length: int, start: int, stop: int) -> int:
        """The scores of these rows: `sum_p min(length, p + right + 1) - max(0, p - left)`."""
        rows = stop - start
        if rows <= 0:
            return 0
        area = rows * length
        if self.right is not None and (rising := min(rows, max(0, length - self.right - 1 - start))):
            area -= rising * (length - self.right - 1 - start) - rising * (rising - 1) // 2
        if self.left is not None and (cut := min(rows, max(0, stop - 1 - self.left))):
            last = stop - 1 - self.left
            area -= cut * last - cut * (cut - 1) // 2
        return area

    def holds(self, other: Reach) -> bool:
        """Whether no row sees more by the other."""
        return all(mine is None or (its is not None and its <= mine) for mine, its in zip(self, other, strict=True))

    def __str__(self) -> str:
        if self == (None, None):
            return "all keys"
        return "causal" if self == (None, 0) else f"window({self.left}, {self.right})"


EVERYTHING = Reach(None, None)


def reach_of(mask: Mask | None) -> Reach:
    """The window around a mask that does not depend on tensors: that of `&` is the intersection, that of any other
    combination, and of functions, everything.

    >>> from saccade import causal, window, prefix
    >>> reach_of(causal() & window(9, None)), reach_of(prefix(3)), reach_of(window(3, 0) | window(0, 2))
    (Reach(left=9, right=0), Reach(left=None, right=None), Reach(left=3, right=2))
    """
    if isinstance(mask, masks.Window):
        return Reach(mask.left, mask.right)
    if isinstance(mask, masks.And):
        return reduce(_both, map(reach_of, mask.parts))
    return EVERYTHING


def sees_all_before(mask: Mask | None) -> bool:
    """Whether a row sees the keys of its document up to its own, all of them and no other, as far as can be told.

    >>> from saccade import causal, window
    >>> sees_all_before(causal() & window(None, 3)), sees_all_before(causal() & ~window(3, 0))
    (True, False)
    """
    parts = mask.parts if isinstance(mask, masks.And) else (mask,)
    return reach_of(mask) == (None, 0) and all(isinstance(part, masks.Window) for part in parts)


def _both(a: Reach, b: Reach) -> Reach:
    least = (x if y is None else y if x is None else min(x, y) for x, y in zip(a, b, strict=True))
    return Reach(*least)


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """The same rows in order, with pieces that touch as one."""
    whole: list[Piece] = []
    for piece in sorted(piece for piece in pieces if piece.stop > piece.start):
        if whole and whole[-1].document == piece.document and whole[-1].stop == piece.start:
            whole[-1] = whole[-1]._replace(stop=piece.stop)
        else:
            whole.append(piece)
    return whole


def spans(pieces: list[Piece], lengths: tuple[int, ...], reach: Reach) -> Iterator[Piece]:
    """For each document with pieces, in order, one span of its keys that holds all that its rows see."""
    i = 0
    while i < len(pieces):
        document, start, stop = pieces[i]
        while i + 1 < len(pieces) and pieces[i + 1].document == document:
            i += 1
            stop = pieces[i].stop
        yield Piece(document, *reach.keys(lengths[document], start, stop))
        i += 1


def shifted(pieces: list[Piece], lengths: tuple[int, ...], shift: int) -> list[Piece]:
    """Where the rows `p - shift` of these pieces are, as far as documents have them.

    >>> shifted([Piece(0, 0, 4), Piece(1, 2, 3)], (6, 3), -1), shifted([Piece(0, 0, 4)], (6,), 2)
    ([Piece(document=0, start=1, stop=5)], [Piece(document=0, start=0, stop=2)])
    """
    moved = (
        Piece(i, min(max(start - shift, 0), lengths[i]), min(max(stop - shift, 0), lengths[i]))
        for i, start, stop in pieces
    )
    return [piece for piece in moved if piece.rows]
