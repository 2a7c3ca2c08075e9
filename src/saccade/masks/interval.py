"""Intervals of keys that the user gives, for all rows or for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from saccade.masks.base import FARTHEST, Extent, Interval, Mask, at
from saccade.scores import Sizes
from saccade.util import arguments

OPEN = 2 * FARTHEST
"""Stands for no upper bound; -FARTHEST for no lower one. No key stands there."""


@dataclass(frozen=True, eq=False)
class KeyInterval(Mask):
    """`start <= r < stop`, of the position r of a key. Both bounds are integers, or both are tensors."""

    FLAT: ClassVar = {
        "interval": {"start": int, "stop": int},
        "interval_rows": {"start": Tensor, "stop": Tensor},
        "interval_stops": {"stop": Tensor},
    }
    kind: ClassVar[str] = "interval"
    start: int | Tensor
    """A tensor is (b or 1, s_q or 1), or (t_q,) for queries end to end; `stop` again where `open_start`."""
    stop: int | Tensor
    open_start: bool = False

    @property
    def identity(self) -> str:
        if not isinstance(self.stop, Tensor):
            return self.kind
        return "interval_stops" if self.open_start else "interval_rows"

    @property
    def has_lower_bound(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return not self.open_start

    @property
    def bounds_per_row(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return isinstance(self.stop, Tensor)

    @property
    def indices(self) -> frozenset[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        own = any(x.dim() == 1 or x.shape[0] > 1 for x in self.flat(Tensor))
        return frozenset("b" if own else "")

    @property
    def length(self) -> int | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        lengths = [x.shape[-1] for x in self.flat(Tensor)]
        return max(lengths, default=1) if max(lengths, default=1) > 1 else None

    def sees(self, extent: Extent, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        r = extent.k_position(b, kv_idx)
        below = r < _at(self.stop, b, q_idx)
        return below if self.open_start else below & (r >= _at(self.start, b, q_idx))

    def hull(self, extent: Extent) -> Interval:
        rows = torch.zeros_like(extent.q_idx())  # (1, s_q)
        stop = (rows + self.stop).clamp(-FARTHEST, OPEN)
        start = torch.full_like(stop, -FARTHEST) if self.open_start else (rows + self.start).clamp(-FARTHEST, OPEN)
        return Interval(start, stop).less(extent.k)

    @classmethod
    def of_fields(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls, stop: int | Tensor, start: int | Tensor | None = None
    ) -> Mask:
        open_start = start is None or (not isinstance(start, Tensor) and start == -FARTHEST)
        return KeyInterval(stop if start is None else start, stop, open_start)

    def of_batch_row(self, b: int) -> KeyInterval:
        return self.each(lambda x: x[b : b + 1] if x.dim() == 2 and x.shape[0] > 1 else x)

    def of_rows(self, rows: slice | Tensor) -> KeyInterval:
        """That of these rows of queries end to end: a sequence's, or (b, s_q) of a padded batch."""

        def those(x: Tensor) -> Tensor:
            if x.dim() == 2:
                return x
            return x[None, rows] if isinstance(rows, slice) else x[rows.clamp(max=x.shape[0] - 1)]

        return self.each(those)

    def each(self, change: Callable[[Tensor], Tensor]) -> KeyInterval:
        """The same interval with each tensor changed."""
        start, stop = (change(x) if isinstance(x, Tensor) else x for x in (self.start, self.stop))
        return KeyInterval(start, stop, self.open_start)

    def shape_error(self, sizes: Sizes) -> str | None:
        return self.bounds_error(sizes.b, sizes.s_q)

    def bounds_error(self, b: int, rows: int, end_to_end: bool = False) -> str | None:
        """Why the bounds' shapes are wrong, for b batch rows of so many rows or b sequences of so many in all, or
        None."""
        for name, x in zip(("stop", "start"), (self.stop, None if self.open_start else self.start), strict=True):
            if not isinstance(x, Tensor):
                continue
            if end_to_end:
                fits = x.shape[0] == rows if x.dim() == 1 else x.shape[1] == 1 and (x.shape[0] == 1 or x.shape[0] == b)
            else:
                fits = x.dim() == 2 and (x.shape[0] == 1 or x.shape[0] == b) and (x.shape[1] == 1 or x.shape[1] == rows)
            if not fits:  # the text reads sizes, which a compiled region would then be for
                wanted = f"(), ({b}, 1) or ({rows},)"
                if not end_to_end:
                    wanted = f"(), ({b}, 1), (1, {rows}) or ({b}, {rows}); for one dimension say x[:, None] or x[None]"
                return f"interval's {name} must be {wanted}; got {tuple(x.shape)}"
        return None

    def __repr__(self) -> str:
        bounds = (list(x.shape) if isinstance(x, Tensor) else x for x in (self.start, self.stop))
        start, stop = bounds
        return f"interval({'None' if self.open_start else start},{'None' if stop == OPEN else stop})"


