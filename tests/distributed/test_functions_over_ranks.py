"""Score functions and masks as users write them, over ranks: results and gradients, of captured tensors too, are those
of one process. Beside each there is a sink, and dropout of the same bits."""

from __future__ import annotations

import inspect
from pathlib import Path

import torch
from torch import Tensor

from saccade import Packed, attention, causal
from saccade.distributed import plan
from saccade.scores import ScoreMod
from saccade.testing import gallery
from tests.support import scores
from tests.support.ranks import case_seed, mesh_of

EQUAL = 1e-12  # in float64, what sums in another order differ by
HERE = str(Path(__file__))
LENGTHS = [37, 5, 64, 0, 18, 1]
HEADS = 8, 4, 4


def learned(function):
    """The tensors that a function captures and that have gradients."""
    if isinstance(function, ScoreMod):
        found = list(function.tensors)
    elif inspect.ismethod(function):
        found = list(function.__self__.parameters())
    else:
        found = list(inspect.getclosurevars(function).nonlocals.values()) if inspect.isfunction(function) else []
    return [x for x in found if isinstance(x, Tensor) and x.requires_grad]


def made(score, mask):
    """q, k, v, dout, a sink, the score function and the mask, equal in all processes."""
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(5)
        operands = [torch.randn(sum(LENGTHS), h, 16) for h in (*HEADS, HEADS[0])]
        sink = torch.randn(HEADS[0]).requires_grad_()
        function = score and scores.build_score(score, HEADS[0], max(LENGTHS), max(LENGTHS), b=len(LENGTHS))
    finally:
        torch.set_default_dtype(torch.float32)
    return operands, sink, function, gallery.made(mask, max(LENGTHS), "cpu") if mask else causal()


def results(operands, dout, sink, function, mask, **keywords):
    operands = [x.detach().requires_grad_() for x in operands]
    out, lse = attention(
        *operands, mask=mask, score_mod=function, sink=sink, dropout_p=0.2, return_lse=True, **keywords
    )
    leaves = [*operands, sink, *learned(function)]
    return [out.detach(), lse.detach().T, *torch.autograd.grad(out, leaves, dout)]


def part(group, score, mask, settings):
    """One rank's rows of results and gradients, and its parts of those of what all ranks have."""
    *tensors, function, seen = made(score, mask)
    (q, k, v, dout), sink = tensors
    options = {"method": "ulysses"} if settings == "ulysses" else {}
    where = plan(LENGTHS, mesh_of((4, 2)) if settings == "mesh" else group, mask=seen, **options)
    torch.manual_seed(case_seed(group.rank()))
    found = results([where.shard(x) for x in (q, k, v)], where.shard(dout), sink, function, seen, context=where)
    return where.row_indices, found


def worst(pool, score, mask, ranks, settings):
    found = pool.run((HERE, "part"), ranks, score, mask, settings)
    (q, k, v, dout), sink, function, seen = made(score, mask)
    torch.manual_seed(case_seed(0))
    one = results([q, k, v], dout, sink, function, seen, layout=Packed.from_lengths(LENGTHS))
    assert len(one) == 6 + len(learned(function))
    differences = []
    for i, y in enumerate(one):
        x = torch.stack([values[i] for _, values in found]).sum(0) if i >= 5 else torch.full_like(y, torch.nan)
        for rows, values in found if i < 5 else ():
            x[rows] = values[i]
        assert x.dtype == torch.float64
        differences.append(torch.where(x == y, 0, (x - y).abs() / y.abs().amax().clamp(min=1)).amax())
    return float(torch.stack(differences).nan_to_num(nan=torch.inf).amax())


WAYS = [(3, "gather"), (2, "ulysses"), (8, "mesh")]
REFUSED = {("own", "ulysses"), ("own", "mesh")}
"""Derivatives of one's own, where ranks divide heads."""


def pytest_generate_tests(metafunc):
    """Some of the matrix, and all of it by --everything."""
    (name,) = {"score", "mask"}.intersection(metafunc.fixturenames)
    masks = [x for x in gallery.NAMES if x != "packed"]  # which counts rows of one process
    names, step = {"score": (scores.NAMES, 7), "mask": (masks, 9)}[name]
    whole = metafunc.config.getoption("--everything")
    pairs = [(x, way) for x in names for way in WAYS if (x, way[1]) not in REFUSED]
    metafunc.parametrize((name, "way"), pairs if whole else pairs[::step], ids=str)


def test_score_functions(pool, score, way):
    assert worst(pool, score, None, *way) <= EQUAL


def test_mask_functions(pool, mask, way):
    assert worst(pool, None, mask, *way) <= EQUAL
