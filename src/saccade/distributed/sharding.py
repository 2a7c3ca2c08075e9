"""Who has which rows, and which keys each rank needs: made of lengths alone, equal on every rank.

Ranks have equal numbers of rows and of scores, and as few documents are cut as that takes. Documents lie in a line, in
the order of the scores that one of their rows has. A stretch of that line with a rank's share of the rows has at one
end of the line fewer scores than its share, at the other end more, and therefore exactly its share somewhere between.
What is left has the same mean, and so has a stretch of the line for the next rank, around the hole. Every rank cuts at
most two documents.

A document that is cut is a line as well, of which any part has the mean of the whole. Where rows see more keys the
later they are, as under a causal mask, it goes from both ends to the middle: two pieces, or one in the middle. Where
all rows see as many, it goes from the first row to the last, and a cut is one place. Under a window the first rows see
more and more, and the last ones, if it reaches ahead, fewer and fewer: a part has its share of each, and of those
between.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate, pairwise
from typing import NamedTuple

from saccade import masks
from saccade.masks import Mask
from saccade.util.caches import cached_attribute


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
    """The smallest known window that contains a mask, without reading tensors. For `&` it is the intersection. For
    other combinations, and for functions, it is everything.

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

    def area(self, position: int) -> int:
        """The scores of all rows before a place."""
        at = bisect_right(self.ends, position) - 1
        inside = position - self.ends[at]
        if not inside:
            return self.areas[at]
        pieces = self.stretches[at].taken(0, inside)
        return self.areas[at] + sum(self.reach.area(self.lengths[i], start, stop) for i, start, stop in pieces)

    def snapped(
        self, value: Callable[[int], int], wanted: int, low: int, high: int, cuts: Callable[[int], tuple[int, int]]
    ) -> int:
        """Where a function that rises comes near enough to a value with the fewest cuts, or nearest to it. `cuts` are
        the two places where the line is cut, which move with x."""
        found = _position(value, wanted, low, high)
        near = {low, found, high}
        for position in cuts(found):
            at = bisect_right(self.ends, position) - 1
            near |= {found + end - position for end in self.ends[at : at + 2]}

        def worth(x: int) -> tuple[int, int, int]:
            error = abs(value(x) - wanted)
            return sum(self.ends[bisect_right(self.ends, position) - 1] != position for position in cuts(x)), error, x

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


def _position(value: Callable[[int], int], wanted: int, low: int, high: int) -> int:
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


