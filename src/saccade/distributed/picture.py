"""Who has what, as text or by matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from saccade.distributed.context_plan import ContextPlan

SIGNS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
MOST = 40
"""Lines."""


def drawn(plan: ContextPlan, width: int, path: Any) -> str:
    """A line for each of the longest documents, in their order; each sign stands for as many rows."""
    if path is not None:
        _saved(plan, path)
    lengths = plan.lengths
    longest = max(lengths, default=0)
    shown = sorted(sorted(range(len(lengths)), key=lambda i: -lengths[i])[:MOST])
    scale = max(1, -(-longest // max(width, 1)))
    lines = [f"{plan!r}; a sign is {scale} row{'s' if scale > 1 else ''}"]
    owners = _owners(plan)
    for i in shown:
        signs = "".join(_sign(owners[i], at) for at in range(0, lengths[i], scale))
        lines.append(f"{i:6} {signs} {lengths[i]}")
    if len(shown) < len(lengths):
        lines.append(f"       and {len(lengths) - len(shown)} shorter documents")
    return "\n".join(lines)


def _owners(plan: ContextPlan) -> list[list[tuple[int, int, int]]]:
    """For each document (start, stop, rank) of its pieces, in order."""
    found: list[list[tuple[int, int, int]]] = [[] for _ in plan.lengths]
    for rank, pieces in enumerate(plan.sharding.by_rank):
        for piece in pieces:
            found[piece.document].append((piece.start, piece.stop, rank))
    return [sorted(pieces) for pieces in found]


def _sign(pieces: list[tuple[int, int, int]], at: int) -> str:
    rank = next(rank for start, stop, rank in pieces if start <= at < stop)
    return SIGNS[rank % len(SIGNS)]


def _saved(plan: ContextPlan, path: Any) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 1.5 + 0.12 * min(len(plan.lengths), 80)), layout="constrained")
    axes = figure.add_subplot()
    order = sorted(range(len(plan.lengths)), key=lambda i: -plan.lengths[i])
    owners = _owners(plan)
    for line, i in enumerate(order):
        for start, stop, rank in owners[i]:
            axes.barh(line, stop - start, left=start, height=0.8, color=f"C{rank % 10}")
    axes.invert_yaxis()
    axes.set(xlabel="position in the document", ylabel="documents, the longest first", title=repr(plan))
    figure.savefig(path, dpi=120)
