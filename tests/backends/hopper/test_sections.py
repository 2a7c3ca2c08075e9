"""Which heads take turns."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from saccade.backends.hopper.forward.work_item import L2_BYTES, SHORT_BLOCKS, section_size


@pytest.mark.parametrize("packs", [1, 4])
@pytest.mark.parametrize("blocks", [SHORT_BLOCKS, SHORT_BLOCKS + 1])
@pytest.mark.parametrize("key_heads", [1, 7, 32, 33, 512])
def test_sections_of_equal_size(key_heads: int, blocks: int, packs: int) -> None:
    """No more of them than the cache and short rows ask for, and none larger than so many need."""
    size = section_size(key_heads * packs, packs, L2_BYTES // 9, blocks, 132)
    own, rest = divmod(size, packs)
    assert rest == 0
    most = 9 if blocks > SHORT_BLOCKS else min(9, 33 // packs)
    sections = -(-key_heads // most)
    assert own == -(-key_heads // sections) <= most
