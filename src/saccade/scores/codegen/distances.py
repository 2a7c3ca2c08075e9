"""Reads of captured tensors whose place depends on rows and keys by their distance kv_idx - q_idx alone: the same along
every diagonal of the scores. T5's bias is one, as are all tables of relative positions."""

# torch.fx types the arguments of nodes as unions of everything.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from saccade.scores.tracing.lowering import K, Q, in_order, name_of
from saccade.scores.tracing.tape import broadcast_shape


def by_distance(at: Sequence[Any]) -> bool:
    """Whether these are the indices of a read by distance."""
    nodes = [x for x in at if isinstance(x, fx.Node)]
    shape = broadcast_shape((1, 1), *(x.meta["val"].shape for x in nodes))
    return shape == (Q, K) and all(map(_same_along_diagonals, nodes))


def depends_on(name: str, at: Sequence[Any]) -> bool:
    """Whether some of the indices do on the tile's `name`."""
    met: dict[fx.Node, None] = {}
    for x in at:
        for node in in_order(x, lambda node: node.all_input_nodes, met) if isinstance(x, fx.Node) else ():
            met[node] = None
    return any(x.op == "placeholder" and str(x.target) == name for x in met)


def _same_along_diagonals(index: fx.Node) -> bool:
    slopes: dict[fx.Node, tuple[int, int] | None] = {}
    for node in in_order(index, lambda x: x.all_input_nodes, slopes):
        slopes[node] = _slopes(node, slopes)
    last = slopes[index]
    return last is not None and sum(last) == 0


_INDEX_SLOPES = {"q_idx": (1, 0), "kv_idx": (0, 1), "score": None}
_SIGNS = {"add": (1, 1), "sub": (1, -1), "neg": (-1,)}


def _slopes(node: fx.Node, known: dict[fx.Node, tuple[int, int] | None]) -> tuple[int, int] | None:
    """The factors of q_idx and kv_idx in a linear value; (0, 0) also for any function of their difference."""
    if node.op == "placeholder":
        return _INDEX_SLOPES.get(str(node.target), (0, 0))
    inputs = [known[x] for x in node.all_input_nodes]
    if None in inputs:
        return None
    signs = _SIGNS.get(name_of(node))
    # Sums of floats are rounded, each in its own way: (k + 0.1) - (q + 0.1) is no function of k - q.
    rounds = node.meta["val"].is_floating_point()
    if signs is None or rounds or node.kwargs.get("alpha", 1) != 1:
        return (0, 0) if all(sum(slopes) == 0 for slopes in inputs) else None
    terms = [known.get(x, (0, 0)) for x in node.args]
    q, kv = (sum(sign * term[i] for sign, term in zip(signs, terms, strict=True)) for i in range(2))
    return q, kv
