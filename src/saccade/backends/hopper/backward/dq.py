"""Sums of dq in float32: the order of the additions, and the kernels before and after them."""

# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from saccade.backends.device.positions import block_of_rows, extent, is_packed, tile_of
from saccade.backends.device.records import plain_int
from saccade.backends.device.tiles import head, load_tile
from saccade.backends.hopper.backward.kv_block import KVBlocks
from saccade.backends.hopper.ptx import add_one, fence_memory, wait_until
from saccade.backends.hopper.shim import start_next, wait_for_last
from saccade.backends.hopper.tiles import product_layout

# The order in which programs add their share to a piece of dq, where every run has to add in the same one.
#
# The programs of a key head go from its last keys to its first, and add in that order. Under a causal mask no program
# waits then: the last keys that see a row are those on the diagonal, where their program begins. A kv block waits
# only for those before it, which programs that run work on (tile_scheduler.py), or, above d = 128, for programs with
# smaller numbers, which have started.


class DQSemaphore(NamedTuple):
    """Which program may add to each piece of dq."""

    ranks: Any
    """int32 (b, kv blocks, q blocks): how many programs add before this kv block, in each head"""
    counts: Any
    """int32 (batch rows, heads, q blocks, 2): how many have added, for each consumer's half of dq"""
    blocks: Any
    """kv blocks: a runtime_int"""


@gluon.jit
def acquire(semaphore, piece, kv_blocks, block, q_block, WARPS: gl.constexpr):
    """Waits until all programs before `block` have added to this piece, which is of `q_block`; WARPS of each count."""
    number = block.number(plain_int(semaphore.blocks), kv_blocks.BLOCK_K)
    rank = gl.load(semaphore.ranks + number * kv_blocks.q_blocks + q_block)
    wait_until(semaphore.counts + piece, rank * WARPS)


@gluon.jit
def release(semaphore, piece):
    """Lets the next program add to this piece. Called when the own addition is in the L2 cache, where the next one and
    this count happen too, so that no fence is between them: it would wait for all that the multiprocessor has on its
    way, in every step (0.81 of the speed without an order against 0.94, causal; notes/gluon_backward.md)."""
    add_one(semaphore.counts + piece)


@gluon.jit
def release_fenced(semaphore, piece):
    """The same for additions from registers, by each of the warps: they do not report their end."""
    fence_memory()
    add_one(semaphore.counts + piece)


