"""xformers' functions against the oracle, with every bias: ours, and those of an installed xformers."""

from __future__ import annotations

import importlib.util
import inspect
import re
from pathlib import Path

import pytest
import torch

from saccade import Dense, bias, causal
from saccade.call.partial import Partial
from saccade.compat import xformers
from saccade.compat.xformers import (
    LowerTriangularMask,
    attn_bias,
    memory_efficient_attention,
    memory_efficient_attention_backward,
    memory_efficient_attention_forward,
    memory_efficient_attention_forward_requires_grad,
)
from saccade.testing import check
from saccade.testing.cases import Case

_spec = importlib.util.spec_from_file_location("biases", Path(__file__).with_name("biases.py"))
biases = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(biases)

BSHD = Dense("bshd")


def operands(device, s_q, s_k, **changes):
    case = Case("", dtype="fp16" if device == "cuda" else "fp32", b=1, h_q=4, h_k=4, d=16, order="bshd")
    made = case.replace(s_q=s_q, s_k=s_k, **changes).inputs(device)
    return made.q, made.k, made.v


def face(given=None):
    """The face with `attention`'s arguments and results."""

    def run(q, k, v, *, return_lse=False, backend="auto", scale=None, mask=None, layout=None, score_mod=None):
        out = memory_efficient_attention(q, k, v, given, scale=scale)
        return (
            Partial(out, memory_efficient_attention_forward_requires_grad(q, k, v, given, scale=scale)[1])
            if (return_lse)
            else out
        )

    return run


@pytest.mark.parametrize("example", biases.EXAMPLES, ids=lambda example: example.name)
def test_every_bias(example, module, device):
    given = biases.made(module, example, device)
    q, k, v = operands(device, sum(biases.ROWS), example.keys)
    mask = biases.seen(example).to(device)
    paged = "pages" in example.form
    if paged:
        used = torch.zeros(example.keys, dtype=torch.bool, device=device)
        used[[place for b in range(3) for place in biases.rows_in_use(example, b)]] = True
        hidden = ~used[None, :, None, None]
        nan_k, nan_v, k, v = (x.masked_fill(hidden, fill) for fill in (torch.nan, 0) for x in (k, v))

        def function(q, k, v, **rest):
            return face(given)(q, nan_k, nan_v, **rest)

        check(q, k, v, function=function, mask=mask, layout=BSHD, backward=False).assert_ok()
    else:
        check(q, k, v, function=face(given), mask=mask, layout=BSHD).assert_ok()


@pytest.mark.parametrize("example", biases.EXAMPLES, ids=lambda example: example.name)
def test_definitions_are_those_of_xformers(example):
    module = pytest.importorskip("xformers.ops.fmha.attn_bias")
    given = biases.made(module, example, "cpu")
    rows = sum(biases.ROWS)
    theirs = given.materialize((rows, example.keys)).exp().bool()
    assert torch.equal(theirs, biases.seen(example)[:, : theirs.shape[1]])


@pytest.mark.parametrize("s_k", [9, 5, 14])
@pytest.mark.parametrize("with_mask", [False, True], ids=["alone", "causal"])
def test_tensors(with_mask, s_k, device):
    """Floats that are added to the scores, alone or with a causal mask, and their gradient."""
    q, k, v = operands(device, 9, s_k, b=2)
    t = torch.randn(2, 4, 9, s_k, generator=torch.Generator().manual_seed(1)).to(device).requires_grad_()
    given = LowerTriangularMask().add_bias(t) if with_mask else t
    mask = (torch.arange(s_k) <= torch.arange(9)[:, None]).to(device) if with_mask else None
    check(q, k, v, function=face(given), mask=mask, score_mod=bias(t), layout=BSHD).assert_ok()


def test_one_head(device):
    q, k, v = operands(device, 9, 12, b=2, h_q=1, h_k=1)
    t = torch.randn(2, 9, 12, device=device)

    def function(q, k, v, *, return_lse=False, **rest):
        out = memory_efficient_attention(q[:, :, 0], k[:, :, 0], v[:, :, 0], t)[:, :, None]
        _, lse = memory_efficient_attention_forward_requires_grad(q[:, :, 0], k[:, :, 0], v[:, :, 0], t)
        return Partial(out, lse) if return_lse else out

    check(q, k, v, function=function, score_mod=bias(t[:, None]), layout=BSHD).assert_ok()


@pytest.mark.parametrize("expanded", [False, True])
def test_groups_of_heads(expanded, device):
    """Five dimensions, with keys of their own or one head of them for each group."""
    q, k, v = operands(device, 9, 12, b=2, h_q=4, h_k=2 if expanded else 4)
    given = attn_bias.LowerTriangularFromBottomRightMask()

    def function(q, k, v, *, return_lse=False, **rest):
        q = q.unflatten(2, (2, 2))
        k, v = (x[:, :, :, None].expand(-1, -1, -1, 2, -1) if expanded else x.unflatten(2, (2, 2)) for x in (k, v))
        out = memory_efficient_attention(q, k, v, given).flatten(2, 3)
        _, lse = memory_efficient_attention_forward_requires_grad(q, k, v, given)
        return Partial(out, lse.flatten(1, 2)) if return_lse else out

    check(q, k, v, function=function, mask=causal(), layout=BSHD).assert_ok()


