"""Paged caches: which calls these kernels take; plain of Triton, as `explain` asks without it."""

from __future__ import annotations

import math

from saccade.layouts import Paged
from saccade.problem import Problem

BOX = 8
"""Rows that a bulk copy of keys brings at least: those whose places in shared memory are swizzled together."""
FEW_ROWS = 64
"""Query rows of a sequence and a key head, in the mean, up to which memory decides, and the kernel for it is another."""
FEW_ITEMS = 66
"""Blocks of 128 such rows below which half of an H200 would be idle, as keys are not cut into parts here."""


def refusals(problem: Problem) -> list[str]:
    """Why not, of a paged call: by shapes alone."""
    layout, size = problem.layout, problem.k.shape[2]
    assert isinstance(layout, Paged)
    found = []
    if size % BOX:
        found.append(f"takes page sizes that are multiples of {BOX}, not {size}")
    if layout.num_splits is not None:
        found.append(f"cuts no keys into parts, and has other bits than who does: not with num_splits={layout.num_splits}")
    rows, items = work(problem, layout)
    if layout.sequences and (rows <= FEW_ROWS or items < FEW_ITEMS):
        found.append(
            f"is for many query rows: more than {FEW_ROWS} of a sequence and a key head, of all {FEW_ITEMS} blocks of "
            f"{ITEM}, not {rows} and {items}"
        )
    return found


ITEM = 128


def work(problem: Problem, layout: Paged) -> tuple[int, int]:
    """Query rows of a sequence and all heads that share keys, in the mean, and blocks of ITEM of them."""
    b, h_k = max(layout.sequences, 1), problem.k.shape[1]
    rows = -(-problem.q.shape[0] * problem.q.shape[2] * problem.group // b)
    return rows, b * h_k * -(-rows // ITEM)


def box_rows(page_size: int, block_k: int) -> int:
    """Rows of one bulk copy: as many as a page and a tile of keys hold together."""
    return math.gcd(page_size, block_k)
