"""Paged caches: one sequence after the other, some pages at a time, with the online softmax.

With `num_splits=1` a row's result has the same bits in every batch and call, although the bits of a matrix product
change with its shape. All tiles then have one shape and begin at multiples of their size, and a row's position in the
sequence says its place in its tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from saccade import masks
from saccade.backends import Outputs
from saccade.backends.cpu import tiled
from saccade.backends.cpu.tiling import TILE_ELEMENTS, TILE_ROWS, OnlineSoftmax, Scratch, products_dtype, wide_product
from saccade.backends.key_lists import listed_keys
from saccade.call import Call
from saccade.call.descale import factor_of_rows
from saccade.layouts import Paged, SlotRows

FIXED_ROWS, FIXED_KEYS = 16, 128
"""The rows of a head and the keys of a tile for `num_splits=1`."""


class Block(NamedTuple):
    """Some query rows of a sequence, and where they are in a tile of `height` rows."""

    rows: slice
    """counted within the sequence"""
    first: int
    height: int


def forward(call: Call, lse: bool) -> Outputs:
    """out (b, h_q, s_q, d_v) and, if asked for, lse and max_scores (b, h_q, s_q); packed queries are one row of t_q."""
    layout, extent = call.layout, call.extent
    starts = layout.cu_seqlens_q
    if call.mask is not None and starts is not None:
        call = call.replace(mask=masks.padded(call.mask, starts, extent.s_q))
    named = listed_keys(call)
    out = call.empty_out()
    if not call.keeps_tail:
        out.zero_()
    row_lse = torch.full(call.q.shape[:3], -torch.inf, dtype=call.lse_dtype(), device="cpu")
    top = row_lse.clone()  # results share no memory
    for b, batch, rows, *_ in layout.sequence_slices(call.q, call.k):
        at = batch, slice(None), rows
        out[at].zero_()
        keys = int(extent.keys[b if extent.keys.shape[0] > 1 else 0, 0])
        own = None if named is None else named[b if len(named) > 1 else 0, ..., None]
        _sequence(call, b, keys, own, call.q[at][0], (out[at][0], row_lse[at][0], top[at][0]))
        if call.sink is not None:  # here, since rows of no sequence stay as they are
            row_lse[at] = tiled.join(out[at], row_lse[at], call.sink)
    return out, row_lse if lse else None, top if call.max_scores else None


def _sequence(
    call: Call, b: int, keys: int, named: Tensor | None, q: Tensor, results: tuple[Tensor, Tensor, Tensor]
) -> None:
    """Fills out (h_q, rows, d_v), lse and max_scores (h_q, rows) of sequence b, where its rows q (h_q, rows, d) see a
    key. named: the keys that lists name, (h_k or 1, s_k, 1), or None."""
    out, lse, largest = results
    mask, extent, group, products = call.mask, call.extent, call.group, _products(call)
    h_q, s_q, _ = q.shape
    if mask is None:
        lo, hi = torch.zeros(s_q, dtype=torch.int64, device="cpu"), torch.full((s_q,), keys, device="cpu")
    else:
        lo, hi = (edge[b if edge.shape[0] > 1 else 0, :s_q] for edge in mask.hull(extent).clipped(extent))
    scratch = Scratch()
    b_idx, h_idx = torch.full((1, 1, 1, 1), b, device="cpu"), torch.arange(h_q, device="cpu")[:, None, None]
    for block in _blocks(call, s_q, keys):
        block_lo, block_hi = (torch.zeros(block.height, dtype=torch.int64, device="cpu") for _ in range(2))
        filled = slice(block.first, block.first + block.rows.stop - block.rows.start)
        block_lo[filled], block_hi[filled] = lo[block.rows], hi[block.rows]
        seeing = block_hi > block_lo
        if not h_q or not bool(seeing.any()):
            continue
        # Rows and keys that only fill a tile take the index of a neighbour, at which functions may read tensors.
        q_idx = (torch.arange(block.height, device="cpu") - block.first + block.rows.start).clamp(0, s_q - 1)
        stream = OnlineSoftmax(scratch, alone=_fixed(call))
        rows = q.new_zeros(h_q, block.height, q.shape[2], dtype=products)
        rows[:, filled] = _rows(call, q, b, block.rows).to(products)
        rows = rows.unflatten(0, (-1, group)).flatten(1, 2)
        # Rows are (h_k, group * height, d).
        step = FIXED_KEYS if _fixed(call) else max(FIXED_KEYS, TILE_ELEMENTS // rows.shape[:2].numel())
        for start in range(int(block_lo[seeing].min()) // step * step, int(block_hi[seeing].max()), step):
            kv_idx = torch.arange(start, start + step if _fixed(call) else min(start + step, keys), device="cpu")
            k, v = (_tile(call, name, b, start, len(kv_idx), keys).to(products) for name in ("k", "v"))
            if named is not None:
                there = torch.nn.functional.pad(named[:, start:keys], (0, 0, 0, len(kv_idx)))[:, : len(kv_idx)]
                k, v = (torch.where(there, x, 0) for x in (k, v))
            score = scratch("score", (*rows.shape[:2], len(kv_idx)), lse.dtype)
            score = wide_product(rows, k.mT, call.scale, score).view(1, h_q, block.height, -1)
            if call.score is not None:
                p = extent.q_position(b_idx, q_idx[:, None])
                score = call.score.tile(score, b_idx, h_idx, p, extent.k_position(b_idx, kv_idx.clamp(max=keys - 1)))
            seen = (kv_idx >= block_lo[:, None]) & (kv_idx < block_hi[:, None])
            if mask is not None and not mask.exact:
                seen = seen & mask.sees(extent, b_idx, h_idx, q_idx[:, None], kv_idx.clamp(max=keys - 1))
            stream.add(score.masked_fill(~seen, -torch.inf).view(k.shape[0], -1, len(kv_idx)), v)
        out[:, block.rows] = stream.out().view(h_q, block.height, -1)[:, filled].to(out.dtype)
        for whole, part in ((lse, stream.lse()), (largest, stream.top)):
            whole[:, block.rows] = part.view(h_q, block.height)[:, filled].to(whole.dtype)


def _products(call: Call) -> torch.dtype:
    """The dtype of matrix products: 8-bit caches are read as float32."""
    return products_dtype(call.q.dtype) if call.descale is None else call.lse_dtype()


def _rows(call: Call, q: Tensor, b: int, rows: slice) -> Tensor:
    """Some query rows of sequence b, of its q (h_q, s_q, d)."""
    if call.descale is None or call.descale.q is None:
        return q[:, rows]
    factor = factor_of_rows(call.descale.q[b : b + 1], q[None])[0]
    return q[:, rows].to(factor.dtype) * (factor[:, rows] if factor.shape[1] > 1 else factor)


def _fixed(call: Call) -> bool:
    return call.layout.num_splits == 1


def _blocks(call: Call, s_q: int, keys: int) -> Iterator[Block]:
    fixed = _fixed(call)
    height = FIXED_ROWS if fixed else max(1, TILE_ROWS // call.group)
    off = keys - s_q if fixed else 0  # the position of the first row; those of rows before the first key are negative
    start = 0
    while start < s_q:
        first = (start + off) % height
        stop = min(start + height - first, s_q)
        yield Block(slice(start, stop), first, height if fixed else stop - start)
        start = stop


def _tile(call: Call, name: str, b: int, start: int, n: int, keys: int) -> Tensor:
    """Keys [start, start + n) of sequence b, in k or v: (h_k, n, d), zero from `keys` on."""
    layout, x = call.layout, getattr(call, name)  # (pages, h_k, page_size, d)
    size = x.shape[2]
    assert isinstance(layout, Paged)
    stop = min(start + n, keys)
    first = start // size
    numbers = layout.block_table[b, first : -(-stop // size)].long()
    pages = numbers.clamp(0, x.shape[0] - 1)
    tile = x[pages].transpose(0, 1).flatten(1, 2)[:, start - first * size : stop - first * size]
    if isinstance(layout, SlotRows):  # values may be NaN where there is no slot
        tile = torch.where((pages == numbers)[:, None], tile, 0)
    if call.descale is not None:
        tile = tile.to(call.lse_dtype())
        if (factor := getattr(call.descale, name)) is not None:
            tile = tile * factor_of_rows(factor[b : b + 1], tile[None], start)[0]
    return tile if stop == start + n else torch.nn.functional.pad(tile, (0, 0, 0, start + n - stop))
