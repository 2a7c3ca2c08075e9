"""The machine's two ceilings, timed in turns with everything else: a matrix product and a copy."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from benchmarks.harness.cost import Cost
from benchmarks.harness.grids import Cell
from benchmarks.harness.providers.base import Prepared, Provider
from saccade.call.descale import EIGHT_BITS
from saccade.testing.cases import Inputs


class Ceiling(Provider):
    """Runs beside every cell."""

    role = "ceiling"

    def supports(self, cell: Cell, inputs: Inputs) -> str | None:
        return None


class Matmul(Ceiling):
    """A big square product in the cell's dtype, by PyTorch's library; of 8-bit cells in bfloat16."""

    name = "matmul"

    def prepare(self, cell: Cell, inputs: Inputs) -> Prepared:
        dtype = torch.bfloat16 if inputs.q.dtype in EIGHT_BITS else inputs.q.dtype
        a, b = _matrices(inputs.q.device, dtype)
        return Prepared(lambda: (a @ b,), cost=Cost(2 * len(a) ** 3, 3 * a.numel() * a.element_size()))


class Copy(Ceiling):
    """A copy within the device's memory, much larger than its caches; bytes read plus bytes written."""

    name = "copy"

    def prepare(self, cell: Cell, inputs: Inputs) -> Prepared:
        source, target = _buffers(inputs.q.device)
        return Prepared(lambda: (target.copy_(source),), cost=Cost(0, 2 * source.numel()))


@lru_cache
def _matrices(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Random: the chip clocks higher on zeros."""
    n = 8192 if device.type == "cuda" else 1024
    return torch.randn(n, n, device=device).to(dtype), torch.randn(n, n, device=device).to(dtype)


@lru_cache
def _buffers(device: torch.device) -> tuple[Tensor, Tensor]:
    size = 1 << (30 if device.type == "cuda" else 27)
    source = torch.randint(0, 255, (1 << 20,), dtype=torch.uint8, device=device).repeat(size >> 20)
    return source, torch.empty_like(source)
