"""A tape: the operations of a function of the score in order, with the shapes of their values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from saccade.util.caches import compile_constant, word_of

# Shapes of values.


def broadcast_shape(*shapes: Sequence[int]) -> tuple[int, ...]:
    """What `torch.broadcast_shapes` returns, which imports sympy.

    >>> broadcast_shape((3, 1), (4,), ())
    (3, 4)
    """
    rank = max(map(len, shapes), default=0)
    columns = zip(*((1,) * (rank - len(shape)) + tuple(shape) for shape in shapes), strict=True)
    sizes = [{*column} - {1} or {1} for column in columns]
    if any(len(size) > 1 for size in sizes):
        raise RuntimeError(f"shapes {', '.join(str(tuple(x)) for x in shapes)} do not broadcast")
    return tuple(size.pop() for size in sizes)


# A tape: the operations of a function of the score in order, and the tensors and numbers that they take.
#
# Inside torch.compile Dynamo follows this code, so it is plain: lists, tuples and loops.


TILE = ("score", "b", "h", "q_idx", "kv_idx")
"""The arguments: the first values of every tape."""

ARITHMETIC = ("add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
LIFTED = frozenset((
    *(f"__{reverse}{name}__" for name in ARITHMETIC for reverse in ("", "r")), "__eq__", "__ne__", "__lt__", "__le__",
    "__gt__", "__ge__", "add", "sub", "subtract", "rsub", "mul", "multiply", "div", "divide", "true_divide",
    "floor_divide", "remainder", "fmod", "pow", "eq", "ne", "not_equal", "lt", "less", "le", "less_equal", "gt",
    "greater", "ge", "greater_equal", "where", "masked_fill", "clamp", "clip", "clamp_min", "clamp_max", "bitwise_and",
    "bitwise_or", "bitwise_xor", "lerp", "maximum", "minimum", "fmax", "fmin",
))  # fmt: skip
"""Operations whose numbers are runtime values."""
_EXPONENTS = frozenset(("pow", "__pow__"))
_ZEROS = frozenset(("where", "masked_fill", "clamp", "clip", "clamp_min", "clamp_max"))
"""Where a 0 is a constant of the program: an index that is never negative is read faster, and a 0 added where a key is
visible is a mask."""
_OPERANDS = frozenset(("input", "self", "other", "min", "max", "value", "weight"))


_TORCH_FUNCTIONS: Any = (Tensor.__torch_function__.__func__, torch._C._disabled_torch_function_impl)


def _check_operations(x: Tensor) -> None:
    if type(x) in (Tensor, torch.nn.Parameter):  # Dynamo of PyTorch 2.11 cannot look for methods in a tuple
        return
    own: Any = type(x).__torch_function__
    if getattr(own, "__func__", own) not in _TORCH_FUNCTIONS:
        raise Refused(
            f"{type(x).__name__} has a __torch_function__ of its own, which no kernel calls; "
            "capture x.as_subclass(torch.Tensor)"
        )


WIDEST = 256
"""The most elements of a row in computations."""


class Refused(ValueError):
    """A function that cannot be recorded. `line` is the user's line, if it is known."""

    def __init__(self, text: str, line: str | None = None) -> None:
        super().__init__(text)
        self.text, self.line = text, line

    def __str__(self) -> str:
        return f"{self.text}\n  {self.line}" if self.line else self.text


@compile_constant
def refuse(reason: str) -> NoReturn:
    raise Refused(reason)


def read(table: Any, *at: Any) -> None:
    """The name of steps that read a captured tensor: an index, or ("row", size), for each of its dimensions."""


def element(row: Any, at: Any) -> None:
    """The name of steps that take elements of a row."""


