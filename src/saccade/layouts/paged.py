"""Where the rows of a paged cache live: the Layout of serving."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from saccade.layouts.offsets import check_offsets, check_vector, described, shortened


@dataclass(frozen=True, eq=False)
class Paged:
    """Keys and values in the pages of a cache: k (pages, page_size, h_k, d), v (pages, page_size, h_k, d_v).

    Formula: sequence `i` has `seqused_k[i]` keys. Its key `j` is row `j % page_size` of the page
    `block_table[i, j // page_size]`. q is (b, s_q, h_q, d), and so is out, with an LSE of (b, h_q, s_q); or, with
    `cu_seqlens_q`, sequences of queries end to end, (t_q, h_q, d), with an LSE of (h_q, t_q). Masks are bottom-right
    aligned: the last query of a sequence stands at its last key. For inference: no gradients.

    Args:
        block_table: (b, width) int32 or int64 on q's device: which pages. What stands behind a sequence's last page is
            never used. Pages that are not there are taken for the nearest that are.
        seqused_k: (b,) integer tensor: how many keys each sequence has, at most `width * page_size`.
        cu_seqlens_q: (b + 1,): 0, then where each sequence of q ends, never decreasing; or None. Sequences of one query
            and of many may stand side by side.
        num_splits: into how many parts the keys of a sequence are cut, which are worked on side by side and merged;
            None lets the backend choose, from shapes and lengths, without a wait for the host. With 1 a row's result
            has the same bits whatever else is in the batch, and however many of its neighbours come in the same call.

    Raises:
        ValueError: tensors that are not integer ones of these shapes, num_splits below 1; when lengths are read, as
            they are on a CPU, those that are negative or beyond the table.

    Source: Kwon et al., PagedAttention (https://arxiv.org/abs/2309.06180).

    >>> cache = torch.randn(9, 16, 2, 64)
    >>> layout = Paged(torch.tensor([[4, 0], [7, 2]], dtype=torch.int32), torch.tensor([20, 3]))
    >>> attention(torch.randn(2, 1, 8, 64), cache, cache, mask=causal(), layout=layout).shape
    torch.Size([2, 1, 8, 64])
    """

    block_table: Tensor
    seqused_k: Tensor
    cu_seqlens_q: Tensor | None = None
    num_splits: int | None = None

    kind = "paged"
    """Its word in a Spec."""
    order = "paged"
    seqused_q = None

    def __post_init__(self) -> None:
        table, used = self.block_table, self.seqused_k
        if not isinstance(table, Tensor) or table.dim() != 2 or table.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"block_table must be an int32 or int64 tensor of shape (b, width), got {described(table)}"
            )
        check_vector("seqused_k", used, "(b,)")
        if len(used) != self.sequences:
            shapes = tuple(used.shape), tuple(table.shape)
            raise ValueError(f"seqused_k must have shape (b,), got {shapes[0]} with block_table {shapes[1]}")
        if self.cu_seqlens_q is not None:
            check_vector("cu_seqlens_q", self.cu_seqlens_q, "(b + 1,)")
            if len(self.cu_seqlens_q) != self.sequences + 1:
                shapes = tuple(self.cu_seqlens_q.shape), tuple(table.shape)
                raise ValueError(f"cu_seqlens_q must have shape (b + 1,), got {shapes[0]} with block_table {shapes[1]}")
        splits = self.num_splits
        if splits is not None and (isinstance(splits, bool) or not isinstance(splits, int) or splits < 1):
            raise ValueError(f"num_splits must be an integer from 1 on, or None, got {splits!r}")

    @property
    def sequences(self) -> int:
        """How many."""
        return self.block_table.shape[0]

    def capacity(self, page_size: int) -> int:
        """How many keys a sequence has room for."""
        return self.block_table.shape[1] * page_size

    @property
    def text(self) -> str:
        """The static part, e.g. `paged,cu_seqlens_q,splits=1`: what `records` says about the tensors that follow."""
        names = [] if self.cu_seqlens_q is None else ["cu_seqlens_q"]
        return ",".join([self.kind, *names, *([] if self.num_splits is None else [f"splits={self.num_splits}"])])

    @property
    def records(self) -> list[Tensor]:
        """The tensors, in the order in which `text` names them."""
        found = [self.block_table, self.seqused_k]
        return found if self.cu_seqlens_q is None else [*found, self.cu_seqlens_q]

    def canonical(self, x: Tensor) -> Tensor:
        """A (b, h, s, d) view of q or out, (1, h, t, d) where sequences are end to end; caches: (pages, h, rows, d)."""
        return x.transpose(1, 2) if x.dim() == 4 else x.transpose(0, 1).unsqueeze(0)

    def ordered(self, x: Tensor) -> Tensor:
        """A view like q's of a (b, h, s, d) tensor."""
        return x.transpose(1, 2) if self.cu_seqlens_q is None else x.squeeze(0).transpose(0, 1)

    def canonical_lse(self, x: Tensor) -> Tensor:
        """(b, h_q, s_q), or (1, h, t) of an (h, t) tensor."""
        return x if self.cu_seqlens_q is None else x.unsqueeze(0)

    def ordered_lse(self, x: Tensor) -> Tensor:
        return x if self.cu_seqlens_q is None else x.squeeze(0)

    def rows(self, s_q: int) -> list[slice]:
        """Which rows of q, of the s_q of its canonical form, each sequence has; reads the offsets."""
        if self.cu_seqlens_q is None:
            return [slice(0, s_q)] * self.sequences
        return [slice(*ends) for ends in pairwise(self.cu_seqlens_q.tolist())]

    def check(self, s_q: int, page_size: int) -> None:
        """Reads lengths and offsets.

        Raises:
            ValueError: lengths that are negative or beyond the table; offsets as in `Packed.check`.
        """
        room, used = self.capacity(page_size), self.seqused_k.tolist()
        if any(not 0 <= n <= room for n in used):
            raise ValueError(
                f"seqused_k must be in [0, {room}], what {self.block_table.shape[1]} pages of {page_size} hold, "
                f"got {shortened(used)}"
            )
        if self.cu_seqlens_q is not None:
            check_offsets("cu_seqlens_q", self.cu_seqlens_q.tolist(), s_q)

    def __repr__(self) -> str:
        return f"Paged({self.sequences} sequences of up to {self.block_table.shape[1]} pages)"
