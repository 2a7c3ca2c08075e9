"""Attention in tiles of plain PyTorch operations: one block of query rows against the keys that it can see.

A tile holds whole score rows where they fit, so that one softmax does, as PyTorch's matrix products are fast only on
large operands; longer rows are streamed with the online softmax. Memory is a few tiles, whatever the lengths.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from saccade import blocks, hardware
from saccade.backends import Gradients, Outputs, Saved
from saccade.backends.cpu import sink
from saccade.backends.cpu.softmax import Softmax, exp
from saccade.layouts import empty_like_rows
from saccade.lazily import lazily
from saccade.masks import EMPTY, FULL, PARTIAL, TILE, Interval
from saccade.problem import Problem
from saccade.scores import Score

TILE_ELEMENTS = 1 << 20
"""Scores in a tile: 2 MB of bf16, what one core's cache holds."""
TILE_ROWS = 256
"""Rows of the matrix product, query heads of a group folded in; fewer, but at least a quarter, where rows are long."""

KEY_STOPS = 16
"""How many different ends the keys of bf16 tiles have, where there are more than 16 tiles of rows."""


class Heads(NamedTuple):
    """The batch rows and key heads that one matrix product holds."""

    batch: slice
    heads: slice


class Tile(NamedTuple):
    """Query rows against keys. In the columns `core` every row sees every key; outside of it, look."""

    rows: slice
    keys: slice
    core: slice
    empty_rows: bool
    """Whether some row sees no key at all, as far as the mask's intervals tell."""


def forward(problem: Problem, lse: bool) -> Outputs:
    """out (b, h_q, s_q, d_v), lse (b, h_q, s_q) if it is asked for or a sink needs it, and max_scores if asked for."""
    grid = _Grid(problem)
    out = problem.empty_out().zero_()
    want_lse = lse or problem.sink is not None
    found = torch.full(problem.q.shape[:3], -torch.inf, dtype=problem.lse_dtype())
    top = torch.full_like(found, -torch.inf) if problem.max_scores else None
    for heads in grid.heads():
        k, v = grid.keys(problem.k, heads), grid.keys(problem.v, heads)
        for tile in grid.tiles(heads):
            stream = Softmax(grid.softmax, want_lse or tile.empty_rows or top is not None)
            q = grid.queries(problem.q, heads, tile)
            parts = list(grid.parts(heads, tile))
            for part in parts:
                score = grid.hide(grid.score(q, k, heads, part)[0], heads, part)
                keep = grid.keep(heads, part)
                stream.add(score, v[:, part.keys], keep, only=part.keys == tile.keys)
            if not parts:
                continue
            grid.put(out, stream.out() * grid.rescale if problem.dropout else stream.out(), heads, tile)
            if want_lse:
                grid.put(found[..., None], stream.lse(), heads, tile)
            if top is not None:
                grid.put(top[..., None], stream.top, heads, tile)
    if problem.sink is None:
        return out, found if lse else None, top
    joined = sink.join(out, found, problem.sink)
    # Rows that are not in use have no sink either.
    unused = problem.extent.q_idx() >= problem.extent.rows
    return out, joined.masked_fill_(unused[:, None], -torch.inf), top


