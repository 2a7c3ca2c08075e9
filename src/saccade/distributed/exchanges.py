"""What ranks exchange: pairs of linear operators, opaque to torch.compile. Each is the derivative of the other.

Rows go to the ranks that need them, and sums of their gradients back; or all rows of some heads, instead of some rows
of all heads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate, count
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

from saccade.call import needs_gradient
from saccade.distributed.groups import cached_method
from saccade.distributed.sharding import Piece
from saccade.distributed.transport import Transport
from saccade.ops import vmap
from saccade.ops.autograd import SingleLevel, apply, below, forward_mode

_numbers = count()


class Exchange(ABC):
    """A linear map over the tensors of all ranks, and its adjoint. Calling it is differentiable. Operators find it by
    its name."""

    def __init__(self, *sizes: int) -> None:
        """sizes: everything that `shape` depends on besides its arguments. They are part of the name, because
        torch.compile caches graphs on disk by the arguments of operators, and other ranks and runs have other sizes."""
        self.name = " ".join(map(str, (next(_numbers), *sizes)))
        _exchanges[self.name] = self

    @abstractmethod
    def forward(self, xs: list[Tensor], stage: str) -> list[Tensor]: ...

    @abstractmethod
    def backward(self, dys: list[Tensor], stage: str) -> list[Tensor]: ...

    @abstractmethod
    def shape(self, given: tuple[Any, ...], backward: bool) -> tuple[Any, ...]:
        """The shape of the result for a tensor of this shape."""

    def awaited(self, x: Tensor) -> Tensor:
        """An empty tensor in the shape of the result, for checks before the exchange."""
        return x.new_empty(self.shape(tuple(x.shape), False))

    def __call__(self, stage: str, *xs: Tensor) -> list[Tensor]:
        return moved(self.name, stage, *xs)

    def adjoint(self, stage: str, *dys: Tensor) -> list[Tensor]:
        return torch.ops.saccade_distributed.exchange_back(dys, self.name, stage)


def moved(exchange: str, stage: str, *xs: Tensor) -> list[Tensor]:
    """The result of the exchange with this name."""
    return torch.ops.saccade_distributed.exchange(xs, exchange, stage)


_exchanges: WeakValueDictionary[str, Exchange] = WeakValueDictionary()


def named(name: str) -> Exchange:
    return _exchanges[name]


library = torch.library.Library("saccade_distributed", "DEF")
library.define("exchange(Tensor[] xs, str exchange, str stage) -> Tensor[]")
library.define("exchange_back(Tensor[] dys, str exchange, str stage) -> Tensor[]")


def _forward(xs: list[Tensor], exchange: str, stage: str) -> list[Tensor]:
    return _exchanges[exchange].forward(xs, stage)


def _backward(dys: list[Tensor], exchange: str, stage: str) -> list[Tensor]:
    return _exchanges[exchange].backward(dys, stage)


def _fake_forward(xs: list[Tensor], exchange: str, stage: str) -> list[Tensor]:
    return [x.new_empty(_exchanges[exchange].shape(tuple(x.shape), False)) for x in xs]


def _fake_backward(dys: list[Tensor], exchange: str, stage: str) -> list[Tensor]:
    return [dy.new_empty(_exchanges[exchange].shape(tuple(dy.shape), True)) for dy in dys]


def met(name: str) -> None:
    """Makes compiled graphs keep an operator whose result nothing reads, as on a rank without rows. The other ranks
    wait for it."""
    has_side_effect(getattr(torch.ops.saccade_distributed, name).default)


class _Moved(SingleLevel):
    """One of the two operators. Its derivative is the other: see `saccade.ops.autograd`."""

    @staticmethod
    def forward(operator: Any, exchange: str, stage: str, *xs: Tensor) -> tuple[Tensor, ...]:
        return tuple(below(operator, list(xs), exchange, with_gradients(stage)))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.operator, name, ctx.stage = inputs[:3]
        ctx.exchange = _exchanges[name]  # which lives as long as the graph

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> Any:
        operators = torch.ops.saccade_distributed
        forth = ctx.operator is operators.exchange.default
        other = operators.exchange_back if forth else operators.exchange
        return None, None, None, *other(list(dys), ctx.exchange.name, back(ctx.stage))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return tuple(ctx.operator(list(tangents[3:]), ctx.exchange.name, f"the tangents of {ctx.stage}"))


def _derivative(name: str) -> Any:
    def derivative(xs: list[Tensor], exchange: str, stage: str) -> list[Tensor]:
        operator = getattr(torch.ops.saccade_distributed, name).default
        if not needs_gradient(*xs) and not forward_mode():
            return below(operator, xs, exchange, stage)
        return list(apply(_Moved, operator, exchange, stage, *xs))

    return derivative


def with_gradients(stage: str) -> str:
    """The stage of an exchange that needs gradients. A rank that needs none is then in a different exchange."""
    return f"{stage}, with gradients"


def back(stage: str) -> str:
    return f"the backward of {stage}"


def _batch_rule(name: str) -> Any:
    """The batching rule: examples become the last dimension of a row."""

    def batched(info: Any, in_dims: Any, xs: list[Tensor], exchange: str, stage: str) -> tuple[list[Tensor], list[int]]:
        examples = [
            x.unsqueeze(-1).expand(*x.shape, info.batch_size) if dim is None else x.movedim(dim, -1)
            for x, dim in zip(xs, in_dims[0], strict=True)
        ]
        ys = getattr(torch.ops.saccade_distributed, name)(examples, exchange, stage)
        return [y.movedim(-1, 0) for y in ys], [0] * len(ys)

    return batched


for _name, _kernel, _fake in (("exchange", _forward, _fake_forward), ("exchange_back", _backward, _fake_backward)):
    library.impl(_name, _kernel, "CompositeExplicitAutograd")
    library.impl(_name, _derivative(_name), "Autograd")
    torch.library.register_fake(f"saccade_distributed::{_name}", _fake, lib=library)
    met(_name)
    vmap.register(library, _name, _batch_rule(_name))


class Segment(NamedTuple):
    """`rows` rows from `source` on, in the rank that has them, which are those from `target` on where needed."""

    source: int
    target: int
    rows: int


def segments(owned: list[Piece], needed: list[Piece]) -> list[Segment]:
    """The needed rows that a rank with these pieces owns, in the order of its own rows.

    >>> segments([Piece(0, 4, 8), Piece(1, 0, 2)], [Piece(0, 0, 6), Piece(1, 1, 2)])
    [Segment(source=0, target=4, rows=2), Segment(source=5, target=6, rows=1)]
    """
    of_document: dict[int, list[tuple[Piece, int]]] = defaultdict(list)
    target = 0
    for piece in needed:
        of_document[piece.document].append((piece, target))
        target += piece.rows
    found, source = [], 0
    for mine in owned:
        for piece, first in of_document.get(mine.document, ()):
            start, stop = max(mine.start, piece.start), min(mine.stop, piece.stop)
            if start < stop:
                found.append(Segment(source + start - mine.start, first + start - piece.start, stop - start))
        source += mine.rows
    return found


class RowExchange(Exchange):
    """Rows of all ranks to the ranks that need them: `x[own rows] -> y[needed rows]`, and its adjoint, in which each
    row is the sum over the ranks that had it, in their order, so that its bits repeat."""

    def __init__(self, owned: Sequence[list[Piece]], needed: Sequence[list[Piece]], transport: Transport) -> None:
        rank = transport.rank
        self.transport = transport
        self.rows = sum(piece.rows for piece in owned[rank])
        self.needed = sum(piece.rows for piece in needed[rank])
        super().__init__(self.rows, self.needed)
        self.sent = [segments(owned[rank], wanted) for wanted in needed]
        self.received = [segments(pieces, needed[rank]) for pieces in owned]
        self.own = self.sent[rank]
        self.sent_rows, self.received_rows = (
            [0 if i == rank else sum(segment.rows for segment in part) for i, part in enumerate(parts)]
            for parts in (self.sent, self.received)
        )
        self._kept: dict[Any, Any] = {}

    @cached_method
    def indices(self, device: torch.device) -> tuple[list[Tensor], list[Tensor]]:
        """For each rank: the own rows that it needs, and the indices of its rows among the rows needed here."""
        sources = [numbers([(s.source, s.rows) for s in part], device) for part in self.sent]
        return sources, [numbers([(s.target, s.rows) for s in part], device) for part in self.received]

    def forward(self, xs: list[Tensor], stage: str) -> list[Tensor]:
        sources, targets = self.indices(xs[0].device)
        rank, others = self.transport.rank, self.others
        ys = [x.new_empty(self.needed, *x.shape[1:]) for x in xs]
        for x, y in zip(xs, ys, strict=True):
            y[targets[rank]] = x[sources[rank]]
        if others:
            sent = side_by_side(xs, torch.cat([sources[i] for i in others]))
            received = self.transport.all_to_all(sent, self.received_rows, self.sent_rows, stage, xs)
            target = torch.cat([targets[i] for i in others])
            for y, part in zip(ys, apart(received, ys), strict=True):
                y[target] = part
        return ys

    def backward(self, dys: list[Tensor], stage: str) -> list[Tensor]:
        sources, targets = self.indices(dys[0].device)
        rank, others = self.transport.rank, self.others
        parts = [[dy[target] if i == rank else dy[:0] for i, target in enumerate(targets)] for dy in dys]
        if others:
            sent = side_by_side(dys, torch.cat([targets[i] for i in others]))
            received = self.transport.all_to_all(sent, self.sent_rows, self.received_rows, stage, dys)
            for mine, theirs in zip(parts, apart(received, dys), strict=True):
                mine[:] = [mine[i] if i == rank else part for i, part in enumerate(theirs.split(self.sent_rows))]
        return [self.summed(mine, [*enumerate(sources)]) for mine in parts]

    @property
    def others(self) -> list[int]:
        return [i for i in range(self.transport.size) if i != self.transport.rank]

    def summed(self, parts: list[Tensor], order: list[tuple[int, Any]]) -> Tensor:
        """Own rows, each the sum of the parts of all ranks, in order: `parts[i]` goes to `rows_of_part`."""
        like = parts[0]
        dx = torch.zeros(self.rows, *like.shape[1:], dtype=sums_dtype(like.dtype), device=like.device)
        for i, rows_of_part in order:
            dx[rows_of_part] += parts[i]  # a rank has a row once
        return dx.to(like.dtype)

    def shape(self, given: tuple[Any, ...], backward: bool) -> tuple[Any, ...]:
        return (self.rows if backward else self.needed, *given[1:])


class Broadcast(Exchange):
    """Rank 0's numbers to all ranks."""

    def __init__(self, transport: Transport) -> None:
        super().__init__()
        self.transport = transport

    def forward(self, xs: list[Tensor], stage: str) -> list[Tensor]:
        return [self.transport.broadcast(x.clone(), stage) for x in xs]

    def backward(self, dys: list[Tensor], stage: str) -> list[Tensor]:
        raise RuntimeError(f"{stage}: a broadcast from rank 0 has no gradient")

    def shape(self, given: tuple[Any, ...], backward: bool) -> tuple[Any, ...]:
        return given