def _at(bound: int | Tensor, b: Tensor, q_idx: Tensor) -> int | Tensor:
    if not isinstance(bound, Tensor):
        return bound
    if bound.dim() == 1:  # of one sequence
        bound = bound[None]
    return at(bound, b, q_idx)


def interval(start: int | Tensor | None, stop: int | Tensor | None) -> Mask:
    """Row i sees the keys that stand at `start <= r < stop`; None is open. r is j, or `k_offset + j` where the layout
    has one.

    Each call reads bounds that are tensors on their device, so that a CUDA graph may be replayed with other values.
    Bounds need no order and may lie outside the keys. A row with `stop <= start` sees nothing: `out = 0` and
    `lse = -inf`, or its sink.

    Args:
        start: the first key, or None. An integer, or an int32 or int64 tensor on q's device: (), (b, 1), (1, s_q) or
            (b, s_q); for packed sequences and queries end to end (), (b, 1) or, one bound for each row, (t_q,). Keys
            count from the first of each batch row or sequence.
        stop: the key after the last, or None; the same forms.

    Raises:
        ValueError: a tensor of another dtype or of more than two dimensions, or bounds on two devices.
        TypeError: a bound that is not an integer, a tensor or None.

    >>> print(interval(1, torch.tensor([[2, 3, 3, 4]])).draw(4))
    interval([1, 1],[1, 4])
    · ■ · ·
    · ■ ■ ·
    · ■ ■ ·
    · ■ ■ ■
    >>> starts = torch.tensor([0, 3])  # left padding
    >>> mask = interval(starts[:, None], None) & causal()
    """
    first, last = (_bound(name, x) for name, x in (("start", start), ("stop", stop)))
    tensors = [x for x in (first, last) if isinstance(x, Tensor)]
    if not tensors:
        return KeyInterval.of_fields(OPEN if last is None else last, -FARTHEST if first is None else first)
    if len(devices := {x.device for x in tensors}) > 1:
        raise ValueError(f"interval's bounds must be on one device, got {', '.join(sorted(map(str, devices)))}")
    like = tensors[0]
    last = _like(like, OPEN if last is None else last)
    return KeyInterval(last if first is None else _like(like, first), last, first is None)


def _bound(name: str, x: int | Tensor | None) -> int | Tensor | None:
    if isinstance(x, Tensor):
        if x.dtype not in (torch.int32, torch.int64) or x.dim() > 2:
            raise ValueError(
                f"interval's {name} must be an int32 or int64 tensor of at most two dimensions, "
                f"got {x.dtype} {tuple(x.shape)}"
            )
        return x[None, None] if x.dim() == 0 else x
    if x is None:
        return None
    arguments.integer(f"interval's {name}", x, least=None)
    return min(max(x, -FARTHEST), OPEN)


def _like(like: Tensor, x: int | Tensor) -> Tensor:
    return x if isinstance(x, Tensor) else torch.full((1, 1), x, dtype=like.dtype, device=like.device)
