"""Masks of masks, by &, | and ~; and a mask as text and lists of numbers and tensors, in which it passes through a
registered operator, and back.
"""

# Properties of masks are plain attributes of some, and computed by others.
# pyright: reportIncompatibleVariableOverride=false

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, reduce
from operator import and_, or_
from typing import Any, ClassVar

import torch
from torch import Tensor

from saccade import scores
from saccade.masks.base import COMBINATIONS, Extent, Interval, Mask, PredicateMask
from saccade.masks.builtin import Documents, Prefix, Window, bound
from saccade.masks.interval import KeyInterval
from saccade.masks.predicates import Blocked, MaskMod, OfRow, TensorMask
from saccade.masks.selected import ListedSlots, Selected
from saccade.util.caches import compile_constant
from saccade.util.imports import after_import


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
    def has_lower_bound(self) -> bool:
        return any(part.has_lower_bound for part in self.parts)

    @property
    def bounds_per_row(self) -> bool:
        return any(part.bounds_per_row for part in self.parts)

    @property
    def block_sparse(self) -> bool:
        return any(part.block_sparse for part in self.parts)

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
    """The pairs that all parts see."""

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
    """The pairs that its part masks. Block sparsity finds tiles that it masks wholly."""

    @property
    def block_sparse(self) -> bool:
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


@lru_cache(maxsize=512)
def _parsed(kind: str) -> Any:
    """`documents&(prefix|window)` as nested tuples: ("&", "documents", ("|", "prefix", "window"))."""
    tokens = re.findall(r"[a-z_]+(?:\[[^\]]*\])?|[&|~()]", kind)
    if "".join(tokens) != kind:
        raise ValueError(f"not a mask: {kind!r}")

    def level(operators: str) -> Any:
        parts = [level(operators[1:]) if len(operators) > 1 else atom()]
        while tokens and tokens[0] == operators[0]:
            tokens.pop(0)
            parts.append(level(operators[1:]) if len(operators) > 1 else atom())
        return parts[0] if len(parts) == 1 else (operators[0], *parts)

    def atom() -> Any:
        token = tokens.pop(0) if tokens else ""
        if token == "(":
            inner = level("|&")
            if not tokens or tokens.pop(0) != ")":
                raise ValueError(f"not a mask: {kind!r}")
            return inner
        if token == "~":
            return "~", atom()
        if token.partition("[")[0] not in _IDENTITIES:
            raise ValueError(f"unknown mask {token!r} in {kind!r}; the kinds are {', '.join(KINDS)}")
        return token

    tree = level("|&")
    if tokens:
        raise ValueError(f"not a mask: {kind!r}")
    return tree


KINDS = (
    "causal", "window", "prefix", "prefixes", "interval", "documents", "mask_mod", "selected", "selected_blocks",
    "slots",
)  # fmt: skip
_CLASSES = Window, Prefix, KeyInterval, Documents, Selected, ListedSlots
_LEAVES = {identity: leaf for leaf in _CLASSES for identity in leaf.FLAT}
_IDENTITIES = {*KINDS, *_LEAVES, "mask_tensor"}


def is_kind(text: str) -> bool:
    """Whether `text` spells a mask, as `Mask.kind` does."""
    try:
        _parsed(text)
    except ValueError:
        return False
    return set(re.findall("[a-z_]+", text)) <= {*KINDS}


def from_tensors(
    identity: str, ints: list[int], tensors: list[Tensor], floats: list[float] | None = None
) -> Mask | None:
    """The inverse of `identity`, `ints`, `tensors` and `floats`; takes what it needs from the front of the lists."""
    lists: dict[type, Any] = {int: ints, Tensor: tensors, float: [] if floats is None else floats}

    def build(tree: Any) -> Mask:
        match tree:
            case ("&", *parts):
                return And(tuple(build(part) for part in parts))
            case ("|", *parts):
                return Or(tuple(build(part) for part in parts))
            case ("~", part):
                return Not((build(part),))
            case _ if tree in _LEAVES:
                leaf = _LEAVES[tree]
                return leaf.of_fields(**{name: lists[kind].pop(0) for name, kind in leaf.FLAT[tree].items()})
        name, _, program = tree.removesuffix("]").partition("[")
        if name == "mask_tensor":
            return TensorMask(tensors.pop(0))
        return MaskMod(scores.Traced.of_tensors(program, tensors, ints, lists[float]), None)

    if identity == "none":
        return None
    mask = build(_parsed(identity.removeprefix(Blocked.MARK)))
    return Blocked(mask, tensors.pop(0)) if identity.startswith(Blocked.MARK) else mask


def of_leaves(mask: Mask, change: Callable[[Mask], Mask]) -> Mask:
    """The mask with each leaf changed."""
    match mask:
        case Combined():
            return type(mask)(tuple(of_leaves(part, change) for part in mask.parts))
    return change(mask)


def of_batch_row(mask: Mask, b: int) -> Mask:
    """The mask of one batch row."""

    def change(leaf: Mask) -> Mask:
        match leaf:
            case Prefix(n=Tensor() as n):
                return Prefix(n[b : b + 1])
            case KeyInterval() | Selected() | ListedSlots():
                return leaf.of_batch_row(b)
            case _ if leaf.block_sparse:
                return OfRow(leaf, b) if "b" in leaf.indices else leaf
        return leaf

    return of_leaves(mask, change)


def of_rows(mask: Mask, rows: slice | Tensor) -> Mask:
    """The mask of these rows of queries end to end: a sequence's, or (b, s_q) of a padded batch."""
    return of_leaves(mask, lambda leaf: leaf.of_rows(rows) if isinstance(leaf, KeyInterval | Selected) else leaf)


def padded(mask: Mask, starts: Tensor, s_q: int) -> Mask:
    """The mask of queries end to end as that of a padded batch of s_q rows; sequences begin at `starts` (b + 1)."""
    return of_rows(mask, starts[:-1, None].long() + torch.arange(s_q, device=starts.device))


def of_one_sequence(mask: Mask, sequence: Tensor | None, shape: tuple[int, int]) -> Mask:
    """The mask of the same rows as rows of one sequence: those of a batch of this shape, (b, s_q), one batch row after
    the other; or queries end to end, whose `sequence` (t_q,) is given. Of a mask whose predicates do not take b."""

    def of_rows(x: Tensor) -> Tensor:
        if sequence is None:
            return x.expand(shape).reshape(1, -1)
        return x if x.dim() == 1 or x.shape[0] == 1 else x[:, 0][sequence]

    def change(leaf: Mask) -> Mask:
        match leaf:
            case Prefix(n=Tensor() as n):
                stop = of_rows(n[:, None])
                return KeyInterval(stop, stop, open_start=True) | Window(None, 0)
            case KeyInterval():
                return leaf.each(of_rows)
        return leaf

    return of_leaves(mask, change)


def programs(identity: str) -> list[Any]:
    """The objects besides tensors that must stay alive for `from_tensors`."""
    return [*map(scores.program_of, program_names(identity))]


@compile_constant
def program_names(identity: str) -> list[str]:
    """The names of the programs in a mask's identity."""
    return re.findall(r"\[([^\]]*)\]", identity)


@compile_constant
def pin(identity: str) -> int:
    """Keeps the programs of a mask for ever: compiled graphs that name them do not."""
    _pinned.update((x.identity, x) for x in programs(identity))
    return len(_pinned)


_pinned: dict[str, Any] = {}
