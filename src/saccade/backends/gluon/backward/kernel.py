"""The Hopper backward up to d = 128: a program owns 128 keys of a head at a time and walks over the rows that see them.

Five groups of warps share the work. One warp loads tiles of q and dout. Two consumers own 64 keys each, whose dk and dv
stay there: `s = k q^T`, `p = exp(s - lse)`, `dp = v dout^T`, `ds = p (dp - delta)`, `dv += p dout`, `dk += ds q`:
everything transposed so that p and ds are left operands without a detour. dq needs the ds of both consumers, which
therefore also goes through shared memory; each consumer takes a half of `dq = ds^T k`, and a warp of its own adds that
half to global memory in bulk. All query heads of a group pass through one program, so dk and dv need no addition.

Programs stay on their multiprocessors and take one block of keys after the other, so that the next k is loaded while
the last one is in use, and the next q and dout while the last dk and dv leave.

A consumer's step i: issue s(i) and dq(i - 1); exp2 while dq(i - 1) runs; hand dq(i - 1) over; issue dp(i) and dv; ds
while dv runs; issue dk. Taking dq one step later lets the consumers drift half a step apart, where a barrier between
`ds` and `dq` would make them meet. docs/findings/gluon_backward.md has what each choice was worth.

Products are accumulated onto -lse / scale and -delta instead of zeros where that is cheaper (FOLD), and the mask is
part of that start. Blocks with and without the mask have loops of their own: a branch between products in flight cost
the forward 8 % even where it was not taken. Nothing is taken out of the loops (disable_licm): the addresses that LLVM
would compute before them occupy registers, and others spill.
"""

# pyright: reportArgumentType=false, reportCallIssue=false

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from saccade.backends.device.dropout import factor, opened
from saccade.backends.device.records import LOG2E
from saccade.backends.device.tiles import logits, power
from saccade.backends.gluon.backward.dq_accum import to_register_order
from saccade.backends.gluon.backward.dq_semaphore import acquire, release
from saccade.backends.gluon.backward.epilogue import store_keys
from saccade.backends.gluon.backward.kv_block import following, hidden, onto
from saccade.backends.gluon.backward.load_persistent import load_items
from saccade.backends.gluon.backward.pipeline import DOUT_EMPTY, Q_EMPTY, DSExchange, Outbox
from saccade.backends.gluon.backward.tile_scheduler import BATCH, NUMBERS, block_of
from saccade.backends.gluon.dropout import bent, dropped, gradient, kept
from saccade.backends.gluon.pipeline import Ring, Slots, new_barriers, new_ring
from saccade.backends.gluon.ptx import wait_until_written
from saccade.backends.gluon.shim import aggregate, start_next, tma_reduce_add, wait_for_last

BLOCK_K = gl.constexpr(128)
"""Keys of one program, 64 for each consumer."""
THREADS = gl.constexpr(288)
"""Two consumers and the warp that loads."""
SLOTS = gl.constexpr(2)
"""Places for k, and for the record of what a block of keys is, of blocks in use."""


@aggregate
class Shared:
    """What the groups of warps share."""

    q_ring: Ring
    dout_ring: Ring
    keys: Slots
    k_tiles: gl.shared_memory_descriptor
    v_tiles: gl.shared_memory_descriptor
    values_empty: gl.shared_memory_descriptor
    starts: gl.shared_memory_descriptor
    deltas: gl.shared_memory_descriptor
    shares: DSExchange
    outbox: Outbox

    @gluon.constexpr_function
    def __init__(self, q_ring, dout_ring, keys, k_tiles, v_tiles, values_empty, starts, deltas, shares, outbox):
        self.q_ring = q_ring
        self.dout_ring = dout_ring
        self.keys = keys
        self.k_tiles = k_tiles
        self.v_tiles = v_tiles
        self.values_empty = values_empty
        self.starts = starts
        self.deltas = deltas
        self.shares = shares
        self.outbox = outbox


@gluon.jit
def dq_tile(c: gl.constexpr, n, block, group, h_q, q_blocks):
    """Which tile of dq_accum consumer c's half of dq of step n is."""
    h, q_block = block.place(n, group)
    return block.rows_number(h, h_q, q_blocks, q_block) * 2 + c


