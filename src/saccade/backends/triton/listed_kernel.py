"""Lists of keys for few rows: a program gathers the keys of one list, for the rows and heads that share it."""

# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from saccade.backends import Launches, Outputs
from saccade.backends.device import masks, positions, scores
from saccade.backends.device.arguments import TileShape, precision
from saccade.backends.device.launch import GivenLaunch, Launch, cached_launch, on_device, per_row
from saccade.backends.device.positions import extent
from saccade.backends.device.q_block import ScoreArgs, masked_scores, online_softmax
from saccade.backends.device.records import TensorArgs, plain_int, runtime_int
from saccade.backends.device.tiles import add_sink, head, log_sum, store_largest
from saccade.backends.key_lists import listed_heads, one_list
from saccade.backends.triton.launch import operand
from saccade.call import Call

BLOCK_K = 64
"""Keys that are gathered at once."""


class ListArgs(NamedTuple):
    """Where lists are; numbers are `runtime_int`s."""

    lists: Any
    steps: Any
    """of batch row, head, group and entry; then of lengths, of batch row, head and group"""
    n: Any
    heads: Any
    groups: Any
    rows: Any
    """of a list"""
    keys: Any
    """of an entry"""


def forward(call: Call, launches: Launches, lse: bool) -> Outputs:
    """out (b, h_q, s_q, d_v) and, if asked for, lse and max_scores (b, h_q, s_q)."""
    out, row_lse, top = call.empty_out(), per_row(call, lse), per_row(call, call.max_scores)
    with on_device(out):
        launch, arguments = prepared(call, launches, out, row_lse, top)
        launch(out.device.index, arguments)
    return out, row_lse, top


