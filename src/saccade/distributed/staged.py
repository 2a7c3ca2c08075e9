"""Causal attention in two stages, over own keys while those of others come, and then over theirs where they arrive; one
backward over both."""

from __future__ import annotations

from importlib import import_module
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade import batching, ops
from saccade.autograd import needs_gradient
from saccade.backends import Outputs
from saccade.bounded_cache import lasting
from saccade.call import BoundCall
from saccade.distributed import exchanges
from saccade.distributed.exchanges import library
from saccade.distributed.pull import PulledRows, Range, united
from saccade.distributed.rows import numbers
from saccade.distributed.sharding import Sharding
from saccade.distributed.transport import Transport
from saccade.flat_call import SCHEMA, FlatCall, savable
from saccade.layouts import Packed
from saccade.partial import Partial, merge
from saccade.problem import Problem


class Stages(NamedTuple):
    """The layouts of a rank's calls, and rows."""

    own: Packed
    """Its rows over its keys: those of a document are one causal sequence, whatever others have between them."""
    theirs: Packed
    """Rows that see keys of others, over these: all of them."""
    both: Packed
    """Each piece over all its keys."""
    late: Tensor
    """int32: the rows of `theirs`."""


class StagedRows(PulledRows):
    """The keys of each causal piece: first those of others, of which its rows see every one, then the rank's own."""

    def __init__(self, sharding: Sharding, transport: Transport) -> None:
        super().__init__(sharding.by_part, [sharding.others_first(pieces) for pieces in sharding.by_part], transport)
        self.pieces = sharding.by_part[transport.rank]
        self.before = [sum(x.rows for x in found) for found in sharding.before(self.pieces)]
        """How many keys of others each piece sees."""
        places = accumulate((piece.rows for piece in self.pieces), initial=0)
        late = zip(places, self.pieces, self.before, strict=False)
        self.late: list[Range] = united((first, piece.rows) for first, piece, n in late if n)
        """The rows that see keys of others."""
        self._stages: dict[torch.device, Stages] = {}

    def stages(self, device: torch.device) -> Stages:
        if device not in self._stages:
            self._stages[device] = lasting(lambda: self._made(device))
        return self._stages[device]

    def _made(self, device: torch.device) -> Stages:
        own: dict[int, int] = {}
        for piece in self.pieces:
            own[piece.document] = own.get(piece.document, 0) + piece.rows
        rows, keys = [x.rows for x in self.pieces], [x.stop for x in self.pieces]
        late = [i for i, n in enumerate(self.before) if n]
        queries = Packed.from_lengths([rows[i] for i in late], device=device)
        first = [*accumulate(keys, initial=0)]
        starts, used = (
            torch.tensor([x[i] for i in late], dtype=torch.int32, device=device) for x in (first, self.before)
        )
        return Stages(
            Packed.from_lengths([*own.values()], device=device),
            Packed(queries.cu_seqlens_q, max_seqlen_q=queries.max_seqlen_q, starts_k=starts, seqused_k=used),
            Packed.from_lengths(rows, keys, device=device),
            numbers(self.late, device).int(),
        )

    def overlapped(self, call: FlatCall, stage: str, keep: bool) -> tuple[Outputs, list[Tensor]]:
        """The results, and, if they are to be kept, the keys and values of both, in which this rank's are missing."""
        backend, stages = call.parsed.backend, self.stages(call.q.device)
        arrival = self.pushed([rows_of(call.k), rows_of(call.v)], stage)
        try:
            results = ops.execute(call.problem(), backend, True)
        finally:  # ranks meet whatever happens
            theirs = [x.squeeze(2) for x in self.arrived(arrival)]
        memory = arrival.regions.memory
        before, kept = memory.now(), [x.new_empty(x.shape if keep else 0) for x in theirs]
        if self.late:
            q = [call.q[first : first + n] for first, n in self.late]
            keys, values = theirs
            late = _every(call, q[0] if len(q) == 1 else torch.cat(q), keys, values, stages.theirs)
            part = ops.execute(late, backend, True)
            # Where multiprocessors become free.
            copied = memory.copied(lambda: self.keep_others(theirs, kept), before) if keep else None
            _merge(results, part, stages.late)
            if copied is not None:
                memory.end(copied)
        memory.read(self.transport.timeout)
        return results, kept

    def gradients(
        self, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, keys: Tensor, values: Tensor, call: FlatCall,
        stage: str,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """dq, dk, dv and dsink."""
        # Nobody has read what is written here, so that saved tensors stay as they were saved.
        self.keep_own([call.k, call.v], [keys.data, values.data])
        both = self.stages(call.q.device).both
        whole = call._replace(k=keys, v=values, tensors=[*both.tensors])
        dq, dk, dv, dsink, _ = torch.ops.saccade.backward.default(dout, dlse, out, lse, *whole, [])
        dk, dv = (x.squeeze(2) for x in self.backward([rows_of(dk), rows_of(dv)], stage))
        return dq, dk, dv, dsink


def rows_of(x: Tensor) -> Tensor:
    """(rows, heads, 1, d), as exchanges of every call have them: ranks compare."""
    return x.unsqueeze(2)


def _every(call: FlatCall, q: Tensor, keys: Tensor, values: Tensor, layout: Packed) -> Problem:
    """These rows over all keys, without a sink, which counts once."""
    view = layout.canonical
    given, options = call.parsed, (None, None, None, layout, call.floats[0])
    return Problem(
        view(q), view(keys), view(values), *options, deterministic=given.deterministic, max_scores=given.max_scores
    )


def _merge(found: Outputs, part: Outputs, late: Tensor) -> None:
    """Into the rows `late` of the first results."""
    (out, lse, top), (part_out, part_lse, part_top) = found, part
    assert lse is not None
    assert part_lse is not None
    if top is not None and part_top is not None:
        top[:, late] = torch.maximum(top[:, late], part_top)
    if out.device.type == "cuda":
        kernel: Any = import_module("saccade.backends.triton.merge_rows")
        kernel.merge_rows(out, lse, part_out, part_lse, late)
        return
    first = Partial(out[late].transpose(0, 1)[None], lse[:, late][None])
    both = merge(first, Partial(part_out.transpose(0, 1)[None], part_lse[None]))
    out[late], lse[:, late] = both.out[0].transpose(0, 1), both.lse[0]


def attention(exchange: StagedRows, stage: str, call: BoundCall, backend: str) -> tuple[Tensor, Tensor, Tensor]:
    """out, the LSE and the largest scores, or nothing, of a causal call that is bound as if to own keys alone."""
    flat, keep = call.flattened(backend), needs_gradient(*call.differentiable())
    return torch.ops.saccade_distributed.staged(*flat, exchange.name, stage, keep)[:3]


# The operators: that of two stages, and its gradient, which completes keys and values.

library.define(
    f"staged({SCHEMA}, str exchange, str stage, bool keep)"
    " -> (Tensor out, Tensor lse, Tensor max_scores, Tensor keys, Tensor values)"
)
library.define(
    "staged_back(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, Tensor keys, Tensor values, "
    f"{SCHEMA}, str exchange, str stage) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsink)"
)


def _forward(*arguments: Any) -> tuple[Tensor, ...]:
    *flat, name, stage, keep = arguments
    exchange: Any = exchanges.named(name)
    (out, lse, top), keys_values = exchange.overlapped(FlatCall(*flat), stage, keep)
    return out, lse, lse.new_empty(0) if top is None else top, *keys_values


def _fake_forward(*arguments: Any) -> tuple[Tensor, ...]:
    *flat, name, _, keep = arguments
    call = FlatCall(*flat)
    needed = exchanges.named(name).shape
    return *ops.fake_forward(*flat, True), *(
        x.new_empty(needed(tuple(x.shape), False) if keep else 0) for x in (call.k, call.v)
    )


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    *flat, name, ctx.stage, _ = inputs
    call, (out, lse, top, keys, values) = FlatCall(*flat), output
    ctx.exchange, ctx.static = exchanges.named(name), call.static()
    ctx.mark_non_differentiable(top, keys, values)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(out, lse, keys, values, *call[:3], *savable([call.sink, *call.tensors]))


def _gradient(ctx: Any, dout: Tensor | None, dlse: Tensor | None, *_: Any) -> tuple[Any, ...]:
    out, lse, keys, values, *tensors = ctx.saved_tensors
    call = FlatCall.of_tensors(tensors, 0, ctx.static)
    dout = torch.zeros_like(out) if dout is None else dout
    stage = exchanges.back(ctx.stage)
    found = torch.ops.saccade_distributed.staged_back(
        dout, dlse, out, lse, keys, values, *call, ctx.exchange.name, stage
    )
    # Lists of tensors, and lists of nothing, want lists.
    rest = ([None] * len(x) if not x or isinstance(x[0], Tensor) else None for x in call[4:])
    return (*found[:3], found[3] if call.sink is not None else None, *rest, None, None, None)


def _backward(dout: Tensor, dlse: Tensor | None, *arguments: Any) -> tuple[Tensor, ...]:
    out, lse, keys, values, *flat, name, stage = arguments
    exchange: Any = exchanges.named(name)
    return exchange.gradients(dout, dlse, out, lse, keys, values, FlatCall(*flat), stage)


def _fake_backward(dout: Tensor, dlse: Tensor | None, *arguments: Any) -> tuple[Tensor, ...]:
    call = FlatCall(*arguments[4:-2])
    dsink = dout.new_empty(0) if call.sink is None else torch.empty_like(call.sink)
    return (*(x.new_empty(x.shape) for x in call[:3]), dsink)


for _name, _kernel, _fake in (("staged", _forward, _fake_forward), ("staged_back", _backward, _fake_backward)):
    library.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"saccade_distributed::{_name}", _fake, lib=library)
    batching.register(library, _name, batching.one_by_one(getattr(torch.ops.saccade_distributed, _name)))
torch.library.register_autograd("saccade_distributed::staged", _gradient, setup_context=_setup, lib=library)
