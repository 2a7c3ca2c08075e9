"""What making a block mask takes, in saccade and in FlexAttention."""

from __future__ import annotations

from saccade import block_mask, mask_mod
from saccade.bench.grids import Cell
from saccade.bench.providers.base import Prepared, Provider
from saccade.bench.providers.flex import predicate
from saccade.testing.cases import Inputs


class BlockMasks(Provider):
    name, role = "block-mask", "saccade"
    calls = ("block mask",)

    def prepare(self, cell: Cell, inputs: Inputs) -> Prepared:
        case, fn = cell.case, predicate(inputs.keywords["mask"], 0)
        return Prepared(lambda: (block_mask(mask_mod(fn), case.b, 1, case.s_q, case.s_k, inputs.q.device),))


class FlexBlockMasks(Provider):
    """Holds the whole mask several times."""

    name = "flex-block-mask"
    calls = ("block mask",)

    def prepare(self, cell: Cell, inputs: Inputs) -> Prepared:
        from torch.nn.attention.flex_attention import create_block_mask

        case, fn = cell.case, predicate(inputs.keywords["mask"], 0)
        shape = None, None, case.s_q, case.s_k
        return Prepared(lambda: (create_block_mask(fn, *shape, device=inputs.q.device),))
