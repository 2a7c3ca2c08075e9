"""The tiles of a call, and the online softmax. Tiles are the rows, keys and heads of each matrix product, computed
once per mask and shape. A `Worker` is one thread: it reads and writes the rows of a tile and computes its scores.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.backends.block_sparsity import compute_states, states_of, states_shape
from saccade.backends.cpu import score_mods
from saccade.call import Call
from saccade.masks import EMPTY, FULL, TILE, Blocked, Extent, Interval, Mask, Selected
from saccade.scores import Score
from saccade.util import hardware
from saccade.util.caches import BoundedCache, derived_from_values

# The online softmax, in PyTorch operations.


AMX_COLUMNS = 32
"""bfloat16 numbers in a row of an AMX tile."""


LARGE = 1 << 13
"""A shift of scores beyond which float32 has no digits left for what is subtracted from it."""


FEW = 32
"""Rows of a product for which its other operand stays bfloat16."""
SPREAD = 4
"""A sum of weights, of which the largest is one, that has no weight that is most of it."""


def exp_less(score: Tensor, shift: Tensor, alone: bool = False) -> Tensor:
    """exp(score - shift), in place, of scores (n, m, keys) and a shift (n, m, 1).

    PyTorch's own exp is up to 30 times as slow where it is of -inf or far below zero, as masked scores are (its vector
    library leaves the fast path there). exp2 is not. One pass subtracts and multiplies, unless some row is so large
    that it must cancel first, or each row is `alone`, with bits that no other row changes.
    """
    log2_e = math.log2(math.e)
    if not alone and shift.nan_to_num(0, 0, 0).abs().max().item() <= LARGE:
        return torch.add(shift * -log2_e, score, alpha=log2_e, out=score).exp2_()
    return score.sub_(shift).mul_(log2_e).exp2_()


def product(a: Tensor, b: Tensor, alpha: float = 1.0, out: Tensor | None = None) -> Tensor:
    """alpha a b, rounded to the operands' dtype once.

    On a CPU with AMX a bfloat16 product multiplies what lies behind a row of a, the row after it, by zero: where that
    is NaN or infinite, this row becomes NaN too. A product with such a value is computed again in float32.
    """
    out = torch.empty((*a.shape[:2], b.shape[2]), dtype=a.dtype, device="cpu") if out is None else out
    if alpha == 0:  # where `baddbmm` writes nothing
        torch.bmm(a, b, out=out).mul_(0)
    else:
        torch.baddbmm(out, a, b, beta=0, alpha=alpha, out=out)
    part_of_tile = a.dtype == torch.bfloat16 and a.shape[2] % AMX_COLUMNS
    if part_of_tile and not math.isfinite(out.sum(dtype=torch.float32).item()):
        out.copy_(product(a.float(), b.float(), alpha))
    return out


def wide_product(a: Tensor, b: Tensor, alpha: float = 1.0, out: Tensor | None = None) -> Tensor:
    """alpha a b, which leaves in float32, or float64, where b is bfloat16 too.

    It is a product of float32, but for few rows, for which to convert b takes longer than the product: a second product
    of bfloat16 then finds what the first one lost when it was rounded.
    """
    if b.dtype == torch.bfloat16 and a.shape[1] <= FEW and alpha:
        a = a.to(b.dtype)
        rounded = product(a, b, alpha)
        rest = torch.baddbmm(rounded, a, b, beta=-1, alpha=alpha)
        if math.isfinite(rest.sum(dtype=torch.float32).item()):
            return rest.float().add_(rounded)
    wide = torch.float32 if a.dtype == torch.bfloat16 else a.dtype
    return product(a.to(wide), b.to(wide), alpha, out)


class Scratch:
    """Memory that tiles use again: fresh pages cost more than the arithmetic that fills them. One thread owns it."""

    def __init__(self) -> None:
        self.buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def __call__(self, name: str, shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor, the same memory whenever name and dtype are the same."""
        size = math.prod(shape)
        buffer = self.buffers.get((name, dtype))
        if buffer is None or buffer.numel() < size:
            buffer = self.buffers[name, dtype] = torch.empty(size, dtype=dtype, device="cpu")
        return buffer[:size].view(shape)

    def cast(self, name: str, x: Tensor, dtype: torch.dtype) -> Tensor:
        """x in the dtype: itself, or a copy in this memory."""
        return x if x.dtype == dtype else self(name, x.shape, dtype).copy_(x)


