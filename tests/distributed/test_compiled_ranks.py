"""Calls over ranks under torch.compile are those that are not compiled, whatever was compiled before."""

from __future__ import annotations

import functools
import os
import time
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch

from saccade import Packed, ScoreMod, alibi, attention, causal, mask_mod, relative_bias
from saccade.distributed import plan
from tests.support.inductor import knows_this_processor
from tests.support.mapped_files import mapped_files
from tests.support.ranks import mesh_of

HERE = str(Path(__file__))
LENGTHS = [7, 0, 13, 1, 40, 3]
WAYS = [("gather", 2), ("ulysses", 2), ((4, 2), 8)]
"""A method or a mesh, and how many ranks: of a mesh all processes, which make its groups."""


def made(group, way, lengths=LENGTHS):
    """A plan by a method, or over a mesh whose last dimension divides heads."""
    if isinstance(way, tuple):
        return plan(lengths, mesh_of(way), mask=causal(), heads=(4, 2))
    return plan(lengths, group, mask=causal(), method=way, heads=(4, 2))


def functions():
    """Of the head, in the ways in which one writes them."""
    slopes, table = torch.tensor([0.5, -0.25, 0.1, 0.9]), torch.linspace(-1, 1, 36).view(4, 9)

    class Object(torch.nn.Module):
        def forward(self, score, b, h, q_idx, kv_idx):
            return score * (1 + 0.1 * h) + table[h, kv_idx % 9]

    def with_factor(score, b, h, q_idx, kv_idx, *, factor):
        return score + factor * slopes[h] * (kv_idx - q_idx)

    return {
        "closure": lambda score, b, h, i, j: score + slopes[h] * (j - i),
        "head": lambda score, b, h, i, j: score * (1 + 0.1 * h),
        "captured": ScoreMod(lambda score, b, h, i, j, t: score + t[h, j % 9], table),
        "alibi": alibi(slopes),
        "relative_bias": relative_bias(table),
        "partial": functools.partial(with_factor, factor=0.5),
        "object": Object(),
    }


def of_the_head(group, way, name, backend):
    """How far a call is from that of one process: not compiled, and compiled."""
    function = functions()[name]
    torch._dynamo.reset()
    torch.manual_seed(1)
    whole = [torch.randn(sum(LENGTHS), h, 16, dtype=torch.float64) for h in (4, 2, 2)]
    right = attention(*whole, mask=causal(), score_mod=function, layout=Packed.from_lengths(LENGTHS))
    here = made(group, way)
    given = [here.shard(x).requires_grad_() for x in whole]
    # aot_eager takes no operation apart, so that results are equal.
    compiled = torch.compile(attention, backend=backend, fullgraph=True)
    outs = [run(*given, mask=causal(), score_mod=function, context=here) for run in (attention, compiled)]
    gradients = [torch.autograd.grad(out.square().sum(), given) for out in outs]
    worst = max(float((x - y).abs().max()) for x, y in zip(*gradients, strict=True))
    return [float((out - here.shard(right)).abs().max()) for out in outs] + [worst]


@pytest.mark.rare
@pytest.mark.slow
@pytest.mark.sample
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("name", ["closure", "head", "captured", "alibi", "relative_bias", "partial", "object"])
def test_score_functions_of_the_head(pool, way, name):
    method, ranks = way
    found = pool.run((HERE, "of_the_head"), ranks, method, name, "aot_eager")
    assert max(map(max, found)) < 1e-12


def masked(group):
    seen = torch.arange(64) % 3 != 1
    mask = causal() & mask_mod(lambda b, h, i, j: seen[j] | (i == j))
    here, whole = made(group, "ulysses"), [torch.randn(64, h, 16, dtype=torch.float64).cos() for h in (4, 2, 2)]
    torch._dynamo.reset()
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)
    outs = [run(*map(here.shard, whole), mask=mask, context=here) for run in (attention, compiled)]
    return float((outs[0] - outs[1]).abs().max())


