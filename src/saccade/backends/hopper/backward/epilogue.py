"""The backward's stores: dk, dv and dq, the sums of a group's shares, and zeros that others add to."""

# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from saccade.backends.device.tiles import head, load_tile, store_tile
from saccade.backends.hopper.backward.dq import acquire, release
from saccade.backends.hopper.backward.kv_block import KVBlocks
from saccade.backends.hopper.backward.tile_scheduler import has_work, read_record
from saccade.backends.hopper.ptx import wait_until_written
from saccade.backends.hopper.shim import tma_reduce_add, tma_store, wait_for_last
from saccade.backends.hopper.tiles import store_rows

# The stores: dk and dv in whole tiles, the last one of a packed sequence row by row; dq goes to its accumulator.


@gluon.jit
def store_keys(desc, x, tile, rows, block, key, COLUMN: gl.constexpr):
    """Writes a tile, [1, 1, 64, columns] and once more [64, columns], to the keys from `key` on, from COLUMN on.

    x: the tensor itself where sequences are packed: after the rows of one is the next, where a bulk copy would go on.
    Else None.
    """
    b, at = block.row_of_k(key)
    if x is None:
        tma_store(desc, [b, block.share, at, COLUMN], tile)
    else:
        there = block.packed.there - key
        if there >= 64:
            tma_store(desc, [b, block.share, at, COLUMN], tile)
        else:
            store_rows(rows, x, block.share, at, there, block.share + 1, rows.shape[1], 64, COLUMN)


@gluon.jit
def dq_tile(c: gl.constexpr, n, block, args):
    """Which tile of dq_accum consumer c's half of dq of step n is."""
    h, q_block = block.step_at(n, args.group)
    return block.q_block_number(h, q_block, args.h_q, args.kv_blocks.q_blocks) * 2 + c


@gluon.jit
def store_ds(c: gl.constexpr, desc, tile, n, block, args):
    """Stores ds of consumer c's keys and the rows of step n, where it is the gradient of a captured tensor."""
    h, q_block = block.step_at(n, args.group)
    b = block.b if args.gradient.per_batch_row else block.b * 0
    h = h if args.gradient.per_head else h * 0
    tma_store(desc, [b, h, q_block * args.kv_blocks.BLOCK_Q, block.start + c * 64], tile)


@gluon.jit
def store_dq(c: gl.constexpr, desc, tile, n, block, args):
    """Stores consumer c's half of dq of step n: 64 of its 128 rows, or of its 128 columns."""
    BLOCK_Q: gl.constexpr = args.kv_blocks.BLOCK_Q
    ROW: gl.constexpr = c * (BLOCK_Q - 64)
    h, q_block = block.step_at(n, args.group)
    tma_store(desc, [block.b, h, q_block * BLOCK_Q + ROW, c * 64 - ROW], tile)


@gluon.jit
def reduce_dq(c: gl.constexpr, dq_desc, gradient_desc, shared, args):
    """Adds consumer c's halves of dq to global memory, or stores them, of one item after the other, and stores its ds
    if there is a `gradient_desc`."""
    wait_for_last()  # for the zeros that dq is added to
    item = gl.to_tensor(0)
    first = gl.to_tensor(0)
    shared.items.wait(0)
    while has_work(shared.items, item):
        block = read_record(shared.items, item, args.kv_blocks)
        shared.items.release(item)
        steps = block.steps(args.group)
        reduce_steps(c, dq_desc, gradient_desc, shared, block, first, steps, args)
        if gradient_desc is not None:
            first += steps
        item += 1
        shared.items.wait(item)


@gluon.jit
def reduce_steps(c: gl.constexpr, dq_desc, gradient_desc, shared, block, first, steps, args):
    """Adds consumer c's halves of dq of so many steps of a block, of which `first` is the first."""
    outbox = shared.outbox
    # A box is what the second consumer makes: it may have fewer rows.
    BOX: gl.constexpr = dq_desc.block_shape[0]
    ROWS: gl.constexpr = outbox.tiles.shape[1]
    COPIES: gl.constexpr = ROWS // BOX if c == 0 else 1
    semaphore = args.dq_semaphore
    for n in range(steps):
        tile = dq_tile(c, n, block, args)
        if semaphore is not None:
            acquire(semaphore, tile, args.kv_blocks, block, block.step_at(n, args.group)[1], 1)
        outbox.receive(c)
        if gradient_desc is not None:
            # dq was made of it: all of it is there. The consumer overwrites it after the wait for the next place.
            store_ds(c, gradient_desc, shared.ds.part(c, first + n), n, block, args)
        if outbox.DIRECT:
            store_dq(c, dq_desc, outbox.tiles.index(c), n, block, args)
        else:
            for i in gl.static_range(COPIES):
                tma_reduce_add(dq_desc, [tile * ROWS + i * BOX, 0], outbox.tiles.index(c).slice(i * BOX, BOX, 0))
        tma.store_wait(0)
        outbox.clear(c)
        if semaphore is not None and n > 0:
            wait_until_written(1)
            release(semaphore, dq_tile(c, n - 1, block, args))
    if semaphore is not None:
        wait_until_written(0)
        release(semaphore, dq_tile(c, steps - 1, block, args))


