"""Causal attention that begins while the keys of others come."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from importlib import import_module
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade import ops
from saccade.backends import Outputs
from saccade.call import SCHEMA, Call, flatten, joined, needs_gradient, savable, split, unflatten
from saccade.call.call import ArrivalArgs, Arrivals
from saccade.distributed import exchanges
from saccade.distributed.exchanges import Segment, library, numbers
from saccade.distributed.groups import cached_method
from saccade.distributed.pull import PulledRows, row_bytes
from saccade.distributed.sharding import Sharding
from saccade.distributed.transport import Transport
from saccade.layouts import Packed
from saccade.ops import vmap
from saccade.ops.autograd import FIRST_ALONE
from saccade.util.arguments import Unsupported

COPY_BYTES, MOST_COPIES = 2 << 20, 96
"""A copy brings so many bytes in the mean of a step, or those of one head, unless that takes more copies. Each costs
the copy engine some 5 µs beside its bytes, and the host, which starts the kernel behind them, 3."""


class Layouts(NamedTuple):
    """Of a rank's call."""

    own: Packed
    """Its rows over its keys, as the call is checked: those of a document are one sequence."""
    whole: Packed
    """Each piece over all its keys."""
    slots: Tensor
    """int32 (places, rows): where own rows are among these, some of them more than once; then where others find them"""
    coming: Tensor
    """`ArrivalArgs.coming`"""


class Step(NamedTuple):
    """Heads from `first` to `stop` of a piece's keys of others."""

    piece: int
    first: int
    stop: int


class Steps(NamedTuple):
    """Those of a call, in the order in which kernels begin with what they bring."""

    steps: list[Step]
    needed: Tensor
    """`ArrivalArgs.steps`"""