def backward(problem: Problem, saved: Saved) -> Gradients:
    """dq, dk, dv, dsink and those of captured tensors; a block of rows at a time recomputes its softmax and adds to dk
    and dv in float32.

    With dropout the factor 1 / (1 - p) waits for the sums, where nothing rounds it to bfloat16.
    """
    grid = _Grid(problem)
    delta = sink.delta(saved)
    # exp(score - lse) must be zero, not NaN, where a row sees nothing.
    lse = torch.where(saved.lse == -torch.inf, 0, saved.lse)
    dq = empty_like_rows(problem.q, problem.q.shape[3]).zero_()
    dk, dv = (empty_like_rows(x, x.shape[3]) for x in (problem.k, problem.v))
    total = problem.lse_dtype()
    captures = problem.score.tensors if problem.score else ()
    sums = [torch.zeros(x.shape, dtype=total) if want else None for x, want in zip(captures, saved.wanted, strict=True)]
    for heads in grid.heads():
        k, v = grid.keys(problem.k, heads), grid.keys(problem.v, heads)
        dk_sum, dv_sum = torch.zeros_like(k, dtype=total), torch.zeros_like(v, dtype=total)
        for tile in grid.tiles(heads):
            q, dout = grid.queries(problem.q, heads, tile), grid.queries(saved.dout, heads, tile)
            row_lse, row_delta = (grid.queries(x[..., None], heads, tile, total) for x in (lse, delta / grid.rescale))
            dq_sum = torch.zeros_like(q, dtype=total)
            for part in grid.parts(heads, tile):
                raw, modification = grid.score(q, k, heads, part, derivative=True)
                whole = part.keys == tile.keys and grid.plain
                p = grid.probability(grid.hide(raw, heads, part), row_lse, whole)
                dp = torch.bmm(dout, v[:, part.keys].mT, out=grid.scratch("dp", raw.shape))
                keep = grid.keep(heads, part)
                if keep is not None:
                    dp.mul_(keep)
                if whole and saved.dlse is None:  # one pass, float32 inside, finds delta itself
                    ds = torch.ops.aten._softmax_backward_data.out(dp, p, -1, dp.dtype, grad_input=dp)
                else:
                    ds = dp.sub_(row_delta).mul_(p)
                if modification is not None:
                    ds = modification.back(ds, sums)
                if keep is not None:
                    p.mul_(keep)
                dv_sum[:, part.keys] += torch.bmm(p.mT, dout)
                dk_sum[:, part.keys] += torch.bmm(ds.mT, q)
                dq_sum += torch.bmm(ds, k[:, part.keys])
            grid.put(dq, dq_sum.mul_(problem.scale * grid.rescale), heads, tile)
        at = heads.batch, heads.heads
        dk[at] = dk_sum.mul_(problem.scale * grid.rescale).unflatten(0, dk[at].shape[:2])
        dv[at] = dv_sum.mul_(grid.rescale).unflatten(0, dv[at].shape[:2])
    pairs = zip(sums, captures, strict=True)
    gradients = [None if x is None else x.mul_(grid.rescale).to(held.dtype) for x, held in pairs]
    return dq, dk, dv, sink.gradient(problem, saved, delta), gradients


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """What the matrix products run in: float32 for half types that this CPU has no products for."""
    half = dtype == torch.float16 or (dtype == torch.bfloat16 and hardware.cpu_bf16() == "none")
    return torch.float32 if half else dtype


class _Modification(NamedTuple):
    """A score modification where it was applied: on the scaled scores of a tile, (b, h, q, k), at these indices."""

    score: Score
    scaled: Tensor
    at: tuple[Tensor, ...]
    slope: Tensor

    def back(self, ds: Tensor, sums: Sequence[Tensor | None]) -> Tensor:
        """The gradient of the scaled scores, in place, from that of the modified ones; adds to captured tensors'."""
        if any(x is not None for x in sums):
            self.score.accumulate(sums, ds.view_as(self.scaled), self.scaled, *self.at)
        slope = self.slope.view_as(ds)
        if self.score.own:  # of scores that nobody sees it may be anything
            slope = slope.masked_fill(ds == 0, 0)
        return ds.mul_(slope)


