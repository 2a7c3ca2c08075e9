"""Masks that are functions of the indices."""

# Properties of masks are plain attributes of some, and computed by others.
# pyright: reportIncompatibleVariableOverride=false

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from saccade import scores
from saccade.arguments import broadcasts
from saccade.masks.base import Mask, PredicateMask, WrappedMask
from saccade.masks.hull import Extent

Function = Callable[..., Tensor]
"""(b, h, q_idx, kv_idx) -> bool"""


@dataclass(frozen=True, eq=False)
class MaskMod(PredicateMask):
    """A predicate as it is in one call."""

    predicate: scores.Traced
    """The function as a graph, with what it captured."""
    form: tuple[int, int, int, int] | None
    """(b or 1, h_q or 1, s_q, s_k) of a BlockMask, which is for calls of one shape, all of whose rows are in use."""

    @property
    def of_shape(self) -> bool:
        return self.form is not None

    @property
    def identity(self) -> str:
        return f"mask_mod[{self.predicate.identity}]"

    @property
    def indices(self) -> frozenset[str]:
        return self.predicate.indices

    def flat(self, of: type) -> list[Any]:
        predicate = self.predicate
        return [*(predicate.ints if of is int else predicate.floats if of is float else predicate.tensors)]

    def shape_error(self, sizes: scores.Sizes) -> str | None:
        b, h, s_q, s_k, exact = sizes
        form = self.form
        if form is not None and not exact and (error := sequences_shape_error("the BlockMask", form, sizes)):
            return error
        if form is not None and exact and not (broadcasts(form[:2], (b, h)) and form[2:] == (s_q, s_k)):
            return f"the BlockMask is for (b, h_q, s_q, s_k) = {form}, and the call has {(b, h, s_q, s_k)}"
        if max(s_q, s_k) > scores.LONGEST:
            return f"mask functions take lengths up to {scores.LONGEST}, got {s_q} and {s_k}"
        return scores.short(self.predicate.identity, self.predicate.tensors, sizes)

    def sees(self, extent: Extent, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return self.predicate.holds(b, h, extent.q_position(b, q_idx), extent.k_position(b, kv_idx))

    def __repr__(self) -> str:
        return f"mask_mod({self.predicate.kind})"


def sequences_shape_error(
    name: str, shape: tuple[int, ...], sizes: scores.Sizes, broadcast: bool = False
) -> str | None:
    """What is wrong with the shape of a mask for sequences, or None."""
    b, h, s_q, s_k, _ = sizes
    long_enough = (n >= m or (n == 1 and broadcast) for n, m in zip(shape[2:], (s_q, s_k), strict=True))
    if broadcasts(shape[:2], (b, h)) and all(long_enough):
        return None
    return (
        f"{name} over sequences has a row for each query of the longest one, and a column for each of its keys: at "
        f"least (sequences, h_q, queries, keys) = {(b, h, s_q, s_k)}, where sequences and heads may be 1; got {shape}"
    )


class Written(MaskMod):
    """A predicate as it was written: each call traces it anew."""

    def __init__(self, fn: Function, name: str | None = None, form: tuple[int, int, int, int] | None = None) -> None:
        for field, value in (("fn", fn), ("name", name), ("form", form)):
            object.__setattr__(self, field, value)

    fn: Function
    name: str | None

    @property
    def predicate(self) -> Any:
        """Of this moment."""
        return scores.predicate(self.fn, self.name)

    def bound(self) -> Mask:
        return MaskMod(self.predicate, self.form)

    def sees(self, extent: Extent, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """By the user's own function."""
        return scores.evaluated(self.fn, b, h, extent.q_position(b, q_idx), extent.k_position(b, kv_idx))

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.fn == self.fn

    def __hash__(self) -> int:
        return hash(self.fn)

    def __repr__(self) -> str:
        return f"mask_mod({self.name or scores.name_of(self.fn)})"

    def __reduce__(self) -> Any:
        return Written, (self.fn, self.name, self.form)


def mask_mod(fn: Function) -> Mask:
    """Row i sees key j where `fn(b, h, q_idx, kv_idx)` is true: any predicate of pointwise torch operations.

    Each call of attention uses the function as it is at that call, with its numbers and tensors. Tiles in which
    nothing is visible are never visited, and tiles in which everything is are not tested: q's device finds both, again
    when the function, its numbers or its tensors have changed. Where intervals mask keys, as in `causal() &
    mask_mod(fn)`, the function is not evaluated. After writes through `.data`, numpy or dlpack, which torch does not
    count, call `mask.refresh()`.

    Args:
        fn: a function of four integer tensors that broadcast to a tile: batch row, query head, query, key. It
            returns bools, as torch's `flex_attention` wants them too. Rows and keys count from the first one, without
            alignment at the bottom right. Captured tensors are on q's device.

    Raises:
        TypeError: fn is not callable.
        ValueError: a function that returns integers or floats, or that cannot be traced, with what to write; see
            `ScoreMod`.

    >>> print(mask_mod(lambda b, h, q_idx, kv_idx: (q_idx - kv_idx) % 2 == 0).draw(4))
    mask_mod(lambda)
    ■ · ■ ·
    · ■ · ■
    ■ · ■ ·
    · ■ · ■
    """
    if not callable(fn):
        raise TypeError(f"mask_mod needs a function of (b, h, q_idx, kv_idx), got {fn!r}")
    mask = Written(fn)
    if not torch.compiler.is_compiling():
        mask.bound()  # says what is wrong with a function here
    return mask


@dataclass(frozen=True, eq=False, repr=False)
class OfRow(WrappedMask):
    """A predicate as one batch row sees it, which counts itself as number 0."""

    b: int

    @property
    def indices(self) -> frozenset[str]:
        return self.mask.indices - {"b"}

    def flat(self, of: type) -> list[Any]:
        inner = [x for leaf in self.mask.leaves() for x in leaf.flat(of)]
        return [self.b, *inner] if of is int else inner

    def sees(self, extent: Extent, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return self.mask.sees(extent, b + self.b, h, q_idx, kv_idx)
