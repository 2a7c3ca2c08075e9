"""Block lists: the tiles that a kernel visits, for each block of query rows its tiles of keys, or the other way round.

A list has the tiles that are partial, then those that are full. Where there are none, its first entry is tile 0, which
a kernel that always has one tile may visit with the mask.
"""

# pyright: reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from saccade import block_sparsity
from saccade.backends.device import masks, sequences
from saccade.backends.device.block_lists_kernel import (
    block_list_kernel,
    packed_block_list_kernel,
    packed_tile_states_kernel,
    tile_states_kernel,
)
from saccade.backends.device.records import runtime_int
from saccade.bounded_cache import derived
from saccade.masks import TILE, Mask, causal, mask_mod, window
from saccade.problem import Problem


class BlockLists(NamedTuple):
    """Lists by batch row, query head and block; strides are `runtime_int`s, in lists."""

    index: Any
    """int32 (b or 1, h_q or 1, blocks, tiles)"""
    count: Any
    """int32 (b or 1, h_q or 1, blocks, 2): partial tiles, and all that are not empty"""
    stride_b: Any
    stride_h: Any
    tiles: Any


def states(problem: Problem) -> Tensor:
    """The states of the mask's tiles: see `saccade.block_sparsity`."""
    b, h, n_q, n_k = block_sparsity.states_shape(problem)
    q, k = problem.q, problem.k
    packed = problem.layout.ragged_keys  # of which tiles that nobody visits are not written
    found = (torch.zeros if packed else torch.empty)(b, h, n_q, n_k, dtype=torch.uint8, device=q.device)
    if not found.numel():
        return found
    kernel, grid, used = tile_states_kernel, (b * h * n_q * -(-n_k // SPAN),), sequences.spans(problem)
    if packed:
        kernel, grid = packed_tile_states_kernel, (h * sequences.slots(problem, 0, TILE), -(-n_k // SPAN))
        used = sequences.spans(problem, sequences.table(problem, 0, TILE))
    mask, lengths = masks.record(problem.mask), (q.shape[2], k.shape[2])
    kernel[grid](found, *used, mask, h, *lengths, n_q, n_k, AT_ONCE=AT_ONCE, SPAN=SPAN)
    return found


SPAN, AT_ONCE, CHUNK = 32, 2, 256


def build(problem: Problem, block_q: int, block_k: int, by_keys: bool = False) -> BlockLists:
    """For each block of rows its tiles of keys, or `by_keys` for each block of keys its tiles of rows."""
    held = block_sparsity.states_of(problem, states)
    q, k = problem.q, problem.k
    outers, inners = -(-q.shape[2] // block_q), -(-k.shape[2] // block_k)
    if by_keys:
        outers, inners = inners, outers
    b, h = held.shape[:2]
    blocks_of = (block_k, block_q) if by_keys else (block_q, block_k)
    make = _made
    if problem.layout.ragged_keys:
        # And an empty one, for programs that surely have no tile.
        outers, make = sequences.slots(problem, by_keys, blocks_of[0]) + 1, partial(_packed, problem)
    index, count = derived(
        ("lists", block_q, block_k, by_keys, q.shape[2], k.shape[2]),
        [held],
        lambda: make(held, outers, inners, *blocks_of, by_keys),
    )
    strides = h * outers if b > 1 else 0, outers if h > 1 else 0, inners
    return BlockLists(index, count, *map(runtime_int, strides))


def _made(held: Tensor, outers: int, inners: int, outer: int, inner: int, by_keys: bool) -> tuple[Tensor, Tensor]:
    b, h, n_q, n_k = held.shape
    index = torch.empty(b, h, outers, inners, dtype=torch.int32, device=held.device)
    count = torch.zeros(b, h, outers, 2, dtype=torch.int32, device=held.device)
    n_outer, n_inner, stride_outer, stride_inner = (n_k, n_q, 1, n_k) if by_keys else (n_q, n_k, n_k, 1)
    numbers = outers, inners, n_outer, n_inner, stride_outer, stride_inner
    if index.numel():
        block_list_kernel[(b * h * outers,)](held, index, count, *numbers, OUTER=outer, INNER=inner, CHUNK=CHUNK)
    return index, count


def _packed(
    problem: Problem, held: Tensor, outers: int, inners: int, outer: int, inner: int, by_keys: bool
) -> tuple[Tensor, Tensor]:
    """Lists in the order of the table: see `block_lists_kernel.block_number`. Blocks without rows in use have empty
    lists."""
    _, h, n_q, n_k = held.shape
    index = torch.empty(1, h, outers, inners, dtype=torch.int32, device=held.device)
    count = torch.zeros(1, h, outers, 2, dtype=torch.int32, device=held.device)
    spans = sequences.spans(problem, sequences.table(problem, by_keys, outer))
    lengths = problem.q.shape[2], problem.k.shape[2]
    if by_keys:
        spans, lengths = spans[::-1], lengths[::-1]
    if index.numel():
        index[..., 0] = 0
        numbers = *spans, h, *lengths, n_q, n_k, outers, inners
        constants = {"OUTER": outer, "INNER": inner, "CHUNK": CHUNK, "BY_KEYS": by_keys}
        constants["LAST_FIRST"] = not by_keys  # as the kernels go through them
        packed_block_list_kernel[(h * outers,)](held, index, count, *numbers, **constants)
    return index, count


def record(problem: Problem, block_q: int, block_k: int, by_keys: bool = False) -> masks.DeviceMask:
    """The device form of the Problem's mask for kernels of these tiles."""
    made = masks.record(problem.mask)
    if problem.mask is None or not problem.mask.listed:
        return made
    return made._replace(listed=LISTED, lists=build(problem, block_q, block_k, by_keys), lower=masks.FLAGS[False])


LISTED = tl.constexpr(True)


def ranks(held: BlockLists, blocks: int, table: Tensor | None = None) -> Tensor:
    """int32 (b or 1, h_q or 1, blocks of keys, `blocks` of rows): how many later blocks of keys visit a block of rows.
    Of lists by keys; who has no tile visits tile 0.

    With the `table` of packed sequences, how many of the same one; who has no block comes after those before him.
    """
    *outer, inners = held.index.shape
    listed = torch.arange(inners, device=held.index.device) < held.count[..., 1:].clamp(min=1)
    visits = torch.zeros(*outer, blocks + 1, dtype=torch.int32, device=held.index.device)
    visits.scatter_(3, torch.where(listed, held.index, blocks).long(), 1)
    visits = visits[..., :blocks]
    later = visits.flip(2).cumsum(2, dtype=torch.int32).flip(2) - visits
    if table is None:
        return later
    place, total = torch.arange(outer[2], device=table.device), table[0, 0]
    # [blocks of keys]: the first one of the sequence, and its last one
    first = torch.where(place < total, torch.nn.functional.pad(table[1:, 1], (0, outer[2] + 1 - len(table))), total)
    last = torch.searchsorted(first, first, right=True) - 1
    return torch.where((place < total)[:, None], later - later[:, :, last], (place - total)[:, None]).int()


def mask_of(edges: str) -> Mask | None:
    """The mask of a gate's row: `full`, `causal`, `listed`, or a window for whatever else tests intervals."""
    match edges:
        case "full":
            return None
        case "causal":
            return causal()
        case "listed":
            return causal() & mask_mod(lambda b, h, q_idx, kv_idx: (q_idx ^ kv_idx) & 64 == 0)
        case _:
            return window(300, 0)


def stand_in(problem: Problem) -> masks.DeviceMask:
    """The device form of a gate's mask, with stand-ins for its lists."""
    if problem.mask is None or not problem.mask.listed:
        return masks.record(problem.mask)
    empty = torch.empty(16, dtype=torch.int32)
    made = BlockLists(empty, empty, *map(runtime_int, (1, 1, 1)))
    return masks.record(problem.mask)._replace(listed=LISTED, lists=made, lower=masks.FLAGS[False])


KERNELS = "tile_states", "block_list", "packed_tile_states", "packed_block_list"


def compiled(name: str, problem: Problem) -> Any:
    """A kernel of this module as the compile gate sees it."""
    states, index = torch.empty(1, 1, 8, 8, dtype=torch.uint8), torch.empty(16, dtype=torch.int32)
    spans: Any = None, None
    if name.startswith("packed"):
        spans = sequences.spans(replace(problem, layout=sequences.stand_in()))
    if name.endswith("states"):
        kernel = tile_states_kernel if spans[0] is None else packed_tile_states_kernel
        tensors = states, *spans, masks.record(problem.mask)
        return kernel.warmup(*tensors, 1, 512, 512, 8, 8, AT_ONCE=AT_ONCE, SPAN=SPAN, grid=(1,))
    if name.startswith("packed"):
        numbers, constants = (1, 512, 512, 8, 8, 4, 4), {"BY_KEYS": True, "LAST_FIRST": False}
        sizes = {"OUTER": 128, "INNER": 128, "CHUNK": CHUNK}
        return packed_block_list_kernel.warmup(states, index, index, *spans, *numbers, **sizes, **constants, grid=(1,))
    return block_list_kernel.warmup(
        states, index, index, 4, 4, 8, 8, 8, 1, OUTER=128, INNER=128, CHUNK=CHUNK, grid=(1,)
    )
