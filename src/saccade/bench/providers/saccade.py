"""saccade's backends, and its reference as the naive implementation, which needs the whole score matrix."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from saccade import dispatch, hardware
from saccade.api import attention, explain
from saccade.bench.grids import Cell
from saccade.bench.inputs import shared_pages
from saccade.bench.providers.base import Operands, Prepared, Provider, learned, prepared
from saccade.partial import Scored
from saccade.testing.cases import Inputs

_COPIES = 8
"""Score matrices that the reference and its gradient hold at once."""


class Saccade(Provider):
    """One backend by name, or whichever `auto` takes for each of forward and backward."""

    role = "saccade"

    def __init__(self, backend: str, name: str = "", **more: Any) -> None:
        """`more`: keywords of `attention` besides the cell's."""
        self.name = name or (backend if backend == "auto" else f"saccade-{backend}")
        self.backend, self.more = backend, more
        if backend == "cudnn":  # NVIDIA's kernels
            self.role = "peer"

    def available(self, device: torch.device) -> str | None:
        if self.backend == "auto":
            return None
        try:
            support = import_module(f"saccade.backends.{self.backend}").SUPPORT
            return "; ".join(dispatch.reasons_against(self.backend, support.plainest(hardware.name(device)))) or None
        except ImportError as missing:
            return str(missing)

    def supports(self, cell: Cell, inputs: Inputs) -> str | None:
        if cell.call not in self.calls:
            return f"has no {cell.call}"
        explanation = explain(inputs.q, inputs.k, inputs.v, **self.keywords(cell, inputs))
        if self.backend == "auto":
            return None if explanation.backend else "no backend runs it"
        return "; ".join(explanation.reasons[self.backend]) or None

    def prepare(self, cell: Cell, inputs: Inputs) -> Prepared:
        keywords = self.keywords(cell, inputs)

        def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            result = attention(q, k, v, **keywords)
            return result.out if isinstance(result, Scored) else result

        tables = learned(inputs, cell.call)
        operands = Operands(inputs.q, inputs.k, inputs.v, inputs.dout, cell.case.order, learned=tables)
        return prepared(function, cell.call, operands)

    def keywords(self, cell: Cell, inputs: Inputs) -> dict[str, Any]:
        return inputs.keywords | {"backend": self.backend, "deterministic": cell.deterministic} | self.more


class SharedPrefix(Saccade):
    """The same with the pages that all sequences begin with read once."""

    def supports(self, cell: Cell, inputs: Inputs) -> str | None:
        return super().supports(cell, inputs) if shared_pages(cell.case) else "the sequences share no pages"

    def keywords(self, cell: Cell, inputs: Inputs) -> dict[str, Any]:
        layout = replace(inputs.keywords["layout"], shared_pages=shared_pages(cell.case))
        return super().keywords(cell, inputs) | {"layout": layout}


class Naive(Saccade):
    """Plain PyTorch operations over the whole score matrix."""

    role = "peer"

    def supports(self, cell: Cell, inputs: Inputs) -> str | None:
        case = cell.case
        scores = case.b * case.h_q * case.s_q * case.s_k * inputs.q.element_size()
        needed, free = _COPIES * scores, memory(inputs.q.device)
        if needed > free / 2:
            return f"its score matrices need {needed / 2**30:.0f} GiB, and {free / 2**30:.0f} are free"
        return super().supports(cell, inputs)


def memory(device: torch.device) -> int:
    """Free bytes; on a CPU a modest guess that avoids swapping."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 8 << 30
