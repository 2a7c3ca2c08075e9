"""Rows that ranks pull out of each other's memory, which on a CPU is a file that all of them map."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from saccade import causal
from saccade.distributed import peers, plan
from saccade.testing import Case, ranks
from saccade.testing.ranks import part

HERE = str(Path(__file__))
EQUAL = 1e-12
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

    def copied(self, copies):
        copies()

    def end(self, event, seconds=None):
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


@pytest.mark.parametrize(
    ("ranks", "mask", "rows"),
    [
        (1, "causal", "balanced"),
        (2, "causal", "pairs"),
        (3, "window(9,0)", "balanced"),
        (8, "causal", 31),
        (8, "window(9,0)", "balanced"),
        (2, "window(9,0)|causal", "pairs"),
        (3, "causal", 83),
    ],
)
def test_pieces_are_sequences(pool, ranks, mask, rows):
    """Where positions are not needed: the same rows, and sums in another order."""
    lengths = (48, 96, 48) if rows == "pairs" else LENGTHS
    case = Case(
        "", dtype="fp64", h_q=4, h_k=2, d=16, mask=mask, order="thd", lengths=lengths, b=len(lengths), sink=True
    )
    case = case.replace(s_q=max(lengths), s_k=max(lengths))
    for (_, mine), (_, theirs) in pool.run((HERE, "pulled"), ranks, case, {"method": "pull", "rows": rows}):
        for name, x in mine.items():
            assert float(torch.where(x == theirs[name], 0, x - theirs[name]).abs().amax()) <= EQUAL, name


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("of_pieces", [False, True])
def test_tables_of_sums(ranks, of_pieces):
    """What the kernel adds up by is what `summed` does."""
    for rank in range(ranks):
        made = plan(list(LENGTHS), ranks, rank=rank, mask=causal(), method="pull")
        assert made.by_pieces
        exchange = made.pieces_exchange() if of_pieces else made.keys_exchange()
        dy, returned = torch.randn(exchange.needed, 3).double(), torch.randn(sum(exchange.sent_rows), 3).double()
        table, first, stop = exchange._table(dy.device)
        total = torch.zeros(made.rows, 3).double()
        for i, places in enumerate(table):
            there = places >= 0
            total[there] += (dy if first <= i < stop else returned)[places[there]]
        assert torch.equal(total, exchange._added(dy, returned))


def of_pull(group, name, *arguments):
    """A test's work of the other methods."""
    others = ranks._module(str(Path(__file__).with_name("test_attention_over_ranks.py")))
    before = peers.opened, peers.reachable
    peers.opened, peers.reachable = MappedFiles, lambda device: True
    try:
        return getattr(others, name)(group, *arguments)
    finally:
        peers.opened, peers.reachable = before


def test_checkpointing(pool):
    assert all(pool.run((HERE, "of_pull"), 3, "recomputed", "pull"))


def test_compiles_as_one_graph(pool):
    assert pool.run((HERE, "of_pull"), 2, "compiled", "pull") == [(True, 2)] * 2


def refused(group):
    with pytest.raises(ValueError, match=r"method='pull' needs GPUs that reach each other's memory.*'gather' runs"):
        plan([7, 9], group, mask=causal(), method="pull")
    return True


def test_without_gpus(pool):
    assert all(pool.run((HERE, "refused"), 2))
