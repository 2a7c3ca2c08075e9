"""Runs a function and writes down the operations of aten that it consists of.

`make_fx` does the same on fake tensors, for which it imports torch's compiler. That takes longer than importing torch.
"""

# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportArgumentType=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOptionalSubscript=false, reportCallIssue=false
# pyright: reportOptionalIterable=false, reportReturnType=false, reportOperatorIssue=false

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import product
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from saccade.scores.tracing.tape import (
    BEHIND,
    READS,
    TILE,
    WIDEST,
    Refused,
    Tape,
    any_size,
    broadcast_shape,
    element,
    read,
    refusal_of,
)
from saccade.scores.tracing.trace import Trace, error_text, line_of, user_line
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
        values = self.inputs(inputs)
        with self:
            result = function(*values)
        self.graph.output(tree_map_only(Tensor, self._node, result))
        return self.graph

    def inputs(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The graph's inputs of these shapes and dtypes."""
        ones = [torch.ones((), dtype=x.dtype, device="cpu").expand(x.shape) for x in inputs]
        return [self._known(self.graph.placeholder(f"x{i}"), x) for i, x in enumerate(ones)]

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
            result.traced_as = node
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


# Runs a tape again, on tensors of the shapes of a tile. The graph of a function is traced from this run.
#
# Every value is one number for each score, a tensor that broadcasts to a tile, or a row of them: a `Row` is read of a
# captured tensor that has fewer indices than dimensions, computed with, and reduced or indexed. Rows are unrolled here,
# and later stages do not know them.


class Row:
    """Values in the order of their places in a shape."""

    def __init__(self, shape: tuple[int, ...], values: list[Any]) -> None:
        self.shape, self.values = shape, values

    def at(self, index: tuple[int, ...]) -> Any:
        """The value at a place of a shape that this one broadcasts to."""
        i = 0
        for n, x in zip(self.shape, index[len(index) - len(self.shape) :], strict=True):
            i = i * n + (x if n != 1 else 0)
        return self.values[i]


def replay(
    tape: Tape, outputs: Sequence[Any], tile: Sequence[Tensor], tensors: Sequence[Tensor], numbers: Sequence[Any],
    watch: Callable[[Any], None] = lambda line: None,
) -> list[Tensor]:  # fmt: skip
    """What the outputs are on a tile; `watch` is called with each step's line of the user's code before the step runs.
    Raises Refused for an operation that is not pointwise."""
    run = _Replay(tape, list(tile), tensors, numbers)
    run.steps(len(tape.steps), watch)
    return [run.output(x, tape.lines[-1] if tape.lines else None) for x in outputs]


class _Replay:
    def __init__(self, tape: Tape, values: list[Any], tensors: Any, numbers: Any) -> None:
        self.tape, self.values, self.tensors, self.numbers = tape, values, tensors, numbers

    def steps(self, count: int, watch: Callable[[Any], None] = lambda line: None) -> None:
        """Appends the values of the first steps, but those that are there."""
        done = len(self.values) - 5
        todo = zip(self.tape.steps[done:count], self.tape.lines[done:], strict=False)
        for (function, positional, named), line in todo:
            watch(line)
            self.values.append(self._step(function, positional, named, line))

    def _step(self, function: Any, positional: Any, named: Any, line: Any) -> Any:
        try:
            if function is read:
                return self._read(positional)
            args = [self._argument(x) for x in positional]
            kwargs = {key: self._argument(x) for key, x in named}
            if function is element:
                return _element(args[0], args[1])
            if function.__name__ == "where":
                args = self._beside(positional, args)
            if function.__name__ in _JOINS or any(isinstance(x, Row) for x in [*_flat(args), *kwargs.values()]):
                return _of_rows(function, args, kwargs)
            return _plain(function, args, kwargs)
        except Refused as refused:
            raise Refused(refused.text, refused.line or line_of(line)) from refused
        except Exception as failed:
            raise Refused(error_text(failed), line_of(line)) from failed

    def _beside(self, arguments: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        """Numbers of Python that are selected beside a tensor of no dimensions take its dtype."""
        python = [x[0] == "number" and self.tape.sources[x[1]] is None for x in arguments]
        scalars = [
            value
            for x, value, number in zip(arguments, values, python, strict=True)
            if x[0] in ("number", "tensor") and not number and not value.dim() and value.dtype != torch.bool
        ]
        if not scalars:
            return [*values]
        return [
            x.to(torch.result_type(scalars[0], 1.0 if x.is_floating_point() else 1)) if number else x
            for x, number in zip(values, python, strict=True)
        ]

    def output(self, argument: Any, line: Any) -> Tensor:
        value = self._argument(argument)
        if isinstance(value, Row):
            raise Refused(
                f"the function returns a row of shape {value.shape} for each score: index each dimension of "
                "captured tensors, as in table[b, h, q_idx, kv_idx]",
                line_of(line),
            )
        return value if isinstance(value, Tensor) else torch.scalar_tensor(value)

    def _argument(self, x: Any) -> Any:
        match x[0]:
            case "value":
                return self.values[x[1]]
            case "tensor":
                table = self.tensors[x[1]]
                return table if not table.dim() else _read(table, [_index(0)] * table.dim())
            case "row":
                return self._row(x[1], [("row", n) for n in x[2]])
            case "number":
                return self.numbers[x[1]]
            case "constant":
                return math.nan if x[1] == "float" and x[2] == "nan" else x[2]
            case "slice":
                return slice(*(self._argument(y) for y in x[1:]))
            case "tuple":
                return tuple(self._argument(y) for y in x[1:])
        return [self._argument(y) for y in x[1:]]

    def _read(self, arguments: Any) -> Any:
        return self._row(arguments[0][1], arguments[1:])

    def _row(self, tensor: int, at: Sequence[Any]) -> Any:
        shape = tuple(x[1] for x in at if x[0] == "row")
        if math.prod(shape) > WIDEST:
            raise Refused(
                f"a captured tensor is read with {len(at) - len(shape)} indices, and has {len(at)} dimensions: rows of "
                f"{shape} elements are too long, up to {WIDEST} are supported; index each dimension, as in "
                "table[b, h, q_idx, kv_idx]"
            )
        indices = [None if x[0] == "row" else _index(self._argument(x)) for x in at]
        table = self.tensors[tensor]
        values = []
        for index in product(*map(range, shape)):
            rest = iter(index)
            values.append(_read(table, [_index(next(rest)) if x is None else x for x in indices]))
        return _row(shape, values)


def _row(shape: tuple[int, ...], values: list[Any]) -> Any:
    return Row(shape, values) if shape else values[0]


def _read(table: Tensor, at: list[Any]) -> Tensor:
    # Brackets would read the values of indices without dimensions, and get shapes wrong.
    return torch.ops.aten.index.Tensor(table, [x if x.dim() else x.expand(1, 1) for x in at]) if at else table


def _index(x: Any) -> Any:
    if isinstance(x, Row):
        raise Refused(
            "captured tensors are read one element at a time here, not row by row: give an index for each dimension"
        )
    return x if isinstance(x, Tensor) else torch.scalar_tensor(int(x), dtype=torch.int64)


def _plain(function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    name = function.__name__
    if name in _SAME_SHAPE:
        return args[0]
    if name in _MATRICES:
        raise Refused(
            f"{name} multiplies matrices, and the score and the indices are single values: write a * b; rows of "
            "captured tensors have products, table[q_idx] @ other[kv_idx]"
        )
    if name in ("clamp", "clip"):
        x, low, high = [*args, None, None][:3]
        assert x is not None
        low, high = kwargs.get("min", low), kwargs.get("max", high)
        if isinstance(low, Tensor) != isinstance(high, Tensor) and low is not None and high is not None:
            return torch.clamp(torch.clamp(x, min=low), max=high)
    result = function(*args, **kwargs)
    if isinstance(result, Tensor):
        return result
    # Several tensors, or what torch's own transforms ask.
    raise Refused(refusal_of(name) if isinstance(result, (tuple, list)) else refusal_of(name, BEHIND))


def _permuted(row: Row, change: Callable[[Tensor], Any]) -> Any:
    """Where values are after the row's shape changes, computed on their numbers and not traced."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        return change(torch.arange(len(row.values), device="cpu").reshape(row.shape))


_SAME_SHAPE = frozenset(("view_as", "expand_as", "reshape_as", "contiguous", "requires_grad_"))


def _flat(args: Any) -> list[Any]:
    return [y for x in args for y in (_flat(x) if isinstance(x, (tuple, list)) else (x,))]


def _element(row: Any, at: Any) -> Any:
    if not isinstance(row, Row):
        raise Refused("the score and the indices are single values, and cannot be indexed; captured tensors can")
    return _picked(row.values, _permuted(row, lambda x: x[at]))


def _picked(values: list[Any], indices: Tensor) -> Any:
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        picked = [values[i] for i in indices.flatten().tolist()]
    return _row(tuple(indices.shape), picked)


# Rows

_REDUCES: dict[str, Callable[[Any, Any], Any]] = {
    "sum": torch.add, "prod": torch.mul, "amax": torch.maximum, "amin": torch.minimum, "mean": torch.add,
    "any": torch.logical_or, "all": torch.logical_and, "logsumexp": torch.logaddexp, "norm": torch.add,
    "vector_norm": torch.add, "linalg_vector_norm": torch.add,
}  # fmt: skip
_PRODUCTS = frozenset(("dot", "vdot", "inner", "matmul", "__matmul__", "mv", "linalg_vecdot", "vecdot"))
_MATRICES = _PRODUCTS | {
    "__rmatmul__", "mm", "bmm", "addmm", "addmv", "addbmm", "baddbmm", "einsum", "linear", "outer", "ger", "tensordot",
    "kron", "multi_dot", "chain_matmul",
}  # fmt: skip
_JOINS = frozenset(("stack", "cat", "concat", "hstack"))
_SHAPES = frozenset((
    "reshape", "view", "unsqueeze", "squeeze", "flatten", "transpose", "permute", "expand", "flip", "roll", "unflatten",
    "movedim", "narrow", "select", "T", "mT", "t", "swapaxes", "repeat", "chunk", "split",
))  # fmt: skip


def _of_rows(function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    name = function.__name__
    if name in _REDUCES:
        return _reduced(name, *args, **kwargs)
    if name in _PRODUCTS:
        return _product(args[0], args[1])
    if name in _JOINS:
        return _joined(name, *args, **kwargs)
    if name in _SHAPES:
        return _reshaped(function, args, kwargs)
    shape = broadcast_shape(*(x.shape for x in [*args, *kwargs.values()] if isinstance(x, Row)))
    if math.prod(shape) > WIDEST:
        raise Refused(f"rows of {shape} elements are too long: up to {WIDEST} are computed with")

    def at(x: Any, index: tuple[int, ...]) -> Any:
        return x.at(index) if isinstance(x, Row) else x

    values = [
        _plain(function, [at(x, index) for x in args], {key: at(x, index) for key, x in kwargs.items()})
        for index in product(*map(range, shape))
    ]
    return Row(shape, values)


def _groups(row: Row, dim: Any, keepdim: bool) -> tuple[tuple[int, ...], list[list[Any]]]:
    """The shape that a reduction leaves, and the values that each element is reduced from."""
    dims = range(len(row.shape)) if dim is None or dim == () else (dim,) if isinstance(dim, int) else dim
    dims = {d % len(row.shape) for d in dims}
    remaining = [d for d in range(len(row.shape)) if d not in dims]
    left = tuple(row.shape[d] for d in remaining)
    ordered = _permuted(row, lambda x: x.permute(*remaining, *sorted(dims)).reshape(math.prod(left), -1).tolist())
    shape = tuple(1 if d in dims else n for d, n in enumerate(row.shape)) if keepdim else left
    return shape, [[row.values[i] for i in group] for group in ordered]


def _reduced(name: str, row: Row, *args: Any, **kwargs: Any) -> Any:
    p = 2
    if "norm" in name:
        p = args[0] if args else kwargs.pop("p", kwargs.pop("ord", 2))
        args = args[1:]
        if p not in (2, 2.0, "fro", None):
            raise Refused(f"{name} of rows is the Euclidean one; write another with sum()")
    dim = args[0] if args else kwargs.get("dim", kwargs.get("axis"))
    keepdim = args[1] if len(args) > 1 else kwargs.get("keepdim", False)
    shape, groups = _groups(row, dim, keepdim)
    reduced_values = []
    for group in groups:
        values = [x * x for x in group] if "norm" in name else group
        if name in ("any", "all") or (name == "sum" and values[0].dtype == torch.bool):
            values = [x.to(torch.int64) if name == "sum" else x != 0 for x in values]
        total = reduce(_REDUCES[name], values)
        total = total / len(values) if name == "mean" else total.sqrt() if "norm" in name else total
        dtype = kwargs.get("dtype")
        reduced_values.append(total if dtype is None else total.to(dtype))
    return _row(shape, reduced_values)


def _product(a: Any, b: Any) -> Any:
    shapes: list[tuple[int, ...]] = [x.shape if isinstance(x, Row) else () for x in (a, b)]
    if not all(0 < len(shape) <= 2 for shape in shapes):
        raise Refused("products of rows take rows of one or two dimensions")
    if a.shape[-1] != b.shape[0]:
        raise Refused(f"rows of shapes {a.shape} and {b.shape} have no product")
    rows, columns = a.shape[:-1], b.shape[1:]
    values = [
        reduce(torch.add, [a.at((*i, k)) * b.at((k, *j)) for k in range(a.shape[-1])])
        for i in product(*map(range, rows))
        for j in product(*map(range, columns))
    ]
    return _row((*rows, *columns), values)


def _joined(name: str, parts: Any, dim: int = 0, axis: int | None = None) -> Any:
    dim = dim if axis is None else axis
    rows = [x if isinstance(x, Row) else Row((), [x]) for x in parts]
    first = [sum(len(row.values) for row in rows[:i]) for i in range(len(rows))]
    join = torch.stack if name == "stack" else torch.cat
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        numbered = [
            torch.arange(i, i + len(row.values), device="cpu").reshape(row.shape)
            for i, row in zip(first, rows, strict=True)
        ]
        indices = join(numbered, dim)
    return _picked([x for row in rows for x in row.values], indices)


def _reshaped(function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    row = args[0]
    indices = _permuted(row, lambda x: function(x, *args[1:], **kwargs))
    if isinstance(indices, (tuple, list)):
        raise Refused(f"{function.__name__} makes several rows: take them by slices, x[:n]")
    return _picked(row.values, indices)


def zeros_like_inputs(tape: Tape, shapes: Iterable[tuple[int, ...]]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Zeros for the five arguments, in these shapes, and for a tape's tensors and numbers."""
    dtypes = [tape.dtype, *[torch.int64] * 4]
    tile = [torch.zeros(shape, dtype=dtype, device="cpu") for shape, dtype in zip(shapes, dtypes, strict=True)]
    sizes = ([n if isinstance(n, int) else any_size(i) for i, n in enumerate(x.shape)] for x in tape.tensors)
    tensors = [torch.zeros((), dtype=x.dtype, device="cpu").expand(n) for x, n in zip(tape.tensors, sizes, strict=True)]
    kinds = [
        source.dtype if source is not None else torch.int64 if isinstance(x, int) else torch.get_default_dtype()
        for x, source in zip(tape.numbers, tape.sources, strict=True)
    ]
    numbers = [torch.zeros((), dtype=dtype, device="cpu") for dtype in kinds]
    return tile, tensors, numbers


def form_of(tape: Tape, index: int) -> tuple[torch.dtype, tuple[int, ...]]:
    """The dtype of a value, and its shape if it is a row: of a run in which no number decides what happens.

    The run goes on where it was when another value's was asked, as tapes only grow."""
    tracer, run = tape.run = tape.run or (Tracer(), _Replay(tape, [], [], []))
    with torch._C._DisableFuncTorch(), _disable_current_modes():  # torch.no_grad() would be a part of an export
        inputs = zeros_like_inputs(tape, [(1, 1)] * 5)
        for known, zeros in zip((run.values, run.tensors, run.numbers), inputs, strict=True):
            known += tracer.inputs(zeros[len(known) :])
        with tracer:
            run.steps(index - 4)
    value = run.values[index]
    return (value.values[0].dtype, value.shape) if isinstance(value, Row) else (value.dtype, ())


# From a trace to a graph of pointwise operations and of reads of captured tensors.
#
# The trace runs again on small tensors, of the shapes of a tile with broadcasting indices: score (Q, K), b and h
# (1, 1), q_idx (Q, 1), kv_idx (1, K). All of it must be pointwise, or a read of a captured tensor at computed indices.

# torch.fx types the arguments of nodes as unions of everything.

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
_NO_INDEX = "the score and the indices are single values, and cannot be indexed; captured tensors can"


class Raw:
    """One run of the function as a graph, its nodes sorted: `tile` depends on score or indices, `tensor` on captured
    tensors alone, `number` on numbers alone."""

    def __init__(
        self, run: Callable[..., tuple[Any, ...]], tile: Sequence[Tensor], tensors: Sequence[Tensor],
        numbers: Sequence[Tensor], tracer: Tracer | None = None,
    ) -> None:  # fmt: skip
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
                f"a captured tensor of shape {tuple(val.shape)} is combined with the score without an index: "
                "index each of its dimensions, as in table[b, h, q_idx, kv_idx]"
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


def lower(trace: Trace) -> Raw:
    """Raises Refused, and says what to write instead, if the trace cannot become a graph."""
    tape, tracer = trace.tape, Tracer()

    def watch(line: tuple[str, int] | None) -> None:
        tracer.line = line_of(line)

    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        tensors, numbers = inputs[5 : 5 + len(tape.tensors)], inputs[5 + len(tape.tensors) :]
        return tuple(replay(tape, trace.outputs, inputs[:5], tensors, numbers, watch))

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
