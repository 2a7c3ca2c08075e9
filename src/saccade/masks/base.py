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

from saccade.masks.hull import Extent, Interval, everything, nothing
from saccade.scores import Sizes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
        checks."""
        device = self.tensors[0].device if self.tensors else torch.device("cpu")
        extent = Extent.of(s_q, s_k, None, None, device)
        batch, h = torch.arange(b, device=device)[:, None, None], torch.full((1, 1, 1), head, device=device)
        return self.sees(extent, batch, h, extent.q_idx()[..., None], torch.arange(s_k, device=device)).expand(
            b, s_q, s_k
        )

    def draw(self, s_q: int | None = None, s_k: int | None = None, batch: int = 0) -> str:
        """Rows are queries, columns keys: `■` visible, `·` masked; `#` and `.` where standard output lacks these.

        >>> print(causal().draw(2, 4))
        causal
        ■ ■ ■ ·
        ■ ■ ■ ■
        """
        s_q = s_q or self._size() or 8
        s_k = s_k or s_q
        rows = self.visible(s_q, s_k, batch + 1)[batch].tolist()
        seen, masked = "■·" if _printable("■·") else "#."
        return "\n".join([repr(self), *(" ".join(seen if cell else masked for cell in row) for row in rows)])

    def plot(self, s_q: int | None = None, s_k: int | None = None, batch: int = 0, ax: Axes | None = None) -> Axes:
        """Matplotlib axes with the same picture."""
        import matplotlib.pyplot as plt

        s_q = s_q or self._size() or 64
        s_k = s_k or s_q
        if ax is None:
            ax = plt.subplots()[1]
        ax.imshow(self.visible(s_q, s_k, batch + 1)[batch].cpu().numpy(), cmap="Blues", vmin=0, vmax=1)
        ax.set(title=repr(self), xlabel="key", ylabel="query")
        return ax

    def _size(self) -> int | None:
        return next((leaf.length for leaf in self.leaves() if leaf.length is not None), None)

    def __str__(self) -> str:
        return self.draw() if (self._size() or 8) <= 64 else repr(self)


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
