"""What a call needs beforehand: block masks, in saccade and in FlexAttention, and 8-bit operands, beside a copy of as
many bytes as they must move.
"""

from __future__ import annotations

import torch

from benchmarks.harness import quantizing
from benchmarks.harness.grids import Cell
from benchmarks.harness.providers.base import Prepared, Provider
from benchmarks.harness.providers.flex import Predicate
from saccade import block_mask, mask_mod, quantize
from saccade.masks import Documents
from saccade.testing.cases import Inputs


class BlockMasks(Provider):
    name, role = "block-mask", "saccade"
    calls = ("block mask",)

    def prepare(self, cell: Cell, inputs: Inputs) -> Prepared:
        case, fn = cell.case, _causal_documents(inputs)
        return Prepared(lambda: (block_mask(mask_mod(fn), 1, 1, case.s_q, case.s_k),))


class FlexBlockMasks(Provider):
    """Holds the whole mask several times."""

    name = "flex-block-mask"
    calls = ("block mask",)

    def prepare(self, cell: Cell, inputs: Inputs) -> Prepared:
        from torch.nn.attention.flex_attention import create_block_mask

        case, fn = cell.case, _causal_documents(inputs)
        return Prepared(lambda: (create_block_mask(fn, None, None, case.s_q, case.s_k, device=inputs.q.device),))


def _causal_documents(inputs: Inputs) -> Predicate:
    """The case's mask, `documents&causal`, as a function of its ids."""
    ids = next(part.ids for part in inputs.keywords["mask"].parts if isinstance(part, Documents))[0]
    return lambda b, h, q_idx, kv_idx: (ids[q_idx] == ids[kv_idx]) & (q_idx >= kv_idx)


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
