"""What a plan keeps serves every later call: whoever made it first, and whatever users do with what they got."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from itertools import count
from pathlib import Path
from weakref import WeakValueDictionary

import pytest
import torch

from saccade import attention, causal
from saccade.distributed import exchanges, make, plan

HERE = str(Path(__file__))
LENGTHS = [7, 12, 3, 40]
WAYS = [("gather", "balanced"), ("gather", 40), ("ulysses", "equal")]


def step(made, weight=1.0):
    """Results and gradients of all that a plan does."""
    torch.manual_seed(made.rank)
    x = torch.randn(made.rows, 4, 16, dtype=torch.float64, requires_grad=True)
    whole = torch.randn(sum(LENGTHS), 4, dtype=torch.float64, requires_grad=True)
    out = attention(x * weight, x, x, mask=causal(), context=made)
    found = [out, made.unshard(x), made.roll(x, -1), made.shard(whole) * made.position_ids[:, None]]
    gradients = torch.autograd.grad([y.square().sum() for y in found], [x, whole])
    return [*(y.detach() for y in found), *gradients, made.position_ids, made.document_ids, made.row_indices]


def same(found, right):
    return all(torch.equal(x, y) for x, y in zip(found, right, strict=True))


def after_inference(group, method, rows):
    """A step of a plan that was made, or used first, in inference mode, beside one of a new plan."""
    outcomes = []
    for inside in (False, True):
        make._plans.clear()
        if not inside:
            made = plan(LENGTHS, group, mask=causal(), method=method, rows=rows)
        with torch.inference_mode():
            made = plan(LENGTHS, group, mask=causal(), method=method, rows=rows)
            x = torch.randn(made.rows, 4, 16, dtype=torch.float64)
            attention(x, x, x, mask=causal(), context=made)
            made.unshard(x)
            made.roll(x, -1)
            assert len(made.position_ids) == len(made.document_ids) == made.rows
        assert made is plan(LENGTHS, group, mask=causal(), method=method, rows=rows)
        found = step(made)
        make._plans.clear()
        outcomes.append(same(found, step(plan(LENGTHS, group, mask=causal(), method=method, rows=rows))))
    return outcomes


@pytest.mark.parametrize(("method", "rows"), WAYS)
def test_plans_of_inference_mode_train(pool, method, rows):
    assert pool.run((HERE, "after_inference"), 2, method, rows) == [[True, True]] * 2


def copied(group, method, rows):
    """Steps of copies of a plan, which were made after its own and in place of it, beside its own."""
    made = plan(LENGTHS, group, mask=causal(), method=method, rows=rows)
    own = step(made)
    saved = pickle.dumps(made)
    # What another process made first has the names that this one's exchanges had.
    exchanges._numbers, kept = count(), exchanges._exchanges
    exchanges._exchanges = WeakValueDictionary()
    try:
        other = plan(LENGTHS[::-1], group, mask=causal(), method=method, rows=rows)
        step(other)
        return [same(step(x), own) for x in (pickle.loads(saved), copy.deepcopy(made))]
    finally:
        exchanges._numbers, exchanges._exchanges = count(1 << 20), kept
        make._plans.clear()


@pytest.mark.parametrize(("method", "rows"), WAYS)
def test_copies_of_plans(pool, method, rows):
    assert pool.run((HERE, "copied"), 2, method, rows) == [[True, True]] * 2


def after_transforms(group):
    """A step of a plan whose first user is torch.func, or works with tensors that are none."""
    same_twice = []
    for first in (torch.func.grad, torch.func.jacrev, torch.func.jacfwd, partial(torch.vmap, in_dims=2)):
        make._plans.clear()
        made = plan(LENGTHS, group, mask=causal())
        x = torch.randn(made.rows, 2, 3)

        def function(x, made=made):
            return made.roll(x, -1).sum() + made.unshard(x).sum() + made.shard(torch.ones(62)).sum()

        first(function)(x)
        found = step(made)
        make._plans.clear()
        same_twice.append(same(found, step(plan(LENGTHS, group, mask=causal()))))
    return same_twice


def test_plans_of_transforms_serve_others(pool):
    assert pool.run((HERE, "after_transforms"), 2) == [[True] * 4] * 2


def after_writes(group, method, rows):
    """Two steps, between which a user writes to all tensors of the plan."""
    made = plan(LENGTHS, group, mask=causal(), method=method, rows=rows)
    right = step(made)
    local = made.local
    for x in (made.position_ids, made.document_ids, made.row_indices, *vars(local).values()):
        if isinstance(x, torch.Tensor):
            x.zero_()
    again = plan(LENGTHS, group, mask=causal(), method=method, rows=rows)
    return again is made and same(step(again), right)


@pytest.mark.parametrize(("method", "rows"), WAYS)
def test_users_may_write_to_what_they_get(pool, method, rows):
    assert pool.run((HERE, "after_writes"), 2, method, rows) == [True] * 2


def compiled(group, method, rows):
    """A step of rows, labels and positions as one graph, which is the first to need them."""
    make._plans.clear()
    made = plan(LENGTHS, group, mask=causal(), method=method, rows=rows, heads=4)

    def inputs(whole, made):
        x = made.shard(whole)
        return x * 2, made.roll(x, -1), made.unshard(x), made.position_ids, made.document_ids, made.row_indices

    whole = torch.randn(sum(LENGTHS), 3)
    return same(torch.compile(inputs, backend="aot_eager", fullgraph=True)(whole, made), inputs(whole, made))


@pytest.mark.parametrize(("method", "rows"), WAYS)
def test_rows_labels_and_positions_compile_as_one_graph(pool, method, rows):
    assert pool.run((HERE, "compiled"), 2, method, rows) == [True] * 2


def compiled_without_heads(group):
    made = plan(LENGTHS, group, mask=causal(), method="ulysses")
    x = torch.randn(made.rows, 4, 16)
    layer = torch.compile(lambda x: attention(x, x, x, mask=causal(), context=made), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"pass plan\(…, heads=\(h_q, h_k\)\)"):
        layer(x)
    return True


def test_compiling_needs_the_heads_that_ranks_divide(pool):
    assert pool.run((HERE, "compiled_without_heads"), 2) == [True] * 2


def test_default_devices_do_not_matter():
    with torch.device("meta"):
        made = plan([3, 5], 2, rank=1, rows=5)
        assert made.position_ids.tolist() == [0, 2, 3, 4, 0]
        assert made.document_ids.tolist() == [0, 1, 1, 1, -1]
        assert made.local.q_offset.device.type == "cpu"
