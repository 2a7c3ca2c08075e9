"""The arguments, tile shape and grid of kernels that visit tiles of scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from saccade.backends import Launches
from saccade.backends.device import block_d, block_lists, distance_tables, dropout, masks, positions, scores
from saccade.call import Call


class TileShape(NamedTuple):
    """The sizes of a kernel's tiles; all are constexpr."""

    GROUP: Any
    """query heads of a key head"""
    D: Any
    D_V: Any
    BLOCK_Q: Any
    BLOCK_K: Any
    BLOCK_D: Any
    BLOCK_DV: Any
    """of v's columns, all that a program sums"""
    PRECISION: Any
    """of products of float32: see `tl.dot`"""
    REST: Any = tl.constexpr(0)
    """columns of q and k after the first BLOCK_D that are a tile of their own: a power of two, or 0"""
    WARPS: Any = tl.constexpr(4)
    """of a program; `load_terms` alone depends on it"""

    @staticmethod
    def of(call: Call, block_q: int, block_k: int, columns: int = 0, warps: int = 4) -> TileShape:
        """columns: of v that a program sums, or 0: all."""
        d, d_v = call.q.shape[3], call.v.shape[3]
        of_k, of_v = block_d(d), min(columns or block_d(d_v), block_d(d_v))
        alike = min(max(of_k, of_v), SWIZZLED // call.k.element_size())
        sizes = call.group, d, d_v, block_q, block_k, max(of_k, alike), max(of_v, alike), precision()
        return TileShape(*map(tl.constexpr, sizes), WARPS=tl.constexpr(warps))


SWIZZLED = 128
"""Bytes of a row from which all tiles lie alike in shared memory; narrower ones have an order for each width. Tiles
that pass through registers take turns at one place there, and where their orders differ ptxas 12.8 loses the place of
one (notes/triton.md)."""


def precision() -> str:
    """By `fp32_precision`, which follows `allow_tf32`; reading that one is an error where the other was set."""
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def common_arguments(
    call: Call, mask: masks.DeviceMask, table: Tensor | None = None, fast: bool = False, distances: Sequence[Any] = ()
) -> tuple[Any, ...]:
    """The arguments from `used_q` to `scale`. fast: see `scores.device_args`; distances: see `distance_tables`."""
    q, records = call.q, (mask, scores.device_args(call, fast, distances), dropout.device_args(call))
    return *positions.spans(call, table), *records, q.shape[1], q.shape[2], call.k.shape[2], call.scale


def tile_arguments(
    call: Call, launches: Launches, blocks: tuple[int, int], by_keys: bool = False, fast: bool = False,
    reads: bool = True,
) -> tuple[Any, ...]:  # fmt: skip
    """The common arguments of a launch whose programs own q blocks, or kv blocks: with block lists and the order of
    packed tiles. blocks: BLOCK_Q and BLOCK_K; reads: whether it reads enough scores for tables of distances."""
    mask = block_lists.device_args(call, launches, *blocks, by_keys)
    ragged = call.layout.ragged_keys
    table = positions.table(call, launches, by_keys, blocks[by_keys]) if ragged else None
    distances = distance_tables.tables(call, launches, fast) if reads else ()
    return common_arguments(call, mask, table, fast, distances)


def tile_grid(call: Call, block_q: int, block_k: int, by_keys: bool = False) -> tuple[int, int, int]:
    """Blocks, then heads, then batch rows, all in one dimension: the others end at 65,535."""
    x, block = (call.k, block_k) if by_keys else (call.q, block_q)
    b, h, s = x.shape[:3]
    blocks = positions.slots(call, by_keys, block) if call.layout.ragged_keys else b * -(-s // block)
    return h * blocks, 1, 1
