"""Keys that come while the kernel runs: none is read before, whoever runs when, and kernels that do are noticed."""

# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from saccade import Packed, attention, causal, ops
from saccade.backends.hopper.forward import load
from saccade.backends.hopper.ptx import wait_for_copies
from saccade.call import check_call
from saccade.call.call import ArrivalArgs, Arrivals
from saccade.distributed import arriving, plan
from tests.emulator import emulated, inline_asm

LENGTHS, RANKS, HEADS = (300, 40, 0, 500, 7), 3, (4, 2)


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(arriving, "COPY_BYTES", 1)
    yield
    inline_asm.engine.bring = lambda number: None


def farthest(rank: int, seed: int, d: int = 64) -> float:
    """Of one rank's results from those of one process; its keys of others are NaN until they have come."""
    torch.manual_seed(seed)
    rows = sum(LENGTHS)
    q, k, v = (torch.randn(rows, h, d).bfloat16() for h in (HEADS[0], HEADS[1], HEADS[1]))
    made = plan([*LENGTHS], RANKS, rank=rank, mask=causal(), method="pull")
    others = [plan([*LENGTHS], RANKS, rank=i, mask=causal(), method="pull") for i in range(RANKS)]
    exchange = made.arriving
    assert exchange is not None
    layouts, (steps, needed) = exchange.layouts(q.device), exchange.steps(HEADS[1], 4 * d, q.device)
    both = torch.full((exchange.needed, HEADS[1], 2 * d), torch.nan).bfloat16()
    here = [both] * (len(layouts.slots) - 1)
    arriving._spread(made.shard(k), made.shard(v), [*here, torch.zeros_like(both)], layouts.slots)
    done, brought = torch.zeros(1, dtype=torch.int32), []

    def bring(number: int) -> None:
        while len(brought) < number:
            i, first, stop = steps[len(brought)]
            for owner, (source, target, n) in exchange.of_piece[i]:
                for at, x in ((0, k), (d, v)):
                    found = others[owner].shard(x)[source : source + n, first:stop]
                    both[target : target + n, first:stop, at : at + d] = found
            brought.append(number)
            done.fill_(len(brought))

    inline_asm.engine.bring = bring
    with emulated(seed):
        call = check_call(made.shard(q), both[..., :d], both[..., d:], mask=causal(), layout=layouts.whole)
        arrivals = Arrivals(ArrivalArgs(done, needed, layouts.coming), lambda: None)
        out = ops.execute(call, "gluon", True, arrivals=arrivals)[0]
    whole = attention(q, k, v, mask=causal(), layout=Packed.from_lengths([*LENGTHS]), backend="reference")
    return float((out - made.shard(whole)).abs().max().nan_to_num(nan=torch.inf))


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("d", [64, 128])
def test_ranks(rank: int, d: int) -> None:
    assert farthest(rank, rank, d) < 0.02


@gluon.jit
def no_wait(arrivals, tile):
    pass


@gluon.jit
def a_step_early(arrivals, tile):
    step = gl.load(arrivals.steps + tile.offset)
    if step > 1:
        wait_for_copies(arrivals.done, step - 1)


@gluon.jit
def of_another_head(arrivals, tile):
    step = gl.load(arrivals.steps + tile.offset - tile.h_k)
    if step > 0:
        wait_for_copies(arrivals.done, step)


@gluon.jit
def a_tile_late(args, tile, BLOCK_K: gl.constexpr):
    coming = gl.load(args.arrivals.coming + tile.offset // args.h_k)
    return gl.maximum(tile.hi - coming // BLOCK_K, 0)


WRONG = {"wait_for_keys": (no_wait, a_step_early, of_another_head), "tiles_there": (a_tile_late,)}


@pytest.mark.parametrize(("name", "wrong"), [(name, wrong) for name, all_ in WRONG.items() for wrong in all_], ids=str)
def test_wrong_waits_are_noticed(name: str, wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, name, wrong)
    assert max(farthest(rank, rank) for rank in range(RANKS)) > 0.02
