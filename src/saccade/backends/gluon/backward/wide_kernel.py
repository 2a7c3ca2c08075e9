"""The Hopper backward for head dims above 128: a program owns 64 keys and walks over the query rows that see them.

dk and dv of 64 keys at d = 256 are half of a multiprocessor's registers, 128 of a thread in two consumers. So each of
them has one of the two sums, and the products are shared out so that none is computed twice:

    first consumer     s = k q^T      p = exp(s - lse)      dv += p dout     half of dq = ds^T k
    second consumer    dp = v dout^T  ds = p (dp - delta)   dk += ds q       the other half

p and ds are left operands straight from registers, as in the narrow kernel. p goes from the first to the second through
shared memory, in float32 and in the order of the registers, and ds comes back as the left operand of dq. That is all
that they say to one another. Both halves of dq are added to global memory from registers: shared memory has no room
for them beside two stages of q and of dout.

The first consumer's dq is one step late: s(i), exp2, p(i) handed over, dq(i - 1), dv. So what it waits for came long
ago, and while either consumer computes in registers, the other one's products keep the tensor cores busy.

Head dims are cut into chunks of 64 columns. Sums are tiles of 128 or 256 columns, or of 128 and 64 where a head dim
takes 192: a tuple of one or of two tiles.
"""

# No `from __future__ import annotations` here: an aggregate reads its fields' types.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

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
from saccade.backends.gluon.backward.dq_accum import PIECE, add_dq, from_register_order, to_register_order
from saccade.backends.gluon.backward.dq_semaphore import acquire, release_fenced
from saccade.backends.gluon.backward.epilogue import store_keys
from saccade.backends.gluon.backward.kv_block import following, hidden, onto
from saccade.backends.gluon.backward.load import load
from saccade.backends.gluon.backward.pipeline import DOUT_EMPTY, Q_EMPTY, PDSExchange
from saccade.backends.gluon.backward.tile_scheduler import find_kv_block
from saccade.backends.gluon.dropout import bent, dropped, gradient, kept
from saccade.backends.gluon.pipeline import Ring, new_barriers, new_ring
from saccade.backends.gluon.ptx import uniform
from saccade.backends.gluon.shim import aggregate, start_next, view, wait_for_last

BLOCK = gl.constexpr(64)
"""Rows and keys of a tile, and columns of a chunk."""
THREADS = gl.constexpr(288)
"""Two consumers and the warp that loads."""


@gluon.constexpr_function
def first_part(d):
    """Columns of the first of two parts of d, or all of them: tiles have powers of two."""
    return 128 if d == 192 else d


@gluon.constexpr_function
def slots(d):
    """Chunks that a stage has room for: a power of two, so that whatever a stage is cut into, it begins with one."""
    return 2 if d == 128 else 4