class OnlineSoftmax:
    """The online softmax over parts of the keys: `total = sum exp(score - top)`, and `out = sum exp(score - top) v`
    divided by it.

    Scores are float32, or float64, whatever v is. A row that has seen nothing has `top = -inf` and `total = 0`; NaN
    stays NaN. Where v is bfloat16, weights are divided by their sum before they are rounded to it, so that the product
    is `out` and is rounded once. But the weight of the largest score is one, without a rounding, until it is divided:
    where that may be most of a row, and where `alone` forbids a row to depend on others, it waits for a wide product.
    Scores that are `bounded`, near zero, need no largest one: `top` is 0.
    """

    def __init__(self, scratch: Scratch, alone: bool = False, bounded: bool = False) -> None:
        self.scratch, self.alone, self.bounded = scratch, alone, bounded
        self.mean: Any = None
        self.top: Any = None
        self.total: Any = None

    def add(self, score: Tensor, v: Tensor | None = None, keep: Tensor | None = None) -> None:
        """score (n, m, keys), overwritten, with v (n, keys, d_v), None where `out` is not asked for; `keep` is 1 where
        dropout keeps, else 0."""
        top = score.new_zeros(*score.shape[:2], 1) if self.bounded else score.amax(-1, keepdim=True)
        if self.top is not None:
            top = torch.maximum(top, self.top)
        shift = torch.where(top == -torch.inf, 0, top)
        weight = exp_less(score, shift, self.alone)
        total = weight.sum(-1, keepdim=True)
        mean = None
        if v is not None:
            if keep is not None:
                weight.mul_(keep)
            if v.dtype != weight.dtype and not self.alone and not bool((total < SPREAD).any()):
                weight = self.scratch.cast("weight", weight.div_(total), v.dtype)
                mean = product(weight, v).to(score.dtype)
            else:
                mean = wide_product(weight, v).div_(_positive(total))
        if self.top is not None:
            before = self.total * (self.top - shift).exp_()
            both = _positive(before + total)
            if mean is not None:
                mean = mean.mul_(total / both).add_(self.mean * (before / both))
            total += before
        self.mean, self.top, self.total = mean, top, total

    def out(self) -> Tensor:
        """0 of a row that has seen nothing, whatever its zeros were multiplied by."""
        empty = self.total == 0
        return self.mean.masked_fill_(empty, 0) if bool(empty.any()) else self.mean

    def lse(self) -> Tensor:
        return self.top + self.total.log()


def _positive(total: Tensor) -> Tensor:
    """1 for the sum of a row that sees nothing."""
    return torch.where(total == 0, 1, total)


TILE_ELEMENTS = 1 << 20
"""Scores in a tile: 4 MB of float32; smaller ones lose more to the products than they gain by a nearer cache."""
TILE_ROWS = 256
"""Rows of the matrix product, query heads of a group folded in; fewer, but at least a quarter, where rows are long."""
KEY_STOPS = 16
"""How many different ends the keys of bf16 tiles have, where there are more than 16 tiles of rows."""
SMALL = 1 << 17
"""Scores of all rows of a key head that are one tile: other work for a tile costs more than masked scores."""
MASK_TILES_BYTES = 1 << 26
"""The memory of all cached mask tiles together."""


class Tile(NamedTuple):
    """Query rows against keys, of the batch rows and key heads that one matrix product holds. In the columns `core`
    every row sees every key."""

    batch: slice
    heads: slice
    rows: slice
    keys: slice
    core: slice

    def slices(self, group: int) -> tuple[slice, slice, slice, slice]:
        """Batch rows, query heads, rows and keys, with so many query heads for a key head."""
        return self.batch, slice(self.heads.start * group, self.heads.stop * group), self.rows, self.keys

    def elements(self) -> int:
        return (self.rows.stop - self.rows.start) * (self.keys.stop - self.keys.start)


