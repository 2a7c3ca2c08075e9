"""The Hopper backward: a program owns 128 keys of one key head and walks over the query rows that see them.

Five groups of warps share the work. One warp loads tiles of q and dout. Two consumers own 64 keys each, whose dk and dv
stay there: `s = k q^T`, `p = exp(s - lse)`, `dp = v dout^T`, `ds = p (dp - delta)`, `dv += p dout`, `dk += ds q`:
everything transposed so that p and ds are left operands without a detour. dq needs the ds of both consumers, which
therefore also goes through shared memory; each consumer takes a half of `dq = ds^T k`, and a warp of its own adds that
half to global memory in bulk. All query heads of a group pass through one program, so dk and dv need no addition.

A consumer's step i: issue s(i) and dq(i - 1); exp2 while dq(i - 1) runs; hand dq(i - 1) over; issue dp(i) and dv; ds
while dv runs; issue dk. Taking dq one step later lets the consumers drift half a step apart, where a barrier between
`ds` and `dq` would make them meet. docs/findings/gluon_backward.md has what each choice was worth.

Products are accumulated onto -lse / scale and -delta instead of zeros where that is cheaper (FOLD), and the mask is
part of that start. Blocks with and without the mask have loops of their own: a branch between products in flight cost
the forward 8 % even where it was not taken. Nothing is taken out of the loops (disable_licm): the addresses that LLVM
would compute before them occupy registers, and others spill.
"""

# pyright: reportArgumentType=false, reportCallIssue=false

import triton
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

from saccade.backends.device.records import LOG2E, plain_int
from saccade.backends.device.tiles import head, load_tile, logits, tile_range, used_length, visible
from saccade.backends.gluon.pipeline import DOUT_EMPTY, Q_EMPTY, Exchange, Outbox, Ring, new_barriers
from saccade.backends.gluon.shim import aggregate, tma_load, tma_reduce_add, tma_store
from saccade.backends.gluon.tiles import between, zero_tail

BLOCK_K = gl.constexpr(128)
"""Keys of one program, 64 for each consumer."""
THREADS = gl.constexpr(288)
"""Two consumers and the warp that loads."""


