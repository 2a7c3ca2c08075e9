"""Score functions on tiles, whose indices are ranges: reads of captured tensors at the indices themselves are views of
them, where `aten.index` gathers element by element."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from saccade.call import Call
from saccade.scores import Score
from saccade.scores.library import Softcap
from saccade.scores.score_mod import Traced

aten = torch.ops.aten
_INDICES = ("b", "h", "q_idx", "kv_idx")


def apply(
    score: Score, scaled: Tensor, at: tuple[Tensor, ...], slope: bool, ranges: bool = True
) -> tuple[Tensor, Tensor | None]:
    """The modified score, which may be scaled's own memory, and its derivative if asked for, of the float32 or float64
    `scaled`, at indices that are `ranges`, or at others."""
    if isinstance(score, Softcap):
        share = tanh(scaled.div_(score.cap))
        derivative = (
            torch.addcmul(torch.ones((), dtype=share.dtype, device="cpu"), share, share, value=-1) if slope else None
        )
        return torch.mul(share, score.cap, out=scaled), derivative
    if not isinstance(score, Traced):
        derivative = score.derivative(scaled, *at) if slope else None
        return score.tile(scaled, *at), derivative
    outputs = score._run(_module(score, slope, ranges), scaled, *at)
    modified = _own(score, outputs[0], scaled)
    if not slope:
        return modified, None
    derivative = _own(score, outputs[1], scaled)
    return modified, derivative.clone() if _storage(derivative) == _storage(modified) else derivative


def tanh(x: Tensor) -> Tensor:
    """tanh(x), in a third to a half of the time that PyTorch's own takes in float32, and to its digits: of a small x
    `expm1` has all, and beyond 10 float32 has no other number than 1."""
    if x.dtype != torch.float32:
        return aten.tanh(x)
    more = x.clamp(-10, 10).mul_(2).expm1_()
    return more.div_(more + 2)


def bias(call: Call) -> Tensor | None:
    """What the score function adds, (b or 1, h_q or 1, s_q or 1, s_k or 1), if adding a float32 tensor is all that it
    does."""
    score = call.score
    if not isinstance(score, Traced) or len(score.tensors) != 1 or score.tensors[0].dtype != torch.float32:
        return None
    known = score.program.emitted
    if "cpu bias" not in known:
        known["cpu bias"] = _bias_axes(score)
    if (axes := known["cpu bias"]) is None:
        return None
    (b, h, s_q, _), s_k = call.q.shape, call.k.shape[2]
    return _part(score.tensors[0], axes, (call.first_b, 0, 0, 0), (b, h, s_q, s_k))


def _bias_axes(score: Traced) -> tuple[int, ...] | None:
    graph = _module(score, slope=False).graph
    calls = [node for node in graph.nodes if node.op == "call_function" and _axis(node) is None]
    if [node.target for node in calls] != [_view, aten.add.Tensor]:
        return None
    view, add = calls
    score_node = next(iter(graph.nodes))
    if add.kwargs or add.args not in ((score_node, view), (view, score_node)):
        return None
    constants = [node for node in view.args[2:] if node.op != "placeholder" and node.args[0] != 0]
    return None if constants else view.args[1]


def _own(score: Traced, x: Any, scaled: Tensor) -> Tensor:
    x = x if isinstance(x, Tensor) else torch.full((), x, dtype=scaled.dtype, device="cpu")
    x = x.to(scaled.dtype).expand_as(scaled).contiguous()
    # What the tiles write to must be nobody's.
    return x.clone() if any(_storage(x) == _storage(t) for t in score.tensors) else x


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _module(score: Traced, slope: bool, ranges: bool = True) -> fx.GraphModule:
    program, key = score.program, ("cpu", slope, ranges)
    known = program.emitted
    if key not in known:
        module = _both(program.value, program.slope) if slope else program.value
        known[key] = _with_views(module) if ranges else module
    return known[key]


def _both(first: fx.GraphModule, second: fx.GraphModule) -> fx.GraphModule:
    """The first outputs of two graphs with the same inputs, in which what both compute is computed once."""
    graph, known, outputs = fx.Graph(), dict[Any, fx.Node](), []
    for module in (first, second):
        copies: dict[fx.Node, fx.Node] = {}
        for node in module.graph.nodes:
            if node.op == "output":
                outputs.append(map_arg(node.args[0][0], copies.__getitem__))
                continue
            arguments = map_arg((node.args, node.kwargs), copies.__getitem__)
            key = node.op, node.target, str(arguments)
            if key not in known:
                known[key] = graph.node_copy(node, copies.__getitem__)
            copies[node] = known[key]
    graph.output(tuple(outputs))
    return fx.GraphModule(torch.nn.Module(), graph)


def _with_views(module: fx.GraphModule) -> fx.GraphModule:
    """The module with `_view` in the place of `aten.index`, wherever that means the same, and the `tanh` above."""
    result = copy.deepcopy(module)
    for node in list(result.graph.nodes):
        if node.target is aten.tanh.default:
            node.target = tanh
        if node.op != "call_function" or node.target is not aten.index.Tensor:
            continue
        tensor, indices = node.args
        axes = [_axis(x) for x in indices]
        ranges = [axis for axis in axes if axis is not None and axis >= 0]
        if None in axes or tensor.op != "placeholder" or ranges != sorted(set(ranges)):
            continue
        with result.graph.inserting_before(node):
            view = result.graph.call_function(_view, (tensor, tuple(axes), *indices))
        node.replace_all_uses_with(view)
        result.graph.erase_node(node)
    result.recompile()
    return result


def _axis(index: Any) -> int | None:
    """Which dimension of a tile the index counts, -1 for a constant; None for any other."""
    if not isinstance(index, fx.Node):
        return None
    if index.op == "placeholder" and index.target in _INDICES:
        return _INDICES.index(str(index.target))
    return -1 if index.target is aten.scalar_tensor.default else None


def _view(x: Tensor, axes: tuple[int, ...], *indices: Tensor) -> Tensor:
    """x[indices], (b or 1, h or 1, q or 1, k or 1), of indices that are constants or ranges."""
    first, sizes = [0, 0, 0, 0], [1, 1, 1, 1]
    for dim, (axis, index) in enumerate(zip(axes, indices, strict=True)):
        start = int(index.view(-1)[0])
        if axis < 0:
            x = x.narrow(dim, start if start >= 0 else start + x.shape[dim], 1)
        else:
            first[axis], sizes[axis] = start, index.numel()
    return _part(x, axes, first, sizes)


def _part(x: Tensor, axes: tuple[int, ...], first: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """x, of whose dimensions each is the index of a tile in its place, or the first element where that is -1: of so
    many elements from the first ones on, (b or 1, h or 1, q or 1, k or 1)."""
    shape = [1, 1, 1, 1]
    for dim, axis in enumerate(axes):
        start, n = (first[axis], sizes[axis]) if axis >= 0 else (0, 1)
        if start or n != x.shape[dim]:
            x = x.narrow(dim, start, n)
        if axis >= 0:
            shape[axis] = n
    return x.reshape(shape)
