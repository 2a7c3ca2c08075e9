"""Who may attend to whom.

A mask is a small expression. Each node says three things about it: `sees`, the definition, elementwise; `hull`,
the one interval of keys per query row outside of which nothing is visible, so that whole tiles are never visited;
and `core`, the interval inside of which everything is visible, so that inner tiles need no mask arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from saccade.masks.interval import Extent, Interval
from saccade.scores.recording.compile_constant import knows_inversion

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Stands for "no bound" where bounds are plain integers. i + off -+ UNBOUNDED stays inside int32.
UNBOUNDED = (1 << 30) - 4


class Mask:
    """A set of (query, key) pairs that may attend; `&`, `|` and `~` combine masks, `print` draws one."""

    kind: ClassVar[str]

    exact: bool = True
    """Whether `hull` is the whole truth, so that nothing has to be tested inside it."""

    lower: bool = True
    """Whether there may be keys that a row does not see before the first that it sees."""

    listed: bool = False
    """Whether a list of tiles says which of them are empty, as intervals do not."""

    of_shape: bool = False
    """Whether it is for calls of one shape, all of whose rows are in use."""

    indices: frozenset[str] = frozenset()
    """Which of b and h it depends on, besides by the lengths in use."""

    def sees(self, extent: Extent, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Elementwise, broadcast: may query `q_idx` of batch row `b` and query head `h` attend to key `kv_idx`?"""
        raise NotImplementedError

    def hull(self, extent: Extent) -> Interval:
        """Outside of it a row sees nothing. Not yet clipped to the keys that exist."""
        raise NotImplementedError

    def core(self, extent: Extent) -> Interval:
        """Inside of it a row sees everything."""
        return self.hull(extent)

    def leaves(self) -> Iterator[Mask]:
        yield self

    @property
    def identity(self) -> str:
        """The kind, with a name for every program in it: masks with the same one, and the same `lower`, run the same
        kernels."""
        return self.kind

    @property
    def ints(self) -> list[int]:
        """The runtime scalars, leaf after leaf, in the order of `kind`."""
        return [value for leaf in self.leaves() for value in leaf._ints()]

    @property
    def floats(self) -> list[float]:
        """The same of the scalars that are no integers."""
        return [value for leaf in self.leaves() for value in leaf._floats()]

    @property
    def records(self) -> list[Tensor]:
        """The tensors, leaf after leaf, in the order of `kind`."""
        return [value for leaf in self.leaves() for value in leaf._records()]

    def _ints(self) -> list[int]:
        return []

    def _floats(self) -> list[float]:
        return []

    def _records(self) -> list[Tensor]:
        return []

    def complaint(self, b: int, h: int, s_q: int, s_k: int) -> str | None:
        """What keeps it from being the mask of a call of this shape."""
        return next(
            (told for leaf in self.leaves() if leaf is not self if (told := leaf.complaint(b, h, s_q, s_k))), None
        )

    def packed_complaint(self, b: int, h: int, s_q: int, s_k: int) -> str | None:
        """What keeps it from being the mask of b packed sequences of at most these lengths."""
        return self.complaint(b, h, s_q, s_k)

    def unblocked(self) -> Mask:
        """The mask without the list of tiles that may have been made for one shape."""
        return self

    def bound(self) -> Mask:
        """The mask of one call: functions in it are what they are now."""
        return self

    def refresh(self) -> None:
        """Says that tensors of the mask were written where torch does not count it: through `.data`, numpy or dlpack.
        What is kept of their old values is found anew."""
        for x in self.bound().records:
            torch.autograd.graph.increment_version(x)

    def __and__(self, other: Mask) -> Mask:
        return _intersection(self.unblocked(), other.unblocked()) if isinstance(other, Mask) else NotImplemented

    def __or__(self, other: Mask) -> Mask:
        return _union(self.unblocked(), other.unblocked()) if isinstance(other, Mask) else NotImplemented

    def __invert__(self) -> Mask:
        from saccade.masks.predicates import inverse

        return inverse(self.unblocked())

    def __bool__(self) -> bool:
        raise TypeError(
            f"a mask is neither true nor false: `and`, `or` and `not` would drop a part of it; combine masks with &, | "
            f"and ~, and ask `mask is None`; got {self!r}"
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mask):
            return NotImplemented
        same = len(self.records) == len(other.records) and all(
            _same(a, b) for a, b in zip(self.records, other.records, strict=True)
        )
        return self.identity == other.identity and (self.ints, self.floats) == (other.ints, other.floats) and same

    def __hash__(self) -> int:
        return hash((self.identity, *self.ints, *self.floats, *(tuple(x.shape) for x in self.records)))

    def visible(self, s_q: int, s_k: int, b: int = 1, head: int = 0) -> Tensor:
        """The whole mask of one query head, bool (b, s_q, s_k), True where a query may attend: for pictures and small
        checks."""
        device = self.records[0].device if self.records else torch.device("cpu")
        extent = Extent.of(s_q, s_k, None, None, device)
        batch, h = torch.arange(b, device=device)[:, None, None], torch.full((1, 1, 1), head, device=device)
        return self.sees(extent, batch, h, extent.q_idx()[..., None], torch.arange(s_k, device=device)).expand(
            b, s_q, s_k
        )

    def draw(self, s_q: int | None = None, s_k: int | None = None, batch: int = 0) -> str:
        """Rows are queries, columns keys: `■` visible, `·` hidden.

        >>> print(causal().draw(2, 4))
        causal
        ■ ■ ■ ·
        ■ ■ ■ ■
        """
        s_q = s_q or self._size() or 8
        s_k = s_k or s_q
        rows = self.visible(s_q, s_k, batch + 1)[batch].tolist()
        return "\n".join([repr(self), *(" ".join("■" if cell else "·" for cell in row) for row in rows)])

    def plot(self, s_q: int | None = None, s_k: int | None = None, batch: int = 0, ax: Axes | None = None) -> Axes:
        """The same picture with matplotlib; returns the axes."""
        import matplotlib.pyplot as plt

        s_q = s_q or self._size() or 64
        s_k = s_k or s_q
        if ax is None:
            ax = plt.subplots()[1]
        ax.imshow(self.visible(s_q, s_k, batch + 1)[batch].cpu().numpy(), cmap="Blues", vmin=0, vmax=1)
        ax.set(title=repr(self), xlabel="key", ylabel="query")
        return ax

    def _size(self) -> int | None:
        """The sequence length that the mask itself knows."""
        return next((leaf.first.shape[1] for leaf in self.leaves() if isinstance(leaf, Documents)), None)

    def __str__(self) -> str:
        return self.draw() if (self._size() or 8) <= 64 else repr(self)


