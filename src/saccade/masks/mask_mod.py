"""Masks that a function of the indices says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from saccade import scores
from saccade.masks.base import Mask
from saccade.masks.interval import Extent, Interval, everything, nothing
from saccade.scores.recording.compile_constant import knows_inversion

Function = Callable[..., Tensor]
"""(b, h, q_idx, kv_idx) -> bool"""


@dataclass(frozen=True, eq=False)
class MaskMod(Mask):
    """Any predicate. It is no interval: the list of tiles that is made of it says where nothing is visible."""

    kind: ClassVar[str] = "mask_mod"
    exact: ClassVar[bool] = False  # pyright: ignore[reportIncompatibleVariableOverride]
    listed: ClassVar[bool] = True  # pyright: ignore[reportIncompatibleVariableOverride]
    predicate: scores.Traced
    """The function as a graph, with what it captured."""

    @property
    def identity(self) -> str:
        return f"mask_mod[{self.predicate.identity}]"

    @property
    def indices(self) -> frozenset[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.predicate.indices

    def _ints(self) -> list[int]:
        return self.predicate.ints

    def _floats(self) -> list[float]:
        return self.predicate.floats

    def _tensors(self) -> list[Tensor]:
        return list(self.predicate.tensors)

    @staticmethod
    def of_tensors(word: str, ints: list[int], floats: list[float], tensors: list[Tensor]) -> MaskMod:
        """The inverse of `identity`, `ints`, `floats` and `tensors`; takes from the front of the lists."""
        identity = word.removeprefix("mask_mod[").removesuffix("]")
        return MaskMod(scores.Traced.of_tensors(identity, tensors, ints, floats))

    def complaint(self, b: int, h: int, s_q: int, s_k: int) -> str | None:
        if max(s_q, s_k) > scores.LONGEST:
            return f"mask functions take lengths up to {scores.LONGEST}, got {s_q} and {s_k}"
        return scores.short(self.predicate.identity, self.predicate.tensors, scores.Sizes(b, h, s_q, s_k))

    def packed_complaint(self, b: int, h: int, s_q: int, s_k: int) -> str | None:
        if max(s_q, s_k) > scores.LONGEST:
            return f"mask functions take lengths up to {scores.LONGEST}, got {s_q} and {s_k}"
        return scores.short(self.predicate.identity, self.predicate.tensors, scores.Sizes(b, h, s_q, s_k, exact=False))

    def sees(self, extent: Extent, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return self.predicate.holds(b, h, q_idx, kv_idx)

    def hull(self, extent: Extent) -> Interval:
        return everything(extent)

    def core(self, extent: Extent) -> Interval:
        return nothing(extent)

    def __repr__(self) -> str:
        return f"mask_mod({self.predicate.kind})"


class Written(MaskMod):
    """A predicate as it was written: what it is, it is in each call anew."""

    def __init__(self, fn: Function, name: str | None = None) -> None:
        object.__setattr__(self, "fn", fn)
        object.__setattr__(self, "name", name)

    fn: Function
    name: str | None

    @property
    def predicate(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Of this moment."""
        return scores.predicate(self.fn, self.name)

    def bound(self) -> Mask:
        return MaskMod(self.predicate)

    def sees(self, extent: Extent, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """By the user's own function."""
        return scores.evaluated(self.fn, b, h, q_idx, kv_idx)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.fn == self.fn

    def __hash__(self) -> int:
        return hash(self.fn)

    def __repr__(self) -> str:
        return f"mask_mod({self.name or scores.name_of(self.fn)})"

    def __reduce__(self) -> Any:
        return mask_mod, (self.fn,)


def mask_mod(fn: Function) -> Mask:
    """Row i sees key j where `fn(b, h, q_idx, kv_idx)` is true: any predicate of pointwise torch operations.

    Each call of attention has the mask that the function says at that call, numbers and tensors included. Tiles of
    which nothing is visible are found on q's device, again where the function, its numbers or its tensors have changed,
    and never visited; where everything is, nothing is tested. What intervals can say, such as `causal() &
    mask_mod(fn)`, is not even looked at. Writes through `.data`, numpy or dlpack, which torch does not count, have to
    be told of: `mask.refresh()`.

    Args:
        fn: a function of four integer tensors that broadcast to a tile: batch row, query head, query, key. Rows and
            keys count from the first one: there is no alignment at the bottom right. Captured tensors are on
            q's device.

    Raises:
        TypeError: fn is not callable.
        ValueError: a function that cannot be traced, with what to write instead; see `ScoreMod`.

    >>> print(mask_mod(lambda b, h, q_idx, kv_idx: (q_idx - kv_idx) % 2 == 0).draw(4))
    mask_mod(lambda)
    ■ · ■ ·
    · ■ · ■
    ■ · ■ ·
    · ■ · ■
    """
    if not callable(fn):
        raise TypeError(f"mask_mod needs a function of (b, h, q_idx, kv_idx), got {fn!r}")
    knows_inversion()
    mask = Written(fn)
    if not torch.compiler.is_compiling():
        mask.bound()  # says what is wrong with a function here
    return mask


@dataclass(frozen=True, eq=False)
class OfRow(Mask):
    """A predicate as one batch row sees it, which calls itself number 0."""

    kind: ClassVar[str] = "mask_mod"
    exact: ClassVar[bool] = False  # pyright: ignore[reportIncompatibleVariableOverride]
    listed: ClassVar[bool] = True  # pyright: ignore[reportIncompatibleVariableOverride]
    mask: Mask
    b: int

    def bound(self) -> Mask:
        return OfRow(self.mask.bound(), self.b)

    @property
    def identity(self) -> str:
        return self.mask.identity

    @property
    def indices(self) -> frozenset[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.mask.indices - {"b"}

    def _ints(self) -> list[int]:
        return [self.b, *self.mask.ints]

    def _floats(self) -> list[float]:
        return self.mask.floats

    def _tensors(self) -> list[Tensor]:
        return self.mask.tensors

    def sees(self, extent: Extent, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return self.mask.sees(extent, b + self.b, h, q_idx, kv_idx)

    def hull(self, extent: Extent) -> Interval:
        return everything(extent)

    def core(self, extent: Extent) -> Interval:
        return nothing(extent)
