"""Who has which rows, and which keys each rank needs: made of lengths alone, equal on every rank."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from saccade.distributed.balance import balanced
from saccade.distributed.pieces import Piece, Reach, joined, spans
from saccade.lazily import lazily


@dataclass(frozen=True)
class Sharding:
    """The rows of documents over `parts` groups of `heads` ranks; the ranks of a part have its keys in common."""

    lengths: tuple[int, ...]
    parts: int
    heads: int
    reach: Reach
    """What rows see at most."""

    @lazily
    def by_part(self) -> list[list[Piece]]:
        """The pieces of each part, in order of documents and rows."""
        if self.parts == 1:
            return [[Piece(i, 0, n) for i, n in enumerate(self.lengths) if n]]
        return balanced(self.lengths, self.parts, self.reach)

    @lazily
    def by_rank(self) -> list[list[Piece]]:
        """The pieces of each rank: a part's rows go to its ranks in order, in equal numbers."""
        if self.heads == 1:
            return self.by_part
        return [share for pieces in self.by_part for share in _shares(pieces, self.heads)]

    @lazily
    def keys(self) -> list[list[Piece]]:
        """For each part the keys that its rows see, one span for each document with rows there."""
        return [list(spans(pieces, self.lengths, self.reach)) for pieces in self.by_part]

    def seen(self, pieces: list[Piece]) -> list[Piece]:
        """The keys that each piece's rows see."""
        return [Piece(i, *self.reach.keys(self.lengths[i], start, stop)) for i, start, stop in pieces]

    def needed(self, pieces: bool) -> list[list[Piece]]:
        """For each part the keys of its calls: where pieces are sequences, as they may be where no row sees keys after
        itself, those of each piece, of which some come twice; else `keys`."""
        return [self.seen(part) for part in self.by_part] if pieces and self.reach.right == 0 else self.keys

    def before(self, pieces: list[Piece]) -> list[list[Piece]]:
        """For each of a rank's pieces the rows of its document before it that others have: causal rows see them all."""
        held: dict[int, list[Piece]] = {}
        for piece in pieces:
            held.setdefault(piece.document, []).append(piece)
        return [list(_gaps(piece, held[piece.document])) for piece in pieces]

    def others_first(self, pieces: list[Piece]) -> list[Piece]:
        """The keys that the causal rows of each piece see: those of others, then its own up to its last row."""
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

    @lazily
    def fingerprint(self) -> str:
        """Equal where plans are."""
        text = type(self).__name__ + repr((self.lengths, self.parts, self.heads, self.reach))
        return hashlib.sha256(text.encode()).hexdigest()[:12]


class PairSharding(Sharding):
    """Each document in 2 R chunks, of which rank r has number r and number 2 R - 1 - r."""

    @lazily
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
