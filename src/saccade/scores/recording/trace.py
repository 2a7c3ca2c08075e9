"""From a recording to a graph of pointwise operations and of reads of captured tensors.

The recording runs again on small tensors, of the shapes of a tile with broadcasting indices: score (Q, K), b and h
(1, 1), q_idx (Q, 1), kv_idx (1, K). All of it must be pointwise, or a read of a captured tensor at computed indices.
"""

# torch.fx types the arguments of nodes as unions of everything.
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportArgumentType=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOptionalSubscript=false, reportCallIssue=false
# pyright: reportOptionalIterable=false, reportReturnType=false, reportOperatorIssue=false

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from saccade.scores.recording.advice import refusal_of
from saccade.scores.recording.recorder import Recording, error_text, line_of, user_line
from saccade.scores.recording.replay import replay, zeros_like_inputs
from saccade.scores.recording.tape import TILE, Refused
from saccade.scores.recording.tracer import Tracer

aten = torch.ops.aten
Q, K = 61, 67
"""Of the tile that is traced: primes, so that no captured tensor fits it by accident."""
TILE_SHAPES = dict(zip(TILE, ((Q, K), (1, 1), (1, 1), (Q, 1), (1, K)), strict=True))

_ALSO_POINTWISE = frozenset((
    "__and__", "__or__", "_to_copy", "alias", "attached", "detach", "fill", "float_power", "floor_divide", "full_like",
    "hardswish", "leaky_relu", "lift_fresh", "lift_fresh_copy", "log_sigmoid_forward", "masked_fill", "ones_like",
    "rsub", "scalar_tensor", "where", "zeros_like",
))  # fmt: skip
"""Operations that torch does not tag as pointwise."""
_REDUCTION = "a score function sees one tile of scores at a time, so it cannot reduce over them; do it beforehand"
_NO_INDEX = "the score and the indices are one value each, and cannot be indexed; captured tensors can"


class Raw:
    """One run of the function as a graph, its nodes sorted: `tile` depends on score or indices, `tensor` on captured
    tensors alone, `number` on numbers alone."""

    def __init__(
        self,
        run: Callable[..., tuple[Any, ...]],
        tile: Sequence[Tensor],
        tensors: Sequence[Tensor],
        numbers: Sequence[Tensor],
        tracer: Tracer | None = None,
    ) -> None:
        self.inputs = len(tensors), len(numbers)
        with torch.no_grad():
            graph = (tracer or Tracer()).trace(run, [*tile, *tensors, *numbers])
        self.module = fx.GraphModule(torch.nn.Module(), graph)
        _constants_from_nothing(self.module.graph)
        self.module.graph.eliminate_dead_code()
        self.sort()

    def sort(self) -> None:
        nodes = list(self.module.graph.nodes)
        for i, node in enumerate(x for x in nodes if x.op == "placeholder"):
            node.meta["kind"] = "tile" if i < 5 else "tensor" if i < 5 + self.inputs[0] else "number"
        for node in nodes:
            if node.op != "call_function":
                continue
            kinds = {x.meta["kind"] for x in node.all_input_nodes}
            scalar = isinstance(node.meta["val"], Tensor) and node.meta["val"].numel() == 1
            kind = "tile" if "tile" in kinds else "tensor" if "tensor" in kinds or not scalar else "number"
            node.meta["kind"] = kind
            if kind == "tile" and (error := _node_error(node)):
                raise Refused(error, node.meta.get("stack_trace"))


def _node_error(node: fx.Node) -> str | None:
    """Why an operation on tiles cannot be part of a score function, or None."""
    name = name_of(node)
    shape = tuple(node.meta["val"].shape) if isinstance(node.meta["val"], Tensor) else None
    if node.target is operator.getitem:
        return None
    if name.endswith("_") and not name.endswith("__"):
        return f"{name} writes in place; write a new value, such as x = x.{name[:-1]}(…)"
    if name == "index":
        table, at = node.args
        if table.meta["kind"] == "tile":
            return _NO_INDEX
        if len(at) == table.meta["val"].dim() and all(i is not None for i in at):
            return None
        read = f"a captured tensor of shape {tuple(table.meta['val'].shape)} is read with {len(at)} indices"
        return f"{read}; it needs one for each dimension"
    if not _is_pointwise(name, node.target):
        reduces = shape is not None and len(shape) < 2
        return refusal_of(name, _REDUCTION) if reduces else refusal_of(name)
    for x in node.all_input_nodes:
        val = x.meta["val"]
        if x.meta["kind"] == "tensor" and val.numel() != 1:
            return (
                f"a captured tensor of shape {tuple(val.shape)} meets the score without an index: "
                "write table[b, h, q_idx, kv_idx], as its dimensions are"
            )
    if shape is not None and shape not in {(Q, K), (Q, 1), (1, K), (1, 1)}:
        return f"{name} makes the shape {shape} of tiles"
    return None


def _is_pointwise(name: str, target: Any) -> bool:
    if "airy" in name or "polynomial" in name:  # torch has no derivatives of these, and does not say so
        return False
    return name in _ALSO_POINTWISE or torch.Tag.pointwise in getattr(target, "tags", ())


def _constants_from_nothing(graph: fx.Graph) -> None:
    """Replaces `b.new_ones(())`, which depends on b by its device alone, by a constant."""
    for node in list(graph.nodes):
        name = name_of(node) if node.op == "call_function" else ""
        if name in ("new_ones", "new_zeros", "new_full") and node.meta["val"].dim() == 0:
            dtype = node.meta["val"].dtype
            value = node.args[2] if name == "new_full" else name == "new_ones"
            with graph.inserting_before(node):
                number = bool(value) if dtype == torch.bool else float(value) if dtype.is_floating_point else int(value)
                constant = graph.call_function(aten.scalar_tensor.default, (number,), {"dtype": dtype})
            constant.meta = dict(node.meta)
            node.replace_all_uses_with(constant)


def trace(recording: Recording) -> Raw:
    """
    Raises:
        Refused: the recording cannot become a graph; says what to write instead.
    """
    tape, tracer = recording.tape, Tracer()

    def watch(line: tuple[str, int] | None) -> None:
        tracer.line = line_of(line)

    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        tensors, numbers = inputs[5 : 5 + len(tape.tensors)], inputs[5 + len(tape.tensors) :]
        return tuple(replay(tape, recording.outputs, inputs[:5], tensors, numbers, watch))

    try:
        return Raw(run, *zeros_like_inputs(tape, TILE_SHAPES.values()), tracer)
    except Refused:
        raise
    except Exception as failed:
        raise Refused(error_text(failed), user_line(failed)) from failed


def name_of(node: fx.Node) -> str:
    target: Any = node.target
    return target._schema.name.partition("::")[2] if hasattr(target, "_schema") else str(target)


def outputs_of(graph: fx.Graph) -> Any:
    return graph.output_node().args[0]


def shallow(graph: fx.Graph) -> bool:
    """Whether a graph is small enough for patterns that are looked for by recursion."""
    return len(graph.nodes) <= 200


def in_order(node: fx.Node, needed: Callable[[fx.Node], Iterable[Any]], done: Container[fx.Node]) -> Iterator[fx.Node]:
    """A node and all that it needs, but for what is made already, in topological order. No recursion: a score function
    may be a chain of more operations than Python has frames."""
    waiting = [] if node in done else [node]
    while waiting:
        missing = [x for x in needed(waiting[-1]) if isinstance(x, fx.Node) and x not in done]
        if missing:
            waiting += reversed(missing)
        elif (last := waiting.pop()) not in done:
            yield last