def test_mask_functions(pool):
    assert max(pool.run((HERE, "masked"), 2)) < 1e-12


def several_rolls(group):
    """Of one plan, and of one after the other in one function."""
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda p, x: (p.roll(x, -1), p.roll(x, -2), p.roll(x, -1)), backend="aot_eager", fullgraph=True
    )
    same = []
    for lengths in (LENGTHS, [64], [30, 34], [20, 44]):
        here = made(group, "gather", lengths)
        x = here.shard(torch.arange(sum(lengths)))
        right = here.roll(x, -1), here.roll(x, -2), here.roll(x, -1)
        same += [torch.equal(a, b) for a, b in zip(compiled(here, x), right, strict=True)]
    return all(same)


def test_several_rolls_are_one_graph(pool):
    assert all(pool.run((HERE, "several_rolls"), 2))


def other_plans(group, way):
    """A function that meets plans of several documents, and of one."""
    torch._dynamo.reset()
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)
    worst = 0.0
    for lengths in ([32, 32], [10, 20, 34], [64], [44, 20]):
        here = made(group, way, lengths)
        given = [here.shard(torch.randn(64, h, 16, dtype=torch.float64).cos()) for h in (4, 2, 2)]
        outs = [run(*given, mask=causal(), context=here) for run in (attention, compiled)]
        worst = max(worst, float((outs[0] - outs[1]).abs().max()))
    return worst


@pytest.mark.rare
@pytest.mark.slow
@pytest.mark.parametrize("way", ["gather", "ulysses"])
def test_other_plans(pool, way):
    assert max(pool.run((HERE, "other_plans"), 2, way)) < 1e-12


def dropped(group, way):
    torch._dynamo.reset()
    here, outs = made(group, way), []
    given = [here.shard(torch.ones(64, h, 16, dtype=torch.float64)) for h in (4, 2, 2)]
    for run in (attention, torch.compile(attention, backend="aot_eager", fullgraph=True)):
        torch.manual_seed(5)
        outs.append(run(*given, mask=causal(), dropout_p=0.5, context=here))
    return torch.equal(*outs), float(outs[0].std()) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("way", ["gather", "ulysses"])
def test_dropout_is_in_the_graph(pool, way):
    assert pool.run((HERE, "dropped"), 2, way) == [(True, True)] * 2


def by_inductor(group, method, lengths, folder):
    """How far a compiled layer and its gradients are from the same one that is not, when a rank compiles after another
    with one folder of graphs."""
    torch._dynamo.reset()
    knows_this_processor()
    own_folder = mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder)
    with own_folder, mapped_files() if method == "pull" else nullcontext():
        here = plan(lengths, group, mask=causal(), method=method, timeout=200)
        given = [torch.randn(here.rows, 2, 16, dtype=torch.float64).requires_grad_() for _ in range(3)]

        def layer(q, k, v):
            return 2 * attention(q * 2, k * 2, v * 2, mask=causal(), context=here)

        end = time.monotonic() + 60
        while group.rank() and not [*Path(folder).glob("fxgraph/*/*")] and time.monotonic() < end:
            time.sleep(0.1)
        differences = []
        for run in (torch.compile(layer, fullgraph=True), layer):
            out = run(*given)
            differences.append([out, *torch.autograd.grad(out.square().sum(), given)])
        return max(float((x - y).detach().abs().sum()) for x, y in zip(*differences, strict=True))


@pytest.mark.rare
@pytest.mark.slow
@pytest.mark.parametrize(("method", "lengths"), [("pull", [64]), ("pull", [1]), ("gather", [1])], ids=str)
def test_by_inductor(pool, method, lengths, tmp_path):
    """Graphs on disk are of exchanges with the same sizes; and a rank without rows is in every exchange, though its
    graph reads nothing of them."""
    assert max(pool.run((HERE, "by_inductor"), 2, method, lengths, str(tmp_path), seconds=280)) < 1e-12
