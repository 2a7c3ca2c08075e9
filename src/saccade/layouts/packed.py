"""Packed layouts: sequences of different lengths end to end, without padding. Nested (jagged) tensors are packed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from saccade.layouts.base import LENGTHS, OFFSETS, Layout, SequenceSlice
from saccade.layouts.validate import (
    check_offset,
    check_offsets,
    check_vector,
    described,
    has_values,
    offsets_of_lengths,
    offsets_of_position_ids,
    operand_error,
    rows_error,
    same_vector,
    sequence_mask_error,
    shortened,
)
from saccade.masks import Extent, Mask, Selected
from saccade.scores import Sizes
from saccade.util import arguments


@dataclass(frozen=True, eq=False)
class Packed(Layout):
    """Sequences of different lengths end to end, without padding: q (t_q, h_q, d), k (t_k, h_k, d), v (t_k, h_k, d_v).

    Formula: sequence `i` has the rows `cu_seqlens_q[i]` to `cu_seqlens_q[i + 1]` of q. The first `seqused_q[i]` of them
    are in use (all without it). It sees only its own keys, `cu_seqlens_k[i]` to `cu_seqlens_k[i + 1]`. Indices count
    from the start of the sequence, and masks are bottom-right aligned in each sequence. out is (t_q, h_q, d_v), and the
    LSE is (h_q, t_q). Unused rows, and rows after the last sequence, are never read. Their output and gradients are
    zero, and their LSE is -inf.

    Args:
        cu_seqlens_q: (b + 1,) int32 or int64 on q's device: 0, then the end of each sequence of q. Sequences may be
            empty.
        cu_seqlens_k: the same for k and v; cu_seqlens_q when None, as in self-attention.
        max_seqlen_q: an upper bound of q's lengths: an integer, or a tensor of one number, which nothing reads. Only
            the size of bool masks and BlockMasks depends on it. Without it they need as many rows as q, on a CPU as
            the longest sequence.
        max_seqlen_k: the same for k and v.
        seqused_q: (b,) integer tensor, the number of rows in use of each sequence, or None for all.
        seqused_k: the same for k and v.
        validate: checks the offsets before each call on a GPU too; the host waits for them. A CPU always checks them.
            With wrong offsets kernels stay inside the tensors, but their results are undefined.
        q_offset: positions of rows, as in `Dense`: an int, an offset for each sequence, (b,) or (b, 1), or a position
            for each row, (t_q,) or (1, t_q).
        k_offset: positions of keys: an int or a tensor (b,).
        starts_k: (b,) integer tensor instead of cu_seqlens_k. Sequence `i` sees the `seqused_k[i]` keys from row
            `starts_k[i]` on. Ranges may overlap and leave gaps. The gradient of a key is the sum over all sequences
            that see it, in the order of sequences if deterministic. It is zero for a key in no range.

    Raises:
        ValueError: offsets or lengths are not integer vectors of the right shapes, or a bound is negative. If offsets
            are checked, also if they do not begin at 0, decrease, or end beyond the tensor.

    Source: the argument names are those of FlashAttention's varlen functions (https://arxiv.org/abs/2205.14135).

    >>> offsets = torch.tensor([0, 3, 3, 10])
    >>> Packed(offsets)
    Packed(3 sequences)
    >>> q, k, v = torch.randn(10, 4, 16), torch.randn(10, 2, 16), torch.randn(10, 2, 16)
    >>> attention(q, k, v, mask=causal(), layout=Packed(offsets)).shape
    torch.Size([10, 4, 16])
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor | None = None
    max_seqlen_q: int | Tensor | None = None
    max_seqlen_k: int | Tensor | None = None
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None
    validate: bool = False
    q_offset: int | Tensor | None = None
    k_offset: int | Tensor | None = None
    starts_k: Tensor | None = None

    order = "thd"
    ragged_keys = True
    # No result needs the bounds.
    BOUNDS = "max_seqlen_q", "max_seqlen_k"
    FLAT = "cu_seqlens_q", "cu_seqlens_k", "starts_k", *LENGTHS, *OFFSETS, "validate"

    def __post_init__(self) -> None:
        arguments.flags(validate=self.validate)
        self._settle_keys()
        for name in ("cu_seqlens_q", "cu_seqlens_k") if self.starts_k is None else ("cu_seqlens_q",):
            check_vector(name, getattr(self, name), "(b + 1,)")
            if not getattr(self, name).shape[0]:
                raise ValueError(f"{name} must hold b + 1 offsets, the first of them 0, got none")
        if self.cu_seqlens_k is not None and self.cu_seqlens_q.shape != self.cu_seqlens_k.shape:
            shapes = [tuple(x.shape) for x in (self.cu_seqlens_q, self.cu_seqlens_k)]
            raise ValueError(
                f"cu_seqlens_q and cu_seqlens_k must have one shape (b + 1,), got {shapes[0]}, {shapes[1]}"
            )
        for name in ("starts_k", *LENGTHS):
            if (used := getattr(self, name)) is None:
                continue
            check_vector(name, used, "(b,)")
            if used.shape[0] != self.sequences:
                raise ValueError(f"{name} must have shape ({self.sequences},), got {tuple(used.shape)}")
        check_offset("q_offset", self.q_offset)
        check_offset("k_offset", self.k_offset)
        for name in ("max_seqlen_q", "max_seqlen_k"):
            bound = getattr(self, name)
            if isinstance(bound, Tensor):
                if bound.numel() != 1 or bound.is_floating_point():
                    raise ValueError(f"{name} must be an integer or a tensor of one, got {described(bound)}")
            elif bound is not None:
                bound = arguments.integer(name, bound, otherwise=", a tensor of one, or None")
                object.__setattr__(self, name, bound)
        self._flatten("packed")

    def _settle_keys(self) -> None:
        """Checks that either cu_seqlens_k or starts_k says where keys are; the default is cu_seqlens_q."""
        if self.starts_k is None:
            if self.cu_seqlens_k is None:
                object.__setattr__(self, "cu_seqlens_k", self.cu_seqlens_q)
        elif self.cu_seqlens_k is not None or self.seqused_k is None:
            got = f"cu_seqlens_k {described(self.cu_seqlens_k)}, seqused_k {described(self.seqused_k)}"
            raise ValueError(
                "starts_k takes the place of cu_seqlens_k and needs seqused_k: pass "
                f"Packed(cu_seqlens_q, starts_k=…, seqused_k=…), got {got}"
            )

    @staticmethod
    def from_lengths(
        lengths_q: Sequence[int] | Tensor,
        lengths_k: Sequence[int] | Tensor | None = None,
        device: torch.device | str | None = None,
    ) -> Packed:
        """A Packed layout of sequences with these lengths.

        Formula: `cu_seqlens = [0, n_0, n_0 + n_1, …]`.

        Args:
            lengths_q: the lengths of q's sequences: integers, or an integer tensor (b,), which the host does not read.
            lengths_k: the same for k and v; lengths_q when None.
            device: the device of the offsets, which must be q's. When None it is the tensor's, or torch's default.

        Raises:
            ValueError: lengths are not integers from 0 on, a tensor is not an integer vector, or q and k have different
                numbers of sequences. Negative lengths in a tensor are reported as wrong offsets.

        >>> Packed.from_lengths([3, 0, 7]).cu_seqlens_q
        tensor([ 0,  3,  3, 10], dtype=torch.int32)
        """
        offsets_q, longest_q = offsets_of_lengths("lengths_q", lengths_q, device)
        if lengths_k is None:
            return Packed(offsets_q, offsets_q, longest_q, longest_q)
        offsets_k, longest_k = offsets_of_lengths("lengths_k", lengths_k, device)
        return Packed(offsets_q, offsets_k, longest_q, longest_k)

    @staticmethod
    def from_position_ids(ids: Tensor, max_sequences: int | None = None) -> Packed:
        """A Packed layout of documents end to end, from position ids as data collators make them.

        Formula: a sequence begins at the first token of each row of `ids`, and wherever the id is 0.

        Args:
            ids: (t,) or (b, s) integers: the position of each token in its document. q, k and v are (t, h, d) or those
                of (b, s) flattened, (b s, h, d).
            max_sequences: the number of sequences of the layout. Sequences that `ids` lacks are empty. With it nothing
                waits for the device, and a CUDA graph may be replayed with other ids. Tokens of further sequences
                have results of zero and an LSE of -inf; on a CPU they are an error. Without it the host reads the
                number of sequences, and waits for the device once.

        Raises:
            ValueError: ids are not an integer tensor (t,) or (b, s), max_sequences is below 1, or, on a CPU, there are
                more sequences than that.

        >>> Packed.from_position_ids(torch.tensor([[0, 1, 2, 0], [0, 1, 0, 1]])).cu_seqlens_q
        tensor([0, 3, 4, 6, 8], dtype=torch.int32)
        >>> Packed.from_position_ids(torch.tensor([0, 1, 2, 0]), max_sequences=4).cu_seqlens_q
        tensor([0, 3, 4, 4, 4], dtype=torch.int32)
        """
        return Packed(offsets_of_position_ids(ids, max_sequences))

    @property
    def sequences(self) -> int:
        return self.cu_seqlens_q.shape[0] - 1

    @property
    def kind(self) -> str:
        return "packed" if self.starts_k is None else "ranges"

    def canonical(self, x: Tensor) -> Tensor:
        """A (1, h, t, d) view of a (t, h, d) tensor."""
        return x.transpose(0, 1).unsqueeze(0)

    def ordered(self, x: Tensor) -> Tensor:
        """A (t, h, d) view of a (1, h, t, d) tensor."""
        return x.squeeze(0).transpose(0, 1)

    def canonical_lse(self, x: Tensor) -> Tensor:
        """A (1, h, t) view of an (h, t) tensor."""
        return x.unsqueeze(0)

    def ordered_lse(self, x: Tensor) -> Tensor:
        return x.squeeze(0)

    def shape_error(self, q: torch.Size, k: torch.Size, v: torch.Size) -> str | None:
        if not len(q) == len(k) == len(v) == 3:
            return "with packed sequences q, k and v must have three dimensions, (t, h, d)"
        return operand_error(q, k, v, h=1, s=0)

    def mask_error(self, mask: Mask | None, q: Tensor, k: Tensor) -> str | None:
        no_documents = "packed sequences do not see one another: make each document a sequence, and omit documents(ids)"
        sizes = self.sizes(q, k)
        error = sequence_mask_error(mask, sizes, no_documents)
        error = error or self.position_error(mask, sizes, q.shape[0])
        leaves = () if mask is None or self.starts_k is None else mask.leaves()
        if not error and (leaf := next((leaf for leaf in leaves if isinstance(leaf, Selected)), None)) is not None:
            return f"{leaf!r} counts the keys of whole sequences: pass cu_seqlens_k in place of starts_k"
        if isinstance(self.max_seqlen_q, Tensor) and mask is not None and mask.bounds_per_row:
            # Of groups of rows there are as many lists as a number says that nothing reads.
            s_q = _longest(None, self.cu_seqlens_q.diff, q.shape[0], self.cu_seqlens_q, unknown=0)
            sizes = sizes._replace(s_q=s_q)
        return error or rows_error(mask, sizes, k.shape[1], q.shape[0], True)

    def check_lengths(self, s_q: int, s_k: int) -> None:
        if self.starts_k is not None:
            starts, used = self.starts_k.tolist(), self.seqused_k.tolist()  # pyright: ignore[reportOptionalMemberAccess]
            if any(start < 0 or n < 0 or start + n > s_k for start, n in zip(starts, used, strict=True)):
                raise ValueError(
                    "starts_k and seqused_k must be from 0 on, and no range may end beyond the tensor's "
                    f"{s_k} rows, got {shortened(starts)} and {shortened(used)}"
                )
        for side, t in (("q", s_q), ("k", s_k)) if self.starts_k is None else (("q", s_q),):
            offsets = getattr(self, f"cu_seqlens_{side}")
            lengths = check_offsets(f"cu_seqlens_{side}", offsets.tolist(), t)
            used = getattr(self, f"seqused_{side}")
            if used is not None and any(not 0 <= n <= s for n, s in zip(used.tolist(), lengths, strict=True)):
                raise ValueError(
                    f"seqused_{side} must be between 0 and the sequences' lengths {shortened(lengths)}, "
                    f"got {shortened(used.tolist())}"
                )

    def sizes(self, q: Tensor, k: Tensor) -> Sizes:
        """Sizes with upper bounds of the lengths. The rows of q or k replace a bound that is a tensor."""
        s_q = _longest(self.max_seqlen_q, self.cu_seqlens_q.diff, q.shape[0], self.cu_seqlens_q)
        s_k = _longest(self.max_seqlen_k, self._lengths_k, k.shape[0], self.cu_seqlens_q)
        return Sizes(self.sequences, q.shape[1], s_q, s_k, exact=False)

    def extent(self, q: Tensor, k: Tensor) -> Extent:
        raise TypeError(f"{self!r} is not a padded batch: its sequences differ in extent")

    def common_offset(self, s_q: int, s_k: int) -> int | None:
        same = same_vector(self.cu_seqlens_q, self.cu_seqlens_k) and same_vector(self.seqused_q, self.seqused_k)
        return 0 if same else None

    def pairs(self, q: Tensor, k: Tensor) -> int:
        if not has_values(self.cu_seqlens_q):  # those of sequences of one length
            return q.shape[1] * (q.shape[0] * k.shape[0] // max(self.sequences, 1))
        return q.shape[1] * int((self.cu_seqlens_q.diff().long() * self._lengths_k()).sum())

    def _lengths_k(self) -> Tensor:
        """(b): the number of keys of each sequence; of ranges the keys in use."""
        return self.seqused_k if self.cu_seqlens_k is None else self.cu_seqlens_k.diff()  # pyright: ignore[reportReturnType]

    def sequence_slices(self, q: Tensor, k: Tensor) -> list[SequenceSlice]:
        row = slice(0, 1)
        if self.cu_seqlens_k is not None:
            keys = pairwise(self.cu_seqlens_k.tolist())
        else:
            starts, used = self.starts_k.tolist(), self.seqused_k.tolist()  # pyright: ignore[reportOptionalMemberAccess]
            keys = [(start, start + n) for start, n in zip(starts, used, strict=True)]
        ends = zip(pairwise(self.cu_seqlens_q.tolist()), keys, strict=True)
        return [SequenceSlice(i, row, slice(*q), row, slice(*k)) for i, (q, k) in enumerate(ends)]

    def _in_use(self, q: Tensor) -> Tensor:
        return q[self.rows_in_use(q.shape[0])]

    def rows_in_use(self, t_q: int) -> Tensor:
        """bool (t_q): which rows of q are in use."""
        row = torch.arange(t_q, device=self.cu_seqlens_q.device)
        b = torch.bucketize(row, self.cu_seqlens_q[1:], right=True)
        inside = b < self.sequences
        if self.seqused_q is None or not self.sequences:
            return inside
        b = b.clamp(max=self.sequences - 1)
        return inside & (row - self.cu_seqlens_q[b] < self.seqused_q[b])

    def __repr__(self) -> str:
        return f"Packed({self.sequences} sequences)"


def _longest(
    bound: int | Tensor | None, lengths: Callable[[], Tensor], rows: int, offsets: Tensor, unknown: int | None = None
) -> int:
    """The bound of the lengths; without one the longest length if the host knows it, else the number of rows, or
    `unknown`."""
    if isinstance(bound, Tensor):
        return rows
    if bound is not None:
        return min(bound, rows)
    if offsets.device.type != "cpu" or not has_values(offsets) or offsets.shape[0] < 2:
        return rows if unknown is None else unknown
    return min(max(int(lengths().max()), 0), rows)


_RAGGED = {"bhsd": 2, "bshd": 1}
"""The dimension that has the sequences."""


@dataclass(frozen=True, eq=False)
class Nested(Packed):
    """Packed sequences whose result becomes a nested tensor."""

    nested_order: str = "bhsd"

    def wrap_out(self, out: Tensor) -> Tensor:
        nested = torch.nested.nested_tensor_from_jagged(out, self.cu_seqlens_q)
        return nested if self.nested_order == "bshd" else nested.transpose(1, 2)

    def out_error(self, out: Any) -> str | None:
        return f"out must be a tensor, and q must not be nested, got out {type(out).__name__}"


def unwrap(q: Any, k: Any, v: Any, layout: Layout) -> tuple[Tensor, Tensor, Tensor, Layout]:
    """The values of nested q, k and v as (t, h, d) tensors, and their layout. Raises ValueError for operands that are
    not all nested, not jagged, with holes, of different offsets, or in another order than the layout's."""
    ragged_dim = _RAGGED.get(layout.order)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not x.is_nested or x.layout != torch.jagged:
            raise ValueError(f"q, k and v must all be nested tensors of layout torch.jagged, or none; {name} is not")
        if x.dim() != 4 or x._ragged_idx != ragged_dim or x.lengths() is not None or layout.tensors:
            raise ValueError(
                "nested tensors must be (b, h, s, d) with layout=Dense('bhsd'), or (b, s, h, d) with Dense('bshd'), "
                "jagged in s, without holes, used lengths or offsets that are tensors; "
                f"{name} has {x.dim()} dimensions, "
                f"jagged in dimension {x._ragged_idx}, layout {layout!r}"
            )
    if k.offsets() is not v.offsets() and not torch.equal(k.offsets(), v.offsets()):
        raise ValueError("nested k and v must have the same offsets")
    q_rows, k_rows, v_rows = (x.values() if ragged_dim == 1 else x.values().transpose(0, 1) for x in (q, k, v))
    bounds = _bound(q), _bound(k)
    positions = {"q_offset": layout.q_offset, "k_offset": layout.k_offset}
    return q_rows, k_rows, v_rows, Nested(q.offsets(), k.offsets(), *bounds, nested_order=layout.order, **positions)


def _bound(x: Any) -> int | None:
    """The longest sequence of a tensor on a device, as torch keeps it of those that are made from several; a layout
    finds it itself where the host has the offsets."""
    return None if torch.compiler.is_compiling() or x.offsets().device.type == "cpu" else x._maybe_max_seqlen
