"""The Hopper forward: one warp loads, two or three groups of four warps each take 64 query rows, and nobody waits.

A persistent grid draws work from a counter. One work item is the query rows of all consumers of one head; its keys come
in tiles, from the last to the first, which all consumers share. A consumer issues `q k^T` of tile j and then `p v` of
tile j + 1, and takes the softmax of tile j while the second product runs. The schedule is FlashAttention-3's (Shah et
al., 2024, https://arxiv.org/abs/2407.08608) without its turns where they do not pay; docs/findings/gluon.md has what
each choice was worth.

d is cut in chunks, the last one narrower; `p v` is one tile of BLOCK_DV columns. Bulk copies fill what lies beyond the
tensors with zeros, and do not write there.
"""

# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from saccade.backends.device.sequences import is_packed
from saccade.backends.gluon.forward.load import load
from saccade.backends.gluon.forward.mma import consume
from saccade.backends.gluon.pipeline import (
    KEYS_EMPTY,
    VALUES_EMPTY,
    Pipeline,
    Shape,
    Slots,
    Turns,
    new_barriers,
    new_ring,
)
from saccade.backends.gluon.tile_scheduler import Work, numbers_of_item

NUMBERS_OF_A_CALL = ["items", "blocks", "heads", "section", "h_k", "packs", "group", "h_q", "s_q", "s_k"]


@gluon.jit(do_not_specialize=NUMBERS_OF_A_CALL)
def forward_kernel(
    q_desc, k_desc, v_desc, out_desc, out, lse, max_scores, sink, counter, used_q, used_k, pages, mask, score, dropout,
    items, blocks, heads, section, h_k, packs, group, h_q, s_q, s_k, scale,
    D_CHUNK: gl.constexpr, D_CHUNKS: gl.constexpr, D_LAST: gl.constexpr, BLOCK_K: gl.constexpr, BLOCK_DV: gl.constexpr,
    ROWS: gl.constexpr, CONSUMERS: gl.constexpr, SLOTS: gl.constexpr, STAGES: gl.constexpr, TURNS: gl.constexpr,
    REGISTERS: gl.constexpr, LOADER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """out = softmax(q k^T) v, and lse and max_scores (b, h_q, s_q) contiguous or None. out, the tensor itself: packed,
    else None.

    q_desc and out_desc: (b, h_k, group, s_q, d) in tiles of 64 rows, which are ROWS rows of 64 / ROWS heads; k_desc and
    v_desc: (b, h_k, s_k, d), or with `pages` caches (pages, h_k, page_size, d) in boxes. counter: two zeros, which are
    zeros again in the end.
    """
    DTYPE: gl.constexpr = q_desc.dtype
    work = Work(items, blocks, heads, section, h_k, packs)
    READERS: gl.constexpr = 32 + 128 * CONSUMERS
    # A consumer's part of a slot holds its q and later its out: whole tiles of both.
    WIDER: gl.constexpr = max(D_CHUNK, BLOCK_DV)
    CHUNKS: gl.constexpr = (D_CHUNKS * D_CHUNK + WIDER - 1) // WIDER * WIDER // D_CHUNK
    q_shape: gl.constexpr = [SLOTS * CONSUMERS * CHUNKS, 1, 1, 64 // ROWS, ROWS, D_CHUNK]
    q_tiles = gl.allocate_shared_memory(DTYPE, q_shape, q_desc.layout)
    k_tiles = gl.allocate_shared_memory(DTYPE, [STAGES * D_CHUNKS, 1, 1, BLOCK_K, D_CHUNK], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BLOCK_K, BLOCK_DV], v_desc.layout)
    HELD: gl.constexpr = numbers_of_item(is_packed(used_q), mask.listed)
    records = gl.allocate_shared_memory(gl.int32, [(SLOTS + 1) * HELD, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    pipe = Pipeline(
        Slots(q_tiles, records, new_barriers(SLOTS, 1), new_barriers(SLOTS, CONSUMERS), SLOTS, HELD, CHUNKS),
        new_ring(k_tiles, KEYS_EMPTY, STAGES, READERS),
        new_ring(v_tiles, VALUES_EMPTY, STAGES, READERS),
        Turns(TURNS, CONSUMERS),
        Shape(D_CHUNK, D_CHUNKS, D_LAST, BLOCK_K, BLOCK_DV, ROWS, CONSUMERS),
    )
    if CONSUMERS == 2:
        gl.warp_specialize([
            (consume, (
                0, out_desc, out, lse, max_scores, sink, pipe, used_q, used_k, mask, score, dropout, group, h_q, s_q,
                s_k, scale,
            )),
            (consume, (
                1, out_desc, out, lse, max_scores, sink, pipe, used_q, used_k, mask, score, dropout, group, h_q, s_q,
                s_k, scale,
            )),
            (load, (q_desc, k_desc, v_desc, counter, pipe, work, used_q, used_k, pages, mask, s_q, s_k)),
        ], [4, 1], [REGISTERS, LOADER_REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (
                0, out_desc, out, lse, max_scores, sink, pipe, used_q, used_k, mask, score, dropout, group, h_q, s_q,
                s_k, scale,
            )),
            (consume, (
                1, out_desc, out, lse, max_scores, sink, pipe, used_q, used_k, mask, score, dropout, group, h_q, s_q,
                s_k, scale,
            )),
            (consume, (
                2, out_desc, out, lse, max_scores, sink, pipe, used_q, used_k, mask, score, dropout, group, h_q, s_q,
                s_k, scale,
            )),
            (load, (q_desc, k_desc, v_desc, counter, pipe, work, used_q, used_k, pages, mask, s_q, s_k)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, LOADER_REGISTERS])  # fmt: skip