@gluon.constexpr_function
def products(columns):
    """The layout of a product [64, columns]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


SCORES = gl.constexpr(products(64))


@aggregate
class Shared:
    """What the groups of warps share."""

    q_ring: Ring
    dout_ring: Ring
    k_tiles: gl.shared_memory_descriptor
    v_tiles: gl.shared_memory_descriptor
    keys_full: gl.shared_memory_descriptor
    starts: gl.shared_memory_descriptor
    deltas: gl.shared_memory_descriptor
    trade: PDSExchange

    @gluon.constexpr_function
    def __init__(self, q_ring, dout_ring, k_tiles, v_tiles, keys_full, starts, deltas, trade):
        self.q_ring = q_ring
        self.dout_ring = dout_ring
        self.k_tiles = k_tiles
        self.v_tiles = v_tiles
        self.keys_full = keys_full
        self.starts = starts
        self.deltas = deltas
        self.trade = trade


@gluon.jit
def part(tiles, stage, D: gl.constexpr, START: gl.constexpr, COLUMNS: gl.constexpr):
    """Columns from START on of the tile [64, D] in a stage, [64, COLUMNS]."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, COLUMNS], tiles.dtype)
    PARTS: gl.constexpr = slots(D) * BLOCK // COLUMNS
    parts = view(tiles, [tiles.shape[0] * BLOCK // COLUMNS, BLOCK, COLUMNS], LAYOUT)
    return parts.index(stage * PARTS + START // COLUMNS)


@gluon.jit
def zeros(D: gl.constexpr):
    """The parts of a sum [64, D]."""
    WIDE: gl.constexpr = first_part(D)
    wide = gl.zeros([BLOCK, WIDE], gl.float32, products(WIDE))
    if WIDE < D:
        return wide, gl.zeros([BLOCK, D - WIDE], gl.float32, products(D - WIDE))
    else:
        return (wide,)


@gluon.jit
def issue_scores(tiles, other, stage, start, D: gl.constexpr, ONTO: gl.constexpr):
    """Starts x y^T [64, 64], onto `start` if ONTO; x is all of `tiles`, and y a stage of `other`."""
    WIDE: gl.constexpr = first_part(D)
    x = part(tiles, 0, D, 0, WIDE)
    s = warpgroup_mma(x, part(other, stage, D, 0, WIDE).permute((1, 0)), start, use_acc=ONTO, is_async=True)
    if WIDE < D:
        x = part(tiles, 0, D, WIDE, D - WIDE)
        s = warpgroup_mma(x, part(other, stage, D, WIDE, D - WIDE).permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def issue_sum(x, tiles, stage, acc, D: gl.constexpr):
    """Starts acc += x y, part by part; x [64, 64] in registers, y a stage of `tiles`."""
    WIDE: gl.constexpr = first_part(D)
    operand = gl.convert_layout(x, gl.DotOperandLayout(0, acc[0].type.layout, 2))
    wide = warpgroup_mma(operand, part(tiles, stage, D, 0, WIDE), acc[0], is_async=True)
    if WIDE < D:
        operand = gl.convert_layout(x, gl.DotOperandLayout(0, acc[1].type.layout, 2))
        return wide, warpgroup_mma(operand, part(tiles, stage, D, WIDE, D - WIDE), acc[1], is_async=True)
    else:
        return (wide,)


@gluon.jit
def wait_for_sum(acc):
    """The parts of a sum when every product has been added."""
    if len(acc) == 2:
        return warpgroup_mma_wait(0, [acc[0], acc[1]])
    else:
        return (warpgroup_mma_wait(0, [acc[0]]),)


@gluon.constexpr_function
def dq_columns(c, d):
    """Columns of dq that consumer c computes."""
    wide = 128 if d == 192 else d // 2
    return d - wide if c else wide


@gluon.jit
def issue_dq(c: gl.constexpr, shared, n, D: gl.constexpr):
    """Starts consumer c's columns of dq = ds^T k of step n, [64, dq_columns]."""
    COLUMNS: gl.constexpr = dq_columns(c, D)
    zero = gl.zeros([BLOCK, COLUMNS], gl.float32, products(COLUMNS))
    ds = shared.trade.ds.index(n & 1)
    k = part(shared.k_tiles, 0, D, c * dq_columns(0, D), COLUMNS)
    return warpgroup_mma(ds.permute((1, 0)), k, zero, use_acc=False, is_async=True)


@gluon.jit
def add_columns(c: gl.constexpr, dq, dq_accum, semaphore, n, block, group, h_q, q_blocks, D: gl.constexpr):
    """Adds consumer c's columns of dq of step n. Step -1 has zeros, and adds them to the first block of rows."""
    h, q_block = block.place(gl.maximum(n, 0), group)
    tile = block.rows_number(h, h_q, q_blocks, q_block)
    if semaphore is not None:
        acquire(semaphore, 2 * tile + c, block, q_block, q_blocks, BLOCK, 4)
    add_dq(dq, dq_accum + tile.to(gl.int64) * (BLOCK * D) + c * dq_columns(0, D) * BLOCK)
    if semaphore is not None and n >= 0:
        release_fenced(semaphore, 2 * tile + c)


@gluon.jit
def leave(desc, x, acc, factor, block, tiles, stage, D: gl.constexpr):
    """Stores factor acc [64, D] in global memory by way of a stage of `tiles`; x as `store_keys` takes it."""
    WIDE: gl.constexpr = first_part(D)
    part(tiles, stage, D, 0, WIDE).store((acc[0] * factor).to(tiles.dtype))
    if WIDE < D:
        part(tiles, stage, D, WIDE, D - WIDE).store((acc[1] * factor).to(tiles.dtype))
    fence_async_shared()
    for i in gl.static_range(D // BLOCK):
        tile = tiles.index(stage * slots(D) + i)
        store_keys(desc, x, tile, tile.reshape([BLOCK, BLOCK]), block, block.start, i * BLOCK)
    tma.store_wait(0)


@gluon.jit
def value_step(
    dv, start, n, steps, dq_accum, semaphore, shared, block, mask, score, dropout, group, h, h_q, row, q_blocks, kv_idx,
    scale, D: gl.constexpr, D_V: gl.constexpr, FOLD: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """The first consumer's step: dv of one more block of rows, and dq of the one before. Returns dv and the next
    step's start."""
    DTYPE: gl.constexpr = shared.k_tiles.dtype
    columns: gl.constexpr = gl.SliceLayout(0, SCORES)
    zero = gl.zeros([BLOCK, BLOCK], gl.float32, SCORES)
    stage = n % 2
    # s and p: [64, 64]
    if FOLD:
        s = onto(start, zero)
        if MASKED:
            s = hidden(s, mask, block, h, row, kv_idx)
        s = issue_scores(shared.k_tiles, shared.q_ring.tiles, stage, s, D, True)
        s = warpgroup_mma_wait(0, [s])
        p = gl.exp2(s * (scale * LOG2E))
    else:
        shared.q_ring.wait(n)
        s = issue_scores(shared.k_tiles, shared.q_ring.tiles, stage, zero, D, False)
        s = warpgroup_mma_wait(0, [s])
        q_idx = row + gl.arange(0, BLOCK, columns)
        x = logits(s, score, scale, block.b, h, q_idx[None, :], kv_idx[:, None])
        x += gl.expand_dims(shared.starts.index(stage).load(columns), 0)
        if MASKED:
            x = hidden(x, mask, block, h, row, kv_idx)
        p = power(x, score)
    shared.q_ring.release(n)
    weights = p
    if dropout is not None:
        p = dropped(p, dropout, block.b, h, row, kv_idx, True)
        weights = kept(p)
    weights = weights.to(DTYPE)
    if not score.steady:  # at scores that nobody sees it may be anything
        slope = score.slope(score.data, s * scale, block.b, h, q_idx[None, :], kv_idx[:, None])
        p = bent(p, slope, dropout is not None)
    shared.trade.take_ds()
    shared.trade.give_p(to_register_order(p))
    dq = issue_dq(0, shared, n - 1, D)
    shared.dout_ring.wait(n)
    dv = issue_sum(weights, shared.dout_ring.tiles, stage, dv, D_V)
    dq = warpgroup_mma_wait(len(dv), [dq])
    add_columns(0, dq, dq_accum, semaphore, n - 1, block, group, h_q, q_blocks, D)
    if FOLD:
        # After the last step there is no next one: its own numbers, which nobody uses.
        start = shared.starts.index(shared.q_ring.wait(gl.minimum(n + 1, steps - 1))).load(columns)
    dv = wait_for_sum(dv)
    shared.dout_ring.release(n)
    return dv, start


@gluon.jit
def consume_for_values(
    dv_desc, dv_rows, dq_accum, semaphore, shared, block, mask, score, dropout, group, h_q, q_blocks, scale,
    D: gl.constexpr, D_V: gl.constexpr, FOLD: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """The first consumer: p, dv, and the first columns of every dq."""
    # [64, D_V]
    dv = zeros(D_V)
    # [64]
    kv_idx = block.start + gl.arange(0, BLOCK, gl.SliceLayout(1, SCORES))
    steps = block.steps(group)
    if dropout is not None:
        dropout = opened(dropout)
    wait_for_last()
    mbarrier.wait(shared.keys_full, 0)
    # [64]
    start = gl.zeros([BLOCK], gl.float32, gl.SliceLayout(0, SCORES))
    if FOLD:
        start = shared.starts.index(shared.q_ring.wait(0)).load(start.type.layout)
    if MASKED:
        masked = block.edges(group)
        blocks = block.edges(1)
        h = block.share * group
        i = gl.to_tensor(0)
        for n in tl.range(0, masked, disable_licm=True):
            dv, start = value_step(
                dv, start, n, steps, dq_accum, semaphore, shared, block, mask, score, dropout, group, h, h_q,
                block.edge(i) * BLOCK, q_blocks, kv_idx, scale, D, D_V, FOLD, True,
            )  # fmt: skip
            h, i = following(h, i, blocks)
        blocks = block.steps(1) - blocks
        h = block.share * group
        i = gl.to_tensor(0)
        for n in tl.range(masked, steps, disable_licm=True):
            dv, start = value_step(
                dv, start, n, steps, dq_accum, semaphore, shared, block, mask, score, dropout, group, h, h_q,
                block.inner(i) * BLOCK, q_blocks, kv_idx, scale, D, D_V, FOLD, False,
            )  # fmt: skip
            h, i = following(h, i, blocks)
    else:
        for n in tl.range(steps, disable_licm=True):
            h, q_block = block.place(n, group)
            dv, start = value_step(
                dv, start, n, steps, dq_accum, semaphore, shared, block, mask, score, dropout, group, h, h_q,
                q_block * BLOCK, q_blocks, kv_idx, scale, D, D_V, FOLD, False,
            )  # fmt: skip
    shared.trade.take_ds()
    dq = issue_dq(0, shared, steps - 1, D)
    dq = warpgroup_mma_wait(0, [dq])
    add_columns(0, dq, dq_accum, semaphore, steps - 1, block, group, h_q, q_blocks, D)
    # The last dout has been read by both: the second consumer gave the last ds after it.
    leave(
        dv_desc,
        dv_rows,
        dv,
        1.0 if dropout is None else factor(dropout),
        block,
        shared.dout_ring.tiles,
        (steps - 1) % 2,
        D_V,
    )


@gluon.jit
def key_step(
    dk, n, dq_accum, semaphore, shared, block, dropout, group, h_q, q_blocks, D: gl.constexpr, D_V: gl.constexpr
):  # fmt: skip
    """The second consumer's step: dk and dq of one more block of rows. Returns dk."""
    DTYPE: gl.constexpr = shared.k_tiles.dtype
    zero = gl.zeros([BLOCK, BLOCK], gl.float32, SCORES)
    stage = shared.dout_ring.wait(n)
    # dp and ds: [64, 64]
    delta = shared.deltas.index(stage).load(gl.SliceLayout(0, SCORES))
    if dropout is None:
        dp = issue_scores(shared.v_tiles, shared.dout_ring.tiles, stage, onto(delta, zero), D_V, True)
    else:
        dp = issue_scores(shared.v_tiles, shared.dout_ring.tiles, stage, zero, D_V, False)
    dp = warpgroup_mma_wait(0, [dp])
    shared.dout_ring.release(n)
    order: gl.constexpr = to_register_order(zero).type.layout
    p = gl.convert_layout(from_register_order(shared.trade.take_p(order), BLOCK), SCORES)
    ds = p * dp if dropout is None else gradient(p, dp, gl.expand_dims(delta, 0), dropout.rescale)
    ds = ds.to(DTYPE)
    shared.trade.give_ds(n, ds)
    dq = issue_dq(1, shared, n, D)
    shared.q_ring.wait(n)
    dk = issue_sum(ds, shared.q_ring.tiles, stage, dk, D)
    dq = warpgroup_mma_wait(len(dk), [dq])
    add_columns(1, dq, dq_accum, semaphore, n, block, group, h_q, q_blocks, D)
    dk = wait_for_sum(dk)
    shared.q_ring.release(n)
    return dk


@gluon.jit
def consume_for_keys(
    dk_desc, dk_rows, dq_accum, semaphore, shared, block, dropout, group, h_q, q_blocks, scale,
    D: gl.constexpr, D_V: gl.constexpr,
):  # fmt: skip
    """The second consumer: ds, dk, and the other columns of every dq."""
    # [64, D]
    dk = zeros(D)
    steps = uniform(block.steps(group))
    wait_for_last()
    mbarrier.wait(shared.keys_full, 0)
    # Zeros, which the first step adds to the sums of its own block of rows: cheaper than a test in every step.
    shared.trade.give_ds(-1, gl.zeros([BLOCK, BLOCK], shared.k_tiles.dtype, SCORES))
    for n in tl.range(steps, disable_licm=True):
        dk = key_step(dk, n, dq_accum, semaphore, shared, block, dropout, group, h_q, q_blocks, D, D_V)
    # The last q has been read by both: the first consumer gave the last p after it.
    leave(dk_desc, dk_rows, dk, scale, block, shared.q_ring.tiles, (steps - 1) % 2, D)


@gluon.jit(do_not_specialize=["group", "h_q", "s_q", "s_k", "q_blocks"])
def wide_backward_kernel(
    q_desc, k_desc, v_desc, dout_desc, dk_desc, dv_desc, start_desc, delta_desc, dk_rows, dv_rows, dq_accum, used_q,
    used_k, mask, score, dropout, order, semaphore, group, h_q, s_q, s_k, q_blocks, scale,
    D: gl.constexpr, D_V: gl.constexpr, FOLD: gl.constexpr, MASKED: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, OTHER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """dk, dv, and dq_accum += ds^T k.

    q, dout: (b, h_q, s_q, d); k, v, dk, dv: (b, h_k, s_k, d), all in chunks of 64 rows and columns. start and delta:
    what `preprocess_kernel` made. dk_rows and dv_rows: dk and dv once more: packed, else None. D and D_V: head dims as
    whole chunks, 128, 192 or 256.
    """
    DTYPE: gl.constexpr = q_desc.dtype
    q_tiles = gl.allocate_shared_memory(DTYPE, [2 * slots(D), 1, 1, BLOCK, BLOCK], q_desc.layout)
    dout_tiles = gl.allocate_shared_memory(DTYPE, [2 * slots(D_V), 1, 1, BLOCK, BLOCK], dout_desc.layout)
    keys_full = new_barriers(1, 1).index(0)
    shared = Shared(
        new_ring(q_tiles, Q_EMPTY, 2, THREADS),
        new_ring(dout_tiles, DOUT_EMPTY, 2, THREADS),
        gl.allocate_shared_memory(DTYPE, [slots(D), 1, 1, BLOCK, BLOCK], k_desc.layout),
        gl.allocate_shared_memory(DTYPE, [slots(D_V), 1, 1, BLOCK, BLOCK], v_desc.layout),
        keys_full,
        gl.allocate_shared_memory(gl.float32, [2, BLOCK], start_desc.layout),
        gl.allocate_shared_memory(gl.float32, [2, BLOCK], delta_desc.layout),
        PDSExchange(
            gl.allocate_shared_memory(gl.float32, [PIECE], start_desc.layout),
            gl.allocate_shared_memory(
                DTYPE, [2, BLOCK, BLOCK], gl.NVMMASharedLayout.get_default_for([BLOCK, BLOCK], DTYPE)
            ),
        ),
    )
    item = gl.program_id(0)
    block = find_kv_block(item, order, mask, used_q, used_k, s_q, s_k, q_blocks, BLOCK, BLOCK, semaphore is not None)
    start_next()
    gl.warp_specialize([
        (consume_for_keys, (
            dk_desc, dk_rows, dq_accum, semaphore, shared, block, dropout, group, h_q, q_blocks, scale, D, D_V,
        )),
        (consume_for_values, (
            dv_desc, dv_rows, dq_accum, semaphore, shared, block, mask, score, dropout, group, h_q, q_blocks, scale,
            D, D_V, FOLD, MASKED,
        )),
        (load, (
            q_desc, dout_desc, k_desc, v_desc, start_desc, delta_desc, shared, block, used_q, used_k, group, h_q,
            q_blocks, BLOCK, BLOCK, BLOCK, D // BLOCK, D_V // BLOCK,
        )),
    ], [4, 1], [CONSUMER_REGISTERS, OTHER_REGISTERS])  # fmt: skip
