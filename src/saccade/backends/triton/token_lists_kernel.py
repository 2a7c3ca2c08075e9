"""Gradients of rows that each list their keys, from tables of these keys.

Programs have heads of one row, which share their keys. One kernel gathers the keys for the weights and the gradients of
their scores, and writes both down; one gathers them again for dq. Together their sums would be more than registers
hold. What a row adds to its keys is then a plain product for each row, and these parts are added up key by key, in the
order of rows: no atomics, and the same bits in every run.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from saccade.backends.device.positions import extent
from saccade.backends.device.q_block import ScoreArgs, weight_gradient
from saccade.backends.device.records import aggregate, plain_int
from saccade.backends.device.tiles import head
from saccade.backends.triton.backward_kernels import apply_slope, read_terms


class RowKeys(NamedTuple):
    """The keys of rows, and what kernels hand on of some of these rows; numbers are `runtime_int`s."""

    table: Any
    """int32 (lists, n): keys of each row, counted in its batch row"""
    used: Any
    """int32 (lists): how many of each count"""
    n: Any
    weights: Any
    """(2, rows, h_q, room): weights of keys, and gradients of their scores"""
    parts: Any
    """(rows, groups, room, d + d_v): what each row adds to dk and dv of its keys, from all heads of a group"""
    first: Any
    """the first of these rows"""
    rows: Any
    room: Any


class Heads(NamedTuple):
    """How heads share lists; all are constexpr."""

    SHARE: Any
    """heads of a group, which have one list and one key head"""
    GROUPS: Any
    """of a key head"""
    LISTS: Any
    """groups that have one list"""


@triton.jit
def row_list(keys, row, group, s_q, groups, heads):
    """The list of a group of a row: its number, and how many keys count."""
    lists = groups // heads.LISTS
    number = (row // s_q * lists + group // heads.LISTS).to(tl.int64) * s_q + row % s_q
    return number, tl.load(keys.used + number)


@triton.jit
def columns_of(x, there, FIRST: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Columns [n, BLOCK_D] from FIRST on of rows at pointers x [n], zero where they are not there, and beyond D."""
    d = FIRST + tl.arange(0, BLOCK_D)[None, :]
    there = there[:, None]
    return tl.load(x[:, None] + d, mask=there & (d < D) if FIRST + BLOCK_D > D else there, other=0.0)


@triton.jit
def rest_of(x, there, shape):
    """The columns after the first BLOCK_D of q or k, if they are a tile of their own."""
    if shape.REST > 0:
        return columns_of(x, there, shape.BLOCK_D, shape.D, shape.REST)
    else:
        return tl.zeros([1, 1], tl.float32)


@aggregate
class HeadsOfRow:
    """The heads of one row that a program has, and their keys."""

    b: Any
    q_idx: Any
    h: Any
    """[block_q]"""
    there: Any
    h_k: Any
    entries: Any
    """pointer"""
    length: Any
    weights: Any
    """pointers [block_q, 1] to weights of the first key"""
    ds: Any
    """the same of gradients of scores"""


