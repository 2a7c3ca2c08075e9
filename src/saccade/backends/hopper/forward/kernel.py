"""The Hopper forward: one warp loads, two or three groups of four warps each take 64 query rows, and nobody waits.

A persistent grid draws work from a counter. One work item is the query rows of all consumers of one head; its keys come
in tiles, from the last to the first, which all consumers share. A consumer issues `q k^T` of tile j and then `p v` of
tile j + 1, and takes the softmax of tile j while the second product runs. The schedule is FlashAttention-3's (Shah et
al., 2024, https://arxiv.org/abs/2407.08608) without its turns where they do not pay; notes/gluon.md has what
each choice was worth.

d is cut in chunks, the last one narrower; `p v` is one tile of BLOCK_DV columns. Bulk copies fill what lies beyond the
tensors with zeros, and do not write there.
"""

# No `from __future__ import annotations` here: an aggregate reads its fields' types.
# pyright: reportArgumentType=false, reportCallIssue=false

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from saccade.backends.device.sequences import is_packed
from saccade.backends.hopper.forward.load import load
from saccade.backends.hopper.forward.mma import consume
from saccade.backends.hopper.forward.paged_tma import is_split
from saccade.backends.hopper.forward.tile_scheduler import TileScheduler
from saccade.backends.hopper.forward.transposer import transpose
from saccade.backends.hopper.forward.work_tile import numbers_of_item
from saccade.backends.hopper.pipeline import (
    KEYS_EMPTY,
    VALUES_EMPTY,
    Pipeline,
    Slots,
    Turns,
    new_barriers,
    new_ring,
)
from saccade.backends.hopper.shim import Value, aggregate
from saccade.backends.hopper.tiles import bytes_of, is_eight_bit

RAW = gl.constexpr(2)
"""Tiles of values that wait for being turned."""


class ForwardShape(NamedTuple):
    """How the forward is cut: constants of a compiled kernel."""

    D_CHUNK: Any
    D_CHUNKS: Any
    D_LAST: Any
    """columns of the last chunk"""
    BLOCK_K: Any
    BLOCK_DV: Any
    ROWS: Any
    """of a consumer's 64 rows those of one head"""
    CONSUMERS: Any
    SLOTS: Any
    STAGES: Any
    TURNS: Any
    REGISTERS: Any
    LOADER_REGISTERS: Any
    OVERLAP: Any
    DV_PARTS: Any
    TRANSPOSER_REGISTERS: Any
    """of 8-bit values that four more warps turn; else 0"""
    DV_LAST: Any
    """columns of the last one of out's DV_PARTS"""
    SORTED: Any
    """whether work items see fewer and fewer keys"""
    OUT_COLUMNS: Any
    """of out that have a place of their own in shared memory; 0: out leaves from where q was"""


@aggregate
class ForwardArgs:
    """What the kernel is called with."""

    q_desc: Value
    k_desc: Value
    v_desc: Value
    out_desc: Value
    out: Value
    parts: Value
    lse: Value
    max_scores: Value
    sink: Value
    counter: Value
    used_q: Value
    used_k: Value
    pages: Value
    mask: Value
    score: Value
    captured: Value
    """a CapturedTileArgs, or None"""
    captured_desc: Value
    arrivals: Value
    """an ArrivalArgs, or None"""
    dropout: Value
    descale: Value
    scheduler: TileScheduler
    h_k: gl.tensor
    group: gl.tensor
    s_q: gl.tensor
    s_k: gl.tensor
    scale: Value


