"""What the backward's kernels take, and the products of head dims between 64 and 128."""

# No `from __future__ import annotations` here: an aggregate reads its fields' types.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from saccade.backends.device.records import FAR, LOG2E
from saccade.backends.device.tiles import logits, power, visible
from saccade.backends.hopper.backward.kv_block import KVBlock, KVBlocks
from saccade.backends.hopper.dropout import apply_dropout, apply_slope, drop_marked
from saccade.backends.hopper.shim import Value, aggregate
from saccade.backends.hopper.tiles import between, product_layout

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
def parts_of(x, LAST: gl.constexpr):
    """The parts of a tile [rows, columns], a tuple."""
    HALF: gl.constexpr = x.shape[1] // 2
    if in_parts(x.shape[1], LAST):
        return x.slice(0, HALF, 1), x.slice(HALF, LAST, 1)
    else:
        return (x,)


@gluon.jit
def issue_product(a, b, start, use_acc: gl.constexpr):
    """Starts a b^T of the parts of [64, columns], in registers or not, and of [N, columns], added to `start`."""
    x = start
    for i in gl.static_range(len(a)):
        x = warpgroup_mma(a[i], b[i].permute((1, 0)), x, use_acc=use_acc or i > 0, is_async=True)
    return x


@gluon.jit
def issue_sums(a, b, sums):
    """Starts sums += a b, part by part; a [64, N] in registers, and the parts of b [N, columns]."""
    started = ()
    for i in gl.static_range(len(sums)):
        left = gl.convert_layout(a, gl.DotOperandLayout(0, sums[i].type.layout, 2))
        started = started + (warpgroup_mma(left, b[i], sums[i], is_async=True),)  # noqa: RUF005 - Triton has no starred tuples
    return started


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
    AHEAD: gl.constexpr
    """The first consumer is half a step ahead of the second: see `let_other_begin`."""
    bias_sums: Value
    """see BackwardScoreArgs, as the next two"""
    captured: Value
    gradient: Value


# A tile of scores, transposed: p = exp(k q^T - lse) with mask, modification and dropout, in registers.


@gluon.jit
def spread(numbers, zero):
    """One number [BLOCK_Q] for each row as the start [64, BLOCK_Q] of a product."""
    start, _ = gl.broadcast(gl.expand_dims(numbers, 0), zero)
    return start


@gluon.jit
def bounds_of_rows(kv_blocks, block, q_block, layout: gl.constexpr):
    """Of the rows of a q block the key after the last one, and the first key where rows may not see the first ones:
    [BLOCK_Q] each, a tuple. () where rows have no bounds in memory."""
    if kv_blocks.mask.bounded:
        BLOCK_Q: gl.constexpr = kv_blocks.BLOCK_Q
        offset = block.q_block_number(0, q_block, 1, kv_blocks.q_blocks) * BLOCK_Q + gl.arange(0, BLOCK_Q, layout)
        hi = gl.load(kv_blocks.mask.data[1].hi + offset)
        if kv_blocks.mask.has_lower_bound:
            return hi, gl.load(kv_blocks.mask.data[1].lo + offset)
        else:
            return (hi,)
    else:
        return ()


@gluon.jit
def apply_mask(x, mask, block, h, row, kv_idx, bounds):
    """x [64, BLOCK_Q] where the keys see the rows from `row` on, and -inf elsewhere. Rows that are not in use need no
    mask: their -lse is -inf. bounds: see `bounds_of_rows`."""
    off = block.keys - block.rows
    if mask.exact:
        lo, hi, _, _ = mask.rows_of(mask.data, block.b, kv_idx, off)
        if mask.has_lower_bound:
            return between(x, lo - row, gl.where(kv_idx < block.keys, hi, 0) - row, True, True)
        else:  # the last rows see all that any do
            return between(x, gl.where(kv_idx < block.keys, lo, FAR) - row, hi, True, False)
    elif mask.bounded:
        seen = kv_idx[:, None] < bounds[0][None, :]
        if mask.has_lower_bound:
            seen = seen & (kv_idx[:, None] >= bounds[1][None, :])
        return gl.where(seen, x, float("-inf"))
    else:  # only the branch that is taken has a type
        q_idx = row + gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))
        seen = visible(mask, block.b, h, q_idx[None, :], kv_idx[:, None], block.rows, block.keys, off)
        return gl.where(seen, x, float("-inf"))


