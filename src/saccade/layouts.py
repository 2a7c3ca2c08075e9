"""Where the rows of q, k and v live: the Layout records, and the shape of what comes out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Dimension d of the canonical (b, h, s, d) view is dimension ORDERS[order][d] of the user's tensor.
ORDERS = {"bhsd": (0, 1, 2, 3), "bshd": (0, 2, 1, 3), "sbhd": (1, 2, 0, 3)}
_INVERSE = {"bhsd": (0, 1, 2, 3), "bshd": (0, 2, 1, 3), "sbhd": (2, 0, 1, 3)}


@dataclass(frozen=True, eq=False)
class Dense:
    """One tensor per operand, every batch row of the same length or padded to it.

    Formula: batch row `b` of q has `seqused_q[b]` rows (all `s_q` without it), k and v have `seqused_k[b]`.
    Masks are bottom-right aligned per batch row: `off = seqused_k[b] - seqused_q[b]`. Rows beyond the used
    ones are never read; their output and gradients are zero and their LSE is -inf.

    Args:
        order: "bhsd" (default), "bshd" or "sbhd": what the four dimensions of q, k, v and out are.
        seqused_q: (b,) integer tensor on q's device, values in [0, s_q], or None.
        seqused_k: (b,) integer tensor on q's device, values in [0, s_k], or None.

    Raises:
        ValueError: an order that is not one of the three, or lengths that are not integer vectors.

    >>> Dense("bshd")
    Dense('bshd')
    """

    order: str = "bhsd"
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise ValueError(f"unknown order {self.order!r}; a Dense layout is one of {', '.join(map(repr, ORDERS))}")
        for name in ("seqused_q", "seqused_k"):
            used = getattr(self, name)
            if used is None:
                continue
            if not isinstance(used, Tensor) or used.dim() != 1 or used.dtype not in (torch.int32, torch.int64):
                raise ValueError(f"{name} must be an int32 or int64 tensor of shape (b,), got {_described(used)}")

    @property
    def text(self) -> str:
        """The static part, e.g. `bshd,seqused_k`: what `records` says about the tensors that follow."""
        if self.seqused_q is None and self.seqused_k is None:
            return self.order
        names = [name for name in ("seqused_q", "seqused_k") if getattr(self, name) is not None]
        return ",".join([self.order, *names])

    @property
    def records(self) -> list[Tensor]:
        """The tensors, in the order in which `text` names them."""
        if self.seqused_q is None and self.seqused_k is None:
            return []
        return [used for used in (self.seqused_q, self.seqused_k) if used is not None]

    @staticmethod
    def from_records(text: str, records: list[Tensor]) -> Dense:
        """The inverse of `text` and `records`; takes what it needs from the front of `records`."""
        if text in PLAIN:
            return PLAIN[text]
        order, *names = text.split(",")
        return Dense(order, **{name: records.pop(0) for name in names})

    def canonical(self, x: Tensor) -> Tensor:
        """A (b, h, s, d) view of a tensor in this order."""
        return x if self.order == "bhsd" else x.permute(ORDERS[self.order])

    def ordered(self, x: Tensor) -> Tensor:
        """A view in this order of a (b, h, s, d) tensor."""
        return x if self.order == "bhsd" else x.permute(_INVERSE[self.order])

    def __repr__(self) -> str:
        used = [f"{name}={list(getattr(self, name).shape)}" for name in self.text.split(",")[1:]]
        return f"Dense({', '.join([repr(self.order), *used])})"


PLAIN = {order: Dense(order) for order in ORDERS}
"""The layouts without tensors, made once."""


def empty_like_rows(x: Tensor, d: int, dtype: torch.dtype | None = None) -> Tensor:
    """An uninitialised tensor of x's shape with last dimension `d`, dense, its dimensions in x's memory order.

    So a transposed view in gives a transposed view out, as torch's own attention does.
    """
    shape = [*x.shape[:-1], d]
    if x.is_contiguous():
        return torch.empty(shape, dtype=dtype or x.dtype, device=x.device)
    order = [*sorted(range(x.dim() - 1), key=lambda dim: -x.stride(dim)), x.dim() - 1]
    made = torch.empty([shape[dim] for dim in order], dtype=dtype or x.dtype, device=x.device)
    return made.permute([order.index(dim) for dim in range(x.dim())])


def _described(value: object) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
