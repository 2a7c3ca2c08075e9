"""Score modifications on the device: a record of two functions and the values they capture."""

# pyright: reportCallIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from saccade import scores
from saccade.backends.device.records import LOG2E


class DeviceScore(NamedTuple):
    apply: Any
    """(data, score, b, h, q_idx, kv_idx) -> modified score; natural units, float32"""
    slope: Any
    """(data, score, b, h, q_idx, kv_idx) -> d modified / d score"""
    identity: Any
    """constexpr: there is nothing to do"""
    parts: Any
    """(data) -> inside, outside: numbers with apply(score) = outside core(inside score); outside > 0"""
    core: Any
    """(data, score, b, h, q_idx, kv_idx) -> score; what is left of apply when the scale takes in what is linear"""
    data: tuple


@triton.jit
def _same(data, score, b, h, q_idx, kv_idx):
    return score


@triton.jit
def _no_parts(data):
    return 1.0, 1.0


@triton.jit
def _one(data, score, b, h, q_idx, kv_idx):
    return score * 0 + 1


@triton.jit
def tanh(x):
    """To float32 accuracy: the exponential form loses relative accuracy near zero, where five terms are exact."""
    decay = tl.exp2(tl.abs(x) * (-2 * LOG2E))
    far = (1 - decay) / (1 + decay)
    square = x * x
    series = 1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835))))
    return tl.where(square < 0.01, x * series, tl.where(x < 0, -far, far))


@triton.jit
def _softcap(data, score, b, h, q_idx, kv_idx):
    return data[0] * tanh(score / data[0])


@triton.jit
def fast_tanh(x):
    """One instruction since sm_75, to 11 bits: as many as the fp16 that a probability is rounded to."""
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _softcap_parts(data):
    return 1 / data[0], data[0]


@triton.jit
def _softcap_core(data, score, b, h, q_idx, kv_idx):
    return fast_tanh(score)


@triton.jit
def _softcap_slope(data, score, b, h, q_idx, kv_idx):
    t = tanh(score / data[0])
    return 1 - t * t


def _functions(*functions: Any) -> tuple[Any, ...]:
    return tuple(map(tl.constexpr, functions))


_SAME = DeviceScore(*_functions(_same, _one, True, _no_parts, _same), ())
UNCHANGED = DeviceScore(*_functions(_same, _one, False, _no_parts, _same), ())
"""The identity for kernels that would take short cuts with `_SAME`."""
_SOFTCAP = _functions(_softcap, _softcap_slope, False, _softcap_parts, _softcap_core)


def record(score: scores.ScoreMod | None) -> DeviceScore:
    """The device form of a score modification; None is the identity."""
    match score:
        case None:
            return _SAME
        case scores.Softcap():
            return DeviceScore(*_SOFTCAP, (score.cap,))
    raise TypeError(f"no device form of {score!r}")