def side_by_side(xs: list[Tensor], rows: Tensor) -> Tensor:
    """These rows of all tensors, flattened and concatenated into the rows of one tensor."""
    return torch.cat([x[rows].reshape(len(rows), x.shape[1:].numel()) for x in xs], 1)


def apart(both: Tensor, like: list[Tensor]) -> list[Tensor]:
    """The inverse of `side_by_side`: the rows of each tensor, in its own shape."""
    widths = [x.shape[1:].numel() for x in like]
    return [x.view(len(both), *y.shape[1:]) for x, y in zip(both.split(widths, 1), like, strict=True)]


def sums_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32


def numbers(parts: list[tuple[int, int]], device: torch.device | str) -> Tensor:
    """The rows of segments (start, rows), one after the other."""
    if not parts:
        return torch.empty(0, dtype=torch.int64, device=device)
    starts, rows = zip(*parts, strict=True)
    shift = [start - end + n for start, n, end in zip(starts, rows, accumulate(rows), strict=True)]
    return (torch.arange(sum(rows), device="cpu") + repeated(shift, rows)).to(device)


def repeated(values: Sequence[int], times: Sequence[int]) -> Tensor:
    """Each value repeated `times` times, int64 on the CPU."""
    both = torch.tensor([values, times], dtype=torch.int64, device="cpu").view(2, -1)
    return both[0].repeat_interleave(both[1])


