"""The backward's producers: one for programs that have one kv block, one for programs that draw kv blocks."""

# No `from __future__ import annotations` here: an aggregate reads its fields' types.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from saccade.backends.hopper.backward.tile_scheduler import (
    close,
    count_items,
    find_kv_block,
    first_item,
    next_item,
    write_record,
)
from saccade.backends.hopper.pipeline import Ring
from saccade.backends.hopper.shim import Value, aggregate, tma_load, wait_for_last
from saccade.backends.hopper.tiles import zero_tail

# The producer of a backward program that has one kv block: one warp that loads k and v, and then q and dout.
#
# A tile is CHUNKS of COLUMNS columns side by side. If it ends in rows which are not in use, only the producer waits for
# its copies. It clears these rows before any other warp sees the tile.


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


@aggregate
class QBlockRows:
    """BLOCK_Q rows of one head: where they are in q and dout, and, at `offset`, in -lse and -delta."""

    b: gl.tensor
    h: gl.tensor
    row: gl.tensor
    offset: gl.tensor
    used: gl.tensor
    """how many rows are in use"""
    whole: Value
    """whether all are"""


@gluon.jit
def q_block_of(block, n, args):
    """The QBlockRows of step n."""
    BLOCK_Q: gl.constexpr = args.kv_blocks.BLOCK_Q
    h, q_block = block.step_at(n, args.group)
    row = q_block * BLOCK_Q
    offset = block.q_block_number(h, q_block, args.h_q, args.kv_blocks.q_blocks) * BLOCK_Q
    whole = args.kv_blocks.span_q is None or row + BLOCK_Q <= block.rows
    b, at = block.row_of_q(row)
    return QBlockRows(b, h, at, offset, block.rows - row, whole)


@aggregate
class RowLoader:
    """Copies q blocks, and a number for each of their rows, to the stages of a ring."""

    desc: Value
    numbers_desc: Value
    ring: Ring
    numbers: gl.shared_memory_descriptor
    BLOCK_Q: gl.constexpr
    COLUMNS: gl.constexpr
    CHUNKS: gl.constexpr

    @gluon.jit
    def start(self, n, q_block, MORE: gl.constexpr = 0):
        """Starts the copies of a q block to stage n; `end` has to follow. The two are apart so that a tile of q and one
        of dout land at the same time. Returns the stage, and the barrier, which waits for MORE bytes besides."""
        stage = self.ring.claim(n)
        barrier = self.ring.target(stage, q_block.whole)
        mbarrier.expect(barrier, self.BLOCK_Q * (2 * self.COLUMNS * self.CHUNKS + 4) + MORE)
        self.copy(stage, barrier, q_block)
        return stage, barrier

    @gluon.jit
    def copy(self, stage, barrier, q_block):
        tiles = self.ring.tiles
        first = self.ring.first_of(stage)
        copy(self.desc, q_block.b, q_block.h, q_block.row, barrier, tiles, first, self.COLUMNS, self.CHUNKS)
        tma_load(self.numbers_desc, [q_block.offset], barrier, self.numbers.index(stage))

    @gluon.jit
    def end(self, n, tails, q_block):
        """Clears the rows that are not in use in stage n, unless all are. Returns tails, counted on."""
        if not q_block.whole:
            stage = n % self.ring.STAGES
            mbarrier.wait(self.ring.landing(), tails & 1)
            self.clear(stage, q_block)
            self.ring.fill(stage)
            tails += 1
        return tails

    @gluon.jit
    def clear(self, stage, q_block):
        first = self.ring.first_of(stage)
        clear(self.ring.tiles, first, q_block.used, self.BLOCK_Q, self.COLUMNS, self.CHUNKS)


