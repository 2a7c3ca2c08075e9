"""What a plan costs: scores, bytes, and an estimate of the time that both take."""

from __future__ import annotations

from typing import TYPE_CHECKING

from saccade.distributed import estimates
from saccade.distributed.estimates import Estimate

if TYPE_CHECKING:
    from saccade.distributed.context_plan import ContextPlan
    from saccade.distributed.sharding import Sharding

PRODUCTS = 670e12
"""Operations per second of a forward in bfloat16 on an H200, for estimates."""
EXCHANGES = {"gather": estimates.COLLECTIVE, "pull": estimates.COPIES, "ulysses": estimates.HEADS}
"""As measured on H200s of one host over NVLink, with packing. Exchanges of "ulysses" are several."""


def exchange_seconds(method: str, ranks: int, moved: float, backward: bool = False) -> float:
    """Of an exchange of so many bytes into the busiest rank, which writes them."""
    return EXCHANGES[method].over(ranks).took(moved, moved, backward)


def gathered_bytes(sharding: Sharding, heads: tuple[int, int], head_dim: int, pieces: bool = False) -> float:
    """Of keys and values that the busiest rank receives in 16 bits, when parts share keys.

    Args:
        pieces: whether pieces are sequences where the mask allows.
    """
    return max(sharding.pulled_of(sharding.needed(pieces))) * 2 * heads[1] / sharding.heads * head_dim * 2


def divided_bytes(rows: int, ranks: int, heads: tuple[int, int], head_dim: int) -> float:
    """Of q, k, v and out that a rank receives in 16 bits, when ranks divide heads."""
    key_heads = max(heads[1], ranks)
    return rows / ranks * (ranks - 1) / ranks * 2 * (heads[0] + key_heads) * head_dim * 2


def expected(
    sharding: Sharding, method: str, heads: tuple[int, int], head_dim: int, backward: bool = False,
    positions: bool = False,
) -> Estimate:  # fmt: skip
    """Of a call's forward or backward in 16 bits, on H200s over NVLink.

    Args:
        positions: whether rows have positions in any case, as where scores or masks are functions.
    """
    pieces = sharding.parts == 1 or (method == "pull" and sharding.reach.right == 0 and not positions)
    pace, link = estimates.BACKWARD if backward else estimates.FORWARD, EXCHANGES[method.split("×")[-1]]
    if method == "pull" and pieces and sharding.reach.left is None and not backward:
        return estimates.arriving(sharding, heads, head_dim)
    found = estimates.estimate(sharding, heads, head_dim, pace, link, pieces=pieces)
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
