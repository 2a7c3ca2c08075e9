"""The memory order of tensors: outputs that have an operand's, and copies that keep it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from saccade.layouts.validate import (
    check_positions,
    counts_from_first,
    of_sequence,
    offset_error,
    positions_of,
    reach_error,
)
from saccade.masks import Blocked, Extent, Mask, MaskMod, Positions
from saccade.scores import Sizes


def empty_like_rows(
    x: Tensor, d: int, dtype: torch.dtype | None = None, empty_strided: Callable[..., Tensor] = torch.empty_strided
) -> Tensor:
    """An uninitialised dense tensor of x's shape with last dimension `d`, in x's memory order, of x's or another dtype.

    A transposed view gives a transposed view, as in torch's attention.
    """
    shape, steps, step = [*x.shape[:-1], d], [1] * x.dim(), 1
    for dim in reversed(range(x.dim()) if x.is_contiguous() else _memory_order(x)):
        steps[dim], step = step, step * shape[dim]
    return empty_strided(tuple(shape), tuple(steps), dtype=dtype or x.dtype, device=x.device)


def _memory_order(x: Tensor) -> list[int]:
    """The dimensions by decreasing stride, but the last one last."""
    order: list[int] = []
    for dim in range(x.dim() - 1):  # by insertion: torch.compile compares strides that it does not know, and sorts none
        order.insert(len([i for i in order if x.stride(i) >= x.stride(dim)]), dim)
    return [*order, x.dim() - 1]


def ordered_like(x: Tensor, other: Tensor) -> Tensor:
    """x as a dense tensor in another tensor's memory order."""
    return _in_order(x, _memory_order(other))


def _in_order(x: Tensor, order: list[int]) -> Tensor:
    return x.permute(order).contiguous().permute([order.index(dim) for dim in range(x.dim())])


def with_rows(x: Tensor) -> Tensor:
    """x, or a copy in x's memory order if its last dimension is not contiguous."""
    if x.stride(-1) == 1 or x.shape[-1] == 1:
        return x
    return _in_order(x, _memory_order(x))


