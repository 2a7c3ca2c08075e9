"""Dense layouts: one tensor per operand, every batch row of the same length or padded to it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from saccade.layouts.base import LENGTHS, OFFSETS, Layout, SequenceSlice
from saccade.layouts.validate import check_offset, check_vector, operand_error, rows_error, same_vector, shortened
from saccade.masks import Blocked, Documents, Mask
from saccade.scores import Sizes
from saccade.util.arguments import broadcasts

# Dimension d of the canonical (b, h, s, d) view is dimension ORDERS[order][d] of the user's tensor.
ORDERS = {"bhsd": (0, 1, 2, 3), "bshd": (0, 2, 1, 3), "sbhd": (1, 2, 0, 3)}
_INVERSE = {"bhsd": (0, 1, 2, 3), "bshd": (0, 2, 1, 3), "sbhd": (2, 0, 1, 3)}


@dataclass(frozen=True, eq=False)
class Dense(Layout):
    """One tensor per operand, every batch row of the same length or padded to it.

    Formula: batch row `b` has `seqused_q[b]` rows of q (all `s_q` without it) and `seqused_k[b]` rows of k and v. Masks
    are bottom-right aligned in each batch row: `off = seqused_k[b] - seqused_q[b]`. Later rows are never read. Their
    output and gradients are zero, and their LSE is -inf.

    With `q_offset` or `k_offset`, row i has the position `p = q_offset + i` and key j the position `r = k_offset + j`.
    The one that is missing counts as 0. Masks compare positions: `causal` is `r <= p`. `interval`, mask_mod and score
    functions take positions as their indices, and dropout draws by them. Only the device reads tensors. For a static
    cache with `n` filled rows, the new ones included, pass `Dense(q_offset=n - s_q)`.

    Args:
        order: "bhsd" (default), "bshd" or "sbhd": the order of the dimensions of q, k, v and out.
        seqused_q: (b,) integer tensor on q's device, values in [0, s_q], or None.
        seqused_k: (b,) integer tensor on q's device, values in [0, s_k], or None.
        q_offset: an int, an int32 or int64 tensor (b,), or a position for each row, (b, s_q) or (1, s_q). The range is
            -2^28 to 2^28, and -2^22 to 2^22 if functions take positions. A GPU clamps values beyond it.
        k_offset: an int or a tensor (b,).

    Raises:
        ValueError: the order is unknown, or lengths or offsets are not integer tensors of these shapes. On a CPU,
            which reads tensors, also if a value is out of range.
        TypeError: an offset is neither an integer nor a tensor.

    >>> Dense("bshd")
    Dense('bshd')
    """

    order: str = "bhsd"
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None
    q_offset: int | Tensor | None = None
    k_offset: int | Tensor | None = None

    FLAT = *LENGTHS, *OFFSETS
    cu_seqlens_q = cu_seqlens_k = None
    rectangular = True

    def __post_init__(self) -> None:
        if not isinstance(self.order, str) or self.order not in ORDERS:
            kind = ValueError if isinstance(self.order, str) else TypeError
            raise kind(f"unknown order {self.order!r}; a Dense layout has one of {', '.join(map(repr, ORDERS))}")
        for name in LENGTHS:
            if getattr(self, name) is not None:
                check_vector(name, getattr(self, name), "(b,)")
        check_offset("q_offset", self.q_offset)
        check_offset("k_offset", self.k_offset)
        self._flatten(self.order)

    @property
    def kind(self) -> str:
        return "dense" if self.seqused_q is None and self.seqused_k is None else "padded"

    @property
    def plain(self) -> bool:
        """Whether there is neither a length nor an offset."""
        return self.text == self.order

    def canonical(self, x: Tensor) -> Tensor:
        return x if self.order == "bhsd" else x.permute(ORDERS[self.order])

    def ordered(self, x: Tensor) -> Tensor:
        return x if self.order == "bhsd" else x.permute(_INVERSE[self.order])

    def shape_error(self, q: torch.Size, k: torch.Size, v: torch.Size) -> str | None:
        if not len(q) == len(k) == len(v) == 4:
            return "q, k and v must have four dimensions"
        b, h, s, _ = ORDERS[self.order]
        return operand_error(q, k, v, h, s) if q[b] == k[b] == v[b] else "q, k and v must have one batch size"

    def mask_error(self, mask: Mask | None, q: Tensor, k: Tensor) -> str | None:
        sizes = self.sizes(q, k)._replace(exact=True)
        b, _, s_q, s_k, _ = sizes
        if mask is not None and mask.block_sparse and (error := mask.shape_error(sizes)):
            return error
        for name in LENGTHS:
            if (used := getattr(self, name)) is not None and used.shape != (b,):
                return f"{name} must have shape ({b},), got {tuple(used.shape)}"
        if error := self.position_error(mask, sizes, s_q):
            return error
        leaves = list(mask.leaves()) if mask is not None else []
        if self.kind == "padded" and (isinstance(mask, Blocked) or any(leaf.of_shape for leaf in leaves)):
            return (
                "block masks are for calls whose rows are all in use: with used lengths pass the mask itself, or for "
                f"torch's BlockMask mask_mod(fn), got {mask!r}"
            )
        for leaf in leaves:
            if isinstance(leaf, Documents) and not (broadcasts(leaf.ids.shape, (b, s_q)) and leaf.length == s_q == s_k):
                return f"documents(ids) needs ids (b, s) and s_q = s_k = s, got ids {tuple(leaf.ids.shape)}"
            if leaf.kind == "prefixes" and leaf.tensors[0].shape != (b,):
                return f"prefix lengths must have shape ({b},), got {tuple(leaf.tensors[0].shape)}"
        return rows_error(mask, sizes, k.shape[ORDERS[self.order][1]], s_q)

    def check_lengths(self, s_q: int, s_k: int) -> None:
        for name, used, s in (("seqused_q", self.seqused_q, s_q), ("seqused_k", self.seqused_k, s_k)):
            if used is not None and bool(((used < 0) | (used > s)).any()):
                raise ValueError(f"{name} must be in [0, {s}], got {shortened(used.tolist())}")

    def sizes(self, q: Tensor, k: Tensor) -> Sizes:
        b, h, s, _ = ORDERS[self.order]
        return Sizes(q.shape[b], q.shape[h], q.shape[s], k.shape[s], exact=self.plain)

    def common_offset(self, s_q: int, s_k: int) -> int | None:
        if not same_vector(self.seqused_q, self.seqused_k):
            return None
        return s_k - s_q if self.seqused_q is None or s_q == s_k else None

    def pairs(self, q: Tensor, k: Tensor) -> int:
        b, h, s_q, s_k, _ = self.sizes(q, k)
        return b * h * s_q * s_k

    def tiles(self, s: int, block: int) -> int:
        return -(-s // block)

    def __repr__(self) -> str:
        given = {name: x for name in self.FLAT if (x := getattr(self, name)) is not None}
        fields = (f"{name}={list(x.shape) if isinstance(x, Tensor) else x}" for name, x in given.items())
        return f"Dense({', '.join([repr(self.order), *fields])})"


def dense_of(layout: Layout, sequence: SequenceSlice, s_q: int) -> Dense:
    """The layout of one sequence as a batch of one row; s_q rows are those of the canonical operand."""
    i = sequence.number
    of_keys = layout.seqused_k if layout.starts_k is None else None  # a range has all of its keys in use
    if layout.seqused_q is of_keys is None and not (layout.positioned or layout.has_pages):
        return PLAIN["bhsd"]
    used = {"seqused_q": layout.seqused_q, "seqused_k": of_keys}
    own = {name: None if x is None else x[i : i + 1] for name, x in used.items()}
    q_offset, k_offset = layout.sequence_offsets(sequence, s_q)
    return Dense("bhsd", **own, q_offset=q_offset, k_offset=k_offset)


PLAIN = {order: Dense(order) for order in ORDERS}
"""The layouts without tensors, made once."""
