"""8-bit numbers and their factors: launches."""

# pyright: reportCallIssue=false

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton import knobs, next_power_of_2

from saccade.backends import Quantization, rotated_elements
from saccade.backends.device.descale import converts
from saccade.backends.device.launch import Launch, multiprocessors, on_device
from saccade.backends.device.positions import spans_of
from saccade.backends.device.records import TensorArgs, runtime_int
from saccade.backends.device.replay import new_launch_recorder as recorder
from saccade.backends.triton import quantize_kernel as kernels
from saccade.backends.triton.quantize_kernel import PARTS, QuantizeShape, QuantizeSizes, mean_kernel, mean_parts_kernel
from saccade.call.descale import BLOCK
from saccade.layouts import empty_bytes
from saccade.util.caches import BoundedCache

_PER = {"tensor": kernels.TENSOR, "head": kernels.HEAD, "block": kernels.BY_BLOCK}
POLLS = 256
"""How often a program looks for what others found: some hundred microseconds."""
TYPES = {torch.float8_e4m3fn: kernels.E4M3, torch.float8_e5m2: kernels.E5M2}
_KERNELS = {
    "largest": kernels.largest_kernel,
    "quantize": kernels.quantize_kernel,
    "parts": mean_parts_kernel,
    "mean": mean_kernel,
}

__all__ = ["mean", "quantize", "recorder"]


def quantize(call: Quantization) -> tuple[Tensor, Tensor, Tensor | None]:
    """The bytes (b, h, s, d), their factors, and with a mean of keys the shift of each query row's LSE."""
    x = call.x
    made = empty_bytes(x, call.dtype, call.keys_first)
    # Programs write every factor, but for blocks and sequences that have no rows.
    whole = call.starts is None and x.numel()
    descale = (torch.empty if whole else torch.ones)(call.descale_shape, dtype=torch.float32, device=x.device)
    shift = None
    if call.mean is not None and not call.subtracts:
        shift = torch.empty(x.shape[:3], dtype=torch.float32, device=x.device)
    if x.shape[:3].numel():
        found = maxima(call)
        if found is not None and call.per != "block":
            _launch("largest", call, largest_arguments(call, found))
        _launch("quantize", call, arguments(call, made, found, descale, shift))
    return made, descale, shift


def mean(call: Quantization) -> Tensor:
    """(sequences, h_k, d) float32: the mean of each sequence's rows, of the numbers among them, zero where it has none;
    rotated if the rows are."""
    b, h, _, d = call.x.shape
    made = torch.empty(call.sequences, h, d, dtype=torch.float32, device=call.x.device)
    parts = made.new_empty(b * _tiles(call, PARTS.value), h, d)
    if made.numel():
        if parts.numel():
            _launch("parts", call, parts_arguments(call, parts))
        _launch("mean", call, mean_arguments(call, parts, made))
    return made


def maxima(call: Quantization) -> Tensor | None:
    """Zeros, where programs leave the maxima that others need: of those that share a factor, or by blocks of each."""
    shape = call.descale_shape
    if call.per == "block":
        tile = tile_of("quantize", call)
        if call.x.shape[1] == call.h_k and tile.rows == BLOCK:
            return None
        shape = (_programs(call, tile),)
    return torch.zeros(shape, dtype=torch.int32, device=call.x.device)


_launches: BoundedCache[Any, Launch] = BoundedCache(1024)


def _launch(name: str, call: Quantization, arguments: tuple[Any, ...]) -> None:
    x = call.x
    tensors = [None if t is None else (t.dtype, t.data_ptr() % 16) for t in (call.starts, call.used, call.mean)]
    memory = x.dtype, x.device, x.shape, x.stride(), x.data_ptr() % 16
    words = call.h_k, call.sequences, call.subtracts, call.per, call.dtype, call.rotate, call.keys_first
    with on_device(x):
        launch = _launches.get_or_make((name, memory, *tensors, words), lambda: prepare(name, call))
        launch(x.device.index, arguments)


class ProgramTile(NamedTuple):
    """The tile of one program, and how it is compiled."""

    rows: int
    """at most a block"""
    warps: int
    registers: int | None = None
    """of a thread, at most"""
    each: int = 0
    """programs of a multiprocessor, which take one tile after the other; 0 is a program for each tile"""
    stages: int = 1
    """with `each`, how many tiles are loaded or worked on at a time"""