class ArrivingRows(PulledRows):
    """The keys of each causal piece: first the keys of other ranks, all of which its rows see, then the rank's own. A
    call starts when its own keys are in place. Copy engines bring the others meanwhile, in the order in which the
    kernel needs them."""

    def __init__(self, sharding: Sharding, transport: Transport) -> None:
        super().__init__(sharding.by_part, [sharding.others_first(pieces) for pieces in sharding.by_part], transport)
        self.pieces = sharding.by_part[transport.rank]
        first = [*accumulate((x.stop for x in self.pieces), initial=0)]
        self.of_piece: list[list[tuple[int, Segment]]] = [[] for _ in self.pieces]
        """What a piece sees of others, and of whom."""
        for rank, segments in enumerate(self.received):
            for segment in segments if rank != transport.rank else ():
                self.of_piece[bisect_right(first, segment.target) - 1].append((rank, segment))

    @cached_method
    def layouts(self, device: torch.device) -> Layouts:
        own: dict[int, int] = {}
        for piece in self.pieces:
            own[piece.document] = own.get(piece.document, 0) + piece.rows
        rows, keys = [x.rows for x in self.pieces], [x.stop for x in self.pieces]
        coming = [sum(segment.rows for _, segment in segments) for segments in self.of_piece]
        return Layouts(
            Packed.from_lengths([*own.values()], device=device),
            Packed.from_lengths(rows, keys, device=device),
            self._slots().to(device),
            torch.tensor([*coming, 0], dtype=torch.int32, device="cpu").to(device),
        )

    def _slots(self) -> Tensor:
        """A layer has each own piece once, for one piece of its document that sees it."""
        layers: list[list[Segment]] = []
        times: dict[int, int] = {}
        for segment in self.own:
            times[segment.source] = layer = times.get(segment.source, -1) + 1
            layers += [[]] if layer == len(layers) else []
            layers[layer].append(segment)
        slots = torch.full((len(layers) + 1, self.rows), -1, dtype=torch.int32, device="cpu")
        for row, found in zip(slots, layers, strict=False):
            row[numbers([(x.source, x.rows) for x in found], "cpu")] = numbers([x[1:] for x in found], "cpu").int()
        lent = numbers(self.lent, "cpu")
        slots[-1, lent] = lent.int()
        return slots

    @cached_method
    def steps(self, heads: int, head_bytes: int, device: torch.device) -> Steps:
        """Of rows with so many heads, each of so many bytes with its value."""
        steps: list[Step] = []
        needed = torch.zeros(len(self.pieces) + 1, heads, dtype=torch.int32, device="cpu")
        least = -(-heads * sum(map(len, self.of_piece)) // MOST_COPIES)
        for i in sorted(range(len(self.pieces)), key=lambda i: -self.pieces[i].stop):
            rows, copies = sum(segment.rows for _, segment in self.of_piece[i]), len(self.of_piece[i])
            size = rows * head_bytes
            at_once = min(heads, max(least, -(-COPY_BYTES * copies // size))) if size else heads
            for first in range(0, heads, at_once) if rows * heads else ():
                steps.append(Step(i, first, min(first + at_once, heads)))
                needed[i, first : first + at_once] = len(steps)
        return Steps(steps, needed.to(device))

    def begun(self, call: Call, backend: str, stage: str) -> tuple[Outputs, Tensor]:
        """The results, and the keys of all, each beside its value: (keys, h_k, d + d_v), which one copy brings."""
        q, k, v, _ = call.given
        layouts, heads = self.layouts(q.device), k.shape[1]
        both = k.new_empty(self.needed, heads, k.shape[2] + v.shape[2])
        size = row_bytes(both)
        steps, needed = self.steps(heads, size // max(heads, 1), q.device)
        regions = self._regions([both], stage)
        (lent,) = regions(self.transport.rank)
        _spread(k, v, [both] * (len(layouts.slots) - 1) + [lent], layouts.slots)
        self._barrier(regions, stage)
        memory, done = regions.memory, torch.zeros(1, dtype=torch.int32, device=q.device)
        tells = memory.tells()

        def copies() -> None:
            here, there = both.data_ptr(), [regions(i)[0].data_ptr() for i in range(self.transport.size)]
            for number, (i, first, stop) in enumerate(steps, 1):
                at, width = first * size // heads, (stop - first) * size // heads
                for rank, (source, target, n) in self.of_piece[i]:
                    memory.copy(here + target * size + at, there[rank] + source * size + at, n, width, size)
                if tells:
                    memory.tell(done, number)

        event = memory.copied(copies)
        try:
            whole, arrivals = self._whole(call, both), None
            if tells:
                arrivals = Arrivals(ArrivalArgs(done, needed, layouts.coming), lambda: memory.end(event))
            else:
                memory.end(event)
            results = ops.execute(whole, backend, True, arrivals=arrivals)
        finally:
            memory.end(event)
            memory.read(self.transport.timeout)
        return results, both

    def _whole(self, call: Call, both: Tensor) -> Call:
        """The call of own rows over all keys."""
        q, k, _, _ = call.given
        d = k.shape[2]
        return call.replace(given=(q, both[..., :d], both[..., d:], None), layout=self.layouts(q.device).whole)

    def gradients(
        self, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, both: Tensor, call: Call, stage: str
    ) -> tuple[Tensor, ...]:
        """dq, dk, dv and dsink."""
        whole = flatten(self._whole(call, both), "auto")
        dq, dk, dv, dsink, _ = torch.ops.saccade.backward.default(dout, dlse, out, lse, *whole, [])
        dk, dv = (x.squeeze(2) for x in self.backward([rows_of(dk), rows_of(dv)], stage))
        return dq, dk, dv, dsink


def _spread(keys: Tensor, values: Tensor, targets: Sequence[Tensor], table: Tensor) -> None:
    if keys.device.type == "cuda":
        kernel: Any = import_module("saccade.backends.triton.rank_rows")
        kernel.spread_rows(keys.contiguous(), values.contiguous(), targets, table)
        return
    both = torch.cat((keys, values), -1)
    for target, slots in zip(targets, table, strict=True):
        there = slots >= 0
        target[slots[there]] = both[there]


def rows_of(x: Tensor) -> Tensor:
    """(rows, heads, 1, d), as exchanges of every call have them: ranks compare."""
    return x.unsqueeze(2)


def attention(exchange: ArrivingRows, stage: str, call: Call, backend: str) -> tuple[Tensor, Tensor, Tensor]:
    """out, the LSE and the largest scores, or nothing, of a causal call that is bound as if to own keys alone."""
    flat, keep = flatten(call, backend), needs_gradient(*call.differentiable())
    return torch.ops.saccade_distributed.arriving(*flat, exchange.name, stage, keep)[:3]


# The operators: that call, and its gradient.

library.define(
    f"arriving({SCHEMA}, str exchange, str stage, bool keep)"
    " -> (Tensor out, Tensor lse, Tensor max_scores, Tensor both)"
)
library.define(
    "arriving_back(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, Tensor both, "
    f"{SCHEMA}, str exchange, str stage) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsink)"
)


def _forward(*arguments: Any) -> tuple[Tensor, ...]:
    *flat, name, stage, keep = arguments
    exchange: Any = exchanges.named(name)
    stage = exchanges.with_gradients(stage) if keep else stage
    (out, lse, top), both = exchange.begun(*unflatten(*flat), stage)
    return out, lse, lse.new_empty(0) if top is None else top, both if keep else both.new_empty(0)


def _fake_forward(*arguments: Any) -> tuple[Tensor, ...]:
    *flat, name, _, keep = arguments
    _, k, v, *_ = flat
    shape = exchanges.named(name).shape((*k.shape[:2], k.shape[2] + v.shape[2]), False)
    return *ops.fake_forward(*flat, True), k.new_empty(shape if keep else 0)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    *flat, name, ctx.stage, _ = inputs
    (tensors, ctx.static), (out, lse, top, both) = split(flat), output
    ctx.exchange = exchanges.named(name)
    ctx.mark_non_differentiable(top, both)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(out, lse, both, *tensors[:3], *savable(tensors[3:]))


def _gradient(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: Any) -> tuple[Any, ...]:
    out, lse, both, *tensors = ctx.saved_tensors
    flat = joined(tensors, ctx.static)
    dout = torch.zeros_like(out) if dout is None else dout
    stage = exchanges.back(ctx.stage)
    found = torch.ops.saccade_distributed.arriving_back(dout, dlse, out, lse, both, *flat, ctx.exchange.name, stage)
    # Lists of tensors, and lists of nothing, want lists.
    rest = ([None] * len(x) if not x or isinstance(x[0], Tensor) else None for x in flat[4:])
    return (*found[:3], found[3] if flat[3] is not None else None, *rest, None, None, None)


def _backward(dout: Tensor, dlse: Tensor | None, *arguments: Any) -> tuple[Tensor, ...]:
    out, lse, both, *flat, name, stage = arguments
    exchange: Any = exchanges.named(name)
    return exchange.gradients(dout, dlse, out, lse, both, unflatten(*flat)[0], stage)


def _no_second(ctx: Any, *_: Any) -> Any:
    raise Unsupported(FIRST_ALONE)


def _fake_backward(dout: Tensor, dlse: Tensor | None, *arguments: Any) -> tuple[Tensor, ...]:
    q, k, v, sink, *_ = arguments[3:-2]
    dsink = dout.new_empty(0) if sink is None else torch.empty_like(sink)
    return (*(x.new_empty(x.shape) for x in (q, k, v)), dsink)


for _name, _kernel, _fake in (("arriving", _forward, _fake_forward), ("arriving_back", _backward, _fake_backward)):
    library.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"saccade_distributed::{_name}", _fake, lib=library)
    vmap.register(library, _name, vmap.one_by_one(getattr(torch.ops.saccade_distributed, _name)))
    exchanges.met(_name)
torch.library.register_autograd("saccade_distributed::arriving", _gradient, setup_context=_setup, lib=library)
torch.library.register_autograd("saccade_distributed::arriving_back", _no_second, lib=library)
