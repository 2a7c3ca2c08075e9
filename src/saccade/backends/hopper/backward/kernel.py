"""The Hopper backward up to d = 128: a program owns 128 keys of a head at a time and walks over the rows that see them.

Five groups of warps share the work. One warp loads tiles of q and dout. Two consumers own 64 keys each, whose dk and dv
stay there: `s = k q^T`, `p = exp(s - lse)`, `dp = v dout^T`, `ds = p (dp - delta)`, `dv += p dout`, `dk += ds q`:
everything transposed so that p and ds are left operands without a detour. dq needs the ds of both consumers, which
therefore also goes through shared memory; each consumer takes a half of `dq = ds^T k`, and a warp of its own adds that
half to global memory in bulk. All query heads of a group pass through one program, so dk and dv need no addition.

Programs stay on their multiprocessors and take one kv block after the other, so that the next k is loaded while
the last one is in use, and the next q and dout while the last dk and dv leave.
"""

# pyright: reportArgumentType=false, reportCallIssue=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from saccade.backends.hopper.backward.args import BackwardArgs
from saccade.backends.hopper.backward.epilogue import reduce_dq
from saccade.backends.hopper.backward.kv_block import KVBlocks
from saccade.backends.hopper.backward.load_persistent import load_items
from saccade.backends.hopper.backward.mma import K_SLOTS, Shared, consume
from saccade.backends.hopper.backward.pipeline import (
    CONSUMER_REGISTERS,
    DOUT_EMPTY,
    OTHER_REGISTERS,
    Q_EMPTY,
    THREADS,
    DSExchange,
    Outbox,
)
from saccade.backends.hopper.backward.tile_scheduler import NUMBERS
from saccade.backends.hopper.pipeline import Slots, new_barriers, new_ring
from saccade.backends.hopper.shim import start_next

BLOCK_K = gl.constexpr(128)
"""Keys of one program, 64 for each consumer."""


@gluon.jit(do_not_specialize=["group", "h_q", "q_blocks"])
def backward_kernel(
    q_desc, k_desc, v_desc, dout_desc, dk_desc, dv_desc, neg_lse_desc, neg_delta_desc, dq_desc, captured_desc,
    gradient_desc, packed, counter, spans, scores, scheduler, dq_semaphore, group, h_q, q_blocks,
    FOLD: gl.constexpr, MASKED: gl.constexpr, D_LAST: gl.constexpr, DV_LAST: gl.constexpr,
):  # fmt: skip
    """dk, dv, and dq_accum += ds^T k.

    q, dout: (b, h_q, s_q, d) in tiles of BLOCK_Q rows; k, v, dk, dv: (b, h_k, s_k, d) in tiles of 64 rows. neg_lse and
    neg_delta: of `preprocess_kernel`. dq_desc: dq_accum, boxes of tiles of `to_register_order`, two of a q block.
    packed: a PackedGradients, or None. scores: BackwardScoreArgs. scheduler: TileSchedulerArgs. dq_semaphore: None
    where dq may be added to in any order. counter: two zeros, which are zeros again in the end. D_LAST, DV_LAST: how
    many columns of the upper halves of d and d_v are in use. captured_desc: of a captured tensor of which score
    functions take tiles, (b or 1, h_q or 1, s_q, s_k) in tiles of BLOCK_Q rows and 64 keys, or None. gradient_desc: the
    same of its gradient, if that is ds, or None.
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
    dq_tiles = gl.allocate_shared_memory(gl.float32, [2, 1, BLOCK_Q * BLOCK_D // 2], dq_desc.layout)
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
        new_ring(q_tiles, Q_EMPTY, 2, THREADS),
        new_ring(dout_tiles, DOUT_EMPTY, 2, THREADS),
        items,
        k_tiles,
        v_tiles,
        v_empty,
        gl.allocate_shared_memory(gl.float32, [2, BLOCK_Q], neg_lse_desc.layout),
        gl.allocate_shared_memory(gl.float32, [2, BLOCK_Q], neg_delta_desc.layout),
        DSExchange(gl.allocate_shared_memory(DTYPE, [2, DS_SHAPE[0], DS_SHAPE[1]], DS), CAPTURED),
        Outbox(dq_tiles, new_barriers(2, 1)),
        captured_tiles,
        D_LAST,
        DV_LAST,
    )
    s_q = q_desc.shape[2]
    s_k = k_desc.shape[2]
    kv_blocks = KVBlocks(
        scores.mask, spans[0], spans[1], s_q, s_k, q_blocks, BLOCK_Q, BLOCK_K, scores.score if scores.flat else None
    )
    args = BackwardArgs(
        kv_blocks, scores.score, scores.scale, scores.dropout, dq_semaphore, group, h_q, FOLD, MASKED,
        scores.level_sums, scores.captured, scores.gradient,
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
