"""Blocks of rows of packed sequences, as the device numbers them, against plain Python."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from saccade import Packed
from saccade.backends.device import sequences
from saccade.problem import Problem

BLOCK = 16


@triton.jit
def blocks_kernel(found, span, s, BLOCK: tl.constexpr):
    number = tl.program_id(0)
    batch, h, first, row, there, rows = sequences.block_of_rows(span, 5, number, 7, s, BLOCK)
    place = found + number * 8
    tl.store(place, batch)
    tl.store(place + 1, h)
    tl.store(place + 2, first)
    tl.store(place + 3, row)
    tl.store(place + 4, there)
    tl.store(place + 5, rows)


def found_by_kernel(offsets: list[int], t: int, used: list[int] | None) -> tuple[Any, Problem]:
    x = torch.zeros(1, 1, t, 16)
    held = None if used is None else torch.tensor(used)
    cu = torch.tensor(offsets, dtype=torch.int32)
    problem = Problem(x, x, x, None, None, None, Packed(cu, cu, t, t, held, held), 1.0)
    many = sequences.slots(problem, 0, BLOCK) + 1
    found = torch.full((many, 8), -1, dtype=torch.int32)
    blocks_kernel[(many,)](found, sequences.spans(problem)[0], t, BLOCK)
    return found.tolist(), problem


@pytest.mark.parametrize("seed", range(6))
def test_blocks_of_rows(seed: int) -> None:
    dice = random.Random(seed)
    lengths = [dice.choice([0, 0, 1, BLOCK, dice.randint(2, 3 * BLOCK)]) for _ in range(dice.choice([1, 2, 7, 20]))]
    offsets = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    used = [dice.randint(0, n) for n in lengths] if seed % 2 else None
    t = offsets[-1] + dice.choice([0, 0, 1, 50])
    found, _ = found_by_kernel(offsets, t, used)
    left = {number: rest for number, rest in enumerate(found) if rest[3] < rest[4]}
    for b, (first, stop) in enumerate(pairwise([*offsets, t])):
        for row in range(0, stop - first, BLOCK):
            rows = 0 if b == len(lengths) else (used or lengths)[b]
            assert left.pop(first // BLOCK + b + row // BLOCK)[:6] == [0, 5, first, row, stop - first, rows]
    assert not left, "blocks that are no sequence's"


def test_broken_offsets_stay_inside() -> None:
    for offsets in ([5, 100, 40], [0, 300, 10], [0, -7, 99], [90, 90, 90]):
        for _, _, first, row, there, rows, *_ in found_by_kernel(offsets, 100, None)[0]:
            assert 0 <= first <= first + there <= 100
            assert rows <= there
            assert first + row >= 0
