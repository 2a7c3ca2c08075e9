"""What calls of one key share: how the backward cuts rows, keys and head dims, and the launches of its kernels."""

# pyright: reportCallIssue=false

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton import next_power_of_2
from triton.experimental.gluon import language as gl

from saccade.backends.device import bias_sums, dropout, masks, positions, scores
from saccade.backends.device.records import TensorArgs, runtime_bytes
from saccade.backends.hopper.backward.dq import PIECE, postprocess_kernel, preprocess_kernel, rank_kernel
from saccade.backends.hopper.backward.epilogue import CHUNK, TILE, clear_kernel, share_sums_kernel
from saccade.backends.hopper.backward.kernel import backward_kernel
from saccade.backends.hopper.backward.tile_scheduler import TileSchedulerArgs
from saccade.backends.hopper.backward.wide import wide_backward_kernel
from saccade.backends.hopper.captured_tile import BackwardCapture
from saccade.backends.hopper.forward.config import SHARED_BYTES
from saccade.backends.hopper.forward.work_item import late_blocks
from saccade.backends.hopper.tma_launch import OPTIONS, TMALaunch, shape_of
from saccade.call import Call
from saccade.masks import Window
from saccade.scores import Traced

SECTION = 4
"""Heads whose kv blocks take turns."""
MANY = 96
"""Kv blocks above which only two heads do, if dq is added in order (0.94 against 0.81 at 128 blocks, causal)."""

COPIED = 256
"""Numbers of one dimension of a bulk copy, at most."""
HANDED = 852
"""Bytes of shared memory, at most, for barriers, numbers of work items and what each call hands to the kernel's warps,
as Triton passes all that these use through shared memory."""
TABLE_BYTES = 20
"""Of a table of distances, among what it hands to them."""
PACKED_LISTS_BYTES = 52
"""Of block lists of packed sequences, besides."""

L2_BYTES = 32 << 20
"""What stays in the cache beside the keys: q, dout and dq_accum of the heads of packed sequences whose kv blocks take
turns (notes/distributed.md)."""


def has_plain_scores(call: Call) -> bool:
    return call.score is None and call.dropout is None and scores.ordinary(call)


def is_plain(call: Call) -> bool:
    """Whether a call has plain scores, at most a window, and adds to dq in any order."""
    if call.deterministic or call.bounds_per_row or not has_plain_scores(call):
        return False
    return at_most_a_window(call)


def at_most_a_window(call: Call) -> bool:
    return call.mask is None or isinstance(call.mask, Window)


