"""What is kept for a Call's key serves every Call of that key: kernels are compiled for nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton.language as tl
from torch import Tensor

from saccade import mask_mod, prefix, window
from saccade.backends.hopper.backward.plan import BackwardConfig, BackwardPlan
from saccade.call import Call
from saccade.masks import Mask, as_mask
from tests.gate.rows import device_mask

BOUNDS = [(None, 0), (None, 7), (7, None), (7, 0), (0, 0), (30, 5)]
WINDOWS = [window(*bounds) for bounds in BOUNDS]
LATE = mask_mod(lambda b, h, q_idx, kv_idx: kv_idx > q_idx)
MASKS: list[Mask | None] = [
    None,
    *WINDOWS,
    *(prefix(20) & mask for mask in WINDOWS),
    *(prefix(20) | mask for mask in WINDOWS),
    *((prefix(20) & mask) | (prefix(9) & other) for mask in WINDOWS for other in WINDOWS[1:3]),
    *(LATE & mask for mask in WINDOWS),
    *(~mask for mask in WINDOWS),
]


def call_of(mask: Mask | None, d: int = 64) -> Call:
    q, k, v = (torch.zeros(2, 2, s, d, dtype=torch.bfloat16) for s in (65, 70, 70))
    return Call(q, k, v, mask=as_mask(mask), scale=0.3)


def constants(x: Any) -> Any:
    """What Triton compiles for: the constants, and of everything else its type."""
    if isinstance(x, tl.constexpr):
        return x.value
    if isinstance(x, tuple):
        return type(x), tuple(map(constants, x))
    return (x.dtype, x.dim()) if isinstance(x, Tensor) else type(x)


def all_alike(made: Iterator[tuple[Any, Any]]) -> int:
    """One thing for each key, and how many keys there are."""
    known: dict[Any, Any] = {}
    for key, thing in made:
        assert known.setdefault(key, thing) == thing
    return len(known)


def test_masks_of_one_key_have_one_form() -> None:
    """A window whose keys begin at the first once ran the kernel of one whose keys end at the last."""
    problems = [call_of(mask) for mask in MASKS]
    many = all_alike((call.key, constants(device_mask(call))) for call in problems)
    assert len(WINDOWS) < many < len(MASKS)


@pytest.mark.parametrize("d", [64, 128, 256])
def test_masks_of_one_key_have_one_plan(d: int) -> None:
    def planned(call: Call) -> BackwardPlan:
        q, k, v = call.q, call.k, call.v
        return BackwardPlan.of(call, q, q, (q, k, v), 132, BackwardConfig.of(d, d))

    problems = [call_of(mask, d) for mask in MASKS]
    assert all_alike((call.key, planned(call)) for call in problems) > len(WINDOWS)


def test_bounds_are_not_in_the_key() -> None:
    assert call_of(window(7, None)).key == call_of(window(9, 4)).key
    assert call_of(prefix(3) & window(7, None)).key == call_of(prefix(4) & window(0, 0)).key
    assert call_of(window(7, None)).key != call_of(window(None, 7)).key
