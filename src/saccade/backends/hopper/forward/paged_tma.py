"""Tiles of keys from the pages of a cache: a bulk copy for each piece that lies in one page.

A tile in shared memory is stripes of WIDTH columns, each with all of its rows one after the other, so that whole groups
of 8 rows may come from anywhere.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from saccade.backends.device.records import FLAGS, plain_int, runtime_int
from saccade.backends.hopper.shim import tma_load, view
from saccade.call import Call
from saccade.layouts import Paged


class Parts(NamedTuple):
    """Where the results of parts of the keys go."""

    ptr: Any
    """float32 (splits, b, s_q, h_q, d_v)"""
    rows: Any
    """b s_q h_q, a runtime_int, as the next"""
    splits: Any
    columns: Any
    """constexpr: d_v"""

    @staticmethod
    def of(found: Tensor) -> Parts:
        numbers = runtime_int(found.shape[1:4].numel()), runtime_int(found.shape[0])
        return Parts(found, *numbers, _constant(found.shape[4]))


class Pages(NamedTuple):
    """Which pages are whose; kernels take None where keys are not in pages."""

    table: Any
    """int (sequences, …)"""
    stride: Any
    """of a row of the table; a runtime_int, as the next"""
    count: Any
    """pages of the cache"""
    size: Any
    """constexpr: rows of a page"""
    parts: Any
    """Parts, or a stand-in"""
    split: Any
    """constexpr: keys are cut in parts"""


def record(call: Call, parts: Parts | None = None) -> Pages | None:
    """The device form of a layout's pages, if it has some."""
    layout = call.layout
    if not isinstance(layout, Paged):
        return None
    table = layout.block_table if layout.block_table.stride(1) == 1 else layout.block_table.contiguous()
    pages, _, size, _ = call.k.shape
    stand_in = Parts(table, runtime_int(0), runtime_int(1), _constant(0))
    numbers = runtime_int(table.stride(0)), runtime_int(pages), _constant(size)
    return Pages(table, *numbers, parts or stand_in, FLAGS[parts is not None])


@lru_cache(maxsize=64)
def _constant(value: int) -> Any:
    return tl.constexpr(value)


def box_rows(page_size: int, block_k: int) -> int:
    """Rows of one bulk copy: as many as pages and tiles of keys can both be cut into."""
    return math.gcd(page_size, block_k)


rows_of_a_box: Any = gluon.constexpr_function(box_rows)


@gluon.constexpr_function
def is_split(pages):
    """constexpr: pages.split, whose name Triton 3.6 does not know here"""
    return pages is not None and bool(getattr([*pages][-1], "value", [*pages][-1]))


@gluon.jit
def splits_of(parts):
    """In how many parts keys are cut."""
    if parts is None:
        return 1
    else:
        return plain_int(parts.splits)


@gluon.jit
def part_of(parts, part, lo, hi):
    """The tiles of a part of [lo, hi): as many as any other has, or one less. A part without a tile has the one after
    the last, of which no row sees a key."""
    splits = plain_int(parts.splits)
    first = lo + (hi - lo) * part // splits
    end = lo + (hi - lo) * (part + 1) // splits
    return gl.where(end > first, first, hi), gl.where(end > first, end, hi + 1)


@gluon.jit
def pages_of(pages, b, start, keys, BLOCK_K: gl.constexpr):
    """[32]: in which page each box of the tile of keys from `start` on is. From `keys` on in one that is not there, of
    which a bulk copy makes zeros."""
    if pages is None:
        return 0
    else:
        BOX: gl.constexpr = rows_of_a_box(pages.size, BLOCK_K)
        # [32]
        kv_idx = start + gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0])) * BOX
        row = pages.table + b.to(gl.int64) * plain_int(pages.stride)
        page = gl.load(row + kv_idx // pages.size, mask=kv_idx < keys, other=0)
        last = plain_int(pages.count) - 1
        page = gl.minimum(gl.maximum(page, 0), last).to(gl.int32)
        return gl.where(kv_idx < keys, page, last + 1)


@gluon.jit
def load_pages(desc, tiles, stage, page, h_k, start, SIZE: gl.constexpr, COLUMNS: gl.constexpr, BLOCK_K: gl.constexpr,
               barrier, FIRST=0):  # fmt: skip
    """Fills a stage of tiles [BLOCK_K, COLUMNS] with keys, or values, from `start` on, of pages [32], from column FIRST
    on, and counts them in at a barrier that expects all of them. desc: (pages, h_k, SIZE, d) in boxes."""
    BOX: gl.constexpr = desc.block_type.shape[2]
    WIDTH: gl.constexpr = desc.block_type.shape[3]
    BOXES: gl.constexpr = BLOCK_K // BOX
    STRIPES: gl.constexpr = COLUMNS // WIDTH
    ALL: gl.constexpr = tiles.shape[0] * tiles.shape[3] * tiles.shape[4] // (BOX * WIDTH)
    LAYOUT: gl.constexpr = desc.layout
    boxes = view(tiles, [ALL, 1, 1, BOX, WIDTH], LAYOUT)
    # [32]
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    for i in range(BOXES):
        number = gl.max(gl.where(lane == i, page, 0), 0)
        row = (start + i * BOX) % SIZE
        for stripe in gl.static_range(STRIPES):
            box = boxes.index((stage * STRIPES + stripe) * BOXES + i)
            tma_load(desc, [number, h_k, row, FIRST + stripe * WIDTH], barrier, box)