@dataclass(frozen=True)
class Sharding:
    """The rows of documents over `parts` groups of `heads` ranks; the ranks of a part have its keys in common."""

    lengths: tuple[int, ...]
    parts: int
    heads: int
    reach: Reach
    """What rows see at most."""

    @cached_attribute
    def by_part(self) -> list[list[Piece]]:
        """The pieces of each part, in order of documents and rows."""
        if self.parts == 1:
            return [[Piece(i, 0, n) for i, n in enumerate(self.lengths) if n]]
        return balanced(self.lengths, self.parts, self.reach)

    @cached_attribute
    def by_rank(self) -> list[list[Piece]]:
        """The pieces of each rank: a part's rows go to its ranks in order, in equal numbers."""
        if self.heads == 1:
            return self.by_part
        return [share for pieces in self.by_part for share in _shares(pieces, self.heads)]

    @cached_attribute
    def keys(self) -> list[list[Piece]]:
        """For each part the keys that its rows see, one span for each document with rows there."""
        return [list(spans(pieces, self.lengths, self.reach)) for pieces in self.by_part]

    def seen(self, pieces: list[Piece]) -> list[Piece]:
        """The keys that each piece's rows see."""
        return [Piece(i, *self.reach.keys(self.lengths[i], start, stop)) for i, start, stop in pieces]

    def needed(self, pieces: bool) -> list[list[Piece]]:
        """For each part, the keys of its calls. If pieces are sequences, which needs a mask without later keys, these
        are the keys of each piece, some of them twice. Otherwise they are `keys`."""
        return [self.seen(part) for part in self.by_part] if pieces and self.reach.right == 0 else self.keys

    def before(self, pieces: list[Piece]) -> list[list[Piece]]:
        """For each of a rank's pieces the rows of its document before it that others have: causal rows see them all."""
        held: dict[int, list[Piece]] = {}
        for piece in pieces:
            held.setdefault(piece.document, []).append(piece)
        return [list(_gaps(piece, held[piece.document])) for piece in pieces]

    def others_first(self, pieces: list[Piece]) -> list[Piece]:
        """The keys that the causal rows of a piece see: other ranks' first, then its own up to its last row."""
        found: list[Piece] = []
        for piece, others in zip(pieces, self.before(pieces), strict=True):
            mine = (x for x in pieces if x.document == piece.document and x.start <= piece.start)
            found += [*others, *mine]
        return found

    @property
    def rows(self) -> list[int]:
        """Of each rank."""
        return [sum(piece.rows for piece in pieces) for pieces in self.by_rank]

    @property
    def areas(self) -> list[int]:
        """The scores of each part, of one head."""
        return [
            sum(self.reach.area(self.lengths[i], start, stop) for i, start, stop in pieces) for pieces in self.by_part
        ]

    @property
    def pulled(self) -> list[int]:
        """How many keys of other parts each part needs."""
        return self.pulled_of(self.keys)

    def pulled_of(self, needed: list[list[Piece]]) -> list[int]:
        """How many of these keys are of other parts."""
        return [
            sum(span.rows for span in spans) - sum(overlap(span, pieces) for span in spans)
            for spans, pieces in zip(needed, self._by_document(), strict=True)
        ]

    def _by_document(self) -> list[dict[int, list[Piece]]]:
        found: list[dict[int, list[Piece]]] = []
        for pieces in self.by_part:
            mine: dict[int, list[Piece]] = {}
            for piece in pieces:
                mine.setdefault(piece.document, []).append(piece)
            found.append(mine)
        return found

    @cached_attribute
    def fingerprint(self) -> str:
        """Equal where plans are."""
        text = type(self).__name__ + repr((self.lengths, self.parts, self.heads, self.reach))
        return hashlib.sha256(text.encode()).hexdigest()[:12]


class PairSharding(Sharding):
    """Each document in 2 R chunks, of which rank r has number r and number 2 R - 1 - r."""

    @cached_attribute
    def by_part(self) -> list[list[Piece]]:
        ranks = self.parts
        return [
            joined(
                Piece(i, n // (2 * ranks) * chunk, n // (2 * ranks) * (chunk + 1))
                for i, n in enumerate(self.lengths)
                for chunk in (part, 2 * ranks - 1 - part)
            )
            for part in range(ranks)
        ]


def overlap(span: Piece, of_document: dict[int, list[Piece]]) -> int:
    """How many rows of a span are among the pieces."""
    pieces = of_document.get(span.document, ())
    return sum(max(0, min(span.stop, piece.stop) - max(span.start, piece.start)) for piece in pieces)


def _gaps(piece: Piece, held: list[Piece]) -> Iterator[Piece]:
    """What of a document's rows before a piece is in none of the pieces, which are in order."""
    at = 0
    for start, stop in ((x.start, x.stop) for x in held if x.start <= piece.start):
        if at < start:
            yield Piece(piece.document, at, start)
        at = stop


def _shares(pieces: list[Piece], ranks: int) -> list[list[Piece]]:
    """Pieces one after the other, cut into equal numbers of rows."""
    rows, start = sum(piece.rows for piece in pieces), 0
    shares: list[list[Piece]] = [[] for _ in range(ranks)]
    ends = [rows * (i + 1) // ranks for i in range(ranks)]
    rank = 0
    for piece in pieces:
        at = piece.start
        while at < piece.stop:
            while start == ends[rank]:
                rank += 1
            taken = min(piece.stop - at, ends[rank] - start)
            shares[rank].append(Piece(piece.document, at, at + taken))
            at, start = at + taken, start + taken
    return [joined(share) for share in shares]
