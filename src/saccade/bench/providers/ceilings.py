"""The machine's two ceilings, timed in turns with everything else: a matrix product and a copy."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.bench.cost import Cost
from saccade.bench.grids import Cell
from saccade.bench.providers.base import Prepared, Provider
from saccade.testing.cases import Inputs


class Matmul(Provider):
    """A big square product in the cell's dtype, by PyTorch's library."""

    name, role = "matmul", "ceiling"

    def supports(self, cell: Cell, inputs: Inputs) -> str | None:
        return None

    def __init__(self) -> None:
        self._operands: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def prepare(self, cell: Cell, inputs: Inputs) -> Prepared:
        device, dtype = inputs.q.device, inputs.q.dtype
        n = 8192 if device.type == "cuda" else 1024
        if (device, dtype) not in self._operands:
            # Random: the chip clocks higher on zeros.
            a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
            self._operands[device, dtype] = a, b
        a, b = self._operands[device, dtype]
        return Prepared(lambda: (a @ b,), cost=Cost(2 * n**3, 3 * a.numel() * a.element_size()))


class Copy(Provider):
    """A copy within the device's memory, much larger than its caches; bytes read plus bytes written."""

    name, role = "copy", "ceiling"

    def supports(self, cell: Cell, inputs: Inputs) -> str | None:
        return None

    def __init__(self) -> None:
        self._buffers: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def prepare(self, cell: Cell, inputs: Inputs) -> Prepared:
        device = inputs.q.device
        if device not in self._buffers:
            size = 1 << (30 if device.type == "cuda" else 27)
            source = torch.randint(0, 255, (1 << 20,), dtype=torch.uint8, device=device).repeat(size >> 20)
            self._buffers[device] = source, torch.empty_like(source)
        source, target = self._buffers[device]
        return Prepared(lambda: (target.copy_(source),), cost=Cost(0, 2 * source.numel()))
