"""What one thread does with a tile: it reads and writes the tile's rows, and computes its scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.backends.cpu import score_mods
from saccade.backends.cpu.online_softmax import FEW, Scratch, product, wide_product
from saccade.backends.cpu.tiling import MASK_TILES_BYTES, Tile, Tiling, mask_tiles, products_dtype
from saccade.block_sparsity import compute_states, states_of
from saccade.call import Call
from saccade.scores import Score

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
        if mask is None or not mask.listed or tiling.shape.small:
            return tiling.split([tile])
        first_b, first_h = tile.batch.start if tiling.by_batch else 0, tile.heads.start if tiling.by_head else 0
        place = first_b, first_h, tile.rows.start
        if place not in tiling.pieces:
            tiling.pieces[place] = tiling.split(tiling.runs(states_of(self.call, compute_states)[0], tile))
        # They were made for the first of the batch rows and heads that share them.
        return [piece._replace(batch=tile.batch, heads=tile.heads) for piece in tiling.pieces[place]]

    def keys(self, x: Tensor, tile: Tile, dtype: torch.dtype) -> Tensor:
        """All keys of the tile's heads, (n, s_k, d)."""
        return x[tile.batch, tile.heads].to(dtype).flatten(0, 1)

    def queries(self, x: Tensor, tile: Tile, dtype: torch.dtype) -> Tensor:
        """(n, m, d)"""
        return self._rows(x, tile).to(dtype).flatten(0, 1).flatten(1, 2)

    def store(self, target: Tensor, x: Tensor, tile: Tile) -> None:
        """Writes (n, m, d) where `queries` reads it."""
        place = self._rows(target, tile)
        place.copy_(x.view(place.shape))

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
        place, modify, modification = tile.place(self.call.group), self.call.score, None
        tile_score = score.view([x.stop - x.start for x in place])
        if self.bias is not None and not derivative:
            part = (x if n > 1 else slice(None) for x, n in zip(place, self.bias.shape, strict=True))
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
        b_idx, h_idx, q_idx, kv_idx = (torch.arange(x.start, x.stop, device="cpu") for x in tile.place(self.call.group))
        return b_idx[:, None, None, None], h_idx[:, None, None], q_idx[:, None], kv_idx

    def _function_indices(self, tile: Tile) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What score functions and dropout take for a tile's indices: positions, where there are any."""
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
        place = (
            id(tiling),
            *((tile.batch.start, tile.batch.stop) if by_batch else (0, 0)),
            *((tile.heads.start, tile.heads.stop) if by_head else (0, 0)),
            *(tile.rows.start, tile.rows.stop, tile.keys.start, tile.keys.stop),
        )
        if (known := mask_tiles.get(place)) is not None:
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
        return self._cached(place, limit)

    def _cached(self, place: tuple[int, ...], mask_tile: Tensor) -> Tensor:
        if mask_tile.nbytes <= MASK_TILES_BYTES // 4:
            mask_tiles.put(place, mask_tile, [self.tiling], mask_tile.nbytes)
        return mask_tile

    def additive_mask(self) -> Tensor | None:
        """0, or -inf where a key is masked, (b or 1, h_q or 1, s_q, s_k); None where too many tiles are skipped, or
        there is no room to cache it."""
        b, h_k, group, s_q, s_k, _ = self.tiling.shape
        heads = max(1, h_k * group)
        if b * h_k * group * s_q * s_k * 4 > MASK_TILES_BYTES // 4 * heads or self._visited() < MOSTLY:
            return None
        place = (id(self.tiling),)
        if (known := mask_tiles.get(place)) is not None:
            return known
        everything = Tile(slice(0, b), slice(0, h_k), slice(0, s_q), slice(0, s_k), slice(0, 0))
        return self._cached(place, self._mask_tile(everything).clamp(max=0))

    def _visited(self) -> float:
        tiling = self.tiling
        if tiling.visited is None:
            groups = tiling.groups[:64]
            visited = sum(x.elements() for tiles in groups for tile in tiles for x in self.pieces(tile))
            tiling.visited = visited / (max(1, len(groups)) * tiling.shape.s_q * tiling.shape.s_k)
        return tiling.visited
