"""From a Call and what its forward saved to the launches of the backward."""

# pyright: reportCallIssue=false

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from saccade.backends import Launches, Saved
from saccade.backends.device import block_lists, distance_tables, dropout, masks, positions, scores
from saccade.backends.device.bias_sums import BiasSums
from saccade.backends.device.gradients import padded, sink_gradient
from saccade.backends.device.launch import multiprocessors, on_device, per_row
from saccade.backends.device.records import FLAGS, PackedRowsArgs, TensorArgs, runtime_int
from saccade.backends.hopper import GRADIENT
from saccade.backends.hopper.backward.dq import DQSemaphore, rank_kernel
from saccade.backends.hopper.backward.plan import BackwardConfig, BackwardPlan, is_plain, share_by_share
from saccade.backends.hopper.backward.scores import BackwardScoreArgs, PackedGradients
from saccade.backends.hopper.captured_tile import BackwardCapture
from saccade.backends.hopper.forward.config import SHARED_BYTES
from saccade.backends.hopper.tma_launch import counter
from saccade.call import Call, aligned
from saccade.layouts import empty_like_rows

CONSUMER_THREADS = 256


def captured_of(call: Call, saved: Saved) -> BackwardCapture | None:
    """What the main kernel's score function takes tiles of, and memory for its gradient if `backward` fills that."""
    config = BackwardConfig.of(call.q.shape[3], call.v.shape[3], True)
    found = BackwardCapture.of(call, saved) if config.stays else None
    return None if found is None or config.shared_bytes(call, True, True) > SHARED_BYTES else found


