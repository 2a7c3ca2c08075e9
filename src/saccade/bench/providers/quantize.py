"""8-bit operands, and a copy of as many bytes as they must move."""

from __future__ import annotations

import torch

from saccade import quantize
from saccade.bench import quantizing
from saccade.bench.grids import Cell
from saccade.bench.providers.base import Prepared, Provider
from saccade.testing.cases import Inputs


class Quantize(Provider):
    """All of a call: q, k and v, and means of keys."""

    name, role = "quantize", "saccade"
    calls = ("quantize",)

    def prepare(self, cell: Cell, inputs: Inputs) -> Prepared:
        options = quantizing.options(cell.mode)
        return Prepared(lambda: quantize(inputs.q, inputs.k, inputs.v, **options))


class CopyOfBytes(Provider):
    """Half of the bytes that the cell must move, read and written."""

    name = "copy-of-bytes"
    calls = ("quantize",)
    checked = False

    def prepare(self, cell: Cell, inputs: Inputs) -> Prepared:
        size = quantizing.cost(inputs, cell.mode).bytes // 2
        source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=inputs.q.device)
        target = torch.empty_like(source)
        return Prepared(lambda: (target.copy_(source),))
