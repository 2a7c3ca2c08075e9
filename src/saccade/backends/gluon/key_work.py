"""The block of keys that a program of the backward has, in every layout and of every mask."""

# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from saccade.backends.device.block_lists_kernel import block_list_number, load_block_list
from saccade.backends.device.records import plain_int
from saccade.backends.device.sequences import blocks_before, extent, is_packed, numbered, packed_tile, place_of
from saccade.backends.device.tiles import tile_range, used_length
from saccade.backends.gluon.key_block import KeyBlock, ListedKeyBlock, PackedKeyBlock, PackedListedKeyBlock


@gluon.jit
def key_block(
    item, order, mask, used_q, used_k, s_q, s_k, q_blocks, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr,
    LAST_FIRST: gl.constexpr,
):  # fmt: skip
    """The KeyBlock of work item `item`. In a section of heads the first keys come first, as a causal mask gives them
    most rows, or the last ones."""
    if is_packed(used_k):
        shares = plain_int(order.shares)
        seq, share, _, start = packed_tile(used_k, item, shares, s_k, BLOCK_K, LAST_FIRST)
        h_k = share // plain_int(order.divided)
        number = place_of(used_k, item, shares, start, BLOCK_K)
        return packed_key_block(
            seq, h_k, share, start, number, mask, used_q, used_k, s_q, s_k, q_blocks, BLOCK_Q, BLOCK_K
        )
    else:
        b, h_k, share, start = key_place(item, order, BLOCK_K, LAST_FIRST)
        return key_block_at(b, h_k, share, start, mask, used_q, used_k, s_q, s_k, BLOCK_Q, BLOCK_K)


@gluon.jit
def key_place(item, order, BLOCK_K: gl.constexpr, LAST_FIRST: gl.constexpr):
    """Batch row, key head, share and first key of a work item."""
    blocks = plain_int(order.blocks)
    size = plain_int(order.section)
    number = item // (blocks * size)
    rest = item - number * (blocks * size)
    size = gl.minimum(size, plain_int(order.heads) - number * size)
    bh = number * plain_int(order.section) + rest % size
    b = bh // plain_int(order.shares)
    share = bh % plain_int(order.shares)
    i = rest // size
    if LAST_FIRST:
        i = blocks - 1 - i
    return b, share // plain_int(order.divided), share, i * BLOCK_K


@gluon.jit
def key_block_at(b, h_k, share, start, mask, used_q, used_k, s_q, s_k, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr):
    """The KeyBlock of these BLOCK_K keys."""
    if mask.listed:
        return listed_key_block(b, h_k, share, start, mask, used_q, used_k, s_q, s_k, BLOCK_K)
    else:
        return key_block_of_interval(b, h_k, share, start, mask, used_q, used_k, s_q, s_k, BLOCK_Q, BLOCK_K)


@gluon.jit
def listed_key_block(b, h_k, share, start, mask, used_q, used_k, s_q, s_k, BLOCK_K: gl.constexpr):
    number = block_list_number(mask.lists, b, share, start // BLOCK_K)
    listing, edge, end = listed_blocks(mask, number)
    rows = used_length(used_q, b, s_q)
    keys = used_length(used_k, b, s_k)
    return ListedKeyBlock(b, h_k, share, start, rows, keys, end * 0, edge, end, end, listing, number)


@gluon.jit
def listed_blocks(mask, number):
    """Where a list of blocks of rows begins, how many need the mask, and how many there are."""
    listing, some, tiles = load_block_list(mask.lists, number)
    none = (tiles == 0).to(gl.int32)  # nobody sees these keys: one block, all hidden
    return listing, some + none, tiles + none


@gluon.jit
def key_block_of_interval(
    b, h_k, share, start, mask, used_q, used_k, s_q, s_k, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr
):
    rows = used_length(used_q, b, s_q)
    keys = used_length(used_k, b, s_k)
    first, core, core_end, end = row_blocks(mask, b, start, rows, keys, BLOCK_Q, BLOCK_K)
    return KeyBlock(b, h_k, share, start, rows, keys, first, core, core_end, end)


@gluon.jit
def row_blocks(mask, b, start, rows, keys, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr):
    """Which blocks of rows see some of these keys, [first, end), and which of them all, [core, core_end)."""
    # [BLOCK_K]
    kv_idx = start + gl.arange(0, BLOCK_K, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    lo, hi, core_lo, core_hi = mask.rows_of(mask.data, b, kv_idx, keys - rows)
    # Rows that are not in use need no mask: their start is -inf.
    whole = gl.cdiv(rows, BLOCK_Q) * BLOCK_Q
    core_hi = gl.where(core_hi >= rows, whole, core_hi)
    first, core, core_end, end = tile_range(lo, gl.minimum(hi, rows), core_lo, core_hi, kv_idx < keys, whole, BLOCK_Q)
    if start + BLOCK_K > keys:  # some keys are not in use, and nothing but the mask hides them
        core = end
        core_end = end
    if end <= first:  # nobody sees these keys: one block, all hidden, so that no loop has to think of none
        first = first * 0
        core = first + BLOCK_Q
        core_end = core
        end = core
    return first // BLOCK_Q, core // BLOCK_Q, core_end // BLOCK_Q, end // BLOCK_Q


@gluon.jit
def packed_key_block(
    seq, h_k, share, start, number, mask, used_q, used_k, s_q, s_k, q_blocks,
    BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr,
):  # fmt: skip
    """The PackedKeyBlock of the keys from `start` on of sequence `seq`, whose place in the table is `number`. Behind
    the last key, where programs without a tile have theirs, it is of no rows and no keys, and has the last block of
    rows of all, which is no sequence's."""
    _, first_row, _, rows = extent(used_q, seq, s_q)
    _, first_key, there, keys = extent(used_k, seq, s_k)
    first_block = blocks_before(used_q, seq, first_row, BLOCK_Q)
    if start >= s_k:
        rows = rows * 0
        keys = rows
        there = rows
        first_block = q_blocks - 1
    b = numbered(used_k, seq)
    if mask.listed:
        number = block_list_number(mask.lists, b, share, number)
        listing, edge, end = listed_blocks(mask, number)
        return PackedListedKeyBlock(
            b, h_k, share, start, rows, keys, end * 0, edge, end, end, first_row, first_key, first_block, there,
            listing, number,
        )  # fmt: skip
    else:
        first, core, core_end, end = row_blocks(mask, b, start, rows, keys, BLOCK_Q, BLOCK_K)
        return PackedKeyBlock(
            b, h_k, share, start, rows, keys, first, core, core_end, end, first_row, first_key, first_block, number,
            there,
        )  # fmt: skip
