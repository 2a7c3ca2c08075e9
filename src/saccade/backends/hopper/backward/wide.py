"""The Hopper backward above d = 128: a program owns 64 or 128 keys and walks over the query rows that see them."""

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

from saccade.backends.device.dropout import opened
from saccade.backends.device.records import LOG2E
from saccade.backends.hopper.backward.dq import (
    PIECE,
    acquire,
    add_dq,
    from_register_order,
    release_fenced,
    to_register_order,
)
from saccade.backends.hopper.backward.epilogue import store_keys
from saccade.backends.hopper.backward.kv_block import KVBlock, KVBlocks, all_steps
from saccade.backends.hopper.backward.load import load
from saccade.backends.hopper.backward.pipeline import (
    CONSUMER_REGISTERS,
    DOUT_EMPTY,
    OTHER_REGISTERS,
    Q_EMPTY,
    THREADS,
    DSExchange,
    PDSExchange,
)
from saccade.backends.hopper.backward.scores import (
    BackwardArgs,
    ScoreTile,
    bounds_of_rows,
    issue_product,
    issue_sums,
    spread,
)
from saccade.backends.hopper.backward.tile_scheduler import find_kv_block
from saccade.backends.hopper.dropout import score_gradient
from saccade.backends.hopper.pipeline import Ring, new_barriers, new_ring
from saccade.backends.hopper.ptx import uniform
from saccade.backends.hopper.shim import Value, aggregate, start_next, view, wait_for_last
from saccade.backends.hopper.tiles import product_layout, wait_for_sums

# The consumers of programs of 64 keys: one has dv, the other dk, and each half of every dq.
#
# The first consumer's dq is one step late: s(i), exp2, p(i) handed over, dq(i - 1), dv. So what it waits for came
# long ago, and while either consumer computes in registers, the other one's products keep the tensor cores busy.
#
# Head dims come in chunks of 64 columns. Sums are tiles of 128 or 256 columns, or of 128 and 64 where a head dim
# takes 192: a tuple of one or of two tiles.

BLOCK = gl.constexpr(64)
"""Rows and keys of a tile, and columns of a chunk."""


@gluon.constexpr_function
def first_part(d):
    """Columns of the first of two parts of d, or all of them: tiles have powers of two."""
    return 128 if d == 192 else d


@gluon.constexpr_function
def slots(d):
    """Chunks that a stage has room for: a power of two, so that tiles of any width begin at a stage."""
    return 2 if d == 128 else 4


SCORES = gl.constexpr(product_layout(64))
HALF = gl.constexpr(product_layout(32))


@aggregate
class WideShared:
    """What the groups of warps share."""

    q_ring: Ring
    dout_ring: Ring
    k_tiles: gl.shared_memory_descriptor
    v_tiles: gl.shared_memory_descriptor
    kv_full: gl.shared_memory_descriptor
    neg_lse: gl.shared_memory_descriptor
    neg_delta: gl.shared_memory_descriptor
    exchange: Value
    """a PDSExchange, or of 128 keys a DSExchange"""


