"""Masks of masks: &, | and ~."""

# Properties of masks are plain attributes of some, and computed by others.
# pyright: reportIncompatibleVariableOverride=false

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from operator import and_, or_
from typing import Any, ClassVar

from torch import Tensor

from saccade.after_import import after_import
from saccade.masks.base import COMBINATIONS, Mask, PredicateMask
from saccade.masks.builtin import Documents, Prefix, Window, bound
from saccade.masks.hull import Extent, Interval
from saccade.masks.interval import KeyInterval


@dataclass(frozen=True, eq=False)
class Combined(Mask):
    """Several masks as one."""

    parts: tuple[Mask, ...]

    def _text(self, words: list[str]) -> str:
        """The words of the parts as one text."""
        raise NotImplementedError

    @property
    def kind(self) -> str:
        return self._text([part.kind for part in self.parts])

    @property
    def identity(self) -> str:
        return self._text([part.identity for part in self.parts])

    def __repr__(self) -> str:
        return self._text([repr(part) for part in self.parts])

    @property
    def lower(self) -> bool:
        return any(part.lower for part in self.parts)

    @property
    def by_row(self) -> bool:
        return any(part.by_row for part in self.parts)

    @property
    def listed(self) -> bool:
        return any(part.listed for part in self.parts)

    @property
    def indices(self) -> frozenset[str]:
        return frozenset().union(*(part.indices for part in self.parts))

    def leaves(self) -> Iterator[Mask]:
        for part in self.parts:
            yield from part.leaves()

    def bound(self) -> Mask:
        parts = tuple([part.bound() for part in self.parts])
        same = all(a is b for a, b in zip(parts, self.parts, strict=True))
        return self if same else type(self)(parts)


class And(Combined):
    """Both."""

    def _text(self, words: list[str]) -> str:
        pairs = zip(words, self.parts, strict=True)
        return "&".join(f"({word})" if isinstance(part, Or) else word for word, part in pairs)

    @property
    def exact(self) -> bool:
        return all(part.exact for part in self.parts)

    def sees(self, extent: Extent, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return reduce(and_, [part.sees(extent, b, h, q_idx, kv_idx) for part in self.parts])

    def hull(self, extent: Extent) -> Interval:
        return reduce(Interval.intersection, [part.hull(extent) for part in self.parts])

    def core(self, extent: Extent) -> Interval:
        return reduce(Interval.intersection, [part.core(extent) for part in self.parts])


class Or(Combined):
    """Either. The hull of two intervals that need not touch, so `sees` decides inside it."""

    exact: ClassVar[bool] = False

    def _text(self, words: list[str]) -> str:
        return "|".join(words)

    def sees(self, extent: Extent, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return reduce(or_, [part.sees(extent, b, h, q_idx, kv_idx) for part in self.parts])

    def hull(self, extent: Extent) -> Interval:
        return reduce(Interval.hull, [part.hull(extent).clipped(extent) for part in self.parts])

    def core(self, extent: Extent) -> Interval:
        return reduce(Interval.union, [part.core(extent).clipped(extent) for part in self.parts])


class Not(Combined, PredicateMask):
    """What its one part masks. Block sparsity says where that is nothing."""

    @property
    def listed(self) -> bool:
        return True

    @property
    def part(self) -> Mask:
        return self.parts[0]

    def _text(self, words: list[str]) -> str:
        return f"~({words[0]})" if isinstance(self.part, (And, Or)) else f"~{words[0]}"

    def sees(self, extent: Extent, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return ~self.part.sees(extent, b, h, q_idx, kv_idx)


# One spelling: documents, then prefixes, intervals, all others, unions, and the window.
_RANK = {Documents: 0, Prefix: 1, KeyInterval: 2, Or: 4, Window: 5}


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


def _complement(mask: Mask) -> Mask:
    return mask.part if isinstance(mask, Not) else Not((mask,))


COMBINATIONS.update({"&": _intersection, "|": _union, "~": _complement})


def _teach_inversion() -> None:
    """Has Dynamo follow `~` of objects as it does `&` and `|`, where it does not."""
    from torch._dynamo import variables

    def call_invert(self: Any, tx: Any, x: Any) -> Any:
        return x.call_method(tx, "__invert__", [], {}) if isinstance(x, variables.UserDefinedObjectVariable) else None

    if not hasattr(variables.BuiltinVariable, "call_invert"):
        variables.BuiltinVariable.call_invert = call_invert  # pyright: ignore[reportAttributeAccessIssue]


after_import("torch._dynamo.variables", _teach_inversion)
