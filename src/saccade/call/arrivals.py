"""Keys and values that come while a call runs, in the order in which kernels take them: sequences with most keys first,
and of each one key head after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class ArrivalArgs(NamedTuple):
    """The arguments of a kernel that waits for keys; packed."""

    done: Tensor
    """int32 (1): how many steps of the copies are done"""
    steps: Tensor
    """int32 (sequences + 1, h_k): how many bring all keys of a head of a sequence that come"""
    coming: Tensor
    """int32 (sequences + 1): how many keys of a sequence come, its first ones"""


class Arrivals(NamedTuple):
    """The keys of one call that come while it runs. A backend with `WAITS_FOR_KEYS` waits for them in its kernel.
    Others begin when all have come."""

    args: ArrivalArgs
    come: Callable[[], None]
    """The current stream waits for all."""
