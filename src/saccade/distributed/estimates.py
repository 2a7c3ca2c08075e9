"""What a plan costs: scores, bytes, and how long both take on H200s, by a model of products and of keys that move."""

from __future__ import annotations

from bisect import bisect_right
from math import inf, log2
from typing import TYPE_CHECKING, NamedTuple

from saccade.distributed.sharding import Piece, Sharding

if TYPE_CHECKING:
    from saccade.distributed.context_plan import ContextPlan


class Link(NamedTuple):
    """An exchange of n bytes, with which m bytes are written, takes `seconds + n / rate + 2 m / memory` seconds, and
    `returned` times as long for gradients."""

    seconds: float
    rate: float
    """Between two ranks."""
    memory: float = inf
    """Of reading and writing what is written; beyond counting where that is in the rate."""
    returned: float = 1.0
    growth: float = 1.0
    """The rate of twice as many ranks, which receive from more at once, over that of these."""

    def over(self, ranks: int) -> Link:
        """Between so many."""
        return self._replace(rate=self.rate * self.growth ** log2(ranks / 2)) if ranks > 2 else self

    def took(self, moved: float, written: float, backward: bool = False) -> float:
        return (self.returned if backward else 1.0) * (self.seconds + moved / self.rate + 2 * written / self.memory)


class Pace(NamedTuple):
    """A row that sees n keys takes `4 h_q d factor (n + extra) / rate` seconds, and a key beyond one for each row, as
    those of others are, as much as `keys` scores."""

    rate: float
    extra: int
    factor: float = 1.0
    keys: int = 0


# Measured on H200s of one host over NVLink, in bfloat16 (notes/distributed.md).
MEMORY = 3.3e12
"""Bytes a second that kernels read and write."""
COPIES = Link(30e-6, 370e9, MEMORY)
"""`pull`: keys and values, or the sums of their gradients; a kernel writes all that a rank needs, its own too."""
BESIDE = Link(30e-6, 200e9)
"""Copies of 2 MB beside a call, each of 5 µs and its bytes at 370 GB/s, and what begins before it: a launch and a
barrier."""
SLOWED = 0.06
"""What kernels lose beside copies."""
ITEM = 128 * 132
"""Rows of a forward's work item, times multiprocessors, each of which works on one."""
COLLECTIVE = Link(124e-6, 101e9, returned=1.85, growth=1.3)
"""`gather`, with packing."""
HEADS = Link(177e-6, 155e9, returned=1.2, growth=1.1)
"""`ulysses`: all exchanges of a call together, with packing."""
INFINIBAND = Link(60e-6, 45e9)
"""Assumed: nine tenths of 400 Gb/s for each GPU."""
FORWARD, BACKWARD = Pace(730e12, 256), Pace(615e12, 448, 2.5, 100)


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
        """At least and at most; of nothing, which takes no time, 1."""
        return (self.ideal / self.exposed, self.ideal / self.hidden) if self.hidden else (1.0, 1.0)


def estimate(
    sharding: Sharding, heads: tuple[int, int], head_dim: int, pace: Pace = FORWARD, link: Link = COPIES,
    host: int | None = None, beyond: Link = INFINIBAND, pieces: bool = True,
) -> Estimate:  # fmt: skip
    """The estimate for a plan whose ranks exchange keys, with parts of `heads` ranks each, (h_q, h_k).

    `link` is between ranks of one host, of which it has `host`, None for all, and `beyond` between hosts. Both carry at
    the same time. pieces: whether pieces are sequences where the mask allows; else rows have positions.
    """
    h_q, h_k = (h / sharding.heads for h in heads)
    operations = 4 * h_q * head_dim * pace.factor / pace.rate
    rows = [sum(piece.rows for piece in part) for part in sharding.by_part]
    needed = sharding.needed(pieces)
    keys = [sum(span.rows for span in spans) for spans in needed]
    areas = [area + pace.extra * n for area, n in zip(sharding.areas, rows, strict=True)]
    work = [operations * (area + pace.keys * (k - n)) for area, k, n in zip(areas, keys, rows, strict=True)]
    size = 4 * h_k * head_dim  # bytes of a key and its value
    moved = [0.0] * len(work)
    if len(work) > 1:
        within = min(host or len(work), len(work))
        near, far = rows_moved(sharding, within, needed)
        links = [(link.over(within), near)]
        if within < len(work):
            links.append((beyond, far))
        back = pace.factor > 1
        moved = [max(way.took(size * most[i], size * keys[i], back) for way, most in links) for i in range(len(work))]
    exposed = max(a + b for a, b in zip(work, moved, strict=True))
    ideal = operations * sum(areas) / len(work)
    return Estimate(ideal, max(work), exposed, max(map(max, zip(work, moved, strict=True))))


def arriving(sharding: Sharding, heads: tuple[int, int], head_dim: int) -> Estimate:
    """The estimate for a causal forward by `pull` that runs while the keys of other ranks arrive."""
    found = estimate(sharding, heads, head_dim, link=Link(0.0, inf))
    h_q, h_k = heads
    size, operations = 4 * h_k * head_dim, 4 * h_q * head_dim / FORWARD.rate
    exposed = hidden = 0.0
    spans = sharding.needed(True)
    parts = zip(sharding.by_part, sharding.areas, spans, sharding.pulled_of(spans), strict=True)
    for pieces, area, needed, pulled in parts:
        rows = sum(piece.rows for piece in pieces)
        work = operations * (area + FORWARD.extra * rows)
        # Own rows are read once, and written where this rank and where others need them.
        first = BESIDE.seconds + size * (rows * 2 + sum(span.rows for span in needed) - pulled) / MEMORY
        copies = size * pulled / BESIDE.rate
        item = operations / h_q * ITEM * max((piece.stop for piece in pieces), default=0)  # after the last copy
        exposed = max(exposed, first + max(work + SLOWED * copies, copies + item))
        hidden = max(hidden, first + work)
    return found._replace(exposed=exposed, hidden=hidden) if sharding.parts > 1 else found


