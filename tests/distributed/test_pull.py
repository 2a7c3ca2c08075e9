"""Rows that ranks pull out of each other's memory, which on a CPU is a file that all of them map."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch.autograd import forward_ad

from saccade import Packed, attention, causal, window
from saccade.distributed import plan
from saccade.testing import Case
from saccade.util.arguments import Unsupported
from tests.support import ranks
from tests.support.mapped_files import mapped_files
from tests.support.ranks import part

HERE = str(Path(__file__))
EQUAL = 1e-12
LENGTHS = (37, 5, 64, 18, 1, 0, 75)


def with_files(group, name, *arguments):
    """What a function here returns, by the memory of files."""
    with mapped_files():
        return globals()[name](group, *arguments)


def pulled(group, case, settings):
    return part(group, case, settings), part(group, case, settings | {"method": "gather"})


@pytest.mark.sample
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("mask", ["causal", "window(9,0)", "none"])
@pytest.mark.parametrize("order", ["thd", "bhsd"])
def test_what_is_pulled_is_what_is_gathered(pool, ranks, mask, order):
    """To the bit: the same rows, and sums in the same order."""
    shape = {"lengths": LENGTHS, "b": len(LENGTHS), "s_q": 75, "s_k": 75} if order == "thd" else {"s_q": 61, "s_k": 61}
    case = Case("", dtype="fp64", h_q=4, d=16, d_v=24, mask=mask, score="alibi", order=order, **shape)
    for (rows, mine), (same_rows, theirs) in pool.run((HERE, "with_files"), ranks, "pulled", case, {"method": "pull"}):
        assert torch.equal(rows, same_rows)
        for name, x in mine.items():
            assert torch.equal(x, theirs[name]), name


@pytest.mark.sample
@pytest.mark.parametrize(
    ("ranks", "mask", "rows"),
    [
        (1, "causal", "balanced"),
        (2, "causal", "balanced"),
        (3, "causal", "balanced"),
        (8, "causal", "balanced"),
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
    settings = {"method": "pull", "rows": rows}
    for (_, mine), (_, theirs) in pool.run((HERE, "with_files"), ranks, "pulled", case, settings):
        for name, x in mine.items():
            assert float(torch.where(x == theirs[name], 0, x - theirs[name]).abs().amax()) <= EQUAL, name


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("keys", ["keys_exchange", "pieces_exchange", "arriving"])
def test_tables_of_sums(ranks, keys):
    """What the kernel adds up by is what `summed` does."""
    for rank in range(ranks):
        made = plan(list(LENGTHS), ranks, rank=rank, mask=causal(), method="pull")
        assert made.by_pieces
        exchange = made.arriving if keys == "arriving" else getattr(made, keys)()
        for places in (exchange._there, exchange._back):
            ranks_rows = [torch.randn(exchange.most, 3).double() for _ in range(ranks)]
            table, layers = places.table(ranks_rows[0].device)
            total = torch.zeros(places.rows, 3).double()
            for i, rows in zip(layers, table, strict=True):
                there = rows >= 0
                total[there] += ranks_rows[i][rows[there]]
            assert torch.equal(total, places.of(ranks_rows))


def of_others(group, name, *arguments):
    """A test's work of the other methods."""
    others = ranks._module(str(Path(__file__).with_name("test_attention_over_ranks.py")))
    return getattr(others, name)(group, *arguments)


def test_checkpointing(pool):
    assert all(pool.run((HERE, "with_files"), 3, "of_others", "recomputed", "pull"))


def test_compiles_as_one_graph(pool):
    assert pool.run((HERE, "with_files"), 2, "of_others", "compiled", "pull") == [(True, 2)] * 2


def test_batches_of_calls_and_of_gradients(pool):
    assert max(pool.run((HERE, "with_files"), 2, "of_others", "mapped", "pull")) <= EQUAL


def pytest_generate_tests(metafunc):
    """Some seeds, and many by --everything."""
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(1000, 1200 if metafunc.config.getoption("--everything") else 1008))


def random_step(group, seed):
    others = ranks._module(str(Path(__file__).with_name("test_random_calls.py")))
    return others.part(group, seed, "pull")


def test_random_steps(pool, seed):
    others = ranks._module(str(Path(__file__).with_name("test_random_calls.py")))
    difference = others.difference(pool, seed, (HERE, "with_files"), "random_step")
    assert difference <= EQUAL, others.drawn(seed)


