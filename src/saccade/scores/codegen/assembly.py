"""Graphs put together: what the outputs need, with reads of captured tensors in the place of what stood for them."""

# torch.fx types the arguments of nodes as unions of everything.
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportArgumentType=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOptionalSubscript=false, reportCallIssue=false
# pyright: reportOptionalIterable=false, reportReturnType=false, reportOperatorIssue=false

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from saccade.scores.codegen.ranges import modulo
from saccade.scores.tracing.lowering import TILE_SHAPES, aten, in_order, name_of, outputs_of
from saccade.scores.tracing.tape import TILE

# Operations of which torch takes a Python number for a tensor; by the others it is given as one of no dimensions.
_TAKES_NUMBERS = frozenset(("add", "sub", "mul", "div", "floor_divide"))
_PASSES = frozenset(
    ("alias", "attached", "clone", "detach", "lift_fresh", "lift_fresh_copy", "expand", "positive", "scalar_tensor")
)
_FILLS = frozenset(("full_like", "full", "fill", "copy", "copy_"))
_CONSTANTS = frozenset(("_efficientzerotensor", "zeros_like", "zeros", "ones_like", "ones"))


@dataclass(frozen=True)
class Read:
    """A captured tensor read at computed indices: the tensor's number, and the nodes of its indices."""

    tensor: int
    at: tuple[Any, ...]


