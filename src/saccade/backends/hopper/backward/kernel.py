"""The Hopper backward up to d = 128: a program owns 128 keys of a head and walks over the rows that see them."""

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
from saccade.backends.hopper.backward.epilogue import reduce_dq, store_keys
from saccade.backends.hopper.backward.kv_block import KVBlock, KVBlocks, all_steps, next_step
from saccade.backends.hopper.backward.load import load_items
from saccade.backends.hopper.backward.pipeline import (
    CONSUMER_REGISTERS,
    DOUT_EMPTY,
    OTHER_REGISTERS,
    Q_EMPTY,
    THREADS,
    DSExchange,
    Outbox,
)
from saccade.backends.hopper.backward.scores import (
    BackwardArgs,
    ScoreTile,
    bounds_of_rows,
    in_parts,
    issue_product,
    issue_sums,
    no_sums,
    parts_of,
    spread,
)
from saccade.backends.hopper.backward.tile_scheduler import NUMBERS, has_work, read_record
from saccade.backends.hopper.dropout import score_gradient
from saccade.backends.hopper.pipeline import Ring, Slots, new_barriers, new_ring
from saccade.backends.hopper.shim import Value, aggregate, start_next, thread_barrier, wait_for_last
from saccade.backends.hopper.tiles import product_layout, store_sums, thread_sums, wait_for_sums

# The consumers of the backward up to d = 128: dk and dv of 64 keys each, and half of every dq.
#
# A consumer's step i: issue s(i) and dq(i - 1); exp2 while dq(i - 1) runs; hand dq(i - 1) over; issue dp(i) and dv;
# ds while dv runs; issue dk. Taking dq one step later lets the consumers drift half a step apart, where a barrier
# between `ds` and `dq` would make them meet. notes/gluon_backward.md has what each choice was worth.
#
# Products are accumulated onto -lse / scale and -delta instead of zeros where that is cheaper (FOLD), and the mask is
# part of that start. Blocks with and without the mask have loops of their own: a branch between products in flight
# cost the forward 8 % even where it was not taken. Nothing is taken out of the loops (disable_licm): the addresses
# that LLVM would compute before them occupy registers, and others spill.

K_SLOTS = gl.constexpr(2)
"""Slots for k, if there is room for two."""


@aggregate
class Shared:
    """What the groups of warps share."""

    q_ring: Ring
    dout_ring: Ring
    items: Slots
    k_tiles: gl.shared_memory_descriptor
    v_tiles: gl.shared_memory_descriptor
    v_empty: Value
    """None where v has as many places as k"""
    neg_lse: gl.shared_memory_descriptor
    neg_delta: gl.shared_memory_descriptor
    ds: DSExchange
    outbox: Outbox
    captured: Value
    """of each stage of q for each consumer a tile of what the score function captures; or None"""
    D_LAST: gl.constexpr
    """columns in use of the upper half of d"""
    DV_LAST: gl.constexpr


@aggregate
class StepSums:
    """What the steps of a kv block add up."""

    dk: Value
    """[64, BLOCK_D], in parts"""
    dv: Value
    """[64, BLOCK_DV], in parts"""
    biases: Value
    """each thread's sums of ds, [32, 4], of rows behind these keys and before them that are beyond the reach of the
    score's tables; () where nobody wants them"""


@gluon.jit
def own_rows(c: gl.constexpr, tiles, slot):
    """Consumer c's 64 rows of k or v, [64, BLOCK_D]."""
    return tiles.index(slot).reshape([tiles.shape[3], tiles.shape[4]]).slice(c * 64, 64, 0)


@gluon.jit
def rows_from(x, ROW: gl.constexpr, DIM: gl.constexpr = 0):
    """A tile without its rows before ROW; DIM: its dimension of rows."""
    if ROW == 0:
        return x
    else:
        return x.slice(ROW, x.shape[DIM] - ROW, DIM)