class Tape:
    """A tape of steps. Its values are the arguments, then one for each step.

    A step is (function, arguments, keywords). An argument is ("value", i), ("tensor", i), ("row", i, shape) for a
    tensor without an index, ("number", i, type), ("constant", type, x), ("slice", a, b, c), ("tuple" or "list", …). The
    type of a number is that of Python, or a dtype, of a tensor of no dimensions that promotes differently.
    """

    def __init__(self, kind: type, dtype: torch.dtype, device: Any, reads_numbers: bool = True) -> None:
        self.kind, self.dtype, self.device, self.reads_numbers = kind, dtype, device, reads_numbers
        self.steps: list[Any] = []
        self.lines: list[Any] = []
        """The user's line that called each step."""
        self.tensors: list[Any] = []
        self.forms: list[Any] = []
        """What a program depends on, for each tensor."""
        self.numbers: list[Any] = []
        self.sources: list[Any] = []
        """The tensor without dimensions that each number was read from, or None."""
        self.rows = False
        """Whether something was read with fewer indices than dimensions."""
        self.graded = True
        """Whether the function was called with gradients on."""
        self.run: Any = None
        """The steps' values so far, while the function runs: see `lowering.form_of`."""

    def call(self, function: Any, args: Any, kwargs: Any, line: Any = None) -> int:
        """Records a step and returns its place among the values."""
        name = word_of(function)
        if name == "__getitem__":
            return self._indexed(args[0], args[1], line)
        lifts = name in LIFTED
        numbers = 1 if name in _EXPONENTS else 100
        keeps_zero = name in _ZEROS
        positional = [self.argument(x, lifts and i < numbers, keeps_zero) for i, x in enumerate(args)]
        named = [(key, self.argument(kwargs[key], lifts and key in _OPERANDS, keeps_zero)) for key in kwargs]
        return self._append(function, tuple(positional), tuple(named), line)

    def _append(self, function: Any, positional: Any, named: Any, line: Any) -> int:
        self.steps.append((function, positional, named))
        self.lines.append(line)
        return len(self.steps) + 4

    def argument(self, x: Any, lifts: bool, keeps_zero: bool = False) -> Any:
        """An argument of a step. With `lifts`, numbers are inputs."""
        kind = type(x)
        if isinstance(x, self.kind):
            if x.tape is not self:
                refuse("a value kept from another call is used with the score")
            return "value", x.value
        if isinstance(x, Tensor):
            return self._tensor(x, lifts)
        if kind is bool or x is None or kind is str or isinstance(x, (torch.dtype, torch.device)):
            return "constant", str(kind), x
        if kind is tuple or kind is list:
            return kind.__name__, *[self.argument(y, lifts) for y in x]
        if isinstance(x, (int, float)):
            x = int(x) if isinstance(x, int) else float(x)
            if lifts and not (keeps_zero and x == 0):
                return self._number(x)
            return "constant", "int" if isinstance(x, int) else "float", _text(x)
        if isinstance(x, (torch.SymInt, torch.SymFloat)):
            refuse(
                "a number is made of a size that torch.export leaves open: give that dimension a size, or count from "
                "the end, as in table[-1]"
            )
        if kind is complex:
            refuse(f"scores are real numbers, and meet {x}")
        if hasattr(x, "item"):  # numpy's
            return self.argument(x.item(), lifts, keeps_zero)
        if kind is dict or kind is set:
            refuse(f"operations on scores take numbers, tensors and values of the call, got a {kind.__name__}")
        return "constant", str(kind), x

    def _number(self, x: Any, source: Any = None) -> Any:
        self.numbers.append(x)
        self.sources.append(source)
        return self._numbered(len(self.numbers) - 1)

    def _numbered(self, i: int) -> Any:
        source = self.sources[i]
        if source is not None and source.dtype not in (torch.int64, torch.get_default_dtype()):
            return "number", i, source.dtype
        return "number", i, "int" if isinstance(self.numbers[i], int) else "float"

    def _tensor(self, x: Tensor, lifts: bool) -> Any:
        _check_operations(x)
        if lifts and self.reads_numbers and is_number(x):
            for i, other in enumerate(self.sources):
                if other is x:
                    return self._numbered(i)
            return self._number(x.item(), x)
        i = self._placed(x)
        if x.dim() and not all(n == 1 for n in x.shape):
            return "row", i, tuple([_constant(n) for n in x.shape])
        return "tensor", i

    def _placed(self, x: Tensor) -> int:
        _check_operations(x)
        for i, other in enumerate(self.tensors):
            if other is x:
                return i
        self.tensors.append(x)
        self.forms.append((x.dtype, tuple([True if n == 1 else False for n in x.shape])))  # noqa: SIM210 (a branch makes a constant)
        return len(self.tensors) - 1

    # Indices

    def _indexed(self, base: Any, at: Any, line: Any) -> int:
        at = list(at) if isinstance(at, tuple) else [at]
        if isinstance(base, self.kind):
            step = self.steps[base.value - 5] if base.value > 4 else None
            if step is None or step[0] is not read or not any(x[0] == "row" for x in step[1][1:]):
                return self._of_value(base, at, line)
            tensor, reads = self.tensors[step[1][0][1]], [None if x[0] == "row" else x for x in step[1][1:]]
        else:
            tensor, reads = base, [None for _ in base.shape]
        rows = [dim for dim, x in enumerate(reads) if x is None]
        full = _filled(at, len(rows))
        if full is None:
            reason = f"a captured tensor of shape {tuple(tensor.shape)} is read with {len(at)} indices"
            refuse(f"{reason}; it takes up to one for each dimension, numbers, slices and values of the call")
        for dim, x in zip(rows, full, strict=True):
            if isinstance(x, slice):
                if x != slice(None):
                    tensor = tensor[tuple([slice(None) for _ in range(dim)] + [x])]
                continue
            if type(x) is int and not -tensor.shape[dim] <= x < tensor.shape[dim]:
                refuse(f"index {x} is out of range for a dimension of {tensor.shape[dim]} elements")
            if isinstance(x, bool) or (isinstance(x, Tensor) and not isinstance(x, self.kind) and x.dim()):
                refuse("captured tensors are read one element at a time: index them with b, h, q_idx and kv_idx")
            reads[dim] = self.argument(x, True, True)
        self.rows = self.rows or any(x is None for x in reads)
        indices = [("row", _constant(n)) if x is None else x for n, x in zip(tensor.shape, reads, strict=True)]
        return self._append(read, (("tensor", self._placed(tensor)), *indices), (), line)

    def _of_value(self, base: Any, at: list[Any], line: Any) -> int:
        """Elements of a computed row."""
        if base.value < 5 or any(isinstance(x, Tensor) for x in at):
            refuse("the score and the indices are single values, and cannot be indexed; captured tensors can")
        positional = self.argument(base, False), self.argument(tuple(at), False)
        return self._append(element, positional, (), line)