def heads_of(rank: int, ranks: int, h: int, h_q: int) -> tuple[int, int]:
    """Which of h heads a rank has if it has its share of h_q query heads: the first head, and the count.

    >>> heads_of(1, 4, 8, 8), heads_of(3, 4, 2, 8)
    ((2, 2), (1, 1))
    """
    if h % ranks == 0:
        return rank * (h // ranks), h // ranks
    return rank * h // ranks, 1


def heads_error(ranks: int, h_q: int, h_k: int) -> str | None:
    """Why so many ranks cannot divide these heads."""
    if h_q % ranks == 0 and (h_k % ranks == 0 or ranks % h_k == 0):
        return None
    return (
        f"{ranks} ranks can divide heads if the query heads are a multiple of {ranks} and the key heads a multiple or "
        f"a divisor, not {h_q} and {h_k}"
    )


class HeadExchange(Exchange):
    """(own rows, h, …) -> (rows of all ranks, own heads, …). The adjoint sums heads that several ranks share, in the
    order of ranks. If each head belongs to one rank, it is the inverse."""

    def __init__(self, rows: Sequence[int], h: int, h_q: int, transport: Transport) -> None:
        self.rows, self.h, self.transport = list(rows), h, transport
        self.heads = [heads_of(i, transport.size, h, h_q) for i in range(transport.size)]
        self.own = self.heads[transport.rank][1]
        super().__init__(self.rows[transport.rank], sum(self.rows), h, self.own)

    def forward(self, xs: list[Tensor], stage: str) -> list[Tensor]:
        (x,) = xs
        rest = x.shape[2:]
        sent = torch.cat([x[:, first : first + n].flatten() for first, n in self.heads])
        each = self.own * rest.numel()
        received = self.transport.all_to_all(
            sent, [n * each for n in self.rows], [len(x) * n * rest.numel() for _, n in self.heads], stage, xs
        )
        return [received.view(sum(self.rows), self.own, *rest)]

    def backward(self, dys: list[Tensor], stage: str) -> list[Tensor]:
        (dy,) = dys
        rest, rows = dy.shape[2:], self.rows[self.transport.rank]
        each = self.own * rest.numel()
        counts = [rows * n * rest.numel() for _, n in self.heads]
        received = self.transport.all_to_all(dy.flatten(), counts, [n * each for n in self.rows], stage, dys)
        shared = sum(n for _, n in self.heads) > self.h
        dx = torch.zeros(rows, self.h, *rest, dtype=sums_dtype(dy.dtype) if shared else dy.dtype, device=dy.device)
        for (first, n), part in zip(self.heads, received.split(counts), strict=True):
            dx[:, first : first + n] += part.view(rows, n, *rest)
        return [dx.to(dy.dtype)]

    def shape(self, given: tuple[Any, ...], backward: bool) -> tuple[Any, ...]:
        if backward:
            return self.rows[self.transport.rank], self.h, *given[2:]
        return sum(self.rows), self.own, *given[2:]
