"""Launches the portable kernels of a Call: strides, tile configs, outputs."""

# pyright: reportCallIssue=false

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from saccade.backends import Launches, Outputs, Saved, configs
from saccade.backends.device import block_d, descale, masks, positions, scores
from saccade.backends.device.arguments import TileShape, common_arguments, precision, tile_arguments, tile_grid
from saccade.backends.device.bias_sums import BiasSums
from saccade.backends.device.gradients import aligned_rows, sink_gradient, specialised
from saccade.backends.device.launch import Launch, cached_launch, on_device, per_row, without_scores
from saccade.backends.device.records import FLAGS, TensorArgs
from saccade.backends.triton.backward_kernels import delta_kernel, dkdv_kernel, dq_kernel, ranges_dkdv_kernel
from saccade.backends.triton.config import BY_KEYS, WIDE, TileConfig, config
from saccade.backends.triton.forward_kernel import forward_kernel
from saccade.call import Call
from saccade.layouts import empty_like_rows

Tiles = Mapping[str, TileConfig]
"""Configs by kernel that take the place of the table's, for tuning."""


def forward(call: Call, launches: Launches, lse: bool = True, tiles: Tiles | None = None) -> Outputs:
    """out (b, h_q, s_q, d_v) and, if asked for, lse and max_scores (b, h_q, s_q)."""
    q = call.q
    out = call.empty_out()
    row_lse, top = per_row(call, lse), per_row(call, call.max_scores)
    if call.scoreless:
        return without_scores(call, out, row_lse, top)
    if out.numel():
        with on_device(q):
            operands = (operand(call, launches, name) for name in ("q", "k", "v"))
            sink = None if call.sink is None else call.sink.contiguous()
            tensors = (*operands, operand(call, launches, "out", out), row_lse, top, sink, descale.device_args(call))
            _launch("forward", call, launches, tensors, tiles)
    return out, row_lse, top