class TilingShape(NamedTuple):
    """What a Tiling depends on besides mask and lengths."""

    b: int
    h_k: int
    group: int
    s_q: int
    s_k: int
    products: torch.dtype
    """of the operands of matrix products"""

    @property
    def small(self) -> bool:
        """Whether block sparsity costs more than it saves."""
        return self.s_q * self.group * self.s_k <= SMALL

    @staticmethod
    def of(call: Call) -> TilingShape:
        (b, _, s_q, _), (_, h_k, s_k, _) = call.q.shape, call.k.shape
        return TilingShape(b, h_k, call.group, s_q, s_k, products_dtype(call.q.dtype))


def products_dtype(dtype: torch.dtype) -> torch.dtype:
    """What the matrix products run in: float32 for half types that this CPU has no products for."""
    half = dtype == torch.float16 or (dtype == torch.bfloat16 and hardware.cpu_bf16() == "none")
    return torch.float32 if half else dtype


mask_tiles: BoundedCache[tuple[int, ...], Tensor] = BoundedCache(MASK_TILES_BYTES)
"""Masks between hull and core, +inf where a key is visible, -inf where it is masked, by the id of a Tiling and a tile's
place."""


class Tiling:
    """The tiles of a mask and a shape. It refers to no tensor of the mask, so that those die while it is cached."""

    def __init__(self, shape: TilingShape, mask: Mask | None, extent: Extent, differ: tuple[bool, bool]) -> None:
        self.shape = shape
        everything = Interval(torch.zeros_like(extent.q_idx()), extent.keys)
        self.hull = (everything if mask is None else mask.hull(extent)).clipped(extent)
        """(1 or b, s_q)"""
        self.core = self.hull if mask is None or mask.exact else mask.core(extent).clipped(extent)
        self.used = extent.keys[:, 0].tolist()
        self.by_batch, self.by_head = differ
        """Whether the block sparsity differs between batch rows, and between heads."""
        self.width = max(int(self.hull.length().max()) if self.hull.lo.numel() else 0, 1)
        # A narrow band wastes a triangle of a tile's rows; long rows leave room for few of them.
        m = max(TILE_ROWS // 4, min(TILE_ROWS, self.width // 2, TILE_ELEMENTS // self.width))
        small = shape.s_q * shape.group * self.width <= SMALL
        self.rows = max(1, shape.s_q if small else m // shape.group)
        lists = [x.rows for x in ([] if mask is None else mask.leaves()) if isinstance(x, Selected) and x.rows >= TILE]
        if lists and self.rows > TILE:  # rows of several lists would visit the tiles of all
            self.rows = TILE * (min(self.rows, *lists) // TILE)
        row_tiles = [list(self._row_tiles(b)) for b in range(self.hull.lo.shape[0])]
        self.groups = [
            [Tile(batch, heads, *rest) for rest in row_tiles[batch.start if len(row_tiles) > 1 else 0]]
            for batch, heads in self._heads()
        ]
        """For each group of heads its tiles of rows."""
        self.pieces: dict[tuple[int, int, int], list[Tile]] = {}
        """Of tiles with block sparsity, by first batch row, first head and first row."""
        self.states: Tensor | None = None
        """Of the mask's tiles, None until they are needed."""
        self.visited: float | None = None
        """The share of all scores that are in visited tiles, None until it is needed."""

    def _heads(self) -> Iterator[tuple[slice, slice]]:
        """The groups of heads that fill a tile together: of one batch row, if batch rows see different keys."""
        b, h_k = self.shape.b, self.shape.h_k
        heads = max(1, TILE_ELEMENTS // (self.rows * self.shape.group * (self.width + self.rows)))
        if self.by_head:
            heads = 1
        alike = self.hull.lo.shape[0] == 1 and not self.by_batch
        batches = max(1, heads // h_k) if h_k and alike else 1
        for batch in range(0, b, batches):
            for head in range(0, h_k, heads):
                yield slice(batch, min(batch + batches, b)), slice(head, min(head + heads, h_k))

    def _row_tiles(self, b: int) -> Iterator[tuple[slice, slice, slice]]:
        """Rows, keys and core of the tiles in which something is visible."""
        for start in range(0, self.shape.s_q, self.rows):
            rows = slice(start, start + self.rows)
            lo, hi = self.hull.lo[b, rows], self.hull.hi[b, rows]
            seeing = (hi > lo).nonzero()[:, 0]
            if not len(seeing):
                continue
            first, last = int(seeing[0]), int(seeing[-1]) + 1
            keys = slice(int(lo[seeing].min()), self._stop(b, int(hi[seeing].max())))
            core_lo, core_hi = (edge[b, rows][first:last] for edge in self.core)
            core = slice(int(core_lo.max()), int(core_hi.min()))
            if core.start >= core.stop:
                core = slice(keys.start, keys.start)
            yield slice(start + first, start + last), keys, core

    def _stop(self, b: int, stop: int) -> int:
        """Where a tile's keys end: in bf16 at few different places, as oneDNN compiles and keeps a kernel for each
        shape, but never beyond the keys in use."""
        if self.shape.products != torch.bfloat16:
            return stop
        step = max(TILE_ROWS, -(-self.shape.s_k // KEY_STOPS))
        return min(-(-stop // step) * step, self.used[b if len(self.used) > 1 else 0])

    def split(self, tiles: list[Tile]) -> list[Tile]:
        """The tiles in pieces of at most TILE_ELEMENTS scores."""
        pieces = []
        for tile in tiles:
            m = (tile.rows.stop - tile.rows.start) * self.shape.group
            step = max(TILE_ELEMENTS // m, 64)
            for start in range(tile.keys.start, tile.keys.stop, step):
                keys = slice(start, min(start + step, tile.keys.stop))
                core = slice(*(min(max(edge, keys.start), keys.stop) for edge in (tile.core.start, tile.core.stop)))
                pieces.append(tile._replace(keys=keys, core=core))
        return pieces

    def runs(self, states: Tensor, tile: Tile) -> list[Tile]:
        """The tile in runs of keys that are FULL, or not EMPTY, for all of its rows and heads, by the states (b or 1,
        h_q or 1, tiles of rows, tiles of keys)."""
        group, runs = self.shape.group, []
        batch = tile.batch if states.shape[0] > 1 else slice(None)
        head = slice(tile.heads.start * group, tile.heads.stop * group) if states.shape[1] > 1 else slice(None)
        rows = slice(tile.rows.start // TILE, -(-tile.rows.stop // TILE))
        keys = slice(tile.keys.start // TILE, -(-tile.keys.stop // TILE))
        seen = states[batch, head, rows, keys].flatten(0, 2)
        state = (seen.amin(0) == FULL).to(torch.uint8) + (seen.amax(0) != EMPTY)  # EMPTY, PARTIAL or FULL: 0, 1 or 2
        start = keys.start * TILE
        for value, some in groupby(state.tolist()):
            count = len(list(some))
            stop = start + count * TILE
            run = slice(max(start, tile.keys.start), min(stop, tile.keys.stop))
            if value != EMPTY and run.start < run.stop:
                runs.append(tile._replace(keys=run, core=run if value == FULL else slice(run.start, run.start)))
            start = stop
        return runs


def tiling_of(call: Call) -> Tiling:
    """The Tiling of a call, cached as long as shape, mask, numbers and what the tensors of mask and layout hold are the
    same."""
    mask, layout, shape = call.mask, call.layout, TilingShape.of(call)
    tensors = [*layout.tensors, *mask.tensors] if mask is not None else layout.tensors
    if not tensors and (mask is None or not mask.block_sparse) and not layout.positioned:
        return _of_numbers(shape, mask)

    def make() -> Tiling:
        tiles: tuple[int, ...] = (1, 1)
        if mask is not None and mask.block_sparse and not shape.small:
            tiles = tuple(mask.states.shape) if isinstance(mask, Blocked) else states_shape(call)
        return Tiling(shape, mask, call.extent, (tiles[0] > 1, tiles[1] > 1))

    if call.positions is not None or (mask is not None and mask.bounds_per_row):
        return make()
    numbers = () if mask is None else (mask.identity, mask.numbers)
    return derived_from_values(("tiling", shape, layout.text, numbers), tensors, make)


@lru_cache(maxsize=256)
def _of_numbers(shape: TilingShape, mask: Mask | None) -> Tiling:
    extent = Extent.of(shape.s_q, shape.s_k, None, None, torch.device("cpu"))
    return Tiling(shape, mask, extent, (False, False))


HARMLESS = 1.0
"""Up to this score bfloat16 rounds it by no more than a probability, which is rounded anyway."""
MOSTLY = 0.85
"""The share of visited scores above which PyTorch's kernel, which visits all, is the faster one in float32."""


class Modification(NamedTuple):
    """A score modification where it was applied: on the scaled scores of a tile, (b, h, q, k), at these indices."""

    score: Score
    scaled: Tensor
    at: tuple[Tensor, ...]
    slope: Tensor

    def apply_slope(self, ds: Tensor, sums: Sequence[Tensor | None]) -> Tensor:
        """The gradient of the scaled scores, in place, from that of the modified ones; adds to captured tensors'."""
        if any(x is not None for x in sums):
            self.score.accumulate(sums, ds.view_as(self.scaled), self.scaled, *self.at)
        slope = self.slope.view_as(ds)
        if self.score.own:  # it may be anything where a score is masked
            slope = slope.masked_fill(ds == 0, 0)
        return ds.mul_(slope)


def scores_dtype(call: Call) -> torch.dtype:
    """Of the operands of q k^T: float32 for bfloat16 where that would round scores of more than HARMLESS, by
    |score| <= |q| |k| |scale| of the rows and keys in use."""
    products = products_dtype(call.q.dtype)
    if products != torch.bfloat16 or not min(call.q.numel(), call.k.numel()):
        return products
    if (dtype := wide_dtype(call)) == products or call.score is not None:
        return dtype
    # The first rows and keys say so most of the time.
    small = all(_score_bound(call, most) <= HARMLESS for most in (8, max(call.q.shape[2], call.k.shape[2])))
    return products if small else dtype


def wide_dtype(call: Call) -> torch.dtype:
    """Of the operands of wide products, which take few rows of bfloat16 as they are."""
    few = call.group * call.q.shape[2] <= FEW
    return products_dtype(call.q.dtype) if few else call.lse_dtype()


def _score_bound(call: Call, most: int) -> float:
    """Of the scores of the first so many rows and keys."""
    bound, extent = abs(call.scale), call.extent
    for x, used in (call.q, extent.rows), (call.k, extent.keys):
        norms = torch.linalg.vector_norm(x[:, :, :most], dim=-1, dtype=call.lse_dtype())
        out_of_use = torch.arange(norms.shape[2], device="cpu") >= used
        bound *= norms.masked_fill(norms.isnan() | out_of_use[:, None], 0).max().item()  # a NaN has no rounding
    return bound


class Worker:
    """A Call with its Tiling, and the memory of one thread.

    A tensor of query rows becomes (n, m, d): n = batch rows x key heads, m = group x rows. Operands of q k^T have the
    dtype `scores`, those of dout v^T `wide`, operands and results of other products `products`, and all else `inside`.
    """

    def __init__(self, call: Call, tiling: Tiling, scores: torch.dtype = torch.float32) -> None:
        self.call, self.tiling, self.scratch = call, tiling, Scratch()
        self.scores, self.wide = scores, wide_dtype(call)
        self.products, self.inside = tiling.shape.products, call.lse_dtype()
        self.placed = call.layout.positioned
        self.bias = score_mods.bias(call) if call.score is not None and not self.placed else None
        self.rescale = 1.0 if call.dropout is None else call.dropout.rescale

    def pieces(self, tile: Tile) -> list[Tile]:
        """The tile in pieces of at most TILE_ELEMENTS scores, without empty tiles of block sparsity."""
        tiling, mask = self.tiling, self.call.mask
        if mask is None or not mask.block_sparse or tiling.shape.small:
            return tiling.split([tile])
        first_b, first_h = tile.batch.start if tiling.by_batch else 0, tile.heads.start if tiling.by_head else 0
        slices = first_b, first_h, tile.rows.start
        if slices not in tiling.pieces:
            if tiling.states is None:
                tiling.states = states_of(self.call, compute_states)[0]
            tiling.pieces[slices] = tiling.split(tiling.runs(tiling.states, tile))
        # They were made for the first of the batch rows and heads that share them.
        return [piece._replace(batch=tile.batch, heads=tile.heads) for piece in tiling.pieces[slices]]

    def keys(self, x: Tensor, tile: Tile, dtype: torch.dtype) -> Tensor:
        """All keys of the tile's heads, (n, s_k, d)."""
        return x[tile.batch, tile.heads].to(dtype).flatten(0, 1)

    def queries(self, x: Tensor, tile: Tile, dtype: torch.dtype) -> Tensor:
        """(n, m, d)"""
        return self._rows(x, tile).to(dtype).flatten(0, 1).flatten(1, 2)

    def store(self, target: Tensor, x: Tensor, tile: Tile) -> None:
        """Writes (n, m, d) where `queries` reads it."""
        slices = self._rows(target, tile)
        slices.copy_(x.view(slices.shape))

    def _rows(self, x: Tensor, tile: Tile) -> Tensor:
        return x.unflatten(1, (-1, self.call.group))[tile.batch, tile.heads, :, tile.rows]

    def score(self, q: Tensor, k: Tensor, tile: Tile, derivative: bool = False) -> tuple[Tensor, Modification | None]:
        """The modified scores (n, m, keys), -inf where they are masked; and the Modification if its derivative is asked
        for and is not one."""
        k = k[:, tile.keys]
        score = self.scratch("score", (q.shape[0], q.shape[1], k.shape[1]), self.inside)
        if self.scores == self.wide:
            score = wide_product(q, k.mT, self.call.scale, score)
        else:
            rounded = self.scratch("rounded", score.shape, self.scores)
            score.copy_(product(q, k.mT, self.call.scale, rounded))
        slices, modify, modification = tile.slices(self.call.group), self.call.score, None
        tile_score = score.view([x.stop - x.start for x in slices])
        if self.bias is not None and not derivative:
            part = (x if n > 1 else slice(None) for x, n in zip(slices, self.bias.shape, strict=True))
            tile_score.add_(self.bias[tuple(part)])
        elif modify is not None:
            at, scaled = self._function_indices(tile), tile_score
            tile_score, slope = score_mods.apply(modify, scaled, at, derivative, not self.placed)
            if slope is not None:
                modification = Modification(modify, scaled, at, slope)
        self._apply_mask(tile_score, tile)
        return tile_score.view_as(score), modification

    def _indices(self, tile: Tile) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Batch rows, query heads, rows and keys of a tile, which broadcast to (b, h, q, k)."""
        b_idx, h_idx, q_idx, kv_idx = (
            torch.arange(x.start, x.stop, device="cpu") for x in tile.slices(self.call.group)
        )
        return b_idx[:, None, None, None], h_idx[:, None, None], q_idx[:, None], kv_idx

    def _function_indices(self, tile: Tile) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The indices of a tile for score functions and dropout: positions, if the layout has any."""
        b_idx, h_idx, q_idx, kv_idx = self._indices(tile)
        if not self.placed:
            return b_idx + self.call.first_b, h_idx, q_idx, kv_idx
        extent = self.call.extent
        p, r = extent.q_position(b_idx, q_idx), extent.k_position(b_idx, kv_idx)
        return b_idx + self.call.first_b, h_idx, p, r

    def dropout_mask(self, tile: Tile) -> Tensor | None:
        """1 where dropout keeps a probability, else 0, (n, m, keys); None without dropout."""
        dropout = self.call.dropout
        if dropout is None:
            return None
        b_idx, h_idx, p, r = self._function_indices(tile)
        if not self.placed:
            keep = dropout.keep(b_idx.flatten(), h_idx.flatten(), tile.rows, tile.keys)
        else:
            keep = dropout.keep_at(b_idx, h_idx, p, r)
        keep = keep.unflatten(1, (-1, self.call.group)).flatten(0, 1).flatten(1, 2)
        return self.scratch("keep", keep.shape, self.inside).copy_(keep)

    def _apply_mask(self, score: Tensor, tile: Tile) -> None:
        """-inf in the scores (b, h, q, k), in place, where a key is masked."""
        for start, stop in (tile.keys.start, tile.core.start), (tile.core.stop, tile.keys.stop):
            if start < stop:
                edge = score[..., start - tile.keys.start : stop - tile.keys.start]
                limit = self._mask_tile(tile._replace(keys=slice(start, stop)))
                torch.minimum(edge, limit, out=edge)  # 20 to 40 times as fast as `masked_fill_`, but keeps NaN
                if bool(edge.sum().isnan()):
                    edge.masked_fill_(limit < 0, -torch.inf)

    def _mask_tile(self, tile: Tile) -> Tensor:
        """-inf where a key is masked, else +inf, (b or 1, h_q or 1, rows, keys)."""
        tiling, mask = self.tiling, self.call.mask
        tested = mask if mask is not None and not mask.exact else None
        by_batch = tiling.hull.lo.shape[0] > 1
        if tested is not None and not by_batch:
            by_batch = "b" in tested.indices or self.call.extent.differs
        by_head = tested is not None and "h" in tested.indices
        slices = (
            id(tiling),
            *((tile.batch.start, tile.batch.stop) if by_batch else (0, 0)),
            *((tile.heads.start, tile.heads.stop) if by_head else (0, 0)),
            *(tile.rows.start, tile.rows.stop, tile.keys.start, tile.keys.stop),
        )
        if (known := mask_tiles.get(slices)) is not None:
            return known
        b_idx, h_idx, q_idx, kv_idx = self._indices(tile)
        at = tile.batch if tiling.hull.lo.shape[0] > 1 else slice(0, 1)
        lo, hi = (edge[at, None, tile.rows, None] for edge in tiling.hull)
        seen = (kv_idx >= lo) & (kv_idx < hi)
        if tested is not None:
            # What does not depend on the batch row or the head is computed for the first of them.
            b_idx, h_idx = b_idx if by_batch else b_idx[:1], h_idx if by_head else h_idx[:1]
            seen = seen & tested.sees(self.call.extent, b_idx, h_idx, q_idx, kv_idx)
        limit = seen.to(self.inside).sub_(0.5).mul_(torch.inf)
        return self._cached(slices, limit)

    def _cached(self, slices: tuple[int, ...], mask_tile: Tensor) -> Tensor:
        if mask_tile.nbytes <= MASK_TILES_BYTES // 4:
            mask_tiles.put(slices, mask_tile, [self.tiling], mask_tile.nbytes)
        return mask_tile

    def additive_mask(self) -> Tensor | None:
        """0, or -inf where a key is masked, (b or 1, h_q or 1, s_q, s_k); None where too many tiles are skipped, or
        there is no room to cache it."""
        b, h_k, group, s_q, s_k, _ = self.tiling.shape
        heads = max(1, h_k * group)
        if b * h_k * group * s_q * s_k * 4 > MASK_TILES_BYTES // 4 * heads or self._visited() < MOSTLY:
            return None
        slices = (id(self.tiling),)
        if (known := mask_tiles.get(slices)) is not None:
            return known
        everything = Tile(slice(0, b), slice(0, h_k), slice(0, s_q), slice(0, s_k), slice(0, 0))
        return self._cached(slices, self._mask_tile(everything).clamp(max=0))

    def _visited(self) -> float:
        tiling = self.tiling
        if tiling.visited is None:
            groups = tiling.groups[:64]
            visited = sum(x.elements() for tiles in groups for tile in tiles for x in self.pieces(tile))
            tiling.visited = visited / (max(1, len(groups)) * tiling.shape.s_q * tiling.shape.s_k)
        return tiling.visited
