"""Lists of keys for few rows: programs gather the keys of lists, for the rows and heads that share them.

Where lists of blocks are of few rows each, neighbouring rows make one tile, whose keys are the union of their lists:
each block once, with a bit for each row that lists it. Rows that choose the same blocks so share their loads. For
gradients of keys lists are inverted: each block has the rows that list it, in their order, so that all sums have one.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from saccade.backends.device.key_lists import list_of_row
from saccade.backends.device.positions import blocks_before, extent, is_packed, numbered, tile_of
from saccade.backends.device.q_block import ScoreArgs, online_softmax, weight_gradient
from saccade.backends.device.records import aggregate, plain_int, sees
from saccade.backends.device.tiles import add_sink, head, load_tile, log_sum, logits, store_largest
from saccade.backends.triton.backward_kernels import apply_slope, dkdv_of_rows, read_terms, store_dk, store_dv

LAST = tl.constexpr((1 << 31) - 1)
"""What sorts after all entries."""


class Unions(NamedTuple):
    """Entries of the lists of each tile's rows, in their order."""

    entries: Any
    """int32 (tiles, most)"""
    bits: Any
    """int32 (tiles, most): a bit for each row that lists the entry"""
    count: Any
    """int32 (tiles)"""
    most: Any
    """a runtime_int"""


class GatherTile(NamedTuple):
    """What kernels whose programs have rows are compiled for; all are constexpr."""

    SHARE: Any
    """heads that share lists"""
    ROWS: Any
    """of each of them"""
    WHOLE: Any
    """Whether a tile of keys is of one entry."""


class Inverted(NamedTuple):
    """The lists that name each block of keys; strides are `runtime_int`s, in blocks."""

    lists: Any
    """int32: numbers of a head's lists, block after block"""
    first: Any
    """int32 or int64 (blocks + 1): where those of each block begin; of batch rows, heads and their blocks"""
    stride_b: Any
    stride_h: Any


@aggregate
class ListBlock:
    """The rows of a program, some of each of SHARE heads, and the entries of their lists."""

    args: ScoreArgs
    batch: Any
    first_q: Any
    first_k: Any
    """the sequence's first row and first key in tensors"""
    row: Any
    """[block_q]: in the tile"""
    q_idx: Any
    h: Any
    h_k: Any
    """the key head of all"""
    there: Any
    live: Any
    """[block_q]: which rows there are, and which of them are in use"""
    lo: Any
    hi: Any
    """[block_q]: their hulls"""
    offset: Any
    """[block_q]: in tensors (b, h, s)"""
    entries: Any
    """pointer"""
    step: Any
    """between entries"""
    length: Any
    bits: Any
    """pointer to a bit for each row of each entry; None: they are entries of all rows"""


