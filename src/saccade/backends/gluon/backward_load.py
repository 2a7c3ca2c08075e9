"""The producer of the backward: one warp that brings in k and v, and q and dout block by block of rows.

A tile has its columns in CHUNKS side by side, each of COLUMNS of them. One that ends in rows which are not in use lands
for the producer alone, and is cleared before anyone else sees it.
"""

# pyright: reportArgumentType=false, reportCallIssue=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from saccade.backends.gluon.key_items import close, first_item, items_of, next_item, put_block
from saccade.backends.gluon.key_work import key_block
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


@gluon.jit
def load_next_keys(k_desc, shared, drawn, tails, block, used_k, BLOCK_K: gl.constexpr, COLUMNS: gl.constexpr):
    """Fills the slot of item `drawn` with k. Returns tails, counted on."""
    slot = shared.keys.claim(drawn)
    tile = shared.keys.tiles.index(slot)
    full = shared.keys.full.index(slot)
    b, at = block.keys_at(block.start)
    if used_k is None or block.start + BLOCK_K <= block.keys:
        mbarrier.expect(full, BLOCK_K * COLUMNS * 2)
        tma_load(k_desc, [b, block.h_k, at, 0], full, tile)
    else:
        tails = load_tail(k_desc, shared.q_ring, tile, tails, b, at, block, BLOCK_K, COLUMNS)
        mbarrier.arrive(full, count=1)
    return tails


@gluon.jit
def load_tail(desc, ring, tile, tails, b, at, block, BLOCK_K: gl.constexpr, COLUMNS: gl.constexpr):
    """Fills a tile of k or v whose last rows are not in use, and waits for it. Returns tails, counted on."""
    landing = ring.landing()
    mbarrier.expect(landing, BLOCK_K * COLUMNS * 2)
    tma_load(desc, [b, block.h_k, at, 0], landing, tile)
    mbarrier.wait(landing, tails & 1)
    zero_tail(tile.reshape([BLOCK_K, COLUMNS]), block.keys - block.start, BLOCK_K, COLUMNS)
    return tails + 1


@gluon.jit
def load_dout(
    v_desc, dout_desc, numbers_desc, shared, drawn, i, tails, n, block, h, row, place, used_q, used_k,
    BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    """Fills stage n of dout's ring for step i of item `drawn`, and v with the first one, so that who waits for that
    need not wait for v. Returns tails, counted on."""
    BYTES: gl.constexpr = BLOCK_Q * (2 * COLUMNS + 4)
    V_BYTES: gl.constexpr = BLOCK_K * COLUMNS * 2
    ring = shared.dout_ring
    v_tile = shared.v_tiles.index(0)
    # Clearing waits for copies: v then comes before dout, and not with it.
    rows_whole = used_q is None or row + BLOCK_Q <= block.rows
    keys_whole = used_k is None or block.start + BLOCK_K <= block.keys
    v_b, v_at = block.keys_at(block.start)
    if i == 0:
        mbarrier.wait(shared.values_empty, (drawn & 1) ^ 1)
        if not (rows_whole and keys_whole):
            tails = load_tail(v_desc, ring, v_tile, tails, v_b, v_at, block, BLOCK_K, COLUMNS)
    stage = ring.claim(n)
    tile = ring.tiles.index(stage)
    b, at = block.rows_at(row)
    if rows_whole:
        full = ring.full.index(stage)
        if (i == 0) & keys_whole:
            mbarrier.expect(full, BYTES + V_BYTES)
            tma_load(v_desc, [v_b, block.h_k, v_at, 0], full, v_tile)
        else:
            mbarrier.expect(full, BYTES)
        tma_load(dout_desc, [b, h, at, 0], full, tile)
        tma_load(numbers_desc, [place], full, shared.deltas.index(stage))
    else:
        landing = ring.landing()
        mbarrier.expect(landing, BYTES)
        tma_load(dout_desc, [b, h, at, 0], landing, tile)
        tma_load(numbers_desc, [place], landing, shared.deltas.index(stage))
        mbarrier.wait(landing, tails & 1)
        zero_tail(tile.reshape([BLOCK_Q, COLUMNS]), block.rows - row, BLOCK_Q, COLUMNS)
        ring.fill(stage)
        tails += 1
    return tails


@gluon.jit
def load_items(
    q_desc, dout_desc, k_desc, v_desc, start_desc, delta_desc, shared, counter, order, mask, used_q, used_k, group, h_q,
    s_q, s_k, q_blocks,
    BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, COLUMNS: gl.constexpr, V_COLUMNS: gl.constexpr, QUEUED: gl.constexpr,
):  # fmt: skip
    """The producer of programs that stay: draws items, and loads k and v of each, and what `load` does.

    k of the next item comes while this one is worked on. v, for which there is no second place, comes behind the next
    item's first q, as soon as the last dv has left from there; it is needed later than k.
    """
    n = gl.to_tensor(0)
    q_tails = gl.to_tensor(0)
    dout_tails = gl.to_tensor(0)
    drawn = gl.to_tensor(0)
    items = items_of(order, used_k)
    item = first_item(counter, QUEUED)
    while item < items:
        block = key_block(item, order, mask, used_q, used_k, s_q, s_k, q_blocks, BLOCK_Q, BLOCK_K, QUEUED)
        put_block(shared.keys, drawn, block, mask, used_k)
        q_tails = load_next_keys(k_desc, shared, drawn, q_tails, block, used_k, BLOCK_K, COLUMNS)
        wait_for_last()  # for start and delta; the first k comes meanwhile
        for i in range(block.steps(group)):
            h, q_block = block.place(i, group)
            row = q_block * BLOCK_Q
            place = block.rows_number(h, h_q, q_blocks, q_block) * BLOCK_Q
            q_tails = load_rows(
                q_desc, start_desc, shared.q_ring, shared.starts, q_tails, n, block, h, row, place, used_q,
                BLOCK_Q, COLUMNS, 1,
            )  # fmt: skip
            dout_tails = load_dout(
                v_desc, dout_desc, delta_desc, shared, drawn, i, dout_tails, n, block, h, row, place, used_q, used_k,
                BLOCK_Q, BLOCK_K, V_COLUMNS,
            )  # fmt: skip
            n += 1
        drawn += 1
        item = next_item(counter, QUEUED)
    close(counter, shared.keys, drawn)
