"""How the rows and keys of a call are cut into tiles, and what its mask hides: found once for a mask and a shape."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import ClassVar, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor

from saccade import hardware
from saccade.block_sparsity import states_shape
from saccade.bounded_cache import derived
from saccade.masks import EMPTY, FULL, PARTIAL, TILE, Blocked, Extent, Interval, Mask
from saccade.problem import Problem

TILE_ELEMENTS = 1 << 20
"""Scores in a tile: 4 MB of float32; smaller ones lose more to the products than they gain by a nearer cache."""
TILE_ROWS = 256
"""Rows of the matrix product, query heads of a group folded in; fewer, but at least a quarter, where rows are long."""
KEY_STOPS = 16
"""How many different ends the keys of bf16 tiles have, where there are more than 16 tiles of rows."""
SMALL = 1 << 17
"""Scores of all rows of a key head that are one tile: what else there is to do for a tile costs more than leaving out
what a mask hides of them."""
LIMITS_BYTES = 1 << 26
"""How much is kept of what masks hide between hull and core, of all Cuts together, and up to a quarter of it of one;
what is beyond is made each time."""


class Heads(NamedTuple):
    """The batch rows and key heads that one matrix product holds."""

    batch: slice
    heads: slice


class Tile(NamedTuple):
    """Query rows against keys. In the columns `core` every row sees every key; outside of it, look."""

    rows: slice
    keys: slice
    core: slice


class Shape(NamedTuple):
    """What a Cut depends on besides mask and lengths."""

    b: int
    h_k: int
    group: int
    s_q: int
    s_k: int
    products: torch.dtype
    """of the operands of matrix products"""

    @property
    def small(self) -> bool:
        """Whether lists of tiles are not worth their while."""
        return self.s_q * self.group * self.s_k <= SMALL

    @staticmethod
    def of(problem: Problem) -> Shape:
        (b, _, s_q, _), (_, h_k, s_k, _) = problem.q.shape, problem.k.shape
        return Shape(b, h_k, problem.group, s_q, s_k, products_dtype(problem.q.dtype))


def products_dtype(dtype: torch.dtype) -> torch.dtype:
    """What the matrix products run in: float32 for half types that this CPU has no products for."""
    half = dtype == torch.float16 or (dtype == torch.bfloat16 and hardware.cpu_bf16() == "none")
    return torch.float32 if half else dtype


class _Limits:
    """What masks hide of tiles, as tensors of +inf where a score stays and -inf where it does not."""

    alive: ClassVar[WeakSet[_Limits]] = WeakSet()
    total: ClassVar[int] = 0

    def __init__(self) -> None:
        self.held: dict[tuple[int, ...], Tensor] = {}
        self.bytes = 0
        _Limits.alive.add(self)

    def keep(self, place: tuple[int, ...], x: Tensor) -> None:
        if self.bytes + x.nbytes > LIMITS_BYTES // 4:
            return
        if _Limits.total + x.nbytes > LIMITS_BYTES:  # dead ones are still counted: what is alive begins anew
            for other in list(_Limits.alive):
                other.held, other.bytes = {}, 0
            _Limits.total = 0
        self.held[place] = x
        self.bytes += x.nbytes
        _Limits.total += x.nbytes


class Cut:
    """Tiles of a mask and a shape. It holds nothing of the mask itself, whose tensors must not live on in a cache."""

    def __init__(self, shape: Shape, mask: Mask | None, extent: Extent, listed: tuple[bool, bool]) -> None:
        self.shape = shape
        everything = Interval(torch.zeros_like(extent.q_idx()), extent.keys)
        self.hull = (everything if mask is None else mask.hull(extent)).clipped(extent)
        """(1 or b, s_q)"""
        self.core = self.hull if mask is None or mask.exact else mask.core(extent).clipped(extent)
        self.used = extent.keys[:, 0].tolist()
        self.of_batch, self.of_head = listed
        """Whether the lists of tiles differ between batch rows, and between heads."""
        self.width = max(int(self.hull.length().max()) if self.hull.lo.numel() else 0, 1)
        # A narrow band wastes a triangle of a tile's rows; long rows leave room for few of them.
        m = max(TILE_ROWS // 4, min(TILE_ROWS, self.width // 2, TILE_ELEMENTS // self.width))
        small = shape.s_q * shape.group * self.width <= SMALL
        self.rows = max(1, shape.s_q if small else m // shape.group)
        self.heads = list(self._heads())
        starts = range(0, shape.s_q, self.rows)
        self._tiles = [
            [tile for start in starts if (tile := self._tile(b, start))] for b in range(self.hull.lo.shape[0])
        ]
        self.parts: dict[tuple[int, int, int], list[Tile]] = {}
        """Of tiles with lists, by first batch row, first head and first row."""
        self.limits = _Limits()
        self.visited: float | None = None
        """The share of all scores that are in tiles that are visited, once somebody asked."""

    def _heads(self) -> Iterator[Heads]:
        """As many heads together as fill a tile; of one batch row where the batch rows see different keys."""
        b, h_k = self.shape.b, self.shape.h_k
        many = max(1, TILE_ELEMENTS // (self.rows * self.shape.group * (self.width + self.rows)))
        if self.of_head:  # heads that see other keys share no tile
            many = 1
        if h_k == 0:
            return
        batches = min(b, many // h_k) if self.hull.lo.shape[0] == 1 and not self.of_batch else 1
        if batches > 1:
            for start in range(0, b, batches):
                yield Heads(slice(start, min(start + batches, b)), slice(0, h_k))
            return
        for batch in range(b):
            for start in range(0, h_k, many):
                yield Heads(slice(batch, batch + 1), slice(start, min(start + many, h_k)))

    def tiles(self, heads: Heads) -> list[Tile]:
        return self._tiles[heads.batch.start if self.hull.lo.shape[0] > 1 else 0]

    def _tile(self, b: int, start: int) -> Tile | None:
        rows = slice(start, start + self.rows)
        lo, hi = self.hull.lo[b, rows], self.hull.hi[b, rows]
        seeing = (hi > lo).nonzero()[:, 0]
        if not len(seeing):
            return None
        first, last = int(seeing[0]), int(seeing[-1]) + 1
        keys = slice(int(lo[seeing].min()), self._stop(b, int(hi[seeing].max())))
        core_lo, core_hi = (edge[b, rows][first:last] for edge in self.core)
        core = slice(int(core_lo.max()), int(core_hi.min()))
        if core.start >= core.stop:
            core = slice(keys.start, keys.start)
        return Tile(slice(start + first, start + last), keys, core)

    def _stop(self, b: int, stop: int) -> int:
        """Where a tile's keys end: in bf16 at few different places, as oneDNN compiles and keeps a kernel for each
        shape, but never beyond the keys in use."""
        if self.shape.products != torch.bfloat16:
            return stop
        step = max(TILE_ROWS, -(-self.shape.s_k // KEY_STOPS))
        return min(-(-stop // step) * step, self.used[b if len(self.used) > 1 else 0])

    def split(self, tile: Tile, runs: list[Tile]) -> list[Tile]:
        """The runs of keys of a tile in pieces of at most TILE_ELEMENTS scores."""
        m = (tile.rows.stop - tile.rows.start) * self.shape.group
        step = max(TILE_ELEMENTS // m, 64)
        found = []
        for run in runs:
            for start in range(run.keys.start, run.keys.stop, step):
                keys = slice(start, min(start + step, run.keys.stop))
                core = slice(*(min(max(edge, keys.start), keys.stop) for edge in (run.core.start, run.core.stop)))
                found.append(tile._replace(keys=keys, core=core))
        return found

    def runs(self, states: Tensor, heads: Heads, tile: Tile) -> list[Tile]:
        """The tile in runs of keys that are all seen, or some of them, by any of its rows and heads, as the states of
        tiles say, (b or 1, h_q or 1, tiles of rows, tiles of keys)."""
        group, found = self.shape.group, []
        batch = heads.batch if states.shape[0] > 1 else slice(None)
        head = slice(heads.heads.start * group, heads.heads.stop * group) if states.shape[1] > 1 else slice(None)
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
                found.append(tile._replace(keys=run, core=run if value == FULL else slice(run.start, run.start)))
            start = stop
        return found


def cut_of(problem: Problem) -> Cut:
    """The Cut of a call: a known one where mask, numbers and shape are the same, and the tensors of mask and layout are
    the same memory that nobody has written to since."""
    mask, layout, shape = problem.mask, problem.layout, Shape.of(problem)
    records = [*layout.records, *mask.records] if mask is not None else layout.records
    if not records and (mask is None or not mask.listed):
        return _of_numbers(shape, mask)

    def make() -> Cut:
        tiles: tuple[int, ...] = (1, 1)
        if mask is not None and mask.listed and not shape.small:
            tiles = tuple(mask.states.shape) if isinstance(mask, Blocked) else states_shape(problem)
        return Cut(shape, mask, problem.extent, (tiles[0] > 1, tiles[1] > 1))

    numbers = () if mask is None else (mask.identity, *mask.ints, *mask.floats)
    return derived(("cut", shape, layout.text, numbers), records, make)


@lru_cache(maxsize=256)
def _of_numbers(shape: Shape, mask: Mask | None) -> Cut:
    return Cut(shape, mask, Extent.of(shape.s_q, shape.s_k, None, None, torch.device("cpu")), (False, False))
