"""Layouts of caches for serving: keys and values in pages, and slots, the rows of a cache by number, for new ones."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from saccade.layouts.base import OFFSETS, Layout, SequenceSlice
from saccade.layouts.validate import (
    cache_error,
    check_offset,
    check_offsets,
    check_vector,
    described,
    has_values,
    head_error,
    rows_error,
    sequence_mask_error,
    shortened,
)
from saccade.masks import Extent, Mask, Window
from saccade.scores import Sizes
from saccade.util import arguments


@dataclass(frozen=True, eq=False)
class Paged(Layout):
    """Keys and values in the pages of a cache: k (pages, page_size, h_k, d), v (pages, page_size, h_k, d_v).

    v may be a view of k's first columns. It is read with k then.

    Formula: sequence `i` has `seqused_k[i]` keys. Its key `j` is row `j % page_size` of the page
    `block_table[i, j // page_size]`. q and out are (b, s_q, h_q, d), and the LSE is (b, h_q, s_q). With `cu_seqlens_q`
    they are sequences end to end, (t_q, h_q, d), and the LSE is (h_q, t_q). Masks are bottom-right aligned: the last
    query of a sequence is at its last key. For inference: there are no gradients.

    Args:
        block_table: (b, width) int32 or int64 on q's device: the page numbers. Entries after a sequence's last page are
            never used. Page numbers out of range are clamped.
        seqused_k: (b,) integer tensor: the number of keys of each sequence, at most `width * page_size`.
        cu_seqlens_q: (b + 1,): 0, then the end of each sequence of q; or None. One call may have sequences of one query
            and of many.
        num_splits: the number of parts into which the keys of a sequence are split. Parts run in parallel and are
            merged. With None the backend chooses by shapes, without waiting for the device. With 1 a row's bits do
            not depend on the rest of the batch.
        q_offset: positions of rows, as in `Dense` or, with cu_seqlens_q, in `Packed`. None is the number of keys in use
            less the number of query rows: the last row has the position of the last key.
        k_offset: positions of keys: an int or a tensor (b,). It needs q_offset.
        shared_pages: the number of pages that all sequences have in common: the first columns of block_table, taken
            from row 0. The result is that of 0. Common pages are read once for all sequences if these differ in
            nothing but lengths; `explain` says so. Shorter sequences end inside of the common pages.
        slots: the rows of the cache that each query row sees, instead of block_table: (b, s_q, n) int32 or int64 with
            seqused_k (b, s_q), or (t_q, n) and (t_q,) for queries (t_q, h_q, d). Slot `n` is row `n % page_size` of
            page `n // page_size`, as in `append_kv`, for all heads. The first seqused_k slots of a row count. Slots
            outside of the cache are ignored, and repeated ones count once or again. Such calls have no mask, offsets or
            shared_pages, and no functions of b, q_idx or kv_idx.

    Raises:
        ValueError: tensors are not integer tensors of these shapes, num_splits is below 1, or there are more shared
            pages than columns. On a CPU, which reads tensors, also if lengths are negative or beyond the table, or
            pages are not shared.

    Source: Kwon et al., PagedAttention (https://arxiv.org/abs/2309.06180).

    >>> cache = torch.randn(9, 16, 2, 64)
    >>> layout = Paged(torch.tensor([[4, 0], [7, 2]], dtype=torch.int32), torch.tensor([20, 3]))
    >>> attention(torch.randn(2, 1, 8, 64), cache, cache, mask=causal(), layout=layout).shape
    torch.Size([2, 1, 8, 64])
    """

    block_table: Tensor = None  # pyright: ignore[reportAssignmentType] (with slots alone)
    seqused_k: Tensor = None  # pyright: ignore[reportAssignmentType]
    cu_seqlens_q: Tensor | None = None
    num_splits: int | None = None
    q_offset: int | Tensor | None = None
    k_offset: int | Tensor | None = None
    shared_pages: int = 0
    slots: Tensor | None = None

    kind = "paged"
    order = "paged"
    cu_seqlens_k = seqused_q = None
    has_pages = True
    WORD = "paged"
    FLAT = "block_table", "seqused_k", "cu_seqlens_q", *OFFSETS, "num_splits", "shared_pages", "slots"
    gradient_error = (
        "a paged cache has no gradients: call attention inside torch.no_grad(), or pass Dense or Packed keys and values"
    )

    def __post_init__(self) -> None:
        if self.slots is not None:
            self._check_slots(self.slots)
            self._flatten(self.WORD)
            return
        table, used = self.block_table, self.seqused_k
        if not isinstance(table, Tensor) or table.dim() != 2 or table.dtype not in (torch.int32, torch.int64):
            wanted = "an int32 or int64 tensor of shape (b, width)"
            raise arguments.refusal(table, f"block_table must be {wanted}, got {described(table)}")
        check_vector("seqused_k", used, "(b,)")
        if used.shape[0] != self.sequences:
            shapes = tuple(used.shape), tuple(table.shape)
            raise ValueError(f"seqused_k must have shape (b,), got {shapes[0]} with block_table {shapes[1]}")
        if self.cu_seqlens_q is not None:
            check_vector("cu_seqlens_q", self.cu_seqlens_q, "(b + 1,)")
            if self.cu_seqlens_q.shape[0] != self.sequences + 1:
                shapes = tuple(self.cu_seqlens_q.shape), tuple(table.shape)
                raise ValueError(f"cu_seqlens_q must have shape (b + 1,), got {shapes[0]} with block_table {shapes[1]}")
        check_offset("q_offset", self.q_offset)
        check_offset("k_offset", self.k_offset)
        if self.q_offset is None and self.k_offset is not None:
            raise ValueError(
                "k_offset of a paged cache needs q_offset: pass both, or neither for rows that follow the cached keys"
            )
        if self.num_splits is not None:
            splits = arguments.integer("num_splits", self.num_splits, 1, ", or None")
            object.__setattr__(self, "num_splits", splits)
        shared = self.shared_pages
        whole = isinstance(shared, int) and not isinstance(shared, bool)
        if not whole or (shared and not 0 < shared <= table.shape[1]):  # of 0 nothing is asked: a width may be a symbol
            columns = f"the columns of block_table {tuple(table.shape)}"
            kind = ValueError if whole else TypeError
            raise kind(f"shared_pages must be an integer from 0 to {columns}, got {shared!r}")
        self._flatten(self.WORD)

    def _check_slots(self, slots: Any) -> None:
        """Raises ValueError for slots that are not an integer tensor of three or two dimensions, lengths of another
        shape, or what does not go with slots."""
        used, starts = self.seqused_k, self.cu_seqlens_q
        if not isinstance(slots, Tensor) or slots.dim() not in (2, 3) or slots.dtype not in (torch.int32, torch.int64):
            wanted = "an int32 or int64 tensor of shape (b, s_q, n) or (t_q, n)"
            raise arguments.refusal(slots, f"slots must be {wanted}, got {described(slots)}")
        integers = isinstance(used, Tensor) and used.dtype in (torch.int32, torch.int64)
        if not integers or used.shape != slots.shape[:-1]:
            wanted = f"an int32 or int64 tensor {tuple(slots.shape[:-1])}, how many slots each row has"
            raise arguments.refusal(used, f"seqused_k beside slots must be {wanted}, got {described(used)}")
        if starts is not None:
            check_vector("cu_seqlens_q", starts, "(b + 1,)")
            if slots.dim() != 2 or not starts.shape[0]:
                raise ValueError(
                    f"cu_seqlens_q {tuple(starts.shape)} is for slots (t_q, n) of rows end to end, got "
                    f"{tuple(slots.shape)}"
                )
        given = [name for name in ("block_table", *OFFSETS) if getattr(self, name) is not None]
        if given := [*given, *(["shared_pages"] if self.shared_pages else [])]:
            raise ValueError(f"keys in slots have no positions, and all belong to their row: omit {', '.join(given)}")

    @property
    def sequences(self) -> int:
        return self.block_table.shape[0]

    def capacity(self, s_k: int) -> int:
        """How many keys a sequence has room for; s_k is the page size."""
        return self.block_table.shape[1] * s_k

    def canonical(self, x: Tensor) -> Tensor:
        """A (b, h, s, d) view of q or out, (1, h, t, d) where sequences are end to end; caches: (pages, h, rows, d)."""
        return x.transpose(1, 2) if x.dim() == 4 else x.transpose(0, 1).unsqueeze(0)

    def ordered(self, x: Tensor) -> Tensor:
        """A view like q's of a (b, h, s, d) tensor."""
        return x.transpose(1, 2) if self.cu_seqlens_q is None else x.squeeze(0).transpose(0, 1)

    def ordered_keys(self, x: Tensor) -> Tensor:
        """A (pages, page_size, h, d) view of a (pages, h, page_size, d) cache."""
        return x.transpose(1, 2)

    def canonical_lse(self, x: Tensor) -> Tensor:
        """(b, h_q, s_q), or (1, h, t) of an (h, t) tensor."""
        return x if self.cu_seqlens_q is None else x.unsqueeze(0)

    def ordered_lse(self, x: Tensor) -> Tensor:
        return x if self.cu_seqlens_q is None else x.squeeze(0)

    def shape_error(self, q: torch.Size, k: torch.Size, v: torch.Size, name: str = "q") -> str | None:
        """Why the shapes of q, (b, s_q, h_q, d) or (t_q, h_q, d), and of caches are wrong, or None. name: q's name."""
        ragged, b = self.cu_seqlens_q is not None, self.sequences
        if len(q) != (3 if ragged else 4) or not len(k) == len(v) == 4:
            shape = "with cu_seqlens_q must be (t, h, d)" if ragged else "must be (b, s, h, d)"
            return f"with a paged cache {name} {shape}, and the caches (pages, page_size, h, d)"
        if not ragged and q[0] != b:
            return f"{name} must have the batch size of block_table ({b}, {self.block_table.shape[1]})"
        return cache_error(k, v) or head_error(q, k, v, -2)

    def mask_error(self, mask: Mask | None, q: Tensor, k: Tensor) -> str | None:
        no_documents = "documents(ids) needs rows and keys that are the same tokens, which no paged cache has"
        sizes, flat = self.sizes(q, k), self.cu_seqlens_q is not None
        rows = q.shape[0 if flat else 1]
        if isinstance(mask, Window) and not self.positioned:
            return None
        error = sequence_mask_error(mask, sizes, no_documents)
        if error is None and self.positioned:
            error = self.position_error(mask, sizes, rows)
        elif error is None and mask is not None:
            leaf = next(filter(attrgetter("of_shape"), mask.leaves()), None)
            if leaf is not None:
                return (
                    f"{leaf!r} counts rows from 0, and the rows of a paged call follow the cached keys: "
                    "pass mask_mod(fn), or Paged(…, q_offset=0) to count from 0"
                )
        return error or rows_error(mask, sizes, k.shape[2], rows, flat)

    def check_lengths(self, s_q: int, s_k: int) -> None:
        """Reads lengths and offsets; s_k is the page size."""
        room, used = self.capacity(s_k), self.seqused_k.tolist()
        if used and not 0 <= min(used) <= max(used) <= room:
            raise ValueError(
                f"seqused_k must be in [0, {room}], the rows of {self.block_table.shape[1]} pages of {s_k}, "
                f"got {shortened(used)}"
            )
        if self.cu_seqlens_q is not None:
            check_offsets("cu_seqlens_q", self.cu_seqlens_q.tolist(), s_q)
        if self.shared_pages:
            self._check_shared_pages(s_k)

    def _check_shared_pages(self, s_k: int) -> None:
        table = self.block_table[:, : self.shared_pages]
        begun = torch.arange(self.shared_pages, device="cpu") * s_k < self.seqused_k[:, None]
        wrong = ((table != table[:1]) & begun).any(1).nonzero().flatten().tolist()
        if wrong:
            raise ValueError(
                f"shared_pages={self.shared_pages} says that all rows of block_table {tuple(self.block_table.shape)} "
                f"begin with the same pages, as row 0 does; row {wrong[0]} begins with "
                f"{shortened(table[wrong[0]].tolist())}, row 0 with {shortened(table[0].tolist())}"
            )

    @property
    def knows_rows(self) -> bool:
        offsets = self.cu_seqlens_q
        if offsets is None:
            return True
        return offsets.device.type == "cpu" and has_values(offsets)

    def sizes(self, q: Tensor, k: Tensor) -> Sizes:
        """The sizes, with s_q = 0 if the host does not know the longest sequence."""
        s_q, offsets = q.shape[1], self.cu_seqlens_q
        if offsets is not None:
            s_q = int(offsets.diff().max()) if self.sequences and self.knows_rows else 0
        return Sizes(self.sequences, q.shape[-2], s_q, self.capacity(k.shape[1]), exact=False)

    def extent(self, q: Tensor, k: Tensor) -> Extent:
        """The lengths of q as a padded batch; reads the offsets."""
        s_k = self.capacity(k.shape[2])
        if self.cu_seqlens_q is None:
            extent = Extent.of(q.shape[2], s_k, None, self.seqused_k, q.device)
        else:
            lengths = self.cu_seqlens_q.diff()
            extent = Extent.of(max(lengths.tolist(), default=0), s_k, lengths, self.seqused_k, q.device)
        if not self.positioned:
            first = extent.keys - extent.rows
            return extent._replace(p=first + extent.q_idx(), k=torch.zeros_like(extent.rows[:1]))
        positions = self.positions(q.shape[2])
        assert positions is not None
        if positions.per_row and self.cu_seqlens_q is not None and isinstance(positions.q, Tensor):
            rows = self.cu_seqlens_q[:-1, None] + extent.q_idx()  # of a padded batch
            return extent.at(positions._replace(q=positions.q[rows.clamp(0, max(positions.q.shape[0] - 1, 0))]))
        return extent.at(positions)

    def pairs(self, q: Tensor, k: Tensor) -> int:
        if not has_values(self.seqused_k):  # those of full tables
            return q.shape[:-1].numel() * self.capacity(k.shape[1])
        rows = q.shape[1] if self.cu_seqlens_q is None else self.cu_seqlens_q.diff()
        return q.shape[-2] * int((self.seqused_k.long() * rows).sum())

    def gathered(self, x: Tensor) -> Tensor:
        """The keys of every sequence, (b, h_k, capacity, d), of a cache (pages, h_k, page_size, d)."""
        pages = self.block_table.long().clamp(0, x.shape[0] - 1)
        return x[pages].transpose(1, 2).flatten(2, 3)

    def sequence_slices(self, q: Tensor, k: Tensor) -> list[SequenceSlice]:
        keys, batches = slice(0, k.shape[2]), [slice(b, b + 1) for b in range(self.sequences)]
        if self.cu_seqlens_q is None:
            return [SequenceSlice(b, batch, slice(0, q.shape[2]), batch, keys) for b, batch in enumerate(batches)]
        rows = [slice(*ends) for ends in pairwise(self.cu_seqlens_q.tolist())]
        return [SequenceSlice(b, slice(0, 1), rows[b], batch, keys) for b, batch in enumerate(batches)]

    def function_sizes(self, sizes: Sizes) -> Sizes:
        sizes = super().function_sizes(sizes)
        return sizes if self.positioned else sizes._replace(s_q=sizes.s_k)

    def sequence_offsets(self, sequence: SequenceSlice, s_q: int) -> tuple[Any, Any]:
        if self.positions(s_q) is not None:
            return super().sequence_offsets(sequence, s_q)
        i = sequence.number
        return self.seqused_k[i : i + 1] - (sequence.rows.stop - sequence.rows.start), None

    def in_place(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """The caches: a backend copies queries so that their rows are aligned, and never a cache."""
        return k, v

    def __repr__(self) -> str:
        if self.slots is not None:
            return f"Paged(slots={list(self.slots.shape)})"
        return f"Paged({self.sequences} sequences of up to {self.block_table.shape[1]} pages)"


@dataclass(frozen=True, eq=False)
class CacheSlots:
    """The slots of new rows: slot `n` is row `n % page_size` of page `n // page_size`; -1 is nowhere. Raises ValueError
    for tensors that are not integer ones, or not of one shape."""

    slot_mapping: Tensor
    """(t,), or (b, s): int32 or int64"""
    positions: Tensor | None = None
    """of the rows in their sequences, by which keys are rotated; of the same shape"""

    def __post_init__(self) -> None:
        for name, x in (("slot_mapping", self.slot_mapping), ("positions", self.positions)):
            if x is None and name == "positions":
                continue
            if not isinstance(x, Tensor) or x.dim() not in (1, 2) or x.dtype not in (torch.int32, torch.int64):
                wanted = "an int32 or int64 tensor of shape (t,) or (b, s)"
                raise arguments.refusal(x, f"{name} must be {wanted}, got {described(x)}")
        if self.positions is not None and self.positions.shape != self.slot_mapping.shape:
            shapes = tuple(self.positions.shape), tuple(self.slot_mapping.shape)
            raise ValueError(f"positions must have the shape of slot_mapping, got {shapes[0]} and {shapes[1]}")

    @property
    def tensors(self) -> list[Tensor]:
        return [x for x in (self.slot_mapping, self.positions) if x is not None]

    text = "slots"
    """Stands for a layout's text."""

    def canonical(self, x: Tensor) -> Tensor:
        """A (b, h, s, d) view of rows (b, s, h, d) or (t, h, d), or of a cache."""
        return x.transpose(1, 2) if x.dim() == 4 else x.transpose(0, 1).unsqueeze(0)

    def shape_error(self, new: torch.Size, k: torch.Size, v: torch.Size, name: str) -> str | None:
        """Why the shapes of new rows and of the caches are wrong, or None."""
        if len(new) not in (3, 4) or not len(k) == len(v) == 4:
            return (
                f"with slot_mapping {name} must be (t, h, d) or (b, s, h, d), and the caches (pages, page_size, h, d)"
            )
        if new[:-2] != self.slot_mapping.shape:
            shape = tuple(self.slot_mapping.shape)
            return f"slot_mapping must have one number for each new row, {tuple(new[:-2])}, got {shape}"
        return cache_error(k, v) or head_error(new, k, v, -2)

    def check_slots(self, pages: int, page_size: int) -> None:
        """Reads the slots and positions. Raises ValueError for slots that the caches do not have, or negative
        positions."""
        slots = self.slot_mapping
        if slots.numel() and not -1 <= int(slots.min()) <= int(slots.max()) < pages * page_size:
            raise ValueError(
                f"slots must be in [0, {pages * page_size}), the rows of {pages} pages of {page_size}, or -1 for a row "
                f"that is not written, got {shortened(slots.flatten().tolist())}"
            )
        if self.positions is not None and self.positions.numel() and int(self.positions.min()) < 0:
            raise ValueError(f"positions must be from 0 on, got {shortened(self.positions.flatten().tolist())}")
