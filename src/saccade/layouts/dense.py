"""Dense layouts: one tensor per operand, every batch row of the same length or padded to it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from saccade.layouts.offsets import check_vector

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
            if used is not None:
                check_vector(name, used, "(b,)")

    @property
    def kind(self) -> str:
        """Its word in a Spec."""
        return "padded" if self.records else "dense"

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

    def canonical(self, x: Tensor) -> Tensor:
        """A (b, h, s, d) view of a tensor in this order."""
        return x if self.order == "bhsd" else x.permute(ORDERS[self.order])

    def ordered(self, x: Tensor) -> Tensor:
        """A view in this order of a (b, h, s, d) tensor."""
        return x if self.order == "bhsd" else x.permute(_INVERSE[self.order])

    def canonical_lse(self, x: Tensor) -> Tensor:
        """(b, h_q, s_q), which an LSE has in every order."""
        return x

    def ordered_lse(self, x: Tensor) -> Tensor:
        return x

    def __repr__(self) -> str:
        used = [f"{name}={list(getattr(self, name).shape)}" for name in self.text.split(",")[1:]]
        return f"Dense({', '.join([repr(self.order), *used])})"