@gluon.jit
def part(tiles, stage, D: gl.constexpr, START: gl.constexpr, COLUMNS: gl.constexpr):
    """Columns from START on of the tile [rows, D] in a stage, [rows, COLUMNS]."""
    ROWS: gl.constexpr = tiles.shape[3]
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, COLUMNS], tiles.dtype)
    PARTS: gl.constexpr = slots(D) * BLOCK // COLUMNS
    parts = view(tiles, [tiles.shape[0] * BLOCK // COLUMNS, ROWS, COLUMNS], LAYOUT)
    return parts.index(stage * PARTS + START // COLUMNS)


@gluon.jit
def zeros(D: gl.constexpr):
    """The parts of a sum [64, D]."""
    WIDE: gl.constexpr = first_part(D)
    wide = gl.zeros([BLOCK, WIDE], gl.float32, product_layout(WIDE))
    if WIDE < D:
        return wide, gl.zeros([BLOCK, D - WIDE], gl.float32, product_layout(D - WIDE))
    else:
        return (wide,)


@gluon.jit
def parts(tiles, stage, D: gl.constexpr, ROW: gl.constexpr = 0, N: gl.constexpr = BLOCK):
    """The parts of N rows, from ROW on, of the tile [rows, D] in a stage, a tuple."""
    WIDE: gl.constexpr = first_part(D)
    wide = part(tiles, stage, D, 0, WIDE).slice(ROW, N, 0)
    if WIDE < D:
        return wide, part(tiles, stage, D, WIDE, D - WIDE).slice(ROW, N, 0)
    else:
        return (wide,)


@gluon.constexpr_function
def dq_columns(c, d):
    """Columns of dq that consumer c computes."""
    wide = 128 if d == 192 else d // 2
    return d - wide if c else wide


@aggregate
class WideConsumer:
    """What the steps of a consumer have in common; c: which of the two it is."""

    c: gl.constexpr
    args: BackwardArgs
    dropout: Value
    """opened, or None"""
    shared: WideShared
    block: KVBlock
    dq_accum: gl.tensor
    kv_idx: Value
    steps: gl.tensor
    D: gl.constexpr
    D_V: gl.constexpr

    @gluon.jit
    def issue_dq(self, n):
        """Starts the consumer's columns of dq = ds^T k of step n, [64, dq_columns]."""
        COLUMNS: gl.constexpr = dq_columns(self.c, self.D)
        zero = gl.zeros([BLOCK, COLUMNS], gl.float32, product_layout(COLUMNS))
        ds = self.shared.exchange.ds.index(n & 1)
        k = part(self.shared.k_tiles, 0, self.D, self.c * dq_columns(0, self.D), COLUMNS)
        return warpgroup_mma(ds.permute((1, 0)), k, zero, use_acc=False, is_async=True)

    @gluon.jit
    def add_dq(self, dq, n):
        """Adds the consumer's columns of dq of step n. Step -1 has zeros, and adds them to the first q block."""
        args = self.args
        semaphore = args.dq_semaphore
        h, q_block = self.block.step_at(gl.maximum(n, 0), args.group)
        tile = self.block.q_block_number(h, q_block, args.h_q, args.kv_blocks.q_blocks)
        if semaphore is not None:
            acquire(semaphore, 2 * tile + self.c, args.kv_blocks, self.block, q_block, 4)
        add_dq(dq, self.dq_accum + tile.to(gl.int64) * (BLOCK * self.D) + self.c * dq_columns(0, self.D) * BLOCK)
        if semaphore is not None and n >= 0:
            release_fenced(semaphore, 2 * tile + self.c)

    @gluon.jit
    def step(self, state, n, h, q_block, following, MASKED: gl.constexpr, BEYOND: gl.constexpr):
        """The first consumer's step: dv of one more q block, and dq of the one before. The state is dv and the next
        step's -lse."""
        dv, neg_lse = state
        shared = self.shared
        FOLD: gl.constexpr = self.args.FOLD
        bounds = bounds_of_rows(self.args.kv_blocks, self.block, q_block, gl.SliceLayout(0, SCORES)) if MASKED else ()
        tile = ScoreTile(self.args, self.dropout, self.block, h, q_block * BLOCK, self.kv_idx, bounds, MASKED, ())
        zero = gl.zeros([BLOCK, BLOCK], gl.float32, SCORES)
        stage = n % 2
        k = parts(shared.k_tiles, 0, self.D)
        # s and p: [64, 64]
        if FOLD:
            start = tile.start(neg_lse, zero)
            s = issue_product(k, parts(shared.q_ring.tiles, stage, self.D), start, True)
        else:
            shared.q_ring.wait(n)
            s = issue_product(k, parts(shared.q_ring.tiles, stage, self.D), zero, False)
        s = warpgroup_mma_wait(0, [s])
        p = tile.weights(s, shared.neg_lse.index(stage), ())
        shared.q_ring.release(n)
        p, weights = tile.drop(p)
        weights = weights.to(shared.k_tiles.dtype)
        p = tile.apply_slope(p, s, ())
        shared.exchange.take_ds()
        shared.exchange.give_p(to_register_order(p))
        dq = self.issue_dq(n - 1)
        shared.dout_ring.wait(n)
        dv = issue_sums(weights, parts(shared.dout_ring.tiles, stage, self.D_V), dv)
        dq = warpgroup_mma_wait(len(dv), [dq])
        self.add_dq(dq, n - 1)
        if FOLD:
            # After the last step there is no next one: its own numbers, which are not used.
            stage = shared.q_ring.wait(gl.minimum(n + 1, self.steps - 1))
            neg_lse = shared.neg_lse.index(stage).load(gl.SliceLayout(0, SCORES))
        dv = wait_for_sums(0, dv)
        shared.dout_ring.release(n)
        return dv, neg_lse

    @gluon.jit
    def dk_step(self, dk, n):
        """The second consumer's step: dk and dq of one more q block. Returns dk."""
        shared = self.shared
        zero = gl.zeros([BLOCK, BLOCK], gl.float32, SCORES)
        stage = shared.dout_ring.wait(n)
        # dp and ds: [64, 64]
        delta = shared.neg_delta.index(stage).load(gl.SliceLayout(0, SCORES))
        v = parts(shared.v_tiles, 0, self.D_V)
        dout = parts(shared.dout_ring.tiles, stage, self.D_V)
        if self.dropout is None:
            dp = issue_product(v, dout, spread(delta, zero), True)
        else:
            dp = issue_product(v, dout, zero, False)
        dp = warpgroup_mma_wait(0, [dp])
        shared.dout_ring.release(n)
        order: gl.constexpr = to_register_order(zero).type.layout
        p = gl.convert_layout(from_register_order(shared.exchange.take_p(order), BLOCK), SCORES)
        dropout = self.dropout
        ds = p * dp if dropout is None else score_gradient(p, dp, gl.expand_dims(delta, 0), dropout.rescale)
        ds = ds.to(shared.k_tiles.dtype)
        shared.exchange.give_ds(n, ds)
        dq = self.issue_dq(n)
        shared.q_ring.wait(n)
        dk = issue_sums(ds, parts(shared.q_ring.tiles, stage, self.D), dk)
        dq = warpgroup_mma_wait(len(dk), [dq])
        self.add_dq(dq, n)
        dk = wait_for_sums(0, dk)
        shared.q_ring.release(n)
        return dk


@gluon.jit
def store(desc, x, acc, factor, block, tiles, stage, D: gl.constexpr, KEY: gl.constexpr = 0):
    """Stores factor acc [64, D] of the keys from KEY on in global memory, by way of these rows of a stage of `tiles`; x
    as `store_keys` takes it."""
    target = parts(tiles, stage, D, KEY)
    for i in gl.static_range(len(acc)):
        target[i].store((acc[i] * factor).to(tiles.dtype))
    fence_async_shared()
    for i in gl.static_range(D // BLOCK):
        tile = tiles.index(stage * slots(D) + i).slice(KEY, BLOCK, 2)
        rows = part(tiles, stage, D, i * BLOCK, BLOCK).slice(KEY, BLOCK, 0)
        store_keys(desc, x, tile, rows, block, block.start + KEY, i * BLOCK)
    tma.store_wait(0)


@gluon.jit
def consume_for_dv(
    c: gl.constexpr, dk_desc, dv_desc, packed, dq_accum, shared, block, args, D: gl.constexpr, D_V: gl.constexpr
):
    """The first consumer: p, dv, and the first columns of every dq."""
    # [64, D_V]
    dv = zeros(D_V)
    # [64]
    kv_idx = block.start + gl.arange(0, BLOCK, gl.SliceLayout(1, SCORES))
    group = args.group
    steps = block.steps(group)
    dropout = None
    if args.dropout is not None:
        dropout = opened(args.dropout)
    consumer = WideConsumer(0, args, dropout, shared, block, dq_accum, kv_idx, steps, D, D_V)
    wait_for_last()
    mbarrier.wait(shared.kv_full, 0)
    # [64]
    neg_lse = gl.zeros([BLOCK], gl.float32, gl.SliceLayout(0, SCORES))
    if args.FOLD:
        neg_lse = shared.neg_lse.index(shared.q_ring.wait(0)).load(neg_lse.type.layout)
    dv, neg_lse = all_steps(consumer, (dv, neg_lse), block, group, 0, steps, args.MASKED)
    shared.exchange.take_ds()
    dq = consumer.issue_dq(steps - 1)
    dq = warpgroup_mma_wait(0, [dq])
    consumer.add_dq(dq, steps - 1)
    # The last dout has been read by both: the second consumer gave the last ds after it.
    x = None if packed is None else packed.dv
    rescale = 1.0 if dropout is None else dropout.factor
    store(dv_desc, x, dv, rescale, block, shared.dout_ring.tiles, (steps - 1) % 2, D_V)


@gluon.jit
def consume_for_dk(
    c: gl.constexpr, dk_desc, dv_desc, packed, dq_accum, shared, block, args, D: gl.constexpr, D_V: gl.constexpr
):
    """The second consumer: ds, dk, and the other columns of every dq."""
    # [64, D]
    dk = zeros(D)
    steps = uniform(block.steps(args.group))
    consumer = WideConsumer(1, args, args.dropout, shared, block, dq_accum, None, steps, D, D_V)
    wait_for_last()
    mbarrier.wait(shared.kv_full, 0)
    # Zeros, which the first step adds to the sums of its own q block: cheaper than a test in every step.
    shared.exchange.give_ds(-1, gl.zeros([BLOCK, BLOCK], shared.k_tiles.dtype, SCORES))
    for n in tl.range(steps, disable_licm=True):
        dk = consumer.dk_step(dk, n)
    # The last q has been read by both: the first consumer gave the last p after it.
    x = None if packed is None else packed.dk
    store(dk_desc, x, dk, args.scale, block, shared.q_ring.tiles, (steps - 1) % 2, D)


# The consumers where dk and dv have 320 columns together, as for 192 and 128: each has both sums of 64 of the program's
# 128 keys, which are 160 of its registers. So a program adds to dq half as often for a key, and p stays where it is.
#
# For s and dp there is room for 32 rows at a time, and for 64 columns of dq: the third 64 of a step fall to one
# consumer and the other in turn. They are in a loop, as ptxas would start the second ones before the first have left.


@aggregate
class TallConsumer:
    """What the steps of a consumer have in common; c: which of the two it is."""

    c: gl.constexpr
    args: BackwardArgs
    shared: WideShared
    block: KVBlock
    dq_accum: gl.tensor
    kv_idx: gl.tensor
    steps: gl.tensor
    D: gl.constexpr
    D_V: gl.constexpr

    @gluon.jit
    def issue_half(self, n, h, q_block, ROW: gl.constexpr, MASKED: gl.constexpr):
        """Starts s and dp [64, 32] of the rows from ROW on of a q block."""
        KEY: gl.constexpr = self.c * BLOCK
        shared = self.shared
        stage = n % 2
        tile = ScoreTile(self.args, None, self.block, h, q_block * BLOCK + ROW, self.kv_idx, (), MASKED, ())
        zero = gl.zeros([BLOCK, 32], gl.float32, HALF)
        neg_lse = shared.neg_lse.index(stage).slice(ROW, 32, 0).load(gl.SliceLayout(0, HALF))
        start = tile.start(neg_lse, zero)
        k = parts(shared.k_tiles, 0, self.D, KEY)
        v = parts(shared.v_tiles, 0, self.D_V, KEY)
        s = issue_product(k, parts(shared.q_ring.tiles, stage, self.D, ROW, 32), start, True)
        return s, issue_product(v, parts(shared.dout_ring.tiles, stage, self.D_V, ROW, 32), zero, False)

    @gluon.jit
    def add_half(self, dk, dv, s, dp, n, ROW: gl.constexpr):
        """Waits for s and dp, puts ds where dq takes it, and starts dk and dv of these rows."""
        shared = self.shared
        DTYPE: gl.constexpr = shared.k_tiles.dtype
        stage = n % 2
        # Not what dp starts from: ptxas would wait for s then.
        delta = shared.neg_delta.index(stage).slice(ROW, 32, 0).load(gl.SliceLayout(0, HALF))
        s = warpgroup_mma_wait(len(dv), [s])
        p = gl.exp2(s * (self.args.scale * LOG2E))
        dp = warpgroup_mma_wait(0, [dp])
        ds = (p * (dp + gl.expand_dims(delta, 0))).to(DTYPE)
        shared.exchange.tile(self.c, n).slice(ROW, 32, 1).store(ds)
        if ROW > 0:
            fence_async_shared()
            shared.exchange.give(self.c, n)
        dv = issue_sums(p.to(DTYPE), parts(shared.dout_ring.tiles, stage, self.D_V, ROW, 32), dv)
        return issue_sums(ds, parts(shared.q_ring.tiles, stage, self.D, ROW, 32), dk), dv

    @gluon.jit
    def step(self, state, n, h, q_block, following, MASKED: gl.constexpr, BEYOND: gl.constexpr):
        """dk, dv, which are the state, and the consumer's columns of dq of one more q block."""
        dk, dv = state
        c: gl.constexpr = self.c
        args = self.args
        shared = self.shared
        shared.dout_ring.wait(n)
        # The second half starts while the first one's sums are computed; with a mask there are no registers for that.
        FLYING: gl.constexpr = 0 if MASKED else len(dk) + len(dv)
        s, dp = self.issue_half(n, h, q_block, 0, MASKED)
        dk, dv = self.add_half(dk, dv, s, dp, n, 0)
        if not MASKED:
            s, dp = self.issue_half(n, h, q_block, 32, MASKED)
        dv = wait_for_sums(len(dk) + FLYING, dv)
        dk = wait_for_sums(FLYING, dk)
        if MASKED:
            s, dp = self.issue_half(n, h, q_block, 32, MASKED)
        dk, dv = self.add_half(dk, dv, s, dp, n, 32)
        dv = wait_for_sums(len(dk), dv)
        dk = wait_for_sums(0, dk)
        shared.dout_ring.release(n)
        shared.q_ring.release(n)
        shared.exchange.take(c, n)
        shared.q_ring.wait(n + 1, n + 1 < self.steps)
        # [64, 128]
        ds = shared.exchange.tiles.index(n & 1).permute((1, 0))
        block = self.block.q_block_number(h, q_block, args.h_q, args.kv_blocks.q_blocks).to(gl.int64)
        CHUNKS: gl.constexpr = self.D // BLOCK
        for i in tl.range(0, CHUNKS // 2 + (CHUNKS % 2) * ((n + c) & 1), disable_licm=True):
            chunk = c + i * (2 - c)
            zero = gl.zeros([BLOCK, BLOCK], gl.float32, SCORES)
            k = part(shared.k_tiles, 0, self.D, chunk * BLOCK, BLOCK)
            dq = warpgroup_mma(ds, k, zero, use_acc=False, is_async=True)
            dq = warpgroup_mma_wait(0, [dq])
            add_dq(dq, self.dq_accum + (block * CHUNKS + chunk) * PIECE)
        return dk, dv


@gluon.jit
def consume_keys(
    c: gl.constexpr, dk_desc, dv_desc, packed, dq_accum, shared, block, args, D: gl.constexpr, D_V: gl.constexpr
):
    """Consumer c of a program of 128 keys: dk and dv of 64 of them, and its columns of every dq."""
    dk = zeros(D)
    dv = zeros(D_V)
    # [64]
    kv_idx = block.start + c * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(1, HALF))
    group = args.group
    steps = block.steps(group)
    consumer = TallConsumer(c, args, shared, block, dq_accum, kv_idx, steps, D, D_V)
    wait_for_last()
    mbarrier.wait(shared.kv_full, 0)
    shared.q_ring.wait(0)
    dk, dv = all_steps(consumer, (dk, dv), block, group, 0, steps, args.MASKED)
    # Both consumers have read all of k when both have come here.
    shared.exchange.give(c, steps)
    shared.exchange.take(c, steps)
    store(dv_desc, None if packed is None else packed.dv, dv, 1.0, block, shared.v_tiles, 0, D_V, c * BLOCK)
    store(dk_desc, None if packed is None else packed.dk, dk, args.scale, block, shared.k_tiles, 0, D, c * BLOCK)


# The Hopper backward for head dims above 128, in programs of 64 keys; those of 128 are described above.
#
# At d = 256 dk and dv of 64 keys take half of a multiprocessor's registers: 128 of each thread of two consumers. So
# each consumer has one of the two sums, and no product is computed twice:
#
# first consumer     s = k q^T      p = exp(s - lse)      dv += p dout     half of dq = ds^T k
# second consumer    dp = v dout^T  ds = p (dp - delta)   dk += ds q       the other half
#
# p and ds are left operands straight from registers, as in the narrow kernel. p goes from the first to the second
# through shared memory, in float32 and in the order of the registers, and ds comes back as the left operand of dq. They
# exchange nothing else. Both halves of dq are added to global memory from registers: shared memory has no room for them
# beside two stages of q and of dout.


@gluon.jit(do_not_specialize=["group", "h_q", "q_blocks"])
def wide_backward_kernel(
    q_desc, k_desc, v_desc, dout_desc, dk_desc, dv_desc, neg_lse_desc, neg_delta_desc, packed, dq_accum,
    span_q, span_k, scores, scheduler, dq_semaphore, group, h_q, q_blocks,
    FOLD: gl.constexpr, MASKED: gl.constexpr, D: gl.constexpr, D_V: gl.constexpr,
):  # fmt: skip
    """dk, dv, and dq_accum += ds^T k, with the arguments of `backward_kernel`, whose tiles are chunks of 64 rows and
    columns here. D and D_V: head dims as whole chunks, 128, 192 or 256."""
    DTYPE: gl.constexpr = q_desc.dtype
    q_tiles = gl.allocate_shared_memory(DTYPE, [2 * slots(D), 1, 1, BLOCK, BLOCK], q_desc.layout)
    dout_tiles = gl.allocate_shared_memory(DTYPE, [2 * slots(D_V), 1, 1, BLOCK, BLOCK], dout_desc.layout)
    kv_full = new_barriers(1, 1).index(0)
    BLOCK_K: gl.constexpr = k_desc.block_shape[2]
    DS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_K, BLOCK], DTYPE)
    ds_tiles = gl.allocate_shared_memory(DTYPE, [2, BLOCK_K, BLOCK], DS)
    if BLOCK_K == BLOCK:
        exchange = PDSExchange(gl.allocate_shared_memory(gl.float32, [PIECE], neg_lse_desc.layout), ds_tiles)
    else:
        exchange = DSExchange(ds_tiles, False)
    shared = WideShared(
        new_ring(q_tiles, Q_EMPTY, 2, THREADS), new_ring(dout_tiles, DOUT_EMPTY, 2, THREADS),
        gl.allocate_shared_memory(DTYPE, [slots(D), 1, 1, BLOCK_K, BLOCK], k_desc.layout),
        gl.allocate_shared_memory(DTYPE, [slots(D_V), 1, 1, BLOCK_K, BLOCK], v_desc.layout), kv_full,
        gl.allocate_shared_memory(gl.float32, [2, BLOCK], neg_lse_desc.layout),
        gl.allocate_shared_memory(gl.float32, [2, BLOCK], neg_delta_desc.layout), exchange,
    )  # fmt: skip
    s_q = q_desc.shape[2]
    s_k = k_desc.shape[2]
    kv_blocks = KVBlocks(scores.mask, span_q, span_k, s_q, s_k, q_blocks, BLOCK, BLOCK_K, None, False)
    args = BackwardArgs(
        kv_blocks, scores.score, scores.scale, scores.dropout, dq_semaphore, group, h_q, FOLD, MASKED, False,
        None, None, None,
    )  # fmt: skip
    block = find_kv_block(kv_blocks, gl.program_id(0), scheduler, dq_semaphore is not None)
    start_next()
    gl.warp_specialize([
        (consume_keys if BLOCK_K > BLOCK else consume_for_dk, (
            0, dk_desc, dv_desc, packed, dq_accum, shared, block, args, D, D_V,
        )),
        (consume_keys if BLOCK_K > BLOCK else consume_for_dv, (
            1, dk_desc, dv_desc, packed, dq_accum, shared, block, args, D, D_V,
        )),
        (load, (
            q_desc, dout_desc, k_desc, v_desc, neg_lse_desc, neg_delta_desc, shared, block, args,
            BLOCK, D // BLOCK, D_V // BLOCK,
        )),
    ], [4, 1], [CONSUMER_REGISTERS, OTHER_REGISTERS])  # fmt: skip
