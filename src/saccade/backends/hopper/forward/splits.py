"""In how many parts the keys of pages are cut, from shapes alone."""

from __future__ import annotations

from saccade.call import Call
from saccade.layouts import Paged

ITEM_ROWS = 128
"""Query rows that are worked on together."""
LEAST_KEYS = 512
"""Keys that a part has at least."""
MAX_SPLITS = 64
START, MERGE = 256, 6
"""What a part costs besides its keys, in the time of so many keys: its begin and its end, and the merge of an item."""


def work_items(call: Call) -> int:
    """Blocks of ITEM_ROWS rows of all sequences and key heads; of sequences end to end the mean length counts."""
    b = max(call.layout.sequences, 1)
    rows = -(-call.q.shape[0] * call.q.shape[2] * call.group // b)
    return max(b * call.k.shape[1] * -(-rows // ITEM_ROWS), 1)


def most_splits(call: Call) -> int:
    """How many parts there are keys for; one of 8-bit keys, and of whatever is not in pages."""
    layout = call.layout
    if not isinstance(layout, Paged) or layout.num_splits is not None or call.descale is not None:
        return 1
    return max(1, min(MAX_SPLITS, layout.capacity(call.k.shape[2]) // LEAST_KEYS))


def key_splits(call: Call, processors: int) -> int:
    """The number of parts with which all multiprocessors end soonest, if each works on one part of one item at a
    time."""
    most = most_splits(call)
    if most == 1:  # as of all layouts that have no sequences
        return 1
    items = work_items(call)
    keys = call.layout.capacity(call.k.shape[2])

    def cost(n: int) -> float:
        return -(-items * n // processors) * (keys / n + START) + (MERGE * items * n if n > 1 else 0)

    return min(range(1, most + 1), key=cost)
