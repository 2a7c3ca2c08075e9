"""A Program as the source of Triton functions, which Triton and Gluon kernels call alike.

Every function takes `data` first: for each captured tensor its pointer, and a stride and a size for each dimension;
then the numbers. Floats are float32. Integers are 32 bits wide where their range, followed from the indices, allows it.
"""

# torch.fx types the arguments of nodes as unions of everything.
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportArgumentType=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOptionalSubscript=false, reportCallIssue=false
# pyright: reportOptionalIterable=false, reportReturnType=false, reportOperatorIssue=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from saccade.scores.codegen.arguments import Arguments
from saccade.scores.codegen.program import Program
from saccade.scores.codegen.ranges import ANY, HEADS, LONGEST, NARROW, exact, fits, limits_of, modulo, range_of, within
from saccade.scores.codegen.reads import EmitOptions, Reads, Value, kind_of
from saccade.scores.codegen.texts import arity, literal, low_bits, power, rounded
from saccade.scores.recording.shapes import broadcast_shape
from saccade.scores.recording.tape import TILE
from saccade.scores.recording.trace import TILE_SHAPES, K, Q, Refused, in_order, name_of

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


class Emitter(Reads):
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
        place = self.start(len(self.program.ranks)) + i
        if i in self.options.wide_integers:
            self.used[f"n{i}"] = f"far_int(data[{place}])"
            return Value(f"n{i}", "wide")
        if self.program.integral[i]:
            self.used[f"n{i}"] = f"(plain_int(data[{place}]) - {LONGEST})"
            dtype = node.meta["val"].dtype
            least, most = (0, 1) if dtype == torch.bool else limits_of(dtype)
            # The launch makes sure of it.
            return Value(f"n{i}", "int", (), (max(least, -LONGEST), min(most, LONGEST)))
        self.used[f"n{i}"] = f"data[{place}]"
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
        raise Refused(f"{name.removesuffix('_backward')} has no device form; write it with other operations", None)

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
            raise Refused(f"{name} of integers has no device form; write it with other operations", None)
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
            raise Refused(f"{name} of integers has no device form; write it with other operations", None)
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
            raise Refused(f"{dtype} has no device form; write x.to(torch.int64)", None)
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
        raise Refused(f"{name} of booleans has no device form; write it with other operations", None)

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