@gluon.jit
def reduce(c: gl.constexpr, sum_desc, shared, mask, used_k, semaphore, group, h_q, q_blocks):
    """Adds consumer c's halves of dq to global memory, of one item after the other."""
    wait_for_last()  # for the zeros that dq is added to
    item = gl.to_tensor(0)
    shared.keys.wait(0)
    while shared.keys.get(shared.keys.record_of(item), BATCH) >= 0:
        block = block_of(shared.keys, shared.keys.record_of(item), mask, used_k)
        shared.keys.release(item)
        add_all(c, sum_desc, shared.outbox, block, block.steps(group), semaphore, group, h_q, q_blocks)
        item += 1
        shared.keys.wait(item)


@gluon.jit
def add_all(c: gl.constexpr, sum_desc, outbox, block, steps, semaphore, group, h_q, q_blocks):
    """Adds consumer c's halves of dq of so many steps of a block."""
    for n in range(steps):
        tile = dq_tile(c, n, block, group, h_q, q_blocks)
        if semaphore is not None:
            acquire(semaphore, tile, block, block.place(n, group)[1], q_blocks, BLOCK_K, 1)
        outbox.receive(c)
        tma_reduce_add(sum_desc, [tile, 0], outbox.tiles.index(c))
        tma.store_wait(0)
        outbox.clear(c)
        if semaphore is not None and n > 0:
            wait_until_written(1)
            release(semaphore, dq_tile(c, n - 1, block, group, h_q, q_blocks))
    if semaphore is not None:
        wait_until_written(0)
        release(semaphore, dq_tile(c, steps - 1, block, group, h_q, q_blocks))


@gluon.jit
def own_rows(c: gl.constexpr, tiles, slot):
    """Consumer c's 64 rows of k or v, [64, BLOCK_D]."""
    return tiles.index(slot).reshape([BLOCK_K, tiles.shape[4]]).slice(c * 64, 64, 0)


@gluon.jit
def issue_dq(c: gl.constexpr, shared, slot, n, BLOCK_Q: gl.constexpr, BLOCK_D: gl.constexpr):
    """Starts consumer c's half of dq = ds^T k of step n: of its 128 rows, or of the columns of its 64."""
    COLUMNS: gl.constexpr = BLOCK_D * BLOCK_Q // 128
    # [64, COLUMNS]
    dq = gl.zeros([64, COLUMNS], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16]))
    # [BLOCK_K, BLOCK_Q]
    ds = shared.shares.tiles.index(n & 1)
    # [BLOCK_K, BLOCK_D]
    k = shared.k_tiles.index(slot).reshape([BLOCK_K, BLOCK_D])
    if BLOCK_Q == 128:
        ds = ds.slice(c * 64, 64, 1)
    else:
        k = k.slice(c * COLUMNS, COLUMNS, 1)
    return warpgroup_mma(ds.permute((1, 0)), k, dq, use_acc=False, is_async=True)


