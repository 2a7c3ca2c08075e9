"""A Program as the source of Triton functions, which Triton and Gluon kernels call alike.

Every function takes `data` first: for each captured tensor its pointer, and a stride and a size for each dimension;
then the numbers. Floats are float32. Integers are 32 bits wide where their range, followed from the indices, allows it.
"""

# torch.fx types the arguments of nodes as unions of everything.
# pyright: reportAttributeAccessIssue=false, reportFunctionMemberAccess=false
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportArgumentType=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOptionalSubscript=false, reportCallIssue=false
# pyright: reportOptionalIterable=false, reportReturnType=false, reportOperatorIssue=false

from __future__ import annotations

import math
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from saccade.scores.codegen.program import Program
from saccade.scores.codegen.ranges import ANY, HEADS, LONGEST, NARROW, exact, fits, limits_of, modulo, range_of, within
from saccade.scores.tracing.lowering import TILE_SHAPES, K, Q, in_order, name_of
from saccade.scores.tracing.tape import TILE, Refused, broadcast_shape


def literal(x: float) -> str:
    if math.isnan(x):
        return "(INF - INF)"
    if math.isinf(x):
        return "INF" if x > 0 else "(-INF)"
    return repr(x) if x >= 0 else f"({x!r})"


def power(x: str, y: str, exponent: Any) -> str:
    if isinstance(exponent, (int, float)):
        if exponent == 0.5:
            return f"tl.sqrt_rn({x})"
        if exponent == -1:
            return f"(1.0 / {x})"
        if exponent == int(exponent) and 0 < exponent <= 8:
            return "(" + " * ".join([x] * int(exponent)) + ")"
    return f"power({x}, {y})"


def arity(formula: str) -> int:
    """How many operands a formula takes."""
    fields = [name for _, name, _, _ in string.Formatter().parse(formula) if name is not None]
    return len(fields) if "" in fields else len({*fields})


def rounded(x: str, decimals: int) -> str:
    """To so many decimals, halves to even, as torch does it."""
    if decimals == 0:
        return f"rounded({x})"
    power = f"{10.0 ** abs(decimals)!r}"
    if decimals > 0:
        return f"tl.div_rn(rounded({x} * {power}), {power})"
    return f"(rounded(tl.div_rn({x}, {power})) * {power})"


def low_bits(x: str, dtype: torch.dtype) -> str:
    """An integer of 32 or 64 bits, wrapped to a dtype of 32 bits or fewer, as 32 bits."""
    if dtype in (torch.uint8, torch.uint16):
        return f"({x} & {torch.iinfo(dtype).max}).to(tl.int32)"
    narrow = f"{x}.to(tl.int32)"
    return narrow if dtype == torch.int32 else f"{narrow}.to(tl.{str(dtype).partition('.')[2]}).to(tl.int32)"


_FORM = frozenset(("dtype", "layout", "device", "pin_memory", "non_blocking", "memory_format"))
"""What says which tensor holds a result; the graph has its dtype besides."""


class Arguments:
    """The arguments of an aten operation that differ from their defaults. An argument that no rule reads is an error,
    so that none is ignored."""

    def __init__(self, node: fx.Node) -> None:
        self.name = name_of(node)
        self.schema = node.target._schema.arguments
        named = dict(zip((x.name for x in self.schema), node.args, strict=False)) | dict(node.kwargs)
        defaults = {x.name: x.default_value for x in self.schema if x.has_default_value()}
        self.given = {name: x for name, x in named.items() if name not in defaults or x is not defaults[name]}
        self.left = {name: x for name, x in self.given.items() if name not in defaults or x != defaults[name]}

    def first(self, count: int) -> list[Any]:
        """The first `count` arguments, with None for one that is left out."""
        names = [x.name for x in self.schema if not x.kwarg_only][:count]
        while names and names[-1] not in self.given:
            names.pop()
        return [self.option(name, None) for name in names]

    def option(self, name: str, default: Any) -> Any:
        self.left.pop(name, None)
        return self.given.get(name, default)

    def form(self) -> None:
        """Takes what says no more than which tensor holds the result."""
        self.left = {name: x for name, x in self.left.items() if name not in _FORM}

    def end(self) -> None:
        """Raises Refused if something is left."""
        if self.left:
            more = ", ".join(f"{name}={x}" for name, x in self.left.items())
            raise Refused(f"{self.name} with {more} cannot run in a GPU kernel; write it with other operations")