@gluon.jit(do_not_specialize=["blocks", "heads", "section", "h_k", "group", "s_q", "s_k"])
def forward_kernel(
    q_desc, k_desc, v_desc, out_desc, captured_desc, out, lse, max_scores, sink, counter, used, pages, rules,
    dropout, descale, blocks, heads, section, h_k, group, s_q, s_k, scale, shape,
):  # fmt: skip
    """out = softmax(q k^T) v, and lse and max_scores (b, h_q, s_q) contiguous or None. out, the tensor itself: packed,
    PackedRowsArgs; UnseeingRowsArgs where the producer writes the results of work items that see no key; else None.
    With `pages` keys may be cut in parts, whose results are what is written then: out, and lse and max_scores
    (splits, b, s_q, h_q).

    q_desc and out_desc: (b, h_k, group, s_q, d) in tiles of 64 rows, which are ROWS rows of 64 / ROWS heads; k_desc and
    v_desc: (b, h_k, s_k, d), or with `pages` caches (pages, h_k, page_size, d) in boxes. Of 8-bit operands, whose
    factors are `descale`, v_desc is what `transpose` makes of v. captured_desc: of a captured tensor of which the score
    function takes tiles, (b or 1, h_q or 1, s_q, s_k) in tiles of 64 rows, or None. counter: two zeros, which are zeros
    again in the end. used: the rows and the keys that are. rules: the mask, the score, the CapturedTileArgs and the
    ArrivalArgs. blocks, heads, section: see TileScheduler.
    """
    DTYPE: gl.constexpr = q_desc.dtype
    D_CHUNK: gl.constexpr = shape.D_CHUNK
    D_CHUNKS: gl.constexpr = shape.D_CHUNKS
    BLOCK_DV: gl.constexpr = shape.BLOCK_DV
    ROWS: gl.constexpr = shape.ROWS
    CONSUMERS: gl.constexpr = shape.CONSUMERS
    SLOTS: gl.constexpr = shape.SLOTS
    STAGES: gl.constexpr = shape.STAGES
    scheduler = TileScheduler(blocks, heads, section, h_k, (group + 64 // ROWS - 1) // (64 // ROWS))
    parts = None
    if is_split(pages):
        parts = pages.parts
    args = ForwardArgs(
        q_desc, k_desc, v_desc, out_desc, out, parts, lse, max_scores, sink, counter, used[0], used[1], pages, rules[0],
        rules[1], rules[2], captured_desc, rules[3], dropout, descale, scheduler, h_k, group, s_q, s_k, scale,
    )  # fmt: skip
    READERS: gl.constexpr = 32 + 128 * CONSUMERS
    # A consumer's part of a slot holds its q and, unless that has a place of its own, later its out: whole tiles.
    OUT_COLUMNS: gl.constexpr = shape.OUT_COLUMNS
    LATER: gl.constexpr = 0 if OUT_COLUMNS > 0 else BLOCK_DV * bytes_of(out_desc.dtype) // bytes_of(DTYPE)
    WIDER: gl.constexpr = max(D_CHUNK, LATER)
    CHUNKS: gl.constexpr = (D_CHUNKS * D_CHUNK + WIDER - 1) // WIDER * WIDER // D_CHUNK
    q_shape: gl.constexpr = [SLOTS * CONSUMERS * CHUNKS, 1, 1, 64 // ROWS, ROWS, D_CHUNK]
    q_tiles = gl.allocate_shared_memory(DTYPE, q_shape, q_desc.layout)
    k_tiles = gl.allocate_shared_memory(DTYPE, [STAGES * D_CHUNKS, 1, 1, shape.BLOCK_K, D_CHUNK], k_desc.layout)
    v_shape: gl.constexpr = [BLOCK_DV, shape.BLOCK_K] if is_eight_bit(DTYPE) else [shape.BLOCK_K, BLOCK_DV]
    TURNED: gl.constexpr = shape.TRANSPOSER_REGISTERS > 0
    v_layout: gl.constexpr = (
        gl.NVMMASharedLayout.get_default_for([1, 1, v_shape[0], v_shape[1]], DTYPE) if TURNED else v_desc.layout
    )
    v_tiles = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, v_shape[0], v_shape[1]], v_layout)
    captured_tiles = None
    if captured_desc is not None:
        captured_shape: gl.constexpr = [STAGES * CONSUMERS, 1, 1, 64, shape.BLOCK_K]
        captured_tiles = gl.allocate_shared_memory(captured_desc.dtype, captured_shape, captured_desc.layout)
    HELD: gl.constexpr = numbers_of_item(is_packed(used[0]), rules[0].block_sparse, is_split(pages))
    out_tiles = None
    if OUT_COLUMNS > 0:
        out_shape: gl.constexpr = [CONSUMERS, 1, 1, 64 // ROWS, ROWS, OUT_COLUMNS]
        out_tiles = gl.allocate_shared_memory(out_desc.dtype, out_shape, out_desc.layout)
    RECORDS: gl.constexpr = SLOTS + (2 if OUT_COLUMNS > 0 else 1)
    records = gl.allocate_shared_memory(gl.int32, [RECORDS * HELD, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    if TURNED:
        raw_tiles = gl.allocate_shared_memory(DTYPE, [RAW, 1, 1, shape.BLOCK_K, BLOCK_DV], v_desc.layout)
        numbers = gl.allocate_shared_memory(gl.int32, [RAW + 1, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        raw = Slots(raw_tiles, numbers, new_barriers(RAW, 1), new_barriers(RAW, 1), RAW, 1, 1)
    else:
        raw = None
    pipe = Pipeline(
        Slots(q_tiles, records, new_barriers(SLOTS, 1), new_barriers(SLOTS, CONSUMERS), SLOTS, HELD, CHUNKS),
        new_ring(k_tiles, KEYS_EMPTY, STAGES, READERS),
        new_ring(v_tiles, VALUES_EMPTY, STAGES, READERS + 96 if TURNED else READERS),
        Turns(shape.TURNS, CONSUMERS),
        raw,
        captured_tiles,
        out_tiles,
        shape,
    )
    REGISTERS: gl.constexpr = shape.REGISTERS
    if TURNED:
        gl.warp_specialize(
            [(consume, (0, args, pipe)), (consume, (1, args, pipe)), (transpose, (args, pipe)), (load, (args, pipe))],
            [4, 4, 1],
            [REGISTERS, shape.TRANSPOSER_REGISTERS, shape.LOADER_REGISTERS],
        )
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [(consume, (0, args, pipe)), (consume, (1, args, pipe)), (load, (args, pipe))],
            [4, 1],
            [REGISTERS, shape.LOADER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [(consume, (0, args, pipe)), (consume, (1, args, pipe)), (consume, (2, args, pipe)), (load, (args, pipe))],
            [4, 4, 1],
            [REGISTERS, REGISTERS, shape.LOADER_REGISTERS],
        )
