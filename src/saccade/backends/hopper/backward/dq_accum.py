"""dq's sums in float32: the kernels before and after the additions, and the order of the sums in memory.

Each q block has pieces of 64 rows and 64 columns, in the order in which a group of four warps holds a product; or, as
a product has 64 rows, where it has 64 rows and columns, transposed pieces of 64 columns and 32 rows.
"""

# pyright: reportArgumentType=false, reportCallIssue=false

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from saccade.backends.device.records import plain_int
from saccade.backends.device.sequences import block_of_rows
from saccade.backends.device.tiles import head, load_tile
from saccade.backends.hopper.shim import start_next, wait_for_last
from saccade.backends.hopper.tiles import product_layout

PIECE = gl.constexpr(64 * 64)
"""Numbers of a piece."""


@triton.jit(do_not_specialize=["h_q", "s_q", "blocks"], do_not_specialize_on_alignment=["dlse", "lse"])
def preprocess_kernel(
    dout, out, dlse, lse, neg_delta, neg_lse, delta, dq_accum, span_q, h_q, s_q, blocks, unit,
    D_V: tl.constexpr, ROWS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """neg_delta = dlse - rowsum(dout out) and neg_lse = lse unit, both ready to be added; clears dq_accum.

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
    place = bh.to(tl.int64) * s_q + sequence + q_idx
    row = -tl.sum(dout_tile * out_tile, 1)
    if dlse is not None:
        row += tl.load(dlse + place, mask=q_idx < rows, other=0.0)
    row_lse = tl.load(lse + place, mask=q_idx < rows, other=float("-inf"))
    padded = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    tl.store(neg_delta + padded, row)
    if delta is not None:
        tl.store(delta + place, -row, mask=q_idx < there)
    tl.store(neg_lse + padded, tl.where(row_lse == float("-inf"), float("-inf"), row_lse * unit))
    tile = dq_accum + tl.program_id(0).to(tl.int64) * (ROWS * BLOCK_D)
    for piece in tl.static_range(BLOCK_D // 64):
        # [ROWS 64]
        places = piece * (ROWS * 64) + tl.arange(0, ROWS * 64)
        tl.store(tile + places, tl.zeros([ROWS * 64], tl.float32))


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
    place = (q_idx * (stride * dq.unit))[:, None] + d[None, :]
    gl.store(head(dq, b, h, sequence) + place, y, mask=(q_idx < there)[:, None] & (d < D)[None, :])


@gluon.jit
def add_dq(dq, pieces):
    """Adds dq [64, N] to the pieces at this address, straight from registers."""
    x = to_register_order(dq)
    gl.atomic_add(pieces + gl.arange(0, x.shape[0], x.type.layout), x, sem="relaxed")
