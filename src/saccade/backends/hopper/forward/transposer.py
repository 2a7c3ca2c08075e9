"""8-bit values of pages and of key ranges: four warps that turn each tile as it comes.

Such values have no copy with keys side by side (`transpose.py`): a cache is larger than what one call reads of it, and
ranges overlap. The tiles here are the same as those of that copy.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared


@gluon.jit
def turn_tile(raw, turned, used, BLOCK_K: gl.constexpr, COLUMNS: gl.constexpr, DTYPE: gl.constexpr):
    """turned [COLUMNS, BLOCK_K] of raw [BLOCK_K, COLUMNS], with zeros for keys from `used` on; keys in the order of
    `ptx.pack_quads`."""
    # Pieces of 16 keys and 4 columns are what ldmatrix brings and stmatrix takes.
    WIDE: gl.constexpr = 4 if COLUMNS == 128 else 2
    layout: gl.constexpr = gl.BlockedLayout([16, 4], [4, 8], [4 // WIDE, WIDE], [1, 0])
    if used < BLOCK_K:  # in memory: where two ways meet, bytes in registers are taken apart
        kv_idx = gl.arange(0, BLOCK_K, gl.SliceLayout(1, layout))
        x = raw.load(layout).to(gl.int8, bitcast=True)
        raw.store(gl.where((kv_idx < used)[:, None], x, gl.zeros_like(x)).to(DTYPE, bitcast=True))
    # [BLOCK_K, COLUMNS]
    x = raw.load(layout).to(gl.int8, bitcast=True)
    # [16s, h, q, e, COLUMNS] to [16s, q, h, e, COLUMNS]
    x = x.reshape([BLOCK_K // 16, 2, 4, 2, COLUMNS]).permute((0, 2, 1, 3, 4)).reshape([BLOCK_K, COLUMNS])
    turned.store(x.permute((1, 0)).to(DTYPE, bitcast=True))


@gluon.jit
def transpose(args, pipe):
    """Turns the tiles of values that the producer loads, until it says that there are no more."""
    BLOCK_K: gl.constexpr = pipe.shape.BLOCK_K
    BLOCK_DV: gl.constexpr = pipe.shape.BLOCK_DV
    WIDTH: gl.constexpr = min(128, BLOCK_DV)
    DTYPE: gl.constexpr = pipe.values.tiles.dtype
    n = gl.to_tensor(0)
    slot = pipe.raw.wait(0)
    used = pipe.raw.get(pipe.raw.record_of(0), 0)
    while used >= 0:
        stage = pipe.values.claim(n)
        raw = pipe.raw.tiles.index(slot).reshape([BLOCK_K, BLOCK_DV])
        turned = pipe.values.tiles.index(stage).reshape([BLOCK_DV, BLOCK_K])
        for column in gl.static_range(0, BLOCK_DV, WIDTH):
            turn_tile(raw.slice(column, WIDTH, 1), turned.slice(column, WIDTH, 0), used, BLOCK_K, WIDTH, DTYPE)
        fence_async_shared()
        pipe.raw.release(n)
        pipe.values.fill(stage)
        n += 1
        slot = pipe.raw.wait(n)
        used = pipe.raw.get(pipe.raw.record_of(n), 0)