def empty_bytes(x: Tensor, dtype: torch.dtype, keys_first: bool = False) -> Tensor:
    """Uninitialised 8-bit numbers in the shape of x (b, h, s, d) and its memory order. With `keys_first` they are
    (b, h, d, s) in memory, and rows of s keys begin at multiples of 16 bytes, as TMA reads them."""
    if keys_first:
        b, h, s, d = x.shape
        return torch.empty((b, h, d, -(-s // 16) * 16), dtype=dtype, device=x.device)[..., :s].transpose(2, 3)
    return empty_like_rows(x, x.shape[-1], dtype)


# What every layout answers: views of operands and results, errors, lengths, and where its sequences are.


class SequenceSlice(NamedTuple):
    """The slices of one sequence in canonical q and in canonical, gathered k."""

    number: int
    batch_q: slice
    rows: slice
    batch_k: slice
    keys: slice


LENGTHS, OFFSETS = ("seqused_q", "seqused_k"), ("q_offset", "k_offset")


class Layout:
    """Where the rows of q, k and v live. A canonical view is (b, h, s, d); sequences end to end are one batch row."""

    kind: Any
    """The layout's word in a Spec."""
    order: Any
    cu_seqlens_q: Any
    """(b + 1): the start of each sequence of q, and the end of the last one; None if each has a batch row."""
    cu_seqlens_k: Any
    starts_k: Any = None
    """(b): the first key of each sequence, which has seqused_k keys; None with cu_seqlens_k."""
    seqused_q: Any
    """(b): the number of rows in use of each sequence, or None for all."""
    seqused_k: Any
    q_offset: Any = None
    """Positions of query rows: see `Dense`."""
    k_offset: Any = None
    """Positions of keys."""
    validate: Any = False
    """Whether to read offsets and lengths before each call on a GPU too."""
    num_splits: Any = None
    """The number of parts into which the keys of a sequence are split; None lets the backend choose."""
    shared_pages: Any = 0
    """The number of pages that all sequences have in common."""
    slots: Any = None
    """The rows of a cache that each query row sees; None with pages."""
    has_pages: ClassVar[bool] = False
    """Whether k and v are the pages of a cache."""
    rectangular: ClassVar[bool] = False
    """Whether each sequence is a batch row of q and of k."""
    gradient_error: ClassVar[str | None] = None
    """Why calls of this layout have no gradients."""

    FLAT: ClassVar[tuple[str, ...]]
    """The fields that pass through a registered operator. Tensors go beside the text, which names them, and so do
    offsets that are numbers; numbers and flags are part of the text."""
    BOUNDS: ClassVar[tuple[str, ...]] = ()
    """Other fields that checks depend on."""
    text: str
    """The static part, such as `bshd,seqused_k,q_offset=`."""
    tensors: tuple[Tensor, ...]
    """The tensors that `text` names, in that order."""
    ints: tuple[int, ...]
    """The offsets that are numbers, which `text` names too."""
    bounds: tuple[Any, ...]
    """The numbers among `BOUNDS`."""
    positioned: bool
    """Whether the caller says where rows and keys stand."""

    def _flatten(self, word: str) -> None:
        """Sets `text`, which begins with `word`, `tensors`, `ints` and `positioned`: once, as fields never change."""
        words, tensors, ints = [word], [], []
        for name in self.FLAT:
            x = getattr(self, name)
            if isinstance(x, Tensor):
                words.append(name)
                tensors.append(x)
            elif x is not None and name in OFFSETS:
                words.append(f"{name}=")
                ints.append(x)
            elif x:
                words.append(f"{name}={x}")
        positioned = self.q_offset is not None or self.k_offset is not None
        flat: dict[str, Any] = {"text": ",".join(words), "tensors": (*tensors,), "ints": (*ints,)}
        bounds = [getattr(self, name) for name in self.BOUNDS]
        flat |= {"positioned": positioned, "bounds": tuple([None if isinstance(x, Tensor) else x for x in bounds])}
        for name, x in flat.items():
            object.__setattr__(self, name, x)

    @staticmethod
    def unflattened(words: list[str], tensors: list[Tensor], ints: list[int]) -> dict[str, Any]:
        """The fields that `_flatten` made these words of; takes from the front of the lists."""
        fields: dict[str, Any] = {}
        for word in words:
            name, sign, x = word.partition("=")
            fields[name] = tensors.pop(0) if not sign else ints.pop(0) if not x else x == "True" or int(x)
        return fields

    def positions(self, s_q: int) -> Positions | None:
        """The positions of s_q rows and of keys; None without offsets."""
        if not self.positioned:
            return None
        return positions_of(self.q_offset, self.k_offset, None if self.cu_seqlens_q is None else s_q)

    def sequence_offsets(self, sequence: SequenceSlice, s_q: int) -> tuple[Any, Any]:
        """`q_offset` and `k_offset` of one sequence as a batch of one row; s_q as in `positions`."""
        positions = self.positions(s_q)
        return (None, None) if positions is None else of_sequence(positions, sequence.number, sequence.rows)

    def position_error(self, mask: Mask | None, sizes: Sizes, rows: int) -> str | None:
        """Why the shapes of offsets, or a mask beside them, are wrong, or None; `rows` are those of a batch row, or of
        all sequences end to end."""
        positions = self.positions(rows)
        if positions is None:
            return None
        if error := offset_error(self.q_offset, self.k_offset, sizes.b, rows, self.cu_seqlens_q is not None):
            return error
        leaves = [] if mask is None else [mask] if isinstance(mask, Blocked) else [*mask.leaves()]
        if any(isinstance(leaf, MaskMod) for leaf in leaves) and (error := self.reach_error(sizes)):
            return error
        if not positions.counted and (leaf := next(filter(counts_from_first, leaves), None)) is not None:
            return (
                f"{leaf!r} counts rows and keys from the first: omit q_offset and k_offset, or write it as "
                "mask_mod(fn) of positions"
            )
        return None

    def reach_error(self, sizes: Sizes) -> str | None:
        """Why functions do not take the positions of a call of these sizes, as far as offsets are numbers."""
        error = reach_error("q_offset", self.q_offset, sizes.s_q)
        return error or reach_error("k_offset", self.k_offset, sizes.s_k)

    def check_positions(self, functions: bool, s_q: int, s_k: int) -> None:
        """Reads offsets of rows in use, and of keys; `functions` take positions nearer to 0. Raises ValueError for
        positions that are too far from it."""
        positions = self.positions(s_q)
        if positions is None:
            return
        q, rows = self.q_offset, s_q
        if positions.per_row and isinstance(positions.q, Tensor):
            q, rows = self._in_use(positions.q), 1
        check_positions("q_offset", q, rows, functions)
        check_positions("k_offset", self.k_offset, s_k, functions)

    def _in_use(self, q: Tensor) -> Tensor:
        """The positions of rows in use, of all, (b or 1, s_q) or (t_q,)."""
        if q.dim() == 1:
            return q[: int(self.cu_seqlens_q[-1])]
        if self.seqused_q is None:
            return q
        rows = torch.arange(q.shape[1], device=q.device) < self.seqused_q[:, None]
        return q.expand(rows.shape)[rows]

    @property
    def sequences(self) -> int:
        """The number of sequences, of a layout that is not rectangular."""
        raise NotImplementedError

    ragged_keys: ClassVar[bool] = False
    """Whether the keys of all sequences are one batch row: sequences end to end, or ranges of it."""

    # Views

    def canonical(self, x: Tensor) -> Tensor:
        """A (b, h, s, d) view of an operand or of out."""
        raise NotImplementedError

    def ordered(self, x: Tensor) -> Tensor:
        """A view in the user's order of a (b, h, s, d) tensor that is like q or out."""
        raise NotImplementedError

    def ordered_keys(self, x: Tensor) -> Tensor:
        """A view in the user's order of a (b, h, s, d) tensor that is like k or v."""
        return self.ordered(x)

    def canonical_lse(self, x: Tensor) -> Tensor:
        """A (b, h_q, s_q) view of an LSE."""
        return x

    def ordered_lse(self, x: Tensor) -> Tensor:
        """A view in the user's form of a (b, h_q, s_q) tensor."""
        return x

    def wrap_out(self, out: Tensor) -> Tensor:
        """The result in the type of the user's operands."""
        return out

    # Errors: the text, or None

    def shape_error(self, q: torch.Size, k: torch.Size, v: torch.Size) -> str | None:
        """Why the shapes of the user's operands are wrong, or None."""
        raise NotImplementedError

    def mask_error(self, mask: Mask | None, q: Tensor, k: Tensor) -> str | None:
        """Why a mask or the layout's lengths do not fit the user's operands, or None."""
        raise NotImplementedError

    def out_error(self, out: Any) -> str | None:
        """Why results cannot be written to `out`, or None."""
        return None if isinstance(out, Tensor) else f"out must be a tensor, got {type(out).__name__}"

    def check_lengths(self, s_q: int, s_k: int) -> None:
        """Reads offsets and lengths; s_q and s_k are those of the canonical operands. Raises ValueError for lengths or
        offsets that the operands do not have."""

    # Lengths

    @property
    def knows_rows(self) -> bool:
        """Whether the host knows the rows of the longest sequence, or a bound of them, as `sizes` needs them."""
        return True

    def sizes(self, q: Tensor, k: Tensor) -> Sizes:
        """The sequences, heads, rows and keys of the user's operands."""
        raise NotImplementedError

    def extent(self, q: Tensor, k: Tensor) -> Extent:
        """The lengths of canonical operands as one padded batch."""
        extent = Extent.of(q.shape[2], k.shape[2], self.seqused_q, self.seqused_k, q.device)
        return extent.at(self.positions(q.shape[2]))

    def keys_in_use(self, s_k: int) -> Tensor:
        """(b or 1,): of each sequence, where a batch row has room for s_k."""
        if self.seqused_k is not None:
            return self.seqused_k
        used = self.cu_seqlens_k
        return torch.full((1,), s_k, device="cpu") if used is None else used.diff()

    def function_sizes(self, sizes: Sizes) -> Sizes:
        """The sizes that tensors must have if functions read them at their indices, as far as the host knows."""
        numbers: Any = (x if isinstance(x, (int, torch.SymInt)) else 0 for x in (self.q_offset, self.k_offset))
        further: Any = (n + max(x, 0) for n, x in zip((sizes.s_q, sizes.s_k), numbers, strict=True))
        return Sizes(sizes.b, sizes.h, *further, exact=sizes.exact)

    def common_offset(self, s_q: int, s_k: int) -> int | None:
        """Keys less query rows, where all sequences share that number and the host knows it without reading tensors."""
        return None

    def pairs(self, q: Tensor, k: Tensor) -> int:
        """Pairs of a row and a key of one sequence, over all query heads, of the user's operands."""
        raise NotImplementedError

    def capacity(self, s_k: int) -> int:
        """How many keys a sequence has room for, of canonical k with s_k."""
        return s_k

    def tiles(self, s: int, block: int) -> int:
        """How many tiles of `block` rows or keys there may be among s."""
        return s // block + self.sequences + 1

    # Sequence by sequence

    def gathered(self, x: Tensor) -> Tensor:
        """Canonical k or v with the keys of each sequence in one place."""
        return x

    def sequence_slices(self, q: Tensor, k: Tensor) -> list[SequenceSlice]:
        """The slices of each sequence in canonical q and in gathered k. Reads the offsets."""
        whole = slice(0, q.shape[2]), slice(0, k.shape[2])
        batches = (slice(b, b + 1) for b in range(q.shape[0]))
        return [SequenceSlice(b, batch, whole[0], batch, whole[1]) for b, batch in enumerate(batches)]

    def in_place(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """The operands whose alignment decides which backend runs."""
        return q, k, v
