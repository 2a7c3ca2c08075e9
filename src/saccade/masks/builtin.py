"""The masks that intervals express: causal, window, prefix and documents."""

# Properties of masks are plain attributes of some, and computed by others.
# pyright: reportIncompatibleVariableOverride=false, reportIncompatibleMethodOverride=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from saccade.masks.base import FARTHEST, UNBOUNDED, Extent, Interval, Mask
from saccade.util import arguments


@dataclass(frozen=True, eq=False)
class Window(Mask):
    """`i + off - left <= j <= i + off + right`; None is unbounded."""

    FLAT: ClassVar = {"causal": {}, "window": {"left": int, "right": int}}
    left: int | None
    right: int | None
    # In the path of small calls, and so attributes that are computed once.
    kind: ClassVar[Any] = "window"
    identity: ClassVar[Any] = "window"
    has_lower_bound: ClassVar[Any] = True
    tensors: ClassVar[Any] = ()
    floats: ClassVar[Any] = ()
    ints: ClassVar[Any] = ()
    bounds: ClassVar[Any] = (0, 0)
    """The bounds, with UNBOUNDED for None."""

    def __post_init__(self) -> None:
        bounds = tuple([UNBOUNDED if x is None else x for x in (self.left, self.right)])
        has_lower_bound, causal = self.left is not None, self.left is None and self.right == 0
        kind, ints = ("causal", ()) if causal else ("window", bounds)
        derived = {"kind": kind, "identity": kind, "has_lower_bound": has_lower_bound, "bounds": bounds, "ints": ints}
        for name, x in derived.items():
            object.__setattr__(self, name, x)

    def flat(self, of: type) -> list[Any]:
        return [*self.ints] if of is int else []

    @classmethod
    def of_fields(cls, left: int = UNBOUNDED, right: int = 0) -> Mask:
        return Window(bound("left", left), bound("right", right))

    def sees(self, extent: Extent, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        left, right = self.bounds
        diagonal = extent.diagonal(b, q_idx)
        return (kv_idx >= diagonal - left) & (kv_idx <= diagonal + right)

    def hull(self, extent: Extent) -> Interval:
        left, right = self.bounds
        diagonal = extent.diagonals()
        return Interval(diagonal - left, diagonal + right + 1)

    def __repr__(self) -> str:
        return "causal" if self.kind == "causal" else f"window({self.left},{self.right})"


@dataclass(frozen=True, eq=False)
class Prefix(Mask):
    """`j < n` or `j <= i + off`."""

    FLAT: ClassVar = {"prefix": {"n": int}, "prefixes": {"n": Tensor}}
    n: int | Tensor
    has_lower_bound: ClassVar[bool] = False

    @property
    def kind(self) -> str:
        return "prefixes" if isinstance(self.n, Tensor) else "prefix"

    @property
    def indices(self) -> frozenset[str]:
        return frozenset("b" if isinstance(self.n, Tensor) else "")

    def sees(self, extent: Extent, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        n = self.n[b] if isinstance(self.n, Tensor) else self.n
        return (extent.k_position(b, kv_idx) < n) | (kv_idx <= extent.diagonal(b, q_idx))

    def hull(self, extent: Extent) -> Interval:
        diagonals = extent.diagonals()
        n = self.n[:, None] if isinstance(self.n, Tensor) else torch.tensor(self.n, device="cpu")
        hi = torch.maximum(diagonals + 1, n.clamp(max=2 * FARTHEST) - (0 if extent.k is None else extent.k))
        return Interval(torch.full_like(hi, -FARTHEST), hi)

    def __repr__(self) -> str:
        return f"prefix({list(self.n.shape) if isinstance(self.n, Tensor) else self.n})"


@dataclass(frozen=True, eq=False)
class Documents(Mask):
    """`ids[b, i] == ids[b, j]`, with the hull of every document, computed once when the mask is made.

    Every field is (b, s): `ids` int32, renumbered; `first` and `stop` int32, the interval from the first token of the
    row's document to the one after its last; `solid` bool, whether that interval holds no other document's token.
    """

    FLAT: ClassVar = {"documents": dict.fromkeys(("ids", "first", "stop", "solid"), Tensor)}
    kind: ClassVar[str] = "documents"
    exact: ClassVar[bool] = False
    ids: Tensor
    first: Tensor
    stop: Tensor
    solid: Tensor

    @property
    def indices(self) -> frozenset[str]:
        return frozenset("b" if self.ids.shape[0] > 1 else "")

    @property
    def length(self) -> int:
        return self.ids.shape[1]

    def sees(self, extent: Extent, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        b = b if self.ids.shape[0] > 1 else torch.zeros_like(b)  # one row of ids for the whole batch
        return self.ids[b, q_idx] == self.ids[b, kv_idx]

    def hull(self, extent: Extent) -> Interval:
        return Interval(self.first, self.stop)

    def core(self, extent: Extent) -> Interval:
        return Interval(self.first, torch.where(self.solid, self.stop, self.first))

    def __repr__(self) -> str:
        return "documents"


_CAUSAL = Window(None, 0)


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
    return _CAUSAL


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
    return Window(bound("left", left), bound("right", right))


def prefix(n: int | Tensor) -> Mask:
    """Every row sees the first n keys and the causal ones: `j < n or j <= i + off` (prefix-LM).

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
    length = bound("n", n)
    return Prefix(UNBOUNDED if length is None else length)


def documents(ids: Tensor) -> Mask:
    """Row i sees key j of the same document: `ids[b, i] == ids[b, j]`, for packed training batches with s_q = s_k.

    The ids may have any order, and a document several pieces. Each document's extent is computed here, once, on the
    ids' device: make one mask per batch and use it in every layer.

    Args:
        ids: (b, s) integer tensor on q's device, or (1, s) for all batch rows.

    Raises:
        ValueError: ids that are not a two-dimensional integer tensor. TypeError: ids that are no tensor.

    >>> print((documents(torch.tensor([[7, 7, 3, 3]])) & causal()).draw())
    documents&causal
    ■ · · ·
    ■ ■ · ·
    · · ■ ·
    · · ■ ■
    """
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point() or ids.is_complex():
        got = f"{ids.dtype} {tuple(ids.shape)}" if isinstance(ids, Tensor) else repr(ids)
        raise arguments.refusal(ids, f"document ids must be an integer tensor (b, s), got {got}")
    if ids.shape[1] == 0:
        nothing = ids.to(torch.int32)
        return Documents(nothing, nothing, nothing, nothing.bool())
    # Sorting brings a document's tokens together in order of position; a run of equal ids is a document.
    ordered, order = ids.long().sort(dim=1, stable=True)
    # Nothing is written in place: selective checkpoints may keep any of these.
    number = torch.nn.functional.pad(ordered[:, 1:] != ordered[:, :-1], (1, 0)).long().cumsum(1)
    count = torch.zeros_like(number).scatter_add(1, number, torch.ones_like(number))
    first = torch.full_like(number, ids.shape[1]).scatter_reduce(1, number, order, "amin")
    last = torch.zeros_like(number).scatter_reduce(1, number, order, "amax")
    compact = torch.empty_like(number).scatter(1, order, number)
    start, stop = first.gather(1, compact), last.gather(1, compact) + 1
    solid = stop - start == count.gather(1, compact)
    return Documents(compact.int(), start.int(), stop.int(), solid)


def bound(name: str, value: Any) -> Any:
    if value is None:
        return None
    value = arguments.integer(name, value, least=None, otherwise=" or None")
    if value < 0:
        raise ValueError(f"{name} must not be negative, got {value}; None means unbounded")
    return None if value >= UNBOUNDED else value