@dataclass(frozen=True)
class BackwardConfig:
    """How a kernel cuts head dims d and d_v, rows and keys."""

    kernel: Any
    block_q: int
    block_k: int
    columns: int
    """of q and k: d in whole boxes"""
    v_columns: int
    box: int
    """Columns of one bulk copy."""
    prepared_rows: int
    """of one program of preprocess_kernel"""

    @staticmethod
    def of(d: int, d_v: int, captured: bool = False, plain: bool = False) -> BackwardConfig:
        """captured: score functions take tiles of a captured tensor, for which there is room and registers beside 64
        rows. plain: see `is_plain`; there are registers for 128 keys of 192 and 128 columns then."""
        if max(d, d_v) <= 64:
            return BackwardConfig(backward_kernel, 64 if captured else 128, 128, 64, 64, 64, 64)
        if max(d, d_v) <= 128:
            return BackwardConfig(backward_kernel, 64, 128, 128, 128, 128, 64)
        columns, v_columns = (max(128, -(-n // 64) * 64) for n in (d, d_v))
        block_k = 128 if plain and columns + v_columns == 320 else 64
        return BackwardConfig(wide_backward_kernel, 64, block_k, columns, v_columns, 64, 32)

    @property
    def stays(self) -> bool:
        """Whether programs stay on a multiprocessor, and draw kv blocks; else each has one."""
        return self.kernel is backward_kernel

    @property
    def balance(self) -> int:
        """Programs for each multiprocessor where lengths differ; with fewer, groups of heads are divided."""
        return 7 if self.stays else 14

    @property
    def turned(self) -> bool:
        """Whether pieces of dq_accum are transposed: a consumer has half of 64 rows, or of 64 columns, and a product
        64 of one."""
        return self.block_q == self.columns

    @property
    def piece(self) -> int:
        """Numbers of a piece of dq_accum."""
        return PIECE.value // 2 if self.turned else PIECE.value

    @property
    def pieces(self) -> int:
        """of dq_accum in a q block"""
        return self.block_q * self.columns // self.piece

    def tile_bytes(self, captured: bool, tight: bool) -> int:
        """Shared memory of tiles, where programs stay: of q, dout, ds, their LSE and delta two, and one of dq."""
        k_slots = 1 if (captured or tight) and self.columns > 64 else 2
        v_slots = 1 if tight or self.v_columns > 64 else 2
        rows = 4 * (self.columns + self.v_columns) + 4 * self.block_k + 16 + 4 * self.columns + 512 * captured
        return self.block_q * rows + 2 * self.block_k * (k_slots * self.columns + v_slots * self.v_columns)

    def shared_bytes(self, call: Call, captured: bool, tight: bool) -> int:
        """At most, with what the call hands to the warps, which is more for each tensor that its functions capture.
        tight: with one place for a tile of values, and for one of long keys, where there are two."""
        records = masks.device_args(call), scores.device_args(call, fast=True), dropout.device_args(call)
        given = runtime_bytes((*records, *positions.spans(call)))
        if call.layout.ragged_keys and call.mask is not None and call.mask.block_sparse:
            given += PACKED_LISTS_BYTES
        if isinstance(call.score, Traced):
            given += TABLE_BYTES * len(call.score.program.distance_inputs)
        return self.tile_bytes(captured, tight) + HANDED + given

    def constants(self, d: int, d_v: int) -> dict[str, Any]:
        if self.stays:
            return {"D_LAST": upper_half(d, self.columns), "DV_LAST": upper_half(d_v, self.v_columns)}
        return {"D": self.columns, "D_V": self.v_columns}


@dataclass(frozen=True)
class BackwardPlan:
    """What calls of one key share: no tensors, and no values."""

    fold: bool
    constant_beyond: bool
    """Blocks beyond the reach of the score's tables have steps of their own."""
    tight: bool
    """Functions capture so much that there is less room for tiles."""
    launches: tuple[TMALaunch, ...]
    """Of the kernel that clears a captured tensor's gradient, if there is one to clear, of the rank kernel, if dq is
    added in order, of the preprocess, the main and the postprocess kernel, and of the sums of shares, if there are."""
    ranks: tuple[int, ...] | None
    """Shape of the semaphore's ranks, or None: dq is added in any order."""
    counters: int
    """of the semaphore"""
    rows: int
    """of delta and start"""
    tiles: tuple[int, int]
    """dq_accum's shape"""
    records: tuple[tuple[Any, ...], ...]
    """TensorArgs of dout, out and dq but for their pointers."""
    order: Any
    divided: int
    """Shares of a group, each of which has a dk and a dv of its own."""
    direct: bool
    """The one kv block of each head sees all rows: dq is stored, not added up."""

    @staticmethod
    def of(
        call: Call, dout: Tensor, out: Tensor, gradients: tuple[Tensor, ...], processors: int, config: BackwardConfig,
        captured: BackwardCapture | None = None,
    ) -> BackwardPlan:  # fmt: skip
        q, k, v = call.q, call.k, call.v
        b, h_q, s_q, d = q.shape
        h_k, s_k, d_v = k.shape[1], k.shape[2], v.shape[3]
        block_q, block_k = config.block_q, config.block_k
        packed = call.layout.ragged_keys
        if packed:  # and one of each that is no sequence's
            blocks, kv_blocks = (positions.slots(call, *side) + 1 for side in ((0, block_q), (1, block_k)))
        else:
            blocks, kv_blocks = -(-s_q // block_q), -(-s_k // block_k)
        rows, tiles = b * h_q * blocks * block_q, (b * h_q * blocks * config.pieces, config.piece)
        programs = b * h_k * kv_blocks
        constant_beyond = config.stays and not call.deterministic and bias_sums.constant_beyond(call)
        divided = shares_of(call, config, programs, processors, blocks, constant_beyond)
        causal = call.mask is not None and call.mask.kind == "causal" and call.positions is None and s_q <= s_k
        every_row = (call.mask is None or causal) and not call.layout.tensors  # sees some keys, if there are any
        direct = every_row and kv_blocks == 1 and config.stays and captured is None
        in_order = call.deterministic and not direct
        dq, dk, dv = gradients
        if divided > 1:
            dk, dv = share_by_share(dk, divided), share_by_share(dv, divided)
        operands = (q, block_q), (k, block_k), (v, block_k), (dout, block_q), (dk, 64), (dv, 64)
        parts = blocks * block_q // config.prepared_rows
        # In front of the products, Triton 3.6 has no registers for a union's many comparisons, nor for a prefix.
        block_sparse = call.mask is not None and call.mask.block_sparse
        spills = block_sparse or (call.mask is not None and re.search(r"\||\bprefix\b", call.mask.kind) is not None)
        fold = block_q == 64 and has_plain_scores(call) and not spills
        masked = packed or call.mask is not None or call.layout.seqused_k is not None or s_k % block_k != 0
        section = section_size(call, config, divided, kv_blocks, processors)
        if packed:  # in rows, as sequences have more or fewer
            section = L2_BYTES // (call.group * ((d + d_v) * q.element_size() + 4 * d))
        else:
            section = min(section, b * h_k * divided)
        late = late_blocks(kv_blocks, programs * divided / processors) if causal and not in_order else 0
        # q, k, v, dout, dk, dv, -lse, -delta and, if programs draw kv blocks, dq_accum and what is captured
        shapes = [*(shape_of(x, (1, 1, n, config.box)) for x, n in operands), *[plain((rows,), (block_q,))] * 2]
        if config.stays:
            # What the second consumer makes of 64 rows is one copy.
            second = 64 * upper_half(d, config.columns) // COPIED
            rows_of_copies = plain((tiles[0] * tiles[1] // COPIED, COPIED), (second, COPIED))
            summed = rows_of_copies if block_q == 64 else plain(tiles, (1, PIECE.value))
            shapes.append(shape_of(dq, (1, 1, 64, 64)) if direct else summed)
            if captured is not None:
                shapes += [shape_of(x, (1, 1, block_q, 64)) for x in captured.tensors]
        chained = {**OPTIONS, "launch_pdl": True}  # starts before the preprocess kernel ends
        preprocess = TMALaunch(
            preprocess_kernel,
            (b * h_q * parts, 1, 1),
            (),
            (h_q, s_q, parts),
            {
                "D_V": d_v, "ROWS": config.prepared_rows, "BLOCK_Q": block_q, "BLOCK_D": config.columns,
                "BLOCK_DV": next_power_of_2(config.v_columns), "CHAINED": True,
            },
            OPTIONS,
        )  # fmt: skip
        main = TMALaunch(
            config.kernel,
            (min(programs * divided, processors) if config.stays else programs * divided, 1, 1),
            shapes,
            (call.group // divided, h_q, blocks),
            {"FOLD": fold, "MASKED": masked, **step_constants(call, config, masked, fold), **config.constants(d, d_v)},
            chained,
        )
        postprocess = TMALaunch(
            postprocess_kernel,
            (b * h_q * blocks * config.pieces, 1, 1),
            (),
            (h_q, s_q, blocks),
            {"D": d, "BLOCK_Q": block_q, "PIECES": config.pieces, "TURNED": config.turned},
            chained,
        )
        launches = (preprocess, main) if direct else (preprocess, main, postprocess)
        if in_order and not block_sparse:
            sizes = {"BLOCK_Q": block_q, "BLOCK_K": block_k}
            one_warp = {**OPTIONS, "num_warps": 1}
            ranks = TMALaunch(rank_kernel, (b * kv_blocks, 1, 1), (), (kv_blocks, blocks, s_q, s_k), sizes, one_warp)
            launches = ranks, *launches
        if captured is not None and captured.clears:
            launches = clearing(call, captured, config), *launches
        if divided > 1:
            launches = *launches, summing(call, divided)
        return BackwardPlan(
            fold=fold, constant_beyond=constant_beyond,
            tight=config.stays and config.shared_bytes(call, captured is not None, False) > SHARED_BYTES,
            launches=launches, ranks=(b, kv_blocks, blocks) if in_order else None, counters=2 * b * h_q * blocks,
            rows=rows, tiles=tiles, records=tuple(TensorArgs.of(x)[1:] for x in (dout, out, dq)),
            order=TileSchedulerArgs.of(b, h_k, divided, section, kv_blocks - late), divided=divided, direct=direct,
        )  # fmt: skip


def clearing(call: Call, captured: BackwardCapture, config: BackwardConfig) -> TMALaunch:
    """Of the kernel that clears what the main one leaves out of a captured tensor's gradient."""
    assert captured.gradient is not None
    (b, h, s_q), s_k = call.q.shape[:3], call.k.shape[2]
    blocks, q_blocks = -(-s_k // config.block_k), -(-s_q // config.block_q)
    grid = b * h * blocks, -(-q_blocks // CHUNK), 1
    numbers = blocks, q_blocks, h, s_q, s_k, *captured.gradient.x.stride()[:3]
    sizes = {"BLOCK_Q": config.block_q, "BLOCK_K": config.block_k, "ROWS": CHUNK}
    return TMALaunch(clear_kernel, grid, (), numbers, sizes, OPTIONS)


def summing(call: Call, divided: int) -> TMALaunch:
    """Of the kernel that adds up the dk and dv of shares."""
    (b, h_k, s_k, d), d_v = call.k.shape, call.v.shape[3]
    block_d, block_dv = next_power_of_2(d), next_power_of_2(d_v)
    rows = TILE // max(block_d, block_dv)
    sizes = {"D": d, "D_V": d_v, "BLOCK_D": block_d, "BLOCK_DV": block_dv, "ROWS": rows}
    return TMALaunch(share_sums_kernel, (b * h_k * -(-s_k // rows), 2, 1), (), (divided, h_k, s_k), sizes, OPTIONS)


def upper_half(d: int, columns: int) -> int:
    """How many columns products work on of the upper half of `columns`, so that they cover d; all of 64's."""
    return columns // 2 if columns == 64 else min(columns // 2, max(16, next_power_of_2(d - columns // 2)))


def shares_of(
    call: Call, config: BackwardConfig, programs: int, processors: int, steps: int, constant_beyond: bool
) -> int:
    """Into how many shares a group is divided, of so many programs, each of so many steps a head."""
    if constant_beyond or (call.mask is not None and "h" in call.mask.indices):
        return call.group  # what is in reach, and a list, is so for one head
    if call.mask is None and not call.layout.ragged_keys:
        return even_shares(call.group, programs, processors, steps)
    least = processors * (1 if call.mask is None else config.balance)
    return next((n for n in range(1, call.group) if call.group % n == 0 and programs * n >= least), call.group)


def step_constants(call: Call, config: BackwardConfig, masked: bool, fold: bool) -> dict[str, bool]:
    """Whether consumers have the mask where their own keys need it (EDGES), and, without one, begin half a step apart
    (AHEAD). EDGES is for windows: no row sees a key before the first row that sees the keys before it."""
    if not config.stays:
        return {}
    apart = call.score is None and call.dropout is None and config.block_q == 128
    return {"EDGES": masked and at_most_a_window(call) and (fold or apart), "AHEAD": apart and not masked}


def even_shares(group: int, programs: int, processors: int, steps: int) -> int:
    """Into how many shares a group is divided, so that programs of equal length end their last round soonest, in steps:
    of one head, of a program's start and end, and of adding up shares (notes/gluon_backward.md). They take memory, so
    none for less than 4 % of the time."""

    def time(n: int) -> float:
        sums = 2 + programs * n / 50 if n > 1 else 0
        return -(-programs * n // processors) * (steps * group // n + 3) + sums

    best = min((n for n in range(1, group + 1) if group % n == 0), key=time)
    return best if time(best) < 0.96 * time(1) else 1


def section_size(call: Call, config: BackwardConfig, divided: int, kv_blocks: int, processors: int) -> int:
    """How many shares' kv blocks take turns. With masks more of them end rounds more evenly: under a causal one and up
    to d = 128 those of 32 query heads at most, and of 128 keys above that, of a round (notes/gluon_backward.md)."""
    if config.stays and call.mask is not None and call.mask.kind == "causal" and not call.deterministic:
        shares = max(1, min(2 * SECTION, 32 * divided // call.group))
        return -(-shares // divided) * divided
    section = SECTION if call.group == 1 else divided
    if not config.stays and config.block_k == 128 and call.mask is not None and call.group == 1:
        section = max(section, processors // kv_blocks)
    return min(section, 2) if call.deterministic and kv_blocks > MANY else section


def share_by_share(x: Tensor, divided: int) -> Tensor:
    """Memory for dk or dv of each share, (b, h_k divided, s_k, d); every row of it will be written."""
    b, h_k, s_k, d = x.shape
    return torch.empty(b, h_k * divided, s_k, d, dtype=x.dtype, device=x.device)


def plain(shape: Sequence[int], block: tuple[int, ...]) -> dict[str, Any]:
    """All of a descriptor but its pointer, for contiguous float32 numbers in pieces that are contiguous too."""
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    layout = gl.NVMMASharedLayout(0, 32, rank=len(shape))
    return {"shape": list(shape), "strides": strides, "block_shape": list(block), "layout": layout}
