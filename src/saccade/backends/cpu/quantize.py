"""8-bit numbers and their factors, in PyTorch operations; on any device."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.backends import Quantization, rotated_elements
from saccade.call.descale import BLOCK
from saccade.layouts import empty_bytes

SMALLEST = torch.finfo(torch.float32).tiny
"""The least factor."""


class Rows(NamedTuple):
    """Of every row of all batch rows, (b s,): its sequence, its number in it, and whether it is in use."""

    sequence: Tensor
    position: Tensor
    live: Tensor


def quantize(call: Quantization) -> tuple[Tensor, Tensor, Tensor | None]:
    """The bytes (b, h, s, d), their factors, and with a mean of keys the shift of each query row's LSE."""
    if not call.x.numel():
        shift = None if call.mean is None or call.subtracts else call.x.new_zeros(call.x.shape[:3], dtype=torch.float32)
        descale = call.x.new_ones(call.descale_shape, dtype=torch.float32)
        return empty_bytes(call.x, call.dtype, call.keys_first), descale, shift
    rows = _rows(call)
    x, shift = _values(call, rows), None
    if call.mean is not None:
        # (h, b s, d)
        mean = call.mean[rows.sequence].transpose(0, 1).repeat_interleave(len(x) // call.h_k, dim=0)
        if call.subtracts:
            x = x - mean
        else:
            shift = _by_batch(call, torch.where(rows.live, (x * mean).sum(-1), 0))
    descale, row_factors = _factors(call, rows, x)
    x = quotient(x, row_factors.repeat_interleave(len(x) // call.h_k, dim=0)[..., None], call.dtype)
    if call.per == "block":
        x = torch.where((rows.position < call.blocks * BLOCK)[:, None], x, torch.nan)
    x = torch.where(rows.live[:, None], x, 0)
    made = empty_bytes(call.x, call.dtype, call.keys_first)
    made.copy_(_by_batch(call, x.to(call.dtype)))
    return made, descale, shift


def quotient(x: Tensor, factor: Tensor | float, dtype: torch.dtype) -> Tensor:
    """x / factor in float32, as the 8-bit dtype takes it: NaN of infinities, at most its largest number."""
    # Adding 0 makes 0 of -0, as kernels do.
    made = (x + 0.0) / factor
    made = torch.where(x.isfinite() & ~made.isnan(), made, torch.nan)
    largest = torch.finfo(dtype).max
    return made.clamp(-largest, largest)


def mean(call: Quantization) -> Tensor:
    """(sequences, h_k, d) float32: the mean of each sequence's rows, of the numbers among them, zero where it has none;
    rotated if the rows are."""
    rows = _rows(call)
    x = call.x.to(torch.float64).transpose(0, 1).flatten(1, 2)
    x = torch.where(rows.live[:, None] & x.isfinite(), x, 0)
    # (h_k, sequences, d)
    total = x.new_zeros(x.shape[0], call.sequences, x.shape[2]).index_add(1, rows.sequence, x)
    count = x.new_zeros(call.sequences).index_add(0, rows.sequence, rows.live.to(x.dtype))
    found = (total / count.clamp(min=1)[:, None]).transpose(0, 1).float()
    return rotated(found) if call.rotate else found.contiguous()


def rotated(x: Tensor) -> Tensor:
    """x times the orthogonal Hadamard matrix of each group of neighbouring elements, in x's dtype."""
    size = rotated_elements(x.shape[-1])
    made, half = x.unflatten(-1, (-1, size)), 1
    while half < size:
        one, two = made.unflatten(-1, (-1, 2, half)).unbind(-2)
        made = torch.stack((one + two, one - two), dim=-2).flatten(-3)
        half *= 2
    return (made / math.sqrt(size)).flatten(-2)


def _values(call: Quantization, rows: Rows) -> Tensor:
    """(h, b s, d) float32, rotated; zero in rows that are not in use."""
    x = call.x.transpose(0, 1).flatten(1, 2).float()
    if call.rotate and rotated_elements(x.shape[2]) > 1:  # as a product with the whole matrix does
        x = torch.where(x.isfinite().all(-1, keepdim=True), rotated(x), torch.nan)
    return torch.where(rows.live[:, None], x, 0)


def _rows(call: Quantization) -> Rows:
    b, _, s, _ = call.x.shape
    position = torch.arange(s, device=call.x.device)
    if call.starts is None:
        sequence = torch.arange(b, device=call.x.device).repeat_interleave(s)
        position = position.repeat(b)
        live = torch.ones_like(position, dtype=torch.bool)
    else:
        last = max(call.sequences - 1, 0)
        sequence = torch.bucketize(position, call.starts[1:].contiguous(), right=True)
        live = sequence < call.sequences
        sequence = sequence.clamp(max=last)
        position = position - call.starts[sequence]
    if call.used is not None and call.sequences:
        live = live & (position < call.used[sequence])
    return Rows(sequence, position.clamp(min=0), live)


def _factors(call: Quantization, rows: Rows, x: Tensor) -> tuple[Tensor, Tensor]:
    """descale, and the same for each row, (h_k, b s)."""
    size = torch.where(rows.live[:, None] & x.isfinite(), x.abs(), 0)
    # (h_k, b s)
    size = size.amax(-1).unflatten(0, (call.h_k, -1)).amax(1)
    per_sequence = call.blocks if call.per == "block" else 1
    factor_index = torch.zeros_like(rows.sequence)
    if call.per != "tensor":
        factor_index = rows.sequence * per_sequence
    if call.per == "block":
        factor_index = factor_index + (rows.position // BLOCK).clamp(max=max(call.blocks - 1, 0))
        size = torch.where(rows.position < call.blocks * BLOCK, size, 0)
    count = 1 if call.per == "tensor" else call.sequences * per_sequence
    largest = size.new_zeros(call.h_k, count)
    if not count:  # nothing is in use
        return largest.view(call.descale_shape), torch.ones_like(size)
    largest = largest.scatter_reduce(1, factor_index.expand(call.h_k, -1), size, "amax")
    if call.per == "tensor":
        largest = largest.amax(0, keepdim=True)
    factor = torch.where(largest > 0, (largest / torch.finfo(call.dtype).max).clamp(min=SMALLEST), 1)
    shape = call.descale_shape
    descale = factor.reshape(()) if not shape else factor.unflatten(1, (call.sequences, -1)).transpose(0, 1)
    return descale.reshape(shape).contiguous(), factor.expand(call.h_k, count)[:, factor_index]


def _by_batch(call: Quantization, x: Tensor) -> Tensor:
    """(b, h, s, …) of (h, b s, …)."""
    return x.unflatten(1, (call.x.shape[0], call.x.shape[2])).transpose(0, 1)
