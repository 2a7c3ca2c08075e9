"""Block lists: the tiles that a kernel visits, for each block of query rows its tiles of keys, or the other way round.

A list has the tiles that are partial, then those that are full. Where there are none, its first entry is tile 0, which
a kernel that always has one tile may visit with the mask.
"""

# pyright: reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.backends import Launches, block_sparsity
from saccade.backends.device import masks, positions, replay, visits
from saccade.backends.device.block_lists_kernel import (
    block_list_kernel,
    mark_kernel,
    packed_block_list_kernel,
    packed_tile_states_kernel,
    ranks_kernel,
    tile_states_kernel,
)
from saccade.backends.device.launch import GivenLaunch, Launch, cached_launch
from saccade.backends.device.records import constants, runtime_int
from saccade.backends.key_lists import joined, lists_and_rest
from saccade.call import Call
from saccade.masks import TILE
from saccade.util.caches import derived


class BlockLists(NamedTuple):
    """Lists by batch row, query head and block; strides are `runtime_int`s, in lists."""

    index: Any
    """int32 (b or 1, h_q or 1, blocks, tiles)"""
    count: Any
    """int32 (b or 1, h_q or 1, blocks, 2): partial tiles, and all that are not empty"""
    stride_b: Any
    stride_h: Any
    tiles: Any


CHUNK = 256
"""Tiles that a program puts into a list at a time."""
SPAN, AT_ONCE = 32, 2
"""States of one program, and those that it computes at a time."""


class Lists(NamedTuple):
    """Lists of a mask as the kernel of states reads them, beside what else is in the mask."""

    mask: masks.DeviceMask
    ROWS: Any
    KEYS: Any
    """constexpr: of a tile those that say what the lists name in it"""

    @staticmethod
    def of(call: Call) -> tuple[Lists | None, Call]:
        """The lists of a call, and the call without them, whose mask says where a tile is full."""
        lists, rest = lists_and_rest(call.mask)
        if not lists:
            return None, call
        samples = (2 if n >= TILE else TILE for n in (min(x.rows for x in lists), min(x.keys for x in lists)))
        device = masks.device_args(call.replace(mask=joined(lists)))
        return Lists(device, *constants(*samples)), call.replace(mask=rest)


def states(call: Call, launches: Launches) -> Tensor:
    """The states of the mask's tiles: see `saccade.backends.block_sparsity`."""
    packed = call.layout.ragged_keys
    allocate = torch.zeros if packed else torch.empty  # no program writes the tiles after a packed sequence's keys
    tile_states = allocate(*block_sparsity.states_shape(call), dtype=torch.uint8, device=call.q.device)
    if tile_states.numel():
        table = positions.table(call, launches, 0, TILE) if packed else None
        launch, arguments = states_launch(call, launches, tile_states, table)
        launch(call.q.device.index, arguments)
    return tile_states