@triton.jit
def heads_of_row(keys, h_q, s_q, shape, heads):
    """What this program has."""
    groups = h_q // heads.SHARE
    tiles: tl.constexpr = (heads.SHARE + shape.BLOCK_Q - 1) // shape.BLOCK_Q
    number = tl.program_id(0) // (groups * tiles)
    row = plain_int(keys.first) + number
    group = tl.program_id(0) % (groups * tiles) // tiles
    # [block_q]
    member = tl.program_id(0) % tiles * shape.BLOCK_Q + tl.arange(0, shape.BLOCK_Q)
    there = member < heads.SHARE
    h = group * heads.SHARE + tl.where(there, member, 0)
    list_number, length = row_list(keys, row, group, s_q, groups, heads)
    entries = keys.table + list_number * plain_int(keys.n)
    room = plain_int(keys.room)
    weights = keys.weights + (number.to(tl.int64) * h_q + h)[:, None] * room
    ds = weights + plain_int(keys.rows).to(tl.int64) * h_q * room
    return HeadsOfRow(row // s_q, row % s_q, h, there, group // heads.GROUPS, entries, length, weights, ds)


@triton.jit(do_not_specialize=["h_q", "s_q", "s_k"])
def token_weights_kernel(q, k, v, dout, terms, keys, used_q, used_k, score, h_q, s_q, s_k, scale, shape, heads):
    """`keys.weights` of BLOCK_Q heads of a row. v: None where it is the first columns of k."""
    own = heads_of_row(keys, h_q, s_q, shape, heads)
    b, q_idx, h, there = own.b, own.q_idx, own.h, own.there
    _, _, _, rows = extent(used_q, b, s_q)
    _, _, _, used = extent(used_k, b, s_k)
    offset = (b.to(tl.int64) * h_q + h) * s_q + q_idx
    row_lse, row_delta = read_terms(terms, offset, there)
    # [block_q, d], [block_q, rest], [block_q, d_v]
    q_at = head(q, b, h, q_idx)
    q_tile = columns_of(q_at, there, 0, shape.D, shape.BLOCK_D)
    q_rest = rest_of(q_at, there, shape)
    dout_tile = columns_of(head(dout, b, h, q_idx), there, 0, shape.D_V, shape.BLOCK_DV)
    args = ScoreArgs(b, h[:, None], rows, used, used - rows, scale, None, score, None)
    for start in range(0, own.length, shape.BLOCK_K):
        # [block_k]
        i = start + tl.arange(0, shape.BLOCK_K)
        named = i < own.length
        kv_idx = tl.load(own.entries + i, mask=named, other=0)
        k_at = head(k, b, own.h_k, kv_idx)
        k_tile = columns_of(k_at, named, 0, shape.D, shape.BLOCK_D)
        qk = tl.dot(q_tile, tl.trans(k_tile), input_precision=shape.PRECISION)
        if shape.REST > 0:
            k_rest = columns_of(k_at, named, shape.BLOCK_D, shape.D, shape.REST)
            qk = tl.dot(q_rest, tl.trans(k_rest), qk, input_precision=shape.PRECISION)
        if v is None:
            v_tile = k_tile
        else:
            v_tile = columns_of(head(v, b, own.h_k, kv_idx), named, 0, shape.D_V, shape.BLOCK_DV)
        dp = tl.dot(dout_tile, tl.trans(v_tile), input_precision=shape.PRECISION)
        p, ds = weight_gradient(qk, dp, row_lse[:, None], row_delta[:, None], args, q_idx, kv_idx[None, :], False)
        ds = apply_slope(ds, qk, args, q_idx, kv_idx[None, :])
        p, ds = tl.where(named[None, :], p, 0.0), tl.where(named[None, :], ds, 0.0)
        tl.store(own.weights + i[None, :], p.to(k_tile.dtype), mask=there[:, None])
        tl.store(own.ds + i[None, :], ds.to(k_tile.dtype), mask=there[:, None])


@triton.jit(do_not_specialize=["h_q", "s_q"])
def token_dq_kernel(k, dq, keys, h_q, s_q, scale, shape, heads):
    """dq = scale ds k of BLOCK_Q heads of a row, from `keys.weights`."""
    own = heads_of_row(keys, h_q, s_q, shape, heads)
    there = own.there[:, None]
    dq_sum = tl.zeros([shape.BLOCK_Q, shape.BLOCK_D], tl.float32)
    rest_sum = tl.zeros([shape.BLOCK_Q, shape.REST if shape.REST > 0 else 1], tl.float32)
    for start in range(0, own.length, shape.BLOCK_K):
        # [block_k]
        i = start + tl.arange(0, shape.BLOCK_K)
        named = i < own.length
        k_at = head(k, own.b, own.h_k, tl.load(own.entries + i, mask=named, other=0))
        ds = tl.load(own.ds + i[None, :], mask=there & named[None, :], other=0.0)  # others were not written
        k_tile = columns_of(k_at, named, 0, shape.D, shape.BLOCK_D)
        dq_sum = tl.dot(ds, k_tile, dq_sum, input_precision=shape.PRECISION)
        if shape.REST > 0:
            k_rest = columns_of(k_at, named, shape.BLOCK_D, shape.D, shape.REST)
            rest_sum = tl.dot(ds, k_rest, rest_sum, input_precision=shape.PRECISION)
    at = head(dq, own.b, own.h, own.q_idx)[:, None]
    d = tl.arange(0, shape.BLOCK_D)[None, :]
    dtype: tl.constexpr = dq.ptr.dtype.element_ty
    tl.store(at + d, (dq_sum * scale).to(dtype), mask=there & (d < shape.D))
    if shape.REST > 0:
        d = shape.BLOCK_D + tl.arange(0, shape.REST)[None, :]
        tl.store(at + d, (rest_sum * scale).to(dtype), mask=there & (d < shape.D))


@triton.jit(do_not_specialize=["h_q", "s_q"])
def key_parts_kernel(
    x, keys, which, first_column, columns, factor, h_q, s_q, heads,
    D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`keys.parts`, the D of its `columns` from `first_column` on: factor w^T x of the keys of a row, over the heads of
    a group; w is number `which` of `keys.weights`."""
    blocks: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    groups = h_q // heads.SHARE
    number = tl.program_id(0) // blocks
    row = number // groups
    group = number % groups
    room, columns = plain_int(keys.room), plain_int(columns)
    at = plain_int(keys.first) + row
    b = at // s_q
    _, length = row_list(keys, at, group, s_q, groups, heads)
    # [block_h], [block_d]
    member = tl.arange(0, BLOCK_H)
    d = tl.program_id(0) % blocks * BLOCK_D + tl.arange(0, BLOCK_D)
    first_h = group * heads.SHARE
    of_which = plain_int(which) * plain_int(keys.rows).to(tl.int64) + row
    weights = keys.weights + (of_which * h_q + first_h) * room
    parts = keys.parts + number.to(tl.int64) * room * columns + plain_int(first_column)
    x_tile = _of_heads(x, b, first_h, member, heads.SHARE, at % s_q, d, D)
    for start in tl.range(0, length, BLOCK_K):
        # [block_k]
        i = start + tl.arange(0, BLOCK_K)
        w_tile = _weights_of(weights, member, heads.SHARE, room, i)
        part = tl.dot(tl.trans(w_tile), x_tile, input_precision="ieee")
        for first in tl.static_range(BLOCK_H, heads.SHARE, BLOCK_H):
            w_tile = _weights_of(weights, first + member, heads.SHARE, room, i)
            others = _of_heads(x, b, first_h, first + member, heads.SHARE, at % s_q, d, D)
            part = tl.dot(tl.trans(w_tile), others, part, input_precision="ieee")
        target = parts + i.to(tl.int64)[:, None] * columns + d[None, :]
        part = (part * factor).to(keys.parts.dtype.element_ty)
        tl.store(target, part, mask=(i < length)[:, None] & (d < D)[None, :])


@triton.jit
def _weights_of(weights, member, SHARE: tl.constexpr, room, i):
    """[block_h, block_k]"""
    offset = member.to(tl.int64)[:, None] * room + i[None, :]
    return tl.load(weights + offset, mask=(member < SHARE)[:, None] & (i < room)[None, :], other=0.0)


@triton.jit
def _of_heads(x, b, first_h, member, SHARE: tl.constexpr, q_idx, d, D: tl.constexpr):
    """[block_h, block_d]"""
    at = head(x, b, first_h + member, q_idx)
    return tl.load(at[:, None] + d[None, :], mask=(member < SHARE)[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def key_sums_kernel(sums, parts, order, first, columns, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Adds to sums, float32 (keys, columns), the parts that are of each key: numbers `order` from `first` of it on."""
    columns = plain_int(columns)
    blocks = tl.cdiv(columns, BLOCK)
    key = tl.program_id(0) // blocks
    begin = tl.load(first + key)
    end = tl.load(first + key + 1)
    if begin == end:
        return
    # [block]
    c = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    target = sums + key.to(tl.int64) * columns + c
    total = tl.load(target, mask=c < columns, other=0.0)
    for start in range(begin, end, ROWS):
        # [rows]
        i = start + tl.arange(0, ROWS)
        number = tl.load(order + i, mask=i < end, other=0).to(tl.int64)
        there = (i < end)[:, None] & (c < columns)[None, :]
        some = tl.load(parts + number[:, None] * columns + c[None, :], mask=there, other=0.0)
        total += tl.sum(some.to(tl.float32), 0)
    tl.store(target, total, mask=c < columns)
