"""Keys and values that come while a call runs, in the order in which kernels take them: sequences with most keys first,
and of each one key head after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class ArrivalArgs(NamedTuple):
    """What a kernel reads; packed."""

    done: Tensor
    """int32 (1): how many steps of the copies are done"""
    steps: Tensor
    """int32 (sequences + 1, h_k): how many bring all keys of a head of a sequence that come"""
    coming: Tensor
    """int32 (sequences + 1): how many keys of a sequence come, its first ones"""


class Arrivals(NamedTuple):
    """Of one call. A backend with `WAITS_FOR_KEYS` waits in its kernel; else all have come before it begins."""

    args: ArrivalArgs
    come: Callable[[], None]
    """The current stream waits for all."""
