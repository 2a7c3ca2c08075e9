"""Runs a function and writes down the operations of aten that it consists of.

`make_fx` does the same on fake tensors, for which it imports torch's compiler. That takes longer than importing torch.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves, tree_map_only

from saccade.scores.recording.advice import BEHIND, READS, refusal_of
from saccade.scores.recording.tape import Refused
from saccade.util.imports import DispatchMode

aten = torch.ops.aten
_UNKNOWN = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded}
# By torch's isclose into truths that only it sees: the tensor stands for the new value from there on. Functions that
# write in place themselves are refused while they are recorded.
_UNSEEN_WRITES: dict[Any, Any] = {
    aten.bitwise_and_.Tensor: aten.bitwise_and.Tensor,
    aten.bitwise_or_.Tensor: aten.bitwise_or.Tensor,
}
_ALIKE = ({torch.float32}, {torch.float64})


class Tracer(DispatchMode):
    """Sees what torch does below autograd, derivatives too. Operations in `decompositions` are replaced by others, as
    are those that torch defines by others.

    Each operation runs once, on small tensors, of which the graph knows shapes and dtypes alone. What they hold is
    arbitrary, but for integers, which are 1, so that they divide. What would depend on it is refused."""

    line: str | None = None
    """The line of the user's code that the next nodes belong to."""

    def __init__(self, decompositions: Mapping[Any, Callable[..., Any]] | None = None) -> None:
        super().__init__()
        self.graph, self.decompositions = fx.Graph(), decompositions or {}

    def trace(self, function: Callable[..., Any], inputs: Sequence[Tensor]) -> fx.Graph:
        """The graph of a function of so many tensors; it takes their shapes and dtypes."""
        ones = [torch.ones((), dtype=x.dtype, device="cpu").expand(x.shape) for x in inputs]
        values = [self._known(self.graph.placeholder(f"x{i}"), x) for i, x in enumerate(ones)]
        with self:
            result = function(*values)
        self.graph.output(tree_map_only(Tensor, self._node, result))
        return self.graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:
            known = self.decompositions.get(func)
            result = NotImplemented if known is None else _bare(known, func, args, kwargs)(*args, **kwargs)
            result = func.decompose(*args, **kwargs) if result is NotImplemented else result
        if result is not NotImplemented:
            return result
        name = func.overloadpacket.__name__
        if name in READS or (not _UNKNOWN.isdisjoint(func.tags) and not _reads_elements(func, args)):
            raise Refused(refusal_of(name))
        given, named = tree_map_only(Tensor, self._node, (args, kwargs))
        node = self.graph.create_node("call_function", _UNSEEN_WRITES.get(func, func), given, named, name)
        result = func(*(_in_range(*args) if name == "index" else args), **kwargs)
        if not isinstance(result, (Tensor, tuple, list)):  # a bool, of what torch's own transforms ask
            raise Refused(refusal_of(name, BEHIND))
        if not any(x.alias_info for x in func._schema.returns):
            tree_map_only(Tensor, _set_integers, result)
        return self._known(node, result)

    def _known(self, node: fx.Node, result: Any) -> Any:
        """A result, which knows its node from here on."""
        node.meta["val"] = tree_map_only(Tensor, _described, result)
        if self.line:
            node.meta["stack_trace"] = self.line
        if isinstance(result, Tensor):
            result.traced_as = node  # pyright: ignore[reportAttributeAccessIssue]
        else:
            for i, x in enumerate(result):
                self._known(self.graph.call_function(operator.getitem, (node, i)), x)
        return result

    def _node(self, x: Tensor) -> fx.Node:
        node = getattr(x, "traced_as", None)
        if node is None:  # a number of torch's own, which it makes unseen
            node = self.graph.call_function(aten.full.default, ([1] * x.dim(), x.item()), {"dtype": x.dtype})
            self._known(node, x)
        return node


def _bare(decomposition: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """A decomposition without what torch wraps around it, which imports sympy or the compiler to give operands one
    dtype, one shape, and the result theirs: where they have, it changes nothing."""
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    alike = {x.dtype for x in tensors} in _ALIKE and len({x.shape for x in tensors}) == 1
    return inspect.unwrap(decomposition) if alike and not func._schema.is_mutable else decomposition


def _reads_elements(func: Any, args: Any) -> bool:
    """Whether an index reads as many elements as it has; one of bools reads those that are true."""
    return func is aten.index.Tensor and all(x is None or x.dtype not in (torch.bool, torch.uint8) for x in args[1])


def _in_range(table: Tensor, at: Sequence[Any]) -> tuple[Tensor, Any]:
    """A table that has an element where it is read."""
    shape = [n or 1 for n in table.shape]
    return table.new_zeros(()).expand(shape), [None if x is None else torch.zeros_like(x) for x in at]


def _described(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="meta")


def _set_integers(x: Tensor) -> None:
    if not x.is_floating_point():
        x.fill_(1)
