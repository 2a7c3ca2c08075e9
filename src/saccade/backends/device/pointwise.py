"""Pointwise functions that Triton lacks; emitted score functions call them."""

from __future__ import annotations

import triton
import triton.language as tl

from saccade.backends.device.records import LOG2E, far_int, plain_int

INF = tl.constexpr(float("inf"))
_MAGIC = tl.constexpr(12582912.0)
"""1.5 · 2^23: the last bit of a float32 here is 1."""
_MAGIC_BITS = tl.constexpr(0x4B400000)


@triton.jit
def index_float(i):
    """float32 of an integer below 2^22 in size, at the full rate of additions; a conversion has a quarter of it."""
    return (i + _MAGIC_BITS).to(tl.float32, bitcast=True) - _MAGIC


@triton.jit
def widened(i):
    return i.to(tl.int64)


@triton.jit
def inside(i, size):
    return tl.minimum(i, size - 1)


@triton.jit
def wrapped(i, size):
    """An index that counts from the end where it is negative."""
    return tl.minimum(tl.maximum(tl.where(i < 0, i + size, i), 0), size - 1)


@triton.jit
def tanh(x):
    """To float32 accuracy: the exponential form loses relative accuracy near zero, where five terms are exact."""
    decay = tl.exp2(tl.abs(x) * (-2 * LOG2E))
    far = (1 - decay) / (1 + decay)
    square = x * x
    series = 1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835))))
    return tl.where(square < 0.01, x * series, tl.where(x < 0, -far, far))


@triton.jit
def fast_tanh(x):
    """One instruction since sm_75, to 11 bits: as many as the fp16 that a probability is rounded to."""
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def sigmoid(x):
    return 1 / (1 + tl.exp(-x))


@triton.jit
def expm1(x):
    series = x * (1 + x * (1 / 2 + x * (1 / 6 + x * (1 / 24 + x * (1 / 120 + x * (1 / 720))))))
    return tl.where(tl.abs(x) < 0.2, series, tl.exp(x) - 1)


@triton.jit
def log1p(x):
    """Kahan's formula: the quotient restores what 1 + x loses."""
    u = 1 + x
    return tl.where(u == 1, x, tl.where(u == INF, u, tl.log(u) * x / tl.where(u == 1, 1.0, u - 1)))


@triton.jit
def truncated(x):
    return tl.where(x < 0, tl.ceil(x), tl.floor(x))


@triton.jit
def rounded(x):
    """To the nearest integer, halves to even."""
    size = tl.abs(x)
    near = (size + 8388608.0) - 8388608.0
    return tl.where(size < 8388608.0, tl.where(x < 0, -near, near), x)


@triton.jit
def signed(x):
    return tl.where(x > 0, x * 0 + 1, tl.where(x < 0, x * 0 - 1, x * 0))


@triton.jit
def larger(x, y):
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def smaller(x, y):
    return tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def remainder(x, y):
    """Of the sign of y, as Python's."""
    r = fmod(x, y)
    return tl.where((r != 0) & ((r < 0) != (y < 0)), r + y, r)


@triton.jit
def fmod(x, y):
    r = x - truncated(x / y) * y
    # The quotient is rounded: one step too far is taken back.
    return tl.where((r != 0) & ((r < 0) != (x < 0)), tl.where((r < 0) == (y < 0), r - y, r + y), r)


@triton.jit
def divisor(j):
    """j, with 1 in the place of 0, so that results stay in the ranges that places in memory rely on."""
    return tl.where(j == 0, 1, j)


@triton.jit
def quotient(x, j):
    """floor(x / j) of whole float32 and an integer that is one number, up to 2^22 in size, by one multiply-add.

    (x + c) / j lies 1 / |2j| or more off all ties, and the integer next to it is the floor. x + c is exact and below
    2^23, so that r, off by 2^-24 of itself, moves the product by less than that; the multiply-add rounds once.
    """
    r = tl.div_rn(1.0, j.to(tl.float32))
    c = tl.where(j < 0, -0.5, 0.5) - 0.5 * j.to(tl.float32)
    return tl.fma(x + c, r, _MAGIC).to(tl.int32, bitcast=True) - _MAGIC_BITS