@gluon.jit
def load_kv(
    k_desc, v_desc, shared, block, kv_blocks, COLUMNS: gl.constexpr, CHUNKS: gl.constexpr, V_CHUNKS: gl.constexpr
):
    """Fills k and v. Returns how many copies landed at the barrier that q's ring has for the producer."""
    BLOCK_K: gl.constexpr = kv_blocks.BLOCK_K
    BYTES: gl.constexpr = BLOCK_K * COLUMNS * (CHUNKS + V_CHUNKS) * 2
    tails = gl.to_tensor(0)
    b, at = block.row_of_k(block.start)
    if kv_blocks.span_k is None or block.start + BLOCK_K <= block.keys:
        mbarrier.expect(shared.kv_full, BYTES)
        copy(k_desc, b, block.h_k, at, shared.kv_full, shared.k_tiles, 0, COLUMNS, CHUNKS)
        copy(v_desc, b, block.h_k, at, shared.kv_full, shared.v_tiles, 0, COLUMNS, V_CHUNKS)
    else:
        landing = shared.q_ring.landing()
        mbarrier.expect(landing, BYTES)
        copy(k_desc, b, block.h_k, at, landing, shared.k_tiles, 0, COLUMNS, CHUNKS)
        copy(v_desc, b, block.h_k, at, landing, shared.v_tiles, 0, COLUMNS, V_CHUNKS)
        mbarrier.wait(landing, 0)
        tails += 1
        clear(shared.k_tiles, 0, block.keys - block.start, BLOCK_K, COLUMNS, CHUNKS)
        clear(shared.v_tiles, 0, block.keys - block.start, BLOCK_K, COLUMNS, V_CHUNKS)
        mbarrier.arrive(shared.kv_full, count=1)
    return tails


@gluon.jit
def load(
    q_desc, dout_desc, k_desc, v_desc, neg_lse_desc, neg_delta_desc, shared, block, args,
    COLUMNS: gl.constexpr, CHUNKS: gl.constexpr, V_CHUNKS: gl.constexpr,
):  # fmt: skip
    """The producer: k and v once, then q and dout with the numbers of their rows, head after head."""
    BLOCK_Q: gl.constexpr = args.kv_blocks.BLOCK_Q
    q = RowLoader(q_desc, neg_lse_desc, shared.q_ring, shared.neg_lse, BLOCK_Q, COLUMNS, CHUNKS)
    dout = RowLoader(dout_desc, neg_delta_desc, shared.dout_ring, shared.neg_delta, BLOCK_Q, COLUMNS, V_CHUNKS)
    q_tails = load_kv(k_desc, v_desc, shared, block, args.kv_blocks, COLUMNS, CHUNKS, V_CHUNKS)
    wait_for_last()  # for -lse and -delta; k and v come meanwhile
    dout_tails = gl.to_tensor(0)
    for n in range(block.steps(args.group)):
        q_block = q_block_of(block, n, args)
        q.start(n, q_block)
        dout.start(n, q_block)
        q_tails = q.end(n, q_tails, q_block)
        dout_tails = dout.end(n, dout_tails, q_block)


# The producer of backward programs that stay: one warp that draws kv blocks and loads what each one needs.


@gluon.jit
def start_kv(k_desc, v_desc, shared, drawn, whole, block):
    """Starts the copies of k, and of v if it has as many slots, to the slot of item `drawn`; `end_kv` has to follow."""
    WITH_V: gl.constexpr = shared.v_tiles.shape[0] > 1
    slot = shared.items.claim(drawn)
    barrier = shared.items.target(slot, whole)
    mbarrier.expect(barrier, shared.k_tiles.shape[3] * shared.k_tiles.shape[4] * (4 if WITH_V else 2))
    b, at = block.row_of_k(block.start)
    tma_load(k_desc, [b, block.h_k, at, 0], barrier, shared.k_tiles.index(slot))
    if WITH_V:
        tma_load(v_desc, [b, block.h_k, at, 0], barrier, shared.v_tiles.index(slot))


@gluon.jit
def clear_keys(tiles, slot, block):
    """Clears what is not in use of a tile of k or v."""
    ROWS: gl.constexpr = tiles.shape[3]
    COLUMNS: gl.constexpr = tiles.shape[4]
    zero_tail(tiles.index(slot).reshape([ROWS, COLUMNS]), block.keys - block.start, ROWS, COLUMNS)


@gluon.jit
def end_kv(shared, drawn, whole, tails, block):
    """Clears what is not in use of k and v, as `RowLoader.end`."""
    if not whole:
        slot = drawn % shared.items.SLOTS
        mbarrier.wait(shared.items.landing(), tails & 1)
        clear_keys(shared.k_tiles, slot, block)
        if shared.v_tiles.shape[0] > 1:
            clear_keys(shared.v_tiles, slot, block)
        shared.items.fill(slot)
        tails += 1
    return tails


@gluon.jit
def start_q(q, captured_desc, shared, n, block, q_block, args):
    """Starts the copies of q, as `RowLoader.start`, and of what the score function captures."""
    if captured_desc is None:
        q.start(n, q_block)
    else:
        stage, barrier = q.start(n, q_block, 2 * q.BLOCK_Q * args.kv_blocks.BLOCK_K)
        b = q_block.b if args.captured.per_batch_row else q_block.b * 0
        h = q_block.h if args.captured.per_head else q_block.h * 0
        for c in gl.static_range(2):
            tma_load(
                captured_desc, [b, h, q_block.row, block.start + c * 64], barrier, shared.captured.index(2 * stage + c)
            )


