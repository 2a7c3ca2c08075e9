"""Zeros in a captured tensor's gradient, where the main kernel stores the rest."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportAssignmentType=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from saccade.backends.hopper.backward.kv_block import KVBlocks

UNIT = gl.constexpr(8)
"""Keys of one store, of which the call has a multiple."""
CHUNK = 16
"""Q blocks of one program."""


@gluon.jit(
    do_not_specialize=["blocks", "q_blocks", "heads", "s_q", "s_k", "stride_b", "stride_h", "stride_s"],
)
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
    kv_blocks = KVBlocks(mask, span_q, span_k, s_q, s_k, q_blocks, BLOCK_Q, BLOCK_K, None)
    block = kv_blocks.at(b, h, h, gl.program_id(0) % blocks * BLOCK_K, None)
    head = gradient + b.to(gl.int64) * stride_b + h.to(gl.int64) * stride_h
    layout: gl.constexpr = gl.BlockedLayout([1, UNIT], [2, 16], [gl.num_warps(), 1], [1, 0])
    kv_idx = block.start + gl.arange(0, BLOCK_K, gl.SliceLayout(0, layout))[None, :]
    start = gl.program_id(1) * ROWS
    zero = gl.zeros([BLOCK_Q, BLOCK_K], gradient.dtype.element_ty, layout)
    for i in range(start, gl.minimum(start + ROWS, q_blocks)):
        if (i < block.first) | (i >= block.end):
            q_idx = i * BLOCK_Q + gl.arange(0, BLOCK_Q, gl.SliceLayout(1, layout))[:, None]
            place = head + q_idx.to(gl.int64) * stride_s + kv_idx
            gl.store(place, zero, mask=(q_idx < s_q) & (kv_idx < s_k))