def bias_sums_of(call: Call, saved: Saved) -> BiasSums | None:
    """Memory for sums of ds, which `backward` fills; None where it makes none."""
    if call.scoreless:
        return None
    tile = _config("dq", call)
    blocks = -(-call.q.shape[2] // tile.block_q)
    return BiasSums.of(call, saved, (tile.block_q, tile.block_k), blocks, tile.block_q)


def backward(
    call: Call, launches: Launches, saved: Saved, tiles: Tiles | None = None, biases: BiasSums | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dq, dk, dv and dsink."""
    q, k, v = call.q, call.k, call.v
    dq, dk, dv = (empty_like_rows(x, x.shape[3]) for x in (q, k, v))
    if call.scoreless:
        return dq.zero_(), dk.zero_(), dv.zero_(), sink_gradient(call, launches, saved)
    with on_device(q):
        dout, terms = row_sums(call, launches, saved)
        operands = (*(operand(call, launches, name) for name in ("q", "k", "v")), dout)
        sums = TensorArgs.of(dk), TensorArgs.of(dv)
        if max(q.shape[3], v.shape[3]) > WIDE:
            _launch("dk", call, launches, (*operands, sums[0], None, terms), tiles)
            _launch("dv", call, launches, (*operands, None, sums[1], terms), tiles)
        else:
            _launch("dkdv", call, launches, (*operands, *sums, terms), tiles)
        own = None if biases is None else biases.sums
        _launch("dq", call, launches, (*operands, TensorArgs.of(dq), terms, own), tiles)
    return dq, dk, dv, sink_gradient(call, launches, saved, terms[..., 1])


def row_sums(call: Call, launches: Launches, saved: Saved) -> tuple[TensorArgs, Tensor]:
    """dout, and the terms of `delta_kernel`, (b, h_q, s_q, 2) float32."""
    q, v = call.q, call.v
    dlse = None if saved.dlse is None else saved.dlse.contiguous()
    terms = torch.empty(*q.shape[:3], 2, dtype=torch.float32, device=q.device)
    dout, out = aligned_rows(launches, saved.dout), aligned_rows(launches, saved.out)
    # Packed rows stand alone here.
    used = None if call.layout.ragged_keys else positions.spans(call)[0]
    rows = dlse, saved.lse.contiguous(), terms, used, q.shape[1], q.shape[2], scores.unit(call.score)
    block_q = DELTA_ROWS if v.shape[3] <= WIDE else DELTA_ROWS // 2
    grid = q.shape[:2].numel() * -(-q.shape[2] // block_q), 1, 1
    sizes, key = (v.shape[3], block_q, block_d(v.shape[3])), ("delta", *specialised((dout, out), rows[:2]))
    cached_launch(launches, key, lambda: Launch(delta_kernel, grid, sizes))(q.device.index, (dout, out, *rows))
    return dout, terms


DELTA_ROWS = 32


def operand(call: Call, launches: Launches, name: str, x: Tensor | None = None) -> TensorArgs:
    """q, k or v as kernels take them, or another tensor whose rows they can read. The strides are stored for the next
    Call of the same key, which knows where its operands lie, unless they are those of a copy."""
    tensor = descale.readable(getattr(call, name) if x is None else x)
    if name in launches:
        return TensorArgs(tensor, *launches[name])
    args = aligned_rows(launches, tensor) if x is None else TensorArgs.of(tensor)
    if args.ptr is tensor:
        launches[name] = args[1:]
    return args


KERNELS = {"forward": forward_kernel, "dq": dq_kernel, **dict.fromkeys(BY_KEYS, dkdv_kernel)}
RANGES_KERNELS = KERNELS | dict.fromkeys(BY_KEYS, ranges_dkdv_kernel)
"""The same for sequences that may share keys."""


def _launch(name: str, call: Call, launches: Launches, tensors: tuple[Any, ...], tiles: Tiles | None) -> None:
    """Runs a kernel with one program for each q block, or for each kv block."""
    # What Triton specialises for and the Call's key does not hold: how out or dout lies,
    # and the scale's sign.
    given = tensors[4] is None, tensors[-1] is None
    key = name, tensors[3].unit.value, tensors[3].wide.value, *given, precision(), rising(call)
    cached = launches.get(key) if tiles is None else None
    if cached is None:
        tile = tiles[name] if tiles and name in tiles else _config(name, call)
        # A tuning candidate fits as it is, or fails.
        cached = prepare(name, call, tile, least_stages=tile.stages if tiles else 1), tile
        if tiles is None:
            launches[key] = cached
    launch, tile = cached
    launch(call.q.device.index, (*tensors, *_tile_arguments(name, call, launches, tile)))


def _tile_arguments(name: str, call: Call, launches: Launches, tile: TileConfig) -> tuple[Any, ...]:
    by_keys = name in BY_KEYS
    if by_keys and call.layout.starts_k is not None:  # its programs own no sequence's block
        return common_arguments(call, masks.device_args(call))
    return tile_arguments(call, launches, (tile.block_q, tile.block_k), by_keys)


def prepare(name: str, call: Call, tile: TileConfig, least_stages: int = 1) -> Launch:
    blocks, by_keys = (tile.block_q, tile.block_k), name in BY_KEYS
    grid, shape = tile_grid(call, *blocks, by_keys), TileShape.of(call, *blocks, tile.columns, tile.warps)
    if by_keys and call.layout.starts_k is not None:
        grid = call.k.shape[1] * -(-call.k.shape[2] // tile.block_k), 1, 1
    if tile.columns:
        grid = grid[0], -(-call.v.shape[3] // shape.BLOCK_DV.value), 1
    kernels = KERNELS if call.layout.starts_k is None else RANGES_KERNELS
    plain = call.score is None and call.dropout is None and not (call.mask is not None and call.mask.block_sparse)
    registers = tile.registers if plain else None
    constants: tuple[Any, ...] = (shape,)
    if name == "forward":
        constants += descale.products(call), FLAGS[rising(call)], FLAGS[registers is not None]
    return Launch(kernels[name], grid, constants, tile.warps, tile.stages, least_stages, registers=registers)


def rising(call: Call) -> bool:
    """Whether the largest product is the largest score, as the scale is not negative, and it was measured to pay: wider
    heads were 1 % slower. What functions add is divided by the scale."""
    q, v = call.q, call.v
    ordered = call.scale >= 0 if call.score is None else scores.ordinary(call)
    return ordered and q.dtype.itemsize == 2 and max(q.shape[3], v.shape[3]) <= WIDE // 2


def _config(kernel: str, call: Call) -> TileConfig:
    return config(kernel, call.spec, configs.gpu_of(call.q.device))
