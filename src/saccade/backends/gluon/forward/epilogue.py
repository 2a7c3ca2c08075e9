"""How the forward's results leave: whole tiles in bulk, the last one of a packed sequence row by row."""

# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from saccade.backends.gluon.shim import tma_store, view
from saccade.backends.gluon.tiles import store_rows


@gluon.jit
def leave_slot(out_desc, pipe, part, x):
    """Puts x [64, BLOCK_DV] where q was: every warp overwrites rows that it alone has read. Returns the tile."""
    BLOCK_DV: gl.constexpr = pipe.shape.BLOCK_DV
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, BLOCK_DV], out_desc.dtype)
    # A slot as tiles of out.
    OUTS: gl.constexpr = pipe.slots.CHUNKS * pipe.shape.D_CHUNK // BLOCK_DV
    ALL: gl.constexpr = pipe.slots.SLOTS * pipe.shape.CONSUMERS * OUTS
    tile = view(pipe.slots.tiles, [ALL, 64, BLOCK_DV], LAYOUT).index(part * OUTS)
    tile.store(x.to(out_desc.dtype))
    return tile


@gluon.jit
def store_bulk(out_desc, pipe, part, x, at):
    """Writes x [64, BLOCK_DV] in bulk."""
    BLOCK_DV: gl.constexpr = pipe.shape.BLOCK_DV
    ROWS: gl.constexpr = pipe.shape.ROWS
    LEAVING: gl.constexpr = out_desc.layout
    OUTS: gl.constexpr = pipe.slots.CHUNKS * pipe.shape.D_CHUNK // BLOCK_DV
    ALL: gl.constexpr = pipe.slots.SLOTS * pipe.shape.CONSUMERS * OUTS
    leave_slot(out_desc, pipe, part, x)
    fence_async_shared()
    leaving = view(pipe.slots.tiles, [ALL, 1, 1, 64 // ROWS, ROWS, BLOCK_DV], LEAVING).index(part * OUTS)
    tma_store(out_desc, at, leaving)


@gluon.jit
def store_out(out_desc, out, pipe, part, x, at, there, group):
    """Writes x [64, BLOCK_DV], of whose rows so many are `there`: behind those of packed sequences is the next one,
    where a bulk copy would go on."""
    ROWS: gl.constexpr = pipe.shape.ROWS
    if out is None:
        store_bulk(out_desc, pipe, part, x, at)
    else:
        if there >= ROWS:
            store_bulk(out_desc, pipe, part, x, at)
        else:
            tile = leave_slot(out_desc, pipe, part, x)
            h = at[1] * group
            store_rows(tile, out, h + at[2], at[3], there, h + group, pipe.shape.BLOCK_DV, ROWS)
