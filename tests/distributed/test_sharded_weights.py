"""FSDP2 and DDP beside a plan, on meshes of data × context: losses, gradients and steps are those of one process."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from saccade import Packed, attention, causal
from saccade.distributed import plan

EQUAL = 1e-12  # in float64, what sums in another order differ by
HERE = str(Path(__file__))
BATCHES = [37, 5, 18, 1, 44], [50, 2, 53], [3, 90, 12], [105]
"""Documents of a batch for each row of the mesh, as many rows each."""


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(32, 32)
        self.sink = nn.Parameter(torch.zeros(4))

    def forward(self, x, where):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (8, 8)).split((4, 2, 2), dim=1)
        return x + self.out(attention(q, k, v, mask=causal(), sink=self.sink, **where).flatten(1))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(32, 5)

    def forward(self, x, where):
        for block in self.blocks:
            x = block(x, where)
        return self.head(x)


@cache
def meshes():
    """Of data × context, and the same ranks in a line."""
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("data", "context"))
    return mesh, mesh["data", "context"]._flatten("all")


def sharded(model, group, how):
    if how == "ddp":
        return DistributedDataParallel(model, process_group=group)
    mesh, line = meshes()
    options = {"mesh": line if how == "fsdp" else mesh}  # or shards within a plan's ranks, copies beside them
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def whole(x):
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def worst(group, how, steps):
    """The largest difference of losses, gradients and weights, over some steps."""
    mesh, _ = meshes()
    torch.manual_seed(2)
    one = Model().double()
    model = sharded(deepcopy(one), group, how)
    optimizers = [torch.optim.SGD(x.parameters(), lr=0.1) for x in (one, model)]
    xs, ys, differences = torch.randn(4, 105, 32, dtype=torch.float64), torch.randint(5, (4, 105)), []
    row = mesh.get_local_rank("data")
    mine = plan(BATCHES[row], mesh["context"], mask=causal())
    for _ in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        logits = model(mine.shard(xs[row]), {"context": mine})
        loss = nn.functional.cross_entropy(logits, mine.shard(ys[row]), reduction="sum") / ys.numel()
        (loss * group.size()).backward()  # as both take the mean over ranks
        total = loss.detach().clone()
        torch.distributed.all_reduce(total, group=group)
        alone = 0.0
        for x, y, lengths in zip(xs, ys, BATCHES, strict=True):
            part = one(x, {"layout": Packed.from_lengths(lengths)})
            alone += nn.functional.cross_entropy(part, y, reduction="sum") / ys.numel()
        alone.backward()
        differences.append(total - alone.detach())
        pairs = list(zip(model.parameters(), one.parameters(), strict=True))
        differences += [whole(a.grad) - b.grad for a, b in pairs]
        for optimizer in optimizers:
            optimizer.step()
        differences += [whole(a.detach()) - b.detach() for a, b in pairs]
    return max(float(x.abs().max()) for x in differences)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["fsdp", "hybrid", "ddp"])
def test_weights_over_a_mesh(pool, how):
    assert max(pool.run((HERE, "worst"), 8, how, 2)) <= EQUAL