@aggregate
class Consumer:
    """Consumer c at work on a kv block, in `slot`: steps [first, end), which count on from block to block."""

    c: gl.constexpr
    args: BackwardArgs
    dropout: Value
    """opened, or None"""
    shared: Shared
    block: KVBlock
    slot: gl.tensor
    v_slot: gl.tensor
    first: gl.tensor
    end: gl.tensor
    kv_idx: gl.tensor
    keys: Value
    """the parts of k, if they stay in registers; or ()"""

    @gluon.jit
    def issue_dq(self, n):
        """Starts the consumer's half of dq = ds^T k of step n: of its 128 rows, or of the columns of its 64; or, where
        it has 64 of both, dq^T of half of the rows."""
        BLOCK_Q: gl.constexpr = self.args.kv_blocks.BLOCK_Q
        tiles = self.shared.k_tiles
        TURNED: gl.constexpr = tiles.shape[4] == BLOCK_Q
        # The second consumer's columns are the upper half of d: those in use.
        COLUMNS: gl.constexpr = 32 if TURNED else self.shared.D_LAST if BLOCK_Q == 64 and self.c == 1 else 64
        # [64, COLUMNS]
        dq = gl.zeros([64, COLUMNS], gl.float32, product_layout(COLUMNS))
        # [BLOCK_K, BLOCK_Q], or, if BY_ROWS, [BLOCK_Q, BLOCK_K]
        ds = self.shared.ds.tiles.index(n & 1)
        # [BLOCK_K, BLOCK_D]
        k = tiles.index(self.slot).reshape([tiles.shape[3], tiles.shape[4]])
        if TURNED:
            rows = ds.slice(self.c * 32, 32, 0)
            return warpgroup_mma(k.permute((1, 0)), rows.permute((1, 0)), dq, use_acc=False, is_async=True)
        elif self.shared.ds.BY_ROWS:
            return warpgroup_mma(ds, k.slice(self.c * 64, COLUMNS, 1), dq, use_acc=False, is_async=True)
        else:
            if BLOCK_Q == 128:
                ds = ds.slice(self.c * 64, 64, 1)
            else:
                k = k.slice(self.c * 64, COLUMNS, 1)
            return warpgroup_mma(ds.permute((1, 0)), k, dq, use_acc=False, is_async=True)

    @gluon.jit
    def captured(self, stage):
        """[64, BLOCK_Q] of what the score function captures, as a tuple; () where no tiles of it come."""
        tiles = self.shared.captured
        if tiles is None:
            return ()
        else:
            BLOCK_Q: gl.constexpr = self.args.kv_blocks.BLOCK_Q
            # [64, BLOCK_Q]
            tile = tiles.index(2 * stage + self.c).reshape([BLOCK_Q, 64]).permute((1, 0))
            return (tile.load(product_layout(BLOCK_Q)),)

    @gluon.jit
    def step(
        self, state, n, h, q_block, following, MASKED: gl.constexpr, BEYOND: gl.constexpr, ROW: gl.constexpr = 0
    ):  # fmt: skip
        """One more q block: its dk and dv, and dq of the step before. The state is the StepSums, and the next step's
        -lse and bounds, of the q block `following`, if FOLD. BEYOND: it lies beyond the reach of the score's tables.
        Rows before ROW see none of the keys."""
        sums, neg_lse, bounds = state
        dk, dv = sums.dk, sums.dv
        c: gl.constexpr = self.c
        shared = self.shared
        FOLD: gl.constexpr = self.args.FOLD
        DTYPE: gl.constexpr = shared.k_tiles.dtype
        BLOCK_Q: gl.constexpr = self.args.kv_blocks.BLOCK_Q
        ROWS: gl.constexpr = BLOCK_Q - ROW
        columns: gl.constexpr = gl.SliceLayout(0, product_layout(ROWS))
        own = bounds
        if MASKED and not FOLD:  # they come while s is computed
            own = bounds_of_rows(self.args.kv_blocks, self.block, q_block, columns)
        bias = ()
        if BEYOND:
            row, start = q_block * BLOCK_Q, self.block.start
            bias = (self.args.score.bias(self.args.score.data, self.block.b, h, row, start),)
        first = q_block * BLOCK_Q + ROW
        tile = ScoreTile(self.args, self.dropout, self.block, h, first, self.kv_idx, own, MASKED, bias)
        zero = gl.zeros([64, ROWS], gl.float32, product_layout(ROWS))
        stage = n % 2
        # [64, BLOCK_D]
        k = parts_of(own_rows(c, shared.k_tiles, self.slot), shared.D_LAST) if len(self.keys) == 0 else self.keys
        # [64, BLOCK_DV]
        v = parts_of(own_rows(c, shared.v_tiles, self.v_slot), shared.DV_LAST)
        # [ROWS, BLOCK_D]
        q = shared.q_ring.tiles.index(stage).reshape([BLOCK_Q, shared.k_tiles.shape[4]])
        q = parts_of(rows_from(q, ROW), shared.D_LAST)
        # [ROWS, BLOCK_DV]
        dout = shared.dout_ring.tiles.index(stage).reshape([BLOCK_Q, shared.v_tiles.shape[4]])
        dout = parts_of(rows_from(dout, ROW), shared.DV_LAST)
        # s and p: [64, ROWS]
        if FOLD:
            s = issue_product(k, q, tile.start(neg_lse, zero), True)
        else:
            shared.q_ring.wait(n)
            s = issue_product(k, q, zero, False)
        shared.ds.take(c, n - 1)
        dq = self.issue_dq(n - 1)
        s = warpgroup_mma_wait(1, [s])
        captured = self.captured(stage)
        p, weights = tile.drop(tile.weights(s, rows_from(shared.neg_lse.index(stage), ROW), captured))
        p_operand = gl.convert_layout(weights.to(DTYPE), gl.DotOperandLayout(0, dv[0].type.layout, 2))
        p = tile.apply_slope(p, s, captured)
        dq = warpgroup_mma_wait(0, [dq])
        if n > self.first:
            shared.outbox.claim(c, n - 1)
            shared.outbox.send(c, dq, self.args.scale)
        if shared.outbox.FOLLOWS:  # where warps wait for one another anyway, and not for ds
            thread_barrier()
        shared.dout_ring.wait(n)
        # dp and ds: [64, ROWS]
        if FOLD:
            dp = spread(rows_from(shared.neg_delta.index(stage), ROW).load(columns), zero)
            dp = issue_product(v, dout, dp, True)
        else:
            dp = issue_product(v, dout, zero, False)
        dv = issue_sums(p_operand, dout, dv)
        self.let_other_begin(n)
        dp = warpgroup_mma_wait(len(dv), [dp])
        if self.dropout is not None:
            delta = gl.expand_dims(rows_from(shared.neg_delta.index(stage), ROW).load(columns), 0)
            ds = score_gradient(p, dp, delta, self.dropout.factor)
        else:
            if not FOLD:
                dp += gl.expand_dims(rows_from(shared.neg_delta.index(stage), ROW).load(columns), 0)
            ds = p * dp
        biases = self.add_biases(sums.biases, ds, h, q_block)
        ds = ds.to(DTYPE)
        ds_operand = gl.convert_layout(ds, gl.DotOperandLayout(0, dk[0].type.layout, 2))
        if ROW > 0:
            shared.ds.tile(c, n).slice(0, ROW, 1).store(gl.zeros([64, ROW], DTYPE, product_layout(ROW)))
        rows_from(shared.ds.tile(c, n), ROW, 1).store(ds)
        fence_async_shared()
        shared.ds.give(c, n)
        shared.outbox.follow(c, n > self.first)
        dk = issue_sums(ds_operand, q, dk)
        if MASKED and FOLD:
            bounds = bounds_of_rows(self.args.kv_blocks, self.block, following, columns)
        dv = wait_for_sums(len(dk), dv)
        shared.dout_ring.release(n)
        if FOLD:
            neg_lse = shared.neg_lse.index(shared.q_ring.wait(n + 1, n + 1 < self.end)).load(columns)
        dk = wait_for_sums(0, dk)
        shared.q_ring.release(n)
        return StepSums(dk, dv, biases), neg_lse, bounds

    @gluon.jit
    def let_other_begin(self, n):
        """If AHEAD, the first consumer gives its ds of the step before an item, which is nobody's, only in the item's
        first step. So the other one computes exponentials while this one's products run (notes/gluon_backward.md)."""
        if self.args.AHEAD and self.c == 0 and n == self.first:
            self.shared.ds.give(self.c, n - 1)

    @gluon.jit
    def skip(self, state, n):
        """A step whose rows see none of the keys: zeros for ds, and dq of the step before."""
        sums, neg_lse, bounds = state
        c: gl.constexpr = self.c
        shared = self.shared
        BLOCK_Q: gl.constexpr = self.args.kv_blocks.BLOCK_Q
        shared.ds.take(c, n - 1)
        if n > self.first:
            dq = warpgroup_mma_wait(0, [self.issue_dq(n - 1)])
            shared.outbox.claim(c, n - 1)
            shared.outbox.send(c, dq, self.args.scale)
        shared.ds.tile(c, n).store(gl.zeros([64, BLOCK_Q], shared.k_tiles.dtype, product_layout(BLOCK_Q)))
        fence_async_shared()
        shared.ds.give(c, n)
        shared.outbox.follow(c, n > self.first)
        shared.dout_ring.skip(n)
        neg_lse = shared.neg_lse.index(shared.q_ring.wait(n + 1, n + 1 < self.end)).load(neg_lse.type.layout)
        shared.q_ring.release(n)
        return sums, neg_lse, bounds

    @gluon.jit
    def own_steps(self, state):
        """The state after all steps, as `all_steps`, with the mask where the consumer's own keys need it. First come
        those whose 64 first rows see none of them."""
        block = self.block
        group = self.args.group
        unseen, edges = block.own_edges(self.args.kv_blocks, self.c)
        h = gl.to_tensor(0)
        i = gl.to_tensor(0)
        seen = self.first
        if self.c > 0:
            seen += group * unseen
            for n in tl.range(self.first, seen, disable_licm=True):
                if self.args.FOLD:
                    state = self.skip(state, n)
                else:
                    state = self.step(state, n, block.share, block.edge(i), i, True, False, 64)
                i, h = next_step(i, h, group)
        masked = self.first + group * edges
        for n in tl.range(seen, masked, disable_licm=True):
            state = self.step(state, n, block.share, block.edge(i), i, True, False)
            i, h = next_step(i, h, group)
        for n in tl.range(masked, self.end, disable_licm=True):
            state = self.step(state, n, block.share, i, i, False, False)
        return state

    @gluon.jit
    def add_biases(self, biases, ds, h, q_block):
        """The sums of ds [64, BLOCK_Q] beyond the reach, with those of this step."""
        if self.args.bias_sums is None:
            return biases
        else:
            kv_blocks = self.args.kv_blocks
            behind, before = self.block.side(q_block, self.args.score, h, kv_blocks.BLOCK_Q, kv_blocks.BLOCK_K)
            total = thread_sums(ds)
            return biases[0] + gl.where(behind, total, 0.0), biases[1] + gl.where(before, total, 0.0)

    @gluon.jit
    def store_biases(self, biases):
        """Writes the sums of each thread."""
        if self.args.bias_sums is not None:
            THREADS: gl.constexpr = 128
            block = self.block
            number = (block.b * self.args.h_q + block.share).to(gl.int64)
            number = number * gl.cdiv(self.args.kv_blocks.s_k, self.args.kv_blocks.BLOCK_K)
            number = number + block.start // self.args.kv_blocks.BLOCK_K
            layout: gl.constexpr = biases[0].type.layout
            # [32, 4]
            thread = gl.arange(0, 32, gl.SliceLayout(1, layout))[:, None] * 4
            thread = thread + gl.arange(0, 4, gl.SliceLayout(0, layout))[None, :]
            first = self.args.bias_sums + number * (4 * THREADS) + self.c * THREADS
            gl.store(first + thread, biases[0])
            gl.store(first + 2 * THREADS + thread, biases[1])

    @gluon.jit
    def steps(self, sums):
        """All steps of the block, those with the mask first. Returns the StepSums."""
        block = self.block
        group = self.args.group
        first = self.first
        BLOCK_Q: gl.constexpr = self.args.kv_blocks.BLOCK_Q
        columns: gl.constexpr = gl.SliceLayout(0, product_layout(BLOCK_Q))
        bounds = ()
        if self.args.MASKED and self.args.FOLD:
            bounds = bounds_of_rows(self.args.kv_blocks, block, block.edge(gl.to_tensor(0)), columns)
        # [BLOCK_Q]
        neg_lse = gl.zeros([BLOCK_Q], gl.float32, columns)
        if self.args.FOLD:
            neg_lse = self.shared.neg_lse.index(self.shared.q_ring.wait(first)).load(columns)
        state = sums, neg_lse, bounds
        if block.OWN_EDGES:
            sums, _, _ = self.own_steps(state)
        else:
            sums, _, _ = all_steps(self, state, block, group, first, self.end, self.args.MASKED)
        return sums


