"""What GPUs make of lists of keys in each call: tables of bits, whose size bounds what they run."""

from __future__ import annotations

from typing import NamedTuple

from saccade.call import Call
from saccade.masks import Selected

MOST_BYTES = 1 << 32
"""Of a table: 128 K rows of one head, of as many keys each, take half of it."""


class TableShape(NamedTuple):
    """A bit for each list and each key, or block of keys."""

    batch: int
    heads: int
    groups: int
    """lists of a head; of queries end to end one for each row"""
    blocks: int

    @property
    def lists(self) -> int:
        return self.batch * self.heads * self.groups

    @property
    def words(self) -> int:
        """int32 of a list"""
        return -(-self.blocks // 32)

    @staticmethod
    def of(mask: Selected, call: Call) -> TableShape:
        lists, lengths = mask.lists, mask.lengths
        s_k = call.layout.capacity(call.k.shape[2])
        batch = lists.shape[0] if lists.dim() == 4 else 1
        if lengths is not None and lengths.dim() == 1 and lists.dim() == 4:
            batch = max(batch, lengths.shape[0])
        return TableShape(batch, *lists.shape[-3:-1], -(-s_k // mask.keys))


def refusals(call: Call) -> list[str]:
    """Why no GPU takes the lists of a mask."""
    leaves = () if call.mask is None or not call.mask.by_row else call.mask.leaves()
    shapes = [TableShape.of(leaf, call) for leaf in leaves if isinstance(leaf, Selected)]
    size = sum(4 * shape.lists * shape.words for shape in shapes)
    if size <= MOST_BYTES:
        return []
    return [f"makes a table of a bit for each list and key of up to {MOST_BYTES >> 30} GB, not {size / 2**30:.1f}"]
