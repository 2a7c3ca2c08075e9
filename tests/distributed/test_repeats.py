"""Results and gradients of calls over ranks repeat their bits, whoever is late: by each method, on up to eight."""

from __future__ import annotations

import random
import time
from pathlib import Path

import torch

from saccade import attention, causal
from saccade.distributed import plan
from saccade.distributed.transport import Transport
from tests.support.mapped_files import MappedFiles, mapped_files
from tests.support.ranks import mesh_of

HERE = str(Path(__file__))
LENGTHS = (37, 5, 64, 18, 1, 0, 75)
METHODS = {"gather": {}, "ulysses": {}, "pull": {}, "gather 2x4": {"mesh": (2, 4)}, "pull 4x2": {"mesh": (4, 2)}}


def pytest_generate_tests(metafunc):
    """Eight ranks a few times, and fewer ranks and many times by --everything."""
    whole = metafunc.config.getoption("--everything")
    pairs = [(name, n) for name, x in METHODS.items() for n in ((8, 4, 2) if whole and not x else (8,))]
    metafunc.parametrize(("method", "ranks"), pairs)
    metafunc.parametrize("times", [100 if whole else 3])


def test_delays_change_no_bit(pool, method, ranks, times):
    assert all(pool.run((HERE, "repeated"), ranks, method, times))


def repeated(group, method, times):
    """The first call without delays, the others with some before exchanges and around barriers."""
    mesh = METHODS[method].get("mesh")
    begin, barrier, dice = Transport.begin, MappedFiles.barrier, random.Random(group.rank())

    def late():
        if dice.random() < 0.3:
            time.sleep(dice.random() * 0.004)

    def late_begin(self, *arguments):
        late()
        return begin(self, *arguments)

    def late_barrier(self, seconds=None):
        late()
        barrier(self, seconds)
        late()

    torch.manual_seed(3)
    whole = [torch.randn(sum(LENGTHS), h, 16) for h in (8, 8, 8, 8)]
    found = []
    try:
        with mapped_files():
            made = plan([*LENGTHS], mesh_of(mesh) if mesh else group, mask=causal(), method=method.partition(" ")[0])
            q, k, v, dout = (made.shard(x).requires_grad_() for x in whole)
            for _ in range(times + 1):
                out = attention(q, k, v, mask=causal(), context=made, deterministic=True)
                found.append([out.detach(), *torch.autograd.grad(out, [q, k, v], dout)])
                Transport.begin, MappedFiles.barrier = late_begin, late_barrier
    finally:
        Transport.begin, MappedFiles.barrier = begin, barrier
    return all(torch.equal(x, y) for again in found for x, y in zip(again, found[0], strict=True))