@triton.jit
def list_block(lists, unions, used_q, used_k, mask, score, h_q, s_q, s_k, scale, shape, tile):
    """The rows of this program. mask: what is beside the lists."""
    b, some, _, start = tile_of(used_q, h_q // tile.SHARE, s_q, tile.ROWS, True)
    batch, first_q, there, rows = extent(used_q, b, s_q)
    _, first_k, _, keys = extent(used_k, b, s_k)
    b = numbered(used_q, b)
    # [block_q]
    flat = tl.arange(0, shape.BLOCK_Q)
    row = flat // tile.SHARE
    h = some * tile.SHARE + flat % tile.SHARE
    known = (row < tile.ROWS) & (start + row < there)
    q_idx = tl.where(known, start + row, 0)
    offset = (batch.to(tl.int64) * h_q + h) * s_q + first_q + q_idx
    args = ScoreArgs(b, h[:, None], rows, keys, keys - rows, scale, mask, score, None)
    if unions is None:
        entries, length = list_of_row(lists, b, some, first_q, start)
        step = plain_int(lists.steps[3])
        bits = None
    else:
        number = tl.program_id(0).to(tl.int64)
        first = number * plain_int(unions.most)
        entries = unions.entries + first
        length = tl.load(unions.count + number)
        step = 1
        bits = unions.bits + first
    live = known & (q_idx < rows)
    h_k = some * tile.SHARE // shape.GROUP
    lo, hi, _, _ = mask.keys_of(mask.data, b, q_idx, keys - rows)
    lo = tl.maximum(lo, 0)
    hi = tl.where(live, tl.minimum(hi, keys), 0)
    return ListBlock(
        args, batch, first_q, first_k, row, q_idx, h, h_k, known, live, lo, hi, offset, entries, step, length, bits
    )


@triton.jit
def listed_keys(block, lists, start, shape, tile):
    """The keys [block_k] of a tile that begins at number `start` of all that entries name; which of them there are; and
    which of them rows see, [block_q, block_k]."""
    size = plain_int(lists.keys)
    args = block.args
    # [block_k]
    number = start + tl.arange(0, shape.BLOCK_K)
    if tile.WHOLE:
        index = start // size
        entry = tl.load(block.entries + index.to(tl.int64) * block.step)
    else:
        index = number // size
        entry = tl.load(block.entries + index.to(tl.int64) * block.step, mask=index < block.length, other=-1)
    entry = tl.where((entry >= 0) & (entry < tl.cdiv(args.keys, size)), entry, -1).to(tl.int32)
    kv_idx = entry * size + number - index * size
    named = (kv_idx >= 0) & (kv_idx < args.keys)
    lo, hi = block.lo[:, None], block.hi[:, None]
    if block.bits is not None:
        if tile.WHOLE:
            hi = tl.where(((tl.load(block.bits + index) >> block.row) & 1) != 0, block.hi, 0)[:, None]
        else:
            bits = tl.load(block.bits + index, mask=index < block.length, other=0)
            hi = tl.where(((bits[None, :] >> block.row[:, None]) & 1) != 0, hi, 0)
    seen = (kv_idx[None, :] >= lo) & (kv_idx[None, :] < hi)
    kv_idx = tl.where(named, kv_idx, 0)
    if not args.mask.exact:
        seen = seen & sees(args.mask, args.b, args.h, block.q_idx[:, None], kv_idx[None, :], args.off)
    return kv_idx, named, seen


@triton.jit
def key_places(block, pages, size, kv_idx, there):
    """Batch row, or page, and row of keys [block_k]; pages: a `PageTable` of pages of `size` keys, or None."""
    if pages is None:
        return block.batch, block.first_k + kv_idx
    else:
        table = pages.table + block.args.b.to(tl.int64) * plain_int(pages.stride)
        page = tl.load(table + kv_idx // size, mask=there, other=0)
        return tl.minimum(tl.maximum(page, 0), plain_int(pages.count) - 1).to(tl.int64), kv_idx % size


@triton.jit
def head_rows(x, batch, h, row, live, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows [n], each of its batch row and head, [n, BLOCK_D]; zero where they are not live."""
    d = tl.arange(0, BLOCK_D)[None, :]
    return tl.load(head(x, batch, h, row)[:, None] + d, mask=live[:, None] & (d < D), other=0.0)


@triton.jit
def store_rows(x, block, value, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Writes the block's rows, in use or not."""
    d = tl.arange(0, BLOCK_D)[None, :]
    pointers = head(x, block.batch, block.h, block.first_q + block.q_idx)[:, None] + d
    tl.store(pointers, value.to(x.ptr.dtype.element_ty), mask=block.there[:, None] & (d < D))


@triton.jit(do_not_specialize=["page_size", "h_q", "s_q", "s_k"])
def listed_kernel(
    q, k, v, out, lse, max_scores, sink, pages, page_size, lists, unions, used_q, used_k, mask, score, h_q, s_q, s_k,
    scale, shape, tile,
):  # fmt: skip
    """out, lse and max_scores of the tile's rows, against the keys that their lists name."""
    block = list_block(lists, unions, used_q, used_k, mask, score, h_q, s_q, s_k, scale, shape, tile)
    batch, args, live = block.batch, block.args, block.live
    # [block_q, d]
    q_tile = head_rows(q, batch, block.h, block.first_q + block.q_idx, live, shape.D, shape.BLOCK_D)
    row_max = tl.full([shape.BLOCK_Q], float("-inf"), tl.float32)
    row_sum = tl.zeros([shape.BLOCK_Q], tl.float32)
    acc = tl.zeros([shape.BLOCK_Q, shape.BLOCK_DV], tl.float32)
    for start in range(0, block.length * plain_int(lists.keys), shape.BLOCK_K):
        kv_idx, named, seen = listed_keys(block, lists, start, shape, tile)
        at, key = key_places(block, pages, page_size, kv_idx, named)
        k_tile = head_rows(k, at, block.h_k, key, named, shape.D, shape.BLOCK_D)
        qk = tl.dot(q_tile, tl.trans(k_tile), input_precision=shape.PRECISION)
        x = logits(qk, score, scale, args.b, args.h, block.q_idx[:, None], kv_idx[None, :])
        x = tl.where(seen, x, float("-inf"))
        p, alpha, row_max, row_sum = online_softmax(x, row_max, row_sum, score)
        v_tile = head_rows(v, at, block.h_k, key, named, shape.D_V, shape.BLOCK_DV)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None], input_precision=shape.PRECISION)

    store_largest(max_scores, block.offset, block.there, row_max, row_sum, score, live)
    named = live & (row_sum != 0)  # rows that see a key; a NaN counts as one, and stays one
    acc, row_max, row_sum = add_sink(acc, row_max, row_sum, score, sink, block.h, True)
    seen = live & (row_sum != 0)
    acc = tl.where(named[:, None], acc / tl.where(named, row_sum, 1.0)[:, None], 0.0)
    store_rows(out, block, acc, shape.D_V, shape.BLOCK_DV)
    if lse is not None:
        row_lse = tl.where(seen, log_sum(row_max, tl.where(seen, row_sum, 1.0), score, sink), float("-inf"))
        tl.store(lse + block.offset, row_lse, mask=block.there)


@triton.jit(do_not_specialize=["h_q", "s_q", "s_k"])
def listed_dq_kernel(
    q, k, v, dout, dq, terms, lists, unions, used_q, used_k, mask, score, h_q, s_q, s_k, scale, shape,
    tile,
):  # fmt: skip
    """dq = scale ds k of the same rows."""
    block = list_block(lists, unions, used_q, used_k, mask, score, h_q, s_q, s_k, scale, shape, tile)
    batch, args, live = block.batch, block.args, block.live
    row = block.first_q + block.q_idx
    # [block_q, d], [block_q, d_v]
    q_tile = head_rows(q, batch, block.h, row, live, shape.D, shape.BLOCK_D)
    dout_tile = head_rows(dout, batch, block.h, row, live, shape.D_V, shape.BLOCK_DV)
    row_lse, row_delta = read_terms(terms, block.offset, live)
    dq_sum = tl.zeros([shape.BLOCK_Q, shape.BLOCK_D], tl.float32)
    q_idx = block.q_idx[:, None]
    for start in range(0, block.length * plain_int(lists.keys), shape.BLOCK_K):
        kv_idx, named, seen = listed_keys(block, lists, start, shape, tile)
        key = block.first_k + kv_idx
        k_tile = head_rows(k, batch, block.h_k, key, named, shape.D, shape.BLOCK_D)
        v_tile = head_rows(v, batch, block.h_k, key, named, shape.D_V, shape.BLOCK_DV)
        qk = tl.dot(q_tile, tl.trans(k_tile), input_precision=shape.PRECISION)
        dp = tl.dot(dout_tile, tl.trans(v_tile), input_precision=shape.PRECISION)
        _, ds = weight_gradient(qk, dp, row_lse[:, None], row_delta[:, None], args, q_idx, kv_idx[None, :], False)
        ds = tl.where(seen, apply_slope(ds, qk, args, q_idx, kv_idx[None, :]), 0.0)
        dq_sum = tl.dot(ds.to(k_tile.dtype), k_tile, dq_sum, input_precision=shape.PRECISION)
    store_rows(dq, block, dq_sum * scale, shape.D, shape.BLOCK_D)


@triton.jit
def rows_of_lists(lists, inverted, first, last, start, first_q, rows, shape, SHARE: tl.constexpr):
    """Rows [block_q] of lists first to last of a block, from number `start` on, and which of them there are; one that
    lists the block twice comes once."""
    size = plain_int(lists.rows)
    # [block_q]
    i = tl.arange(0, shape.BLOCK_Q) // SHARE
    number = start + i
    index = first + number // size
    there = (i < shape.BLOCK_Q // SHARE) & (index < last)
    group = tl.load(inverted.lists + index, mask=there, other=0)
    before = tl.load(inverted.lists + index - 1, mask=there & (number >= size), other=-1)
    q_idx = group - first_q if lists.end_to_end else group * size + number % size
    there = there & (group != before) & (q_idx >= 0) & (q_idx < rows)
    return tl.where(there, q_idx, 0), there


@triton.jit(do_not_specialize=["h_q", "s_q", "s_k"])
def listed_dkdv_kernel(
    q, k, v, dout, dk, dv, terms, lists, inverted, used_q, used_k, mask, score, h_q, s_q, s_k, scale, shape,
    SHARE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """dk = scale ds^T q and dv = p^T dout of BLOCK_K keys of a block of KEYS, of one key head, over the rows that list
    the block, as many at a time as the tile has room for."""
    b, head_k, _, start = tile_of(used_k, h_q // shape.GROUP, s_k, KEYS, False)
    batch, first_q, _, rows = extent(used_q, b, s_q)
    _, first_k, there, keys = extent(used_k, b, s_k)
    block = start // KEYS
    if is_packed(used_k):
        block += blocks_before(used_k, b, first_k, KEYS)
    b = numbered(used_k, b)
    stop = start + KEYS
    start_k = start + tl.program_id(1) * shape.BLOCK_K
    # [block_k]
    kv_idx = start_k + tl.arange(0, shape.BLOCK_K)
    keys_of_block = tl.minimum(keys, stop)
    live = kv_idx < keys_of_block
    # [block_k, d], [block_k, d_v]
    k_head = head(k, batch, head_k, first_k)
    v_head = head(v, batch, head_k, first_k)
    k_tile = load_tile(k, k_head, start_k, keys_of_block, shape.BLOCK_K, shape.D, shape.BLOCK_D, True)
    v_tile = load_tile(v, v_head, start_k, keys_of_block, shape.BLOCK_K, shape.D_V, shape.BLOCK_DV, True)
    dk_sum = tl.zeros([shape.BLOCK_K, shape.BLOCK_D], tl.float32)
    dv_sum = tl.zeros([shape.BLOCK_K, shape.BLOCK_DV], tl.float32)
    step: tl.constexpr = shape.BLOCK_Q // SHARE
    for i in range(shape.GROUP // SHARE):
        some = head_k * (shape.GROUP // SHARE) + i
        h = some * SHARE + tl.arange(0, shape.BLOCK_Q) % SHARE
        at = inverted.first + b * plain_int(inverted.stride_b) + some * plain_int(inverted.stride_h) + block
        first = tl.load(at, mask=start_k < keys_of_block, other=0).to(tl.int32)
        last = tl.load(at + 1, mask=start_k < keys_of_block, other=0).to(tl.int32)
        args = ScoreArgs(b, h[None, :], rows, keys_of_block, keys - rows, scale, mask, score, None)
        # What says where the next rows are is read before these: loads of rows never wait for it.
        next_q, next_seeing = rows_of_lists(lists, inverted, first, last, 0, first_q, rows, shape, SHARE)
        for number in range(0, (last - first) * plain_int(lists.rows), step):
            q_idx, seeing = next_q, next_seeing
            next_q, next_seeing = rows_of_lists(
                lists, inverted, first, last, number + step, first_q, rows, shape, SHARE
            )
            row = first_q + q_idx
            # [block_q, d], [block_q, d_v]
            q_tile = head_rows(q, batch, h, row, seeing, shape.D, shape.BLOCK_D)
            dout_tile = head_rows(dout, batch, h, row, seeing, shape.D_V, shape.BLOCK_DV)
            offset = (batch.to(tl.int64) * h_q + h) * s_q + row
            # Not by `load_terms`, behind which ptxas 13.4 serialises products here (C7515).
            row_lse, row_delta = read_terms(terms, offset, seeing)
            tiles = q_tile, dout_tile, row_lse, row_delta
            dk_sum, dv_sum = dkdv_of_rows(dk_sum, dv_sum, tiles, k_tile, v_tile, q_idx, kv_idx, args, shape, True)
    there = tl.minimum(there, stop)
    store_dk(dk, head(dk, batch, head_k, first_k), start_k, there, live, dk_sum * scale, shape)
    store_dv(dv, head(dv, batch, head_k, first_k), start_k, there, live, dv_sum, None, shape, 0)


@triton.jit
def _same_entry(entry, bits, other, more):
    """Sums of bits over equal entries."""
    return other, more | tl.where(entry == other, bits, 0)


@triton.jit(do_not_specialize=["h_q", "s_q", "s_k"])
def union_kernel(
    unions, lists, used_q, used_k, h_q, s_q, s_k, SHARE: tl.constexpr, ROWS: tl.constexpr, ENTRIES: tl.constexpr
):
    """The union of the lists of ROWS rows, in its order."""
    b, some, _, start = tile_of(used_q, h_q // SHARE, s_q, ROWS, True)
    _, first_q, _, rows = extent(used_q, b, s_q)
    _, _, _, keys = extent(used_k, b, s_k)
    # [ROWS]
    row = tl.arange(0, ROWS)
    entries, length = list_of_row(lists, numbered(used_q, b), some, first_q, start + row)
    # [ROWS, ENTRIES]
    index = tl.arange(0, ENTRIES)[None, :]
    there = (index < length[:, None]) & (start + row < rows)[:, None]
    entry = tl.load(entries[:, None] + index.to(tl.int64) * plain_int(lists.steps[3]), mask=there, other=-1)
    named = (entry >= 0) & (entry < tl.cdiv(keys, plain_int(lists.keys)))
    # [ROWS ENTRIES]
    ordered = tl.where(named, entry, 0).to(tl.int32) * ROWS + row[:, None]
    ordered = tl.sort(tl.reshape(tl.where(named, ordered, LAST), [ROWS * ENTRIES]))
    entry, bits = tl.associative_scan((ordered // ROWS, (ordered * 0 + 1) << (ordered % ROWS)), 0, _same_entry)
    i = tl.arange(0, ROWS * ENTRIES)
    after = tl.gather(ordered, tl.minimum(i + 1, ROWS * ENTRIES - 1), 0)
    last = (ordered != LAST) & ((after // ROWS != entry) | (i == ROWS * ENTRIES - 1))
    number = tl.program_id(0).to(tl.int64)
    offset = number * plain_int(unions.most) + tl.cumsum(last.to(tl.int32), 0) - 1
    tl.store(unions.entries + offset, entry, mask=last)
    tl.store(unions.bits + offset, bits, mask=last)
    tl.store(unions.count + number, tl.sum(last.to(tl.int32)))
