"""Which query may attend to which key.

A mask is a small expression. Each node has three methods: `sees`, the definition, elementwise; `hull`, an interval of
keys for each query row, outside of which nothing is visible, so that whole tiles are never visited; and `core`, the
interval inside of which everything is visible, so that inner tiles need no mask arithmetic.
"""

# Properties of masks are plain attributes of some, and computed by others.
# pyright: reportIncompatibleVariableOverride=false

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from saccade.scores import Sizes
from saccade.util import arguments

if TYPE_CHECKING:
    from matplotlib.axes import Axes
from typing import NamedTuple

# The lengths of a call, and intervals of keys, one for each query row.


FARTHEST = 1 << 28
"""Positions are from -FARTHEST to FARTHEST, so that sums of a few stay inside int32."""


class Positions(NamedTuple):
    """Query row i stands at p = q + i, or at q[i] where each row has a position; key j stands at r = k + j."""

    q: int | Tensor
    """an int; a tensor (b or 1, 1), an offset for each sequence; (b or 1, s_q), or (t_q,) for queries end to end, a
    position for each row"""
    k: int | Tensor
    """an int, or (b or 1, 1)"""
    per_row: bool
    """Whether q is a position for each row."""

    @property
    def counted(self) -> bool:
        """Whether rows and keys have their numbers as positions, as far as the host knows."""
        return not (isinstance(self.q, Tensor) or isinstance(self.k, Tensor)) and self.q == 0 and self.k == 0


class Extent(NamedTuple):
    """The lengths of one call, and where its rows and keys stand: without positions query row i of batch row b is on
    the diagonal at key `i + keys[b] - rows[b]`, bottom-right aligned, and functions count rows and keys from 0."""

    s_q: int
    s_k: int
    rows: Tensor
    """(b or 1, 1) integer: query rows in use."""
    keys: Tensor
    """(b or 1, 1) integer: keys in use."""
    p: Tensor | None = None
    """(b or 1, s_q) integer: the position of each row, or None"""
    k: Tensor | None = None
    """(b or 1, 1) integer: the position of the first key; with `p`"""
    heads: int | None = None
    """query heads of the call, if it is known"""

    def at(self, positions: Positions | None) -> Extent:
        """The same extent with positions."""
        if positions is None:
            return self
        q, k = (
            x.long().clamp(-FARTHEST, FARTHEST) if isinstance(x, Tensor) else torch.full_like(self.rows[:1], x)
            for x in positions[:2]
        )
        return self._replace(p=q if positions.per_row else q + self.q_idx(), k=k)

    @property
    def differs(self) -> bool:
        """Whether batch rows have positions of their own."""
        return self.p is not None and self.k is not None and max(self.p.shape[0], self.k.shape[0]) > 1

    def q_position(self, b: Tensor, q_idx: Tensor) -> Tensor:
        """The index by which functions know row q_idx of batch row b; all broadcast."""
        return q_idx if self.p is None else at(self.p, b, q_idx)

    def k_position(self, b: Tensor, kv_idx: Tensor) -> Tensor:
        """The index by which functions know a key."""
        return kv_idx if self.k is None else kv_idx + self.first_key(b)

    def diagonal(self, b: Tensor, q_idx: Tensor) -> Tensor:
        """The number of the key that stands where the row does."""
        if self.p is None or self.k is None:
            off = (self.keys - self.rows)[:, 0]
            return q_idx + (off[0] if off.shape[0] == 1 else off[b])
        return at(self.p, b, q_idx) - self.first_key(b)

    def diagonals(self) -> Tensor:
        """The index of every row, (b or 1, s_q)."""
        if self.p is None or self.k is None:
            return self.q_idx() + self.keys - self.rows
        return self.p - self.k

    def first_key(self, b: Tensor) -> int | Tensor:
        """The position of key 0."""
        return 0 if self.k is None else at(self.k, b, b)

    @staticmethod
    def of(s_q: int, s_k: int, seqused_q: Tensor | None, seqused_k: Tensor | None, device: torch.device) -> Extent:
        def column(used: Tensor | None, s: int) -> Tensor:
            if used is None:
                return torch.full((1, 1), s, dtype=torch.int64, device=device)
            return used.to(torch.int64).clamp(0, s)[:, None]

        return Extent(s_q, s_k, column(seqused_q, s_q), column(seqused_k, s_k))

    def q_idx(self) -> Tensor:
        """(1, s_q)"""
        return torch.arange(self.s_q, device=self.rows.device)[None]


