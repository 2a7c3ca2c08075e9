"""What a plan costs: scores, bytes, and an estimate of the time that both take."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from saccade.distributed.context_plan import ContextPlan
    from saccade.distributed.sharding import Sharding

PRODUCTS = 600e12
"""Operations per second of a forward in bfloat16 on an H200, for estimates."""
LINK = 370e9
"""Bytes per second into a GPU from the others of its host, over NVLink."""

PULLED = 330e9
"""Bytes per second that copy engines bring, beside attention."""


def gathered_bytes(sharding: Sharding, heads: tuple[int, int], head_dim: int) -> float:
    """Of keys and values that the busiest rank receives in 16 bits, when parts share keys."""
    return max(sharding.pulled) * 2 * heads[1] / sharding.heads * head_dim * 2


def divided_bytes(rows: int, ranks: int, heads: tuple[int, int], head_dim: int) -> float:
    """Of q, k, v and out that a rank receives in 16 bits, when ranks divide heads."""
    key_heads = max(heads[1], ranks)
    return rows / ranks * (ranks - 1) / ranks * 2 * (heads[0] + key_heads) * head_dim * 2


def explanation(plan: ContextPlan) -> str:
    sharding, ranks = plan.sharding, plan.ranks
    mean = max(1, sum(sharding.areas)) / ranks.parts
    lines = [repr(plan), f"  method: {plan.method}, {plan.why}", "  rank    rows  pieces  scores / mean    keys pulled"]
    for rank, rows in enumerate(sharding.rows):
        part = rank // ranks.heads
        lines.append(
            f"  {rank:4} {rows:7} {len(sharding.by_rank[rank]):7}  {sharding.areas[part] / mean:13.3f}  "
            f"{sharding.pulled[part]:13}"
        )
    if plan.heads is not None and plan.head_dim is not None:
        lines.append(_expectation(plan, plan.heads, plan.head_dim))
    return "\n".join(lines)


def _expectation(plan: ContextPlan, heads: tuple[int, int], head_dim: int) -> str:
    sharding, ranks, batch = plan.sharding, plan.ranks, plan.batch or 1
    operations = 4 * batch * heads[0] * head_dim / ranks.heads / PRODUCTS
    ideal, slowest = sum(sharding.areas) / ranks.parts * operations, max(sharding.areas) * operations
    moved = gathered_bytes(sharding, heads, head_dim) * batch
    if ranks.heads > 1:
        moved += divided_bytes(max(sharding.rows) * ranks.heads, ranks.heads, heads, head_dim) * batch
    share = ideal / max(slowest + moved / LINK, 1e-12)
    return (
        f"  forward in 16 bits, estimated for H200s over NVLink: {1e3 * slowest:.2f} ms of products beside "
        f"{moved / 1e6:.1f} MB ({1e3 * moved / LINK:.2f} ms) that a rank receives first: {share:.0%} of ideal"
    )
