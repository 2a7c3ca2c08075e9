"""Runs a tape again, on tensors of the shapes of a tile. The graph of a function is traced from this run.

Every value is one number for each score, a tensor that broadcasts to a tile, or a row of them: a `Row` is read of a
captured tensor that has fewer indices than dimensions, computed with, and reduced or indexed. Rows are unrolled here,
and later stages do not know them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from saccade.scores.recording.advice import BEHIND, refusal_of
from saccade.scores.recording.recorder import error_text, line_of
from saccade.scores.recording.tape import WIDEST, Refused, Tape, any_size, broadcast_shape, element, read
from saccade.scores.recording.tracer import Tracer


class Row:
    """Values in the order of their places in a shape."""

    def __init__(self, shape: tuple[int, ...], values: list[Any]) -> None:
        self.shape, self.values = shape, values

    def at(self, place: tuple[int, ...]) -> Any:
        """The value at a place of a shape that this one broadcasts to."""
        i = 0
        for n, x in zip(self.shape, place[len(place) - len(self.shape) :], strict=True):
            i = i * n + (x if n != 1 else 0)
        return self.values[i]


def replay(
    tape: Tape, outputs: Sequence[Any], tile: Sequence[Tensor], tensors: Sequence[Tensor], numbers: Sequence[Any],
    watch: Callable[[Any], None] = lambda line: None,
) -> list[Tensor]:  # fmt: skip
    """What the outputs are on a tile; `watch` is called with each step's line of the user's code before the step runs.

    Raises:
        Refused: an operation that is not pointwise.
    """
    run = _Replay(tape, list(tile), tensors, numbers)
    run.steps(len(tape.steps), watch)
    return [run.output(x, tape.lines[-1] if tape.lines else None) for x in outputs]


class _Replay:
    def __init__(self, tape: Tape, values: list[Any], tensors: Sequence[Tensor], numbers: Sequence[Any]) -> None:
        self.tape, self.values, self.tensors, self.numbers = tape, values, tensors, numbers

    def steps(self, count: int, watch: Callable[[Any], None] = lambda line: None) -> None:
        """Appends the values of the first steps."""
        for (function, positional, named), line in zip(self.tape.steps[:count], self.tape.lines, strict=False):
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
                f"the function returns a row of shape {value.shape} for each score: captured tensors meet the score by "
                "indices, one for each dimension: table[b, h, q_idx, kv_idx]",
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
                f"{shape} elements are too long, up to {WIDEST} are computed with; captured tensors meet the score by "
                "indices, table[b, h, q_idx, kv_idx]"
            )
        places = [None if x[0] == "row" else _index(self._argument(x)) for x in at]
        table = self.tensors[tensor]
        values = []
        for place in product(*map(range, shape)):
            rest = iter(place)
            values.append(_read(table, [_index(next(rest)) if x is None else x for x in places]))
        return _row(shape, values)


def _row(shape: tuple[int, ...], values: list[Any]) -> Any:
    return Row(shape, values) if shape else values[0]


def _read(table: Tensor, at: list[Any]) -> Tensor:
    # Brackets would read the values of indices without dimensions, and get shapes wrong.
    return torch.ops.aten.index.Tensor(table, [x if x.dim() else x.expand(1, 1) for x in at]) if at else table


def _index(x: Any) -> Any:
    if isinstance(x, Row):
        raise Refused("captured tensors are read at single places, not at rows of them")
    return x if isinstance(x, Tensor) else torch.scalar_tensor(int(x), dtype=torch.int64)


def _plain(function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    name = function.__name__
    if name in _SAME_SHAPE:
        return args[0]
    if name in _MATRICES:
        raise Refused(
            f"{name} multiplies matrices, and the score and the indices are one value each: write a * b; rows of "
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


def _places(row: Row, change: Callable[[Tensor], Any]) -> Any:
    """Where values are after the row's shape changes, computed on their numbers and not traced."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        return change(torch.arange(len(row.values), device="cpu").reshape(row.shape))


_SAME_SHAPE = frozenset(("view_as", "expand_as", "reshape_as", "contiguous", "requires_grad_"))


def _flat(args: Any) -> list[Any]:
    return [y for x in args for y in (_flat(x) if isinstance(x, (tuple, list)) else (x,))]


def _element(row: Any, at: Any) -> Any:
    if not isinstance(row, Row):
        raise Refused("the score and the indices are one value each, and cannot be indexed; captured tensors can")
    return _picked(row.values, _places(row, lambda x: x[at]))


def _picked(values: list[Any], places: Tensor) -> Any:
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        picked = [values[i] for i in places.flatten().tolist()]
    return _row(tuple(places.shape), picked)


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

    def at(x: Any, place: tuple[int, ...]) -> Any:
        return x.at(place) if isinstance(x, Row) else x

    values = [
        _plain(function, [at(x, place) for x in args], {key: at(x, place) for key, x in kwargs.items()})
        for place in product(*map(range, shape))
    ]
    return Row(shape, values)


def _groups(row: Row, dim: Any, keepdim: bool) -> tuple[tuple[int, ...], list[list[Any]]]:
    """The shape that a reduction leaves, and the values that each element is reduced from."""
    dims = range(len(row.shape)) if dim is None or dim == () else (dim,) if isinstance(dim, int) else dim
    dims = {d % len(row.shape) for d in dims}
    remaining = [d for d in range(len(row.shape)) if d not in dims]
    left = tuple(row.shape[d] for d in remaining)
    ordered = _places(row, lambda x: x.permute(*remaining, *sorted(dims)).reshape(math.prod(left), -1).tolist())
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
        places = join(numbered, dim)
    return _picked([x for row in rows for x in row.values], places)


def _reshaped(function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    row = args[0]
    places = _places(row, lambda x: function(x, *args[1:], **kwargs))
    if isinstance(places, (tuple, list)):
        raise Refused(f"{function.__name__} makes several rows: take them by slices, x[:n]")
    return _picked(row.values, places)


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


def form_of(tape: Tape, place: int) -> tuple[torch.dtype, tuple[int, ...]]:
    """The dtype of a value, and its shape if it is a row: of a run in which no number decides what happens."""
    tile, tensors, numbers = zeros_like_inputs(tape, [(1, 1)] * 5)
    values: list[Any] = []

    def run(*inputs: Tensor) -> None:
        values.extend(inputs[:5])
        _Replay(tape, values, inputs[5 : 5 + len(tensors)], inputs[5 + len(tensors) :]).steps(place - 4)

    with torch._C._DisableFuncTorch(), _disable_current_modes():  # torch.no_grad() would be a part of an export
        Tracer().trace(run, [*tile, *tensors, *numbers])
    value = values[place]
    return (value.values[0].dtype, value.shape) if isinstance(value, Row) else (value.dtype, ())
