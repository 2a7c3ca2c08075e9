"""The Hopper backward for head dims above 128: a program owns 64 keys and walks over the query rows that see them.

dk and dv of 64 keys at d = 256 are half of a multiprocessor's registers, 128 of a thread in two consumers. So each of
them has one of the two sums, and the products are shared out so that none is computed twice:

    first consumer     s = k q^T      p = exp(s - lse)      dv += p dout     half of dq = ds^T k
    second consumer    dp = v dout^T  ds = p (dp - delta)   dk += ds q       the other half

p and ds are left operands straight from registers, as in the narrow kernel. p goes from the first to the second through
shared memory, in float32 and in the order of the registers, and ds comes back as the left operand of dq. That is all
that they say to one another. Both halves of dq are added to global memory from registers: shared memory has no room
for them beside two stages of q and of dout.
"""

# pyright: reportArgumentType=false, reportCallIssue=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from saccade.backends.hopper.backward.args import BackwardArgs
from saccade.backends.hopper.backward.dq_accum import PIECE
from saccade.backends.hopper.backward.kv_block import KVBlocks
from saccade.backends.hopper.backward.load import load
from saccade.backends.hopper.backward.pipeline import (
    CONSUMER_REGISTERS,
    DOUT_EMPTY,
    OTHER_REGISTERS,
    Q_EMPTY,
    THREADS,
    PDSExchange,
)
from saccade.backends.hopper.backward.tile_scheduler import find_kv_block
from saccade.backends.hopper.backward.wide_mma import BLOCK, WideShared, consume_for_dk, consume_for_dv, slots
from saccade.backends.hopper.pipeline import new_barriers, new_ring
from saccade.backends.hopper.shim import start_next


@gluon.jit(do_not_specialize=["group", "h_q", "q_blocks"])
def wide_backward_kernel(
    q_desc, k_desc, v_desc, dout_desc, dk_desc, dv_desc, neg_lse_desc, neg_delta_desc, packed, dq_accum,
    spans, scores, scheduler, dq_semaphore, group, h_q, q_blocks,
    FOLD: gl.constexpr, MASKED: gl.constexpr, D: gl.constexpr, D_V: gl.constexpr,
):  # fmt: skip
    """dk, dv, and dq_accum += ds^T k, with the arguments of `backward_kernel`, whose tiles are chunks of 64 rows and
    columns here. D and D_V: head dims as whole chunks, 128, 192 or 256."""
    DTYPE: gl.constexpr = q_desc.dtype
    q_tiles = gl.allocate_shared_memory(DTYPE, [2 * slots(D), 1, 1, BLOCK, BLOCK], q_desc.layout)
    dout_tiles = gl.allocate_shared_memory(DTYPE, [2 * slots(D_V), 1, 1, BLOCK, BLOCK], dout_desc.layout)
    kv_full = new_barriers(1, 1).index(0)
    shared = WideShared(
        new_ring(q_tiles, Q_EMPTY, 2, THREADS),
        new_ring(dout_tiles, DOUT_EMPTY, 2, THREADS),
        gl.allocate_shared_memory(DTYPE, [slots(D), 1, 1, BLOCK, BLOCK], k_desc.layout),
        gl.allocate_shared_memory(DTYPE, [slots(D_V), 1, 1, BLOCK, BLOCK], v_desc.layout),
        kv_full,
        gl.allocate_shared_memory(gl.float32, [2, BLOCK], neg_lse_desc.layout),
        gl.allocate_shared_memory(gl.float32, [2, BLOCK], neg_delta_desc.layout),
        PDSExchange(
            gl.allocate_shared_memory(gl.float32, [PIECE], neg_lse_desc.layout),
            gl.allocate_shared_memory(
                DTYPE, [2, BLOCK, BLOCK], gl.NVMMASharedLayout.get_default_for([BLOCK, BLOCK], DTYPE)
            ),
        ),
    )
    s_q = q_desc.shape[2]
    s_k = k_desc.shape[2]
    kv_blocks = KVBlocks(scores.mask, spans[0], spans[1], s_q, s_k, q_blocks, BLOCK, BLOCK, None)
    args = BackwardArgs(
        kv_blocks, scores.score, scores.scale, scores.dropout, dq_semaphore, group, h_q, FOLD, MASKED, None, None, None
    )
    block = find_kv_block(kv_blocks, gl.program_id(0), scheduler, dq_semaphore is not None)
    start_next()
    gl.warp_specialize([
        (consume_for_dk, (dk_desc, packed, dq_accum, shared, block, args, D, D_V)),
        (consume_for_dv, (dv_desc, packed, dq_accum, shared, block, args, D, D_V)),
        (load, (
            q_desc, dout_desc, k_desc, v_desc, neg_lse_desc, neg_delta_desc, shared, block, args,
            BLOCK, D // BLOCK, D_V // BLOCK,
        )),
    ], [4, 1], [CONSUMER_REGISTERS, OTHER_REGISTERS])  # fmt: skip
