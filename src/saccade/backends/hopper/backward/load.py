"""The producer of a backward program that has one kv block: one warp that brings in k and v, and then q and dout.

A tile has its columns in CHUNKS side by side, each of COLUMNS of them. One that ends in rows which are not in use lands
for the producer alone, which clears them before any other warp sees the tile.
"""

# No `from __future__ import annotations` here: an aggregate reads its fields' types.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from saccade.backends.hopper.pipeline import Ring
from saccade.backends.hopper.shim import Value, aggregate, tma_load, wait_for_last
from saccade.backends.hopper.tiles import zero_tail


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
class QBlockPlace:
    """BLOCK_Q rows of one head: where they are in q and dout, and, at `place`, in -lse and -delta."""

    b: gl.tensor
    h: gl.tensor
    row: gl.tensor
    place: gl.tensor
    used: gl.tensor
    """how many rows are in use"""
    whole: Value
    """whether all are"""


@gluon.jit
def q_block_of(block, n, args):
    """The QBlockPlace of step n."""
    BLOCK_Q: gl.constexpr = args.kv_blocks.BLOCK_Q
    h, q_block = block.place(n, args.group)
    row = q_block * BLOCK_Q
    place = block.q_block_number(h, q_block, args.h_q, args.kv_blocks.q_blocks) * BLOCK_Q
    whole = args.kv_blocks.span_q is None or row + BLOCK_Q <= block.rows
    b, at = block.row_of_q(row)
    return QBlockPlace(b, h, at, place, block.rows - row, whole)


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
    def start(self, n, q_block):
        """Starts the copies of a q block to stage n; `end` has to follow. The two are apart so that a tile of q and one
        of dout land at the same time."""
        stage = self.ring.claim(n)
        barrier = self.ring.target(stage, q_block.whole)
        mbarrier.expect(barrier, self.BLOCK_Q * (2 * self.COLUMNS * self.CHUNKS + 4))
        self.copy(stage, barrier, q_block)

    @gluon.jit
    def copy(self, stage, barrier, q_block):
        tiles = self.ring.tiles
        first = self.ring.first_of(stage)
        copy(self.desc, q_block.b, q_block.h, q_block.row, barrier, tiles, first, self.COLUMNS, self.CHUNKS)
        tma_load(self.numbers_desc, [q_block.place], barrier, self.numbers.index(stage))

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
