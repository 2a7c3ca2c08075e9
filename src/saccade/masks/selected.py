"""Lists of keys, or of blocks of keys, that the user gives for rows of queries: what an indexer has selected."""

# Properties of masks are plain attributes of some, and computed by others.
# pyright: reportIncompatibleVariableOverride=false, reportIncompatibleMethodOverride=false

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from saccade.masks.base import Extent, Mask, PredicateMask, at
from saccade.scores import Sizes
from saccade.util import arguments

ALL_KEYS = (1 << 31) - 1
"""No call has more keys: larger blocks are no other ones."""


@dataclass(frozen=True, eq=False)
class Selected(PredicateMask):
    """Row i sees key j where one of the first `lengths` entries of list `i // rows` is `j // block_size`."""

    FLAT: ClassVar = {
        "selected": {"lists": Tensor, "rows": int},
        "selected_lengths": {"lists": Tensor, "lengths": Tensor, "rows": int},
        "selected_blocks": {"lists": Tensor, "rows": int, "block_size": int},
        "selected_blocks_lengths": {"lists": Tensor, "lengths": Tensor, "rows": int, "block_size": int},
    }
    lists: Tensor
    """(b or 1, heads, groups of rows, n); (heads, t_q, n) for queries end to end"""
    lengths: Tensor | None
    """The shape of `lists` without n, or one for each batch row; None where all entries count."""
    rows: int
    block_size: int | None = None
    """None of lists of keys."""
    bounds_per_row: ClassVar[bool] = True

    @property
    def kind(self) -> str:
        return "selected" if self.block_size is None else "selected_blocks"

    @property
    def identity(self) -> str:
        return self.kind if self.lengths is None else f"{self.kind}_lengths"

    @classmethod
    def of_fields(cls, lists: Tensor, rows: int, lengths: Tensor | None = None, block_size: int | None = None) -> Mask:
        return cls(lists, lengths, rows, block_size)

    @property
    def keys(self) -> int:
        """Of an entry."""
        return 1 if self.block_size is None else self.block_size

    @property
    def end_to_end(self) -> bool:
        return self.lists.dim() == 3

    @property
    def indices(self) -> frozenset[str]:
        lists, lengths = self.lists, self.lengths
        by_sequence = lengths is not None and lengths.dim() == 1 and lengths.shape[0] != 1
        b = self.end_to_end or lists.shape[0] != 1 or by_sequence
        return frozenset([*("b" if b else ""), *("h" if lists.shape[-3] != 1 else "")])

    @property
    def length(self) -> int:
        return self.lists.shape[-2] * self.rows

    def sees(self, extent: Extent, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        """Of a vector of keys; the last dimension of all other indices is 1."""
        if self.end_to_end:  # drawn as one sequence
            return self.of_rows(slice(None)).sees(extent, b, h, q_idx, kv_idx)
        if not self.lists.shape[2]:
            shape = torch.broadcast_shapes(b.shape, h.shape, q_idx.shape)
            return torch.zeros(*shape[:-1], len(kv_idx), dtype=torch.bool, device=q_idx.device)
        groups, heads = self.lists.shape[2], self.lists.shape[1]
        group, blocks = q_idx // self.rows, -(-extent.s_k // self.keys)
        share = 1 if extent.heads is None else max(1, extent.heads // heads)
        # What all share is computed for the first.
        batch, head = (i if name in self.indices else i.new_zeros(1) for name, i in (("b", b), ("h", h // share)))
        at = batch if self.lists.shape[0] > 1 else batch * 0, head, group.clamp(max=groups - 1)
        of_list = None
        if self.lengths is not None:
            of_list = self.lengths[at if self.lengths.dim() > 1 else (batch if len(self.lengths) > 1 else batch * 0)]
        named = _named(self.lists[at], of_list, blocks) & (group < groups)[..., None]
        return self._of_keys(named[..., 0, :], kv_idx)

    def named(self, s_k: int) -> Tensor:
        """Which of s_k keys any list of a head names, (b or 1, heads, s_k)."""
        lengths = self.lengths
        if lengths is not None and lengths.dim() == 1:
            lengths = lengths[:, None, None]
        lists, blocks = self.lists, -(-s_k // self.keys)
        if lengths is not None:
            there = torch.arange(lists.shape[-1], device=lists.device) < lengths[..., None]
            lists = torch.where(there, lists, -1)
        return self._of_keys(_named(lists.flatten(2), None, blocks), torch.arange(s_k, device=lists.device))

    def _of_keys(self, named: Tensor, kv_idx: Tensor) -> Tensor:
        """Of blocks (…, blocks) what is of their keys. A CPU copies those of a range of keys, 10 times as fast."""
        first, last = 0, -1
        if kv_idx.device.type == "cpu" and type(kv_idx) is Tensor and not torch.compiler.is_compiling() and len(kv_idx):
            first, last = int(kv_idx[0]), int(kv_idx[-1])
        if last - first != len(kv_idx) - 1 or last < 0:
            return named.index_select(-1, kv_idx // self.keys)
        named = named[..., first // self.keys : last // self.keys + 1]
        if self.keys > 1:
            named = named[..., None].expand(*named.shape, min(self.keys, last + 1)).flatten(-2)
        return named.narrow(-1, first % self.keys, len(kv_idx))

    def of_batch_row(self, b: int) -> Selected:
        return self.each(lambda x: x[b : b + 1] if x.shape[0] > 1 else x)

    def of_rows(self, rows: slice | Tensor) -> Selected:
        """That of these rows of queries end to end: a sequence's, or (b, s_q) of a padded batch."""
        if not self.end_to_end:
            return self

        def those(x: Tensor) -> Tensor:
            if x.dim() == 1:
                return x
            if isinstance(rows, slice):
                return x[None, :, rows]
            return x[:, rows.clamp(max=max(x.shape[1] - 1, 0))].transpose(0, 1)

        return self.each(those)

    def each(self, change: Callable[[Tensor], Tensor]) -> Selected:
        """The same with its tensors changed."""
        lengths = None if self.lengths is None else change(self.lengths)
        return Selected(change(self.lists), lengths, self.rows, self.block_size)

    def lists_error(self, sizes: Sizes, h_k: int, rows: int, end_to_end: bool) -> str | None:
        """What is wrong with the lists' shape; `rows` are those of a batch row, or of all sequences end to end."""
        b, h_q, s_q, _, _ = sizes
        shape, of_rows = self.lists.shape, end_to_end and self.rows == 1
        groups = -(-s_q // self.rows)
        if of_rows:
            fits = self.end_to_end and shape[1] == rows
        elif end_to_end:  # a bound of the rows of the longest sequence may be larger
            fits = not self.end_to_end and shape[2] >= groups and (shape[0] == 1 or shape[0] == b)
        else:
            fits = not self.end_to_end and shape[2] == groups and (shape[0] == 1 or shape[0] == b)
        if not (fits and (shape[-3] == 1 or shape[-3] == h_k or shape[-3] == h_q)):
            wanted = f"(h, {rows}, n)" if of_rows else f"({b} or 1, h, {groups}, n)"
            each = "row" if self.rows == 1 else f"{self.rows} rows"
            shape_text = f"{wanted} with h {h_q}, {h_k} or 1, a list for each {each} of a head"
            return f"{self.kind}'s indices must be {shape_text}; got {tuple(shape)}"
        lengths = self.lengths
        if lengths is not None and lengths.dim() == 1 and not (lengths.shape[0] == 1 or lengths.shape[0] == b):
            return f"{self.kind}'s lengths must be {tuple(shape[:-1])} or ({b},); got {tuple(lengths.shape)}"
        return None

    def check(self, keys: Tensor, rows: Tensor | None, starts: Tensor | None, lengths: bool) -> None:
        """Reads the lists; `keys` (b or 1) and `rows` (b), or all, are in use, others are padding; queries end to end
        begin at `starts`.

        Raises:
            ValueError: lengths below 0 or above n, where they are asked for; an entry that a list has twice.
        """
        n, used = self.lists.shape[-1], self.lengths
        row = torch.arange(self.lists.shape[-2], device=self.lists.device) * self.rows
        if self.end_to_end and starts is not None:
            there = row < starts[-1]
        else:  # (b or 1, 1, lists)
            there = row[None, None] < (row.new_full((1,), 1 << 31) if rows is None else rows)[:, None, None]
            there = there if len(self.lists) > 1 else there.any(0, keepdim=True)
        if used is not None and lengths:
            wrong = (used < 0) | (used > n)
            wrong = used[wrong if used.dim() == 1 else wrong & there]
            if len(wrong):
                raise ValueError(
                    f"{self.kind}'s lengths must be from 0 to the {n} entries of a list, got {int(wrong[0])}"
                )
        if not self.lists.numel():
            return
        entries = self.lists if not self.end_to_end else self.lists[None]

        def by_list(x: Tensor) -> Tensor:  # of one for each sequence, (…, 1, rows or 1, 1)
            if starts is None or not self.end_to_end or len(x) == 1:
                return x[:, None, None, None]
            at = torch.bucketize(row, starts[1:], right=True).clamp(max=len(x) - 1)
            return x[at][:, None]

        blocks = -(-by_list(keys) // self.keys)
        index = torch.arange(n, device=entries.device)
        named = (entries >= 0) & (entries < blocks) & there[..., None]
        if used is not None:
            of_list = by_list(used) if used.dim() == 1 else used.reshape(*entries.shape[:-1], 1)
            named = named & (index < of_list)
        ordered = torch.where(named, entries.long(), -1 - index).sort(-1).values
        twice = (ordered[..., 1:] == ordered[..., :-1]).nonzero()
        if len(twice):
            at, of = twice[0].tolist(), "key" if self.block_size is None else "block"
            text = f"list {tuple(at[self.end_to_end : -1])} names {of} {int(ordered[tuple(at)])} twice"
            raise ValueError(f"{self.kind}'s {text}: entries must differ")

    def __repr__(self) -> str:
        words = [str(list(self.lists.shape))]
        words += [] if self.block_size is None else [str(self.block_size)]
        words += [] if self.lengths is None else [f"lengths={list(self.lengths.shape)}"]
        words += [] if isinstance(self.rows, int) and self.rows == 1 else [f"rows={self.rows}"]
        return f"{self.kind}({','.join(words)})"


def _named(entries: Tensor, lengths: Tensor | None, blocks: int) -> Tensor:
    """Which of the blocks lists (…, n) name, (…, blocks)."""
    named = (entries >= 0) & (entries < blocks)
    if lengths is not None:
        named = named & (torch.arange(entries.shape[-1], device=entries.device) < lengths[..., None])
    seen = torch.zeros(*entries.shape[:-1], blocks + 1, dtype=torch.bool, device=entries.device)
    return seen.scatter_(-1, torch.where(named, entries, blocks).long(), True)[..., :-1]  # the last is for all others


@dataclass(frozen=True, eq=False)
class ListedSlots(PredicateMask):
    """Row i of sequence b sees its key j where `0 <= table[b, j] < count`: slots that a cache has."""

    FLAT: ClassVar = {"slots": {"table": Tensor, "count": int}}
    kind: ClassVar[str] = "slots"
    bounds_per_row: ClassVar[bool] = True
    indices: ClassVar[frozenset[str]] = frozenset("b")
    table: Tensor
    count: int

    def sees(self, extent: Extent, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        slot = at(self.table, b, kv_idx)
        return (slot >= 0) & (slot < self.count)

    def of_batch_row(self, b: int) -> ListedSlots:
        return ListedSlots(self.table[b : b + 1], self.count)

    def __repr__(self) -> str:
        return f"slots({list(self.table.shape)})"


def selected(indices: Tensor, lengths: Tensor | None = None, *, rows: int = 1) -> Mask:
    """Row i sees key j where j is one of the first `lengths` entries of the list `indices[b, h, i // rows]`.

    Rows and keys are counted in the call, from the first of each batch row or sequence, whatever `q_offset` and
    `k_offset` say. An entry that is negative, or not below the number of keys in use, names no key. It may stand
    anywhere in a list, and nothing is read through it. A row without a key has `out = 0` and `lse = -inf`, or its sink.
    Each call reads lists and lengths on their device, so a CUDA graph may be replayed with others. Lists have no
    gradient.

    Args:
        indices: int32 or int64 on q's device, in any order. (b, h, ceil(s_q / rows), n) for dense calls and for pages
            with queries (b, s_q, h_q, d), where b may be 1, and h is h_q, h_k or 1. For packed sequences and queries
            end to end: (h, t_q, n) with rows=1, else (b, h, ceil(max_seqlen_q / rows), n), whose groups of rows begin
            with each sequence. n may be 0, and larger than the number of keys.
        lengths: how many entries of each list count, int32 or int64: of indices' shape without n, or (b,) or (1,); None
            for all. A number below 0 or above n is an error on a CPU. GPUs clamp it.
        rows: how many rows share a list; the last one may serve fewer.

    Raises:
        ValueError: tensors of other dtypes or shapes, rows below 1; on a CPU, and by "reference", a list that names a
            key twice. On GPUs such a key counts once or as often as it is listed.
        TypeError: indices or lengths that are not tensors, or rows that are not an integer.

    >>> print(selected(torch.tensor([[[[0, 2], [1, -1], [2, 9], [3, 0]]]])).draw(4))
    selected([1, 1, 4, 2])
    ■ · ■ ·
    · ■ · ·
    · · ■ ·
    ■ · · ■
    """
    return Selected(*_checked("selected", indices, lengths, rows))


def selected_blocks(indices: Tensor, block_size: int = 64, lengths: Tensor | None = None, *, rows: int = 1) -> Mask:
    """Row i sees key j where `j // block_size` is one of the first `lengths` entries of its list: blocks of keys.

    Entry e names the keys from `e block_size` to `(e + 1) block_size - 1`, as far as there are keys. All else is as in
    `selected`. With rows and block_size of 64 or more, as video models and MoBA have them, GPUs visit the listed tiles
    alone.

    Args:
        indices: as in `selected`.
        block_size: keys of a block.
        lengths: as in `selected`.
        rows: how many rows share a list.

    Raises:
        ValueError: as `selected`; a block_size below 1.
        TypeError: as `selected`; a block_size that is not an integer.

    >>> print(selected_blocks(torch.tensor([[[[0], [1]]]]), block_size=2, rows=2).draw(4))
    selected_blocks([1, 1, 2, 1],2,rows=2)
    ■ ■ · ·
    ■ ■ · ·
    · · ■ ■
    · · ■ ■
    """
    lists = _checked("selected_blocks", indices, lengths, rows)
    size = arguments.integer("selected_blocks's block_size", block_size, least=1)
    return Selected(*lists, min(size, ALL_KEYS) if isinstance(size, int) else size)


def _checked(kind: str, lists: Any, lengths: Any, rows: Any) -> tuple[Tensor, Tensor | None, int]:
    """Raises ValueError for tensors of other dtypes or shapes, on two devices, or rows below 1, and TypeError for what
    is no tensor, or rows that are not an integer."""
    arguments.tensors(**{f"{kind}'s indices": lists})
    if lists.layout != torch.strided:
        raise ValueError(f"{kind}'s indices must be a dense tensor, got {lists.layout}")
    if lists.dtype not in (torch.int32, torch.int64) or lists.dim() not in (3, 4):
        raise ValueError(
            f"{kind}'s indices must be int32 or int64, (b, h, lists, n), or (h, t_q, n) for queries end to end, got "
            f"{lists.dtype} {tuple(lists.shape)}"
        )
    rows = arguments.integer(f"{kind}'s rows", rows, least=1)
    if lengths is None:
        return lists, None, rows
    arguments.tensors(**{f"{kind}'s lengths": lengths})
    wanted = lists.shape[:-1]
    if lengths.dtype not in (torch.int32, torch.int64) or (lengths.dim() != 1 and lengths.shape != wanted):
        got = f"{lengths.dtype} {tuple(lengths.shape)}"
        raise ValueError(f"{kind}'s lengths must be int32 or int64, {tuple(wanted)} or (b,), got {got}")
    if lengths.device != lists.device:
        raise ValueError(f"{kind}'s indices and lengths must be on one device, got {lists.device} and {lengths.device}")
    return lists, lengths, rows
