"""Ten thousand random steps of decoding on a GPU, as many parts as the heuristic takes; a handful on a CPU."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from saccade import Paged, append_kv, attention, causal, softcap, window
from saccade.testing import check
from saccade.testing.accuracy import worst_row_error

H_Q, H_K, D = 8, 2, 64
CHECKED = 500
"""One in so many steps, of batches that are not large, is checked with all that the tolerance policy has."""


class World(NamedTuple):
    """What does not change, so that few kernels are compiled."""

    page_size: int
    width: int
    """Pages of a sequence, at most."""
    batches: tuple[int, ...]
    left: int | None
    cap: float | None
    sink: bool


WORLDS = {
    "plain": World(16, 100, (1, 5, 24), None, None, False),
    "window and sink": World(64, 25, (2, 24), 300, None, True),
    "single rows": World(1, 1100, (3, 17), None, 5.0, True),
    "many": World(8, 33, (140,), 100, None, False),  # too many for parts
}


class Step:
    """One draw: caches whose rows are NaN but those in use, tables that end in pages that are not there, requests that
    only fill up the batch, and one more token for each of the others."""

    def __init__(self, world: World, b: int, pool: Tensor) -> None:
        size, width, device = world.page_size, world.width, pool.device
        pages, capacity = pool.shape[1], world.page_size * world.width
        position = torch.arange(capacity, device=device)
        active = torch.rand(b, device=device) < 0.9
        self.before = torch.randint(0, capacity, (b,), device=device) * active
        self.after = self.before + active
        mine = torch.randperm(pages, device=device)[: b * width].view(b, width)
        rows = mine.repeat_interleave(size, 1) * size + position % size
        absent = torch.tensor([-1, pages, 1 << 30], device=device)[torch.arange(width, device=device) % 3]
        mapped = torch.arange(width, device=device) * size < self.after[:, None]
        self.table = torch.where(mapped, mine, absent).int()
        self.in_use, behind = (self._marked(pages * size, rows, position, n) for n in (self.after, self.before))
        self.k, self.v = pool.masked_fill(~behind.view(pages, size, 1, 1), torch.nan)
        self.new = torch.randn(2, b, 1, H_K, D, device=device, dtype=pool.dtype)
        self.q = torch.randn(b, 1, H_Q, D, device=device, dtype=pool.dtype)
        last = torch.where(active, self.before, 0)[:, None]
        self.last, self.active = rows.gather(1, last)[:, 0], active

    def _marked(self, n: int, rows: Tensor, position: Tensor, lengths: Tensor) -> Tensor:
        marks = torch.zeros(n + 1, dtype=torch.bool, device=rows.device)
        marks[torch.where(position < lengths[:, None], rows, n).flatten()] = True
        return marks[:n]

    def append(self) -> Tensor:
        """Whether the new rows, and they alone, are where they belong."""
        append_kv(self.k, self.v, Paged(self.table, self.before), *self.new)
        right = []
        for cache, new in zip((self.k, self.v), self.new, strict=True):
            found = cache.flatten(0, 1)
            right.append((found.isfinite().all(-1).all(-1) == self.in_use).all())
            right.append(torch.where(self.active[:, None, None], found[self.last] == new[:, 0], True).all())
        return torch.stack(right).all()


@pytest.mark.slow
@pytest.mark.parametrize(("torch_device", "steps"), [("cpu", 5), pytest.param("cuda", 2500, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", WORLDS)
def test_random_steps(name, torch_device, steps):
    world = WORLDS[name]
    pages = max(world.batches) * world.width + 3
    pool = torch.randn(2, pages, world.page_size, H_K, D, device=torch_device).bfloat16()
    left, of_scores = world.left, torch.finfo(torch.float16).eps  # a GPU's tanh has so many bits
    keywords = {
        "mask": causal() if left is None else window(left, 0),
        "score_mod": None if world.cap is None else softcap(world.cap),
        "sink": torch.randn(H_Q, device=torch_device) if world.sink else None,
    }
    ratios, appended = [], []
    for i in range(steps):
        step = Step(world, world.batches[i % len(world.batches)], pool)
        appended.append(step.append())
        given = {**keywords, "layout": Paged(step.table, step.after)}
        tensors = step.q, step.k, step.v
        found = attention(*tensors, **given, return_lse=True)
        exact = attention(*(x.float() for x in tensors), **given, return_lse=True, backend="reference")
        lse = worst_row_error(found.lse[..., None], exact.lse[..., None], of_scores, 1.0)
        ratios.append(torch.stack([worst_row_error(found.out, exact.out, torch.finfo(torch.bfloat16).eps), lse]))
        if i % CHECKED == 0 and len(step.q) < 100:
            check(*tensors, **given).assert_ok()
    assert torch.stack(appended).all()
    worst = torch.stack(ratios).amax(1)
    assert (worst <= 1).all(), f"step {worst.nan_to_num(torch.inf).argmax()} of {name}: {worst.max()} of the tolerance"
