"""Numbers and powers as the source of Triton functions."""

from __future__ import annotations

import math
import string
from typing import Any

import torch


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
