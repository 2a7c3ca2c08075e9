"""Causal masks as intervals that the device reads, and packed sequences as a batch that is padded at the left."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from saccade.api import attention
from saccade.bench.grids import Cell
from saccade.bench.providers.base import Operands, Prepared, prepared
from saccade.bench.providers.padding import Padding
from saccade.bench.providers.saccade import Saccade
from saccade.layouts import Dense
from saccade.masks import Mask, causal, interval
from saccade.testing.cases import Inputs

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
        return padding.undone(prepared(lambda q, k, v: attention(q, k, v, **keywords), cell.call, operands))