@dataclass(frozen=True, eq=False)
class _Grid:
    """How a Problem is cut into tiles, and how tensors are read and written by them.

    A tensor of query rows becomes (n, m, d): n = batch rows x key heads, m = group x rows.
    """

    problem: Problem

    buffers: dict[str, Tensor] = field(default_factory=dict)
    """Memory of tiles, used again: fresh pages cost more than the arithmetic that fills them."""

    def scratch(self, name: str, shape: torch.Size | tuple[int, ...]) -> Tensor:
        """An uninitialised tensor, the same memory whenever the name is the same."""
        size = math.prod(shape)
        if name not in self.buffers or self.buffers[name].numel() < size:
            self.buffers[name] = torch.empty(size, dtype=self.compute)
        return self.buffers[name][:size].view(shape)

    def softmax(self, score: Tensor) -> Tensor:
        """Of whole rows; zeros where a score function hides all of a row with -inf, which PyTorch answers with NaN."""
        p = torch.ops.aten._softmax.out(score, -1, False, out=self.scratch("p", score.shape))
        if self.problem.score is not None and bool(p[..., 0].isnan().any()):
            p.masked_fill_((score == -torch.inf).all(-1, keepdim=True), 0)
        return p

    def probability(self, score: Tensor, lse: Tensor, whole: bool) -> Tensor:
        """exp(score - lse); over whole rows in bf16 by the softmax, which keeps its inside in float32."""
        if score.dtype != torch.bfloat16:
            return exp(score.sub_(lse))
        return self.softmax(score) if whole else exp(score.float().sub_(lse)).to(score.dtype)

    @lazily
    def compute(self) -> torch.dtype:
        return compute_dtype(self.problem.q.dtype)

    @lazily
    def plain(self) -> bool:
        """A softmax over whole rows is the probability: no sink, and no row that may see nothing."""
        return self.problem.sink is None and bool((self.core.hi > self.core.lo).all())

    @lazily
    def hull(self) -> Interval:
        """(1 or b, s_q)"""
        mask, extent = self.problem.mask, self.problem.extent
        everything = Interval(torch.zeros_like(extent.q_idx()), extent.keys)
        return (everything if mask is None else mask.hull(extent)).clipped(extent)

    @lazily
    def core(self) -> Interval:
        mask, extent = self.problem.mask, self.problem.extent
        return self.hull if mask is None or mask.exact else mask.core(extent).clipped(extent)

    @lazily
    def rows(self) -> int:
        """Query rows in a tile."""
        width = max(int(self.hull.length().max()) if self.hull.lo.numel() else 0, 1)
        # A narrow band wastes a triangle of a tile's rows; long rows leave room for few of them.
        m = max(TILE_ROWS // 4, min(TILE_ROWS, width // 2, TILE_ELEMENTS // width))
        return max(1, m // self.problem.group)

    def heads(self) -> Iterator[Heads]:
        """As many heads together as fill a tile; of one batch row where the batch rows see different keys."""
        b, h_k = self.problem.k.shape[:2]
        width = int(self.hull.length().max()) + self.rows if self.hull.lo.numel() else 1
        many = max(1, TILE_ELEMENTS // (self.rows * self.problem.group * width))
        if self.states is not None and self.states.shape[1] > 1:  # heads that see other keys share no tile
            many = 1
        if h_k == 0:
            return
        batches = min(b, many // h_k) if self.hull.lo.shape[0] == 1 and not self.batched else 1
        if batches > 1:
            for start in range(0, b, batches):
                yield Heads(slice(start, min(start + batches, b)), slice(0, h_k))
            return
        for batch in range(b):
            for start in range(0, h_k, many):
                yield Heads(slice(batch, batch + 1), slice(start, min(start + many, h_k)))

    def tiles(self, heads: Heads) -> list[Tile]:
        return self._tiles[heads.batch.start if self.hull.lo.shape[0] > 1 else 0]

    @lazily
    def _tiles(self) -> list[list[Tile]]:
        return [
            [tile for start in range(0, self.problem.q.shape[2], self.rows) if (tile := self._tile(b, start))]
            for b in range(self.hull.lo.shape[0])
        ]

    def _tile(self, b: int, start: int) -> Tile | None:
        rows = slice(start, start + self.rows)
        lo, hi = self.hull.lo[b, rows], self.hull.hi[b, rows]
        seeing = (hi > lo).nonzero()[:, 0]
        if not len(seeing):
            return None
        first, last = int(seeing[0]), int(seeing[-1]) + 1
        keys = slice(int(lo[seeing].min()), self._stop(b, int(hi[seeing].max())))
        core_lo, core_hi = (edge[b, rows][first:last] for edge in self.core)
        empty_rows = bool((core_lo >= core_hi).any())  # inside its hull a predicate may hide everything
        core = slice(int(core_lo.max()), int(core_hi.min()))
        if core.start >= core.stop:
            core = slice(keys.start, keys.start)
        return Tile(slice(start + first, start + last), keys, core, empty_rows)

    def _stop(self, b: int, stop: int) -> int:
        """Where a tile's keys end: in bf16 at few different places, as oneDNN compiles and keeps a kernel for each
        shape, but never beyond the keys in use."""
        if self.compute != torch.bfloat16:
            return stop
        used = self.problem.extent.keys
        step = max(TILE_ROWS, -(-self.problem.k.shape[2] // KEY_STOPS))
        return min(-(-stop // step) * step, int(used[b if used.shape[0] > 1 else 0, 0]))

    def parts(self, heads: Heads, tile: Tile) -> Iterator[Tile]:
        """The tile in pieces of at most TILE_ELEMENTS scores, without keys that a list of tiles says nobody sees."""
        m = (tile.rows.stop - tile.rows.start) * self.problem.group
        step = max(TILE_ELEMENTS // m, 64)
        for run in [tile] if self.states is None else self._runs(self.states, heads, tile):
            for start in range(run.keys.start, run.keys.stop, step):
                keys = slice(start, min(start + step, run.keys.stop))
                core = slice(*(min(max(edge, keys.start), keys.stop) for edge in (run.core.start, run.core.stop)))
                yield tile._replace(keys=keys, core=core)

    @lazily
    def states(self) -> Tensor | None:
        """Of the tiles of a mask that has them: see `saccade.blocks`."""
        mask = self.problem.mask
        return blocks.states_of(self.problem, blocks.states) if mask is not None and mask.listed else None

    @property
    def batched(self) -> bool:
        return self.states is not None and self.states.shape[0] > 1

    def _runs(self, states: Tensor, heads: Heads, tile: Tile) -> Iterator[Tile]:
        """The tile in runs of keys that are all seen, or some of them, by any of its rows and heads."""
        group = self.problem.group
        batch = heads.batch if states.shape[0] > 1 else slice(None)
        head = slice(heads.heads.start * group, heads.heads.stop * group) if states.shape[1] > 1 else slice(None)
        rows = slice(tile.rows.start // TILE, -(-tile.rows.stop // TILE))
        keys = slice(tile.keys.start // TILE, -(-tile.keys.stop // TILE))
        found = states[batch, head, rows, keys].flatten(0, 2)
        state = torch.where((found == FULL).all(0), FULL, torch.where((found != EMPTY).any(0), PARTIAL, EMPTY))
        values, counts = torch.unique_consecutive(state, return_counts=True)
        start = keys.start * TILE
        for value, count in zip(values.tolist(), counts.tolist(), strict=True):
            stop = start + count * TILE
            run = slice(max(start, tile.keys.start), min(stop, tile.keys.stop))
            if value != EMPTY and run.start < run.stop:
                yield tile._replace(keys=run, core=run if value == FULL else slice(run.start, run.start))
            start = stop

    def keys(self, x: Tensor, heads: Heads) -> Tensor:
        """(n, s_k, d) in the compute dtype"""
        return x[heads.batch, heads.heads].to(self.compute).flatten(0, 1)

    def queries(self, x: Tensor, heads: Heads, tile: Tile, dtype: torch.dtype | None = None) -> Tensor:
        """(n, m, d)"""
        x = x.unflatten(1, (-1, self.problem.group))[heads.batch, heads.heads, :, tile.rows]
        return x.to(dtype or self.compute).flatten(0, 1).flatten(1, 2)

    def put(self, target: Tensor, x: Tensor, heads: Heads, tile: Tile) -> None:
        """Writes (n, m, d) where `queries` reads it."""
        place = target.unflatten(1, (-1, self.problem.group))[heads.batch, heads.heads, :, tile.rows]
        place.copy_(x.view(place.shape))

    def score(
        self, q: Tensor, k: Tensor, heads: Heads, tile: Tile, derivative: bool = False
    ) -> tuple[Tensor, _Modification | None]:
        """The modified scores (n, m, keys), and the way back if asked for and not the identity."""
        k = k[:, tile.keys]
        made = self.scratch("score", (q.shape[0], q.shape[1], k.shape[1]))
        score = torch.baddbmm(made, q, k.mT, beta=0, alpha=self.problem.scale, out=made)
        if self.problem.score is None:
            return score, None
        b_idx = torch.arange(heads.batch.start, heads.batch.stop)[:, None, None, None] + self.problem.first_b
        h_idx = torch.arange(heads.heads.start * self.problem.group, heads.heads.stop * self.problem.group)
        q_idx, kv_idx = torch.arange(tile.rows.start, tile.rows.stop), torch.arange(tile.keys.start, tile.keys.stop)
        at = b_idx, h_idx[:, None, None], q_idx[:, None], kv_idx
        scaled = score.view(len(b_idx), len(h_idx), len(q_idx), len(kv_idx))
        modify = self.problem.score
        way_back = _Modification(modify, scaled, at, modify.derivative(scaled, *at)) if derivative else None
        return modify.tile(scaled, *at).view_as(score), way_back

    def keep(self, heads: Heads, tile: Tile) -> Tensor | None:
        """Which probabilities dropout keeps, 1 or 0, (n, m, keys); None without it."""
        dropout, group = self.problem.dropout, self.problem.group
        if dropout is None:
            return None
        b = torch.arange(heads.batch.start, heads.batch.stop) + self.problem.first_b
        h = torch.arange(heads.heads.start * group, heads.heads.stop * group)
        kept = dropout.keep(b, h, tile.rows, tile.keys).unflatten(1, (-1, group)).flatten(0, 1).flatten(1, 2)
        return self.scratch("keep", kept.shape).copy_(kept)

    @property
    def rescale(self) -> float:
        """Of the probabilities that dropout keeps."""
        return 1.0 if self.problem.dropout is None else self.problem.dropout.rescale

    def hide(self, score: Tensor, heads: Heads, tile: Tile) -> Tensor:
        """-inf, in place, where a query does not see a key."""
        batch = heads.batch
        at = slice(0, 1) if self.hull.lo.shape[0] == 1 else batch
        lo, hi = (edge[at, tile.rows, None] for edge in self.hull)
        q_idx = torch.arange(tile.rows.start, tile.rows.stop)[:, None]
        b_idx = torch.arange(batch.start, batch.stop)[:, None, None, None]
        group = self.problem.group
        h_idx = torch.arange(heads.heads.start * group, heads.heads.stop * group)[:, None, None]
        edges = (tile.keys.start, tile.core.start), (tile.core.stop, tile.keys.stop)
        for start, stop in edges:
            if start >= stop:
                continue
            kv_idx = torch.arange(start, stop)
            seen = ((kv_idx >= lo) & (kv_idx < hi))[:, None]
            if self.problem.mask is not None and not self.problem.mask.exact:
                seen = seen & self.problem.mask.sees(self.problem.extent, b_idx, h_idx, q_idx, kv_idx)
            columns = slice(start - tile.keys.start, stop - tile.keys.start)
            view = score.view(batch.stop - batch.start, -1, tile.rows.stop - tile.rows.start, score.shape[-1])
            view[..., columns].masked_fill_(~seen, -torch.inf)
        return score
