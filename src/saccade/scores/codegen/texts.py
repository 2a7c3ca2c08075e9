"""Numbers and powers as the source of Triton functions."""

from __future__ import annotations

import math
from typing import Any


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
