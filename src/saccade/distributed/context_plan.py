"""The plan of a batch: made once, used in every layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.distributed import estimates
from saccade.distributed.arriving import ArrivingRows
from saccade.distributed.exchanges import Broadcast, Exchange, HeadExchange, RowExchange, moved, numbers, repeated
from saccade.distributed.groups import Ranks, cached_method, constant
from saccade.distributed.pull import PulledRows
from saccade.distributed.sharding import Piece, Sharding, shifted
from saccade.distributed.transport import Transport
from saccade.layouts import ORDERS, Dense, Layout, Packed
from saccade.util import arguments
from saccade.util.caches import cached_attribute


def padded(x: Tensor, rows: int, value: float = 0) -> Tensor:
    """With so many more rows of one value."""
    return F.pad(x, (0, 0) * (x.dim() - 1) + (0, rows), value=value) if rows else x


def check_fill(x: Tensor, fill: float) -> None:
    """On every rank, also on those without rows to fill. Raises TypeError for what is no number, and ValueError for a
    number that x's dtype does not have."""
    arguments.number("fill", fill)
    if x.is_complex() or (x.is_floating_point() and not math.isfinite(fill)):
        return
    if x.dtype == torch.bool:
        least, most = 0, 1
    else:
        limits = torch.finfo(x.dtype) if x.is_floating_point() else torch.iinfo(x.dtype)
        least, most = limits.min, limits.max
    if not (least <= fill <= most and (x.is_floating_point() or fill == int(fill))):
        raise ValueError(f"fill={fill!r} does not fit into x's {x.dtype}: pass another fill, or x.long()")


def bits(x: Tensor) -> Tensor:
    """x, or where torch can neither send nor place its dtype the same bits as integers."""
    eight = x.dtype.is_floating_point and x.dtype.itemsize == 1
    return of_dtype(x, torch.uint8 if eight else _SIGNED.get(x.dtype, x.dtype))


def of_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype == dtype else x.view(dtype)  # a view of the same dtype has no gradient either


_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


