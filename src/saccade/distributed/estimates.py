"""How long a plan takes on H200s, by a model: products, and the keys that a rank receives and sends."""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

from saccade.distributed.sharding import Sharding


class Link(NamedTuple):
    """An exchange of n bytes takes `seconds + n / rate`."""

    seconds: float
    rate: float


class Pace(NamedTuple):
    """A row that sees n keys takes `4 h_q d factor (n + extra) / rate` seconds."""

    rate: float
    extra: int
    factor: float = 1.0


# Measured on H200s of one host over NVLink, in bfloat16 (docs/findings/distributed.md): lines through 8, 34 and 67 MB.
COPIES, COPIES_BACK = Link(30e-6, 316e9), Link(33e-6, 256e9)
"""`pull`: keys and values, and the sums of their gradients."""
OWN_FIRST = False
"""Whether calls may begin with own keys: off until GPUs have compared the results."""
BESIDE = Link(25e-6, 360e9)
"""Copies beside a call over own keys, and what a second call and a barrier cost."""
SLOWED, MEMORY = 0.06, 3.3e12
"""What kernels lose beside copies, and bytes a second that kernels read and write."""
COLLECTIVE = Link(80e-6, 105e9)
"""`gather`, with packing."""
INFINIBAND = Link(60e-6, 45e9)
"""Assumed: nine tenths of 400 Gb/s for each GPU."""
FORWARD, BACKWARD = Pace(730e12, 256), Pace(615e12, 448, 2.5)


class Estimate(NamedTuple):
    """Seconds of one call."""

    ideal: float
    """A rank's share of what one GPU takes on the whole."""
    products: float
    """Of the rank with most."""
    exposed: float
    """Of the slowest rank, if it receives first."""
    hidden: float
    """If what it receives costs nothing until it takes longer than the products."""

    @property
    def efficiency(self) -> tuple[float, float]:
        """At least and at most."""
        return self.ideal / self.exposed, self.ideal / self.hidden


def estimate(
    sharding: Sharding, heads: tuple[int, int], head_dim: int, pace: Pace = FORWARD, link: Link = COPIES,
    host: int | None = None, beyond: Link = INFINIBAND,
) -> Estimate:  # fmt: skip
    """Of a plan whose ranks share keys: parts of `heads` ranks.

    Args:
        heads: (h_q, h_k).
        link: between ranks of one host.
        host: how many ranks a host has; None for all.
        beyond: between hosts. Both carry at the same time.
    """
    h_q, h_k = (h / sharding.heads for h in heads)
    operations = 4 * h_q * head_dim * pace.factor / pace.rate
    work = [
        operations * (area + pace.extra * sum(piece.rows for piece in pieces))
        for area, pieces in zip(sharding.areas, sharding.by_part, strict=True)
    ]
    size = 4 * h_k * head_dim  # bytes of a key and its value
    moved = [0.0] * len(work)
    if len(work) > 1:
        near, far = rows_moved(sharding, host or len(work))
        links = (link, near), *([(beyond, far)] if host is not None and host < len(work) else [])
        moved = [max(way.seconds + size * most[i] / way.rate for way, most in links) for i in range(len(work))]
    exposed = max(a + b for a, b in zip(work, moved, strict=True))
    return Estimate(sum(work) / len(work), max(work), exposed, max(map(max, zip(work, moved, strict=True))))


def of_pull(sharding: Sharding, heads: tuple[int, int], head_dim: int, backward: bool = False) -> Estimate:
    """Of a causal call's forward or backward by `pull` on one host."""
    if backward:
        return estimate(sharding, heads, head_dim, BACKWARD, COPIES_BACK)
    found = estimate(sharding, heads, head_dim, FORWARD, COPIES)
    saved = saved_seconds(late(sharding), heads, head_dim)
    return found._replace(exposed=found.exposed - max(0.0, saved))


class Late(NamedTuple):
    """What a rank's causal call has to wait for."""

    rows: int
    """which see keys of others"""
    own: int
    """scores of own keys"""
    keys: int
    """of others"""


def late(sharding: Sharding) -> list[Late]:
    """Of each part."""
    found = []
    for pieces, area, pulled in zip(sharding.by_part, sharding.areas, sharding.pulled, strict=True):
        before = (sum(x.rows for x in others) for others in sharding.before(pieces))
        seen = [(piece.rows, keys) for piece, keys in zip(pieces, before, strict=True)]
        rows, scores = sum(rows for rows, keys in seen if keys), sum(rows * keys for rows, keys in seen)
        found.append(Late(rows, area - scores, pulled))
    return found


def saved_seconds(ranks: list[Late], heads: tuple[int, int], head_dim: int) -> float:
    """Of a causal forward by `pull`, if all ranks begin with their own keys, and take those of others in a second call,
    whose results are merged; below zero where that costs more."""
    if not OWN_FIRST:
        return 0.0
    h_q, h_k = heads
    at_once, in_two = [0.0], [0.0]
    for rows, scores, keys in ranks:
        size, own = 4 * h_k * head_dim * keys, 4 * h_q * head_dim * scores / FORWARD.rate
        copies = size / BESIDE.rate
        beside = max(copies - own, SLOWED * copies)
        at_once.append(COPIES.seconds + size / COPIES.rate)
        in_two.append(BESIDE.seconds + beside + (2 * size + 6 * h_q * head_dim * rows) / MEMORY)
    return max(at_once) - max(in_two)


def rows_moved(sharding: Sharding, host: int) -> tuple[list[int], list[int]]:
    """For each part how many keys it receives, or sends if these are more: within its host, and beyond it."""
    owners: dict[int, list[tuple[int, int, int]]] = {}
    for part, pieces in enumerate(sharding.by_part):
        for document, start, stop in pieces:
            owners.setdefault(document, []).append((start, stop, part))
    for found in owners.values():
        found.sort()
    received, sent = ([[0] * sharding.parts for _ in range(2)] for _ in range(2))
    for part, spans in enumerate(sharding.keys):
        for document, first, last in spans:
            found = owners[document]
            at = max(0, bisect_right(found, (first, sharding.lengths[document] + 1, 0)) - 1)
            while at < len(found) and found[at][0] < last:
                start, stop, owner = found[at]
                rows, far = min(stop, last) - max(start, first), owner // host != part // host
                if owner != part and rows > 0:
                    received[far][part] += rows
                    sent[far][owner] += rows
                at += 1
    near, far = ([max(pair) for pair in zip(*side, strict=True)] for side in zip(received, sent, strict=True))
    return near, far
