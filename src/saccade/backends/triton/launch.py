"""From a Problem to launches: records of strides, tile configs, outputs."""

# pyright: reportCallIssue=false

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from saccade import configs
from saccade.backends import Outputs, Saved
from saccade.backends.device import block_lists, dropout, masks, scores, sequences
from saccade.backends.device.gradients import padded, sink_gradient
from saccade.backends.device.launch import nothing_seen, on_device, per_row, run
from saccade.backends.device.records import Rows
from saccade.backends.triton.backward_kernels import delta_kernel, dkdv_kernel, dq_kernel
from saccade.backends.triton.config import TileConfig, block_d, config
from saccade.backends.triton.forward_kernel import forward_kernel
from saccade.layouts import Packed, empty_like_rows
from saccade.problem import Problem, aligned

Tiles = Mapping[str, TileConfig]
"""Configs by kernel that take the place of the table's, for tuning."""


def forward(problem: Problem, lse: bool = True, tiles: Tiles | None = None) -> Outputs:
    """out (b, h_q, s_q, d_v) and, if asked for, lse and max_scores (b, h_q, s_q)."""
    q = problem.q
    out = problem.empty_out()
    row_lse, top = per_row(problem, lse), per_row(problem, problem.max_scores)
    if isinstance(problem.layout, Packed) and not problem.layout.sequences:
        return out.zero_(), nothing_seen(row_lse), nothing_seen(top)
    if out.numel():
        with on_device(q):
            operands = (operand(problem, name) for name in ("q", "k", "v"))
            sink = None if problem.sink is None else problem.sink.contiguous()
            tensors = (*operands, known(problem, "out", out), row_lse, top, sink)
            _launch("forward", forward_kernel, tensors, problem, tiles)
    return out, row_lse, top


def backward(
    problem: Problem, saved: Saved, tiles: Tiles | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dq, dk, dv and dsink."""
    q, k, v = problem.q, problem.k, problem.v
    dq, dk, dv = (empty_like_rows(x, x.shape[3]) for x in (q, k, v))
    nothing = isinstance(problem.layout, Packed) and not problem.layout.sequences
    if nothing or not q.numel() or not k.numel():
        return dq.zero_(), dk.zero_(), dv.zero_(), sink_gradient(problem, saved)
    dlse = None if saved.dlse is None else saved.dlse.contiguous()
    delta, shift = (torch.empty(q.shape[:3], dtype=torch.float32, device=q.device) for _ in range(2))
    with on_device(q):
        dout = _rows(saved.dout)
        # Packed rows stand alone here.
        used = None if isinstance(problem.layout, Packed) else sequences.spans(problem)[0]
        rows = dlse, saved.lse.contiguous(), delta, shift, used, q.shape[1], q.shape[2], scores.unit(problem.score)
        shape: Any = {"D_V": v.shape[3], "BLOCK_Q": DELTA_ROWS, "BLOCK_DV": block_d(v.shape[3])}
        delta_kernel[_grid(q, DELTA_ROWS)](dout, _rows(saved.out), *rows, **shape)
        operands = (*(operand(problem, name) for name in ("q", "k", "v")), dout)
        _launch("dkdv", dkdv_kernel, (*operands, Rows.of(dk), Rows.of(dv), shift, delta), problem, tiles)
        _launch("dq", dq_kernel, (*operands, Rows.of(dq), shift, delta), problem, tiles)
    return dq, dk, dv, sink_gradient(problem, saved, delta)


DELTA_ROWS = 32


def operand(problem: Problem, name: str) -> Rows:
    """q, k or v as kernels take them; a Problem's key knows where they lie."""
    x = getattr(problem, name)
    return Rows(x, *problem.launches[name]) if name in problem.launches else known(problem, name, x, _rows(x))


def known(problem: Problem, name: str, x: Tensor, rows: Rows | None = None) -> Rows:
    """Rows of x, kept for the next Problem of the same key, unless they are those of a copy."""
    if name in problem.launches:
        return Rows(x, *problem.launches[name])
    rows = rows or Rows.of(x)
    if rows.ptr is x:
        problem.launches[name] = rows[1:]
    return rows


def _rows(x: Tensor) -> Rows:
    """Rows that kernels read in pieces of 16 bytes; others are copied, padded. (Element by element they would be slow,
    and Triton 3.6 miscompiles some such tiles: docs/findings/triton.md.)"""
    return Rows.of(x if aligned(x) else padded(x))


def _launch(name: str, kernel: Any, tensors: tuple[Any, ...], problem: Problem, tiles: Tiles | None) -> None:
    """Runs a kernel with one program for each block of query rows, or of keys."""
    precision = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    # What Triton specialises for and the Problem's key does not hold: how out or dout lies.
    key = name, tensors[3].unit.value, tensors[3].wide.value, tensors[4] is None, precision
    found = problem.launches.get(key) if tiles is None else None
    if found is not None:
        compiled, grid, fixed, tile = found
        run(compiled, grid, problem.q.device.index, (*tensors, *_arguments(name, problem, tile), *fixed))
        return
    tile = tiles[name] if tiles and name in tiles else _config(name, problem)
    x, block = (problem.k, tile.block_k) if name == "dkdv" else (problem.q, tile.block_q)
    grid = _grid(x, block)
    if isinstance(problem.layout, Packed):
        grid = x.shape[1] * sequences.slots(problem, name == "dkdv", block), 1, 1
    fixed = constants(problem, tile, precision)
    # A candidate of the tuning's fits, or is none.
    arguments = (*tensors, *_arguments(name, problem, tile))
    compiled = started(kernel, grid, arguments, fixed, tile, least=tile.stages if tiles else 1)
    if tiles is None and compiled is not None:  # the interpreter compiles nothing
        problem.launches[key] = compiled, grid, tuple(fixed.values()), tile


def started(
    kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], fixed: dict[str, Any], tile: TileConfig, least: int
) -> Any:
    """The compiled kernel, running; with fewer stages than the tile's, but at least so many, where tables that a score
    reads have no room in shared memory beside the operands."""
    for stages in range(tile.stages, least, -1):
        try:
            return kernel[grid](*arguments, **fixed, num_warps=tile.warps, num_stages=stages)
        except OutOfResources:
            continue
    return kernel[grid](*arguments, **fixed, num_warps=tile.warps, num_stages=least)


