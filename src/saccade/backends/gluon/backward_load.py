"""The producer of the backward: one warp that brings in k and v once, and q and dout block by block of rows.

A tile has its columns in CHUNKS side by side, each of COLUMNS of them. One that ends in rows which are not in use lands
for the producer alone, and is cleared before anyone else sees it.
"""

# pyright: reportArgumentType=false, reportCallIssue=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from saccade.backends.gluon.shim import tma_load, wait_for_last
from saccade.backends.gluon.tiles import zero_tail


@gluon.jit
def copy(desc, b, h, row, landing, tiles, first, COLUMNS: gl.constexpr, CHUNKS: gl.constexpr):
    """Starts the copies of a tile's chunks, from `first` on."""
    for i in gl.static_range(CHUNKS):
        tma_load(desc, [b, h, row, i * COLUMNS], landing, tiles.index(first + i))


@gluon.jit
def clear(tiles, first, used, ROWS: gl.constexpr, COLUMNS: gl.constexpr, CHUNKS: gl.constexpr):
    """Clears the rows of a tile from `used` on."""
    if CHUNKS == 1:
        zero_tail(tiles.index(first).reshape([ROWS, COLUMNS]), used, ROWS, COLUMNS)
    else:
        for i in range(CHUNKS):  # unrolled, it would spill some hundred bytes
            zero_tail(tiles.index(first + i).reshape([ROWS, COLUMNS]), used, ROWS, COLUMNS)


@gluon.jit
def load_rows(
    desc, numbers_desc, ring, numbers, tails, n, block, h, row, place, used_q,
    BLOCK_Q: gl.constexpr, COLUMNS: gl.constexpr, CHUNKS: gl.constexpr,
):  # fmt: skip
    """Fills stage n of a ring with BLOCK_Q rows of one head and what goes with them. Returns tails, counted on."""
    BYTES: gl.constexpr = BLOCK_Q * (2 * COLUMNS * CHUNKS + 4)
    stage = ring.claim(n)
    first = stage * (ring.tiles.shape[0] // ring.STAGES)
    b, at = block.rows_at(row)
    if used_q is None or row + BLOCK_Q <= block.rows:
        full = ring.announce(stage, BYTES)
        copy(desc, b, h, at, full, ring.tiles, first, COLUMNS, CHUNKS)
        tma_load(numbers_desc, [place], full, numbers.index(stage))
    else:
        landing = ring.landing()
        mbarrier.expect(landing, BYTES)
        copy(desc, b, h, at, landing, ring.tiles, first, COLUMNS, CHUNKS)
        tma_load(numbers_desc, [place], landing, numbers.index(stage))
        mbarrier.wait(landing, tails & 1)
        clear(ring.tiles, first, block.rows - row, BLOCK_Q, COLUMNS, CHUNKS)
        ring.fill(stage)
        tails += 1
    return tails


@gluon.jit
def load_keys(
    k_desc, v_desc, shared, block, used_k,
    BLOCK_K: gl.constexpr, COLUMNS: gl.constexpr, CHUNKS: gl.constexpr, V_CHUNKS: gl.constexpr,
):  # fmt: skip
    """Fills k and v. Returns how many copies landed at the barrier that q's ring has for the producer."""
    BYTES: gl.constexpr = BLOCK_K * COLUMNS * (CHUNKS + V_CHUNKS) * 2
    tails = gl.to_tensor(0)
    b, at = block.keys_at(block.start)
    if used_k is None or block.start + BLOCK_K <= block.keys:
        mbarrier.expect(shared.keys_full, BYTES)
        copy(k_desc, b, block.h_k, at, shared.keys_full, shared.k_tiles, 0, COLUMNS, CHUNKS)
        copy(v_desc, b, block.h_k, at, shared.keys_full, shared.v_tiles, 0, COLUMNS, V_CHUNKS)
    else:
        landing = shared.q_ring.landing()
        mbarrier.expect(landing, BYTES)
        copy(k_desc, b, block.h_k, at, landing, shared.k_tiles, 0, COLUMNS, CHUNKS)
        copy(v_desc, b, block.h_k, at, landing, shared.v_tiles, 0, COLUMNS, V_CHUNKS)
        mbarrier.wait(landing, 0)
        tails += 1
        clear(shared.k_tiles, 0, block.keys - block.start, BLOCK_K, COLUMNS, CHUNKS)
        clear(shared.v_tiles, 0, block.keys - block.start, BLOCK_K, COLUMNS, V_CHUNKS)
        mbarrier.arrive(shared.keys_full, count=1)
    return tails


@gluon.jit
def load(
    q_desc, dout_desc, k_desc, v_desc, start_desc, delta_desc, shared, block, used_q, used_k, group, h_q, q_blocks,
    BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, COLUMNS: gl.constexpr, CHUNKS: gl.constexpr, V_CHUNKS: gl.constexpr,
):  # fmt: skip
    """The producer: k and v once, then q and dout with what goes with their rows, head after head."""
    q_tails = load_keys(k_desc, v_desc, shared, block, used_k, BLOCK_K, COLUMNS, CHUNKS, V_CHUNKS)
    wait_for_last()  # for start and delta; k and v come meanwhile
    dout_tails = gl.to_tensor(0)
    for n in range(block.steps(group)):
        h, q_block = block.place(n, group)
        row = q_block * BLOCK_Q
        place = block.rows_number(h, h_q, q_blocks, q_block) * BLOCK_Q
        q_tails = load_rows(
            q_desc, start_desc, shared.q_ring, shared.starts, q_tails, n, block, h, row, place, used_q,
            BLOCK_Q, COLUMNS, CHUNKS,
        )  # fmt: skip
        dout_tails = load_rows(
            dout_desc, delta_desc, shared.dout_ring, shared.deltas, dout_tails, n, block, h, row, place, used_q,
            BLOCK_Q, COLUMNS, V_CHUNKS,
        )  # fmt: skip