def at(x: Tensor, b: Tensor, i: Tensor) -> Tensor:
    """x[b, i], where one batch row, or one i, stands for all."""
    batch, row = (j if n > 1 else torch.zeros_like(j) for j, n in ((b, x.shape[0]), (i, x.shape[1])))
    return x[batch, row]


class Interval(NamedTuple):
    """Keys `[lo, hi)` for every query row; each (b or 1, s_q) integer. Empty where `hi <= lo`."""

    lo: Tensor
    hi: Tensor

    def intersection(self, other: Interval) -> Interval:
        return Interval(torch.maximum(self.lo, other.lo), torch.minimum(self.hi, other.hi))

    def length(self) -> Tensor:
        return (self.hi - self.lo).clamp(min=0)

    def hull(self, other: Interval) -> Interval:
        """The smallest interval that holds both; an empty one does not count."""
        first, second = self.hi > self.lo, other.hi > other.lo
        lo = torch.where(first & second, torch.minimum(self.lo, other.lo), torch.where(first, self.lo, other.lo))
        hi = torch.where(first & second, torch.maximum(self.hi, other.hi), torch.where(first, self.hi, other.hi))
        return Interval(lo, hi)

    def union(self, other: Interval) -> Interval:
        """The union where it is an interval, otherwise the longer of the two."""
        touch = (self.lo <= other.hi) & (other.lo <= self.hi) & (self.length() > 0) & (other.length() > 0)
        both, longer = self.hull(other), self.length() >= other.length()
        return Interval(
            torch.where(touch, both.lo, torch.where(longer, self.lo, other.lo)),
            torch.where(touch, both.hi, torch.where(longer, self.hi, other.hi)),
        )

    def less(self, first: Tensor | None) -> Interval:
        """Of positions of keys as one of their numbers; key 0 stands at `first` (b or 1, 1)."""
        return self if first is None else Interval(*torch.broadcast_tensors(self.lo - first, self.hi - first))

    def clipped(self, extent: Extent) -> Interval:
        """Inside the keys in use; empty, at zero, for rows that are not in use."""
        used = extent.q_idx() < extent.rows
        lo = torch.where(used, self.lo.clamp(min=0), 0)
        hi = torch.where(used, torch.minimum(self.hi, extent.keys), 0)
        return Interval(*torch.broadcast_tensors(lo, torch.maximum(lo, hi)))


def everything(extent: Extent) -> Interval:
    """All keys, for every row."""
    lo = torch.zeros_like(extent.q_idx() + extent.keys)
    return Interval(lo, lo + extent.keys)


def nothing(extent: Extent) -> Interval:
    """No key, for any row."""
    lo = torch.zeros_like(extent.q_idx() + extent.keys)
    return Interval(lo, lo)


# Stands for "no bound" where bounds are plain integers. i + off -+ UNBOUNDED stays inside int32.
UNBOUNDED = (1 << 30) - 4

COMBINATIONS: dict[str, Callable[..., Mask]] = {}
"""The functions of `&`, `|` and `~`; combine.py fills it."""