def rows_moved(sharding: Sharding, host: int, needed: list[list[Piece]] | None = None) -> tuple[list[int], list[int]]:
    """For each part how many of the needed keys, `sharding.keys` if omitted, it receives, or sends if these are more:
    within its host, and beyond it."""
    owners: dict[int, list[tuple[int, int, int]]] = {}
    for part, pieces in enumerate(sharding.by_part):
        for document, start, stop in pieces:
            owners.setdefault(document, []).append((start, stop, part))
    for found in owners.values():
        found.sort()
    received, sent = ([[0] * sharding.parts for _ in range(2)] for _ in range(2))
    for part, spans in enumerate(sharding.keys if needed is None else needed):
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


EXCHANGES = {"gather": COLLECTIVE, "pull": COPIES, "ulysses": HEADS}
"""As measured on H200s of one host over NVLink, with packing. Exchanges of "ulysses" are several."""


def exchange_seconds(method: str, ranks: int, moved: float, backward: bool = False) -> float:
    """Of an exchange of so many bytes into the busiest rank, which writes them."""
    return EXCHANGES[method].over(ranks).took(moved, moved, backward)


def gathered_bytes(sharding: Sharding, heads: tuple[int, int], head_dim: int, pieces: bool = False) -> float:
    """Of keys and values that the busiest rank receives in 16 bits, when parts share keys. pieces: whether pieces are
    sequences where the mask allows."""
    return max(sharding.pulled_of(sharding.needed(pieces))) * 2 * heads[1] / sharding.heads * head_dim * 2


def divided_bytes(rows: int, ranks: int, heads: tuple[int, int], head_dim: int) -> float:
    """Of q, k, v and out that a rank receives in 16 bits, when ranks divide heads."""
    key_heads = max(heads[1], ranks)
    return rows / ranks * (ranks - 1) / ranks * 2 * (heads[0] + key_heads) * head_dim * 2


def expected(
    sharding: Sharding, method: str, heads: tuple[int, int], head_dim: int, backward: bool = False,
    positions: bool = False,
) -> Estimate:  # fmt: skip
    """Of a call's forward or backward in 16 bits, on H200s over NVLink. positions: whether rows have positions in any
    case, as where scores or masks are functions."""
    pieces = sharding.parts == 1 or (method == "pull" and sharding.reach.right == 0 and not positions)
    pace, link = BACKWARD if backward else FORWARD, EXCHANGES[method.split("×")[-1]]
    if method == "pull" and pieces and sharding.reach.left is None and not backward:
        return arriving(sharding, heads, head_dim)
    found = estimate(sharding, heads, head_dim, pace, link, pieces=pieces)
    waited = 0.0
    if sharding.heads > 1:
        waited = exchange_seconds("ulysses", sharding.heads, divided_bytes_of(sharding, heads, head_dim), backward)
    return found._replace(exposed=found.exposed + waited, hidden=found.hidden + max(0.0, waited))


def divided_bytes_of(sharding: Sharding, heads: tuple[int, int], head_dim: int) -> float:
    """Of rows that a rank receives because ranks divide heads."""
    n = sharding.heads
    return divided_bytes(max(sharding.rows) * n, n, heads, head_dim) if n > 1 else 0.0


def explanation(plan: ContextPlan) -> str:
    sharding, ranks = plan.sharding, plan.ranks
    pulled = sharding.pulled_of(sharding.needed(plan.by_pieces))
    mean = max(1, sum(sharding.areas)) / ranks.parts
    lines = [repr(plan), f"  method: {plan.method}, {plan.why}", "  rank    rows  pieces  scores / mean    keys pulled"]
    for rank, rows in enumerate(sharding.rows):
        part = rank // ranks.heads
        lines.append(
            f"  {rank:4} {rows:7} {len(sharding.by_rank[rank]):7}  {sharding.areas[part] / mean:13.3f}  "
            f"{pulled[part]:13}"
        )
    if plan.heads is not None and plan.head_dim is not None:
        lines += [_expectation(plan, plan.heads, plan.head_dim, backward) for backward in (False, True)]
    return "\n".join(lines)


def _expectation(plan: ContextPlan, heads: tuple[int, int], head_dim: int, backward: bool) -> str:
    sharding, batch = plan.sharding, plan.batch or 1
    found = expected(sharding, plan.method, heads, head_dim, backward, plan.batch is not None)
    products, waited = 1e3 * batch * found.products, 1e3 * batch * (found.exposed - found.products)
    received = gathered_bytes(sharding, heads, head_dim, plan.by_pieces) + divided_bytes_of(sharding, heads, head_dim)
    when = "after" if backward else "beside" if plan.arrives and plan.batch is None else "before"
    return (
        f"  {'backward' if backward else 'forward'} in 16 bits, estimated for H200s over NVLink: {products:.2f} ms of "
        f"products, and {waited:.2f} ms {when} for {batch * received / 1e6:.1f} MB that a rank receives: "
        f"{found.efficiency[0]:.0%} of ideal"
    )
