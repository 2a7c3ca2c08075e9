"""Attention in tiles of plain PyTorch operations: one block of query rows against the keys that it can see.

A tile holds whole score rows where they fit, as PyTorch's matrix products are fast only on large operands; longer rows
are streamed with the online softmax. Memory is a few tiles for each thread, whatever the lengths.

A product's operands and result are bfloat16 where this CPU multiplies those, each rounded once; everything else is
float32: scale, score functions, masks, the softmax, and the gradient of the scores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.backends import Gradients, Outputs, Saved
from saccade.backends.cpu import pool, sink
from saccade.backends.cpu.cut import TILE_ELEMENTS, Cut, Heads, Tile
from saccade.backends.cpu.grid import Grid
from saccade.backends.cpu.softmax import Softmax, exp
from saccade.layouts import empty_like_rows
from saccade.problem import Problem

ALONE = 1 << 18
"""Scores of a call that one thread does in less time than it takes to wake another."""
LARGE = 1 << 13
"""An LSE beyond which float32 does not tell it from the largest score well enough."""


class _Rows(NamedTuple):
    """A tile of some heads, and the pieces that are visited."""

    heads: Heads
    tile: Tile
    parts: list[Tile]


class Item(NamedTuple):
    """Some heads and some tiles: what one thread does at once."""

    heads: list[Heads]
    tiles: list[Tile]


def forward(problem: Problem, lse: bool) -> Outputs:
    """out (b, h_q, s_q, d_v), lse (b, h_q, s_q) if it is asked for or a sink needs it, and max_scores if asked for."""
    grid = Grid.of(problem)
    out = problem.empty_out().zero_()
    found = torch.full(problem.q.shape[:3], -torch.inf, dtype=problem.lse_dtype())
    top = torch.full_like(found, -torch.inf) if problem.max_scores else None
    want_lse = lse or problem.sink is not None

    def hand() -> Callable[[Item], None]:
        mine = grid.another()

        def run(item: Item) -> None:
            for heads in item.heads:
                k, v = mine.keys(problem.k, heads), mine.keys(problem.v, heads)
                for tile in item.tiles:
                    stream = _softmax(mine, heads, tile, k, v)
                    if stream is None:
                        continue
                    mine.put(out, stream.out().mul_(mine.rescale), heads, tile)
                    if want_lse:
                        mine.put(found[..., None], stream.lse(), heads, tile)
                    if top is not None:
                        mine.put(top[..., None], stream.top, heads, tile)

        return run

    many = _threads(grid.cut)
    pool.spread(_forward_items(grid.cut, many), hand, many)
    if problem.sink is None:
        return out, found if lse else None, top
    joined = sink.join(out, found, problem.sink)
    # Rows that are not in use have no sink either.
    unused = problem.extent.q_idx() >= problem.extent.rows
    return out, joined.masked_fill_(unused[:, None], -torch.inf), top


def _softmax(grid: Grid, heads: Heads, tile: Tile, k: Tensor, v: Tensor | None) -> Softmax | None:
    """Of a tile's rows, with v or for `top` and `total` alone; None where nothing is visible."""
    problem, stream = grid.problem, Softmax(grid.scratch)
    q = grid.queries(problem.q, heads, tile, grid.products)
    parts = grid.parts(heads, tile)
    for part in parts:
        score, _ = grid.score(q, k, heads, part)
        if v is None:
            stream.add(score)
        else:
            stream.add(score, v[:, part.keys], grid.keep(heads, part))
    return stream if parts else None


def backward(problem: Problem, saved: Saved, foreign: bool = False) -> Gradients:
    """dq, dk, dv, dsink and those of captured tensors; a block of rows at a time recomputes its softmax and adds to dk
    and dv in float32.

    With dropout the factor 1 / (1 - p) waits for the sums, where nothing rounds it to bfloat16. An LSE is `foreign` if
    it is that of other scores than the tiles find.
    """
    grid = Grid.of(problem)
    many = _threads(grid.cut)
    items = _backward_items(grid.cut, many)
    captures = problem.score.tensors if problem.score else ()
    wanted = sum(x.numel() for x, want in zip(captures, saved.wanted, strict=True) if want)
    if wanted * len(items) > TILE_ELEMENTS:  # each item has sums of its own
        many, items = 1, _backward_items(grid.cut, 1)
    call = _Backward(problem, saved, shared=many == 1)
    call.own_sums |= foreign and grid.products == torch.bfloat16
    found: list[_Sums] = [_Sums(None, [])] * len(items)

    def hand() -> Callable[[int], None]:
        mine = grid.another()

        def run(number: int) -> None:
            found[number] = call.run(mine, items[number])

        return run

    pool.spread(range(len(items)), hand, many)
    return call.gradients(items, found)