@gluon.jit
def step(
    c: gl.constexpr, dk, dv, start, n, first, end, slot, shared, block, mask, score, dropout, h, row, kv_idx, scale,
    BLOCK_Q: gl.constexpr, FOLD: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """One more block of rows, of those from `first` to `end`: its dk and dv, and dq of the step before. Returns dk, dv
    and the next step's start."""
    DTYPE: gl.constexpr = shared.k_tiles.dtype
    BLOCK_D: gl.constexpr = dk.shape[1]
    BLOCK_DV: gl.constexpr = dv.shape[1]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_Q, 16])
    columns: gl.constexpr = gl.SliceLayout(0, s_layout)
    zero = gl.zeros([64, BLOCK_Q], gl.float32, s_layout)
    stage = n % 2
    # [64, BLOCK_D]
    k = own_rows(c, shared.k_tiles, slot)
    # [64, BLOCK_DV]
    v = own_rows(c, shared.v_tiles, slot % shared.v_tiles.shape[0])
    # [BLOCK_Q, BLOCK_D]
    q = shared.q_ring.tiles.index(stage).reshape([BLOCK_Q, BLOCK_D])
    # [BLOCK_Q, BLOCK_DV]
    dout = shared.dout_ring.tiles.index(stage).reshape([BLOCK_Q, BLOCK_DV])
    # s and p: [64, BLOCK_Q]
    if FOLD:
        s = onto(start, zero)
        if MASKED:
            s = hidden(s, mask, block, h, row, kv_idx)
        s = warpgroup_mma(k, q.permute((1, 0)), s, is_async=True)
    else:
        shared.q_ring.wait(n)
        s = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
    shared.shares.take(c, n - 1)
    dq = issue_dq(c, shared, slot, n - 1, BLOCK_Q, BLOCK_D)
    s = warpgroup_mma_wait(1, [s])
    if FOLD:
        p = gl.exp2(s * (scale * LOG2E))
    else:
        q_idx = row + gl.arange(0, BLOCK_Q, columns)
        x = logits(s, score, scale, block.b, h, q_idx[None, :], kv_idx[:, None])
        x += gl.expand_dims(shared.starts.index(stage).load(columns), 0)
        if MASKED:
            x = hidden(x, mask, block, h, row, kv_idx)
        p = power(x, score)
    weights = p
    if dropout is not None:
        p = dropped(p, dropout, block.b, h, row, kv_idx, True)
        weights = kept(p)
    p_operand = gl.convert_layout(weights.to(DTYPE), gl.DotOperandLayout(0, dv.type.layout, 2))
    if not score.steady:  # at scores that nobody sees it may be anything
        slope = score.slope(score.data, s * scale, block.b, h, q_idx[None, :], kv_idx[:, None])
        p = bent(p, slope, dropout is not None)
    dq = warpgroup_mma_wait(0, [dq])
    if n > first:
        shared.outbox.claim(c, n - 1)
        shared.outbox.send(c, to_register_order(dq))
    shared.dout_ring.wait(n)
    # dp and ds: [64, BLOCK_Q]
    if FOLD:
        dp = onto(shared.deltas.index(stage).load(columns), zero)
        dp = warpgroup_mma(v, dout.permute((1, 0)), dp, is_async=True)
    else:
        dp = warpgroup_mma(v, dout.permute((1, 0)), zero, use_acc=False, is_async=True)
    dv = warpgroup_mma(p_operand, dout, dv, is_async=True)
    dp = warpgroup_mma_wait(1, [dp])
    if dropout is not None:
        delta = gl.expand_dims(shared.deltas.index(stage).load(columns), 0)
        ds = gradient(p, dp, delta, factor(dropout)).to(DTYPE)
    else:
        if not FOLD:
            dp += gl.expand_dims(shared.deltas.index(stage).load(columns), 0)
        ds = (p * dp).to(DTYPE)
    ds_operand = gl.convert_layout(ds, gl.DotOperandLayout(0, dk.type.layout, 2))
    shared.shares.tile(c, n).store(ds)
    fence_async_shared()
    shared.shares.give(c, n)
    dk = warpgroup_mma(ds_operand, q, dk, is_async=True)
    dv = warpgroup_mma_wait(1, [dv])
    shared.dout_ring.release(n)
    if FOLD:
        start = shared.starts.index(shared.q_ring.wait(n + 1, n + 1 < end)).load(columns)
    dk = warpgroup_mma_wait(0, [dk])
    shared.q_ring.release(n)
    return dk, dv, start