def _filled(at: list[Any], n: int) -> list[Any] | None:
    """An index for each of n dimensions."""
    dots = [i for i, x in enumerate(at) if x is Ellipsis]
    missing = [slice(None) for _ in range(n - len(at) + len(dots))]
    if len(at) - len(dots) > n or len(dots) > 1 or any(x is None for x in at):
        return None
    return at[: dots[0]] + missing + at[dots[0] + 1 :] if dots else at + missing


def _constant(n: Any) -> int:
    """A row's length, a constant of the program. Inside torch.compile a branch makes a constant of it."""
    if not torch.compiler.is_compiling():
        return int(n)
    for i in range(WIDEST + 1):
        if n == i:
            return i
    refuse(f"rows of {n} elements are too long: up to {WIDEST} are computed with")


def _text(x: float) -> Any:
    """NaN as something that is equal to itself. A set makes a constant of a number that torch.compile leaves open."""
    return "nan" if x != x else next(iter({x}))


_SAME_VALUE = frozenset(("contiguous", "__pos__", "positive"))
_CASTS = {"float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16}


def any_size(i: int) -> int:
    """Of dimension i of a captured tensor, for a size that is not known, and not 1: no program depends on it."""
    return 11 + 6 * i


def is_itself(name: str, args: Any, kwargs: Any, dtype_of: Any) -> bool:
    """Whether torch returns the value itself, which then keeps its derivative where gradients are off too."""
    if name == "to" and len(args) == 2 and not kwargs:
        return dtype_of(args[0]) == args[1]
    if name in _CASTS and len(args) == 1 and not kwargs:
        return dtype_of(args[0]) == _CASTS[name]
    return name in _SAME_VALUE


def target_dtype(kind: type, args: Any, kwargs: dict[str, Any], dtype_of: Any) -> torch.dtype | None:
    """What `to` and `type_as` convert to. None: only devices and layouts are among their arguments."""
    for x in (*args[1:], *kwargs.values()):
        if isinstance(x, torch.dtype):
            return x
        if isinstance(x, Tensor):
            return dtype_of(x) if isinstance(x, kind) else x.dtype
    return None


def is_number(x: Tensor) -> bool:
    """Whether a tensor is a runtime number, like a Python number, and not a captured tensor."""
    return (
        x.dim() == 0
        and type(x) is Tensor
        and x.device.type == "cpu"
        and not x.requires_grad
        and x.dtype != torch.bool
        and not x.dtype.is_complex
        and not is_functorch_wrapped_tensor(x)
    )


# What to write in the place of operations that no function of the score has.


_BRACKETS = ("gather", "embedding", "index_select", "take")
_DRAWS = ("rand", "rand_like", "randn_like", "randint_like", "bernoulli", "native_dropout")
_ADVICE = {
    **dict.fromkeys(("select", "slice"), "index with tensors, one for each dimension: table[h, kv_idx]"),
    **dict.fromkeys(_BRACKETS, "index with brackets: table[h, kv_idx]"),
    **dict.fromkeys(_DRAWS, "dropout_p of attention drops probabilities at random"),
    **dict.fromkeys(
        ("view", "expand", "unsqueeze"), "scores keep their shape: b, h, q_idx and kv_idx broadcast against it"
    ),
    **dict.fromkeys(
        ("_softmax", "_log_softmax"), "the softmax is attention's own; a score function sees single scores"
    ),
    "floor_divide": "torch has no derivative of a // b between floats; write torch.floor(a / b)",
    "heaviside": "torch has no derivative of it; write torch.where(score > 0, 1.0, 0.0)",
    "index": "captured tensors are read at integers; write torch.where(condition, a, b)",
}
READS = frozenset(_BRACKETS)
"""Operations that read a tensor at places that are computed, not by brackets."""


BEHIND = (
    "torch computes with values of the score function where nothing sees it, as in torch.func.jvp and vjp, which score "
    "functions may not call on them"
)
NO_DERIVATIVE = "torch has no derivative of it; write others, or a torch.autograd.Function with its derivative"


def refusal_of(name: str, otherwise: str = "scores are changed by pointwise operations") -> str:
    return f"{name} cannot be part of a score function: {_ADVICE.get(name, otherwise)}"
