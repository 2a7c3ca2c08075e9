"""What the backward's kernels take, and the products of head dims between 64 and 128."""

# No `from __future__ import annotations` here: an aggregate reads its fields' types.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from saccade.backends.hopper.backward.kv_block import KVBlocks
from saccade.backends.hopper.shim import Value, aggregate
from saccade.backends.hopper.tiles import product_layout

# Products and sums of head dims between 64 and 128, which are worked on in two parts: the lower half of 128 columns,
# and what is in use of the upper one.


@gluon.constexpr_function
def in_parts(columns, last):
    """Whether columns are worked on in two parts, the lower half and the `last` that are in use of the upper one."""
    return last < columns // 2


@gluon.jit
def no_sums(columns: gl.constexpr, last: gl.constexpr):
    """[64, columns], in parts: zeros."""
    if in_parts(columns, last):
        first = gl.zeros([64, columns // 2], gl.float32, product_layout(columns // 2))
        return first, gl.zeros([64, last], gl.float32, product_layout(last))
    else:
        return (gl.zeros([64, columns], gl.float32, product_layout(columns)),)


@gluon.jit
def issue_product(a, b, start, use_acc: gl.constexpr, LAST: gl.constexpr):
    """Starts a b^T of [64, columns] and [N, columns], added to `start`, over the columns in use."""
    HALF: gl.constexpr = a.shape[1] // 2
    if in_parts(a.shape[1], LAST):
        lower = b.slice(0, HALF, 1).permute((1, 0))
        x = warpgroup_mma(a.slice(0, HALF, 1), lower, start, use_acc=use_acc, is_async=True)
        upper = b.slice(HALF, LAST, 1).permute((1, 0))
        return warpgroup_mma(a.slice(HALF, LAST, 1), upper, x, is_async=True)
    else:
        return warpgroup_mma(a, b.permute((1, 0)), start, use_acc=use_acc, is_async=True)


@gluon.jit
def issue_sums(a, b, sums):
    """Starts sums += a b, part by part; a [64, N] in registers, b [N, columns]."""
    if len(sums) == 1:
        a = gl.convert_layout(a, gl.DotOperandLayout(0, sums[0].type.layout, 2))
        return (warpgroup_mma(a, b, sums[0], is_async=True),)
    else:
        FIRST: gl.constexpr = sums[0].shape[1]
        left = gl.convert_layout(a, gl.DotOperandLayout(0, sums[0].type.layout, 2))
        first = warpgroup_mma(left, b.slice(0, FIRST, 1), sums[0], is_async=True)
        left = gl.convert_layout(a, gl.DotOperandLayout(0, sums[1].type.layout, 2))
        return first, warpgroup_mma(left, b.slice(FIRST, sums[1].shape[1], 1), sums[1], is_async=True)


# What the backward's kernels take: records that the host fills, and what all warps of a program know.


class BackwardScoreArgs(NamedTuple):
    """What turns products into scores."""

    mask: Any
    """a DeviceMask"""
    score: Any
    """a DeviceScore"""
    scale: Any
    constant_beyond: Any
    """constexpr: tiles beyond the reach of the score's tables have steps of their own"""
    tight: Any
    """constexpr: functions capture so much that there is less room for tiles: see `BackwardConfig.shared_bytes`"""
    bias_sums: Any
    """float32 (b, h_q, kv blocks, 2, threads of both consumers): what each thread's ds beyond the reach add up to, see
    `BiasSums`; or None"""
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
    bias_sums: Value
    """see BackwardScoreArgs, as the next two"""
    captured: Value
    gradient: Value
