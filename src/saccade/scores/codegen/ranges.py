"""The ranges of integers and of scores: what 32 bits hold, and what float32 holds exactly."""

# pyright: reportOptionalSubscript=false

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from saccade.util.arguments import MOST_FLOAT32

LONGEST = 1 << 22
"""The largest length with score functions: indices below it and their differences are exact in float32."""
HEADS = 1 << 20
NARROW = (1 << 31) - 1
ANY = -(1 << 63), (1 << 63) - 1

Range = tuple[int, int]


def check_numbers(values: Iterable[Any], dtype: torch.dtype) -> None:
    """Raises ValueError for an integer beyond 64 bits, or a finite float that this dtype of scores does not hold."""
    for x in values:
        if isinstance(x, int) and not ANY[0] <= x <= ANY[1]:
            raise ValueError(f"integers that a function captures have 64 bits, from -2^63 to 2^63 - 1, got {x}")
        if isinstance(x, float) and dtype == torch.float32 and MOST_FLOAT32 < abs(x) < math.inf:
            raise ValueError(
                f"numbers that a function computes with are float32, up to {MOST_FLOAT32:.4g}, or infinite, got {x}: "
                "write -math.inf where no key is seen"
            )


def fits(span: Range) -> bool:
    return span[0] >= -NARROW - 1 and span[1] <= NARROW


def within(span: Range, limits: Range) -> bool:
    return span[0] >= limits[0] and span[1] <= limits[1]


def limits_of(dtype: torch.dtype) -> Range:
    """What a dtype of integers holds."""
    limits = torch.iinfo(dtype)
    return limits.min, limits.max


def modulo(x: int, dtype: torch.dtype) -> int:
    """An integer as a dtype has it."""
    least, most = limits_of(dtype)
    return (x - least) % (most - least + 1) + least


def exact(span: Range) -> bool:
    return span[0] >= -LONGEST and span[1] <= LONGEST


def _interval(name: str, spans: list[Any]) -> Any:
    """The interval of a sum, product, bound or absolute value of intervals; None for other operations."""
    a = spans[0] if spans else (0, 0)
    b = spans[1] if len(spans) > 1 else a
    match name:
        case "add":
            return a[0] + b[0], a[1] + b[1]
        case "sub":
            return a[0] - b[1], a[1] - b[0]
        case "mul":
            return _hull([x * y for x in a for y in b])
        case "neg":
            return -a[1], -a[0]
        case "abs":
            return 0 if a[0] <= 0 <= a[1] else min(map(abs, a)), max(map(abs, a))
        case "maximum" | "clamp_min":
            return max(a[0], b[0]), max(a[1], b[1])
        case "minimum" | "clamp_max":
            return min(a[0], b[0]), min(a[1], b[1])
    return None


def range_of(name: str, spans: list[Any], node: fx.Node) -> Range:  # noqa: C901 (a table of operations)
    """The range of an integer operation's results."""
    if (interval := _interval(name, spans)) is not None:
        return interval
    a = spans[0]
    b: Any = spans[1] if len(spans) > 1 else None
    match name:
        case "clamp":
            for bound, span in zip(("maximum", "minimum"), spans[1:], strict=False):
                a = a if span is None else _interval(bound, [a, span])
            return a
        case "sign" | "sgn":
            return -1, 1
        case "relu":
            return max(a[0], 0), max(a[1], 0)
        case "remainder":  # of the divisor's sign, and smaller; a divisor of 0 counts as 1
            most = max(b[1] - 1, 0)
            return min(b[0] + 1, 0), min(a[1], most) if a[0] >= 0 and b[0] >= 0 else most
        case "fmod":  # of the dividend's sign
            most = max(min(_size(a), _size(b) - 1), 0)
            return (0 if a[0] >= 0 else -most), (0 if a[1] <= 0 else most)
        case "bitwise_and" if a[0] >= 0 or b[0] >= 0:
            return 0, min(x[1] for x in (a, b) if x[0] >= 0)
        case "bitwise_or" | "bitwise_xor" if a[0] >= 0 and b[0] >= 0:
            return 0, (1 << max(a[1], b[1]).bit_length()) - 1
        case "bitwise_and" | "bitwise_or" | "bitwise_xor":
            most = (1 << max(x.bit_length() if x >= 0 else (~x).bit_length() for x in (*a, *b))) - 1
            return ~most, most
        case "bitwise_not":
            return ~a[1], ~a[0]
        case "bitwise_left_shift" if b[0] >= 0 and b[1] < 64:
            return _hull([x << y for x in a for y in b])
        case "bitwise_right_shift":
            return min(a[0], 0), max(a[1], 0)
        case "floor_divide" | "div" if b[0] >= 0:
            return min(a[0], 0), max(a[1], 0)
        case "floor_divide" | "div":
            return -_size(a), _size(a)
        case "pow":
            most = _size(a) ** (node.args[1] if isinstance(node.args[1], int) else 64)
            return -most, most
    return ANY


def _size(span: Range) -> int:
    return max(abs(span[0]), abs(span[1]))


def spread(name: str, spans: list[tuple[float, float]], keywords: Any) -> tuple[float, float]:
    """Between which numbers an operation's results lie. Raises ValueError if they are not known, or not finite."""
    match name:
        case "add" | "sub" if keywords.get("alpha", 1) != 1 or len(spans) != 2:
            span = None
        case "div" if len(spans) == 2 and not keywords and not spans[1][0] <= 0 <= spans[1][1]:
            span = _hull([x / y for x in spans[0] for y in spans[1]])
        case "where" if len(spans) == 3:
            span = _hull([*spans[1], *spans[2]])
        case "tanh" | "erf" | "sigmoid" | "sin" | "cos" | "ge" | "gt" | "le" | "lt" | "eq" | "ne" | "bitwise_and":
            span = -1.0, 1.0
        case "scalar_tensor" | "full_like" | "_to_copy" | "alias" | "clone" | "detach" | "lift_fresh_copy":
            span = spans[0]
        case "ones_like" | "zeros_like":
            span = 0.0, 1.0
        case _:
            span = _interval(name, spans)
    if span is None or not all(map(math.isfinite, span)):
        raise ValueError(f"the range of {name} of {spans} is not known")
    return span


def _hull(values: list[Any]) -> Any:
    return min(values), max(values)