class Assembly:
    """Copies a graph on demand, from its outputs, putting reads in the place of what stands for them."""

    def __init__(self, program: Any, source: fx.Graph) -> None:
        self.program, self.source = program, source
        self.graph = fx.Graph()
        program_numbers = range(len(program.number_nodes))
        self.tile = {name: self.graph.placeholder(name) for name in TILE}
        self.tensors = [self.graph.placeholder(f"t{i}") for i in range(len(program.tensor_nodes))]
        self.numbers = [self.graph.placeholder(f"n{i}") for i in program_numbers]
        self.scalars = [self.graph.placeholder(f"m{i}") for i in program_numbers]
        for name, shape in TILE_SHAPES.items():
            dtype = program.dtype if name == "score" else torch.int64
            self.tile[name].meta["val"] = torch.empty(shape, dtype=dtype, device="meta")
        for node, original in zip(self.tensors, program.tensor_nodes, strict=True):
            node.meta["val"] = original.meta["val"]
        for copies in (self.numbers, self.scalars):
            for node, original in zip(copies, program.number_nodes, strict=True):
                node.meta["val"] = original.meta["val"]
        self.copies: dict[fx.Node, Any] = {}
        self.first, self.read_indices = outputs_of(source)

    def outputs(self) -> tuple[Any, ...]:
        return tuple(self.first) if isinstance(self.first, (tuple, list)) else (self.first,)

    def module(self, wanted: Sequence[int]) -> fx.GraphModule:
        outputs = self.outputs()
        self.graph.output(tuple(self.copied(outputs[i]) for i in wanted))
        return fx.GraphModule(torch.nn.Module(), self.graph)

    def locals(self, wanted: Sequence[bool]) -> tuple[fx.GraphModule, list[Read]]:
        program, reads, derivatives = self.program, [], []
        for i, local in zip(program.differentiable, self.outputs()[1:], strict=True):
            tensor = program.read_tensors[i]
            if wanted[tensor]:
                at = tuple(self.copied(x) for x in self.read_indices[i])
                reads.append(Read(tensor, at))
                derivatives.append((self.copied(local), at))
        self.graph.output(tuple(derivatives))
        return fx.GraphModule(torch.nn.Module(), self.graph), reads

    def reads(self) -> list[Read]:
        """All reads of the program, by their numbers."""
        tensors, program = self.program.read_tensors, self.program
        return [
            Read(tensors[i], tuple(self.copied(x) for x in self.read_indices[i])) for i in range(len(program.reads))
        ]

    def copied(self, node: Any) -> Any:
        """A node of the new graph, or a Python number."""
        if not isinstance(node, fx.Node):
            return node
        for each in in_order(node, self._needed, self.copies):
            self.copies[each] = self._copied(each)
        return self.copies[node]

    def _needed(self, node: fx.Node) -> Sequence[Any]:
        """The nodes and numbers that a node's copy is made of."""
        if node.op == "placeholder":
            i = self._read(node.meta.get("core", node.name))
            return () if i is None else self.read_indices[i]
        name = name_of(node)
        if name in _CONSTANTS:
            return ()
        if name in _PASSES or name == "_to_copy":
            return node.args[:1]
        return node.args[1:2] if name in _FILLS else node.all_input_nodes

    def _copied(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            return self._held(node.meta.get("core", node.name))
        name = name_of(node)
        if name in _PASSES:
            return _as(node, self.copied(node.args[0]))
        if name in _FILLS:
            return _as(node, self.copied(node.args[1]))
        if name in _CONSTANTS:
            return _as(node, int(name.startswith("ones")))
        if name == "_to_copy":
            inner = self.copied(node.args[0])
            if not isinstance(inner, fx.Node):
                return _as(node, inner)
            return self._node(aten._to_copy.default, (inner,), {"dtype": node.meta["val"].dtype}, node)
        target: Any = node.target
        if name.endswith("_") and not name.endswith("__"):  # torch's own derivatives write into what only they see
            name = name[:-1]
            target = getattr(getattr(aten, name), target._overloadname)
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.copied)
        if (simple := _folded(name, args)) is not None:
            return simple if node.meta["val"].is_floating_point() else _as(node, simple)
        if node.target is operator.getitem:
            return self._node(node.target, args, kwargs, node)
        args = self._widened(node, args)
        number = node.meta["val"].dim() == 0 if isinstance(node.meta["val"], Tensor) else False
        deciding = [self._deciding(node, x) for x in args]
        own = any(dtype not in (None, torch.get_default_dtype()) for dtype in deciding)
        if number or own or name not in _TAKES_NUMBERS or self._narrowed(node, args):
            operands = zip(args, deciding, target._schema.arguments, strict=False)
            args = tuple(self._operand(x, argument, dtype) for x, dtype, argument in operands)
        elif not isinstance(args[0], fx.Node):  # the first one is never a number
            args = (self._operand(args[0], target._schema.arguments[0]), *args[1:])
        return self._node(target, args, kwargs, node)

    def _widened(self, node: fx.Node, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Operands in the dtype that torch took for them: where a tile of ones is a number now, it does not say which,
        and its quotient by a bfloat16 tile would have eight bits."""
        inputs = [x for x in args if isinstance(x, fx.Node) and x not in self.numbers]
        wanted, now = (_widest(x.meta["val"] for x in nodes) for nodes in (node.all_input_nodes, inputs))
        if wanted is None or now is None or wanted == now:
            return args
        return tuple(self._cast(x, wanted) if x in inputs else x for x in args)

    def _cast(self, x: fx.Node, dtype: torch.dtype) -> fx.Node:
        val = x.meta["val"]
        if not val.is_floating_point() or val.dtype == dtype:
            return x
        return self._to(x, dtype)

    def _to(self, x: fx.Node, dtype: torch.dtype) -> fx.Node:
        node = self.graph.call_function(aten._to_copy.default, (x,), {"dtype": dtype})
        node.meta["val"] = torch.empty(x.meta["val"].shape, dtype=dtype, device="meta")
        return node

    def _deciding(self, node: fx.Node, x: Any) -> torch.dtype | None:
        """The dtype in which torch computes with a number that meets tiles of lower categories alone."""
        if x not in self.numbers or x.meta["val"].dtype == torch.int64:
            return None
        dtype = x.meta["val"].dtype
        met = [y.meta["val"] for y in node.all_input_nodes if isinstance(y.meta["val"], Tensor)]
        tiles = [_category(y.dtype) for y in met if y.dim()]
        return dtype if tiles and max(tiles) < _category(dtype) else None

    def _narrowed(self, node: fx.Node, args: tuple[Any, ...]) -> bool:
        """Whether torch would compute float64 in its default dtype, as numbers meet nothing but integers."""
        inputs = [x for x in args if isinstance(x, fx.Node) and x not in self.numbers]
        return node.meta["val"].dtype == torch.float64 not in [x.meta["val"].dtype for x in inputs]

    def _node(self, target: Any, args: Any, kwargs: Any, like: fx.Node) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        val = like.meta["val"]
        met = [x.meta["val"] for x in node.all_input_nodes]
        if isinstance(val, Tensor) and all(isinstance(x, Tensor) and not x.dim() for x in met):  # of numbers alone
            val = torch.empty((), dtype=val.dtype, device="meta")
        node.meta["val"] = val
        return node

    def _operand(self, x: Any, argument: Any, dtype: torch.dtype | None = None) -> Any:
        """A number as a tensor, where the operation takes nothing else; of a dtype, or as wide as there is one."""
        if "Tensor" not in str(argument.type) or not isinstance(x, (fx.Node, int, float)):
            return x
        return self._tensor(x) if dtype is None else self._to(self._tensor(x), dtype)

    def _tensor(self, x: Any) -> fx.Node:
        """A number as a tensor of no dimensions."""
        if isinstance(x, fx.Node):
            return self.scalars[self.numbers.index(x)] if x in self.numbers else x
        dtype = torch.bool if isinstance(x, bool) else torch.int64 if isinstance(x, int) else self.program.dtype
        scalar = self.graph.call_function(aten.scalar_tensor.default, (x,), {"dtype": dtype})
        scalar.meta["val"] = torch.empty((), dtype=dtype, device="meta")
        return scalar

    def _held(self, name: str) -> Any:
        if name in self.tile:
            return self.tile[name]
        program = self.program
        i = self._read(name)
        if i is None:
            return self.numbers[int(name[1:])]
        tensor = self.tensors[program.read_tensors[i]]
        at = [self.copied(x) for x in self.read_indices[i]]
        if all(not isinstance(x, fx.Node) for x in at):  # it has one element
            read = self.graph.call_function(aten.reshape.default, (tensor, [1, 1]))
        else:
            at = [self._tensor(x) for x in at]
            read = self.graph.call_function(aten.index.Tensor, (tensor, at))
        read.meta["val"] = program.reads[i].meta["val"]
        read.meta["at"] = tuple(at)
        read.meta["read"] = i
        return read

    def _read(self, name: str) -> int | None:
        """Which read a placeholder stands for, if it is neither of the tile nor a number."""
        return next((i for i, node in enumerate(self.program.reads) if node.name == name), None)


def _category(dtype: torch.dtype) -> int:
    """What decides between dtypes before their sizes do."""
    return 2 if dtype.is_floating_point else int(dtype != torch.bool)


def _widest(values: Iterable[Any]) -> torch.dtype | None:
    """The dtype in which torch computes with these, if some are tiles of floats."""
    dtypes = [x.dtype for x in values if isinstance(x, Tensor) and x.dim() and x.is_floating_point()]
    return functools.reduce(torch.promote_types, dtypes) if dtypes else None


def _as(node: fx.Node, x: Any) -> Any:
    """A Python number as a tensor of the node's dtype has it; nodes as they are."""
    dtype = node.meta["val"].dtype
    if isinstance(x, fx.Node) or dtype.is_complex:
        return x
    return bool(x) if dtype == torch.bool else float(x) if dtype.is_floating_point else modulo(int(x), dtype)


def _folded(name: str, args: tuple[Any, ...]) -> Any:
    """What little algebra leaves of the derivative's ones and zeros."""
    if len(args) != 2:
        return None
    a, b = args
    if not isinstance(a, fx.Node) and not isinstance(b, fx.Node):
        function = {"mul": operator.mul, "add": operator.add, "sub": operator.sub}.get(name)
        return function(a, b) if function else None
    for x, y in ((a, b), (b, a)):
        if isinstance(x, bool) and isinstance(y, fx.Node) and y.meta["val"].dtype == torch.bool:
            if name in ("bitwise_and", "logical_and", "__and__"):
                return y if x else False
            if name in ("bitwise_or", "logical_or", "__or__"):
                return True if x else y
        if name == "mul" and not isinstance(x, fx.Node) and x == 1 and y.meta["val"].is_floating_point():
            return y
    return None