class _Sums(NamedTuple):
    """What an item adds to gradients that are not its alone."""

    keys: tuple[Tensor, Tensor] | None
    """dk and dv of its heads, (n, s_k, d)"""
    captures: list[Tensor | None]


class _Backward:
    """One backward, by items."""

    def __init__(self, problem: Problem, saved: Saved, shared: bool) -> None:
        self.problem, self.saved = problem, saved
        self.delta = sink.delta(saved)
        self.dq, self.dk, self.dv = (empty_like_rows(x, x.shape[3]).zero_() for x in (problem.q, problem.k, problem.v))
        # exp(score - lse) must be zero, not NaN, where a row sees nothing.
        self.lse = torch.where(saved.lse == -torch.inf, 0, saved.lse)
        self.own_sums = bool((self.lse.abs() > LARGE).any())
        """Whether each tile finds the sum of its softmax itself, in one more product."""
        self.rescale = problem.dropout.rescale if problem.dropout else 1.0
        self.captures = problem.score.tensors if problem.score else ()
        self.shared = self._sums() if shared else None
        """Sums of captured tensors' gradients, where one thread does all items in their order."""

    def _sums(self) -> list[Tensor | None]:
        pairs = zip(self.captures, self.saved.wanted, strict=True)
        return [torch.zeros(x.shape, dtype=self.problem.lse_dtype()) if want else None for x, want in pairs]

    def run(self, grid: Grid, item: Item) -> _Sums:
        (heads,) = item.heads
        k, v = grid.keys(self.problem.k, heads), grid.keys(self.problem.v, heads)
        sums = torch.zeros_like(k, dtype=grid.inside), torch.zeros_like(v, dtype=grid.inside)
        captures = self._sums() if self.shared is None else self.shared
        v_ones = _with_ones(v)
        for tile in item.tiles:
            if parts := grid.parts(heads, tile):
                self._tile(grid, _Rows(heads, tile, parts), (k, v_ones), (*sums, captures))
        if len(item.tiles) == len(grid.cut.tiles(heads)):
            self._put(heads, *sums)
            return _Sums(None, captures)
        return _Sums(sums, captures)

    def _tile(self, grid: Grid, at: _Rows, operands: tuple[Tensor, Tensor], sums: tuple[Tensor, Tensor, Any]) -> None:
        """One block of rows against its keys: dq, and what it adds to the sums."""
        (heads, tile, parts), (k, v_ones), (dk, dv, captures) = at, operands, sums
        q = grid.queries(self.problem.q, heads, tile, grid.products)
        dout = grid.queries(self.saved.dout, heads, tile, grid.products)
        delta = grid.queries(self.delta[..., None], heads, tile, grid.inside) / self.rescale
        shift, share = self._shift(grid, heads, tile, k)
        dout_delta = _with_columns(dout, delta)
        dq = torch.zeros_like(q, dtype=grid.inside)
        for part in parts:
            score, modification = grid.score(q, k, heads, part, derivative=True)
            p = exp(score.sub_(shift))
            if share is not None:
                p.mul_(share)
            ds = _minus(grid, dout_delta, v_ones[:, part.keys], delta)
            keep = grid.keep(heads, part)
            kept = p
            if keep is not None:
                ds, kept = torch.where(keep != 0, ds, -delta), keep.mul_(p)
            dv[:, part.keys] += torch.bmm(grid.scratch.cast("product", kept, grid.products).mT, dout)
            ds = ds.mul_(p)
            if modification is not None:
                ds = modification.back(ds, captures)
            ds = grid.scratch.cast("dp", ds, grid.products)
            dk[:, part.keys] += torch.bmm(ds.mT, q)
            dq += torch.bmm(ds, k[:, part.keys])
        grid.put(self.dq, dq.mul_(self.problem.scale * self.rescale), heads, tile)

    def _shift(self, grid: Grid, heads: Heads, tile: Tile, k: Tensor) -> tuple[Tensor, Tensor | None]:
        """p = exp(score - shift) share, (n, m, 1) each. The LSE is the shift where float32 is fine enough for it; else
        the largest score is, and the share one over the sum."""
        if not self.own_sums:
            return grid.queries(self.lse[..., None], heads, tile, grid.inside), None
        stream = _softmax(grid, heads, tile, k, None)
        assert stream is not None
        shift, total = torch.where(stream.top == -torch.inf, 0, stream.top), stream.total
        if self.problem.sink is not None:
            column = self.problem.sink.to(grid.inside)[:, None, None].expand(*self.saved.lse.shape, 1)
            total = total + (grid.queries(column, heads, tile, grid.inside) - shift).exp()
        return shift, 1 / torch.where(total == 0, 1, total)

    def _put(self, heads: Heads, dk_sum: Tensor, dv_sum: Tensor) -> None:
        for target, total, scale in (self.dk, dk_sum, self.problem.scale), (self.dv, dv_sum, 1.0):
            place = target[heads.batch, heads.heads]
            place.copy_(total.mul_(scale * self.rescale).view(place.shape))

    def gradients(self, items: Sequence[Item], found: Sequence[_Sums]) -> Gradients:
        """All of them; what several items add up is added in their order, whoever was first."""
        shared: dict[int, tuple[Heads, Tensor, Tensor]] = {}
        captures = self._sums() if self.shared is None else self.shared
        for item, sums in zip(items, found, strict=True):
            if self.shared is None:
                for total, more in zip(captures, sums.captures, strict=True):
                    if total is not None and more is not None:
                        total += more
            if sums.keys is not None:
                (heads,), (dk, dv) = item.heads, sums.keys
                if id(heads) in shared:
                    for total, more in zip(shared[id(heads)][1:], (dk, dv), strict=True):
                        total += more
                else:
                    shared[id(heads)] = heads, dk, dv
        for heads, dk, dv in shared.values():
            self._put(heads, dk, dv)
        pairs = zip(captures, self.captures, strict=True)
        gradients = [None if x is None else x.mul_(self.rescale).to(held.dtype) for x, held in pairs]
        return self.dq, self.dk, self.dv, sink.gradient(self.problem, self.saved, self.delta), gradients


