"""Tables of what a score function reads by distance, for every distance kv_idx - q_idx of a call.

A tile of scores reads T5's bias at places that are computed for every score: clamped, scaled, 64 bits wide. In a table
of all distances the place of a score is that of its row plus the key's number. A table is made for each launch that
reads it: nothing is remembered of a tensor that may change.

In front of its distances a table of one head has two numbers, its reach: up to the first distance, and from the second
one on, the captured tensor is read at one place.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from saccade.backends import Launches
from saccade.backends.device import positions, scores
from saccade.backends.device.launch import Launch, cached_launch
from saccade.backends.device.records import FAR, plain_int, runtime_int
from saccade.call import Call
from saccade.scores import Traced

MARGIN = 256
"""Tiles may reach so far beyond the last row and key."""
BLOCK = 1024
MOST = 1 << 26
"""Numbers of a table; a longer one is not made, and places are computed for every score."""
REACH = tl.constexpr(2)
"""Numbers in front of the distances."""
LARGEST = tl.constexpr(4096.0)
"""What a table may hold beyond its reach; a larger number, as those that mask keys, is added to one score after the
other, so that sums are rounded as in all other tiles."""


def tables(call: Call, launches: Launches, fast: bool = False) -> tuple[Any, ...]:
    """What emitted functions take after the tensors and numbers: of each table its pointer, its strides, and the place
    of distance 0. None of a call whose distances are not those of the numbers of rows and keys, of which the host knows
    the largest."""
    found = empty(call)
    for i in range(0, len(found), FIELDS):
        table, _, _, zero = found[i : i + FIELDS]
        launch = cached_launch(launches, ("table", i, fast), lambda i=i: table_launch(call, i // FIELDS, fast))
        numbers = runtime_int(table.shape[1]), runtime_int(table.shape[2]), zero
        launch(call.q.device.index, (table, scores.data(call.score), *numbers))
    return found


FIELDS = 4


def empty(call: Call) -> tuple[Any, ...]:
    """The same before they are filled."""
    score = call.score
    if not isinstance(score, Traced) or call.layout.ragged_keys or positions.kind(call) != "numbers":
        return ()
    (b, h_q, s_q), s_k = call.q.shape[:3], call.k.shape[2]
    length = REACH.value + s_q + s_k + 2 * MARGIN
    if b * h_q * length > MOST:
        return ()
    found: list[Any] = []
    for per_batch_row, per_head in score.program.distance_inputs:
        shape = b if per_batch_row else 1, h_q if per_head else 1, length
        table = torch.empty(shape, dtype=torch.float32, device=call.q.device)
        strides = table.stride(0) * per_batch_row, table.stride(1) * per_head, REACH.value + s_q + MARGIN
        found += table, *map(runtime_int, strides)
    return tuple(found)


def table_launch(call: Call, n: int, fast: bool) -> Launch:
    """Of the n-th table."""
    score: Any = call.score
    read = list(score.program.distance_reads)[n]
    b, h, _ = empty(call)[FIELDS * n].shape
    constants = *scores.table_functions(score, read, fast), tl.constexpr(BLOCK)
    return Launch(table_kernel, (b * h, 1, 1), constants)


@triton.jit
def table_kernel(
    table, data, h_q, length, zero, VALUE: tl.constexpr, OFFSET: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The table of one head, BLOCK distances at a time."""
    h_q, length, zero = plain_int(h_q), plain_int(length), plain_int(zero)
    bh = tl.program_id(0)
    b, h = bh // h_q, bh % h_q
    row = table + bh.to(tl.int64) * length
    # The first and the last distance whose place is not that of the distance before.
    first = tl.full([1, BLOCK], FAR, tl.int32)
    last = -first
    for start in range(REACH, length, BLOCK):
        n = start + tl.arange(0, BLOCK)[None, :]
        distance = n - zero
        # [1, block]: a read by distance is what row 0 reads, of keys before the first one too
        tl.store(row + n, VALUE(data, distance, b, h, distance * 0, distance), mask=n < length)
        offset = OFFSET(data, distance, b, h, distance * 0, distance)
        before = OFFSET(data, distance, b, h, distance * 0, distance - 1)
        changed = (offset != before) & (n > REACH) & (n < length)
        first = tl.where(changed, tl.minimum(first, distance), first)
        last = tl.where(changed, distance, last)
    ends = tl.arange(0, 2)[None, :]
    distance = tl.where(ends == 0, REACH, length - 1) - zero
    bias = VALUE(data, distance, b, h, distance * 0, distance)
    reach = tl.where(ends == 0, tl.min(first) - 1, tl.max(last))
    reach = tl.where(tl.abs(bias) < LARGEST, reach, tl.where(ends == 0, -FAR, FAR))
    tl.store(row + ends, reach.to(tl.float32))