def tile_of(name: str, call: Quantization) -> ProgramTile:
    """A program's tile, as measured on an H200: a thread has 64 numbers of it where registers suffice."""
    d = _block_d(call)
    thin = call.x.dtype == torch.float32 and call.rotate  # two operands of products
    rows = min(BLOCK, max((1 << 14 if thin else 1 << 15) // d, 16))
    warps = min(max(rows * d // (1024 if thin else 2048), 4), 16)
    if name == "parts":
        return ProgramTile(min(BLOCK, max((1 << 12) // d, 16)), 4, stages=5)
    wide = call.x.dtype == torch.float32 or not 64 <= d <= 256
    if call.rotate and d == 128 and call.per != "block" and call.mean is None and not wide and name != "mean":
        return ProgramTile(rows, 4, 168)
    if wide or name != "quantize":
        return ProgramTile(rows, warps)
    waits = call.x.shape[1] > call.h_k and call.per == "block"
    # A search for the sequence is a loop, inside of which Triton loads no tile ahead.
    if call.starts is None and not waits and (call.rotate or d == 256) and d > 64 and not call.keys_first:
        more = call.rotate and (d == 256 or call.mean is not None)  # memory
        return ProgramTile(rows, warps, 128, 256 // d, 2 if more else 3)
    if waits and d == 256 and not call.rotate:
        return ProgramTile(64, 8, 80)
    if waits and d == 128:  # few numbers in each of many programs: while some wait, others work
        return ProgramTile(32, 4, 80 if call.rotate else 64)
    if call.keys_first or d == 256 or (call.rotate and not waits):
        return ProgramTile(rows, warps)
    return ProgramTile(rows, warps, 112 if waits else 80)


def prepare(name: str, call: Quantization) -> Launch:
    """A kernel's launch."""
    b, h, _, _ = call.x.shape
    tile = tile_of(name, call)
    shape = QuantizeShape(*map(tl.constexpr, _shape(call, tile)))
    programs = {
        "parts": b * h * _tiles(call, PARTS.value),
        "mean": call.sequences * h,
        "quantize": _at_a_time(call, tile),
    }.get(name, _programs(call, tile))
    return Launch(_KERNELS[name], (programs, 1, 1), (shape,), tile.warps, registers=tile.registers)


def _block_d(call: Quantization) -> int:
    return max(next_power_of_2(max(call.x.shape[3], 1)), 16)


def _programs(call: Quantization, tile: ProgramTile) -> int:
    b, h = call.x.shape[:2]
    return b * h * _tiles(call) * (BLOCK // tile.rows)


def _at_a_time(call: Quantization, tile: ProgramTile) -> int:
    """Programs of `quantize`."""
    return min(_programs(call, tile), multiprocessors(call.x.device) * tile.each or _programs(call, tile))


def _shape(call: Quantization, tile: ProgramTile) -> tuple[Any, ...]:
    """The fields of a QuantizeShape."""
    d = call.x.shape[3]
    mixed = rotated_elements(d) if call.rotate else 1
    width = _block_d(call) if mixed == 1 else min(_block_d(call), 64)
    levels = (mixed // min(mixed, width)).bit_length() - 1
    group = call.x.shape[1] // call.h_k
    per, kind = _PER[call.per].value, TYPES[call.dtype].value
    seen = max(128 * tile.warps, next_power_of_2(group * BLOCK // tile.rows))
    polls = 1 if knobs.runtime.interpret else POLLS
    numbers = d, width, _block_d(call) // width, mixed, levels, 1 << levels, 1 / math.sqrt(mixed), tile.rows, group
    flags = converts(call.x.device), call.subtracts, call.keys_first
    return *numbers, per, kind, *flags, seen, polls, tile.stages


def _tiles(call: Quantization, blocks: int = 1) -> int:
    """How many tiles of some blocks there may be, of a batch row or of all sequences; see `sequences.blocks_before`."""
    s, rows = call.x.shape[2], BLOCK * blocks
    return -(-s // rows) if call.starts is None else s // rows + call.sequences + 1


def _sizes(call: Quantization, blocks: int = 1) -> QuantizeSizes:
    sizes = call.x.shape[2], call.x.shape[1], _tiles(call, blocks), call.sequences, call.blocks
    return QuantizeSizes(*map(runtime_int, sizes))


def _span(call: Quantization) -> Any:
    return spans_of(call.starts, call.used, None, runtime_int(call.sequences))


def largest_arguments(call: Quantization, found: Tensor) -> tuple[Any, ...]:
    mean = call.mean if call.subtracts else None
    return TensorArgs.of(call.x), mean, found, _span(call), _sizes(call)


def arguments(
    call: Quantization, made: Tensor, found: Tensor | None, descale: Tensor, shift: Tensor | None
) -> tuple[Any, ...]:
    codes = made.view(torch.uint8)
    out = TensorArgs.of(codes.transpose(2, 3) if call.keys_first else codes)
    return TensorArgs.of(call.x), out, call.mean, found, descale, shift, _span(call), _sizes(call)


def parts_arguments(call: Quantization, parts: Tensor) -> tuple[Any, ...]:
    return TensorArgs.of(call.x), parts, _span(call), _sizes(call, PARTS.value)


def mean_arguments(call: Quantization, parts: Tensor, made: Tensor) -> tuple[Any, ...]:
    return parts, made, _span(call), _sizes(call, PARTS.value)
