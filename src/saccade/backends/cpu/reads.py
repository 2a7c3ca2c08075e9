"""Score functions on the tiles of a Grid, whose indices are ranges: reads of captured tensors at the indices themselves
are views of them, where `aten.index` gathers element by element."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, fx

from saccade.problem import Problem
from saccade.scores import Score
from saccade.scores.function import Traced

aten = torch.ops.aten
_INDICES = ("b", "h", "q_idx", "kv_idx")


def tile(score: Score, scaled: Tensor, at: tuple[Tensor, ...]) -> Tensor:
    """`score.tile(scaled, *at)`, for indices that are ranges."""
    return _run(score, "value", scaled, at) if isinstance(score, Traced) else score.tile(scaled, *at)


def derivative(score: Score, scaled: Tensor, at: tuple[Tensor, ...]) -> Tensor:
    """`score.derivative(scaled, *at)`, likewise."""
    return _run(score, "slope", scaled, at) if isinstance(score, Traced) else score.derivative(scaled, *at)


def bias(problem: Problem) -> Tensor | None:
    """What the score function adds, (b or 1, h_q or 1, s_q, s_k), if adding a float32 tensor is all that it does."""
    score, (b, h, s_q, _), s_k = problem.score, problem.q.shape, problem.k.shape[2]
    if not isinstance(score, Traced) or len(score.tensors) != 1 or score.tensors[0].dtype != torch.float32:
        return None
    graph = _module(score, "value").graph
    calls = [node for node in graph.nodes if node.op == "call_function" and _place(node) is None]
    if [node.target for node in calls] != [_view, aten.add.Tensor]:
        return None
    view, add = calls
    score_node = next(iter(graph.nodes))
    if add.kwargs or add.args not in ((score_node, view), (view, score_node)):
        return None
    at = torch.arange(b) + problem.first_b, torch.arange(h), torch.arange(s_q), torch.arange(s_k)
    of: dict[str, Tensor] = dict(zip(_INDICES, at, strict=True))
    indices = [of.get(str(node.target), torch.zeros(1, dtype=torch.int64)) for node in view.args[2:]]
    constants = [node for node in view.args[2:] if node.op != "placeholder" and node.args[0] != 0]
    found = None if constants else _view(score.tensors[0], view.args[1], *indices)
    return found if found is not None and found.shape[2:] == (s_q, s_k) else None


def _run(score: Traced, graph: str, scaled: Tensor, at: tuple[Tensor, ...]) -> Tensor:
    x = score._run(_module(score, graph), scaled, *at)[0]
    x = x if isinstance(x, Tensor) else torch.full((), x, dtype=scaled.dtype)
    x = x.to(scaled.dtype).expand_as(scaled).contiguous()
    # What the tiles write to must be nobody's.
    own = x.untyped_storage()._cdata
    return x.clone() if any(own == t.untyped_storage()._cdata for t in score.tensors) else x


def _module(score: Traced, graph: str) -> fx.GraphModule:
    known, key = score.program.emitted, ("cpu", graph)
    if key not in known:
        known[key] = _with_views(getattr(score.program, graph))
    return known[key]


def _with_views(module: fx.GraphModule) -> fx.GraphModule:
    """The module with `_view` in the place of `aten.index`, wherever that means the same."""
    made = copy.deepcopy(module)
    for node in list(made.graph.nodes):
        if node.op != "call_function" or node.target is not aten.index.Tensor:
            continue
        tensor, indices = node.args
        places = [_place(x) for x in indices]
        ranges = [place for place in places if place is not None and place >= 0]
        if None in places or tensor.op != "placeholder" or ranges != sorted(set(ranges)):
            continue
        with made.graph.inserting_before(node):
            view = made.graph.call_function(_view, (tensor, tuple(places), *indices))
        node.replace_all_uses_with(view)
        made.graph.erase_node(node)
    made.recompile()
    return made


def _place(index: Any) -> int | None:
    """Which dimension of a tile the index counts, -1 for a constant; None for any other."""
    if not isinstance(index, fx.Node):
        return None
    if index.op == "placeholder" and index.target in _INDICES:
        return _INDICES.index(str(index.target))
    return -1 if index.target is aten.scalar_tensor.default else None


def _view(x: Tensor, places: tuple[int, ...], *indices: Tensor) -> Tensor:
    """x[indices], (b or 1, h or 1, q or 1, k or 1), of indices that are constants or ranges."""
    shape = [1, 1, 1, 1]
    for dim, (place, index) in enumerate(zip(places, indices, strict=True)):
        first, n = int(index.view(-1)[0]), index.numel()
        x = x.narrow(dim, first if first >= 0 else first + x.shape[dim], n)
        if place >= 0:
            shape[place] = n
    return x.reshape(shape)
