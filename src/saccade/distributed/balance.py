"""Which rank has which rows: equal numbers of rows and of scores, and as few documents cut as that takes.

Documents lie in a line, in the order of the scores that one of their rows has. A stretch of that line with a rank's
share of the rows has at one end of the line fewer scores than its share, at the other end more, and therefore exactly
its share somewhere between. What is left has the same mean, and so has a stretch of the line for the next rank, around
the hole. Every rank cuts at most two documents.

A document that is cut is a line as well, of which any part has the mean of the whole. Where rows see more keys the
later they are, as under a causal mask, it goes from both ends to the middle: two pieces, or one in the middle. Where
all rows see as many, it goes from the first row to the last, and a cut is one place. Under a window the first rows see
more and more, and the last ones, if it reaches ahead, fewer and fewer: a part has its share of each, and of those
between.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise
from typing import NamedTuple

from saccade.distributed.pieces import Piece, Reach, joined


class Stretch(NamedTuple):
    """Rows of a document that stay together on the line, but for cuts."""

    piece: Piece
    rising: int
    """How many of the first rows see one key more each."""
    falling: int
    """How many of the last rows see one key less each."""
    area: int

    def taken(self, start: int, stop: int) -> Iterator[Piece]:
        """The rows from the place `start` inside of it to `stop`."""
        document, first, last = self.piece
        if stop - start == last - first:
            yield self.piece
            return
        edges, rows = self.rising + self.falling, self.piece.rows
        i, j = start * edges // rows, stop * edges // rows
        a, b = (i * self.rising // edges, j * self.rising // edges) if edges else (0, 0)
        middle = first + self.rising
        yield from _folded(Piece(document, first, middle), a, b)
        yield Piece(document, middle + start - i, middle + stop - j)
        yield from _folded(Piece(document, last - self.falling, last), i - a, j - b)


def _folded(piece: Piece, start: int, stop: int) -> Iterator[Piece]:
    """The rows from one place to another of a line that goes from both ends to the middle."""
    document, first, last = piece
    yield Piece(document, first + start - start // 2, first + stop - stop // 2)
    yield Piece(document, last - stop // 2, last - start // 2)


class Line:
    """Stretches in the order of scores per row; places on it count rows."""

    def __init__(self, lengths: tuple[int, ...], reach: Reach, long: int) -> None:
        self.lengths, self.reach = lengths, reach
        found: list[Stretch] = []
        whole: dict[int, tuple[int, int, int]] = {}  # of short documents: the rest of a Stretch, by the length
        for i, n in enumerate(lengths):
            if n > long:
                found += _stretches(i, n, reach, long)
            elif n:
                if n not in whole:
                    (stretch,) = _stretches(i, n, reach, long)
                    whole[n] = stretch[1:]
                found.append(Stretch(Piece(i, 0, n), *whole[n]))
        self.stretches = sorted(found, key=lambda x: (x.area / x.piece.rows, x.piece))
        self.ends = [0, *accumulate(x.piece.rows for x in self.stretches)]
        self.areas = [0, *accumulate(x.area for x in self.stretches)]

    @property
    def rows(self) -> int:
        return self.ends[-1]

    def area(self, place: int) -> int:
        """The scores of all rows before a place."""
        at = bisect_right(self.ends, place) - 1
        inside = place - self.ends[at]
        if not inside:
            return self.areas[at]
        pieces = self.stretches[at].taken(0, inside)
        return self.areas[at] + sum(self.reach.area(self.lengths[i], start, stop) for i, start, stop in pieces)

    def snapped(
        self, value: Callable[[int], int], wanted: int, low: int, high: int, cuts: Callable[[int], tuple[int, int]]
    ) -> int:
        """Where a function that rises comes near enough to a value with the fewest cuts, or nearest to it. `cuts` are
        the two places where the line is cut, which move with x."""
        found = _place(value, wanted, low, high)
        near = {low, found, high}
        for place in cuts(found):
            at = bisect_right(self.ends, place) - 1
            near |= {found + end - place for end in self.ends[at : at + 2]}

        def worth(x: int) -> tuple[int, int, int]:
            error = abs(value(x) - wanted)
            return sum(self.ends[bisect_right(self.ends, place) - 1] != place for place in cuts(x)), error, x

        allowed = [x for x in near if low <= x <= high and (x == found or SLACK * abs(value(x) - wanted) <= wanted)]
        return min(allowed, key=worth)

    def pieces(self, start: int, stop: int) -> Iterator[Piece]:
        """The rows between two places."""
        at = bisect_right(self.ends, start) - 1
        while start < stop:
            end = min(stop, self.ends[at + 1])
            yield from self.stretches[at].taken(start - self.ends[at], end - self.ends[at])
            start, at = end, at + 1


def _stretches(document: int, length: int, reach: Reach, long: int) -> Iterator[Stretch]:
    """A long document is cut where its rows begin, or cease, to see more keys than the row before, unless few rows do;
    others are whole, as each part would need keys of the others."""
    # Rows before `more` have one key more at their right each, those from `less` on one key less at their left.
    more = 0 if reach.right is None else max(0, length - reach.right)
    less = length if reach.left is None else min(length, reach.left + 1)
    few = long // 16  # such rows are a small part of a rank's scores
    ends = sorted({0, length, *(x for x in (more, less) if length > long and few < x < length - few)})
    for start, stop in pairwise(ends):
        rising, falling = max(0, min(stop, more, less) - start), max(0, stop - max(start, more, less))
        if FEW * (rising + falling) < stop - start:
            rising = falling = 0
        yield Stretch(Piece(document, start, stop), rising, falling, reach.area(length, start, stop))


FEW = 32
"""Rows at the ends of a document that are less than this part of it are taken as they come."""
SLACK = 200
"""A rank may have this part of its scores more or less, where a document less is cut for it."""


def balanced(lengths: tuple[int, ...], ranks: int, reach: Reach) -> list[list[Piece]]:
    """The pieces of each rank, in order of documents and rows.

    >>> balanced((8,), 2, Reach(None, 0))
    [[Piece(document=0, start=0, stop=2), Piece(document=0, start=6, stop=8)], [Piece(document=0, start=2, stop=6)]]
    >>> balanced((2, 6, 2, 6), 2, Reach(None, None))[0]
    [Piece(document=1, start=0, stop=6), Piece(document=2, start=0, stop=2)]
    """
    line, found = Line(lengths, reach, sum(lengths) // (2 * ranks)), []
    first, rest = line.rows // ranks, line.areas[-1]

    def of_stretch(low: int) -> int:
        return line.area(low + first) - line.area(low)

    share = rest * first // max(1, line.rows)
    low = high = line.snapped(of_stretch, share, 0, line.rows - first, lambda low: (low, low + first))
    for rank in range(ranks):
        rows = line.rows * (rank + 1) // ranks - line.rows * rank // ranks
        share = rest * rows // max(1, line.rows - line.rows * rank // ranks)
        right = _right_rows(line, low, high, rows, share)
        taken = (low - rows + right, low), (high, high + right)
        found.append(joined([*line.pieces(*taken[0]), *line.pieces(*taken[1])]))
        low, high = taken[0][0], taken[1][1]
        rest -= sum(line.area(stop) - line.area(start) for start, stop in taken)
    return found


def _right_rows(line: Line, low: int, high: int, rows: int, share: int) -> int:
    """How many of a rank's rows are those after the hole; the others are those before it."""
    hole = line.area(high) - line.area(low)

    def area(right: int) -> int:
        return line.area(high + right) - line.area(low - rows + right) - hole

    least, most = max(0, rows - low), min(rows, line.rows - high)
    return line.snapped(area, share, least, most, lambda right: (low - rows + right, high + right))


def _place(value: Callable[[int], int], wanted: int, low: int, high: int) -> int:
    """Where a function that rises comes nearest to a value, from low to high."""
    first, last = low, high
    while low < high:
        middle = (low + high) // 2
        if value(middle) < wanted:
            low = middle + 1
        else:
            high = middle
    near = [x for x in (low - 1, low) if first <= x <= last]
    return min(near, key=lambda x: (abs(value(x) - wanted), x))