class EmitOptions(NamedTuple):
    """What the source of a program depends on besides the program."""

    wide_tensors: tuple[bool, ...]
    """Which captured tensors need 64-bit offsets."""
    fast: bool = False
    """tanh is one instruction, to 11 bits, and a quotient by what is not one number for each score a product."""
    wide_integers: frozenset[int] = frozenset()
    """Which captured numbers are integers above LONGEST, and take 64 bits."""
    indices: str = "numbers"
    """`numbers` of rows and keys; their `positions`, which may be negative; `rows`: positions in any order."""
    tables: bool = False
    """Reads by distance come from tables of every distance: see `device.distance_tables`."""
    units: tuple[int, ...] = ()
    """`Score.units`, where every key has an element; () elsewhere."""
    tma_tile: int | None = None
    """The one of `Program.own_elements` of which data's last entry is a tile, as it is for these rows and keys."""


@dataclass(frozen=True)
class Value:
    """A name in the source, with what is known about it."""

    text: str
    kind: str
    """float, int, wide or bool"""
    shape: tuple[int, ...] = ()
    """As in the trace: Q and K where it differs by query and by key."""
    span: tuple[int, int] = ANY
    """Of integers."""
    parts: tuple[str, Value, Value] | None = None
    """Sums and differences: the operation and its operands."""


def kind_of(dtype: torch.dtype) -> str:
    return "float" if dtype.is_floating_point else "bool" if dtype == torch.bool else "int"


_FLOAT = {
    "abs": "tl.abs({})", "exp": "tl.exp({})", "exp2": "tl.exp2({})", "log": "tl.log({})", "log2": "tl.log2({})",
    "sin": "tl.sin({})", "cos": "tl.cos({})", "sqrt": "tl.sqrt_rn({})", "rsqrt": "(1.0 / tl.sqrt_rn({}))",
    "tanh": "tanh({})", "erf": "tl.erf({})", "erfc": "(1.0 - tl.erf({}))", "floor": "tl.floor({})",
    "ceil": "tl.ceil({})", "trunc": "truncated({})", "neg": "(-{})",
    "reciprocal": "(1.0 / {})", "sigmoid": "sigmoid({})", "expm1": "expm1({})", "log1p": "log1p({})",
    "sign": "signed({})", "sgn": "signed({})", "log10": "(tl.log2({}) * 0.30102999566398120)",
    "relu": "larger({}, 0.0)", "tan": "(tl.sin({0}) / tl.cos({0}))", "sinh": "(0.5 * (expm1({0}) - expm1(-{0})))",
    "cosh": "(0.5 * (tl.exp({0}) + tl.exp(-{0})))", "atanh": "(0.5 * (log1p({0}) - log1p(-{0})))",
    "acosh": "tl.log({0} + tl.sqrt_rn({0} * {0} - 1.0))", "frac": "({0} - truncated({0}))",
}  # fmt: skip
_INT = {
    "abs": "tl.abs({})", "neg": "(-{})", "sign": "signed({})", "sgn": "signed({})",
    "bitwise_not": "(~{})", "relu": "tl.maximum({}, 0)",
}  # fmt: skip
_BINARY = {
    "add": "({} + {})", "sub": "({} - {})", "mul": "({} * {})", "maximum": "larger({}, {})",
    "minimum": "smaller({}, {})", "fmax": "tl.maximum({}, {})", "fmin": "tl.minimum({}, {})",
    "floor_divide": "tl.floor({} / {})", "remainder": "remainder({}, {})", "fmod": "fmod({}, {})",
}  # fmt: skip
_INT_BINARY = {
    "add": "({} + {})", "sub": "({} - {})", "mul": "({} * {})", "maximum": "tl.maximum({}, {})",
    "minimum": "tl.minimum({}, {})", "bitwise_and": "({} & {})", "bitwise_or": "({} | {})", "bitwise_xor": "({} ^ {})",
    "bitwise_left_shift": "({} << {})", "bitwise_right_shift": "({} >> {})",
}  # fmt: skip
_SAME_AS = {
    "__and__": "bitwise_and", "__or__": "bitwise_or", "__xor__": "bitwise_xor", "__lshift__": "bitwise_left_shift",
    "__rshift__": "bitwise_right_shift", "clamp_min": "maximum", "clamp_max": "minimum",
}  # fmt: skip
_COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_TRUTH = {
    "logical_and": "({} & {})", "logical_or": "({} | {})", "logical_xor": "({} ^ {})",
    "logical_not": "({} == 0)", "bitwise_not": "({} == 0)", "bitwise_and": "({} & {})", "bitwise_or": "({} | {})",
    "bitwise_xor": "({} ^ {})", "where": "(({0} & {1}) | (({0} == 0) & {2}))", "mul": "({} & {})", "add": "({} | {})",
    "maximum": "({} | {})", "minimum": "({} & {})",
}  # fmt: skip
_CLASSES = {"isnan": "({0} != {0})", "isinf": "(tl.abs({}) == INF)", "isfinite": "(tl.abs({}) < INF)"}