@gluon.jit(do_not_specialize=["blocks", "q_blocks", "s_q", "s_k"])
def rank_kernel(ranks, mask, span_q, span_k, blocks, q_blocks, s_q, s_k, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr):
    """Counts, for one kv block and every q block that it may add to, the later kv blocks that do."""
    ROWS: gl.constexpr = 256
    kv_blocks = KVBlocks(mask, span_q, span_k, s_q, s_k, q_blocks, BLOCK_Q, BLOCK_K, None, False)
    if is_packed(span_k):
        b, _, _, start = tile_of(span_k, 1, s_k, BLOCK_K, False)
        _, _, end, _ = extent(span_k, b, s_k)
        # Programs without a tile add zeros to one piece, those with smaller numbers first.
        before = gl.maximum(gl.program_id(0) - gl.load(span_k.tiles), 0)
    else:
        b = gl.program_id(0) // blocks
        start = gl.program_id(0) % blocks * BLOCK_K
        end = s_k
        before = 0
    # Of any head. A packed block has this program's number: there is one head, and the first keys come first.
    number = gl.program_id(0)
    own = kv_blocks.at(b, b * 0, b * 0, start, number)
    for first in range(own.first // ROWS * ROWS, own.end, ROWS):
        # [ROWS]
        q_block = first + gl.arange(0, ROWS, gl.BlockedLayout([ROWS // 32], [32], [1], [0]))
        rank = q_block * 0 + before
        for later in range(start + BLOCK_K, end, BLOCK_K):
            block = kv_blocks.at(b, b * 0, b * 0, later, number)
            rank += ((q_block >= block.first) & (q_block < block.end)).to(gl.int32)
        gl.store(ranks + own.number(blocks, BLOCK_K) * q_blocks + q_block, rank, mask=q_block < q_blocks)


# dq's sums in float32: the kernels before and after the additions, and the order of the sums in memory.
#
# Each q block has pieces of 64 rows and 64 columns, in the order in which a group of four warps holds a product; or, as
# a product has 64 rows, where it has 64 rows and columns, transposed pieces of 64 columns and 32 rows.


PIECE = gl.constexpr(64 * 64)
"""Numbers of a piece."""


@triton.jit(do_not_specialize=["h_q", "s_q", "blocks"], do_not_specialize_on_alignment=["dlse", "lse"])
def preprocess_kernel(
    dout, out, dlse, lse, neg_delta, neg_lse, delta, dq_accum, span_q, h_q, s_q, blocks, unit,
    D_V: tl.constexpr, ROWS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """neg_delta = dlse - rowsum(dout out) and neg_lse = lse unit, both ready to be added; clears dq_accum, if there
    is one.

    Both have whole q blocks for each head: beyond the rows in use, and where a row has no keys, neg_lse is -inf, so
    that p = 0, and neg_delta is 0. delta: -neg_delta as `lse` lies, or None. CHAINED: the next kernel may start; it
    waits for the end of this one.
    """
    if CHAINED:
        start_next()
    # Blocks of BLOCK_Q rows, and parts of them; `blocks` counts the parts.
    PARTS: tl.constexpr = BLOCK_Q // ROWS
    bh = tl.program_id(0) // blocks
    number = tl.program_id(0) % blocks
    b, h, sequence, first, there, rows = block_of_rows(span_q, bh, number // PARTS, h_q, s_q, BLOCK_Q)
    first += number % PARTS * ROWS
    # [ROWS, d_v]
    dout_tile = load_tile(dout, head(dout, b, h, sequence), first, rows, ROWS, D_V, BLOCK_DV, True).to(tl.float32)
    out_tile = load_tile(out, head(out, b, h, sequence), first, rows, ROWS, D_V, BLOCK_DV, True).to(tl.float32)
    # [ROWS]
    q_idx = first + tl.arange(0, ROWS)
    offset = bh.to(tl.int64) * s_q + sequence + q_idx
    row = -tl.sum(dout_tile * out_tile, 1)
    row_lse = tl.load(lse + offset, mask=q_idx < rows, other=float("-inf"))
    # Beside a sink of NaN a row with keys has NaN in out.
    none = (row_lse == float("-inf")) | ((row_lse != row_lse) & (row == row))
    if dlse is not None:
        row += tl.load(dlse + offset, mask=q_idx < rows, other=0.0)
    padded = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    tl.store(neg_delta + padded, row)
    if delta is not None:
        tl.store(delta + offset, -row, mask=q_idx < there)
    tl.store(neg_lse + padded, tl.where(none, float("-inf"), row_lse * unit))
    if dq_accum is not None:
        tile = dq_accum + tl.program_id(0).to(tl.int64) * (ROWS * BLOCK_D)
        for piece in tl.static_range(BLOCK_D // 64):
            # [ROWS 64]
            pointers = piece * (ROWS * 64) + tl.arange(0, ROWS * 64)
            tl.store(tile + pointers, tl.zeros([ROWS * 64], tl.float32))


@gluon.jit
def to_register_order(x):
    """A tile of products [64, N] as [64 N], in the order in which a thread owns four neighbours and a warp 128."""
    N: gl.constexpr = x.shape[1]
    return x.reshape([4, 2, 8, N // 8, 4, 2]).permute(3, 0, 2, 4, 1, 5).reshape([64 * N])


@gluon.jit
def from_register_order(x, N: gl.constexpr):
    """The inverse of `to_register_order`: [64, N]."""
    return x.reshape([N // 8, 4, 8, 4, 2, 2]).permute(1, 4, 2, 0, 3, 5).reshape([64, N])


@gluon.jit(do_not_specialize=["h_q", "s_q", "blocks"])
def postprocess_kernel(
    dq_accum, dq, span_q, h_q, s_q, blocks, scale,
    D: gl.constexpr, BLOCK_Q: gl.constexpr, PIECES: gl.constexpr, TURNED: gl.constexpr,
):  # fmt: skip
    """dq = scale dq_accum, in the order and dtype of dq, for one piece; zero in rows that are not in use."""
    wait_for_last()
    # Blocks of BLOCK_Q rows have PIECES, of rows where there are 128 or they are TURNED, else of columns.
    COLUMNS: gl.constexpr = 64
    ROWS: gl.constexpr = 32 if TURNED else 64
    WIDTH: gl.constexpr = ROWS if TURNED else COLUMNS
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    order: gl.constexpr = to_register_order(gl.zeros([64, WIDTH], gl.float32, product_layout(WIDTH))).type.layout
    piece = gl.program_id(0) % PIECES
    block = gl.program_id(0) // PIECES % blocks
    bh = gl.program_id(0) // PIECES // blocks
    b, h, sequence, row, there, rows = block_of_rows(span_q, bh, block, h_q, s_q, BLOCK_Q)
    if ROWS * PIECES == BLOCK_Q:
        row, column = row + piece * ROWS, piece * 0
    else:
        column = piece * COLUMNS
    # [64 WIDTH]
    tile = gl.program_id(0).to(gl.int64) * (64 * WIDTH)
    x = gl.load(dq_accum + tile + gl.arange(0, 64 * WIDTH, order)) * scale
    # [ROWS, COLUMNS]
    y = from_register_order(x, WIDTH).to(dq.ptr.dtype.element_ty)
    if TURNED:
        y = y.permute((1, 0))
    y = gl.convert_layout(y, layout)
    q_idx = row + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    y = gl.where((q_idx < rows)[:, None], y, 0.0)
    d = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    stride = plain_int(dq.stride_s)
    if dq.wide:
        stride = stride.to(gl.int64)
    offset = (q_idx * (stride * dq.unit))[:, None] + d[None, :]
    gl.store(head(dq, b, h, sequence) + offset, y, mask=(q_idx < there)[:, None] & (d < D)[None, :])


@gluon.jit
def add_dq(dq, pieces):
    """Adds dq [64, N] to the pieces at this address, straight from registers."""
    x = to_register_order(dq)
    gl.atomic_add(pieces + gl.arange(0, x.shape[0], x.type.layout), x, sem="relaxed")