@gluon.jit
def consume(c: gl.constexpr, dk_desc, dv_desc, packed, shared, args):
    """Consumer c: dk and dv of its 64 keys, and its half of every dq, of one item after the other. Steps count on from
    item to item, as all that warps hand over does."""
    dropout = None
    if args.dropout is not None:
        dropout = opened(args.dropout)
    wait_for_last()
    n = gl.to_tensor(0)
    item = gl.to_tensor(0)
    shared.items.wait(0)
    while has_work(shared.items, item):
        n = consume_item(c, dk_desc, dv_desc, packed, shared, args, dropout, item, n)
        item += 1
        shared.items.wait(item)
    tma.store_wait(0)


@gluon.jit
def consume_item(c: gl.constexpr, dk_desc, dv_desc, packed, shared, args, dropout, item, first):
    """One kv block, whose first step is `first`. Returns the step after its last."""
    BLOCK_D: gl.constexpr = shared.k_tiles.shape[4]
    BLOCK_DV: gl.constexpr = shared.v_tiles.shape[4]
    block = read_record(shared.items, item, args.kv_blocks)
    # [64, BLOCK_D] and [64, BLOCK_DV], in parts
    dk = no_sums(BLOCK_D, shared.D_LAST)
    dv = no_sums(BLOCK_DV, shared.DV_LAST)
    # [64]
    kv_idx = block.start + c * 64 + gl.arange(0, 64, gl.SliceLayout(1, product_layout(args.kv_blocks.BLOCK_Q)))
    end = first + block.steps(args.group)
    SLOTS: gl.constexpr = shared.items.SLOTS
    slot = item % SLOTS
    v_slot = slot % shared.v_tiles.shape[0]
    keys = ()
    SMALL: gl.constexpr = in_parts(BLOCK_D, shared.D_LAST) and in_parts(BLOCK_DV, shared.DV_LAST)
    if args.FOLD and SMALL and packed is None:
        # There are registers for k: 5 % at d = 96, where a step waits for shared memory (notes/gluon_backward.md).
        LEFT: gl.constexpr = gl.DotOperandLayout(0, product_layout(args.kv_blocks.BLOCK_Q), 2)
        k = parts_of(own_rows(c, shared.k_tiles, slot), shared.D_LAST)
        keys = k[0].load(LEFT), k[1].load(LEFT)
    consumer = Consumer(c, args, dropout, shared, block, slot, v_slot, first, end, kv_idx, keys)
    if c > 0 or not args.AHEAD:
        shared.ds.give(c, first - 1)
    if SLOTS > 1:  # noqa: SIM102 - known when this is compiled, and the next is not
        if item > 0:  # the last dk has left
            tma.store_wait(0)
            shared.items.release(item - 1)
    biases = ()
    if args.bias_sums is not None:
        zero = thread_sums(gl.zeros([64, args.kv_blocks.BLOCK_Q], gl.float32, product_layout(args.kv_blocks.BLOCK_Q)))
        biases = zero, zero
    sums = consumer.steps(StepSums(dk, dv, biases))
    consumer.store_biases(sums.biases)
    shared.ds.take(c, end - 1)
    dq = consumer.issue_dq(end - 1)
    factor = 1.0 if dropout is None else dropout.factor
    block = read_record(shared.items, item, args.kv_blocks)  # once more: the loops need the registers
    store(consumer, dv_desc, None if packed is None else packed.dv, shared.v_tiles, v_slot, sums.dv, factor, block)
    dq = warpgroup_mma_wait(0, [dq])
    shared.outbox.claim(c, end - 1)
    shared.outbox.send(c, dq, args.scale)
    if shared.outbox.FOLLOWS:
        fence_async_shared()
    shared.outbox.follow(c, True)
    # Both consumers have read all of k when both have come here.
    shared.ds.give(c, end)
    shared.ds.take(c, end)
    if shared.v_tiles.shape[0] == 1:
        tma.store_wait(0)
        mbarrier.arrive(shared.v_empty, count=1)
    store(consumer, dk_desc, None if packed is None else packed.dk, shared.k_tiles, slot, sums.dk, args.scale, block)
    if SLOTS == 1:  # the next item comes to the same place
        tma.store_wait(0)
        shared.items.release(item)
    return end