@gluon.jit
def start_dout(dout, v_desc, shared, drawn, with_v, n, whole, block, q_block):
    """Starts the copies of dout, as `RowLoader.start`; `with_v` also that of v, to the same barrier, so that who waits
    for the one need not wait for the other."""
    BYTES: gl.constexpr = dout.BLOCK_Q * (2 * dout.COLUMNS + 4)
    if shared.v_empty is not None:  # noqa: SIM102 - known when this is compiled, and the next is not
        if with_v:
            mbarrier.wait(shared.v_empty, (drawn & 1) ^ 1)
    stage = dout.ring.claim(n)
    barrier = dout.ring.target(stage, whole)
    if with_v:
        mbarrier.expect(barrier, BYTES + shared.v_tiles.shape[3] * shared.v_tiles.shape[4] * 2)
        b, at = block.row_of_k(block.start)
        tma_load(v_desc, [b, block.h_k, at, 0], barrier, shared.v_tiles.index(0))
    else:
        mbarrier.expect(barrier, BYTES)
    dout.copy(stage, barrier, q_block)


@gluon.jit
def end_dout(dout, shared, with_v, n, whole, tails, block, q_block):
    """Clears what is not in use of dout, and of v, as `RowLoader.end`."""
    if not whole:
        stage = n % dout.ring.STAGES
        mbarrier.wait(dout.ring.landing(), tails & 1)
        if with_v:
            clear_keys(shared.v_tiles, 0, block)
        dout.clear(stage, q_block)
        dout.ring.fill(stage)
        tails += 1
    return tails


@gluon.jit
def load_items(
    q_desc, dout_desc, k_desc, v_desc, neg_lse_desc, neg_delta_desc, captured_desc, shared, counter, scheduler, args
):  # fmt: skip
    """Draws items until there are no more, and loads what each of them needs.

    k of the next item comes while this one is worked on. So does v, or where there is no second place for it, after
    the next item's first q, as soon as the last dv has left from there; it is needed later than k.
    """
    BLOCK_D: gl.constexpr = shared.k_tiles.shape[4]
    BLOCK_DV: gl.constexpr = shared.v_tiles.shape[4]
    kv_blocks = args.kv_blocks
    ORDERED: gl.constexpr = args.dq_semaphore is not None
    q = RowLoader(q_desc, neg_lse_desc, shared.q_ring, shared.neg_lse, kv_blocks.BLOCK_Q, BLOCK_D, 1)
    dout = RowLoader(dout_desc, neg_delta_desc, shared.dout_ring, shared.neg_delta, kv_blocks.BLOCK_Q, BLOCK_DV, 1)
    n = gl.to_tensor(0)
    kv_tails = gl.to_tensor(0)
    q_tails = gl.to_tensor(0)
    dout_tails = gl.to_tensor(0)
    drawn = gl.to_tensor(0)
    items = count_items(kv_blocks, scheduler)
    item = first_item(counter, ORDERED)
    while item < items:
        block = find_kv_block(kv_blocks, item, scheduler, ORDERED)
        write_record(shared.items, drawn, block)
        kv_whole = kv_blocks.span_k is None or block.start + kv_blocks.BLOCK_K <= block.keys
        start_kv(k_desc, v_desc, shared, drawn, kv_whole, block)
        wait_for_last()  # for -lse and -delta; the first k comes meanwhile
        for i in range(block.steps(args.group)):
            q_block = q_block_of(block, i, args)
            if shared.v_tiles.shape[0] > 1:
                with_v = False
                whole = q_block.whole
            else:
                with_v = i == 0
                whole = q_block.whole and (kv_whole or i > 0)
            start_q(q, captured_desc, shared, n, block, q_block, args)
            if i == 0:
                kv_tails = end_kv(shared, drawn, kv_whole, kv_tails, block)
            start_dout(dout, v_desc, shared, drawn, with_v, n, whole, block, q_block)
            q_tails = q.end(n, q_tails, q_block)
            dout_tails = end_dout(dout, shared, with_v, n, whole, dout_tails, block, q_block)
            n += 1
        drawn += 1
        item = next_item(counter, ORDERED)
    close(counter, shared.items, drawn)
