"""Masks of masks: &, | and ~."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from saccade.masks.base import COMBINATIONS, Mask
from saccade.masks.builtin import Documents, Prefix, Window, bound
from saccade.masks.interval import Extent, Interval, everything, nothing


@dataclass(frozen=True, eq=False)
class Combined(Mask):
    """Several masks as one."""

    parts: tuple[Mask, ...]

    @property
    def lower(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return any(part.lower for part in self.parts)

    @property
    def listed(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return any(part.listed for part in self.parts)

    @property
    def indices(self) -> frozenset[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return frozenset().union(*(part.indices for part in self.parts))

    def leaves(self) -> Iterator[Mask]:
        for part in self.parts:
            yield from part.leaves()

    def bound(self) -> Mask:
        parts = tuple([part.bound() for part in self.parts])
        same = all(a is b for a, b in zip(parts, self.parts, strict=True))
        return self if same else type(self)(parts)


@dataclass(frozen=True, eq=False)
class And(Combined):
    """Both."""

    @property
    def kind(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return "&".join(part.kind if not isinstance(part, Or) else f"({part.kind})" for part in self.parts)

    @property
    def identity(self) -> str:
        return "&".join(part.identity if not isinstance(part, Or) else f"({part.identity})" for part in self.parts)

    @property
    def exact(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return all(part.exact for part in self.parts)

    def sees(self, extent: Extent, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        seen = self.parts[0].sees(extent, b, h, q_idx, kv_idx)
        for part in self.parts[1:]:
            seen = seen & part.sees(extent, b, h, q_idx, kv_idx)
        return seen

    def hull(self, extent: Extent) -> Interval:
        made = self.parts[0].hull(extent)
        for part in self.parts[1:]:
            made = made.intersection(part.hull(extent))
        return made

    def core(self, extent: Extent) -> Interval:
        made = self.parts[0].core(extent)
        for part in self.parts[1:]:
            made = made.intersection(part.core(extent))
        return made

    def __repr__(self) -> str:
        return "&".join(repr(part) if not isinstance(part, Or) else f"({part!r})" for part in self.parts)


@dataclass(frozen=True, eq=False)
class Or(Combined):
    """Either. The hull of two intervals that need not touch, so `sees` decides inside it."""

    exact: ClassVar[bool] = False  # pyright: ignore[reportIncompatibleVariableOverride]

    @property
    def kind(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return "|".join(part.kind for part in self.parts)

    @property
    def identity(self) -> str:
        return "|".join(part.identity for part in self.parts)

    def sees(self, extent: Extent, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        seen = self.parts[0].sees(extent, b, h, q_idx, kv_idx)
        for part in self.parts[1:]:
            seen = seen | part.sees(extent, b, h, q_idx, kv_idx)
        return seen

    def hull(self, extent: Extent) -> Interval:
        made = self.parts[0].hull(extent).clipped(extent)
        for part in self.parts[1:]:
            made = made.hull(part.hull(extent).clipped(extent))
        return made

    def core(self, extent: Extent) -> Interval:
        made = self.parts[0].core(extent).clipped(extent)
        for part in self.parts[1:]:
            made = made.union(part.core(extent).clipped(extent))
        return made

    def __repr__(self) -> str:
        return "|".join(map(repr, self.parts))


@dataclass(frozen=True, eq=False)
class Not(Combined):
    """What the one part hides. A list of tiles says where that is nothing."""

    exact: ClassVar[bool] = False  # pyright: ignore[reportIncompatibleVariableOverride]

    @property
    def listed(self) -> bool:
        return True

    def __init__(self, part: Mask) -> None:
        object.__setattr__(self, "parts", (part,))

    @property
    def part(self) -> Mask:
        return self.parts[0]

    @property
    def kind(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._around(self.part.kind)

    @property
    def identity(self) -> str:
        return self._around(self.part.identity)

    def bound(self) -> Mask:
        held = self.part.bound()
        return self if held is self.part else Not(held)

    def _around(self, text: str) -> str:
        return f"~({text})" if isinstance(self.part, (And, Or)) else f"~{text}"

    def sees(self, extent: Extent, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return ~self.part.sees(extent, b, h, q_idx, kv_idx)

    def hull(self, extent: Extent) -> Interval:
        return everything(extent)

    def core(self, extent: Extent) -> Interval:
        return nothing(extent)

    def __repr__(self) -> str:
        return self._around(repr(self.part))


# One spelling: documents, then prefixes, then all others, then unions, then the window.
_RANK = {Documents: 0, Prefix: 1, Or: 3, Window: 4}


def _intersection(a: Mask, b: Mask) -> Mask:
    parts = [*(a.parts if isinstance(a, And) else [a]), *(b.parts if isinstance(b, And) else [b])]
    windows = [part for part in parts if isinstance(part, Window)]
    others = sorted((part for part in parts if not isinstance(part, Window)), key=lambda part: _RANK.get(type(part), 2))
    if windows:
        left = min(part.bounds[0] for part in windows)
        right = min(part.bounds[1] for part in windows)
        others.append(Window(bound("left", left), bound("right", right)))
    return others[0] if len(others) == 1 else And(tuple(others))


def _union(a: Mask, b: Mask) -> Mask:
    parts = [*(a.parts if isinstance(a, Or) else [a]), *(b.parts if isinstance(b, Or) else [b])]
    windows = [part for part in parts if isinstance(part, Window)]
    prefixes = [part for part in parts if isinstance(part, Prefix)]
    others = [part for part in parts if not isinstance(part, (Window, Prefix))]
    if windows:  # all hold the diagonal, so their union is a window
        left = max(part.bounds[0] for part in windows)
        right = max(part.bounds[1] for part in windows)
        merged = Window(bound("left", left), bound("right", right))
        if not (prefixes and right == 0):  # a prefix is causal besides
            others.append(merged)
    parts = prefixes + others
    return parts[0] if len(parts) == 1 else Or(tuple(parts))


def _inverse(mask: Mask) -> Mask:
    """What the mask hides."""
    return mask.part if isinstance(mask, Not) else Not(mask)


COMBINATIONS.update({"&": _intersection, "|": _union, "~": _inverse})