@gluon.jit
def all_steps(
    c: gl.constexpr, dk, dv, first, end, slot, shared, block, mask, score, dropout, group, kv_idx, scale,
    BLOCK_Q: gl.constexpr, FOLD: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """The steps of a block, those with the mask first. Returns dk and dv."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_Q, 16])
    # [BLOCK_Q]
    start = gl.zeros([BLOCK_Q], gl.float32, gl.SliceLayout(0, s_layout))
    if FOLD:
        start = shared.starts.index(shared.q_ring.wait(first)).load(start.type.layout)
    if MASKED:
        masked = first + block.edges(group)
        blocks = block.edges(1)
        h = block.share * group
        i = gl.to_tensor(0)
        for n in tl.range(first, masked, disable_licm=True):
            dk, dv, start = step(
                c, dk, dv, start, n, first, end, slot, shared, block, mask, score, dropout, h, block.edge(i) * BLOCK_Q,
                kv_idx, scale, BLOCK_Q, FOLD, True,
            )  # fmt: skip
            h, i = following(h, i, blocks)
        blocks = block.steps(1) - blocks
        h = block.share * group
        i = gl.to_tensor(0)
        for n in tl.range(masked, end, disable_licm=True):
            dk, dv, start = step(
                c, dk, dv, start, n, first, end, slot, shared, block, mask, score, dropout, h, block.inner(i) * BLOCK_Q,
                kv_idx, scale, BLOCK_Q, FOLD, False,
            )  # fmt: skip
            h, i = following(h, i, blocks)
    else:
        for n in tl.range(first, end, disable_licm=True):
            h, q_block = block.place(n - first, group)
            dk, dv, start = step(
                c, dk, dv, start, n, first, end, slot, shared, block, mask, score, dropout, h, q_block * BLOCK_Q,
                kv_idx, scale, BLOCK_Q, FOLD, False,
            )  # fmt: skip
    return dk, dv


@gluon.jit
def consume(
    c: gl.constexpr, dk_desc, dv_desc, dk_rows, dv_rows, shared, mask, used_k, score, dropout, group, scale,
    BLOCK_Q: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, FOLD: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Consumer c: dk and dv of its 64 keys, and its half of every dq, of one item after the other. Steps count on from
    item to item, as all that warps hand over does."""
    if dropout is not None:
        dropout = opened(dropout)
    wait_for_last()
    n = gl.to_tensor(0)
    item = gl.to_tensor(0)
    shared.keys.wait(0)
    while shared.keys.get(shared.keys.record_of(item), BATCH) >= 0:
        block = block_of(shared.keys, shared.keys.record_of(item), mask, used_k)
        n = consume_block(
            c, dk_desc, dv_desc, dk_rows, dv_rows, shared, block, item, n, mask, used_k, score, dropout, group, scale,
            BLOCK_Q, BLOCK_D, BLOCK_DV, FOLD, MASKED,
        )  # fmt: skip
        item += 1
        shared.keys.wait(item)
    tma.store_wait(0)


@gluon.jit
def consume_block(
    c: gl.constexpr, dk_desc, dv_desc, dk_rows, dv_rows, shared, block, item, first, mask, used_k, score, dropout,
    group, scale, BLOCK_Q: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, FOLD: gl.constexpr,
    MASKED: gl.constexpr,
):  # fmt: skip
    """One block of keys, whose first step is `first`. Returns the step behind its last."""
    DTYPE: gl.constexpr = shared.k_tiles.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_Q, 16])
    k_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    v_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_DV, 16])
    # [64, BLOCK_D]
    dk = gl.zeros([64, BLOCK_D], gl.float32, k_layout)
    # [64, BLOCK_DV]
    dv = gl.zeros([64, BLOCK_DV], gl.float32, v_layout)
    # [64]
    kv_idx = block.start + c * 64 + gl.arange(0, 64, gl.SliceLayout(1, s_layout))
    end = first + block.steps(group)
    slot = item % SLOTS
    v_slot = slot % shared.v_tiles.shape[0]
    shared.shares.give(c, first - 1)
    if item > 0:  # the last dk has left
        tma.store_wait(0)
        shared.keys.release(item - 1)
    dk, dv = all_steps(
        c, dk, dv, first, end, slot, shared, block, mask, score, dropout, group, kv_idx, scale, BLOCK_Q, FOLD, MASKED
    )
    shared.shares.take(c, end - 1)
    dq = issue_dq(c, shared, slot, end - 1, BLOCK_Q, BLOCK_D)
    if dropout is not None:
        dv *= factor(dropout)
    block = block_of(shared.keys, shared.keys.record_of(item), mask, used_k)  # once more: the loops need the registers
    own_rows(c, shared.v_tiles, v_slot).store(dv.to(DTYPE))
    fence_async_shared()
    leaving = shared.v_tiles.index(v_slot).slice(c * 64, 64, 2)
    store_keys(dv_desc, dv_rows, leaving, own_rows(c, shared.v_tiles, v_slot), block, block.start + c * 64, 0)
    dq = warpgroup_mma_wait(0, [dq])
    shared.outbox.claim(c, end - 1)
    shared.outbox.send(c, to_register_order(dq))
    # Both consumers have read all of k when both have come here.
    shared.shares.give(c, end)
    shared.shares.take(c, end)
    if shared.v_tiles.shape[0] == 1:
        tma.store_wait(0)
        mbarrier.arrive(shared.values_empty, count=1)
    own_rows(c, shared.k_tiles, slot).store((dk * scale).to(DTYPE))
    fence_async_shared()
    leaving = shared.k_tiles.index(slot).slice(c * 64, 64, 2)
    store_keys(dk_desc, dk_rows, leaving, own_rows(c, shared.k_tiles, slot), block, block.start + c * 64, 0)
    return end