def _arguments(name: str, problem: Problem, tile: TileConfig) -> tuple[Any, ...]:
    mask, by_keys = block_lists.record(problem, tile.block_q, tile.block_k, by_keys=name == "dkdv"), name == "dkdv"
    if not isinstance(problem.layout, Packed):
        return call_arguments(problem, mask)
    return call_arguments(problem, mask, sequences.table(problem, by_keys, tile.block_k if by_keys else tile.block_q))


def call_arguments(problem: Problem, mask: masks.DeviceMask, table: Tensor | None = None) -> tuple[Any, ...]:
    """What every kernel takes between its tensors and its constants."""
    q, records = problem.q, (mask, scores.record(problem.score), dropout.record(problem.dropout))
    return *sequences.spans(problem, table), *records, q.shape[1], q.shape[2], problem.k.shape[2], problem.scale


def constants(problem: Problem, tile: TileConfig, precision: str) -> dict[str, Any]:
    """In the order of the kernels' last parameters."""
    d, d_v = problem.q.shape[3], problem.v.shape[3]
    blocks = {"BLOCK_Q": tile.block_q, "BLOCK_K": tile.block_k, "BLOCK_D": block_d(d), "BLOCK_DV": block_d(d_v)}
    return {"GROUP": problem.group, "D": d, "D_V": d_v, **blocks, "PRECISION": precision}


def _config(kernel: str, problem: Problem) -> TileConfig:
    device = problem.q.device
    gpu = configs.gpu_name(device.index) if device.type == "cuda" else device.type
    return config(kernel, problem.spec(), gpu)


def _grid(x: Tensor, block: int) -> tuple[int, int, int]:
    """Blocks of rows, then heads, then batch rows, all in one dimension: the others end at 65,535."""
    b, h, s = x.shape[:3]
    return b * h * -(-s // block), 1, 1
