"""Rows that ranks pull out of each other's memory, which on a CPU is a file that all of them map."""

from __future__ import annotations

import tempfile
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from saccade import causal
from saccade.distributed import peers, plan
from saccade.testing import Case
from saccade.testing.ranks import part

HERE = str(Path(__file__))
LENGTHS = (37, 5, 64, 18, 1, 0, 75)


class MappedFiles(peers.PeerMemory):
    def __init__(self, size, group, device):
        folder = [tempfile.mkdtemp() if group.rank() == 0 else None]
        dist.broadcast_object_list(folder, group=group, group_src=0)
        paths = [Path(folder[0]) / str(i) for i in range(group.size())]
        paths[group.rank()].write_bytes(b"\xff" * 2 * size)
        self.size, self.device, self.group, self._half = size, device, group, 0
        dist.barrier(group)
        self._buffers = [torch.from_file(str(path), shared=True, size=2 * size, dtype=torch.uint8) for path in paths]

    def begin(self, seconds=None):
        self._half ^= 1

    def barrier(self, seconds=None):
        dist.barrier(self.group)

    @contextmanager
    def beside(self):
        yield

    def apart(self):
        return nullcontext()

    def end(self, seconds=None):
        pass


def pulled(group, case, settings):
    before = peers.opened, peers.reachable
    peers.opened, peers.reachable = MappedFiles, lambda device: True
    try:
        return part(group, case, settings), part(group, case, settings | {"method": "gather"})
    finally:
        peers.opened, peers.reachable = before


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("mask", ["causal", "window(9,0)", "none"])
@pytest.mark.parametrize("order", ["thd", "bhsd"])
def test_what_is_pulled_is_what_is_gathered(pool, ranks, mask, order):
    """To the bit: the same rows, and sums in the same order."""
    shape = {"lengths": LENGTHS, "b": len(LENGTHS), "s_q": 75, "s_k": 75} if order == "thd" else {"s_q": 61, "s_k": 61}
    case = Case("", dtype="fp64", h_q=4, d=16, d_v=24, mask=mask, score="alibi", order=order, **shape)
    for (rows, mine), (same_rows, theirs) in pool.run((HERE, "pulled"), ranks, case, {"method": "pull"}):
        assert torch.equal(rows, same_rows)
        for name, x in mine.items():
            assert torch.equal(x, theirs[name]), name


def refused(group):
    with pytest.raises(ValueError, match=r"method='pull' needs GPUs that reach each other's memory.*'gather' runs"):
        plan([7, 9], group, mask=causal(), method="pull")
    return True


def test_without_gpus(pool):
    assert all(pool.run((HERE, "refused"), 2))
