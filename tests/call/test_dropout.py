"""Dropout: its numbers, their place in the formula, and that every pass and every way of calling draws the same."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from saccade import attention, causal, explain, merge
from saccade.call.dropout import Dropout

STANDARD_ERRORS = 5
"""How far a mean may lie from what is expected: once in two million draws it does by chance."""
SHAPE = 3, 4, 256, 320


def drawn(p: float, seed: int = 0, offset: int = 0) -> Tensor:
    b, h, s_q, s_k = SHAPE
    state = torch.tensor([seed, offset])
    return Dropout(state, p).keep(torch.arange(b), torch.arange(h), slice(0, s_q), slice(0, s_k))


def as_expected(found: Tensor, mean: float) -> None:
    """Independent zeros and ones of this mean."""
    error = math.sqrt(mean * (1 - mean) / found.numel())
    assert abs(found.double().mean().item() - mean) < STANDARD_ERRORS * error


@pytest.mark.parametrize("p", [1e-4, 0.1, 0.5, 0.9, 1 - 1e-4])
def test_keep_rate(p):
    as_expected(drawn(p), 1 - p)


def test_keep_rate_of_every_row_key_and_head():
    kept = drawn(0.3)
    for dim in range(4):
        for part in kept.unbind(dim):
            as_expected(part, 0.7)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_neighbours_are_independent(p):
    """Also the four that one application decides, rows and keys 8 apart, and all that a power of two separates."""
    kept = drawn(p)
    both = (1 - p) ** 2
    for dim, step in itertools.product(range(4), (1, 2, 4, 8, 16, 64)):
        if step < SHAPE[dim]:
            as_expected(kept.narrow(dim, 0, SHAPE[dim] - step) & kept.narrow(dim, step, SHAPE[dim] - step), both)
    as_expected(kept[..., :-8, :-8] & kept[..., 8:, 8:], both)
    as_expected(kept[..., :256] & kept[..., :256].mT, both * (1 - 1 / 256) + (1 - p) / 256)
    for seed, offset in ((1, 0), (0, 1), (1 << 32, 0), (0, 1 << 32), (-1, -1)):
        as_expected(kept & drawn(p, seed, offset), both)


def test_a_number_depends_on_its_place_alone():
    dropout = Dropout(torch.tensor([3, 1 << 40]), 0.5)
    b, h = torch.arange(2), torch.arange(3)
    whole = dropout.keep(b, h, slice(0, 70), slice(0, 90))
    for rows, keys in ((slice(0, 1), slice(89, 90)), (slice(7, 40), slice(13, 14)), (slice(16, 32), slice(48, 80))):
        assert torch.equal(dropout.keep(b, h, rows, keys), whole[:, :, rows, keys])
    assert torch.equal(dropout.keep(b[1:], h[2:], slice(0, 70), slice(0, 90)), whole[1:, 2:])
    far = dropout.keep(b, h, slice(1 << 30, (1 << 30) + 20), slice((1 << 31) - 20, (1 << 31) - 1))
    assert far.shape == (2, 3, 20, 19)


def identity(s: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.eye(s, dtype=dtype).expand(2, 2, s, s).clone()


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("p", [0.25, 0.75])
def test_forward_and_backward_drop_the_same(backend, p):
    """v = identity makes out the probabilities, and dout = identity makes dv those of the backward."""
    s = 60
    q, k = torch.randn(2, 4, s, 16), torch.randn(2, 2, s, 16)
    v = identity(s).requires_grad_()
    dout = torch.eye(s).expand(2, 4, s, s)
    torch.manual_seed(5)
    out = attention(q, k, v, mask=causal(), dropout_p=p, backend=backend)
    torch.manual_seed(5)
    dropout = Dropout.draw(p, q.device)
    plain = attention(q, k, v, mask=causal(), backend=backend)
    kept = dropout.keep(torch.arange(2), torch.arange(4), slice(0, s), slice(0, s))
    assert torch.equal(out != 0, kept & (plain != 0))
    torch.testing.assert_close(out, torch.where(kept, plain / (1 - p), 0))
    (dv,) = torch.autograd.grad(out, v, dout)
    torch.testing.assert_close(dv, out.mT.unflatten(1, (2, 2)).sum(2))


def test_the_lse_is_of_all_keys():
    q, k, v = torch.randn(3, 1, 2, 50, 16)
    plain, dropped = (attention(q, k, v, dropout_p=p, return_lse=True) for p in (0.0, 0.5))
    torch.testing.assert_close(plain.lse, dropped.lse)
    assert not torch.equal(plain.out, dropped.out)


def test_on_average_nothing_changes():
    """Over many draws the mean of out is what it is without; merged parts, each with its own draw, too."""
    q, k, v = torch.randn(3, 1, 1, 8, 4)
    many = 4000
    heads = [x.expand(1, many, -1, -1) for x in (q, k, v)]
    whole = attention(*heads, dropout_p=0.3)
    parts = (attention(heads[0], *(x[:, :, at] for x in heads[1:]), dropout_p=0.3, return_lse=True)
             for at in (slice(0, 3), slice(3, 8)))  # fmt: skip
    plain = attention(q, k, v)
    for out in (whole, merge(*parts).out):
        error = out.std(1) / many**0.5
        assert ((out.mean(1) - plain[:, 0]).abs() < STANDARD_ERRORS * error).all()


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_torch_s_generator(backend):
    q, k, v = torch.randn(3, 1, 2, 50, 16)

    def run(seed: int | None = None, p: float = 0.5) -> Tensor:
        if seed is not None:
            torch.manual_seed(seed)
        return attention(q, k, v, dropout_p=p, backend=backend)

    first, second = run(1), run()
    assert not torch.equal(first, second)
    assert torch.equal(run(1), first)
    assert not torch.equal(run(2), first)
    before = torch.get_rng_state()
    run(p=0.0)
    explain(q, k, v, dropout_p=0.5)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_ways_of_calling(backend):
    """Checkpointing, torch.compile and torch.func draw what a plain call does, and another p compiles no kernel."""
    leaves = [torch.randn(2, h, 40, 16, requires_grad=True) for h in (4, 2, 2)]

    def loss(q: Tensor, k: Tensor, v: Tensor, p: float = 0.3) -> Tensor:
        return attention(q, k, v, mask=causal(), dropout_p=p, backend=backend).square().sum()

    def gradients(function, *arguments):
        torch.manual_seed(7)
        return torch.autograd.grad(function(*leaves, *arguments), leaves)

    wanted = gradients(loss)
    assert all(map(torch.equal, gradients(lambda *x: checkpoint(loss, *x, use_reentrant=False)), wanted))
    torch._dynamo.reset()
    if backend == "cpu":  # the reference looks at values
        compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
        assert all(map(torch.equal, gradients(compiled), wanted))
        assert all(map(torch.equal, gradients(compiled, 0.6), gradients(loss, 0.6)))
    torch.manual_seed(7)
    found = torch.func.grad(loss, argnums=(0, 1, 2))(*(x.detach() for x in leaves))
    assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_gradcheck(backend):
    leaves = [torch.randn(1, h, 6, 2, dtype=torch.float64, requires_grad=True) for h in (2, 1, 1)]
    sink, slopes = (torch.randn(2, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def results(q, k, v, sink, slopes):
        torch.manual_seed(3)

        def bent(score, b, h, q_idx, kv_idx):
            return score * slopes[h] + (kv_idx - q_idx) * slopes[h] ** 2

        keywords = {"mask": causal(), "score_mod": bent, "sink": sink, "dropout_p": 0.4, "backend": backend}
        return tuple(attention(q, k, v, return_lse=True, **keywords))

    assert torch.autograd.gradcheck(results, (*leaves, sink, slopes))


def test_all_is_dropped():
    """The largest p that there is keeps next to nothing, and breaks nothing."""
    q, k, v = torch.randn(3, 1, 2, 20, 8)
    assert (attention(q, k, v, dropout_p=1 - 1e-12) == 0).all()


@pytest.mark.parametrize("p", [1.0, -0.1, 1.5, float("nan")])
def test_p_is_below_one(p):
    with pytest.raises(ValueError, match=r"in \[0, 1\)"):
        attention(*torch.randn(3, 1, 2, 20, 8), dropout_p=p)


def test_explain_says_it():
    text = str(explain(*torch.randn(3, 1, 2, 20, 8), dropout_p=0.1))
    assert text.startswith("fp32 d8 dense dropout")
