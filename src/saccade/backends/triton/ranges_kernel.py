"""dK and dV where sequences may share keys: a program owns a block of all keys, and sums over all that read it.

It takes the sequences in their order, so the sums are the same bits in every run, and no memory holds what one sequence
adds: its size would depend on how far ranges overlap, which only the device knows. There are as many programs as for
one sequence of all keys.
"""

# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from saccade.backends.device.dropout import opened
from saccade.backends.device.q_block import ScoreArgs, TileRange, edge_length, edge_start, value_column
from saccade.backends.device.records import FAR, plain_int
from saccade.backends.device.sequences import extent
from saccade.backends.device.tiles import head, load_tile, tile_range
from saccade.backends.triton.backward_kernels import HeadGradients, dkdv_step, key_sums, store_dk, store_dv

CHUNK = tl.constexpr(128)
"""Sequences that a program looks at at once."""


@triton.jit
def next_reader(used_k, after, chunk, start, s_k, BLOCK_K: tl.constexpr):
    """The first sequence of a chunk, after sequence `after`, that reads one of the keys from row `start` on; or FAR."""
    # [CHUNK]
    b = chunk + tl.arange(0, CHUNK)
    _, first, _, keys = extent(used_k, b, s_k)
    reads = (b > after) & (keys > 0) & (first < start + BLOCK_K) & (first + keys > start)
    return tl.min(tl.where(reads, b, FAR))


@triton.jit
def kept(live, sums, before):
    """Sums of keys that are live, and those from before of others."""
    if sums.shape[0] > 1:
        return tl.where(live[:, None], sums, before)
    else:  # not wanted
        return sums


@triton.jit(do_not_specialize=["h_q", "s_q", "s_k"])
def ranges_dkdv_kernel(
    q, k, v, dout, dk, dv, shift, delta, used_q, used_k, mask, score, dropout, h_q, s_q, s_k, scale, shape
):
    """dk = scale ds^T q and dv = p^T dout for BLOCK_K rows of one key head, over all sequences and query heads that
    read them; of dk or dv None, only the other."""
    blocks = tl.cdiv(s_k, shape.BLOCK_K)
    start_k = tl.program_id(0) % blocks * shape.BLOCK_K
    head_k = tl.program_id(0) // blocks
    if dropout is not None:
        dropout = opened(dropout)
    # [block_k, d], [block_k, d_v]
    k_tile = load_tile(k, head(k, head_k * 0, head_k), start_k, s_k, shape.BLOCK_K, shape.D, shape.BLOCK_D, True)
    if dk is None:
        v_tile = None
    else:
        v_tile = load_tile(v, head(v, head_k * 0, head_k), start_k, s_k, shape.BLOCK_K, shape.D_V, shape.BLOCK_DV, True)
    column = value_column(shape)
    dk_sum = key_sums(dk, shape, shape.BLOCK_D)
    dv_sum = key_sums(dv, shape, shape.BLOCK_DV)
    # [block_k]
    row_k = start_k + tl.arange(0, shape.BLOCK_K)
    read = row_k < 0
    for chunk in range(0, plain_int(used_k.count), CHUNK):
        b = next_reader(used_k, chunk - 1, chunk, start_k, s_k, shape.BLOCK_K)
        while b < FAR:
            batch, first_q, _, rows = extent(used_q, b, s_q)
            _, first_k, _, keys = extent(used_k, b, s_k)
            off = keys - rows
            # [block_k]
            kv_idx = row_k - first_k
            live = (kv_idx >= 0) & (kv_idx < keys)
            kv_idx = tl.where(kv_idx < 0, keys, kv_idx)  # masked, and where score functions may read
            read = read | live
            lo, hi, core_lo, core_hi = mask.rows_of(mask.data, b, kv_idx, off)
            first, core, core_end, end = tile_range(lo, hi, core_lo, core_hi, live, rows, shape.BLOCK_Q)
            if tl.min(live.to(tl.int32)) == 0:  # only the mask knows where the range ends
                core = end
                core_end = end
            tiles = TileRange(first, core, core_end, end, None, None, None)
            dk_before, dv_before = dk_sum, dv_sum
            for i in range(shape.GROUP):
                h = head_k * shape.GROUP + i
                row = (batch.to(tl.int64) * h_q + h) * s_q + first_q
                q_head = head(q, batch, h, first_q)
                dout_head = head(dout, batch, h, first_q) + column
                gradients = HeadGradients(q, dout, q_head, dout_head, shift + row, delta + row, column)
                args = ScoreArgs(b, h, rows, keys, off, scale, mask, score, dropout)
                for step in range(0, edge_length(tiles), shape.BLOCK_Q):
                    start = edge_start(mask, tiles, step, shape.BLOCK_Q)
                    dk_sum, dv_sum = dkdv_step(
                        dk_sum, dv_sum, start, k_tile, v_tile, kv_idx, gradients, args, shape, True, False
                    )
                for start in range(core, core_end, shape.BLOCK_Q):
                    dk_sum, dv_sum = dkdv_step(
                        dk_sum, dv_sum, start, k_tile, v_tile, kv_idx, gradients, args, shape, False, False
                    )
            # Keys beside the range are other sequences': what NaN in this one's rows made of them does not count.
            dk_sum = kept(live, dk_sum, dk_before)
            dv_sum = kept(live, dv_sum, dv_before)
            b = next_reader(used_k, b, chunk, start_k, s_k, shape.BLOCK_K)
    # Keys that no sequence reads get zeros.
    if dk is not None:
        store_dk(dk, head(dk, head_k * 0, head_k), start_k, s_k, read, dk_sum * scale, shape)
    if dv is not None:
        dv_head = head(dv, head_k * 0, head_k) + column
        store_dv(dv, dv_head, start_k, s_k, read, dv_sum, dropout, shape, column)