@dataclass(frozen=True, eq=False, repr=False)
class ContextPlan:
    """Which rank has which rows of a batch of sequences, and how keys reach the rows that see them.

    `saccade.distributed.plan` makes one.
    """

    sharding: Sharding
    ranks: Ranks
    method: str
    """`gather`, `pull`, `ulysses`, `ulysses×gather` or `ulysses×pull`."""
    why: str
    """Why this method."""
    batch: int | None = None
    """The batch rows of dense operands (b, s), which are sharded alike; None for documents end to end."""
    heads: tuple[int, int] | None = None
    """The query heads and key heads that it was made for."""
    head_dim: int | None = None
    timeout: float | None = None
    debug: bool = False
    rows_of_each: int | None = None
    """How many rows every rank has, with padding after those in use; None where there is no padding."""
    _kept: dict[Any, Any] = field(default_factory=dict)
    """What is made once: tensors, layouts, exchanges."""

    def __post_init__(self) -> None:
        _ = self.used_rows  # once, before torch.compile asks: that of torch 2.11 keeps nothing

    def __getstate__(self) -> dict[str, Any]:
        """Without what this process made, which it knows by names of its own: copies make theirs."""
        return vars(self) | {"_kept": {}}

    # Rows

    @property
    def lengths(self) -> tuple[int, ...]:
        return self.sharding.lengths

    @property
    def rank(self) -> int:
        return self.ranks.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.ranks.size

    @property
    def pieces(self) -> list[Piece]:
        """(document, start, stop) of this rank's rows, in their order."""
        return self.sharding.by_rank[self.rank]

    @cached_attribute
    def used_rows(self) -> int:
        """How many rows this rank has, padding not counted; of a batch, in each of its rows."""
        return sum(piece.rows for piece in self.pieces)

    @property
    def rows(self) -> int:
        """How many rows the tensors of this rank have: those in use, and then those of padding."""
        return self.used_rows if self.rows_of_each is None else self.rows_of_each

    @property
    def padding(self) -> int:
        """How many of the rows are padding."""
        return self.rows - self.used_rows

    # What users get of these are copies: they may write to them.

    @property
    def row_indices(self) -> Tensor:
        """(used_rows,) int64: the number of each row of this rank among all."""
        return self._rows(self.ranks.device).clone()

    @property
    def position_ids(self) -> Tensor:
        """(rows,) int64: where each row of this rank stands in its document, 0 for padding: for rotary embeddings."""
        return padded(self._positions(self.ranks.device).clone(), self.padding)

    @property
    def document_ids(self) -> Tensor:
        """(rows,) int64: the number of each row's document, -1 for padding."""
        return padded(self._documents(self.ranks.device).clone(), self.padding, -1)

    @cached_method
    def _rows(self, device: str) -> Tensor:
        first = [0, *accumulate(self.lengths)]
        return numbers([(first[p.document] + p.start, p.rows) for p in self.pieces], device)

    @cached_method
    def _positions(self, device: str) -> Tensor:
        return numbers([(p.start, p.rows) for p in self.pieces], device)

    @cached_method
    def _documents(self, device: str) -> Tensor:
        return repeated([p.document for p in self.pieces], [p.rows for p in self.pieces]).to(device)

    def shard(self, x: Tensor, dim: int = 0, fill: float = 0) -> Tensor:
        """This rank's rows of a tensor that every rank has whole, and `fill` in rows of padding; its gradient is zero
        in the other ranks' rows.

        Raises:
            ValueError: a dimension `dim` that does not have all rows, or a `fill` that does not fit into x's dtype.

        >>> from saccade import distributed
        >>> distributed.plan([3, 5], 2, rank=1).shard(torch.arange(8))
        tensor([0, 5, 6, 7])
        """
        self._check_rows(x, dim, sum(self.lengths), "all")
        if self.rows_of_each is not None or not x.is_floating_point():
            check_fill(x, fill)
        mine = of_dtype(bits(x).index_select(dim, self._rows(str(x.device))), x.dtype)
        return padded(mine.movedim(dim, 0), self.padding, fill).movedim(0, dim)

    def unshard(self, x: Tensor, dim: int = 0) -> Tensor:
        """All rows, of every rank's, without padding. A collective, and so is its backward, in which a row's gradient
        is the sum over all ranks: that of the sum of their losses."""
        self._check_rows(x, dim, self.rows, "this rank's")
        whole = self._moved(x.movedim(dim, 0), "unshard", "_of_all")
        return of_dtype(whole, x.dtype).movedim(0, dim)

    def roll(self, x: Tensor, shift: int, dim: int = 0, fill: float = -100) -> Tensor:
        """`y[p] = x[p - shift]` in each document, across ranks: with -1 the labels of next tokens. Rows for which there
        is none, as the last of each document for -1, and rows of padding are `fill`, which cross_entropy ignores. A
        collective.

        Raises:
            ValueError: a dimension `dim` that does not have this rank's rows, or a `fill` that does not fit into x's
                dtype, as -100 is none of uint8: labels are of int64.
        """
        self._check_rows(x, dim, self.rows, "this rank's")
        check_fill(x, fill)
        longest = constant(id(self), "_longest")  # beyond which all rows are `fill`
        shift = max(-longest, min(longest, int(arguments.integer("shift", shift, least=None))))
        found = self._moved(x.movedim(dim, 0), f"roll by {shift}", "_of_rolled", shift)
        source = self._positions(str(x.device)) - shift
        has_one = (source >= 0) & (source < self._ends(str(x.device)))
        rows_at = padded(torch.where(has_one, has_one.cumsum(0) - 1, len(found)), self.padding, len(found))
        nothing = bits(x.movedim(dim, 0).new_full((1, *found.shape[1:]), fill))
        return of_dtype(torch.cat([found, nothing]).index_select(0, rows_at), x.dtype).movedim(0, dim)

    @cached_method
    def _longest(self) -> int:
        return max(self.lengths, default=0)

    @cached_method
    def _ends(self, device: str) -> Tensor:
        """(used_rows,): the length of each row's document."""
        return repeated([self.lengths[p.document] for p in self.pieces], [p.rows for p in self.pieces]).to(device)

    def _check_rows(self, x: Tensor, dim: int, rows: int, which: str) -> None:
        arguments.tensors(x=x)
        arguments.integer("dim", dim, least=None)
        if not -x.dim() <= dim < x.dim() or x.shape[dim] != rows:
            raise ValueError(f"dimension {dim} of x must have {which} {rows} rows, got {tuple(x.shape)}; {self!r}")

    # Attention

    @property
    def local(self) -> Layout:
        """The layout of this rank's call, when its keys have come: its rows, where they and their keys stand. A new
        one each time, which is nobody else's."""
        device = self.ranks.device
        return self._packed(device) if self.batch is None else self._dense(device, "bhsd")

    def layout(self, device: Any, order: str = "bhsd") -> Layout:
        """`local` on a device; of a batch in this order."""
        return self._layout(str(device), "thd" if self.batch is None else order)

    @cached_method
    def _layout(self, device: str, order: str) -> Layout:
        return self._packed(device) if self.batch is None else self._dense(device, order)

    def _packed(self, device: Any) -> Packed:
        sharding, part = self.sharding, self.ranks.part
        if self.ranks.parts == 1:
            return Packed.from_lengths(self.lengths, device=device)
        rows, keys, first = ([0] * len(self.lengths) for _ in range(3))
        for piece in sharding.by_part[part]:
            rows[piece.document] += piece.rows
        for span in sharding.keys[part]:
            keys[span.document], first[span.document] = span.rows, span.start
        layout = Packed.from_lengths(rows, keys, device=device)
        q_offset = self._offsets(device)
        k_offset = torch.tensor(first, dtype=torch.int32, device=device)
        return Packed(
            layout.cu_seqlens_q, layout.cu_seqlens_k, layout.max_seqlen_q, layout.max_seqlen_k, q_offset=q_offset,
            k_offset=k_offset,
        )  # fmt: skip

    def _dense(self, device: Any, order: str) -> Dense:
        used = None
        if self.padding and self.ranks.heads == 1:
            used = torch.full((self.batch or 0,), self.used_rows, dtype=torch.int32, device=device)
        if self.ranks.parts == 1:
            return Dense(order, used)
        k_offset = sum(span.start for span in self.sharding.keys[self.ranks.part])
        return Dense(order, used, q_offset=self._offsets(device), k_offset=k_offset)

    def _offsets(self, device: Any) -> Tensor:
        """(1, rows of the part) int32; ranks that divide heads have none of padding in a call."""
        pieces = self.sharding.by_part[self.ranks.part]
        found = [(p.start, p.rows) for p in pieces]
        if self.ranks.heads == 1 and self.padding:
            # As the last row: positions never fall in a document.
            found += [(pieces[-1].stop - 1 if pieces else 0, 1)] * self.padding
        return numbers(found, device).int()[None]

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, *, layout: Any, **options: Any
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """out, and where they are asked for the LSE and the largest scores, of `attention(…, context=self)`."""
        from saccade.distributed.call import attention  # which imports this module

        return attention(self, q, k, v, layout, options)

    def prepare(self) -> None:
        """Makes what calls need, so that torch.compile finds it."""
        assert self.rows >= 0
        device = self.ranks.device
        for tensor in (self._rows, self._positions, self._documents, self._ends):
            tensor(device)
        for order in ("bhsd",) if self.batch is None else ORDERS:
            self.layout(device, order)
        if self.ranks.parts > 1:
            self.keys_exchange()
        if self.by_pieces:
            self.pieces_layout(device)
            self.pieces_exchange()
            if self.arriving is not None:
                self.arriving.layouts(torch.device(self.ranks.device))
        if self.ranks.heads > 1 and self.heads is not None:
            for h in self.heads:
                self.heads_exchange(h, self.heads[0])

    @cached_method
    def heads_exchange(self, h: int, h_q: int) -> HeadExchange:
        """All rows of this part and a share of h heads, for all heads of this rank's rows."""
        return HeadExchange(self.part_rows(), h, h_q, self.heads_transport())

    @cached_method
    def keys_exchange(self) -> RowExchange:
        """The keys of all parts to the rows that see them."""
        sharding, kind = self.sharding, PulledRows if self.method.endswith("pull") else RowExchange
        return kind(sharding.by_part, sharding.keys, self.rows_transport())

    # Pieces as sequences. Where no row sees keys after itself, a piece's keys end with its last row, which is where
    # masks of the window family align rows and keys: they need no positions, which cost kernels time. A document in
    # two pieces has the keys that both see twice.

    @property
    def by_pieces(self) -> bool:
        """Whether calls of such masks may take pieces as sequences."""
        return self.method == "pull" and self.batch is None and self.sharding.reach.right == 0 and self.ranks.parts > 1

    def pieces_layout(self, device: Any) -> Packed:
        """One sequence for each piece, with its own keys."""
        return self._pieces_layout(str(device))

    @cached_method
    def _pieces_layout(self, device: str) -> Packed:
        pieces = self.pieces
        lengths = [x.rows for x in pieces], [x.rows for x in self.sharding.seen(pieces)]
        return Packed.from_lengths(*(x or [0] for x in lengths), device=device)

    @cached_method
    def pieces_exchange(self) -> RowExchange:
        """The keys of each piece."""
        sharding = self.sharding
        needed = [sharding.seen(pieces) for pieces in sharding.by_part]
        return PulledRows(sharding.by_part, needed, self.rows_transport())

    # Of rows to all ranks, or rolled: the names of the exchange of this rank's part, and of that between parts.

    @cached_method
    def _within(self) -> str:
        ranks = self.ranks
        own = self.sharding.by_rank[ranks.part * ranks.heads :][: ranks.heads]
        return self._named(RowExchange(own, [self.sharding.by_part[ranks.part]] * ranks.heads, self.heads_transport()))

    @cached_method
    def _of_all(self) -> str:
        return self._across([[Piece(i, 0, n) for i, n in enumerate(self.lengths) if n]] * self.size)

    @cached_method
    def _of_rolled(self, shift: int) -> str:
        return self._across([shifted(pieces, self.lengths, shift) for pieces in self.sharding.by_rank])

    def _across(self, needed: Sequence[list[Piece]]) -> str:
        first = self.ranks.rank % self.ranks.heads
        return self._named(RowExchange(self.sharding.by_part, needed[first :: self.ranks.heads], self.rows_transport()))

    @cached_method
    def _rows_seed(self) -> str:
        return self._named(Broadcast(self.rows_transport()))

    @cached_method
    def _heads_seed(self) -> str:
        return self._named(Broadcast(self.heads_transport()))

    def _named(self, exchange: Exchange) -> str:
        """Kept as long as the plan: torch.compile, which may meet it first, knows no more of it."""
        self._kept[exchange.name] = exchange
        return exchange.name

    def _moved(self, x: Tensor, stage: str, across: str, *arguments: Any) -> Tensor:
        x = bits(x[: self.used_rows])
        if self.ranks.heads > 1:
            (x,) = moved(constant(id(self), "_within"), stage, x)
        (x,) = moved(constant(id(self), across, *arguments), stage, x)
        return x

    @property
    def arriving(self) -> ArrivingRows | None:
        """The keys of each piece of a causal call, which come while it runs; None where rows do not see all keys before
        them."""
        return self._arriving() if self.arrives else None

    @property
    def arrives(self) -> bool:
        return self.by_pieces and self.sharding.reach.left is None

    @cached_method
    def _arriving(self) -> ArrivingRows:
        return ArrivingRows(self.sharding, self.rows_transport())

    @cached_method
    def rows_transport(self) -> Transport:
        """Between the ranks with the same heads, one of each part."""
        ranks = self.ranks
        return self._transport(ranks.rows_group, ranks.part, ranks.parts)

    @cached_method
    def heads_transport(self) -> Transport:
        """Between the ranks that divide heads."""
        ranks = self.ranks
        return self._transport(ranks.heads_group, ranks.rank % ranks.heads, ranks.heads)

    def part_rows(self) -> list[int]:
        """The rows of each rank of this part."""
        first = self.ranks.part * self.ranks.heads
        return self.sharding.rows[first : first + self.ranks.heads]

    def _transport(self, group: str, rank: int, size: int) -> Transport:
        return Transport(group, rank, size, f"{self.fingerprint} {self!r}", self.timeout, self.debug)

    # What it is

    @property
    def fingerprint(self) -> str:
        """Equal on ranks with equal plans."""
        return f"{self.sharding.fingerprint} {self.method}"

    def explain(self) -> str:
        """Rows, scores and keys that come from elsewhere, for each rank; the method and why; and what to expect."""
        return estimates.explanation(self)

    def draw(self, width: int = 72, path: Any = None) -> str:
        """Who has what: a line for each document, a sign for each rank. With `path` a picture too, by matplotlib."""
        return drawn(self, arguments.integer("width", width, least=1), path)

    def __repr__(self) -> str:
        what = f"{len(self.lengths)} documents" if self.batch is None else f"a batch {(self.batch, self.lengths[0])}"
        return f"ContextPlan({what}, {sum(self.lengths)} rows over {self.size} ranks, {self.method})"


