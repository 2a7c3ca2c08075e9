"""Paged caches: which calls these kernels take, by shapes; without Triton, as `explain` asks where there is none."""

from __future__ import annotations

import math

from saccade.layouts import Paged
from saccade.problem import Problem

BOX = 8
"""Rows of a page that a bulk copy brings at least: those whose places in shared memory are swizzled together."""
ITEM = 128
"""Query rows that are worked on together."""
FEW_ROWS = 64
"""Query rows of a sequence for each key head, in the mean, up to which memory decides: not this kernel's business."""
FEW_ITEMS = 66
"""Work below which half of an H200 would be idle, as keys are not cut into parts here. Neither has been measured."""


def refusals(problem: Problem) -> list[str]:
    """Why not, of a paged call."""
    layout, size = problem.layout, problem.k.shape[2]
    assert isinstance(layout, Paged)
    found = []
    if size % BOX:
        found.append(f"takes page sizes that are multiples of {BOX}, not {size}")
    if layout.num_splits is not None:
        found.append(f"has bits of its own and no parts of keys: not with num_splits={layout.num_splits}")
    rows, items = work(problem, layout)
    if layout.sequences and (rows <= FEW_ROWS or items < FEW_ITEMS):
        found.append(
            f"takes many query rows for pages: of a sequence and a key head more than {FEW_ROWS}, and {FEW_ITEMS} "
            f"blocks of {ITEM} of them in all, not {rows} and {items}"
        )
    return found


def work(problem: Problem, layout: Paged) -> tuple[int, int]:
    """Query rows of a sequence for each key head, in the mean, and blocks of them in all."""
    b, h_k = max(layout.sequences, 1), problem.k.shape[1]
    rows = -(-problem.q.shape[0] * problem.q.shape[2] * problem.group // b)
    return rows, b * h_k * -(-rows // ITEM)


def box_rows(page_size: int, block_k: int) -> int:
    """Rows of one bulk copy: as many as pages and tiles of keys can both be cut into."""
    return math.gcd(page_size, block_k)
