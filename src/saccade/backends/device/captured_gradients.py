"""The gradients of captured tensors: p and ds once more, tile by tile, scattered to where the score function read."""

# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.backends import Launches, Saved
from saccade.backends.device import bias_sums, positions, scores
from saccade.backends.device.arguments import precision, tile_arguments
from saccade.backends.device.bias_sums import BiasSums
from saccade.backends.device.gradients import aligned_rows, recompute_blocks, recompute_launch, specialised
from saccade.backends.device.launch import Launch, cached_launch, on_device
from saccade.backends.device.positions import function_positions
from saccade.backends.device.q_block import (
    TileRange,
    bias_at,
    biases_of_keys,
    core_end,
    core_start,
    edge_length,
    edge_start,
    keys_in_reach,
    kv_head,
    kv_tiles,
    load_k,
    load_q,
    load_v,
    q_block,
    weight_gradient,
    within,
)
from saccade.backends.device.records import plain_int, runtime_int
from saccade.backends.device.tiles import in_units
from saccade.call import Call
from saccade.scores import Traced

_INFINITY = tl.constexpr(0x7F800000)
"""The bits of a float32."""


@triton.jit
def in_any_order(total, offset, value):
    """Adds float32."""
    tl.atomic_add(total + offset, value, mask=value != 0, sem="relaxed")


@triton.jit
def largest(top, offset, value):
    """The largest size of all values, as the bits of a float32: of those, NaN is the largest."""
    bits = tl.abs(value).to(tl.int32, bitcast=True)
    if len(bits.shape) > 0:
        bits = tl.max(bits)
    tl.atomic_max(top, bits, sem="relaxed")