COLUMNS = 4
"""How many bfloat16 numbers a float32 takes, and one zero more, as products of pairs want an even number of them."""


def _with_ones(v: Tensor) -> Tensor:
    """v (n, keys, d_v), and in bfloat16 the ones that `_with_columns` needs."""
    return torch.nn.functional.pad(v, (0, COLUMNS), value=1.0) if v.dtype == torch.bfloat16 else v


def _with_columns(dout: Tensor, delta: Tensor) -> Tensor:
    """dout (n, m, d_v), and in bfloat16 columns whose sum is -delta (n, m, 1): what cancels must do so before the
    product is rounded."""
    if dout.dtype != torch.bfloat16:
        return dout
    columns, rest = [dout], -delta
    for _ in range(COLUMNS - 1):
        columns.append(rest.bfloat16())
        rest = rest - columns[-1]
    return torch.cat([*columns, torch.zeros_like(columns[-1])], dim=-1)


def _minus(grid: Grid, dout: Tensor, v: Tensor, delta: Tensor) -> Tensor:
    """dout v^T - delta, (n, m, keys), of what the two functions above made."""
    made = grid.product(dout, v.mT, "dp")
    return grid.scratch.cast("wide", made, grid.inside) if made.dtype == torch.bfloat16 else made.sub_(delta)


def _threads(cut: Cut) -> int:
    shape = cut.shape
    small = shape.b * shape.h_k * shape.group * shape.s_q * cut.width <= ALONE
    return 1 if small else pool.threads()


def _chunks(n: int, many: int) -> list[slice]:
    """n things in about so many slices, of the same size but for the last."""
    step = max(1, -(-n // max(many, 1)))
    return [slice(start, start + step) for start in range(0, n, step)]


def _forward_items(cut: Cut, many: int) -> list[Item]:
    """Each tile of rows with some heads, of which all have the same mask as a rule; the longest first."""
    if many == 1:
        return [Item([heads], cut.tiles(heads)) for heads in cut.heads]
    if cut.hull.lo.shape[0] > 1:
        return [Item([heads], [tile]) for heads in cut.heads for tile in cut.tiles(heads)]
    tiles = cut.tiles(cut.heads[0]) if cut.heads else []
    chunks = _chunks(len(cut.heads), -(-8 * many // max(len(tiles), 1)))
    ordered = sorted(tiles, key=lambda tile: tile.keys.start - tile.keys.stop)
    return [Item(cut.heads[chunk], [tile]) for tile in ordered for chunk in chunks]


def _backward_items(cut: Cut, many: int) -> list[Item]:
    """Each of the heads with some of its tiles: all, where that is enough work for all threads."""
    pieces = 1 if many == 1 else -(-2 * many // max(len(cut.heads), 1))
    found = []
    for heads in cut.heads:
        tiles = cut.tiles(heads)
        found += [Item([heads], tiles[chunk]) for chunk in _chunks(len(tiles), pieces)] or [Item([heads], [])]
    return found
