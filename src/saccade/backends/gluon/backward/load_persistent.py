"""The producer of backward programs that stay: one warp that draws blocks of keys and brings in what each one needs.

A tile that ends in rows which are not in use lands for the producer alone, as in `backward_load`.
"""

# pyright: reportArgumentType=false, reportCallIssue=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from saccade.backends.gluon.backward.load import end_rows, start_rows
from saccade.backends.gluon.backward.tile_scheduler import (
    close,
    find_kv_block,
    first_item,
    items_of,
    next_item,
    put_block,
)
from saccade.backends.gluon.shim import tma_load, wait_for_last
from saccade.backends.gluon.tiles import zero_tail


@gluon.jit
def start_keys(k_desc, v_desc, shared, drawn, whole, block, BLOCK_K: gl.constexpr, COLUMNS: gl.constexpr):
    """Starts the copies of k, and of v where it has as many places, to the slot of item `drawn`; `end_keys` has to
    follow."""
    WITH_V: gl.constexpr = shared.v_tiles.shape[0] > 1
    slot = shared.keys.claim(drawn)
    barrier = shared.keys.target(slot, whole)
    mbarrier.expect(barrier, BLOCK_K * COLUMNS * (4 if WITH_V else 2))
    b, at = block.keys_at(block.start)
    tma_load(k_desc, [b, block.h_k, at, 0], barrier, shared.keys.tiles.index(slot))
    if WITH_V:
        tma_load(v_desc, [b, block.h_k, at, 0], barrier, shared.v_tiles.index(slot))


@gluon.jit
def end_keys(shared, drawn, whole, tails, block, BLOCK_K: gl.constexpr, COLUMNS: gl.constexpr):
    """Clears what is not in use of k and v, as `end_rows`."""
    if not whole:
        slot = drawn % shared.keys.SLOTS
        mbarrier.wait(shared.keys.landing(), tails & 1)
        used = block.keys - block.start
        zero_tail(shared.keys.tiles.index(slot).reshape([BLOCK_K, COLUMNS]), used, BLOCK_K, COLUMNS)
        if shared.v_tiles.shape[0] > 1:
            zero_tail(shared.v_tiles.index(slot).reshape([BLOCK_K, COLUMNS]), used, BLOCK_K, COLUMNS)
        shared.keys.fill(slot)
        tails += 1
    return tails


@gluon.jit
def start_dout(
    v_desc, dout_desc, numbers_desc, shared, drawn, with_v, n, whole, block, h, row, place,
    BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    """Starts the copies of dout, as `start_rows`; `with_v` also that of v, to the same barrier, so that who waits for
    the one need not wait for the other."""
    BYTES: gl.constexpr = BLOCK_Q * (2 * COLUMNS + 4)
    V_BYTES: gl.constexpr = BLOCK_K * COLUMNS * 2
    ring = shared.dout_ring
    if with_v:
        mbarrier.wait(shared.values_empty, (drawn & 1) ^ 1)
    stage = ring.claim(n)
    barrier = ring.target(stage, whole)
    if with_v:
        mbarrier.expect(barrier, BYTES + V_BYTES)
        b, at = block.keys_at(block.start)
        tma_load(v_desc, [b, block.h_k, at, 0], barrier, shared.v_tiles.index(0))
    else:
        mbarrier.expect(barrier, BYTES)
    b, at = block.rows_at(row)
    tma_load(dout_desc, [b, h, at, 0], barrier, ring.tiles.index(stage))
    tma_load(numbers_desc, [place], barrier, shared.deltas.index(stage))


@gluon.jit
def end_dout(
    shared, with_v, n, whole, tails, block, row, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, COLUMNS: gl.constexpr
):
    """Clears what is not in use of dout, and of v, as `end_rows`."""
    if not whole:
        ring = shared.dout_ring
        stage = n % ring.STAGES
        mbarrier.wait(ring.landing(), tails & 1)
        if with_v:
            v_tile = shared.v_tiles.index(0).reshape([BLOCK_K, COLUMNS])
            zero_tail(v_tile, block.keys - block.start, BLOCK_K, COLUMNS)
        zero_tail(ring.tiles.index(stage).reshape([BLOCK_Q, COLUMNS]), block.rows - row, BLOCK_Q, COLUMNS)
        ring.fill(stage)
        tails += 1
    return tails


@gluon.jit
def load_items(
    q_desc, dout_desc, k_desc, v_desc, start_desc, delta_desc, shared, counter, order, mask, used_q, used_k, group, h_q,
    s_q, s_k, q_blocks,
    BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, COLUMNS: gl.constexpr, V_COLUMNS: gl.constexpr, QUEUED: gl.constexpr,
):  # fmt: skip
    """Draws items until there are no more, and loads what each of them needs.

    k of the next item comes while this one is worked on. So does v, or where there is no second place for it, behind
    the next item's first q, as soon as the last dv has left from there; it is needed later than k.
    """
    n = gl.to_tensor(0)
    key_tails = gl.to_tensor(0)
    q_tails = gl.to_tensor(0)
    dout_tails = gl.to_tensor(0)
    drawn = gl.to_tensor(0)
    items = items_of(order, used_k)
    item = first_item(counter, QUEUED)
    while item < items:
        block = find_kv_block(item, order, mask, used_q, used_k, s_q, s_k, q_blocks, BLOCK_Q, BLOCK_K, QUEUED)
        put_block(shared.keys, drawn, block, mask, used_k)
        keys_whole = used_k is None or block.start + BLOCK_K <= block.keys
        start_keys(k_desc, v_desc, shared, drawn, keys_whole, block, BLOCK_K, COLUMNS)
        wait_for_last()  # for start and delta; the first k comes meanwhile
        for i in range(block.steps(group)):
            h, q_block = block.place(i, group)
            row = q_block * BLOCK_Q
            place = block.rows_number(h, h_q, q_blocks, q_block) * BLOCK_Q
            whole = used_q is None or row + BLOCK_Q <= block.rows
            if shared.v_tiles.shape[0] > 1:
                with_v = False
                both = whole
            else:
                with_v = i == 0
                both = whole and (keys_whole or i > 0)
            start_rows(
                q_desc, start_desc, shared.q_ring, shared.starts, n, whole, block, h, row, place, BLOCK_Q, COLUMNS, 1
            )
            if i == 0:
                key_tails = end_keys(shared, drawn, keys_whole, key_tails, block, BLOCK_K, COLUMNS)
            start_dout(
                v_desc, dout_desc, delta_desc, shared, drawn, with_v, n, both, block, h, row, place,
                BLOCK_Q, BLOCK_K, V_COLUMNS,
            )  # fmt: skip
            q_tails = end_rows(shared.q_ring, n, whole, q_tails, block.rows - row, BLOCK_Q, COLUMNS, 1)
            dout_tails = end_dout(shared, with_v, n, both, dout_tails, block, row, BLOCK_Q, BLOCK_K, V_COLUMNS)
            n += 1
        drawn += 1
        item = next_item(counter, QUEUED)
    close(counter, shared.keys, drawn)
