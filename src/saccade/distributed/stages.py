"""A call in two stages, each of some heads: while the first computes, the keys of the others come, and back, what the
others made of them returns. So little more than the first heads' exchange is waited for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from saccade import ops
from saccade.call import BoundCall
from saccade.distributed.pull import Coming
from saccade.layouts import Layout, empty_like_rows


class Stages(NamedTuple):
    """A call whose first `first` key heads are a stage, and all others."""

    exchange: Any
    """PulledRows"""
    layout: Layout
    given: Layout
    """of the operands"""
    bound: Callable[[Tensor, Tensor, Tensor], BoundCall]
    backend: str
    first: int
    words: str
    """of the exchange"""

    def of(self, heads: int, h_k: int) -> list[slice]:
        """Each stage's of so many heads."""
        cut = self.first * heads // h_k
        return [slice(0, cut), slice(cut, heads)]

    def coming(self, rows: list[Tensor], room: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The keys and values of each stage, when they have come; those of the next are on their way then."""
        h, before = rows[0].shape[1], None
        for part in self.of(h, h):
            own = self.exchange.coming([x[:, part] for x in rows], self.words, room)
            if before is not None:
                yield self._keys(before)
            before = own
        assert before is not None
        yield self._keys(before)

    def _keys(self, coming: Coming) -> tuple[Tensor, Tensor]:
        k, v = (self.layout.ordered(x.permute(2, 1, 0, 3)) for x in coming.rows())
        return k, v


def run(stages: Stages, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out and the LSE, in the operands' order."""
    return _Staged.apply(q, k, v, stages)


def _heads(layout: Layout, x: Tensor, part: slice) -> Tensor:
    return layout.ordered(layout.canonical(x)[:, part])


def _lse_heads(layout: Layout, x: Tensor, part: slice) -> Tensor:
    return layout.ordered_lse(layout.canonical_lse(x)[:, part])


class _Staged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, stages: Stages) -> tuple[Tensor, Tensor]:
        layout = stages.layout
        rows, keys_values = layout.canonical(q), [stages.given.canonical(x).permute(2, 1, 0, 3) for x in (k, v)]
        h_k, room = keys_values[0].shape[1], stages.exchange.room(keys_values)
        out = layout.ordered(empty_like_rows(rows, v.shape[-1]))
        lses, keys = [], []
        coming = stages.coming(keys_values, room)
        for part, (key, value) in zip(stages.of(rows.shape[1], h_k), coming, strict=True):
            call = stages.bound(_heads(layout, q, part), key, value)._replace(out=_heads(layout, out, part))
            _, lse, _ = ops.run(call, stages.backend, True)
            assert lse is not None
            lses.append(layout.canonical_lse(lse))
            keys += [key, value]
        lse = layout.ordered_lse(torch.cat(lses, 1))
        ctx.stages, ctx.h_k, ctx.room = stages, h_k, room
        ctx.save_for_backward(q, out, lse, *keys)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        stages, (q, out, lse, *keys) = ctx.stages, ctx.saved_tensors
        layout, exchange = stages.layout, stages.exchange
        dout = torch.zeros_like(out) if dout is None else dout
        dq, coming = torch.empty_like(q), []
        parts = stages.of(layout.canonical(q).shape[1], ctx.h_k)
        for part, key, value in reversed([*zip(parts, keys[::2], keys[1::2], strict=True)]):
            call = stages.bound(_heads(layout, q, part), key, value)
            of_rows = (_heads(layout, x, part) for x in (dout, out))
            of_lse = (None if x is None else _lse_heads(layout, x, part).contiguous() for x in (dlse, lse))
            (dout_, out_), (dlse_, lse_) = of_rows, of_lse
            assert lse_ is not None
            own, dk, dv = ops.gradients(call, stages.backend, dout_, dlse_, out_, lse_)
            _heads(layout, dq, part).copy_(own)
            rows = [layout.canonical(x).permute(2, 1, 0, 3) for x in (dk, dv)]
            coming.append(exchange.returning(rows, f"the backward of {stages.words}", ctx.room))
        made = [x.rows() for x in reversed(coming)]
        dk, dv = (stages.given.ordered(torch.cat(xs, 1).permute(2, 1, 0, 3)) for xs in zip(*made, strict=True))
        return dq, dk, dv, None
