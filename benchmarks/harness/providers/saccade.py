"""saccade's backends, and its reference as the naive implementation, which needs the whole score matrix.

Causal masks are also written as intervals that the device reads, and packed sequences as a padded batch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.grids import Cell
from benchmarks.harness.inputs import shared_pages
from benchmarks.harness.providers.base import Operands, Prepared, Provider, Results, learned, prepared
from saccade.api import attention, explain
from saccade.backends import backend_module
from saccade.call.partial import Scored
from saccade.layouts import Dense
from saccade.masks import Mask, causal, interval
from saccade.ops import dispatch
from saccade.testing.cases import Inputs
from saccade.testing.sdpa import Padding
from saccade.util import hardware

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
            support = backend_module(self.backend).SUPPORT
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
        return prepared(function, cell, operands)

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


def packed_again(padding: Padding, prepared: Prepared) -> Prepared:
    """The call, with results that are packed again, untimed."""

    def after(results: Results) -> Results:
        sides = (padding.q,) if len(results) == 1 else (padding.q, padding.k, padding.k)
        return tuple(side.packed(x) for side, x in zip(sides, results, strict=False))

    return replace(prepared, order="thd", after=after)


FORMS = "stops", "rows", "starts"


class CausalInterval(Saccade):
    """A causal mask by the `stops` of all rows, by starts and stops (`rows`), or as `starts` of 0 & `causal`."""

    def __init__(self, form: str, backend: str = "gluon") -> None:
        super().__init__(backend, f"interval-{form}")
        self.form = form

    def supports(self, cell: Cell, inputs: Inputs) -> str | None:
        if cell.case.mask != "causal" or cell.layout != "dense":
            return "writes causal masks of dense batches as intervals"
        return super().supports(cell, inputs)

    def keywords(self, cell: Cell, inputs: Inputs) -> dict[str, Any]:
        return super().keywords(cell, inputs) | {"mask": self.mask(cell, inputs.q.device)}

    def mask(self, cell: Cell, device: torch.device) -> Mask:
        case = cell.case
        stop = torch.arange(case.s_k - case.s_q, case.s_k, dtype=torch.int32, device=device)[None] + 1
        if self.form == "starts":
            return interval(torch.zeros(case.b, 1, dtype=torch.int32, device=device), None) & causal()
        return interval(None if self.form == "stops" else torch.zeros_like(stop), stop)


class LeftPadded(Saccade):
    """Packed sequences as the end of each row of a padded batch, which a start for each row hides. Made untimed."""

    def supports(self, cell: Cell, inputs: Inputs) -> str | None:
        layout = inputs.keywords.get("layout", Dense())
        if not layout.ragged_keys or cell.case.mask != "causal" or cell.case.s_q != cell.case.s_k:
            return "pads causal self-attention of packed sequences"
        return super().supports(cell, inputs)

    def prepare(self, cell: Cell, inputs: Inputs) -> Prepared:
        padding = Padding.of(inputs)
        padding = Padding(*(replace(side, in_use=side.in_use.flip(1)) for side in (padding.q, padding.k)))
        padded = padding.inputs(inputs)
        starts = padding.k.in_use.shape[1] - padding.k.used[:, None]
        mask = interval(starts, None) & causal()
        keywords = self.keywords(cell, padded) | {"layout": Dense(), "mask": mask}
        operands = Operands(padded.q, padded.k, padded.v, padded.dout, "bhsd")
        return packed_again(padding, prepared(lambda q, k, v: attention(q, k, v, **keywords), cell, operands))