@gluon.jit(do_not_specialize=["group", "h_q", "s_q", "s_k", "q_blocks"])
def backward_kernel(
    q_desc, k_desc, v_desc, dout_desc, dk_desc, dv_desc, start_desc, delta_desc, sum_desc, dk_rows, dv_rows, counter,
    used_q, used_k, mask, score, dropout, order, semaphore, group, h_q, s_q, s_k, q_blocks, scale,
    BLOCK_Q: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, FOLD: gl.constexpr, MASKED: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, OTHER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """dk, dv, and dq_accum += ds^T k.

    q, dout: (b, h_q, s_q, d) in tiles of BLOCK_Q rows; k, v, dk, dv: (b, h_k, s_k, d) in tiles of 64 rows. start and
    delta: what `preprocess_kernel` made. sum_desc: dq_accum, in tiles as `to_register_order` makes
    them, two for each block of rows. dk_rows and dv_rows: dk and dv once more: packed, else None. semaphore: None where
    they may be added to in any order.
    counter: two zeros, which are zeros again in the end.
    """
    DTYPE: gl.constexpr = q_desc.dtype
    DS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([128, BLOCK_Q], DTYPE)
    RECORDS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    # As much as there is room for: v has two places where its rows are short.
    V_SLOTS: gl.constexpr = SLOTS if BLOCK_DV == 64 else 1
    q_tiles = gl.allocate_shared_memory(DTYPE, [2, 1, 1, BLOCK_Q, BLOCK_D], q_desc.layout)
    dout_tiles = gl.allocate_shared_memory(DTYPE, [2, 1, 1, BLOCK_Q, BLOCK_DV], dout_desc.layout)
    k_tiles = gl.allocate_shared_memory(DTYPE, [SLOTS, 1, 1, BLOCK_K, BLOCK_D], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(DTYPE, [V_SLOTS, 1, 1, BLOCK_K, BLOCK_DV], v_desc.layout)
    dq_tiles = gl.allocate_shared_memory(gl.float32, [2, 1, BLOCK_Q * BLOCK_D // 2], sum_desc.layout)
    records = gl.allocate_shared_memory(gl.int32, [(SLOTS + 1) * NUMBERS, 1], RECORDS)
    # Of an item: both consumers, and the warps that send what they make, need the record.
    keys = Slots(k_tiles, records, new_barriers(SLOTS + 1, 1), new_barriers(SLOTS, 4), SLOTS, NUMBERS, 1)
    shared = Shared(
        new_ring(q_tiles, Q_EMPTY, 2, THREADS),
        new_ring(dout_tiles, DOUT_EMPTY, 2, THREADS),
        keys,
        k_tiles,
        v_tiles,
        new_barriers(1, 2).index(0),
        gl.allocate_shared_memory(gl.float32, [2, BLOCK_Q], start_desc.layout),
        gl.allocate_shared_memory(gl.float32, [2, BLOCK_Q], delta_desc.layout),
        DSExchange(gl.allocate_shared_memory(DTYPE, [2, BLOCK_K, BLOCK_Q], DS)),
        Outbox(dq_tiles, new_barriers(2, 1)),
    )
    start_next()
    gl.warp_specialize([
        (consume, (
            0, dk_desc, dv_desc, dk_rows, dv_rows, shared, mask, used_k, score, dropout, group, scale,
            BLOCK_Q, BLOCK_D, BLOCK_DV, FOLD, MASKED,
        )),
        (consume, (
            1, dk_desc, dv_desc, dk_rows, dv_rows, shared, mask, used_k, score, dropout, group, scale,
            BLOCK_Q, BLOCK_D, BLOCK_DV, FOLD, MASKED,
        )),
        (load_items, (
            q_desc, dout_desc, k_desc, v_desc, start_desc, delta_desc, shared, counter, order, mask, used_q, used_k,
            group, h_q, s_q, s_k, q_blocks, BLOCK_Q, BLOCK_K, BLOCK_D, BLOCK_DV, semaphore is not None,
        )),
        (reduce, (0, sum_desc, shared, mask, used_k, semaphore, group, h_q, q_blocks)),
        (reduce, (1, sum_desc, shared, mask, used_k, semaphore, group, h_q, q_blocks)),
    ], [4, 1, 1, 1], [CONSUMER_REGISTERS, OTHER_REGISTERS, OTHER_REGISTERS, OTHER_REGISTERS])  # fmt: skip
