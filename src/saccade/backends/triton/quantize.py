"""8-bit numbers and their factors: launches."""

# pyright: reportCallIssue=false

from __future__ import annotations

import math
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2

from saccade.backends import Quantization, rotated_elements
from saccade.backends.device.eight_bits import converts
from saccade.backends.device.launch import Launch, on_device
from saccade.backends.device.records import TensorArgs, runtime_int
from saccade.backends.device.sequences import spans_of
from saccade.backends.triton import quantize_kernel as kernels
from saccade.backends.triton.quantize_kernel import QuantizeShape, QuantizeSizes
from saccade.bounded_cache import BoundedCache
from saccade.descale import BLOCK
from saccade.layouts import empty_bytes

_PER = {"tensor": kernels.TENSOR, "head": kernels.HEAD, "block": kernels.BY_BLOCK}
TYPES = {torch.float8_e4m3fn: kernels.E4M3, torch.float8_e5m2: kernels.E5M2}
_KERNELS = {
    "largest": kernels.largest_kernel,
    "quantize": kernels.quantize_kernel,
    "parts": kernels.mean_parts_kernel,
    "mean": kernels.mean_kernel,
}


def quantize(call: Quantization) -> tuple[Tensor, Tensor, Tensor | None]:
    """The bytes (b, h, s, d), their factors, and with a mean of keys the shift of each query row's LSE."""
    x = call.x
    made = empty_bytes(x, call.dtype, call.keys_first)
    # Programs write every factor, but for blocks and sequences that have no rows.
    whole = call.starts is None and x.numel()
    descale = (torch.empty if whole else torch.ones)(call.descale_shape, dtype=torch.float32, device=x.device)
    shift = found = None
    if call.mean is not None and not call.subtracts:
        shift = torch.empty(x.shape[:3], dtype=torch.float32, device=x.device)
    if x.shape[:3].numel():
        if call.per != "block":
            found = torch.zeros(call.descale_shape, dtype=torch.int32, device=x.device)
            _launch("largest", call, largest_arguments(call, found))
        _launch("quantize", call, arguments(call, made, found, descale, shift))
    return made, descale, shift


def mean(call: Quantization) -> Tensor:
    """(sequences, h_k, d) float32: the mean of each sequence's rows, of the numbers among them, zero where it has none;
    rotated if the rows are."""
    b, h, _, d = call.x.shape
    made = torch.empty(call.sequences, h, d, dtype=torch.float32, device=call.x.device)
    parts = made.new_empty(b * _tiles(call, kernels.PARTS.value), h, d)
    if made.numel():
        if parts.numel():
            _launch("parts", call, parts_arguments(call, parts))
        _launch("mean", call, mean_arguments(call, parts, made))
    return made


_launches: BoundedCache[Any, Launch] = BoundedCache(1024)


def _launch(name: str, call: Quantization, arguments: tuple[Any, ...]) -> None:
    x = call.x
    tensors = [None if t is None else (t.dtype, t.data_ptr() % 16) for t in (call.starts, call.used, call.mean)]
    memory = x.dtype, x.device, x.shape, x.stride(), x.data_ptr() % 16
    words = call.h_k, call.sequences, call.subtracts, call.per, call.dtype, call.rotate, call.keys_first
    with on_device(x):
        launch = _launches.get_or_make((name, memory, *tensors, words), lambda: prepare(name, call))
        launch(x.device.index, arguments)


def prepare(name: str, call: Quantization) -> Launch:
    """A kernel's launch."""
    b, h, _, d = call.x.shape
    heads = _heads(name, call)
    shape = QuantizeShape(*map(tl.constexpr, _shape(call, heads)))
    programs = {
        "parts": b * h * _tiles(call, kernels.PARTS.value),
        "mean": call.sequences * h,
    }.get(name, b * (h // heads) * _tiles(call))
    warps = 4 if d <= 64 else 8 if d <= 128 or call.x.dtype == torch.float32 else 16
    return Launch(_KERNELS[name], (programs, 1, 1), (shape,), warps)


def _shape(call: Quantization, heads: int) -> tuple[Any, ...]:
    """The fields of a QuantizeShape."""
    d = call.x.shape[3]
    block_d = max(next_power_of_2(max(d, 1)), 16)
    chunk = min(block_d, 16 if call.x.dtype == torch.float32 else 64)
    mixed = rotated_elements(d) if call.rotate else 1
    group = call.x.shape[1] // call.h_k
    per, kind = _PER[call.per].value, TYPES[call.dtype].value
    flags = converts(call.x.device), call.subtracts, call.keys_first
    # Few at once take few registers, so that a multiprocessor has many programs. Products and columns want more.
    rows = BLOCK if (mixed > 1 and call.x.dtype != torch.float32) or call.keys_first else 32
    return d, block_d, chunk, mixed, 1 / math.sqrt(mixed), heads, rows, group, per, kind, *flags


def _heads(name: str, call: Quantization) -> int:
    """Heads of one program: those that share a factor, where it finds the factor itself."""
    return call.x.shape[1] // call.h_k if name == "quantize" and call.per == "block" else 1


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
    return TensorArgs.of(call.x), out, call.mean, found, descale, shift, _span(call), _sizes(call), call.scale


def parts_arguments(call: Quantization, parts: Tensor) -> tuple[Any, ...]:
    return TensorArgs.of(call.x), parts, _span(call), _sizes(call, kernels.PARTS.value)


def mean_arguments(call: Quantization, parts: Tensor, made: Tensor) -> tuple[Any, ...]:
    return parts, made, _span(call), _sizes(call, kernels.PARTS.value)


def compiled(name: str, d: int, dtype: torch.dtype, words: list[str]) -> Any:
    """A kernel as the compile gate sees it; words say what the call has besides."""
    group = 4 if "grouped" in words else 1
    x = torch.empty(2, 2 * group, 512, d, dtype=dtype)
    per = next((word for word in words if word in _PER), "block")
    mean = torch.empty(2, 2, d) if {"centred", "shifted"} & {*words} else None
    kind = torch.float8_e5m2 if "e5m2" in words else torch.float8_e4m3fn
    starts = torch.zeros(3, dtype=torch.int32) if "packed" in words else None
    flags = "rotated" in words, "keys_first" in words
    call = Quantization(x, 2, starts, None, mean, "centred" in words, per, kind, 4, *flags, 1.0)
    parts, found = torch.empty(2, 2, d), None if per == "block" else torch.zeros(2, 2, dtype=torch.int32)
    made, shift = empty_bytes(x, kind, call.keys_first), torch.empty(x.shape[:3]) if "shifted" in words else None
    given = {
        "largest": lambda: largest_arguments(call, torch.zeros(2, 2, dtype=torch.int32)),
        "quantize": lambda: arguments(call, made, found, torch.empty(2, 2, 4), shift),
        "parts": lambda: parts_arguments(call, parts),
        "mean": lambda: mean_arguments(call, parts, parts),
    }[name]()
    return prepare(name, call).warmup(given)
