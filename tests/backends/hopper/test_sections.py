"""The order of work items, and into how many a group of heads is divided."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

import pytest

pytest.importorskip("triton")

from saccade.backends.hopper.backward.plan import even_shares
from saccade.backends.hopper.forward.work_item import L2_BYTES, SHORT_BLOCKS, late_blocks, late_rows, section_size

PROCESSORS = 132


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


def ends(items: Iterable[float]) -> float:
    """When the last of the programs ends that draw items of these lengths in this order."""
    programs = [0.0] * PROCESSORS
    for item in items:
        heapq.heapreplace(programs, programs[0] + item)
    return max(programs)


def causal_order(blocks: int, heads: int, section: int, late: int) -> list[int]:
    """The lengths of kv blocks in the order of `find_kv_block`."""
    sizes = [min(section, heads - first) for first in range(0, heads, section)]
    early = [2 * (blocks - i) + 3 for size in sizes for i in range(blocks - late) for _ in range(size)]
    return early + [2 * (blocks - i) + 3 for i in range(blocks - late, blocks) for _ in range(heads)]


@pytest.mark.parametrize(
    ("blocks", "heads", "section", "most"),
    [(20, 16, 6, 1.15), (12, 32, 11, 1.10), (24, 60, 8, 1.04), (17, 140, 8, 1.03), (8, 256, 8, 1.03)],
)
def test_shortest_blocks_come_last(blocks: int, heads: int, section: int, most: float) -> None:
    """The last program ends at most so much later than the mean."""
    items = causal_order(blocks, heads, section, late_blocks(blocks, blocks * heads / PROCESSORS))
    mean = sum(items) / PROCESSORS
    assert ends(items) <= most * mean
    assert ends(causal_order(blocks, heads, section, 0)) > ends(items)


@pytest.mark.parametrize(
    ("programs", "group", "steps", "shares"),
    [
        (296, 4, 73, 4),  # 2.2 rounds, of which three are needed: 9 of a quarter are 2.25
        (140, 4, 13, 4),
        (264, 4, 64, 1),  # whole rounds
        (132, 7, 200, 1),
        (133, 7, 200, 7),
        (33, 4, 30, 4),
        (8, 1, 100, 1),
    ],
)
def test_shares_of_equal_programs(programs: int, group: int, steps: int, shares: int) -> None:
    assert even_shares(group, programs, PROCESSORS, steps) == shares


@pytest.mark.parametrize(
    ("blocks", "heads", "d", "late"),
    [
        (53, 32, 256, True),
        (81, 8, 256, True),
        (8, 128, 256, False),
        (16, 128, 128, False),
        (4, 512, 64, False),
    ],
)
def test_first_rows_come_last(blocks: int, heads: int, d: int, late: bool) -> None:
    """Where sections have few rounds, but not in short rows."""
    section = section_size(heads, 1, blocks * 128 * 2 * d * 2, blocks, PROCESSORS)
    found = late_rows(blocks, heads, section, PROCESSORS)
    assert (found > 0) == late
    items = causal_order(blocks, heads, section, found)
    assert sorted(items) == sorted(causal_order(blocks, heads, heads, 0))
    if late:
        assert ends(items) < ends(causal_order(blocks, heads, section, 0))