_OPERANDS = {
    **dict.fromkeys(_COMPARE, 2), "scalar_tensor": 1, "_to_copy": 1, "round": 1, "div": 2, "floor_divide": 2,
    "remainder": 2, "fmod": 2, "pow": 2, "where": 3, "clamp": 3,
}  # fmt: skip
"""How many operands those have that no formula says it of."""
_LOW_BITS = frozenset(("add", "sub", "mul", "neg", "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "pow"))
"""Operations whose lower bits depend on the lower bits of the operands alone."""


class Emitter:
    """Writes one function: the nodes that its outputs need, once each, in order."""

    def __init__(self, program: Program, options: EmitOptions) -> None:
        self.program, self.options = program, options
        self.lines: list[str] = []
        self.values: dict[fx.Node, Value] = {}
        self.used: dict[str, str] = {}
        """Unpacking of data: name -> expression."""
        self.count = 0

    # What the graph holds

    def value(self, x: Any) -> Value:
        if isinstance(x, bool):
            return Value(str(x), "bool")
        if isinstance(x, int):
            return Value(str(x), "int" if abs(x) <= NARROW else "wide", (), (x, x))
        if isinstance(x, float):
            return Value(literal(x), "float")
        for node in in_order(x, _needed, self.values):
            self.values[node] = self._placeholder(node) if node.op == "placeholder" else self._call(node)
        return self.values[x]

    def _placeholder(self, node: fx.Node) -> Value:
        name = str(node.target)
        if name == "score":
            return Value(name, "float", (Q, K))
        if name in TILE:
            if name in ("q_idx", "kv_idx"):
                least = 0 if self.options.indices == "numbers" else -LONGEST
                return Value(name, "int", TILE_SHAPES[name], (least, LONGEST - 1))
            return Value(name, "int", TILE_SHAPES[name], (0, HEADS - 1))
        i = int(name[1:])
        offset = self.start(len(self.program.ranks)) + i
        if i in self.options.wide_integers:
            self.used[f"n{i}"] = f"far_int(data[{offset}])"
            return Value(f"n{i}", "wide")
        if self.program.integral[i]:
            self.used[f"n{i}"] = f"(plain_int(data[{offset}]) - {LONGEST})"
            dtype = node.meta["val"].dtype
            least, most = (0, 1) if dtype == torch.bool else limits_of(dtype)
            # The launch makes sure of it.
            return Value(f"n{i}", "int", (), (max(least, -LONGEST), min(most, LONGEST)))
        self.used[f"n{i}"] = f"data[{offset}]"
        return Value(f"n{i}", "float")

    def _call(self, node: fx.Node) -> Value:
        name = name_of(node)
        name = _SAME_AS.get(name, name)
        if name == "index":
            return self.read(node, node.meta["at"])
        if name == "reshape":
            return self.read(node, ())
        given = Arguments(node)
        value = self._computed(name, node, given)
        given.end()
        return value

    def _computed(self, name: str, node: fx.Node, given: Arguments) -> Value:
        kind = kind_of(node.meta["val"].dtype)
        args = [None if x is None else self.value(x) for x in given.first(_count(name, kind))]
        if name == "scalar_tensor":
            given.form()
            return args[0]
        if name == "_to_copy":
            given.form()
            return self._cast(node, args[0])
        if kind == "int":
            return self._integer(name, node, given, args)
        if kind == "bool":
            return self._boolean(name, node, args)
        return self.keep(self._float(name, node, given, args), "float", self._shape(args))

    def _float(self, name: str, node: fx.Node, given: Arguments, args: list[Any]) -> str:
        texts = [None if x is None else self.float(x) for x in args]
        if name in ("add", "sub") and (alpha := given.option("alpha", 1)) != 1:
            texts[1] = f"({texts[1]} * {self.float(self.value(alpha))})"
        if name in _BINARY:
            return _BINARY[name].format(*texts)
        if name == "tanh" and self.options.fast:
            return f"fast_tanh({texts[0]})"
        if name in _FLOAT:
            return _FLOAT[name].format(texts[0])
        match name:
            case "round":
                return rounded(str(texts[0]), given.option("decimals", 0))
            case "div":
                mode = given.option("rounding_mode", None)
                few = self.options.fast and args[1].shape != self._shape(args)
                exact = f"({texts[0]} * (1.0 / {texts[1]}))" if few and not mode else f"({texts[0]} / {texts[1]})"
                return {"floor": f"tl.floor({exact})", "trunc": f"truncated({exact})", None: exact}[mode]
            case "pow":
                return power(texts[0], texts[1], node.args[1])
            case "where":
                return f"tl.where({self.bool(args[0])}, {texts[1]}, {texts[2]})"
            case "clamp":
                return _clamped(_BINARY, texts)
        raise Refused(
            f"{name.removesuffix('_backward')} cannot run in a GPU kernel; write it with other operations", None
        )

    def _integer(self, name: str, node: fx.Node, given: Arguments, args: list[Any]) -> Value:
        if name in ("add", "sub") and (alpha := given.option("alpha", 1)) != 1:
            args = [args[0], self._whole("mul", node, [args[1], self.value(alpha)])]
        if name != "where":
            return self._whole(name, node, args, given.option("rounding_mode", None))
        a, b = (self._within(x, node.meta["val"].dtype) for x in args[1:])
        (least, most), (low, high) = _span(a), _span(b)
        span = min(least, low), max(most, high)
        wide = not fits(span)
        text = f"tl.where({self.bool(args[0])}, {self.int(a, wide)}, {self.int(b, wide)})"
        return self.keep(text, "wide" if wide else "int", self._shape(args), span)

    def _whole(self, name: str, node: fx.Node, args: list[Any], mode: str | None = None) -> Value:
        """An operation on integers, whose result is in the limits of the node's dtype, as torch wraps it."""
        dtype, shape = node.meta["val"].dtype, self._shape(args)
        if not args:
            raise Refused(f"{name} of integers cannot run in a GPU kernel; write it with other operations", None)
        args = [x and self._within(x, torch.int32 if _keeps_low_bits(name, i, dtype) else dtype)
                for i, x in enumerate(args)]  # fmt: skip
        spans = [None if x is None else _span(x) for x in args]
        span = range_of(name, spans, node)
        wide = dtype == torch.int64 and not all(fits(x) for x in (*spans, span) if x is not None)
        texts = [None if x is None else self.int(x, wide) for x in args]
        parts = None
        if "shift" in name and not within(spans[1], (0, 63 if wide else 31)):
            text = f"{name.removeprefix('bitwise_')}({texts[0]}, {texts[1]}, {64 if wide else 32})"
        elif name in _INT_BINARY:
            text = _INT_BINARY[name].format(*texts)
            parts = (name, args[0], args[1]) if name in ("add", "sub") else None
        elif name in _INT:
            text = _INT[name].format(texts[0])
        elif name == "clamp":
            text = _clamped(_INT_BINARY, texts)
        elif name in ("floor_divide", "div", "remainder", "fmod"):
            floors = name != "fmod" and mode != "trunc"
            text = self._divided(name in ("remainder", "fmod"), floors, args, texts)
        elif name == "pow" and isinstance(node.args[1], int) and 0 < node.args[1] <= 4:
            text = "(" + " * ".join([str(texts[0])] * node.args[1]) + ")"
        else:
            raise Refused(f"{name} of integers cannot run in a GPU kernel; write it with other operations", None)
        if not within(span, limits := limits_of(dtype)):
            # 32 and 64 bits wrap by themselves.
            text, parts = (text if dtype in (torch.int32, torch.int64) else low_bits(text, dtype)), None
            span = limits
        if wide and fits(span):
            text, wide = f"{text}.to(tl.int32)", False
        return self.keep(text, "wide" if wide else "int", shape, span, parts)

    def _within(self, x: Value, dtype: torch.dtype) -> Value:
        """An integer in the limits of a dtype; without an instruction where its range is."""
        if dtype in (torch.uint32, torch.uint64):
            raise Refused(f"{dtype} cannot run in a GPU kernel; write x.to(torch.int64)", None)
        if x.kind == "float" or within(_span(x), limits := limits_of(dtype)):
            return x
        if _is_literal(x):
            return self.value(modulo(int(x.text), dtype))
        return self.keep(low_bits(x.text, dtype), "int", x.shape, limits)

    def _divided(self, rest: bool, floors: bool, args: Sequence[Any], texts: Sequence[str]) -> str:
        """A quotient or what it leaves, rounded down or towards zero."""
        (a, b), (i, j) = args, texts
        alike = all(_span(x)[0] >= 0 for x in args)
        if _span(b)[0] <= 0 <= _span(b)[1]:
            j = f"divisor({j})"
        if b.shape == () and not _is_literal(b) and all(exact(_span(x)) for x in args) and (floors or alike):
            down = f"quotient({self.float(a)}, {j})"
            return f"({i} - {down} * {j})" if rest else down
        if floors and not alike:
            return f"{'floor_remainder' if rest else 'floor_divided'}({i}, {j})"
        return f"({i} {'%' if rest else '//'} {j})"

    def _boolean(self, name: str, node: fx.Node, args: list[Any]) -> Value:
        shape = self._shape(args)
        if name in _COMPARE:
            floats = any(x.kind == "float" for x in args)
            if not floats and (dtype := _common(node)) != torch.bool:
                args = [self._within(x, dtype) for x in args]
            wide = any(x.kind == "wide" for x in args)
            a, b = (self.float(x) if floats else self.int(x, wide) for x in args)
            return self.keep(f"({a} {_COMPARE[name]} {b})", "bool", shape)
        if name in _CLASSES:
            return self.keep(_CLASSES[name].format(self.float(args[0])), "bool", shape)
        if name in _TRUTH:
            return self.keep(_TRUTH[name].format(*(self.bool(x) for x in args)), "bool", shape)
        raise Refused(f"{name} of booleans cannot run in a GPU kernel; write it with other operations", None)

    def _cast(self, node: fx.Node, x: Value) -> Value:
        dtype = node.meta["val"].dtype
        kind = kind_of(dtype)
        if kind == "bool":
            return self.keep(self.bool(x), "bool", x.shape)
        if kind == "float":
            text = self.float(x)
            if node.args[0].op == "placeholder" and node.args[0].meta["val"].dtype == dtype:  # a number, of that dtype
                return x
            if dtype in (torch.float16, torch.bfloat16):
                text = f"{text}.to(tl.{str(dtype).partition('.')[2]}).to(tl.float32)"
            elif x.kind == "float":
                return x
            return self.keep(text, "float", x.shape)
        if x.kind == "bool":
            return self.keep(self.int(x, False), "int", x.shape, (0, 1))
        if x.kind == "float":
            # A float's range is not followed: one that comes from indices and tables fits 32 bits.
            x = self.keep(f"{x.text}.to(tl.int32)", "int", x.shape, (-NARROW - 1, NARROW))
        return self._within(x, dtype)

    # Values by type

    def float(self, x: Value) -> str:
        if x.kind == "float":
            return x.text
        if x.kind == "bool":
            return f"tl.where({x.text}, 1.0, 0.0)"
        if _is_literal(x):
            return f"{x.text}.0"
        if x.parts and x.kind == "int":
            name, a, b = x.parts
            outer = all(y.kind == "int" and y.shape != x.shape and exact(y.span) for y in (a, b))
            if outer:  # a conversion for every row and every key is cheaper than one for every score
                return f"({self.float(a)} {'+' if name == 'add' else '-'} {self.float(b)})"
        if x.kind == "int" and exact(x.span):
            return self.keep(f"index_float({x.text})", "float", x.shape).text
        return f"({x.text}).to(tl.float32)"

    def int(self, x: Value, wide: bool) -> str:
        if x.kind == "float":
            raise Refused("a float where an integer is needed", None)
        if _is_literal(x):
            return x.text
        text = f"tl.where({x.text}, 1, 0)" if x.kind == "bool" else x.text
        return f"widened({text})" if wide and x.kind != "wide" else text

    def bool(self, x: Value) -> str:
        if x.kind == "bool":
            return x.text if x.text not in ("True", "False") else f"(score == score) == {x.text}"
        return f"({x.text} != 0)"

    def _shape(self, args: Sequence[Any]) -> tuple[int, ...]:
        return broadcast_shape(*(x.shape for x in args if x is not None))

    def keep(
        self, text: str, kind: str, shape: tuple[int, ...], span: tuple[int, int] = ANY, parts: Any = None
    ) -> Value:
        name = f"x{self.count}"
        self.count += 1
        self.lines.append(f"{name} = {text}")
        return Value(name, kind, shape, span, parts)

    def function(self, name: str, parameters: str, result: str) -> str:
        """The whole function; its last line returns, or is, `result`."""
        body = [f"{used} = {text}" for used, text in self.used.items()] + self.lines + [result]
        return f"@triton.jit\ndef {name}({parameters}):\n" + "".join(f"    {line}\n" for line in body)

    # Reads of captured tensors: where they lie in `data`, and what is loaded

    def start(self, tensor: int) -> int:
        """Where a tensor's data starts."""
        return sum(1 + 2 * rank for rank in self.program.ranks[:tensor])

    def read(self, node: fx.Node, at: Sequence[Any]) -> Value:
        if node.meta["read"] in self._tables:
            return self.table(self._tables.index(node.meta["read"]), (Q, K))
        i = int(str(node.args[0].target)[1:])
        if i == self.options.tma_tile:
            return self.keep(f"data[{self._behind(len(self._tables))}].to(tl.float32)", "float", (Q, K))
        dtype, shape = self.program.dtypes[i], self.offset_shape(at)
        self.used[f"t{i}"] = f"data[{self.start(i)}]"
        pointers = " + ".join(filter(None, (f"t{i}", self.offset(i, at))))
        # Where no index is moved the compiler sees which elements lie side by side.
        rest = f", mask={self.inside(i, at, 'kv_idx')}, other=0" if self._by_units(i, at) else ""
        loaded = f"tl.load({pointers}{rest})"
        if dtype.is_floating_point:
            return self.keep(f"{loaded}.to(tl.float32)", "float", shape)
        if dtype == torch.bool:
            return self.keep(f"({loaded} != 0)", "bool", shape)
        if dtype == torch.uint64:
            raise Refused("captured tensors of uint64 cannot run in a GPU kernel; capture x.to(torch.int64)")
        if dtype == torch.uint32:
            return self.keep(f"widened({loaded})", "wide", shape, limits_of(dtype))
        wide = dtype == torch.int64
        return self.keep(
            loaded if wide else f"{loaded}.to(tl.int32)", "wide" if wide else "int", shape, limits_of(dtype)
        )

    @property
    def _tables(self) -> list[int]:
        """The reads that come from tables."""
        return [*self.program.distance_reads] if self.options.tables else []

    def _behind(self, tables: int) -> int:
        """The place in `data` behind the tensors, the numbers, and so many tables."""
        return self.start(len(self.program.ranks)) + len(self.program.integral) + 4 * tables

    def table(self, n: int, shape: tuple[int, ...]) -> Value:
        """What a read by distance reads, of the n-th table: float32 (b, h, distances), contiguous but for its b and h.
        An addition to a pointer of the row's is all that an element costs."""
        row, zero = self._table_row(n)
        return self.keep(f"tl.load(({row} + ({zero} - q_idx)) + kv_idx)", "float", shape)

    def table_reach(self, n: int) -> tuple[str, str]:
        """The first two numbers of the n-th table: see `device.distance_tables`."""
        row, _ = self._table_row(n)
        return f"tl.load({row})", f"tl.load({row} + 1)"

    def _table_row(self, n: int) -> tuple[str, str]:
        """A pointer to the table of one head, and the place of distance 0."""
        offset = self._behind(n)
        parts = "pointer", "b", "h", "zero"
        pointer, b, h, zero = (f"d{n}_{part}" for part in parts)
        self.used |= {name: f"data[{offset + i}]" for i, name in enumerate((pointer, b, h, zero))}
        return f"({pointer} + (b * plain_int({b}) + h * plain_int({h})))", f"plain_int({zero})"

    def offset(self, tensor: int, at: Sequence[Any], contiguous: bool = False, alone: bool = False) -> str:
        """The offset of an element from the tensor's first one. Indices count from the end where they are negative, and
        are kept inside: rows and keys that are not in use have indices too. `alone` leaves all as they are."""
        terms = []
        for dim, x in enumerate(at):
            value = self.value(x)
            if value.span == (0, 0):
                continue
            text, last = value.text, dim == len(at) - 1
            if not alone and (contiguous or not last or not self._by_units(tensor, at)):
                text = f"{'inside' if value.span[0] >= 0 else 'wrapped'}({text}, {self._size(tensor, dim, last)})"
            text = f"widened({text})" if self.options.wide_tensors[tensor] else text
            if contiguous:
                text += "".join(f" * {self._size(tensor, i, i == len(at) - 1)}" for i in range(dim + 1, len(at)))
            elif not last or not self._unit(tensor) > 1:
                stride = self._number(f"t{tensor}_s{dim}", self.start(tensor) + 1 + 2 * dim, self._unit(tensor))
                text += f" * {stride}"
            terms.append((value.shape.count(1), text))
        # What fewer elements share is added first.
        return " + ".join(text for _, text in sorted(terms, key=lambda term: -term[0]))

    def offset_shape(self, at: Sequence[Any]) -> tuple[int, ...]:
        """The shape of `offset`, to which indices that are always 0 add nothing."""
        values = map(self.value, at)
        return broadcast_shape((1, 1), *(value.shape for value in values if value.span != (0, 0)))

    def inside(self, tensor: int, at: Sequence[Any], *names: str) -> str:
        """Whether those of the indices are below the tensor's sizes."""
        texts = ((self.value(x).text, self._size(tensor, dim, dim == len(at) - 1)) for dim, x in enumerate(at))
        return " & ".join(f"({text} < {size})" for text, size in texts if text in names)

    def _unit(self, tensor: int) -> int:
        return self.options.units[tensor] if self.options.units else 1

    def _by_units(self, tensor: int, at: Sequence[Any]) -> bool:
        """Whether a read's last index is a key's number itself, in a tensor whose rows are whole units."""
        return self._unit(tensor) > 1 and bool(at) and self.value(at[-1]).text == "kv_idx"

    def _size(self, tensor: int, dim: int, last: bool) -> str:
        unit = self._unit(tensor) if last else 1
        return self._number(f"t{tensor}_n{dim}", self.start(tensor) + 2 + 2 * dim, unit)

    def _number(self, name: str, offset: int, unit: int) -> str:
        """A multiple of the unit, as the compiler is to know."""
        text = f"plain_int(data[{offset}])"
        self.used[name] = text if unit == 1 else f"{text} // {unit} * {unit}"
        return name


def _needed(node: fx.Node) -> Sequence[Any]:
    """The nodes and numbers whose values a node's value is made of; tensors have none."""
    if node.op == "placeholder":
        return ()
    return node.meta.get("at", ()) if name_of(node) in ("index", "reshape") else node.args


def _clamped(table: dict[str, str], texts: Sequence[Any]) -> str:
    """A number between bounds, which may be None or left out."""
    text = texts[0]
    for name, bound in zip(("maximum", "minimum"), texts[1:], strict=False):
        text = text if bound is None else table[name].format(text, bound)
    return text


def _count(name: str, kind: str) -> int:
    """How many operands the device form of an operation takes."""
    tables = {"float": (_BINARY, _FLOAT), "int": (_INT_BINARY, _INT), "bool": (_CLASSES, _TRUTH)}[kind]
    formula = next((table[name] for table in tables if name in table), None)
    return _OPERANDS.get(name, 0) if formula is None else arity(formula)


def _keeps_low_bits(name: str, operand: int, dtype: torch.dtype) -> bool:
    """Whether an operand's bits above those of the dtype do not matter, so that all wrap at once, behind."""
    return dtype != torch.int64 and (name in _LOW_BITS or (name == "bitwise_left_shift" and operand == 0))


def _common(node: fx.Node) -> torch.dtype:
    """The dtype in which torch compares."""
    a, b = (x.meta["val"] if isinstance(x, fx.Node) else x for x in node.args)
    return torch.result_type(a, b)


def _span(x: Value) -> tuple[int, int]:
    return (0, 1) if x.kind == "bool" else x.span


def _is_literal(x: Value) -> bool:
    return x.shape == () and x.text.lstrip("-").isdigit()
