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
from saccade.testing.accuracy import check
from saccade.testing.cases import NAMED
from tests.support.devices import CPU, GLUON, TRITON, Device, every_head_dim, on

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


FEATURES = [
    {"mask": "causal", "dropout_p": 0.1},
    {"sink": True, "dropout_p": 0.5},
    {"mask": "window(200,0)", "dropout_p": 0.1, "used": "k"},
    {"score": "relative_bias(20)", "dropout_p": 0.3},
    {"mask": "causal", "score": "temperature", "dropout_p": 0.2},
    {"h_q": 16, "h_k": 1, "s_q": 3, "mask": "causal", "dropout_p": 0.2},
]


@every_head_dim()
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("features", FEATURES, ids=lambda x: "-".join(map(str, x.values())))
def test_against_the_oracle(features: dict, deterministic: bool, device: Device) -> None:
    verify(device.case(**features), deterministic, device)


@on(CPU, GLUON, TRITON)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", ["dropout", "dropout-wide", "dropout-everything"])
def test_named_case(name: str, deterministic: bool, device: Device) -> None:
    verify(NAMED[name], deterministic, device)


def verify(case, deterministic: bool, device: Device) -> None:
    given = case.inputs(device.type, requires_grad=True)
    keywords = {"backend": device.backend, "deterministic": deterministic, **given.keywords}
    check(given.q, given.k, given.v, dout=given.dout, dlse=given.dlse, **keywords).assert_ok()


@every_head_dim()
@pytest.mark.parametrize("mask", [None, causal()], ids=["full", "causal"])
def test_bits(mask, device: Device) -> None:
    """v = identity makes out the probabilities; dout = identity makes dv those of the backward, transposed."""
    s = max(device.d, 60)
    q, k, _ = device.operands(b=2, h_q=3, h_k=3, s_q=s, s_k=s)
    v = torch.eye(s, device=device.type, dtype=q.dtype).expand(2, 3, s, s).clone().requires_grad_()
    torch.manual_seed(3)
    out = attention(q, k, v, mask=mask, dropout_p=0.4, backend=device.backend)
    torch.manual_seed(3)
    dropout = Dropout.draw(0.4, q.device)
    at = (torch.arange(n, device=device.type) for n in (2, 3))
    kept = dropout.keep(*at, slice(0, s), slice(0, s))
    seen = attention(q, k, v, mask=mask, backend=device.backend) != 0
    assert torch.equal(out != 0, kept & seen)
    (dv,) = torch.autograd.grad(out, v, v.detach())
    assert torch.equal(dv.mT != 0, kept & seen)


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


@pytest.mark.gpu
def test_replays_draw_anew(backend: str) -> None:
    """Each replay of a graph drops others, forward and backward the same ones."""
    # Every probability is 1/128 and each kept one counts twice: sums that bfloat16 holds exactly.
    q, k, v = (torch.zeros(1, 4, 128, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    v = torch.ones_like(v).requires_grad_()

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        out = attention(q, k, v, dropout_p=0.5, backend=backend)
        return out, torch.autograd.grad(out, v, torch.ones_like(out))[0]

    step()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, dv = step()
    found = []
    for _ in range(3):
        graph.replay()
        # With ones all around, both sums are those of the kept probabilities.
        assert torch.equal(out.float().sum((2, 3)), dv.float().sum((2, 3)))
        found.append(out.clone())
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[1], found[2])


@pytest.mark.gpu
def test_another_p_never_compiles(backend: str, forward_kernel) -> None:
    q, k, v = (torch.randn(1, 4, 128, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    attention(q, k, v, dropout_p=0.3, backend=backend)
    cache = forward_kernel(backend).device_caches[0][0]
    before = len(cache)
    for p in (0.5, 0.1, 1e-9, 0.75, 1 - 1e-9):
        attention(q.clone()[:, :, : int(100 * p) + 5], k, v, dropout_p=p, backend=backend)
    assert len(cache) == before
