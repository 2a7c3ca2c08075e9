"""The order in which programs add their share to a piece of dq, where every run has to add in the same one.

The programs of a key head go from its last keys to its first, and add in that order. Under a causal mask nobody waits
then: the last keys that see a row are those on the diagonal, where their program begins. A block of keys waits
only for those before it, which programs that run work on (key_items.py), or, above d = 128, for programs with smaller
numbers, which have started.
"""

# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from saccade.backends.device.records import plain_int
from saccade.backends.device.sequences import extent, is_packed, tile_of
from saccade.backends.gluon.backward.tile_scheduler import kv_block_at, packed_kv_block
from saccade.backends.gluon.ptx import add_one, fence_memory, wait_until


class DQSemaphore(NamedTuple):
    """Whose turn it is at each piece of dq."""

    ranks: Any
    """int32 (b, blocks of keys, blocks of rows): how many programs add before this block of keys, in each head"""
    passed: Any
    """int32 (batch rows, heads, blocks of rows, 2): how many have added, for each consumer's half of dq"""
    blocks: Any
    """of keys: a runtime_int"""


@gluon.jit
def acquire(semaphore, piece, block, q_block, q_blocks, BLOCK_K: gl.constexpr, WARPS: gl.constexpr):
    """Waits until all programs before `block` have added to this piece, which is of `q_block`; WARPS of each count."""
    number = block.number(plain_int(semaphore.blocks), BLOCK_K)
    rank = gl.load(semaphore.ranks + number * q_blocks + q_block)
    wait_until(semaphore.passed + piece, rank * WARPS)


@gluon.jit
def release(semaphore, piece):
    """Lets the next program add to this piece. Called when the own addition is in the L2 cache, where the next one and
    this count happen too, so that no fence is between them: it would wait for all that the multiprocessor has on its
    way, in every step (0.81 of the speed without a semaphore against 0.94, causal; docs/findings/gluon_backward.md)."""
    add_one(semaphore.passed + piece)


@gluon.jit
def release_fenced(semaphore, piece):
    """The same for additions from registers, by each of the warps: nothing tells when those are there."""
    fence_memory()
    add_one(semaphore.passed + piece)


@gluon.jit(do_not_specialize=["blocks", "q_blocks", "s_q", "s_k"])
def rank_kernel(ranks, mask, used_q, used_k, blocks, q_blocks, s_q, s_k, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr):
    """Counts, for one block of keys and every block of rows that it may add to, the later blocks of keys that do."""
    ROWS: gl.constexpr = 256
    if is_packed(used_k):
        b, _, _, start = tile_of(used_k, 1, s_k, BLOCK_K, False)
        _, _, end, _ = extent(used_k, b, s_k)
        # Programs without a tile add zeros to one piece, those with smaller numbers first.
        before = gl.maximum(gl.program_id(0) - gl.load(used_k.tiles), 0)
    else:
        b = gl.program_id(0) // blocks
        start = gl.program_id(0) % blocks * BLOCK_K
        end = s_k
        before = 0
    own = ranked_block(b, start, mask, used_q, used_k, s_q, s_k, q_blocks, BLOCK_Q, BLOCK_K)
    for first in range(own.first // ROWS * ROWS, own.end, ROWS):
        # [ROWS]
        q_block = first + gl.arange(0, ROWS, gl.BlockedLayout([ROWS // 32], [32], [1], [0]))
        rank = q_block * 0 + before
        for later in range(start + BLOCK_K, end, BLOCK_K):
            block = ranked_block(b, later, mask, used_q, used_k, s_q, s_k, q_blocks, BLOCK_Q, BLOCK_K)
            rank += ((q_block >= block.first) & (q_block < block.end)).to(gl.int32)
        gl.store(ranks + own.number(blocks, BLOCK_K) * q_blocks + q_block, rank, mask=q_block < q_blocks)


@gluon.jit
def ranked_block(b, start, mask, used_q, used_k, s_q, s_k, q_blocks, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr):
    """The block of keys from `start` on of batch row or sequence b, whatever the head; packed, its number is that of
    this program, which has one head and the first keys first."""
    if is_packed(used_k):
        number = gl.program_id(0)
        return packed_kv_block(
            b, b * 0, b * 0, start, number, mask, used_q, used_k, s_q, s_k, q_blocks, BLOCK_Q, BLOCK_K
        )
    else:
        return kv_block_at(b, b * 0, b * 0, start, mask, used_q, used_k, s_q, s_k, BLOCK_Q, BLOCK_K)
