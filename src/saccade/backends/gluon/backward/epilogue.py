"""How dk and dv leave: whole tiles in bulk, the last one of a packed sequence row by row."""

# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from saccade.backends.gluon.shim import tma_store
from saccade.backends.gluon.tiles import store_rows


@gluon.jit
def store_keys(desc, x, tile, rows, block, key, COLUMN: gl.constexpr):
    """Writes a tile, [1, 1, 64, columns] and once more [64, columns], to the keys from `key` on, from COLUMN on.

    x: the tensor itself where sequences are packed: behind the rows of one is the next, where a bulk copy would go on.
    Else None.
    """
    b, at = block.keys_at(key)
    if x is None:
        tma_store(desc, [b, block.share, at, COLUMN], tile)
    else:
        there = block.there - key
        if there >= 64:
            tma_store(desc, [b, block.share, at, COLUMN], tile)
        else:
            store_rows(rows, x, block.share, at, there, block.share + 1, rows.shape[1], 64, COLUMN)
