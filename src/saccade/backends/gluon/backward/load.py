"""The producer of a backward program that has one block of keys: one warp that brings in k and v, and then q and dout.

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
def start_rows(
    desc, numbers_desc, ring, numbers, n, whole, block, h, row, place,
    BLOCK_Q: gl.constexpr, COLUMNS: gl.constexpr, CHUNKS: gl.constexpr,
):  # fmt: skip
    """Starts the copies of BLOCK_Q rows of one head, and of what goes with them, to stage n of a ring; `end_rows` has
    to follow. The two are apart so that a tile of q and one of dout land at the same time."""
    stage = ring.claim(n)
    barrier = ring.target(stage, whole)
    mbarrier.expect(barrier, BLOCK_Q * (2 * COLUMNS * CHUNKS + 4))
    b, at = block.rows_at(row)
    copy(desc, b, h, at, barrier, ring.tiles, ring.first_of(stage), COLUMNS, CHUNKS)
    tma_load(numbers_desc, [place], barrier, numbers.index(stage))


@gluon.jit
def end_rows(ring, n, whole, tails, used, BLOCK_Q: gl.constexpr, COLUMNS: gl.constexpr, CHUNKS: gl.constexpr):
    """Clears the rows from `used` on in stage n, unless all are in use. Returns tails, counted on."""
    if not whole:
        stage = n % ring.STAGES
        mbarrier.wait(ring.landing(), tails & 1)
        clear(ring.tiles, ring.first_of(stage), used, BLOCK_Q, COLUMNS, CHUNKS)
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
        whole = used_q is None or row + BLOCK_Q <= block.rows
        start_rows(
            q_desc, start_desc, shared.q_ring, shared.starts, n, whole, block, h, row, place, BLOCK_Q, COLUMNS, CHUNKS
        )
        start_rows(
            dout_desc, delta_desc, shared.dout_ring, shared.deltas, n, whole, block, h, row, place,
            BLOCK_Q, COLUMNS, V_CHUNKS,
        )  # fmt: skip
        used = block.rows - row
        q_tails = end_rows(shared.q_ring, n, whole, q_tails, used, BLOCK_Q, COLUMNS, CHUNKS)
        dout_tails = end_rows(shared.dout_ring, n, whole, dout_tails, used, BLOCK_Q, COLUMNS, V_CHUNKS)
