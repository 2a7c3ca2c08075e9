"""Gradients of tables of distances from the main backward kernel, beyond the tables' reach.

There all of a tile's scores have one place in the table, and the tile's gradient is the sum of its ds, which the
kernel that makes dq has in registers. Its programs add up what they have, before and behind the reach; a small kernel
adds these sums to the gradients. So the kernel of captured tensors visits the tiles in reach alone: of s = 8192
and a reach of 128 one in twenty.
"""

# pyright: reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.backends import Saved
from saccade.backends.device import distance_tables, scores
from saccade.backends.device.gradients import recompute_blocks
from saccade.backends.device.launch import Launch
from saccade.backends.device.records import plain_int, runtime_int
from saccade.call import Call
from saccade.scores import Traced
from saccade.scores.codegen.linear import has_plateaus
from saccade.scores.codegen.source import unit_slope


class BiasSums(NamedTuple):
    """What the main kernel writes."""

    sums: Tensor
    """float32 (b, h_q, blocks, 2, n): of rows behind the keys, and before them, n numbers whose sum counts"""
    block_q: int
    block_k: int
    """The tiles of which it says whether they are in reach."""

    @staticmethod
    def of(call: Call, saved: Saved, tile: tuple[int, int], blocks: int, n: int) -> BiasSums | None:
        """Memory for them; None where the kernel of captured tensors has to visit all tiles: where the order of sums
        counts, where tiles are listed or no whole ones of its own, and of scores that are no sums of reads by
        distance."""
        if call.deterministic or not any(saved.wanted) or not constant_beyond(call):
            return None
        score: Any = call.score
        program = score.program
        if len(program.distance_reads) < len(program.differentiable) or not unit_slope(program):
            return None
        if any(a % b for a, b in zip(tile, recompute_blocks(call), strict=True)):
            return None
        sums = torch.empty(*call.q.shape[:2], blocks, 2, n, dtype=torch.float32, device=call.q.device)
        return BiasSums(sums, *tile)


def constant_beyond(call: Call) -> bool:
    """Whether beyond the reach of its tables a score function adds one number to all scores of a tile."""
    score, mask = call.score, call.mask
    if not isinstance(score, Traced) or (mask is not None and mask.block_sparse):
        return False
    return has_plateaus(score.program) and bool(distance_tables.empty(call))


def launch(call: Call, biases: BiasSums, add: Any, wanted: Sequence[bool], fast: bool) -> Launch:
    """Of the kernel that adds them to the gradients of captured tensors."""
    score: Any = call.score
    adding = scores.bias_scatter(score, wanted, fast)
    constants = tl.constexpr(add), adding, tl.constexpr(biases.sums.shape[4])
    return Launch(bias_sums_kernel, (call.q.shape[:2].numel(), 1, 1), constants)


def arguments(call: Call, biases: BiasSums, sums: Sequence[Any]) -> tuple[Any, ...]:
    """What it takes."""
    (h_q, s_q), s_k = call.q.shape[1:3], call.k.shape[2]
    numbers = map(runtime_int, (h_q, s_q, s_k, biases.sums.shape[2]))
    return biases.sums, tuple(sums), scores.data(call.score), *numbers


@triton.jit
def bias_sums_kernel(
    bias_sums, sums, data, h_q, s_q, s_k, blocks, ADD: tl.constexpr, SCATTER: tl.constexpr, N: tl.constexpr
):  # fmt: skip
    """Adds the sums of one head where the farthest distances are read."""
    h_q, s_q, s_k, blocks = plain_int(h_q), plain_int(s_q), plain_int(s_k), plain_int(blocks)
    bh = tl.program_id(0)
    first = bias_sums + bh.to(tl.int64) * blocks * (2 * N)
    # [2, N]
    offset = tl.arange(0, 2)[:, None] * N + tl.arange(0, N)[None, :]
    total = tl.zeros([2, N], tl.float32)
    for i in range(blocks):
        total += tl.load(first + i * (2 * N) + offset)
    # [2, 1]
    ds = tl.sum(total, 1, keep_dims=True)
    distance = tl.where(tl.arange(0, 2)[:, None] == 0, -s_q, s_k)
    SCATTER(ADD, sums, data, ds, bh // h_q, bh % h_q, distance)
