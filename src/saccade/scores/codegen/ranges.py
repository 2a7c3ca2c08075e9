"""The ranges of numbers: what 32 bits hold, what float32 holds exactly, and between which numbers a score lies."""

# pyright: reportOptionalSubscript=false

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from torch import fx

LONGEST = 1 << 22
"""Lengths with score functions: indices below it are exact in float32, and so are their differences."""
HEADS = 1 << 20
NARROW = (1 << 31) - 1
ANY = -(1 << 63), (1 << 63) - 1

Range = tuple[int, int]


def check_integers(values: Iterable[Any]) -> None:
    """
    Raises:
        ValueError: an integer that 64 bits do not hold.
    """
    for x in values:
        if isinstance(x, int) and not ANY[0] <= x <= ANY[1]:
            raise ValueError(f"integers that a function captures have 64 bits, from -2^63 to 2^63 - 1, got {x}")


def fits(span: Range) -> bool:
    return span[0] >= -NARROW - 1 and span[1] <= NARROW


def exact(span: Range) -> bool:
    return span[0] >= -LONGEST and span[1] <= LONGEST


def range_of(name: str, spans: list[Any], node: fx.Node) -> Range:  # noqa: C901 (a table of operations)
    """The range of an integer operation's results."""
    a = spans[0]
    b: Any = spans[1] if len(spans) > 1 else None
    match name:
        case "add":
            return a[0] + b[0], a[1] + b[1]
        case "sub":
            return a[0] - b[1], a[1] - b[0]
        case "mul":
            corners = [x * y for x in a for y in b]
            return min(corners), max(corners)
        case "neg":
            return -a[1], -a[0]
        case "abs":
            return 0 if a[0] <= 0 <= a[1] else min(map(abs, a)), max(map(abs, a))
        case "maximum":
            return max(a[0], b[0]), max(a[1], b[1])
        case "minimum":
            return min(a[0], b[0]), min(a[1], b[1])
        case "clamp":
            lo, hi = a
            if b is not None:
                lo, hi = max(lo, b[0]), max(hi, b[1])
            if len(spans) > 2 and spans[2] is not None:
                lo, hi = min(lo, spans[2][0]), min(hi, spans[2][1])
            return lo, hi
        case "sign" | "sgn":
            return -1, 1
        case "relu":
            return max(a[0], 0), max(a[1], 0)
        case "remainder":  # of the divisor's sign, and smaller; a divisor of 0 counts as 1
            most = max(b[1] - 1, 0)
            return min(b[0] + 1, 0), min(a[1], most) if a[0] >= 0 and b[0] >= 0 else most
        case "fmod":  # of the other's
            most = max(min(_size(a), _size(b) - 1), 0)
            return (0 if a[0] >= 0 else -most), (0 if a[1] <= 0 else most)
        case "bitwise_and" if a[0] >= 0 or b[0] >= 0:
            return 0, min(x[1] for x in (a, b) if x[0] >= 0)
        case "bitwise_or" | "bitwise_xor" if a[0] >= 0 and b[0] >= 0:
            return 0, (1 << max(a[1], b[1]).bit_length()) - 1
        case "bitwise_right_shift":
            return min(a[0], 0), max(a[1], 0)
        case "floor_divide" | "div":
            return (0 if a[0] >= 0 and b[0] >= 0 else -_size(a)), _size(a)
        case "pow":
            most = _size(a) ** (node.args[1] if isinstance(node.args[1], int) else 64)
            return -most, most
    return ANY


def _size(span: Range) -> int:
    return max(abs(span[0]), abs(span[1]))


Span = tuple[float, float]


def spread(name: str, spans: list[Span], keywords: Any) -> Span:  # noqa: C901 (a table of operations)
    """Between which numbers the results of an operation on floats lie.

    Raises:
        ValueError: not known, or not finite.
    """
    a = spans[0] if spans else (0.0, 0.0)
    b = spans[1] if len(spans) > 1 else a
    match name:
        case "add" | "sub" if keywords.get("alpha", 1) == 1 and len(spans) == 2:
            found = (a[0] + b[0], a[1] + b[1]) if name == "add" else (a[0] - b[1], a[1] - b[0])
        case "mul":
            found = _hull([x * y for x in a for y in b])
        case "div" if len(spans) == 2 and not keywords and not b[0] <= 0 <= b[1]:
            found = _hull([x / y for x in a for y in b])
        case "neg":
            found = -a[1], -a[0]
        case "abs":
            found = 0.0, max(-a[0], a[1])
        case "maximum" | "clamp_min":
            found = max(a[0], b[0]), max(a[1], b[1])
        case "minimum" | "clamp_max":
            found = min(a[0], b[0]), min(a[1], b[1])
        case "where" if len(spans) == 3:
            found = _hull([*spans[1], *spans[2]])
        case "tanh" | "erf" | "sigmoid" | "sin" | "cos" | "ge" | "gt" | "le" | "lt" | "eq" | "ne" | "bitwise_and":
            found = -1.0, 1.0
        case "scalar_tensor" | "full_like" | "_to_copy" | "alias" | "clone" | "detach" | "lift_fresh_copy":
            found = a
        case "ones_like" | "zeros_like":
            found = 0.0, 1.0
        case _:
            raise ValueError(name)
    if not all(map(math.isfinite, found)):
        raise ValueError(f"{name} of {spans}")
    return found


def _hull(values: list[float]) -> Span:
    return min(values), max(values)