def refused(group):
    with pytest.raises(ValueError, match=r"method='pull' needs GPUs that reach each other's memory.*'gather' runs"):
        plan([7, 9], group, mask=causal(), method="pull")
    return True


def test_without_gpus(pool):
    assert all(pool.run((HERE, "refused"), 2))


def twice(group):
    """A backward that keeps its graph, and one more."""
    made = plan(list(LENGTHS), group, mask=causal(), method="pull")
    leaves = [made.shard(torch.randn(sum(LENGTHS), 2, 16, dtype=torch.float64)).requires_grad_() for _ in range(3)]
    out = attention(*leaves, mask=causal(), context=made)
    first, again = (torch.autograd.grad(out.sum(), leaves, retain_graph=True) for _ in range(2))
    with torch.no_grad():  # nothing is kept
        same = attention(*leaves, mask=causal(), context=made)
    return torch.equal(same, out) and all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


def test_backward_repeats(pool):
    assert all(pool.run((HERE, "with_files"), 3, "twice"))


def whole(heads=2):
    torch.manual_seed(0)
    return [torch.randn(40, heads, 8, dtype=torch.float64) for _ in range(3)]


def hides_earlier(group):
    here = plan([25, 15], group, mask=causal(), method="pull")
    mask, layout = causal() & ~window(3, 0), Packed.from_lengths([25, 15])
    out = attention(*map(here.shard, whole()), mask=mask, context=here)
    return float((out - here.shard(attention(*whole(), mask=mask, layout=layout))).abs().max())


def test_masks_that_hide_earlier_keys(pool):
    """The keys of others come first in causal calls, which is their order where rows see all before them."""
    assert max(pool.run((HERE, "with_files"), 3, "hides_earlier")) < EQUAL


def other_derivatives(group):
    """A tangent and a second derivative by the reference beside one process's, and what else says of them."""
    here, layout = plan([25, 15], group, mask=causal(), method="pull"), Packed.from_lengths([25, 15])
    given, tangents = whole(), [x.sin() for x in whole()]

    def tangent(operands, directions, **keywords):
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(x, t) for x, t in zip(operands, directions, strict=True)]
            return forward_ad.unpack_dual(attention(*duals, mask=causal(), **keywords)).tangent

    def second(operands, **keywords):
        leaves = [x.detach().requires_grad_() for x in operands]
        out = attention(*leaves, mask=causal(), **keywords)
        first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        return torch.cat(torch.autograd.grad(sum(x.square().sum() for x in first), leaves))

    def refusal(derivative, *operands):
        with pytest.raises(Unsupported, match="first derivatives"), warnings.catch_warnings(action="error"):
            derivative(*operands, context=here)

    mine, own = ([here.shard(x) for x in xs] for xs in (given, tangents))
    found = tangent(mine, own, context=here, backend="reference"), second(mine, context=here, backend="reference")
    right = (
        tangent(given, tangents, layout=layout, backend="reference"),
        second(given, layout=layout, backend="reference"),
    )
    refusal(tangent, mine, own)
    refusal(second, mine)
    rows = torch.cat([40 * i + here.row_indices for i in range(3)])
    return [float((found[0] - here.shard(right[0])).abs().max()), float((found[1] - right[1][rows]).abs().max())]


def test_derivatives_besides_a_backward(pool):
    assert max(map(max, pool.run((HERE, "with_files"), 2, "other_derivatives"))) < 1e-11


def nothing(group):
    shapes = []
    for lengths, heads in (([], 2), ([0, 0], 2), ([25, 15], 0)):
        here = plan(lengths, group, mask=causal(), method="pull")
        x = torch.zeros(here.rows, heads, 8)
        shapes.append(tuple(attention(x, x, x, mask=causal(), context=here).shape))
    return shapes


def test_no_documents_and_no_heads(pool):
    for shapes, rows in zip(pool.run((HERE, "with_files"), 2, "nothing"), (20, 20), strict=True):
        assert shapes == [(0, 2, 8), (0, 2, 8), (rows, 0, 8)]


def without_gradients(group):
    here = plan([25, 15], group, mask=causal(), method="pull")
    operands = [here.shard(x).requires_grad_() for x in whole()]
    with pytest.raises(RuntimeError, match="different exchanges") as error, torch.set_grad_enabled(group.rank() == 0):
        attention(*operands, mask=causal(), context=here)
    return str(error.value)


def test_one_rank_without_gradients(pool):
    """Which would not come to the backward."""
    assert all("with gradients" in text for text in pool.run((HERE, "with_files"), 2, "without_gradients"))