def bias_sums_of(call: Call, saved: Saved) -> BiasSums | None:
    """Memory for sums of ds, which `backward` fills; None where it makes none."""
    config = BackwardConfig.of(call.q.shape[3], call.v.shape[3])
    if not config.stays or call.scoreless:
        return None
    blocks = -(-call.k.shape[2] // config.block_k)
    return BiasSums.of(call, saved, (config.block_q, config.block_k), blocks, CONSUMER_THREADS)


def backward(
    call: Call, launches: Launches, saved: Saved, biases: BiasSums | None, captured: BackwardCapture | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dq, dk, dv and dsink."""
    q, k, v = call.q, call.k, call.v
    assert max(q.shape[3], v.shape[3]) <= GRADIENT.max_d, f"head dims {q.shape[3]} and {v.shape[3]}"
    gradients = empty_like_rows(q, q.shape[3]), empty_like_rows(k, k.shape[3]), empty_like_rows(v, v.shape[3])
    dq, dk, dv = gradients
    packed = call.layout.ragged_keys
    if call.scoreless:
        return dq.zero_(), dk.zero_(), dv.zero_(), sink_gradient(call, launches, saved)
    with on_device(q):
        dout, out = bulk_rows(launches, saved.dout), bulk_rows(launches, saved.out)
        # What the compiled kernels depend on besides the Call's key.
        key = (
            "backward", saved.dlse is None, scores.ordinary(call), biases is None, dout.stride(),
            out.stride(),
        )  # fmt: skip
        key = *key, captured and captured.key
        plan = launches.get(key)
        config = BackwardConfig.of(q.shape[3], v.shape[3], captured is not None, is_plain(call))
        if plan is None:
            processors = multiprocessors(q.device)
            plan = BackwardPlan.of(call, dout, out, gradients, processors, config, captured)
            launches[key] = plan
        mask = block_lists.device_args(call, launches, config.block_q, config.block_k, by_keys=True)
        spans = positions.spans(call, positions.table(call, launches, 1, config.block_k) if packed else None)
        space = workspace(call, launches, plan, mask, spans, dq)
        delta = per_row(call, call.sink is not None)
        space = *space, counter(q.device) if config.stays else None, delta
        saved = Saved(dout, saved.dlse, out, saved.lse)
        shares = dk, dv
        if plan.divided > 1:
            shares = share_by_share(dk, plan.divided), share_by_share(dv, plan.divided)
        tables = distance_tables.tables(call, launches, fast=True)
        written = dq, *shares, dk, dv
        all_given = arguments(call, plan, saved, written, space, mask, spans, tables, biases, captured)
        for launch, given in zip(plan.launches, all_given, strict=True):
            launch(q.device.index, *given)
    return dq, dk, dv, sink_gradient(call, launches, saved, delta)


def workspace(
    call: Call, launches: Launches, plan: BackwardPlan, mask: masks.DeviceMask, spans: tuple[Any, Any], dq: Tensor
) -> tuple[Tensor, Tensor, Tensor, DQSemaphore | None]:
    """neg_delta, neg_lse, dq_accum, which is dq itself if that is stored, and the semaphore for it."""
    device = call.q.device
    neg_delta = torch.empty(plan.rows, dtype=torch.float32, device=device)
    neg_lse = torch.empty(plan.rows, dtype=torch.float32, device=device)
    dq_accum = dq if plan.direct else torch.empty(plan.tiles, dtype=torch.float32, device=device)
    if plan.ranks is None:
        return neg_delta, neg_lse, dq_accum, None
    if mask.block_sparse.value:
        ranks = block_lists.ranks(launches, mask.block_lists, plan.ranks[2], positions.tiles_of(spans[1]))
    else:
        ranks = torch.empty(plan.ranks, dtype=torch.int32, device=device)
    counts = torch.zeros(plan.counters, dtype=torch.int32, device=device)
    return neg_delta, neg_lse, dq_accum, DQSemaphore(ranks, counts, runtime_int(plan.ranks[1]))


def arguments(
    call: Call, plan: BackwardPlan, saved: Saved, gradients: tuple[Tensor, ...], space: tuple[Any, ...],
    mask: masks.DeviceMask, spans: tuple[Any, Any], tables: Sequence[Any] = (), biases: BiasSums | None = None,
    captured: BackwardCapture | None = None,
) -> Iterator[tuple[Any, ...]]:  # fmt: skip
    """What the plan's launches take, one after the other, so that a kernel runs while the host prepares the next
    one. `gradients`: dq, the shares' dk and dv, and their sums."""
    scale, (dq, dk, dv, *whole), (neg_delta, neg_lse, dq_accum, semaphore, drawn, delta) = call.scale, gradients, space
    span_q, span_k = spans
    dlse = None if saved.dlse is None else saved.dlse.contiguous()
    dout_rows, out_rows, dq_rows = plan.records
    if captured is not None and captured.gradient is not None and captured.clears:
        yield (), (captured.gradient.x, mask, span_q, span_k)
    if any(x.kernel is rank_kernel for x in plan.launches):
        yield (), (semaphore.ranks, mask, span_q, span_k)
    yield (), (
        TensorArgs(saved.dout, *dout_rows), TensorArgs(saved.out, *out_rows), dlse, saved.lse.contiguous(), neg_delta,
        neg_lse, delta, None if plan.direct else dq_accum, span_q,
    ), -1 / scale if plan.fold else -scores.unit(call.score)  # fmt: skip
    tensors = call.q, call.k, call.v, saved.dout, dk, dv, neg_lse, neg_delta, dq_accum
    packed = PackedGradients(PackedRowsArgs.of(dk), PackedRowsArgs.of(dv)) if call.layout.ragged_keys else None
    own = dq_accum if drawn is None else drawn  # programs that draw nothing add to dq_accum without a descriptor
    score = scores.device_args(call, fast=True, tables=tables, tma_tile=captured and captured.tile.number)
    constant_beyond, sums = FLAGS[plan.constant_beyond], None if biases is None else biases.sums
    found = (None, None) if captured is None else captured.args
    score_args = BackwardScoreArgs(
        mask, score, scale, constant_beyond, FLAGS[plan.tight], sums, *found, dropout.device_args(call)
    )
    rest = packed, own, span_q, span_k, score_args, plan.order, semaphore
    if drawn is None:
        yield tensors[:-1], rest
    else:
        of_captured = () if captured is None else captured.tensors
        yield (*tensors, *of_captured), (*(None,) * (2 - len(of_captured)), *rest)
    if not plan.direct:
        yield (), (dq_accum, TensorArgs(dq, *dq_rows), span_q), scale
    if plan.divided > 1:
        yield (), tuple(map(TensorArgs.of, (dk, dv, *whole)))


def bulk_rows(launches: Launches, x: Tensor) -> Tensor:
    """x, or a copy of it that bulk copies can read: an expanded tensor has strides of zero."""
    if not aligned(x):
        return padded(launches, x)
    strides = x.stride()
    expanded = 0 in strides and any(n > 1 and stride == 0 for n, stride in zip(x.shape, strides, strict=True))
    return padded(launches, x) if expanded else x
