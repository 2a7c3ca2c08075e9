"""One call of `attention` as data: its arguments, checked, and the form in which they pass through an operator."""

from saccade.call.call import Call, Sequence, aligned, eight_bit_gradients, needs_gradient, strides
from saccade.call.check import autocast, check_call
from saccade.call.flatten import (
    SCHEMA,
    Static,
    flatten,
    joined,
    operator,
    outline,
    programs,
    read_header,
    savable,
    split,
    unflatten,
)

__all__ = [
    "SCHEMA", "Call", "Sequence", "Static", "aligned", "autocast", "check_call", "eight_bit_gradients", "flatten",
    "joined", "needs_gradient", "operator", "outline", "programs", "read_header", "savable", "split", "strides",
    "unflatten",
]  # fmt: skip