# Who has what, as text or by matplotlib.


SIGNS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
MOST_LINES = 40


def drawn(plan: ContextPlan, width: int, path: Any) -> str:
    """A line for each of the longest documents, in their order; each sign stands for as many rows."""
    if path is not None:
        _saved(plan, path)
    lengths = plan.lengths
    longest = max(lengths, default=0)
    shown = sorted(sorted(range(len(lengths)), key=lambda i: -lengths[i])[:MOST_LINES])
    scale = max(1, -(-longest // max(width, 1)))
    lines = [f"{plan!r}; a sign is {scale} row{'s' if scale > 1 else ''}"]
    owners = _owners(plan)
    for i in shown:
        at = range(0, lengths[i], scale)
        ranks = (next(rank for start, stop, rank in owners[i] if start <= row < stop) for row in at)
        lines.append(f"{i:6} {''.join(SIGNS[rank % len(SIGNS)] for rank in ranks)} {lengths[i]}")
    if len(shown) < len(lengths):
        lines.append(f"       and {len(lengths) - len(shown)} shorter documents")
    return "\n".join(lines)


def _owners(plan: ContextPlan) -> list[list[tuple[int, int, int]]]:
    """For each document (start, stop, rank) of its pieces, in order."""
    found: list[list[tuple[int, int, int]]] = [[] for _ in plan.lengths]
    for rank, pieces in enumerate(plan.sharding.by_rank):
        for piece in pieces:
            found[piece.document].append((piece.start, piece.stop, rank))
    return [sorted(pieces) for pieces in found]


def _saved(plan: ContextPlan, path: Any) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 1.5 + 0.12 * min(len(plan.lengths), 80)), layout="constrained")
    axes = figure.add_subplot()
    order = sorted(range(len(plan.lengths)), key=lambda i: -plan.lengths[i])
    owners = _owners(plan)
    for line, i in enumerate(order):
        for start, stop, rank in owners[i]:
            axes.barh(line, stop - start, left=start, height=0.8, color=f"C{rank % 10}")
    axes.invert_yaxis()
    axes.set(xlabel="position in the document", ylabel="documents, the longest first", title=repr(plan))
    figure.savefig(path, dpi=120)
