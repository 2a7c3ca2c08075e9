"""Score modifications on the device: a record of two functions and the values they capture."""

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
    data: tuple


@triton.jit
def _same(data, score, b, h, q_idx, kv_idx):
    return score


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
def _softcap_slope(data, score, b, h, q_idx, kv_idx):
    t = tanh(score / data[0])
    return 1 - t * t


_SAME = DeviceScore(tl.constexpr(_same), tl.constexpr(_one), tl.constexpr(True), ())
_SOFTCAP = tl.constexpr(_softcap), tl.constexpr(_softcap_slope), tl.constexpr(False)


def record(score: scores.ScoreMod | None) -> DeviceScore:
    """The device form of a score modification; None is the identity."""
    match score:
        case None:
            return _SAME
        case scores.Softcap():
            return DeviceScore(*_SOFTCAP, (score.cap,))
    raise TypeError(f"no device form of {score!r}")