@gluon.jit
def store(consumer, desc, x, tiles, slot, sums, factor, block):
    """Stores dk or dv of a consumer's keys, factor sums, in global memory, by way of its rows of k or v."""
    rows = own_rows(consumer.c, tiles, slot)
    store_sums(rows, sums, factor)
    fence_async_shared()
    leaving = tiles.index(slot).slice(consumer.c * 64, 64, 2)
    store_keys(desc, x, leaving, rows, block, block.start + consumer.c * 64, 0)


# The Hopper backward up to d = 128: a program owns 128 keys of a head at a time and walks over the rows that see them.
#
# Five groups of warps share the work. The producer is one warp: it draws kv blocks, and loads k, v, q and dout. Two
# consumers own 64 keys each, whose dk and dv stay in registers: `s = k q^T`, `p = exp(s - lse)`, `dp = v dout^T`,
# `ds = p (dp - delta)`, `dv += p dout`, `dk += ds q`. All tiles are transposed, so that p and ds are left operands as
# they are. dq needs the ds of both consumers, which therefore also goes through shared memory. Each consumer takes a
# half of `dq = ds^T k`, and a warp of its own adds that half to global memory in bulk. All query heads of a share pass
# through one program, so that their dk and dv are added up in registers.
#
# Programs stay on their multiprocessors and take one kv block after the other, so that the next k is loaded while
# the last one is in use, and the next q and dout while the last dk and dv leave.