def states_launch(call: Call, launches: Launches, states: Tensor, table: Tensor | None) -> GivenLaunch:
    """The kernel that fills states, and its arguments; packed sequences have a table of q tiles."""
    b, h, n_q, n_k = states.shape
    kernel, grid = tile_states_kernel, (b * h * n_q * -(-n_k // SPAN), 1, 1)
    if table is not None:
        kernel, grid = packed_tile_states_kernel, (h * positions.slots(call, 0, TILE), -(-n_k // SPAN), 1)
    lengths = call.q.shape[2], call.k.shape[2]
    lists, others = Lists.of(call)
    at_once = AT_ONCE if lists is None or lists.ROWS.value == lists.KEYS.value == TILE else SPAN
    arguments = states, *positions.spans(call, table), masks.device_args(others), lists, h, *lengths, n_q, n_k
    key = "tile states", *(() if lists is None else (lists.ROWS.value, lists.KEYS.value))
    return cached_launch(launches, key, lambda: Launch(kernel, grid, (at_once, SPAN))), arguments


def build(call: Call, launches: Launches, block_q: int, block_k: int, by_keys: bool = False) -> BlockLists:
    """For each q block its tiles of keys, or `by_keys` for each kv block its tiles of rows."""
    # Where a Blocked mask's states no longer hold, they are computed of another call, that of the mask inside.
    tile_states, outlives = block_sparsity.states_of(call, lambda of: states(of, launches if of is call else {}))
    b, h = tile_states.shape[:2]
    lengths = call.q.shape[2], call.k.shape[2]
    blocks = block_q, block_k
    if by_keys:
        lengths, blocks = lengths[::-1], blocks[::-1]
    outers, inners = (-(-n // block) for n, block in zip(lengths, blocks, strict=True))
    if call.layout.ragged_keys:  # and an empty list, for programs without a tile
        outers = positions.slots(call, by_keys, blocks[0]) + 1

    def write_lists() -> tuple[Tensor, Tensor]:
        index = torch.empty(b, h, outers, inners, dtype=torch.int32, device=tile_states.device)
        count = torch.zeros(b, h, outers, 2, dtype=torch.int32, device=tile_states.device)
        if index.numel():
            table = None
            if call.layout.ragged_keys:
                table = positions.table(call, launches, by_keys, blocks[0])
            launch, arguments = lists_launch(call, launches, tile_states, index, count, blocks, by_keys, table)
            launch(call.q.device.index, arguments)
        return index, count

    key = "lists", *blocks, by_keys, *lengths
    if outlives:  # they are of the call's key alone
        index, count = derived(key, [tile_states], write_lists)
        replay.note_kept(index, count)
    else:
        index, count = write_lists()
    strides = h * outers if b > 1 else 0, outers if h > 1 else 0, inners
    return BlockLists(index, count, *map(runtime_int, strides))


def lists_launch(
    call: Call, launches: Launches, states: Tensor, index: Tensor, count: Tensor, blocks: tuple[int, int],
    by_keys: bool, table: Tensor | None,
) -> GivenLaunch:  # fmt: skip
    """The kernel that fills index and count, and its arguments. The lists of packed sequences are in the order of the
    table: see `block_lists_kernel.block_number`."""
    b, h, n_q, n_k = states.shape
    outers, inners = index.shape[2:]
    grid, sizes, key = (b * h * outers, 1, 1), (*blocks, CHUNK), ("block lists", *blocks, by_keys)
    if table is None:
        grid_of_states = (n_k, n_q, 1, n_k) if by_keys else (n_q, n_k, n_k, 1)
        launch = cached_launch(launches, key, lambda: Launch(block_list_kernel, grid, sizes))
        return launch, (states, index, count, outers, inners, *grid_of_states)
    spans, lengths = positions.spans(call, table), (call.q.shape[2], call.k.shape[2])
    if by_keys:
        spans, lengths = spans[::-1], lengths[::-1]
    arguments = states, index, count, *spans, h, *lengths, n_q, n_k, outers, inners
    last_first = not by_keys  # as the kernels go through them
    constants = *sizes, by_keys, last_first
    return cached_launch(launches, key, lambda: Launch(packed_block_list_kernel, grid, constants)), arguments


def device_args(call: Call, launches: Launches, block_q: int, block_k: int, by_keys: bool = False) -> masks.DeviceMask:
    """The device form of the Call's mask for kernels of these tiles."""
    mask = masks.device_args(call)
    if call.mask is None or not call.mask.block_sparse:
        return visits.visited(call, launches, mask, block_q) if by_keys and call.bounds_per_row else mask
    return with_lists(mask, build(call, launches, block_q, block_k, by_keys))


def with_lists(mask: masks.DeviceMask, lists: BlockLists) -> masks.DeviceMask:
    """The mask, whose tiles the lists name."""
    return mask._replace(block_sparse=masks.FLAGS[True], block_lists=lists, has_lower_bound=masks.FLAGS[False])


def ranks(launches: Launches, lists: BlockLists, blocks: int, table: Tensor | None = None) -> Tensor:
    """int32 (b or 1, h_q or 1, blocks of keys, `blocks` of rows): how many later blocks of keys visit a block of rows.
    Of lists by keys; a block without a tile visits tile 0.

    With the `table` of packed sequences, how many of the same one; programs without a block come last, in their order.
    """
    made = torch.zeros(*lists.index.shape[:3], blocks, dtype=torch.int32, device=lists.index.device)
    if made.numel():
        for launch, arguments in ranks_launches(launches, made, lists, table):
            launch(made.device.index, arguments)
    return made


def ranks_launches(launches: Launches, made: Tensor, lists: BlockLists, table: Tensor | None) -> list[GivenLaunch]:
    """The kernels that turn zeros into ranks, and their arguments."""
    *heads, outers, blocks = made.shape
    n, inners = math.prod(heads), lists.index.shape[3]
    given = {
        mark_kernel: ((n * outers, 1, 1), (made, lists.index, lists.count, inners, blocks)),
        ranks_kernel: ((n, -(-blocks // CHUNK), 1), (made, table, outers, blocks)),
    }
    return [
        (cached_launch(launches, kernel, lambda k=kernel, g=grid: Launch(k, g, (CHUNK,), warps=1)), arguments)
        for kernel, (grid, arguments) in given.items()
    ]