@triton.jit(do_not_specialize=["h_q", "s_q", "blocks"], do_not_specialize_on_alignment=["dlse", "lse"])
def prepare_kernel(
    dout, out, dlse, lse, delta, start, dq_sum, used_q, h_q, s_q, blocks, unit,
    D_V: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """delta = dlse - rowsum(dout out) and start = lse unit, both ready to be added; clears dq_sum.

    delta and start have whole blocks of rows for each head: beyond the rows in use, and where a row has no keys, start
    is -inf, so that p = 0, and delta is 0.
    """
    bh = tl.program_id(0) // blocks
    b = bh // h_q
    h = bh % h_q
    first = tl.program_id(0) % blocks * ROWS
    rows = used_length(used_q, b, s_q)
    # [ROWS, d_v]
    dout_tile = load_tile(dout, head(dout, b, h), first, rows, ROWS, D_V, BLOCK_DV, True).to(tl.float32)
    out_tile = load_tile(out, head(out, b, h), first, rows, ROWS, D_V, BLOCK_DV, True).to(tl.float32)
    # [ROWS]
    q_idx = first + tl.arange(0, ROWS)
    place = bh.to(tl.int64) * s_q + q_idx
    row = -tl.sum(dout_tile * out_tile, 1)
    if dlse is not None:
        row += tl.load(dlse + place, mask=q_idx < rows, other=0.0)
    row_lse = tl.load(lse + place, mask=q_idx < rows, other=float("-inf"))
    padded = bh.to(tl.int64) * (blocks * ROWS) + q_idx
    tl.store(delta + padded, row)
    tl.store(start + padded, tl.where(row_lse == float("-inf"), float("-inf"), row_lse * unit))
    # [ROWS BLOCK_D]
    tile = dq_sum + tl.program_id(0).to(tl.int64) * (ROWS * BLOCK_D)
    tl.store(tile + tl.arange(0, ROWS * BLOCK_D), tl.zeros([ROWS * BLOCK_D], tl.float32))


@gluon.jit
def packed(x):
    """A tile of products [64, N] as [64 N], in the order in which a thread owns four neighbours and a warp 128."""
    N: gl.constexpr = x.shape[1]
    return x.reshape([4, 2, 8, N // 8, 4, 2]).permute(3, 0, 2, 4, 1, 5).reshape([64 * N])


@gluon.jit
def unpacked(x, N: gl.constexpr):
    """[64, N] from what `packed` made."""
    return x.reshape([N // 8, 4, 8, 4, 2, 2]).permute(1, 4, 2, 0, 3, 5).reshape([64, N])


@gluon.jit(do_not_specialize=["h_q", "s_q", "blocks"])
def finish_kernel(
    dq_sum, dq, used_q, h_q, s_q, blocks, scale,
    D: gl.constexpr, BLOCK_Q: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    """dq = scale dq_sum, in the order and dtype of dq, for one [64, COLUMNS] tile; zero in rows that are not in use."""
    # Which tile: blocks of BLOCK_Q rows, in them halves of BLOCK_Q rows or of BLOCK_D columns.
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    products: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    order: gl.constexpr = packed(gl.zeros([64, COLUMNS], gl.float32, products)).type.layout
    half = gl.program_id(0) % 2
    block = gl.program_id(0) // 2 % blocks
    bh = gl.program_id(0) // 2 // blocks
    b = bh // h_q
    if BLOCK_Q == 128:
        row, column = block * 128 + half * 64, half * 0
    else:
        row, column = block * 64, half * COLUMNS
    # [64 COLUMNS]
    tile = gl.program_id(0).to(gl.int64) * (64 * COLUMNS)
    x = gl.load(dq_sum + tile + gl.arange(0, 64 * COLUMNS, order)) * scale
    # [64, COLUMNS]
    y = gl.convert_layout(unpacked(x, COLUMNS).to(dq.ptr.dtype.element_ty), layout)
    q_idx = row + gl.arange(0, 64, gl.SliceLayout(1, layout))
    y = gl.where((q_idx < used_length(used_q, b, s_q))[:, None], y, 0.0)
    d = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    stride = plain_int(dq.stride_s)
    if dq.wide:
        stride = stride.to(gl.int64)
    place = (q_idx * (stride * dq.unit))[:, None] + d[None, :]
    gl.store(head(dq, b, bh % h_q) + place, y, mask=(q_idx < s_q)[:, None] & (d < D)[None, :])


@aggregate
class KeyBlock:
    """Where a program's keys are, and which blocks of rows see them: [first, end), and all of them [core, core_end)."""

    b: gl.tensor
    h_k: gl.tensor
    start: gl.tensor
    rows: gl.tensor
    keys: gl.tensor
    first: gl.tensor
    core: gl.tensor
    core_end: gl.tensor
    end: gl.tensor

    @gluon.constexpr_function
    def __init__(self, b, h_k, start, rows, keys, first, core, core_end, end):
        self.b = b
        self.h_k = h_k
        self.start = start
        self.rows = rows
        self.keys = keys
        self.first = first
        self.core = core
        self.core_end = core_end
        self.end = end

    @gluon.jit
    def steps(self, group):
        """All heads of the group, one after the other."""
        return group * (self.end - self.first)

    @gluon.jit
    def place(self, n, group):
        """Head and block of rows of step n.

        In one loop over steps: a variable of an outer loop that only bounds an inner one is lost by Gluon 3.6.
        """
        blocks = self.end - self.first
        return self.h_k * group + n // blocks, self.first + n % blocks


@aggregate
class Shared:
    """What the groups of warps share."""

    q_ring: Ring
    dout_ring: Ring
    k_tile: gl.shared_memory_descriptor
    v_tile: gl.shared_memory_descriptor
    keys_full: gl.shared_memory_descriptor
    landed: gl.shared_memory_descriptor
    starts: gl.shared_memory_descriptor
    deltas: gl.shared_memory_descriptor
    shares: Exchange
    outbox: Outbox

    @gluon.constexpr_function
    def __init__(self, q_ring, dout_ring, k_tile, v_tile, keys_full, landed, starts, deltas, shares, outbox):
        self.q_ring = q_ring
        self.dout_ring = dout_ring
        self.k_tile = k_tile
        self.v_tile = v_tile
        self.keys_full = keys_full
        self.landed = landed
        self.starts = starts
        self.deltas = deltas
        self.shares = shares
        self.outbox = outbox


@gluon.jit
def key_block(order, mask, used_q, used_k, s_q, s_k, BLOCK_Q: gl.constexpr):
    """This program's KeyBlock. In a section of heads the first keys come first: a causal mask gives them most rows."""
    blocks = plain_int(order.blocks)
    size = plain_int(order.section)
    number = gl.program_id(0) // (blocks * size)
    rest = gl.program_id(0) - number * (blocks * size)
    size = gl.minimum(size, plain_int(order.heads) - number * size)
    bh = number * plain_int(order.section) + rest % size
    b = bh // plain_int(order.h_k)
    start = rest // size * BLOCK_K
    rows = used_length(used_q, b, s_q)
    keys = used_length(used_k, b, s_k)
    # [BLOCK_K]
    kv_idx = start + gl.arange(0, BLOCK_K, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    lo, hi, core_lo, core_hi = mask.rows_of(mask.data, b, kv_idx, keys - rows)
    first, core, core_end, end = tile_range(lo, hi, core_lo, core_hi, kv_idx < keys, rows, BLOCK_Q)
    if start + BLOCK_K > keys:  # some keys are not in use, and nothing but the mask hides them
        core = end
        core_end = end
    if end <= first:  # nobody sees these keys: one block, all hidden, so that no loop has to think of none
        first = first * 0
        core = first + BLOCK_Q
        core_end = core
        end = core
    return KeyBlock(
        b, bh % plain_int(order.h_k), start, rows, keys, first // BLOCK_Q, core // BLOCK_Q, core_end // BLOCK_Q,
        end // BLOCK_Q,
    )  # fmt: skip


@gluon.jit
def load_rows(
    desc, numbers_desc, ring, numbers, landed, tails, n, block, h, row, place, used_q,
    BLOCK_Q: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    """Fills stage n of a ring with BLOCK_Q rows of one head and what goes with them. Returns tails, counted on."""
    BYTES: gl.constexpr = BLOCK_Q * (2 * COLUMNS + 4)
    stage = ring.claim(n)
    tile = ring.tiles.index(stage)
    if used_q is None or row + BLOCK_Q <= block.rows:
        full = ring.announce(stage, BYTES)
        tma_load(desc, [block.b, h, row, 0], full, tile)
        tma_load(numbers_desc, [place], full, numbers.index(stage))
    else:
        mbarrier.expect(landed, BYTES)
        tma_load(desc, [block.b, h, row, 0], landed, tile)
        tma_load(numbers_desc, [place], landed, numbers.index(stage))
        mbarrier.wait(landed, tails & 1)
        zero_tail(tile.reshape([BLOCK_Q, COLUMNS]), block.rows - row, BLOCK_Q, COLUMNS)
        ring.fill(stage)
        tails += 1
    return tails


@gluon.jit
def load_keys(k_desc, v_desc, shared, block, used_k, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr):
    """Fills k and v. Returns how many copies landed at a barrier of their own."""
    BYTES: gl.constexpr = BLOCK_K * (BLOCK_D + BLOCK_DV) * 2
    tails = gl.to_tensor(0)
    if used_k is None or block.start + BLOCK_K <= block.keys:
        mbarrier.expect(shared.keys_full, BYTES)
        tma_load(k_desc, [block.b, block.h_k, block.start, 0], shared.keys_full, shared.k_tile)
        tma_load(v_desc, [block.b, block.h_k, block.start, 0], shared.keys_full, shared.v_tile)
    else:
        mbarrier.expect(shared.landed, BYTES)
        tma_load(k_desc, [block.b, block.h_k, block.start, 0], shared.landed, shared.k_tile)
        tma_load(v_desc, [block.b, block.h_k, block.start, 0], shared.landed, shared.v_tile)
        mbarrier.wait(shared.landed, 0)
        tails += 1
        zero_tail(shared.k_tile.reshape([BLOCK_K, BLOCK_D]), block.keys - block.start, BLOCK_K, BLOCK_D)
        zero_tail(shared.v_tile.reshape([BLOCK_K, BLOCK_DV]), block.keys - block.start, BLOCK_K, BLOCK_DV)
        mbarrier.arrive(shared.keys_full, count=1)
    return tails


@gluon.jit
def load(
    q_desc, dout_desc, k_desc, v_desc, start_desc, delta_desc, shared, block, used_q, used_k, group, h_q, q_blocks,
    BLOCK_Q: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr,
):  # fmt: skip
    """The producer: k and v once, then q and dout with what goes with their rows, head after head."""
    # Copies of a tile that ends in rows which are not in use land at a barrier of their own, and are cleared.
    tails = load_keys(k_desc, v_desc, shared, block, used_k, BLOCK_D, BLOCK_DV)
    for n in range(block.steps(group)):
        h, q_block = block.place(n, group)
        row = q_block * BLOCK_Q
        place = ((block.b * h_q + h) * q_blocks + q_block) * BLOCK_Q
        tails = load_rows(
            q_desc, start_desc, shared.q_ring, shared.starts, shared.landed, tails, n, block, h, row, place, used_q,
            BLOCK_Q, BLOCK_D,
        )  # fmt: skip
        tails = load_rows(
            dout_desc, delta_desc, shared.dout_ring, shared.deltas, shared.landed, tails, n, block, h, row, place,
            used_q, BLOCK_Q, BLOCK_DV,
        )  # fmt: skip


@gluon.jit
def dq_tile(c: gl.constexpr, n, block, group, h_q, q_blocks):
    """Which tile of dq_sum consumer c's half of dq of step n is."""
    h, q_block = block.place(n, group)
    return ((block.b * h_q + h) * q_blocks + q_block) * 2 + c


@gluon.jit
def reduce(c: gl.constexpr, sum_desc, outbox, block, group, h_q, q_blocks):
    """Adds consumer c's halves of dq to global memory, but for the last, which the consumer adds itself."""
    for n in range(block.steps(group) - 1):
        outbox.receive(c)
        tma_reduce_add(sum_desc, [dq_tile(c, n, block, group, h_q, q_blocks), 0], outbox.tiles.index(c))
        tma.store_wait(0)
        outbox.clear(c)


@gluon.jit
def own_rows(c: gl.constexpr, tile):
    """Consumer c's 64 rows of k or v, [64, BLOCK_D]."""
    return tile.reshape([BLOCK_K, tile.shape[3]]).slice(c * 64, 64, 0)


@gluon.jit
def issue_dq(c: gl.constexpr, shared, n, BLOCK_Q: gl.constexpr, BLOCK_D: gl.constexpr):
    """Starts consumer c's half of dq = ds^T k of step n: of its 128 rows, or of the columns of its 64."""
    COLUMNS: gl.constexpr = BLOCK_D * BLOCK_Q // 128
    # [64, COLUMNS]
    dq = gl.zeros([64, COLUMNS], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16]))
    # [BLOCK_K, BLOCK_Q]
    ds = shared.shares.tiles.index(n & 1)
    # [BLOCK_K, BLOCK_D]
    k = shared.k_tile.reshape([BLOCK_K, BLOCK_D])
    if BLOCK_Q == 128:
        ds = ds.slice(c * 64, 64, 1)
    else:
        k = k.slice(c * COLUMNS, COLUMNS, 1)
    return warpgroup_mma(ds.permute((1, 0)), k, dq, use_acc=False, is_async=True)


@gluon.jit
def onto(numbers, zero):
    """One number [BLOCK_Q] for each row as the start [64, BLOCK_Q] of a product."""
    start, _ = gl.broadcast(gl.expand_dims(numbers, 0), zero)
    return start


@gluon.jit
def hidden(x, mask, block, row, kv_idx):
    """x [64, BLOCK_Q] where the keys see the rows from `row` on, and -inf elsewhere. Rows that are not in use need no
    mask: their start is -inf."""
    off = block.keys - block.rows
    if mask.exact:
        lo, hi, _, _ = mask.rows_of(mask.data, block.b, kv_idx, off)
        return between(x, lo - row, gl.where(kv_idx < block.keys, hi, 0) - row, True)
    else:  # only the branch that is taken has a type
        q_idx = row + gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))
        seen = visible(mask, block.b, q_idx[None, :], kv_idx[:, None], block.rows, block.keys, off)
        return gl.where(seen, x, float("-inf"))


@gluon.jit
def step(
    c: gl.constexpr, dk, dv, start, n, steps, shared, block, mask, score, h, row, kv_idx, scale,
    BLOCK_Q: gl.constexpr, FOLD: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """One more block of rows: its dk and dv, and dq of the step before. Returns dk, dv and the next step's start."""
    DTYPE: gl.constexpr = shared.k_tile.dtype
    BLOCK_D: gl.constexpr = dk.shape[1]
    BLOCK_DV: gl.constexpr = dv.shape[1]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_Q, 16])
    columns: gl.constexpr = gl.SliceLayout(0, s_layout)
    zero = gl.zeros([64, BLOCK_Q], gl.float32, s_layout)
    stage = n % 2
    # [64, BLOCK_D]
    k = own_rows(c, shared.k_tile)
    # [64, BLOCK_DV]
    v = own_rows(c, shared.v_tile)
    # [BLOCK_Q, BLOCK_D]
    q = shared.q_ring.tiles.index(stage).reshape([BLOCK_Q, BLOCK_D])
    # [BLOCK_Q, BLOCK_DV]
    dout = shared.dout_ring.tiles.index(stage).reshape([BLOCK_Q, BLOCK_DV])
    # s and p: [64, BLOCK_Q]
    if FOLD:
        s = onto(start, zero)
        if MASKED:
            s = hidden(s, mask, block, row, kv_idx)
        s = warpgroup_mma(k, q.permute((1, 0)), s, is_async=True)
    else:
        shared.q_ring.wait(n)
        s = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
    shared.shares.take(c, n - 1)
    dq = issue_dq(c, shared, n - 1, BLOCK_Q, BLOCK_D)
    s = warpgroup_mma_wait(1, [s])
    if FOLD:
        p = gl.exp2(s * (scale * LOG2E))
    else:
        q_idx = row + gl.arange(0, BLOCK_Q, columns)
        x = logits(s, score, scale, block.b, h, q_idx[None, :], kv_idx[:, None])
        x += gl.expand_dims(shared.starts.index(stage).load(columns), 0)
        if MASKED:
            x = hidden(x, mask, block, row, kv_idx)
        p = gl.exp2(x)
    p_operand = gl.convert_layout(p.to(DTYPE), gl.DotOperandLayout(0, dv.type.layout, 2))
    if not score.steady:  # at scores that nobody sees it may be anything
        slope = score.slope(score.data, s * scale, block.b, h, q_idx[None, :], kv_idx[:, None])
        p = gl.where(p == 0, 0.0, p * slope)
    dq = warpgroup_mma_wait(0, [dq])
    if n > 0:
        shared.outbox.claim(c, n - 1)
        shared.outbox.send(c, packed(dq))
    shared.dout_ring.wait(n)
    # dp and ds: [64, BLOCK_Q]
    if FOLD:
        dp = onto(shared.deltas.index(stage).load(columns), zero)
        dp = warpgroup_mma(v, dout.permute((1, 0)), dp, is_async=True)
    else:
        dp = warpgroup_mma(v, dout.permute((1, 0)), zero, use_acc=False, is_async=True)
    dv = warpgroup_mma(p_operand, dout, dv, is_async=True)
    dp = warpgroup_mma_wait(1, [dp])
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
        start = shared.starts.index(shared.q_ring.wait(n + 1, n + 1 < steps)).load(columns)
    dk = warpgroup_mma_wait(0, [dk])
    shared.q_ring.release(n)
    return dk, dv, start


@gluon.jit
def add_last_dq(dq, dq_sum, tile):
    """Straight from registers: nothing is left to overlap a bulk addition with."""
    x = packed(dq)
    places = tile.to(gl.int64) * x.shape[0] + gl.arange(0, x.shape[0], x.type.layout)
    gl.atomic_add(dq_sum + places, x, sem="relaxed")


@gluon.jit
def consume(
    c: gl.constexpr, dk_desc, dv_desc, dq_sum, shared, block, mask, score, group, h_q, q_blocks, scale,
    BLOCK_Q: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, FOLD: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Consumer c: dk and dv of its 64 keys, and its half of every dq."""
    DTYPE: gl.constexpr = shared.k_tile.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_Q, 16])
    k_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    v_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_DV, 16])
    # [64, BLOCK_D]
    dk = gl.zeros([64, BLOCK_D], gl.float32, k_layout)
    # [64, BLOCK_DV]
    dv = gl.zeros([64, BLOCK_DV], gl.float32, v_layout)
    # [64]
    kv_idx = block.start + c * 64 + gl.arange(0, 64, gl.SliceLayout(1, s_layout))
    steps = block.steps(group)
    mbarrier.wait(shared.keys_full, 0)
    shared.shares.give(c, -1)
    # [BLOCK_Q]
    start = gl.zeros([BLOCK_Q], gl.float32, gl.SliceLayout(0, s_layout))
    if FOLD:
        start = shared.starts.index(shared.q_ring.wait(0)).load(start.type.layout)
    if MASKED:
        n = gl.to_tensor(0)
        for member in range(group):
            h = block.h_k * group + member
            q_block = block.first
            # Twice through two loops: the blocks before the core, the core, the blocks behind it, and none.
            for half in range(2):
                edge = gl.where(half == 0, block.core, block.end)
                for _ in tl.range(edge - q_block, disable_licm=True):
                    dk, dv, start = step(
                        c, dk, dv, start, n, steps, shared, block, mask, score, h, q_block * BLOCK_Q, kv_idx, scale,
                        BLOCK_Q, FOLD, True,
                    )  # fmt: skip
                    q_block += 1
                    n += 1
                for _ in tl.range(block.core_end - q_block, disable_licm=True):
                    dk, dv, start = step(
                        c, dk, dv, start, n, steps, shared, block, mask, score, h, q_block * BLOCK_Q, kv_idx, scale,
                        BLOCK_Q, FOLD, False,
                    )  # fmt: skip
                    q_block += 1
                    n += 1
    else:
        for n in tl.range(steps, disable_licm=True):
            h = block.h_k * group
            row = block.first
            if not score.identity:
                h, q_block = block.place(n, group)
                row = q_block * BLOCK_Q
            dk, dv, start = step(
                c, dk, dv, start, n, steps, shared, block, mask, score, h, row, kv_idx, scale, BLOCK_Q, FOLD, False
            )  # fmt: skip
    shared.shares.take(c, steps - 1)
    dq = issue_dq(c, shared, steps - 1, BLOCK_Q, BLOCK_D)
    own_rows(c, shared.v_tile).store(dv.to(DTYPE))
    fence_async_shared()
    tma_store(dv_desc, [block.b, block.h_k, block.start + c * 64, 0], shared.v_tile.slice(c * 64, 64, 2))
    dq = warpgroup_mma_wait(0, [dq])
    add_last_dq(dq, dq_sum, dq_tile(c, steps - 1, block, group, h_q, q_blocks))
    # Both consumers have read all of k when both have come here.
    shared.shares.give(c, steps)
    shared.shares.take(c, steps)
    own_rows(c, shared.k_tile).store((dk * scale).to(DTYPE))
    fence_async_shared()
    tma_store(dk_desc, [block.b, block.h_k, block.start + c * 64, 0], shared.k_tile.slice(c * 64, 64, 2))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["group", "h_q", "s_q", "s_k", "q_blocks"])
def backward_kernel(
    q_desc, k_desc, v_desc, dout_desc, dk_desc, dv_desc, start_desc, delta_desc, sum_desc, dq_sum, used_q, used_k,
    mask, score, order, group, h_q, s_q, s_k, q_blocks, scale,
    BLOCK_Q: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, FOLD: gl.constexpr, MASKED: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, OTHER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """dk, dv, and dq_sum += ds^T k.

    q, dout: (b, h_q, s_q, d) in tiles of BLOCK_Q rows; k, v, dk, dv: (b, h_k, s_k, d) in tiles of 64 rows. start and
    delta: what `prepare_kernel` made. dq_sum: tiles as `packed` makes them, two for each block of rows.
    """
    DTYPE: gl.constexpr = q_desc.dtype
    DS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([128, BLOCK_Q], DTYPE)
    q_tiles = gl.allocate_shared_memory(DTYPE, [2, 1, 1, BLOCK_Q, BLOCK_D], q_desc.layout)
    dout_tiles = gl.allocate_shared_memory(DTYPE, [2, 1, 1, BLOCK_Q, BLOCK_DV], dout_desc.layout)
    k_tile = gl.allocate_shared_memory(DTYPE, [1, 1, BLOCK_K, BLOCK_D], k_desc.layout)
    v_tile = gl.allocate_shared_memory(DTYPE, [1, 1, BLOCK_K, BLOCK_DV], v_desc.layout)
    dq_tiles = gl.allocate_shared_memory(gl.float32, [2, 1, BLOCK_Q * BLOCK_D // 2], sum_desc.layout)
    shared = Shared(
        Ring(q_tiles, new_barriers(2, 1), Q_EMPTY, 2, THREADS),
        Ring(dout_tiles, new_barriers(2, 1), DOUT_EMPTY, 2, THREADS),
        k_tile,
        v_tile,
        new_barriers(1, 1).index(0),
        new_barriers(1, 1).index(0),
        gl.allocate_shared_memory(gl.float32, [2, BLOCK_Q], start_desc.layout),
        gl.allocate_shared_memory(gl.float32, [2, BLOCK_Q], delta_desc.layout),
        Exchange(gl.allocate_shared_memory(DTYPE, [2, BLOCK_K, BLOCK_Q], DS)),
        Outbox(dq_tiles, new_barriers(2, 1)),
    )
    block = key_block(order, mask, used_q, used_k, s_q, s_k, BLOCK_Q)
    gl.warp_specialize([
        (consume, (
            0, dk_desc, dv_desc, dq_sum, shared, block, mask, score, group, h_q, q_blocks, scale, BLOCK_Q, BLOCK_D,
            BLOCK_DV, FOLD, MASKED,
        )),
        (consume, (
            1, dk_desc, dv_desc, dq_sum, shared, block, mask, score, group, h_q, q_blocks, scale, BLOCK_Q, BLOCK_D,
            BLOCK_DV, FOLD, MASKED,
        )),
        (load, (
            q_desc, dout_desc, k_desc, v_desc, start_desc, delta_desc, shared, block, used_q, used_k, group, h_q,
            q_blocks, BLOCK_Q, BLOCK_D, BLOCK_DV,
        )),
        (reduce, (0, sum_desc, shared.outbox, block, group, h_q, q_blocks)),
        (reduce, (1, sum_desc, shared.outbox, block, group, h_q, q_blocks)),
    ], [4, 1, 1, 1], [CONSUMER_REGISTERS, OTHER_REGISTERS, OTHER_REGISTERS, OTHER_REGISTERS])  # fmt: skip
