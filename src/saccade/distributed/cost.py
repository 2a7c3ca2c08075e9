"""What a plan costs: scores, bytes, and an estimate of the time that both take."""

from __future__ import annotations

from typing import TYPE_CHECKING

from saccade.distributed import estimates

if TYPE_CHECKING:
    from saccade.distributed.context_plan import ContextPlan
    from saccade.distributed.sharding import Sharding

PRODUCTS = 670e12
"""Operations per second of a forward in bfloat16 on an H200, for estimates."""
EXCHANGES = {"gather": estimates.COLLECTIVE, "pull": estimates.COPIES, "ulysses": estimates.Link(60e-6, 150e9)}
"""As measured on H200s of one host over NVLink, with packing. Exchanges of "ulysses" are several."""


def exchange_seconds(method: str, moved: float) -> float:
    """Of an exchange of so many bytes into the busiest rank."""
    start, rate = EXCHANGES[method]
    return start + moved / rate


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
    first = plan.own_first(heads, head_dim)
    found = (estimates.of_pull if first else estimates.estimate)(sharding, heads, head_dim)
    ideal, slowest = found.ideal * batch, found.products * batch
    gathered, divided, waited = gathered_bytes(sharding, heads, head_dim) * batch, 0.0, 0.0
    if ranks.heads > 1:
        divided = divided_bytes(max(sharding.rows) * ranks.heads, ranks.heads, heads, head_dim) * batch
        waited += exchange_seconds("ulysses", divided)
    if first:
        waited += found.exposed - found.products
    elif gathered:
        waited += exchange_seconds(plan.method.split("×")[-1], gathered)
    share = ideal / max(slowest + waited, 1e-12)
    when = "beside and after those of own keys" if first else "before"
    return (
        f"  forward in 16 bits, estimated for H200s over NVLink: {1e3 * slowest:.2f} ms of products, and "
        f"{1e3 * waited:.2f} ms {when} for {(gathered + divided) / 1e6:.1f} MB that a rank receives: "
        f"{share:.0%} of ideal"
    )