# dk and dv where each share of a group of query heads has its own: their sums, both in one launch.


TILE = 4096
"""Numbers of one program."""


@triton.jit(do_not_specialize=["shares", "h_k", "s_k"])
def share_sums_kernel(
    dk_shares, dv_shares, dk, dv, shares, h_k, s_k,
    D: tl.constexpr, D_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """ROWS rows of one head of dk, and of dv: the sum of those of `shares` heads, in their order, in float32."""
    if tl.program_id(1) == 0:
        _add_shares(dk_shares, dk, shares, h_k, s_k, D, BLOCK_D, ROWS)
    else:
        _add_shares(dv_shares, dv, shares, h_k, s_k, D_V, BLOCK_DV, ROWS)


@triton.jit
def _add_shares(x, total, shares, h_k, s_k, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr):
    blocks = tl.cdiv(s_k, ROWS)
    bh = tl.program_id(0) // blocks
    start = tl.program_id(0) % blocks * ROWS
    b = bh // h_k
    h = bh % h_k
    # [ROWS, BLOCK_D]
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for i in range(shares):
        acc += load_tile(x, head(x, b, h * shares + i), start, s_k, ROWS, D, BLOCK_D, True).to(tl.float32)
    store_tile(total, head(total, b, h), start, s_k, acc, ROWS, D, BLOCK_D)


# Zeros in a captured tensor's gradient, where the main kernel stores the rest.


UNIT = gl.constexpr(8)
"""Keys of one store, of which the call has a multiple."""
CHUNK = 16
"""Q blocks of one program."""


@gluon.jit(do_not_specialize=["blocks", "q_blocks", "heads", "s_q", "s_k", "stride_b", "stride_h", "stride_s"])
def clear_kernel(
    gradient, mask, span_q, span_k, blocks, q_blocks, heads, s_q, s_k, stride_b, stride_h, stride_s,
    BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Clears those of ROWS q blocks of one head that do not see one kv block: what `backward_kernel` leaves out.

    gradient: 16-bit (b, heads, s_q, s_k), whose rows begin at multiples of 16 bytes.
    """
    # As the compiler is to know.
    s_k = s_k // UNIT * UNIT
    stride_b = stride_b // UNIT * UNIT
    stride_h = stride_h // UNIT * UNIT
    stride_s = stride_s // UNIT * UNIT
    b = gl.program_id(0) // (blocks * heads)
    h = gl.program_id(0) // blocks % heads
    kv_blocks = KVBlocks(mask, span_q, span_k, s_q, s_k, q_blocks, BLOCK_Q, BLOCK_K, None, False)
    block = kv_blocks.at(b, h, h, gl.program_id(0) % blocks * BLOCK_K, None)
    head = gradient + b.to(gl.int64) * stride_b + h.to(gl.int64) * stride_h
    layout: gl.constexpr = gl.BlockedLayout([1, UNIT], [2, 16], [gl.num_warps(), 1], [1, 0])
    kv_idx = block.start + gl.arange(0, BLOCK_K, gl.SliceLayout(0, layout))[None, :]
    start = gl.program_id(1) * ROWS
    zero = gl.zeros([BLOCK_Q, BLOCK_K], gradient.dtype.element_ty, layout)
    for i in range(start, gl.minimum(start + ROWS, q_blocks)):
        if (i < block.first) | (i >= block.end):
            q_idx = i * BLOCK_Q + gl.arange(0, BLOCK_Q, gl.SliceLayout(1, layout))[:, None]
            offset = head + q_idx.to(gl.int64) * stride_s + kv_idx
            gl.store(offset, zero, mask=(q_idx < s_q) & (kv_idx < s_k))
