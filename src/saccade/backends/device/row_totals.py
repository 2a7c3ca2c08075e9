"""Row totals of exp(score - lse) for rows whose LSE is too large to hold log(total)."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from saccade.backends import Launches, Saved
from saccade.backends.device.arguments import precision, tile_arguments
from saccade.backends.device.block_lists_kernel import tile_start
from saccade.backends.device.gradients import aligned_rows, recompute_blocks, recompute_launch, specialised
from saccade.backends.device.launch import cached_launch, on_device
from saccade.backends.device.q_block import kv_tiles, load_q, masked_scores, q_block, store_q
from saccade.backends.device.records import TensorArgs
from saccade.backends.device.tiles import head, in_units, load_tile, power
from saccade.call import Call
from saccade.layouts import empty_like_rows
from saccade.scores import Traced

# What exp(score - lse) adds up to, in rows whose LSE is so large that log(total) has no place beside it in float32.

LARGE = tl.constexpr(512.0)
"""Of an LSE: up to here p is off by 2^-15 at most."""


@triton.jit(do_not_specialize=["h_q", "s_q", "s_k"])
def row_totals_kernel(
    q, k, dout, weighted, lse, dlse, weighted_dlse, sink, used_q, used_k, mask, score, dropout, h_q, s_q, s_k, scale,
    shape,
):  # fmt: skip
    """weighted = dout / total and weighted_dlse = dlse / total, total = sum exp(score - lse), for one q block of one
    head; 1 where the LSE is not LARGE. Blocks without such a row read neither q nor k."""
    # Totals are those of the weights before dropout.
    block = q_block(used_q, used_k, mask, score, None, h_q, s_q, s_k, scale, shape)
    args = block.args
    # [block_q]
    row_lse = tl.load(lse + block.offset, mask=block.live, other=0.0)
    large = (tl.abs(row_lse) > LARGE) & (tl.abs(row_lse) < float("inf"))
    needed = tl.max(large.to(tl.int32), 0)

    tiles = kv_tiles(block, used_q, h_q, shape)
    end = tl.where(needed > 0, tiles.end, tiles.first)
    shift = in_units(row_lse, score)
    # [block_q, d]
    q_head = head(q, block.batch, args.h, block.first_q)
    rows = args.rows * needed
    q_tile = load_tile(q, q_head, block.start, rows, shape.BLOCK_Q, shape.D, shape.BLOCK_D, True)
    k_head = head(k, block.batch, args.h // shape.GROUP, block.first_k)
    # [block_q]
    total = tl.zeros([shape.BLOCK_Q], tl.float32)
    for step in range(tiles.first, end, shape.BLOCK_K):
        start = tile_start(mask, tiles.block_list, step, shape.BLOCK_K)
        # [block_k, d]
        k_tile = load_tile(k, k_head, start, args.keys, shape.BLOCK_K, shape.D, shape.BLOCK_D, True)
        # [block_q, block_k]
        qk = tl.dot(q_tile, tl.trans(k_tile), input_precision=shape.PRECISION)
        x = masked_scores(qk, args, block.q_idx[:, None], start + tl.arange(0, shape.BLOCK_K)[None, :], True)
        total += tl.sum(power(x - shift[:, None], score), 1)
    if sink is not None:
        total += power(in_units(tl.load(sink + args.h).to(tl.float32), score) - shift, score)
    share = tl.where(large & (total > 0), 1.0 / tl.where(total > 0, total, 1.0), 1.0)

    # [block_q, d_v]
    tile = load_q(dout, block, shape.D_V, shape.BLOCK_DV, shape).to(tl.float32) * share[:, None]
    store_q(weighted, block, tile, shape.D_V, shape.BLOCK_DV, shape)
    if dlse is not None:
        row = tl.load(dlse + block.offset, mask=block.live, other=0.0)
        tl.store(weighted_dlse + block.offset, row * share, mask=block.q_idx < block.there)


# Gradients of rows whose scores are so large that log(total) is lost in their LSE, for backends that have kernels.
#
# Where all that a row sees scores -1e9, its weights are 1 / n, and its LSE is -1e9 too: exp(score - lse) is 1.
# Gradients
# are linear in a row's p, dout and dlse together, so what p lacks is a factor of dout and dlse, and no kernel of a
# backward has to know.


def divide_gradients(call: Call, launches: Launches, saved: Saved, fast: bool = False) -> Saved:
    """dout and dlse divided by what the probabilities of their row add up to. Scores that no function changes, or that
    a softcap bounds, are not so large. `fast` is as `scores.device_args` says."""
    if not isinstance(call.score, Traced) or call.scoreless:
        return saved
    dlse = None if saved.dlse is None else saved.dlse.contiguous()
    divided = replace(
        saved,
        dout=empty_like_rows(saved.dout, saved.dout.shape[3]),
        dlse=None if dlse is None else torch.empty_like(dlse),
    )
    with on_device(call.q):
        operands = tensors(call, launches, replace(saved, dlse=dlse), divided)
        _, _, dout, weighted, *rows = operands[:6]
        key = "totals", fast, precision(), *specialised((dout, weighted), rows)
        launch = cached_launch(launches, key, lambda: recompute_launch(row_totals_kernel, call))
        arguments = tile_arguments(call, launches, recompute_blocks(call), fast=fast, reads=False)
        launch(call.q.device.index, (*operands, *arguments))
    return divided


def tensors(call: Call, launches: Launches, saved: Saved, divided: Saved) -> tuple[Any, ...]:
    """What the kernel takes before the common arguments."""
    operands = (aligned_rows(launches, x) for x in (call.q, call.k, saved.dout))
    sink = None if call.sink is None else call.sink.contiguous()
    return *operands, TensorArgs.of(divided.dout), saved.lse.contiguous(), saved.dlse, divided.dlse, sink
