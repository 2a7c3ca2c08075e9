"""The tiles of a call: the rows, keys and heads of each matrix product. Computed once for a mask and a shape."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from saccade import hardware
from saccade.block_sparsity import states_shape
from saccade.bounded_cache import BoundedCache, derived_from_values
from saccade.call import Call
from saccade.masks import EMPTY, FULL, PARTIAL, TILE, Blocked, Extent, Interval, Mask

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

    def place(self, group: int) -> tuple[slice, slice, slice, slice]:
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
        row_tiles = [list(self._row_tiles(b)) for b in range(self.hull.lo.shape[0])]
        self.groups = [
            [Tile(batch, heads, *rest) for rest in row_tiles[batch.start if len(row_tiles) > 1 else 0]]
            for batch, heads in self._heads()
        ]
        """For each group of heads its tiles of rows."""
        self.pieces: dict[tuple[int, int, int], list[Tile]] = {}
        """Of tiles with block sparsity, by first batch row, first head and first row."""
        self.visited: float | None = None
        """The share of all scores that are in visited tiles, None until it is needed."""

    def _heads(self) -> Iterator[tuple[slice, slice]]:
        """As many heads together as fill a tile; those of one batch row where batch rows see different keys."""
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
        state = torch.where((seen == FULL).all(0), FULL, torch.where((seen != EMPTY).any(0), PARTIAL, EMPTY))
        values, counts = torch.unique_consecutive(state, return_counts=True)
        start = keys.start * TILE
        for value, count in zip(values.tolist(), counts.tolist(), strict=True):
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
    if not tensors and (mask is None or not mask.listed) and not layout.positioned:
        return _of_numbers(shape, mask)

    def make() -> Tiling:
        tiles: tuple[int, ...] = (1, 1)
        if mask is not None and mask.listed and not shape.small:
            tiles = tuple(mask.states.shape) if isinstance(mask, Blocked) else states_shape(call)
        return Tiling(shape, mask, call.extent, (tiles[0] > 1, tiles[1] > 1))

    if call.positions is not None or (mask is not None and mask.by_row):
        return make()
    numbers = () if mask is None else (mask.identity, mask.numbers)
    return derived_from_values(("tiling", shape, layout.text, numbers), tensors, make)


@lru_cache(maxsize=256)
def _of_numbers(shape: TilingShape, mask: Mask | None) -> Tiling:
    extent = Extent.of(shape.s_q, shape.s_k, None, None, torch.device("cpu"))
    return Tiling(shape, mask, extent, (False, False))
