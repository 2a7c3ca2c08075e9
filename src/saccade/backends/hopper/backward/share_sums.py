"""dk and dv where each share of a group of query heads has its own: their sums, both in one launch."""

# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from saccade.backends.device.tiles import head, load_tile, store_tile

TILE = 4096
"""Numbers of one program."""


@triton.jit(do_not_specialize=["shares", "h_k", "s_k"])
def share_sums_kernel(
    dk_shares, dv_shares, dk, dv, shares, h_k, s_k,
    D: tl.constexpr, D_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """ROWS rows of one head of dk, and of dv: the sum of those of `shares` heads, in their order, in float32."""
    if tl.program_id(1) == 0:
        _add_shares(dk_shares, dk, shares, h_k, s_k, D, BLOCK_D, ROWS)
    else:
        _add_shares(dv_shares, dv, shares, h_k, s_k, D_V, BLOCK_DV, ROWS)


@triton.jit
def _add_shares(x, total, shares, h_k, s_k, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr):
    blocks = tl.cdiv(s_k, ROWS)
    bh = tl.program_id(0) // blocks
    start = tl.program_id(0) % blocks * ROWS
    b = bh // h_k
    h = bh % h_k
    # [ROWS, BLOCK_D]
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for i in range(shares):
        acc += load_tile(x, head(x, b, h * shares + i), start, s_k, ROWS, D, BLOCK_D, True).to(tl.float32)
    store_tile(total, head(total, b, h), start, s_k, acc, ROWS, D, BLOCK_D)