def prepared(call: Call, launches: Launches, out: Tensor, lse: Tensor | None, top: Tensor | None) -> GivenLaunch:
    """The launch that writes these results, and its arguments."""
    found = one_list(call)
    assert found is not None
    (mask, others), (b, h_q, s_q, _) = found, call.q.shape
    share, groups = h_q // listed_heads(mask, call), mask.lists.shape[2]
    lists, lengths = mask.lists.expand(b, -1, -1, -1), mask.lengths
    if lengths is not None:
        lengths = (lengths if lengths.dim() > 1 else lengths[:, None, None]).expand(b, lists.shape[1], groups)
    steps = *lists.stride(), *((0, 0, 0) if lengths is None else lengths.stride())
    numbers = lists.shape[3], lists.shape[1], groups, mask.rows, mask.keys
    args = ListArgs(lists, tuple(map(runtime_int, steps)), *map(runtime_int, numbers))
    operands = (operand(call, launches, name) for name in ("q", "k", "v"))
    sink = None if call.sink is None else call.sink.contiguous()
    records = *positions.spans(call), masks.device_args(call.replace(mask=others)), scores.device_args(call)
    target, sizes = TensorArgs.of(out), (h_q, s_q, call.k.shape[2], call.scale)
    block_q = max(16, triton.next_power_of_2(share * mask.rows))

    def make() -> Launch:
        shape = TileShape.of(call, block_q, BLOCK_K)
        return Launch(listed_kernel, (b * h_q // share * groups, 1, 1), (shape, tl.constexpr(share)), 4, 2, 1)

    # What is compiled for, and the Call's key does not hold.
    key = "listed", lse is None, target.unit.value, target.wide.value, precision()
    return cached_launch(launches, key, make), (*operands, target, lse, top, sink, args, lengths, *records, *sizes)


@triton.jit
def _gathered(x, base, kv_idx, there, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows kv_idx [block_k] of one head, [block_k, BLOCK_D]; zero where they are not there."""
    d = tl.arange(0, BLOCK_D)[None, :]
    row = kv_idx.to(tl.int64) * plain_int(x.stride_s) * x.unit
    return tl.load(base + row[:, None] + d, mask=there[:, None] & (d < D), other=0.0)


@triton.jit(do_not_specialize=["h_q", "s_q", "s_k"])
def listed_kernel(
    q, k, v, out, lse, max_scores, sink, args, lengths, used_q, used_k, mask, score, h_q, s_q, s_k, scale, shape,
    SHARE: tl.constexpr,
):  # fmt: skip
    """The rows of one list, of SHARE query heads, against the keys that it names. mask: what is beside the list."""
    groups, rows_of_list, heads = plain_int(args.groups), plain_int(args.rows), plain_int(args.heads)
    group = tl.program_id(0) % groups
    some = tl.program_id(0) // groups % (h_q // SHARE)
    b = tl.program_id(0) // groups // (h_q // SHARE)
    _, _, _, rows = extent(used_q, b, s_q)
    _, _, _, keys = extent(used_k, b, s_k)
    # [block_q]
    flat = tl.arange(0, shape.BLOCK_Q)
    q_idx = group * rows_of_list + flat // SHARE
    h = some * SHARE + flat % SHARE
    there = (flat // SHARE < rows_of_list) & (q_idx < s_q)
    live = there & (q_idx < rows)
    columns = tl.arange(0, shape.BLOCK_D)[None, :]
    # [block_q, d]
    q_pointers = head(q, b, h, tl.where(there, q_idx, 0))[:, None] + columns
    q_tile = tl.load(q_pointers, mask=live[:, None] & (columns < shape.D), other=0.0)
    row_max = tl.full([shape.BLOCK_Q], float("-inf"), tl.float32)
    row_sum = tl.zeros([shape.BLOCK_Q], tl.float32)
    acc = tl.zeros([shape.BLOCK_Q, shape.BLOCK_DV], tl.float32)

    of_head = tl.minimum(some, heads - 1).to(tl.int64)  # one for all
    steps = args.steps
    entries = args.lists + b.to(tl.int64) * plain_int(steps[0]) + of_head * plain_int(steps[1])
    entries += group.to(tl.int64) * plain_int(steps[2])
    length = plain_int(args.n)
    if lengths is not None:
        offset = b.to(tl.int64) * plain_int(steps[4]) + of_head * plain_int(steps[5])
        given = tl.load(lengths + offset + group.to(tl.int64) * plain_int(steps[6]))
        length = tl.minimum(given, length).to(tl.int32)
    size = plain_int(args.keys)
    h_k = some * SHARE // shape.GROUP
    k_base = head(k, b, h_k)
    v_base = head(v, b, h_k)
    scoring = ScoreArgs(b, h[:, None], rows, keys, keys - rows, scale, mask, score, None)
    for start in range(0, length * size, shape.BLOCK_K):
        # [block_k]
        number = start + tl.arange(0, shape.BLOCK_K)
        index = (number // size).to(tl.int64)
        entry = tl.load(entries + index * plain_int(steps[3]), mask=number < length * size, other=-1)
        named = (entry >= 0) & (entry < tl.cdiv(keys, size))
        kv_idx = tl.where(named, entry, 0).to(tl.int32) * size + number % size
        named = named & (kv_idx < keys)
        kv_idx = tl.where(named, kv_idx, 0)
        k_tile = _gathered(k, k_base, kv_idx, named, shape.D, shape.BLOCK_D)
        qk = tl.dot(q_tile, tl.trans(k_tile), input_precision=shape.PRECISION)
        x = masked_scores(qk, scoring, q_idx[:, None], kv_idx[None, :], True)
        x = tl.where(named[None, :], x, float("-inf"))
        p, alpha, row_max, row_sum = online_softmax(x, row_max, row_sum, score)
        v_tile = _gathered(v, v_base, kv_idx, named, shape.D_V, shape.BLOCK_DV)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None], input_precision=shape.PRECISION)

    offset = (b.to(tl.int64) * h_q + h) * s_q + q_idx
    store_largest(max_scores, offset, there, row_max, row_sum, score, live)
    acc, row_max, row_sum = add_sink(acc, row_max, row_sum, score, sink, h, True)
    seen = live & (row_sum != 0)  # a NaN counts as seen, and stays one
    acc = tl.where(seen[:, None], acc / tl.where(seen, row_sum, 1.0)[:, None], 0.0)
    columns = tl.arange(0, shape.BLOCK_DV)[None, :]
    out_pointers = head(out, b, h, tl.where(there, q_idx, 0))[:, None] + columns
    tl.store(out_pointers, acc.to(out.ptr.dtype.element_ty), mask=there[:, None] & (columns < shape.D_V))
    if lse is not None:
        row_lse = tl.where(seen, log_sum(row_max, tl.where(seen, row_sum, 1.0), score, sink), float("-inf"))
        tl.store(lse + offset, row_lse, mask=there)
