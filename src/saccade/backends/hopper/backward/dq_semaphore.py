"""The order in which programs add their share to a piece of dq, where every run has to add in the same one.

The programs of a key head go from its last keys to its first, and add in that order. Under a causal mask no program
waits then: the last keys that see a row are those on the diagonal, where their program begins. A kv block waits only
for those before it, which programs that run work on (tile_scheduler.py), or, above d = 128, for programs with smaller
numbers, which have started.
"""

# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from saccade.backends.device.records import plain_int
from saccade.backends.device.sequences import extent, is_packed, tile_of
from saccade.backends.hopper.backward.kv_block import KVBlocks
from saccade.backends.hopper.ptx import add_one, fence_memory, wait_until


class DQSemaphore(NamedTuple):
    """Which program may add to each piece of dq."""

    ranks: Any
    """int32 (b, kv blocks, q blocks): how many programs add before this kv block, in each head"""
    counts: Any
    """int32 (batch rows, heads, q blocks, 2): how many have added, for each consumer's half of dq"""
    blocks: Any
    """kv blocks: a runtime_int"""


@gluon.jit
def acquire(semaphore, piece, kv_blocks, block, q_block, WARPS: gl.constexpr):
    """Waits until all programs before `block` have added to this piece, which is of `q_block`; WARPS of each count."""
    number = block.number(plain_int(semaphore.blocks), kv_blocks.BLOCK_K)
    rank = gl.load(semaphore.ranks + number * kv_blocks.q_blocks + q_block)
    wait_until(semaphore.counts + piece, rank * WARPS)


@gluon.jit
def release(semaphore, piece):
    """Lets the next program add to this piece. Called when the own addition is in the L2 cache, where the next one and
    this count happen too, so that no fence is between them: it would wait for all that the multiprocessor has on its
    way, in every step (0.81 of the speed without an order against 0.94, causal; notes/gluon_backward.md)."""
    add_one(semaphore.counts + piece)


@gluon.jit
def release_fenced(semaphore, piece):
    """The same for additions from registers, by each of the warps: they do not report their end."""
    fence_memory()
    add_one(semaphore.counts + piece)


@gluon.jit(do_not_specialize=["blocks", "q_blocks", "s_q", "s_k"])
def rank_kernel(ranks, mask, span_q, span_k, blocks, q_blocks, s_q, s_k, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr):
    """Counts, for one kv block and every q block that it may add to, the later kv blocks that do."""
    ROWS: gl.constexpr = 256
    kv_blocks = KVBlocks(mask, span_q, span_k, s_q, s_k, q_blocks, BLOCK_Q, BLOCK_K, None)
    if is_packed(span_k):
        b, _, _, start = tile_of(span_k, 1, s_k, BLOCK_K, False)
        _, _, end, _ = extent(span_k, b, s_k)
        # Programs without a tile add zeros to one piece, those with smaller numbers first.
        before = gl.maximum(gl.program_id(0) - gl.load(span_k.tiles), 0)
    else:
        b = gl.program_id(0) // blocks
        start = gl.program_id(0) % blocks * BLOCK_K
        end = s_k
        before = 0
    # Of any head. A packed block has this program's number: there is one head, and the first keys come first.
    number = gl.program_id(0)
    own = kv_blocks.at(b, b * 0, b * 0, start, number)
    for first in range(own.first // ROWS * ROWS, own.end, ROWS):
        # [ROWS]
        q_block = first + gl.arange(0, ROWS, gl.BlockedLayout([ROWS // 32], [32], [1], [0]))
        rank = q_block * 0 + before
        for later in range(start + BLOCK_K, end, BLOCK_K):
            block = kv_blocks.at(b, b * 0, b * 0, later, number)
            rank += ((q_block >= block.first) & (q_block < block.end)).to(gl.int32)
        gl.store(ranks + own.number(blocks, BLOCK_K) * q_blocks + q_block, rank, mask=q_block < q_blocks)
