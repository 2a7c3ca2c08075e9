"""What the backward's kernels take: records that the host fills, and what all warps of a program know."""

# No `from __future__ import annotations` here: an aggregate reads its fields' types.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from typing import Any, NamedTuple

from triton.experimental.gluon import language as gl

from saccade.backends.hopper.backward.kv_block import KVBlocks
from saccade.backends.hopper.shim import Value, aggregate


class BackwardScoreArgs(NamedTuple):
    """What turns products into scores."""

    mask: Any
    """a DeviceMask"""
    score: Any
    """a DeviceScore"""
    scale: Any
    flat: Any
    """constexpr: tiles beyond the reach of the score's tables have steps of their own"""
    tight: Any
    """constexpr: functions capture so much that there is less room for tiles: see `BackwardConfig.shared_bytes`"""
    level_sums: Any
    """float32 (b, h_q, kv blocks, 2, threads of both consumers): what each thread's ds beyond the reach add up to, see
    `LevelSums`; or None"""
    captured: Any
    """a CapturedTileArgs of the tensor of which the score function takes tiles, or None"""
    gradient: Any
    """the same of its gradient, if the kernel stores that, or None"""
    dropout: Any
    """a DeviceDropout, or None"""


class PackedGradients(NamedTuple):
    """dk and dv of packed sequences, for stores that end in the middle of a tile; None of other layouts."""

    dk: Any
    """PackedRowsArgs, as dv"""
    dv: Any


@aggregate
class BackwardArgs:
    """What is the same for all kv blocks of a call."""

    kv_blocks: KVBlocks
    score: Value
    scale: gl.tensor
    dropout: Value
    """a DeviceDropout, or None"""
    dq_semaphore: Value
    """a DQSemaphore, or None"""
    group: gl.tensor
    h_q: gl.tensor
    FOLD: gl.constexpr
    """-lse / scale and -delta are what products are accumulated onto, in place of zeros."""
    MASKED: gl.constexpr
    """Some q blocks need the mask."""
    level_sums: Value
    """see BackwardScoreArgs, as the next two"""
    captured: Value
    gradient: Value
