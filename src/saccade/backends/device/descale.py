"""What 8-bit operands stand for, as kernels read it: see `saccade.call.descale`."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from saccade.backends.device.records import FLAGS, plain_int, runtime_int
from saccade.call import Call
from saccade.call.descale import BLOCK as _BLOCK

SCALE_BLOCK = tl.constexpr(_BLOCK)
"""Rows, or keys, that share a factor."""


class FactorArgs(NamedTuple):
    """The factor of one operand, float32 (b, h_k, n). Strides and n are `runtime_int`s."""

    ptr: Any
    stride_b: Any
    stride_h: Any
    stride_n: Any
    blocks: Any
    there: Any
    """constexpr: else the factor is 1, and ptr some other tensor, as records hold no None on Triton 3.6"""
    blocked: Any
    """constexpr: one for each block of rows"""

    @staticmethod
    def of(factor: Tensor | None, other: Tensor) -> FactorArgs:
        if factor is None:
            nothing = runtime_int(0)
            return FactorArgs(other, nothing, nothing, nothing, nothing, FLAGS[False], FLAGS[False])
        (stride_b, stride_h, stride_n), blocks = map(runtime_int, factor.stride()), factor.shape[2]
        return FactorArgs(factor, stride_b, stride_h, stride_n, runtime_int(blocks), FLAGS[True], FLAGS[blocks > 1])


class DescaleArgs(NamedTuple):
    """The factors of q, k and v; kernels take None where operands have more bits."""

    q: Any
    k: Any
    v: Any


def device_args(call: Call) -> DescaleArgs | None:
    """The device form of a Call's descale, if it has one."""
    if call.descale is None:
        return None
    return DescaleArgs(*(FactorArgs.of(x, call.q) for x in call.descale.each))


@triton.jit
def factor_at(factor, b, h_k, row):
    """The factor of row, or key, `row` of sequence b: a float32 scalar."""
    if not factor.there:
        return 1.0
    else:
        offset = b.to(tl.int64) * plain_int(factor.stride_b) + h_k.to(tl.int64) * plain_int(factor.stride_h)
        if factor.blocked:
            block = tl.minimum(row // SCALE_BLOCK, plain_int(factor.blocks) - 1)
            offset += block.to(tl.int64) * plain_int(factor.stride_n)
        return tl.load(factor.ptr + offset)