BLOCK_K = gl.constexpr(128)
"""Keys of one program, 64 for each consumer."""


@gluon.jit(do_not_specialize=["group", "h_q", "q_blocks"])
def backward_kernel(
    q_desc, k_desc, v_desc, dout_desc, dk_desc, dv_desc, neg_lse_desc, neg_delta_desc, dq_desc, captured_desc,
    gradient_desc, packed, counter, span_q, span_k, scores, scheduler, dq_semaphore, group, h_q, q_blocks,
    FOLD: gl.constexpr, MASKED: gl.constexpr, EDGES: gl.constexpr, AHEAD: gl.constexpr, D_LAST: gl.constexpr,
    DV_LAST: gl.constexpr,
):  # fmt: skip
    """dk, dv, and dq_accum += ds^T k.

    q, dout: (b, h_q, s_q, d) in tiles of BLOCK_Q rows; k, v, dk, dv: (b, h_k, s_k, d) in tiles of 64 rows. neg_lse and
    neg_delta: of `preprocess_kernel`. dq_desc: dq_accum, boxes of tiles of `to_register_order`, two of a q block; or dq
    itself, if each q block has one kv block. packed: a PackedGradients, or None. scores: BackwardScoreArgs. scheduler:
    TileSchedulerArgs. dq_semaphore: None where dq may be added to in any order. counter: two zeros, which are zeros
    again in the end. EDGES: consumers have the mask where their own keys need it. AHEAD: see BackwardArgs. D_LAST,
    DV_LAST: how many columns of the upper halves of d and d_v are in use. captured_desc: of a captured tensor of which
    score functions take tiles, (b or 1, h_q or 1, s_q, s_k) in tiles of BLOCK_Q rows and 64 keys, or None.
    gradient_desc: the same of its gradient, if that is ds, or None.
    """
    DTYPE: gl.constexpr = q_desc.dtype
    BLOCK_Q: gl.constexpr = q_desc.block_shape[2]
    BLOCK_D: gl.constexpr = q_desc.block_shape[3]
    BLOCK_DV: gl.constexpr = v_desc.block_shape[3]
    CAPTURED: gl.constexpr = captured_desc is not None
    DS_SHAPE: gl.constexpr = [BLOCK_Q, BLOCK_K] if CAPTURED else [BLOCK_K, BLOCK_Q]
    DS: gl.constexpr = gl.NVMMASharedLayout.get_default_for(DS_SHAPE, DTYPE)
    RECORDS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    TIGHT: gl.constexpr = scores.tight
    # As much as there is room for: v has two places where its rows are short, and k one beside captured tiles where
    # they are long.
    SLOTS: gl.constexpr = 1 if (CAPTURED or TIGHT) and BLOCK_D > 64 else K_SLOTS
    V_SLOTS: gl.constexpr = K_SLOTS if BLOCK_DV == 64 and not TIGHT else 1
    q_tiles = gl.allocate_shared_memory(DTYPE, [2, 1, 1, BLOCK_Q, BLOCK_D], q_desc.layout)
    dout_tiles = gl.allocate_shared_memory(DTYPE, [2, 1, 1, BLOCK_Q, BLOCK_DV], dout_desc.layout)
    k_tiles = gl.allocate_shared_memory(DTYPE, [SLOTS, 1, 1, BLOCK_K, BLOCK_D], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(DTYPE, [V_SLOTS, 1, 1, BLOCK_K, BLOCK_DV], v_desc.layout)
    DIRECT: gl.constexpr = len(dq_desc.block_shape) == 4
    WIDTH: gl.constexpr = dq_desc.block_shape[1]
    DQ_SHAPE: gl.constexpr = [2, 1, 1, 64, 64] if DIRECT else [2, BLOCK_Q * BLOCK_D // 2 // WIDTH, WIDTH]
    dq_tiles = gl.allocate_shared_memory(dq_desc.dtype, DQ_SHAPE, dq_desc.layout)
    captured_tiles = None
    if CAPTURED:
        captured_tiles = gl.allocate_shared_memory(captured_desc.dtype, [4, 1, 1, BLOCK_Q, 64], captured_desc.layout)
    records = gl.allocate_shared_memory(gl.int32, [(SLOTS + 1) * NUMBERS, 1], RECORDS)
    # Triton gives the place of a barrier that nobody waits for to others, while it is being made.
    v_empty = None
    if V_SLOTS == 1:
        v_empty = new_barriers(1, 2).index(0)
    # Of an item: both consumers, and the warps that send what they make, need the record.
    items = Slots(k_tiles, records, new_barriers(SLOTS + 1, 1), new_barriers(SLOTS, 4), SLOTS, NUMBERS, 1)
    shared = Shared(
        new_ring(q_tiles, Q_EMPTY, 2, THREADS), new_ring(dout_tiles, DOUT_EMPTY, 2, THREADS), items, k_tiles, v_tiles,
        v_empty, gl.allocate_shared_memory(gl.float32, [2, BLOCK_Q], neg_lse_desc.layout),
        gl.allocate_shared_memory(gl.float32, [2, BLOCK_Q], neg_delta_desc.layout),
        DSExchange(gl.allocate_shared_memory(DTYPE, [2, DS_SHAPE[0], DS_SHAPE[1]], DS), CAPTURED),
        Outbox(dq_tiles, new_barriers(2, 1), BLOCK_Q == 64 and D_LAST == 64, DIRECT), captured_tiles, D_LAST, DV_LAST,
    )  # fmt: skip
    s_q = q_desc.shape[2]
    s_k = k_desc.shape[2]
    EXACT: gl.constexpr = scores.mask.exact and scores.mask.ordered and not scores.mask.bounded
    kv_blocks = KVBlocks(
        scores.mask, span_q, span_k, s_q, s_k, q_blocks, BLOCK_Q, BLOCK_K,
        scores.score if scores.constant_beyond else None, EDGES and EXACT,
    )  # fmt: skip
    args = BackwardArgs(
        kv_blocks, scores.score, scores.scale, scores.dropout, dq_semaphore, group, h_q, FOLD, MASKED, AHEAD,
        scores.bias_sums, scores.captured, scores.gradient,
    )  # fmt: skip
    start_next()
    gl.warp_specialize([
        (consume, (0, dk_desc, dv_desc, packed, shared, args)),
        (consume, (1, dk_desc, dv_desc, packed, shared, args)),
        (load_items, (
            q_desc, dout_desc, k_desc, v_desc, neg_lse_desc, neg_delta_desc, captured_desc, shared, counter, scheduler,
            args,
        )),
        (reduce_dq, (0, dq_desc, gradient_desc, shared, args)),
        (reduce_dq, (1, dq_desc, gradient_desc, shared, args)),
    ], [4, 1, 1, 1], [CONSUMER_REGISTERS, OTHER_REGISTERS, OTHER_REGISTERS, OTHER_REGISTERS])  # fmt: skip
