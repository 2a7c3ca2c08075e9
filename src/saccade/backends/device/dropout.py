"""Dropout in kernels: the numbers of `saccade.call.dropout`, tile by tile. Triton and Gluon kernels call this alike."""

# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from saccade.backends.device import positions
from saccade.backends.device.positions import first_key, row_position
from saccade.backends.device.records import aggregate
from saccade.call import Call, dropout

ROUNDS = tl.constexpr(dropout.ROUNDS)
M0, M1 = (tl.constexpr(m) for m in dropout.MULTIPLIERS)
W0, W1 = (tl.constexpr(w) for w in dropout.STEPS)


class DeviceDropout(NamedTuple):
    """Dropout as kernels take it; None is no dropout."""

    state: Any
    """seed and offset, int64"""
    threshold: Any
    """A Dropout's threshold less 2^31: negative and odd, so that Triton never makes a constant of it."""
    rescale: Any
    """1 / (1 - p)"""
    positions: Any = ()
    """where rows and keys stand, if they are `placed`"""
    placed: Any = tl.constexpr(False)
    """constexpr"""


def device_args(call: Call) -> DeviceDropout | None:
    """The device form of dropout; None is none."""
    x = call.dropout
    if x is None:
        return None
    device_positions = positions.device_args(call)
    numbers = x.state, x.threshold - (1 << 31), x.rescale
    return (
        DeviceDropout(*numbers)
        if device_positions is None
        else DeviceDropout(*numbers, device_positions, tl.constexpr(True))
    )


@aggregate
class OpenDropout:
    """Dropout with its numbers in registers."""

    seed: Any
    offset: Any
    threshold: Any
    factor: Any
    """1 / (1 - p)"""
    placed: Any
    positions: Any


@triton.jit
def opened(dropout):
    """A DeviceDropout with its numbers read."""
    threshold = dropout.threshold * 2 + -2147483648
    seed = tl.load(dropout.state)
    offset = tl.load(dropout.state + 1)
    return OpenDropout(seed, offset, threshold, dropout.rescale, dropout.placed, dropout.positions)


@triton.jit
def quarters(x):
    """x [M, N] by bit 3 of its row and column: four [M / 16, 8, N / 16, 8], those of row 0 first."""
    x = x.reshape([x.shape[0] // 16, 2, 8, x.shape[1] // 16, 2, 8]).permute([0, 2, 3, 5, 1, 4])
    left, right = x.split()
    x00, x10 = left.split()
    x01, x11 = right.split()
    return x00, x01, x10, x11


@triton.jit
def whole(x00, x01, x10, x11):
    """[M, N] from its quarters."""
    x = tl.join(tl.join(x00, x10), tl.join(x01, x11)).permute([0, 4, 1, 2, 5, 3])
    return x.reshape([x.shape[0] * 16, x.shape[3] * 16])


@triton.jit
def philox(c0, c1, c2, c3, seed):
    """Four words, uint32, of four counters, uint32, and a key, int64."""
    k0 = seed.to(tl.uint32)
    k1 = (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(ROUNDS):  # pyright: ignore[reportGeneralTypeIssues]
        # One multiplication gives both words.
        a = c0.to(tl.uint64) * M0
        b = c2.to(tl.uint64) * M1
        c0 = (b >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = b.to(tl.uint32)
        c2 = (a >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = a.to(tl.uint32)
        k0 += W0
        k1 += W1
    return c0, c1, c2, c3


@triton.jit
def keep(numbers, like, b, h, q_idx, kv_idx):
    """Which probabilities of a tile like [M, N] stay: bool. Rows are queries, or keys if q_idx is [1, N].

    q_idx and kv_idx start at multiples of 16, and h changes there at most. In Gluon the result's layout equals that of
    `like` under another name: the caller converts it, which moves nothing.
    """
    if numbers.placed:
        return _keep_at(numbers, like, b, h, q_idx, kv_idx)
    else:
        return _keep_quarters(numbers, like, b, h, q_idx, kv_idx)


@triton.jit
def keep_unaligned(numbers, like, b, h, q_idx, kv_idx):
    """The same of indices that start anywhere."""
    if numbers.placed:
        return _keep_at(numbers, like, b, h, q_idx, kv_idx)
    else:
        zero = like.to(tl.int32, bitcast=True) * 0
        return _keep_each(numbers, b, h, q_idx + zero, kv_idx + zero, zero)


@triton.jit
def _keep_at(numbers, like, b, h, q_idx, kv_idx):
    """The same at any positions, which do not come in spans."""
    zero = like.to(tl.int32, bitcast=True) * 0
    p = row_position(numbers.positions.q, b, q_idx) + zero
    r = kv_idx + first_key(numbers.positions.k, b) + zero
    return _keep_each(numbers, b, h, p, r, zero)


@triton.jit
def _keep_each(numbers, b, h, p, r, zero):
    """Of positions [M, N]: four words for each probability, of which one counts. zero [M, N]"""
    c2 = ((numbers.offset >> 32).to(tl.int32) ^ b) + zero
    c3 = (numbers.offset.to(tl.int32) ^ h) + zero
    w0, w1, w2, w3 = philox(counter(p), counter(r), c2.to(tl.uint32), c3.to(tl.uint32), numbers.seed)
    odd = (r & 8) != 0
    word = tl.where((p & 8) != 0, tl.where(odd, w3, w2), tl.where(odd, w1, w0))
    return _kept(word, numbers.threshold)


@triton.jit
def _keep_quarters(numbers, like, b, h, q_idx, kv_idx):
    TRANSPOSED: tl.constexpr = q_idx.shape[0] == 1
    threshold = numbers.threshold
    # [M, N]
    zero = like.to(tl.int32, bitcast=True) * 0
    # [M / 16, 8, N / 16, 8]
    q, _, _, _ = quarters(q_idx + zero)
    kv, _, _, _ = quarters(kv_idx + zero)
    head, _, _, _ = quarters(h + zero)
    c2 = (numbers.offset >> 32).to(tl.int32) ^ b
    c3 = numbers.offset.to(tl.int32) ^ head
    w0, w1, w2, w3 = philox(counter(q), counter(kv), (c2 + q * 0).to(tl.uint32), c3.to(tl.uint32), numbers.seed)
    k0, k1, k2, k3 = _kept(w0, threshold), _kept(w1, threshold), _kept(w2, threshold), _kept(w3, threshold)
    if TRANSPOSED:
        return whole(k0, k2, k1, k3)
    else:
        return whole(k0, k1, k2, k3)


@triton.jit
def counter(i):
    """An index without its bit 3."""
    return ((i >> 4) * 8 + (i & 7)).to(tl.uint32)


@triton.jit
def _kept(word, threshold):
    return word.to(tl.int32, bitcast=True) >= threshold