def test_gradients_of_heads_that_are_one_memory():
    """Each head's own, as of keys that are copies."""
    q, k, v = operands("cpu", 5, 7)
    k = k[:, :, :1].expand(-1, -1, 4, -1)
    found, wanted = (
        torch.autograd.grad(memory_efficient_attention(q, x, v).square().sum(), x)[0]
        for x in (k.detach().requires_grad_(), k.contiguous().requires_grad_())
    )
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("form", ["dense", "groups", "top left", "sequences"])
def test_the_backward_alone(form):
    """The same bits as autograd's."""
    s_k = 5 if form == "top left" else 9
    q, k, v = (x.requires_grad_() for x in operands("cpu", 9, s_k))
    given = None
    if form == "top left":
        given = LowerTriangularMask()
    elif form == "sequences":
        given = attn_bias.BlockDiagonalCausalMask.from_seqlens([2, 7], device="cpu")
    args = [x.unflatten(2, (2, 2)) for x in (q, k, v)] if form == "groups" else [q, k, v]
    out = memory_efficient_attention(*args, given, scale=0.3)
    grad = torch.randn_like(out)
    saved = memory_efficient_attention_forward_requires_grad(*args, given, scale=0.3)
    assert torch.equal(saved[0], out)
    assert torch.equal(memory_efficient_attention_forward(*args, given, scale=0.3), out)
    found = memory_efficient_attention_backward(grad, *saved, *args, given, scale=0.3)
    for x, wanted in zip(found, torch.autograd.grad(out, args, grad), strict=True):
        assert torch.equal(x, wanted)


def test_dropout():
    q, k, v = operands("cpu", 9, 9)
    torch.manual_seed(1)
    out = memory_efficient_attention(q, k, v, None, 0.5)
    torch.manual_seed(1)
    assert torch.equal(memory_efficient_attention(q, k, v, p=0.5), out)
    assert not torch.equal(memory_efficient_attention(q, k, v), out)
    with pytest.raises(NotImplementedError, match="dropout"):
        memory_efficient_attention_forward_requires_grad(q, k, v, p=0.5)


def test_compiled_whole():
    torch._dynamo.reset()
    given = attn_bias.BlockDiagonalCausalMask.from_seqlens([2, 7], device="cpu")
    q, k, v = operands("cpu", 9, 9)
    run = torch.compile(lambda q, k, v: memory_efficient_attention(q, k, v, given), fullgraph=True, backend="eager")
    assert torch.equal(run(q, k, v), memory_efficient_attention(q, k, v, given))


class LowerTriangularMaskOfMine(LowerTriangularMask):
    pass


WRONG = [
    (torch.zeros(9, 9, dtype=torch.bool), TypeError, "masked_fill(~mask, -torch.inf)"),
    (torch.zeros(9, 9), ValueError, "(9, 9) with query (1, 9, 4, 16)"),
    (LowerTriangularMaskOfMine(), TypeError, "got LowerTriangularMaskOfMine"),
    ("causal", TypeError, "got str"),
    (attn_bias.BlockDiagonalMask.from_seqlens([4, 6], device="cpu"), ValueError, "query (1, 10, …) and key (1, 10, …)"),
    (
        attn_bias.PagedBlockDiagonalPaddedKeysMask.from_seqlens([9], [9], torch.zeros(1, 3).int(), 4, device="cpu"),
        ValueError, "pages of 4, got (1, 9, 4, 16)",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("given", "error", "text"), WRONG, ids=lambda x: type(x).__name__)
def test_wrong_biases(given, error, text):
    with pytest.raises(error, match=re.escape(text)):
        memory_efficient_attention(*operands("cpu", 9, 9), given)


def test_wrong_calls():
    q, k, v = operands("cpu", 9, 9, b=2)
    with pytest.raises(ValueError, match=re.escape("got (2, 9, 4, 16), (2, 9, 16), (2, 9, 4, 16)")):
        memory_efficient_attention(q, k[:, :, 0], v)
    with pytest.raises(NotImplementedError, match="output_dtype"):
        memory_efficient_attention(q, k, v, output_dtype=torch.float64)
    with pytest.raises(ValueError, match=re.escape("query (1, 9, …)")):
        memory_efficient_attention(q, k, v, attn_bias.BlockDiagonalMask.from_seqlens([9], device="cpu"))
    mask = attn_bias.BlockDiagonalMask.from_seqlens([4, 5], device="cpu")
    for rows, keys in ((9, 12), (12, 9), (9, 8)):
        given = operands("cpu", rows, keys, b=1)
        with pytest.raises(
            ValueError,
            match=re.escape(f"is for query (1, 9, …) and key (1, 9, …), got query (1, {rows},"),
        ):
            memory_efficient_attention(*given, mask)
    with pytest.raises(ValueError, match="as many keys as rows"):
        attn_bias.BlockDiagonalCausalFromBottomRightMask.from_seqlens([3], [2], device="cpu")


def test_signatures_are_those_of_xformers():
    theirs = pytest.importorskip("xformers.ops")
    for name in (name for name in xformers.__all__ if name.startswith("memory_efficient")):
        wanted = inspect.signature(getattr(theirs.fmha, name)).parameters
        found = inspect.signature(getattr(xformers, name)).parameters
        assert [(x.name, x.kind, x.default) for x in found.values()] == [
            (x.name, x.kind, x.default) for x in wanted.values()
        ]