class Mask:
    """A set of (query, key) pairs that may attend. `&`, `|` and `~` combine masks; `print` draws one."""

    kind: ClassVar[str]

    FLAT: ClassVar[dict[str, dict[str, type]]] = {}
    """For each identity of a leaf: the fields that pass through a registered operator."""

    exact: bool = True
    """Whether a row sees every key inside `hull`."""

    has_lower_bound: bool = True
    """Whether a row may have masked keys before its first visible one."""

    block_sparse: bool = False
    """Whether block sparsity finds empty tiles that intervals cannot describe."""

    of_shape: bool = False
    """Whether the mask is for calls of one shape with all rows in use."""

    bounds_per_row: bool = False
    """Whether tensors give each row its keys. Each call reads them anew, and nothing made of them is kept."""

    length: int | None = None
    """The sequence length that the mask requires, or None."""

    indices: frozenset[str] = frozenset()
    """Which of b and h it depends on, apart from the lengths in use."""

    def sees(self, extent: Extent, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """bool, broadcast: whether query `q_idx` of batch row `b` and query head `h` sees key `kv_idx`."""
        raise NotImplementedError

    def hull(self, extent: Extent) -> Interval:
        """The interval outside of which a row sees nothing. It is not clipped to the existing keys."""
        raise NotImplementedError

    def core(self, extent: Extent) -> Interval:
        """The interval inside of which a row sees everything."""
        return self.hull(extent)

    def leaves(self) -> Iterator[Mask]:
        yield self

    @property
    def identity(self) -> str:
        """The kind, with the name of each program in it. Masks with equal identity and equal `has_lower_bound` run the
        same kernels."""
        return self.kind

    @property
    def ints(self) -> list[int]:
        """The runtime scalars, leaf after leaf, in the order of `kind`."""
        return [value for leaf in self.leaves() for value in leaf.flat(int)]

    @property
    def floats(self) -> list[float]:
        """The scalars that are not integers, in the same order."""
        return [value for leaf in self.leaves() for value in leaf.flat(float)]

    @property
    def numbers(self) -> Hashable:
        """The ints and floats as a key holds them: floats by their bits, since 0.0 equals -0.0."""
        return *self.ints, *(x.hex() for x in self.floats)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors, leaf after leaf, in the order of `kind`."""
        return [value for leaf in self.leaves() for value in leaf.flat(Tensor)]

    def flat(self, of: type) -> list[Any]:
        """The fields of a leaf that are of this type: int, float or Tensor."""
        return [getattr(self, name) for name, kind in self.FLAT[self.identity].items() if kind is of]

    @classmethod
    def of_fields(cls, **fields: Any) -> Mask:
        """The leaf with these fields of one identity in `FLAT`."""
        return cls(**fields)

    def shape_error(self, sizes: Sizes) -> str | None:
        """Why the mask does not fit a call of these sizes, or None."""
        errors = (leaf.shape_error(sizes) for leaf in self.leaves() if leaf is not self)
        return next(filter(None, errors), None)

    def unblocked(self) -> Mask:
        """The mask without block states that were computed for one shape."""
        return self

    def bound(self) -> Mask:
        """The mask of one call, with its functions as they are now."""
        return self

    def refresh(self) -> None:
        """Says that tensors of the mask were written where torch does not count it: through `.data`, numpy or dlpack.
        What was computed from their old values is computed again."""
        for x in self.bound().tensors:
            torch.autograd.graph.increment_version(x)

    def __and__(self, other: Any) -> Mask:
        return self._combined("&", other)

    def __or__(self, other: Any) -> Mask:
        return self._combined("|", other)

    def __rand__(self, other: Any) -> Mask:
        return self._combined("&", other)

    def __ror__(self, other: Any) -> Mask:
        return self._combined("|", other)

    def _combined(self, sign: str, other: Any) -> Mask:
        """The combination with a mask, or with what `attention` takes for one. Both signs are commutative."""
        if other is None:
            return NotImplemented
        other = other if isinstance(other, Mask) else COMBINATIONS["mask"](other)
        return COMBINATIONS[sign](self.unblocked(), other.unblocked())

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Of torch's operations on a tensor and a mask only `&` and `|` mean something, and no tensor equals a mask.
        Dynamo takes these operators for torch's wherever one side is a tensor, and asks here."""
        sign = _SIGNS.get(func.__name__)
        if sign is None or len(args) != 2:
            return NotImplemented
        if sign in ("==", "!="):
            return sign == "!="
        mask, other = args if isinstance(args[0], Mask) else args[::-1]
        return mask._combined(sign, other)

    def __invert__(self) -> Mask:
        return COMBINATIONS["~"](self.unblocked())

    def __bool__(self) -> bool:
        raise TypeError(
            "a mask is neither true nor false, and `and`, `or` and `not` would drop a part: combine masks with &, "
            f"| and ~, and test `mask is None`; got {self!r}"
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mask):
            return NotImplemented
        same = len(self.tensors) == len(other.tensors) and all(
            _same(a, b) for a, b in zip(self.tensors, other.tensors, strict=True)
        )
        return self.identity == other.identity and (self.ints, self.floats) == (other.ints, other.floats) and same

    def __hash__(self) -> int:
        return hash((self.identity, *self.ints, *self.floats, *(tuple(x.shape) for x in self.tensors)))

    def visible(self, s_q: int, s_k: int, b: int = 1, head: int = 0) -> Tensor:
        """The whole mask of one query head, bool (b, s_q, s_k), True where a query may attend: for pictures and small
        checks.

        Raises:
            TypeError: a size that is no integer. ValueError: sizes that the tensors of the mask do not have.
        """
        for name, n in {"s_q": s_q, "s_k": s_k, "b": b, "head": head}.items():
            arguments.integer(name, n)
        device = self.tensors[0].device if self.tensors else torch.device("cpu")
        if not (b and s_q and s_k):
            return torch.ones(b, s_q, s_k, dtype=torch.bool, device=device)
        extent = Extent.of(s_q, s_k, None, None, device)
        batch, h = torch.arange(b, device=device)[:, None, None], torch.full((1, 1, 1), head, device=device)
        at = batch, h, extent.q_idx()[..., None], torch.arange(s_k, device=device)
        try:
            return self.sees(extent, *at).expand(b, s_q, s_k)
        except IndexError as error:
            sizes = f"(b, s_q, s_k) = {(b, s_q, s_k)} and head {head}"
            raise ValueError(f"{self!r} has no elements for {sizes}: {error}") from error

    def draw(self, s_q: int | None = None, s_k: int | None = None, batch: int = 0) -> str:
        """Rows are queries, columns keys: `■` visible, `·` masked; `#` and `.` where standard output lacks these.

        >>> print(causal().draw(2, 4))
        causal
        ■ ■ ■ ·
        ■ ■ ■ ■
        """
        rows = self._picture(s_q, s_k, batch, 8).tolist()
        seen, masked = "■·" if _printable("■·") else "#."
        return "\n".join([repr(self), *(" ".join(seen if cell else masked for cell in row) for row in rows)])

    def plot(self, s_q: int | None = None, s_k: int | None = None, batch: int = 0, ax: Axes | None = None) -> Axes:
        """Matplotlib axes with the same picture."""
        import matplotlib.pyplot as plt

        if ax is None:
            ax = plt.subplots()[1]
        ax.imshow(self._picture(s_q, s_k, batch, 64).cpu().numpy(), cmap="Blues", vmin=0, vmax=1)
        ax.set(title=repr(self), xlabel="key", ylabel="query")
        return ax

    def _picture(self, s_q: int | None, s_k: int | None, batch: int, otherwise: int) -> Tensor:
        """Bool (s_q, s_k) of one batch row; the mask's own length, or else this one, is the default of s_q."""
        s_q = self._size(otherwise) if s_q is None else s_q
        return self.visible(s_q, s_q if s_k is None else s_k, arguments.integer("batch", batch) + 1)[batch]

    def _size(self, otherwise: int) -> int:
        return next((leaf.length for leaf in self.leaves() if leaf.length is not None), otherwise)

    def __str__(self) -> str:
        try:
            return self.draw() if self._size(8) <= 64 else repr(self)
        except ValueError:  # its tensors have no first batch row or head
            return repr(self)


_SIGNS = {
    **dict.fromkeys(("__and__", "__rand__", "and_", "bitwise_and"), "&"),
    **dict.fromkeys(("__or__", "__ror__", "or_", "bitwise_or"), "|"),
    **dict.fromkeys(("__eq__", "eq"), "=="),
    **dict.fromkeys(("__ne__", "ne"), "!="),
}
"""Which operator a function of torch is."""


def _printable(text: str) -> bool:
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


class PredicateMask(Mask):
    """A mask that no interval says anything about: block sparsity says where nothing is visible."""

    kind: ClassVar[str] = "mask_mod"
    exact: ClassVar[bool] = False
    block_sparse: ClassVar[bool] = True

    def hull(self, extent: Extent) -> Interval:
        return everything(extent)

    def core(self, extent: Extent) -> Interval:
        return nothing(extent)


@dataclass(frozen=True, eq=False)
class WrappedMask(Mask):
    """Another mask, with more to it."""

    mask: Mask
    block_sparse: ClassVar[bool] = True
    exact: ClassVar[bool] = False

    @property
    def kind(self) -> str:
        return self.mask.kind

    @property
    def identity(self) -> str:
        return self.mask.identity

    @property
    def indices(self) -> frozenset[str]:
        return self.mask.indices

    @property
    def tensors(self) -> list[Tensor]:
        return self.mask.tensors

    def bound(self) -> Mask:
        bound = self.mask.bound()
        return self if bound is self.mask else replace(self, mask=bound)

    def sees(self, extent: Extent, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return self.mask.sees(extent, b, h, q_idx, kv_idx)

    def hull(self, extent: Extent) -> Interval:
        return self.mask.hull(extent)

    def core(self, extent: Extent) -> Interval:
        return self.mask.core(extent)

    def __repr__(self) -> str:
        return repr(self.mask)


def _same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are one, or views of the same elements."""
    form = a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype
    return a is b or (form and a.device == b.device and a.data_ptr() == b.data_ptr())