@triton.jit
def floor_divided(i, j):
    quotient = i // j
    rest = i - quotient * j
    return tl.where((rest != 0) & ((rest < 0) != (j < 0)), quotient - 1, quotient)


@triton.jit
def floor_remainder(i, j):
    rest = i % j
    return tl.where((rest != 0) & ((rest < 0) != (j < 0)), rest + j, rest)


@triton.jit
def left_shift(i, j, BITS: tl.constexpr):
    """i << j of BITS bits; 0 where no such bit exists."""
    j = i * 0 + j
    return tl.where((j < 0) | (j >= BITS), i * 0, i << (j & (BITS - 1)))


@triton.jit
def right_shift(i, j, BITS: tl.constexpr):
    """i >> j of BITS bits; copies of the sign where no such bit exists."""
    j = i * 0 + j
    return i >> tl.where((j < 0) | (j >= BITS), BITS - 1, j)


@triton.jit
def power(x, y):
    # A number becomes a tensor, as the interpreter wants it.
    y = tl.where(x == x, y, y)
    x = tl.where(y == y, x, x)
    size = tl.exp2(y * tl.log2(tl.abs(x)))
    whole = tl.floor(y) == y
    odd = whole & (tl.floor(y * 0.5) != y * 0.5)
    result = tl.where(x < 0, tl.where(whole, tl.where(odd, -size, size), INF - INF), size)
    result = tl.where((x == 0) & (y > 0), 0.0, result)
    return tl.where((y == 0) | (x == 1), 1.0, result)


@triton.jit
def distances(q_idx, kv_idx):
    """What `diagonals` sums over: near and far [1, block_k] are every kv_idx - q_idx of a tile, and one below all."""
    near = kv_idx - tl.min(q_idx)
    return near, near - kv_idx.shape[1]


@triton.jit
def diagonals(x):
    """Sums of x [block_q, block_k], block_q <= block_k, over equal distances: near and far [1, block_k]."""
    # [block_q, block_k]
    N: tl.constexpr = x.shape[1]
    turned = tl.arange(0, x.shape[0])[:, None] + tl.arange(0, N)[None, :]
    skewed = tl.gather(x, turned % N, 1)
    # [1, block_k]
    near = tl.sum(tl.where(turned < N, skewed, 0.0), 0, keep_dims=True)
    far = tl.sum(tl.where(turned < N, 0.0, skewed), 0, keep_dims=True)
    return near, far


@triton.jit
def add_diagonals(ADD: tl.constexpr, target, near_offset, far_offset, x):
    """Adds the sums over equal distances at their places. Beyond the reach of a table a whole tile has one offset: one
    addition, where one for each distance would wait for one another."""
    first = tl.minimum(tl.min(near_offset), tl.min(far_offset))
    last = tl.maximum(tl.max(near_offset), tl.max(far_offset))
    if first == last:
        ADD(target, first, tl.sum(x))
    else:
        near, far = diagonals(x)
        ADD(target, near_offset, near)
        ADD(target, far_offset, far)


NAMES = {
    name: globals()[name]
    for name in (
        "INF", "index_float", "widened", "inside", "wrapped", "tanh", "fast_tanh", "sigmoid", "expm1", "log1p",
        "truncated", "rounded", "signed", "larger", "smaller", "remainder", "fmod", "divisor", "quotient",
        "floor_divided", "floor_remainder", "left_shift", "right_shift", "power", "distances", "add_diagonals",
    )
} | {"tl": tl, "triton": triton, "plain_int": plain_int, "far_int": far_int}  # fmt: skip
"""What emitted source may name."""