@dataclass(frozen=True, eq=False)
class Window(Mask):
    """`i + off - left <= j <= i + off + right`; None is unbounded."""

    left: int | None
    right: int | None

    @property
    def records(self) -> list[Tensor]:
        return []

    @property
    def kind(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return "causal" if self.left is None and self.right == 0 else "window"

    @property
    def lower(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.left is not None

    @property
    def bounds(self) -> tuple[int, int]:
        """With UNBOUNDED for None."""
        return (
            UNBOUNDED if self.left is None else self.left,
            UNBOUNDED if self.right is None else self.right,
        )

    def _ints(self) -> list[int]:
        return [] if self.kind == "causal" else list(self.bounds)

    def sees(self, extent: Extent, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        left, right = self.bounds
        diagonal = q_idx + _offset(extent, b)
        return (kv_idx >= diagonal - left) & (kv_idx <= diagonal + right)

    def hull(self, extent: Extent) -> Interval:
        left, right = self.bounds
        diagonal = extent.q_idx() + extent.keys - extent.rows
        return Interval(diagonal - left, diagonal + right + 1)

    def __repr__(self) -> str:
        return "causal" if self.kind == "causal" else f"window({self.left},{self.right})"


@dataclass(frozen=True, eq=False)
class Prefix(Mask):
    """`j < n` or `j <= i + off`."""

    n: int | Tensor
    lower: ClassVar[bool] = False  # pyright: ignore[reportIncompatibleVariableOverride]

    @property
    def kind(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return "prefixes" if isinstance(self.n, Tensor) else "prefix"

    @property
    def indices(self) -> frozenset[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return frozenset("b" if isinstance(self.n, Tensor) else "")

    def _ints(self) -> list[int]:
        return [] if isinstance(self.n, Tensor) else [self.n]

    def _records(self) -> list[Tensor]:
        return [self.n] if isinstance(self.n, Tensor) else []

    def sees(self, extent: Extent, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        n = self.n[b] if isinstance(self.n, Tensor) else self.n
        return (kv_idx < n) | (kv_idx <= q_idx + _offset(extent, b))

    def hull(self, extent: Extent) -> Interval:
        n = self.n[:, None] if isinstance(self.n, Tensor) else self.n
        hi = (extent.q_idx() + extent.keys - extent.rows + 1).clamp(min=n)
        return Interval(torch.zeros_like(hi), hi)

    def __repr__(self) -> str:
        return f"prefix({list(self.n.shape) if isinstance(self.n, Tensor) else self.n})"


@dataclass(frozen=True, eq=False)
class Documents(Mask):
    """`ids[b, i] == ids[b, j]`, with the hull of every document found once, when the mask is made.

    Every field is (b, s): `ids` int32, renumbered; `first` and `stop` int32, the interval from the first to behind the
    last token of the row's document; `solid` bool, whether that interval holds no other document's token.
    """

    kind: ClassVar[str] = "documents"
    exact: ClassVar[bool] = False  # pyright: ignore[reportIncompatibleVariableOverride]
    ids: Tensor
    first: Tensor
    stop: Tensor
    solid: Tensor

    @property
    def indices(self) -> frozenset[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return frozenset("b" if self.ids.shape[0] > 1 else "")

    def _records(self) -> list[Tensor]:
        return [self.ids, self.first, self.stop, self.solid]

    def sees(self, extent: Extent, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        b = b if self.ids.shape[0] > 1 else torch.zeros_like(b)  # one row of ids for the whole batch
        return self.ids[b, q_idx] == self.ids[b, kv_idx]

    def hull(self, extent: Extent) -> Interval:
        return Interval(self.first, self.stop)

    def core(self, extent: Extent) -> Interval:
        return Interval(self.first, torch.where(self.solid, self.stop, self.first))

    def __repr__(self) -> str:
        return "documents"


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
        return self if same else type(self)(parts)  # pyright: ignore[reportCallIssue]


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


def causal() -> Mask:
    """Row i sees keys `j <= i + off` with `off = s_k - s_q`: the diagonal ends in the bottom right corner.

    ```
    s_q = s_k = 4      s_q = 2, s_k = 4      s_q = 4, s_k = 2
    ■ · · ·            ■ ■ ■ ·               · ·
    ■ ■ · ·            ■ ■ ■ ■               · ·
    ■ ■ ■ ·                                  ■ ·
    ■ ■ ■ ■                                  ■ ■
    ```
    Rows that see no key give `out = 0`, `lse = -inf` and zero gradients.

    >>> print(causal().draw(4))
    causal
    ■ · · ·
    ■ ■ · ·
    ■ ■ ■ ·
    ■ ■ ■ ■
    """
    knows_inversion()
    return Window(None, 0)


def window(left: int | None, right: int | None) -> Mask:
    """Row i sees keys `i + off - left <= j <= i + off + right`, with `off = s_k - s_q`; None is unbounded.

    A causal sliding window over the last n tokens, the current one included, is `window(n - 1, 0)`.

    Raises:
        ValueError: a bound that is negative.
        TypeError: a bound that is neither an integer nor None.

    >>> print(window(1, 0).draw(4))
    window(1,0)
    ■ · · ·
    ■ ■ · ·
    · ■ ■ ·
    · · ■ ■
    """
    knows_inversion()
    return Window(_bound("left", left), _bound("right", right))


def prefix(n: int | Tensor) -> Mask:
    """Every row sees the first n keys, and the causal ones besides: `j < n or j <= i + off` (prefix-LM).

    Args:
        n: one length for all, or a (b,) integer tensor on q's device, one for each batch row.

    Raises:
        ValueError: a negative length, or a tensor that is not an integer vector.

    >>> print(prefix(2).draw(4))
    prefix(2)
    ■ ■ · ·
    ■ ■ · ·
    ■ ■ ■ ·
    ■ ■ ■ ■
    """
    if isinstance(n, Tensor):
        if n.dim() != 1 or n.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"prefix lengths must be an int32 or int64 tensor (b,), got {n.dtype} {tuple(n.shape)}")
        return Prefix(n)
    if n is None:
        raise TypeError("prefix(n) needs an integer or a (b,) integer tensor, got None")
    bound = _bound("n", n)
    return Prefix(UNBOUNDED if bound is None else bound)


def documents(ids: Tensor) -> Mask:
    """Row i sees key j of the same document: `ids[b, i] == ids[b, j]`, for packed training batches with s_q = s_k.

    The ids need not be sorted, nor be in one piece. Each document's extent is found here, once, on the ids' device:
    make one mask per batch and use it in every layer.

    Args:
        ids: (b, s) integer tensor on q's device, or (1, s) for all batch rows.

    Raises:
        ValueError: ids that are not a two-dimensional integer tensor.

    >>> print((documents(torch.tensor([[7, 7, 3, 3]])) & causal()).draw())
    documents&causal
    ■ · · ·
    ■ ■ · ·
    · · ■ ·
    · · ■ ■
    """
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point() or ids.is_complex():
        got = f"{ids.dtype} {tuple(ids.shape)}" if isinstance(ids, Tensor) else repr(ids)
        raise ValueError(f"document ids must be an integer tensor (b, s), got {got}")
    if ids.shape[1] == 0:
        nothing = ids.to(torch.int32)
        return Documents(nothing, nothing, nothing, nothing.bool())
    # Sorting brings a document's tokens together in order of position; a run of equal ids is a document.
    ordered, place = ids.long().sort(dim=1, stable=True)
    starts = torch.ones_like(ordered, dtype=torch.bool)
    starts[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    number = starts.long().cumsum(1) - 1
    count = torch.zeros_like(number).scatter_add_(1, number, torch.ones_like(number))
    first = torch.full_like(number, ids.shape[1]).scatter_reduce_(1, number, place, "amin")
    last = torch.zeros_like(number).scatter_reduce_(1, number, place, "amax")
    compact = torch.empty_like(number).scatter_(1, place, number)
    start, stop = first.gather(1, compact), last.gather(1, compact) + 1
    solid = stop - start == count.gather(1, compact)
    return Documents(compact.int(), start.int(), stop.int(), solid)


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are one, or views of the same elements."""
    form = a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype
    return a is b or (form and a.device == b.device and a.data_ptr() == b.data_ptr())


def _offset(extent: Extent, b: Tensor) -> Tensor:
    off = (extent.keys - extent.rows)[:, 0]
    return off[b] if off.shape[0] > 1 else off[0]


def _bound(name: str, value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, (bool, float)) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{name} must be an integer or None, got {value!r}")
    if value < 0:
        raise ValueError(f"{name} must not be negative, got {value}; None means unbounded")
    return None if value >= UNBOUNDED else value


# One spelling: documents, then prefixes, then all others, then unions, then the window.
_RANK = {Documents: 0, Prefix: 1, Or: 3, Window: 4}


def _intersection(a: Mask, b: Mask) -> Mask:
    parts = [*(a.parts if isinstance(a, And) else [a]), *(b.parts if isinstance(b, And) else [b])]
    windows = [part for part in parts if isinstance(part, Window)]
    others = sorted((part for part in parts if not isinstance(part, Window)), key=lambda part: _RANK.get(type(part), 2))
    if windows:
        left = min(part.bounds[0] for part in windows)
        right = min(part.bounds[1] for part in windows)
        others.append(Window(_bound("left", left), _bound("right", right)))
    return others[0] if len(others) == 1 else And(tuple(others))


def _union(a: Mask, b: Mask) -> Mask:
    parts = [*(a.parts if isinstance(a, Or) else [a]), *(b.parts if isinstance(b, Or) else [b])]
    windows = [part for part in parts if isinstance(part, Window)]
    prefixes = [part for part in parts if isinstance(part, Prefix)]
    others = [part for part in parts if not isinstance(part, (Window, Prefix))]
    if windows:  # all hold the diagonal, so their union is a window
        left = max(part.bounds[0] for part in windows)
        right = max(part.bounds[1] for part in windows)
        merged = Window(_bound("left", left), _bound("right", right))
        if not (prefixes and right == 0):  # a prefix is causal besides
            others.append(merged)
    parts = prefixes + others
    return parts[0] if len(parts) == 1 else Or(tuple(parts))