@aggregate
class ScoreTile:
    """64 keys of a kv block, and the rows of head h from `row` on. MASKED: some do not see some."""

    args: Value
    dropout: Value
    """opened, or None"""
    block: KVBlock
    h: gl.tensor
    row: gl.tensor
    kv_idx: gl.tensor
    bounds: Value
    """if MASKED: see `bounds_of_rows`"""
    MASKED: gl.constexpr
    bias: Value
    """of a tile beyond the reach of the score's tables what is added to every score, as a tuple"""

    @gluon.jit
    def q_idx(self, x):
        """[BLOCK_Q]"""
        return self.row + gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))

    @gluon.jit
    def scores(self, s, captured):
        """The scores of the product s."""
        args = self.args
        if len(captured) == 1:
            q_idx, kv_idx = self.q_idx(s)[None, :], self.kv_idx[:, None]
            return args.score.apply(args.score.data + captured, s * args.scale, self.block.b, self.h, q_idx, kv_idx)
        else:
            return logits(s, args.score, args.scale, self.block.b, self.h, self.q_idx(s)[None, :], self.kv_idx[:, None])

    @gluon.jit
    def apply_mask(self, x):
        if self.MASKED:
            return apply_mask(x, self.args.kv_blocks.mask, self.block, self.h, self.row, self.kv_idx, self.bounds)
        else:
            return x

    @gluon.jit
    def start(self, neg_lse, zero):
        """What k q^T is accumulated onto (FOLD): -lse / scale, with the mask."""
        return self.apply_mask(spread(neg_lse, zero))

    @gluon.jit
    def weights(self, s, neg_lse, captured):
        """p of the product s [64, BLOCK_Q]: the softmax's, before dropout. neg_lse: in shared memory. captured:
        [64, BLOCK_Q] of what the score function captures, as a tuple; () where no tiles of it come."""
        args = self.args
        if args.FOLD:
            return gl.exp2(s * (args.scale * LOG2E))
        elif len(self.bias) == 1:
            rest = neg_lse.load(gl.SliceLayout(0, s.type.layout)) + self.bias[0]
            return gl.exp2(s * (args.scale * LOG2E) + gl.expand_dims(rest * LOG2E, 0))
        else:
            x = self.scores(s, captured)
            rest = gl.expand_dims(neg_lse.load(gl.SliceLayout(0, s.type.layout)), 0)
            x += rest
            if (
                args.score.large_scores or args.score.linear
            ):  # what a function reads for rows that are not in use may be NaN
                x = gl.where(rest == float("-inf"), float("-inf"), x)
            return power(self.apply_mask(x), args.score)

    @gluon.jit
    def drop(self, p):
        """p, marked where there is dropout, and what dropout keeps of it."""
        if self.dropout is None:
            return p, p
        else:
            p = apply_dropout(p, self.dropout, self.block.b, self.h, self.row, self.kv_idx, True)
            return p, drop_marked(p)

    @gluon.jit
    def apply_slope(self, p, s, captured):
        """p times the score function's slope at the product s. Where p is zero the slope may be anything."""
        args = self.args
        if args.score.unit_slope:
            return p
        else:
            q_idx, kv_idx = self.q_idx(s)[None, :], self.kv_idx[:, None]
            data = args.score.data + captured
            slope = args.score.slope(data, s * args.scale, self.block.b, self.h, q_idx, kv_idx)
            return apply_slope(p, slope, self.dropout is not None)
