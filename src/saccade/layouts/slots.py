"""Rows that list the slots of a cache which hold their keys: each row is a sequence over pages of one row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from saccade.layouts.paged import Paged
from saccade.layouts.validate import cache_error, check_offsets, has_values, head_error, shortened
from saccade.masks import ListedSlots, Mask
from saccade.scores import Sizes


@dataclass(frozen=True, eq=False)
class SlotRows(Paged):
    """`Paged(slots=…)` as backends see it: a sequence of one query for each row, and a page for each slot."""

    s_q: int = 0
    """rows of a batch row; 0 for rows end to end, and -1 - b of b batch rows without a row"""

    WORD = "slots"
    FLAT = "block_table", "seqused_k", "cu_seqlens_q", "num_splits", "s_q"

    @staticmethod
    def of(layout: Paged) -> SlotRows:
        slots, starts = layout.slots, layout.cu_seqlens_q
        assert slots is not None
        if starts is not None:  # rows after the last sequence are in none
            if starts.is_cpu and has_values(starts):
                check_offsets("cu_seqlens_q", starts.tolist(), slots.shape[0])
            starts = torch.arange(slots.shape[0] + 1, device=slots.device, dtype=starts.dtype).minimum(starts[-1])
        s_q = 0 if slots.dim() == 2 else slots.shape[1] or -1 - slots.shape[0]
        return SlotRows(slots.flatten(0, -2), layout.seqused_k.flatten(), starts, layout.num_splits, s_q=s_q)

    def over_rows(self, k: Tensor, v: Tensor) -> tuple[SlotRows, Tensor, Tensor, Mask]:
        """The caches as pages of one row, the layout over them, and the mask of slots that there are. Raises ValueError
        for caches whose pages do not begin at equal multiples of their rows."""
        (pages, size), table = k.shape[:2], self.block_table
        step, other = map(rows_apart, (k, v))
        if step is None or step != other:
            raise ValueError(
                "slots need caches (pages, page_size, h, d) whose pages begin at equal multiples of their rows, got "
                f"strides {k.stride()} and {v.stride()}"
            )
        count = (pages - 1) * step + size
        if step != size:
            there = (table >= 0) & (table < pages * size)
            table = torch.where(there, table // size * step + table % size, -1)
        layout = SlotRows(table, self.seqused_k, self.cu_seqlens_q, self.num_splits, s_q=self.s_q)
        return layout, single_rows(k, step), single_rows(v, step), ListedSlots(table, count)

    # Views

    def canonical(self, x: Tensor) -> Tensor:
        """(rows, h, 1, d) of q, out or caches; with cu_seqlens_q (1, h, t, d) of q and out."""
        if self.cu_seqlens_q is not None or (x.dim() == 4 and x.shape[1] == 1):
            return super().canonical(x)
        return x.flatten(0, -3).unsqueeze(2)

    def ordered(self, x: Tensor) -> Tensor:
        if self.cu_seqlens_q is not None:
            return super().ordered(x)
        return self._by_batch(x.squeeze(2))

    def canonical_lse(self, x: Tensor) -> Tensor:
        """(rows, h, 1) of a (b, h, s_q) or (h, t) tensor; with cu_seqlens_q (1, h, t)."""
        if self.cu_seqlens_q is not None:
            return super().canonical_lse(x)
        return x.transpose(-1, -2).flatten(0, -2).unsqueeze(2)

    def ordered_lse(self, x: Tensor) -> Tensor:
        if self.cu_seqlens_q is not None:
            return super().ordered_lse(x)
        return self._by_batch(x.squeeze(2)).transpose(-1, -2)

    def _by_batch(self, x: Tensor) -> Tensor:
        """(b, s_q, …) of rows (rows, …), unless they are end to end."""
        if self.s_q < 0:
            return x.unflatten(0, (-1 - self.s_q, 0))
        return x.unflatten(0, (-1, self.s_q)) if self.s_q else x

    # Errors

    def shape_error(self, q: torch.Size, k: torch.Size, v: torch.Size, name: str = "q") -> str | None:
        rows = self.sequences
        lead = (-1 - self.s_q, 0) if self.s_q < 0 else (rows // self.s_q, self.s_q) if self.s_q else (rows,)
        if len(q) != len(lead) + 2 or tuple(q[:-2]) != lead or not len(k) == len(v) == 4:
            text = f"{', '.join(map(str, lead))}, h, d"
            return f"with slots for {lead} rows {name} must be ({text}), and the caches (pages, page_size, h, d)"
        return cache_error(k, v) or head_error(q, k, v, -2)

    def mask_error(self, mask: Mask | None, q: Tensor, k: Tensor) -> str | None:
        if mask is None:
            return None
        return f"keys in slots have no positions, and their row sees all of them: omit the mask {mask!r}"

    def out_error(self, out: Any) -> str | None:
        error = super().out_error(out)
        batch = error is None and self.s_q > 1 and out.dim() == 4 and out.shape[0] > 1
        if batch and out.stride(0) != out.shape[1] * out.stride(1):
            return f"with slots the rows of out must be equally far apart, got strides {out.stride()}"
        return error

    def check_lengths(self, s_q: int, s_k: int) -> None:
        used, n = self.seqused_k, self.block_table.shape[1]
        if self.cu_seqlens_q is not None:  # others are padding
            used = used[: int(self.cu_seqlens_q[-1])]
        if used.numel() and not 0 <= int(used.min()) <= int(used.max()) <= n:
            raise ValueError(f"seqused_k must be in [0, {n}], the slots of a row, got {shortened(used.tolist())}")
        if self.cu_seqlens_q is not None:
            check_offsets("cu_seqlens_q", self.cu_seqlens_q.tolist(), s_q)

    # Lengths and keys

    def capacity(self, s_k: int) -> int:
        return self.block_table.shape[1]

    def sizes(self, q: Tensor, k: Tensor) -> Sizes:
        return Sizes(self.sequences, q.shape[-2], 1, self.capacity(1), exact=False)

    def pairs(self, q: Tensor, k: Tensor) -> int:
        known = has_values(self.seqused_k)
        return q.shape[-2] * (int(self.seqused_k.sum()) if known else self.block_table.numel())

    def gathered(self, x: Tensor) -> Tensor:
        """Zero for slots that there are not."""
        there = (self.block_table >= 0) & (self.block_table < x.shape[0])
        return torch.where(there[:, None, :, None], super().gathered(x), 0)

    def __repr__(self) -> str:
        return f"Paged({self.sequences} rows of up to {self.block_table.shape[1]} slots)"


def rows_apart(x: Tensor) -> int | None:
    """How many rows after a page of a cache (pages, page_size, h, d) the next one begins; None if between two rows."""
    pages, size = x.shape[:2]
    if pages == 1:
        return size
    row = _row_stride(x)
    return x.stride(0) // row if row and x.stride(0) % row == 0 else None


def single_rows(x: Tensor, step: int) -> Tensor:
    """A cache (pages, page_size, h, d) as pages of one row, `step` to a page, and those between pages besides."""
    (pages, size), row = x.shape[:2], _row_stride(x)
    return x.as_strided(((pages - 1) * step + size, 1, *x.shape[2:]), (row, row, *x.stride()[2:]))


def _row_stride(x: Tensor) -> int:
    """Of pages of one row that of pages."""
    return x.stride(1) if x.shape[1] > 1 else x.stride(0)