@triton.jit
def unit(top, room):
    """A power of two, exact in every product, with which values up to `top`, float32 bits, stay below 2^room."""
    shift = tl.minimum(tl.maximum(room + 126 - (top >> 23), -120), 120)
    return ((shift + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def as_integers(total, offset, value):
    """Adds multiples of 1 / unit, int64, of which every order gives the same sum. total: sums, a top and its room."""
    whole = tl.floor(value * unit(tl.load(total[1]), plain_int(total[2])) + 0.5)
    tl.atomic_add(total[0] + offset, whole.to(tl.int64), mask=whole != 0, sem="relaxed")


@triton.jit
def _step(
    start, q_tile, dout_tile, rows, kv, block, sums,
    ADD: tl.constexpr, SCATTER: tl.constexpr, shape, MASKED: tl.constexpr, bias,
):  # fmt: skip
    """One tile of keys. rows: their LSE and delta; bias: as `weight_gradient` says."""
    args = block.args
    q_idx = block.q_idx[:, None]
    # [block_k, d], [block_k, d_v]
    k_tile = load_k(kv, start, shape, MASKED)
    v_tile = load_v(kv, start, shape, MASKED)
    # [block_q, block_k]
    qk = tl.dot(q_tile, tl.trans(k_tile), input_precision=shape.PRECISION)
    dp = tl.dot(dout_tile, tl.trans(v_tile), input_precision=shape.PRECISION)
    kv_idx = start + tl.arange(0, shape.BLOCK_K)[None, :]
    lse, delta = rows[0][:, None], rows[1][:, None]
    _, ds = weight_gradient(qk, dp, lse, delta, args, q_idx, kv_idx, MASKED, bias=bias)
    if args.score.placed:
        p, r = function_positions(args.score.data[1], args.b, q_idx, kv_idx)
        SCATTER(ADD, sums, args.score.data[0].data, ds, qk * args.scale, args.b, args.h, p, r)
    else:
        SCATTER(ADD, sums, args.score.data, ds, qk * args.scale, args.b, args.h, q_idx, kv_idx)


@triton.jit
def core_from(tiles, core):
    """The same tiles, of whose core only those from `core` on need no mask."""
    if tiles.near is None:
        return TileRange(tiles.first, core, tiles.core_end, tiles.end, tiles.block_list, None, None)
    else:
        near, near_end = within(tiles.near, core, tiles.core_end), within(tiles.near_end, core, tiles.core_end)
        return TileRange(tiles.first, core, tiles.core_end, tiles.end, tiles.block_list, near, near_end)


@triton.jit
def in_reach(tiles, block, NEAR_Q: tl.constexpr, NEAR_K: tl.constexpr):
    """The tiles of keys without those that the main kernel has added up."""
    first, end = keys_in_reach(block.args, block.start // NEAR_Q * NEAR_Q, NEAR_Q, NEAR_K)
    # Biases are read where the core begins and ends, of an empty one too: it stays among the keys.
    first = within(first, tiles.first, tiles.end)
    end = within(end, first, tiles.end)
    return TileRange(
        within(tiles.first, first, end), within(tiles.core, first, end), within(tiles.core_end, first, end),
        within(tiles.end, first, end), tiles.block_list, within(tiles.near, first, end),
        within(tiles.near_end, first, end),
    )  # fmt: skip


@triton.jit(do_not_specialize=["h_q", "s_q", "s_k"])
def captured_gradients_kernel(
    q, k, v, dout, out, lse, dlse, sums, used_q, used_k, mask, score, dropout, h_q, s_q, s_k, scale,
    ADD: tl.constexpr, SCATTER: tl.constexpr, NEAR_Q: tl.constexpr, NEAR_K: tl.constexpr, shape,
):  # fmt: skip
    """`ADD(sum, offset, ds · d modified / d tensor)` of every tensor, for one q block of one head. NEAR_Q > 0: only of
    tiles of NEAR_Q rows and NEAR_K keys that are in reach of the score's tables."""
    block = q_block(used_q, used_k, mask, score, dropout, h_q, s_q, s_k, scale, shape)
    tiles = kv_tiles(block, used_q, h_q, shape)
    # Rows that are not in use read captured tensors too, where NaN may be: a block with such rows masks every tile.
    whole = block.start + shape.BLOCK_Q <= block.args.rows
    tiles = core_from(tiles, tl.where(whole, tiles.core, tiles.core_end))
    if NEAR_Q > 0:
        tiles = in_reach(tiles, block, NEAR_Q, NEAR_K)
    # [block_q, d], [block_q, d_v]
    q_tile = load_q(q, block, shape.D, shape.BLOCK_D, shape)
    dout_tile = load_q(dout, block, shape.D_V, shape.BLOCK_DV, shape)
    out_tile = load_q(out, block, shape.D_V, shape.BLOCK_DV, shape)
    # [block_q]
    row_lse = tl.load(lse + block.offset, mask=block.live, other=float("-inf"))
    row_lse = tl.where(row_lse == float("-inf"), float("inf"), in_units(row_lse, score))  # exp(x - inf) = 0
    row_delta = tl.sum(dout_tile.to(tl.float32) * out_tile.to(tl.float32), 1)
    if dlse is not None:
        row_delta -= tl.load(dlse + block.offset, mask=block.live, other=0.0)
    rows = row_lse, row_delta
    kv = kv_head(k, v, block, shape)
    for step in range(0, edge_length(tiles), shape.BLOCK_K):
        start = edge_start(mask, tiles, step, shape.BLOCK_K)
        _step(start, q_tile, dout_tile, rows, kv, block, sums, ADD, SCATTER, shape, True, None)
    biases = biases_of_keys(tiles, block.args, block.start, shape.BLOCK_K)
    for step in range(tiles.core, core_end(tiles), shape.BLOCK_K):
        start = core_start(mask, tiles, step, shape.BLOCK_K)
        bias = bias_at(tiles, biases, start) if tiles.near is not None else None
        _step(start, q_tile, dout_tile, rows, kv, block, sums, ADD, SCATTER, shape, False, bias)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["top"])
def results_kernel(made, sums, top, room, count, BLOCK: tl.constexpr):
    """made = sums, in made's dtype; of integers with a `top` as `as_integers` adds them. A top of NaN or infinity, of
    which there is no integer, comes out as NaN."""
    # [BLOCK]
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(sums + offset, mask=offset < count)
    if top is not None:
        bits = tl.load(top)
        value = (value.to(tl.float64) / unit(bits, plain_int(room)).to(tl.float64)).to(tl.float32)
        value = tl.where(bits >= _INFINITY, float("nan"), value)
    tl.store(made + offset, value.to(made.dtype.element_ty), mask=offset < count)


# Gradients of the tensors that a score function captures, for every backend that has kernels.


BLOCK = 1024
"""Numbers of one program of `results_kernel`."""


def gradients(
    call: Call, launches: Launches, saved: Saved, fast: bool = False, biases: BiasSums | None = None,
    made: Mapping[int, Tensor] = MappingProxyType({}),
) -> Sequence[Tensor | None]:  # fmt: skip
    """Of each of the score's tensors, in its dtype, or None where it is not wanted. `fast` is as `scores.device_args`
    says; biases: what the main kernel has added up already; made: gradients that it has stored, by the tensors'
    numbers.

    A launch of its own: only calls that capture parameters pay for it. Where every score has an element of a tensor to
    itself, its gradient is stored there. Others add up: atomics add float32 sums in any order, and for a deterministic
    call a first launch computes the largest value, and a second one adds up integers, whose sum does not depend on the
    order.
    """
    score = call.score
    if not isinstance(score, Traced) or not any(saved.wanted):
        return [None] * len(saved.wanted)
    given = zip(saved.wanted, score.tensors, strict=True)
    wanted = [want and x.is_floating_point() and i not in made for i, (want, x) in enumerate(given)]
    if not any(wanted):
        return [made.get(i) for i in range(len(wanted))]
    single = alone(call, score, wanted) if biases is None else frozenset()
    own = {i: torch.zeros(x.shape, dtype=x.dtype, device=x.device) for i, x in enumerate(score.tensors) if i in single}
    shared = [x for i, x in enumerate(score.tensors) if wanted[i] and i not in single]
    with on_device(call.q):
        launch = _accumulate(call, launches, saved, wanted, single, fast, biases)

        def accumulate(add: Any, sums: Sequence[Any]) -> None:
            rest = iter(sums)
            launch(add, [own[i] if i in single else next(rest) for i, want in enumerate(wanted) if want])

        many = len(score.program.reads) * call.q.shape[:3].numel() * call.k.shape[2]
        deterministic = call.deterministic and shared
        add_up = partial(_repeatable, many=many) if deterministic else _in_any_order
        sums = iter(add_up(launches, shared, accumulate))
    return [own[i] if i in single else next(sums) if want else made.get(i) for i, want in enumerate(wanted)]


def alone(call: Call, score: Traced, wanted: Sequence[bool]) -> frozenset[int]:
    """The tensors of which every score of the call has an element of its own."""
    if not positions.reached(call):
        return frozenset()
    one = {name for name, n in zip(("b", "h"), call.q.shape, strict=False) if n == 1}
    own = score.program.own_elements.items()
    return frozenset(i for i, names in own if wanted[i] and {"b", "h"} - {*names} <= one)


Accumulate = Callable[[Any, Sequence[Any]], None]
"""Runs the kernel, with the function that adds and the sums that it adds to."""


def _in_any_order(launches: Launches, captured: Sequence[Tensor], accumulate: Accumulate) -> list[Tensor]:
    sums = [torch.zeros(x.shape, device=x.device) for x in captured]
    accumulate(in_any_order, sums)
    return [x if x.dtype == t.dtype else _result(launches, x, t) for x, t in zip(sums, captured, strict=True)]


def _repeatable(launches: Launches, captured: Sequence[Tensor], accumulate: Accumulate, many: int) -> list[Tensor]:
    """`many`: more values than can meet in one place."""
    tops = torch.zeros(len(captured), dtype=torch.int32, device=captured[0].device).unbind()
    accumulate(largest, tops)
    # All of them, of the largest size, stay below 2^62.
    room = runtime_int(62 - math.ceil(math.log2(max(many, 1))))
    sums = [torch.zeros(x.shape, dtype=torch.int64, device=x.device) for x in captured]
    accumulate(as_integers, [(x, top, room) for x, top in zip(sums, tops, strict=True)])
    return [_result(launches, x, t, top, room) for x, t, top in zip(sums, captured, tops, strict=True)]


def _result(launches: Launches, sums: Tensor, captured: Tensor, top: Tensor | None = None, room: int = 0) -> Tensor:
    """The gradient of a captured tensor by its sums; `top` and `room` as `results_kernel` takes them."""
    made = torch.empty(captured.shape, dtype=captured.dtype, device=captured.device)
    if made.numel():
        results_launch(launches, made)(made.device.index, (made, sums, top, room, made.numel()))
    return made


def results_launch(launches: Launches, made: Tensor) -> Launch:
    grid = -(-made.numel() // BLOCK), 1, 1
    return cached_launch(launches, ("results", grid, made.dtype), lambda: Launch(results_kernel, grid, (BLOCK,)))


def _accumulate(
    call: Call, launches: Launches, saved: Saved, wanted: Sequence[bool], alone: frozenset[int], fast: bool,
    biases: BiasSums | None,
) -> Accumulate:  # fmt: skip
    if call.scoreless:
        return lambda add, sums: None
    blocks, operands = recompute_blocks(call), tensors(call, launches, saved)
    arguments = tile_arguments(call, launches, blocks, fast=fast)
    scatter = scores.scatter(call, wanted, alone, fast)
    near = (0, 0) if biases is None else (biases.block_q, biases.block_k)
    key = tuple(wanted), alone, fast, near, precision(), *specialised(operands[3:5], operands[5:])

    def accumulate(add: Any, sums: Sequence[Any]) -> None:
        constants = tl.constexpr(add), scatter, *map(tl.constexpr, near)
        make = partial(recompute_launch, captured_gradients_kernel, call, *constants)
        launch = cached_launch(launches, ("captured", add, *key), make)
        launch(call.q.device.index, (*operands, tuple(sums), *arguments))
        if biases is not None:
            make = partial(bias_sums.launch, call, biases, add, wanted, fast)
            rest = cached_launch(launches, ("biases", *key), make)
            rest(call.q.device.index, bias_sums.arguments(call, biases, sums))

    return accumulate


def tensors(call: Call, launches: Launches, saved: Saved) -> tuple[Any, ...]:
    """What the kernel takes before the sums."""
    operands = (aligned_rows(launches, x) for x in (call.q, call.k, call.v, saved.dout, saved.out))
    return *operands, saved.lse.contiguous(), None if saved.dlse is None else saved.dlse.contiguous()
