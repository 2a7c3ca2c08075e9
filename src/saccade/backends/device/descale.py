"""What 8-bit operands stand for, as kernels read it: see `saccade.call.descale`."""

# pyright: reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from saccade.backends.device import block_d
from saccade.backends.device.records import FLAGS, aggregate, plain_int, runtime_int
from saccade.call import Call
from saccade.call.descale import BLOCK as _BLOCK
from saccade.call.descale import EIGHT_BITS
from saccade.util import hardware

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


# 8-bit queries, keys and values on the device, in the type that products take, and what their products are times.
#
# float16 holds every number of both 8-bit types, so products are exact there. A row of bfloat16 queries, which may be
# out of float16's range, is multiplied by a power of two first, and its scores are divided by it.


def readable(x: Tensor) -> Tensor:
    """x as kernels load it: bytes, where Triton has no numbers of its type (see `widened`)."""
    if x.dtype == torch.float8_e4m3fn and not hardware.has_e4m3(x.device):
        return x.view(torch.uint8)
    return x


def products(call: Call) -> bool:
    """Whether products are those of bytes; of others, such as few columns, float16's."""
    q = call.q
    return q.dtype in EIGHT_BITS and hardware.has_e4m3(q.device) and block_d(q.shape[3]) >= LEAST_COLUMNS


def converts(device: torch.device) -> bool:
    """Whether the device has instructions between 8-bit numbers and others, and kernels may use them."""
    word = hardware.name(device)  # that of a CPU: what the compile gate compiles for
    return not knobs.runtime.interpret and (word == "cpu" or (word.startswith("sm") and int(word[2:]) >= 89))


LEAST_COLUMNS = 32
"""What one product of bytes takes at a time."""


@triton.jit
def factor_of_all(x, b, h):
    """The factor of one operand for all its rows; 1 where each block has its own."""
    if x.blocked:
        return 1.0
    else:
        return factor_at(x, b, h, 0)


@triton.jit
def factor_of_block(x, b, h, row):
    """The factor of the block of one row; 1 where all rows share one."""
    if x.blocked:
        return factor_at(x, b, h, row)
    else:
        return 1.0


@triton.constexpr_function
def _bits(dtype):
    return dtype.primitive_bitwidth


@triton.jit
def widened(x, dtype: tl.constexpr):
    """8-bit numbers in a wider type; others as they are."""
    if _bits(x.dtype) > 8:
        return x
    elif x.dtype == tl.uint8:
        # The bits of e4m3 are those of a float16 2^8 times smaller, but for NaN, of which e4m3 has two.
        byte = x.to(tl.uint16)
        half = (((byte & 0x80) << 8) | ((byte & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256
        return tl.where((byte & 0x7F) == 0x7F, float("nan"), half).to(dtype)
    else:
        return x.to(tl.float16).to(dtype)


@triton.jit
def product_scale(scale, descale, b, h, row):
    """What scores are products times, a number or [block_q, 1], but for a factor of blocks of keys. `row` [block_q]:
    numbers of rows in sequence b."""
    scale *= factor_of_all(descale.q, b, h) * factor_of_all(descale.k, b, h)
    if descale.q.blocked:
        return (scale * factor_at(descale.q, b, h, row))[:, None]
    else:
        return scale


@triton.jit
def wide_queries(x, scale):
    """Query rows [block_q, d] as products with `widened` keys take them, and the scale of these products."""
    if x.dtype == tl.bfloat16:
        x = x.to(tl.float32)
        # By the power of two of its largest number a row ends below 2^15. Both factors are normal numbers.
        power = tl.maximum(tl.max(tl.abs(x), 1).to(tl.int32, bitcast=True) >> 23, 15)
        up = ((268 - power) << 23).to(tl.float32, bitcast=True)
        return (x * up[:, None]).to(tl.float16), scale * ((power - 14) << 23).to(tl.float32, bitcast=True)[:, None]
    else:
        return widened(x, tl.float16), scale


@triton.jit
def queries(x, scale, descale, b, h, row):
    """`wide_queries` and their `product_scale`; what has more bits stays as it is."""
    if descale is None:
        return x, scale
    else:
        return wide_queries(x, product_scale(scale, descale, b, h, row))


@triton.jit
def values(acc, descale, b, h):
    """Sums of values times the factor of all of them."""
    if descale is None:
        return acc
    else:
        return acc * factor_of_all(descale.v, b, h)


@aggregate
class WordRows:
    """TensorArgs of bytes, read in words of several."""

    ptr: Any
    stride_b: Any
    stride_h: Any
    stride_s: Any
    unit: Any
    """constexpr: words in a unit of the strides"""
    wide: Any


@triton.jit
def in_words(x, WORD: tl.constexpr):
    """The same tensor in words of WORD bytes, 1, 2 or 4; its rows start at multiples of 16."""
    ptr = x.ptr
    if WORD > 1:
        ptr = ptr.to(tl.pointer_type(tl.int16 if WORD == 2 else tl.int32), bitcast=True)
    # Also of bytes: returned as it came, a NamedTuple's constexprs would be tensors on Triton 3.6.
    return WordRows(ptr, x.stride_b, x.stride_h, x.stride_s, x.unit // WORD, x.wide)


@triton.jit
def _byte_of(words, number: tl.constexpr, dtype: tl.constexpr):
    byte = (words >> 8 * number).to(tl.uint8)
    return widened(byte if dtype == tl.uint8 else byte.to(dtype, bitcast=True), tl.float16)


@triton.constexpr_function
def _conversion(number, dtype):
    """PTX: bytes `number` and `number + 1` of two words; $0 and $1 have each of them of both words, in float16."""
    kind = "e4m3x2" if dtype == tl.float8e4nv else "e5m2x2"
    picked = sum(offset << 4 * i for i, offset in enumerate((number, number + 4, number + 1, number + 5)))
    return f"""{{
        .reg .b16 x, y; .reg .b32 picked;
        prmt.b32 picked, $2, $3, {picked}; mov.b32 {{x, y}}, picked;
        cvt.rn.f16x2.{kind} $0, x; cvt.rn.f16x2.{kind} $1, y;
    }}"""


@triton.jit
def bytes_of(words, number: tl.constexpr, dtype: tl.constexpr, CONVERTS: tl.constexpr):
    """Bytes `number` and `number + 1` of each word, counted from the lowest, in float16. CONVERTS: the GPU has an
    instruction for that."""
    if CONVERTS and words.dtype == tl.int32:
        return tl.inline_asm_elementwise(
            _conversion(number, dtype), "=r,=r,r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    else:
        return _byte_of(words, number, dtype), _byte_of(words, number + 1, dtype)
