"""Calls inside of what torch compiles, exports, runs again and maps over."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from saccade import (
    Dense,
    Packed,
    ScoreMod,
    alibi,
    attention,
    bias,
    causal,
    documents,
    mask_mod,
    relative_bias,
    softcap,
    window,
)
from saccade.compat import sdpa
from saccade.layouts import Layout
from saccade.masks import Mask

CHECKPOINTED = {
    "alibi": lambda w, t: {"score_mod": alibi(w)},
    "own": lambda w, t: {"score_mod": lambda s, b, h, i, j: torch.where(i > j, s, s * w[h].exp()) + t[h, j]},
    "relative_bias": lambda w, t: {"score_mod": relative_bias(t)},
    "mask": lambda w, t: {"mask": mask_mod(lambda b, h, i, j: (i >= j) | (j == 0))},
}


@pytest.mark.parametrize("name", CHECKPOINTED)
def test_functions_in_compiled_checkpoints(name):
    q, k, v = (torch.randn(2, 2, 9, 4, requires_grad=True) for _ in range(3))
    w, t = torch.rand(2, requires_grad=True), torch.rand(2, 9, requires_grad=True)

    def layer(q, k, v, w, t):
        return attention(q, k, v, **CHECKPOINTED[name](w, t)) * (w.sum() + t.sum())

    @partial(torch.compile, fullgraph=True, backend="aot_eager")
    def again(*given):
        return checkpoint(layer, *given, use_reentrant=False)

    given = q, k, v, w, t
    outs = layer(*given), again(*given)
    expected, found = ((out, *torch.autograd.grad(out.square().sum(), given)) for out in outs)
    torch.testing.assert_close(found, expected)


TABLE = torch.randn(2, 9)
WRONG: dict[str, Any] = {
    "scores are real numbers, and meet 1j": lambda s, b, h, i, j: s * 1j,
    "is read with 3 indices": lambda s, b, h, i, j: s + TABLE[h, i, j],
    "index 5 is out of range for a dimension of 2": lambda s, b, h, i, j: s + TABLE[5, j],
    "are read one element at a time": lambda s, b, h, i, j: s + TABLE[torch.tensor([0, 1]), j],
    "are single values, and cannot be indexed": lambda s, b, h, i, j: s[0],
    "rows of 300 elements are too long": lambda s, b, h, i, j: s + (torch.ones(300) * s).sum(),
}


@pytest.mark.parametrize("words", WRONG)
def test_compiled_code_refuses_in_the_words_of_eager_calls(words):
    q, call = torch.randn(1, 2, 9, 8), lambda q: attention(q, q, q, score_mod=WRONG[words])
    for one in (call, torch.compile(call, backend="eager", fullgraph=True)):
        torch._dynamo.reset()
        with pytest.raises(Exception, match=words):
            one(q)


def test_calls_after_a_refused_one():
    """What Dynamo could not trace runs whole, not frame by frame."""

    @partial(torch.compile, backend="eager")
    def masked(q, ids, offset):
        return attention(q, q, q, mask=documents(ids) & causal(), layout=Dense(q_offset=offset))

    for s in (33, 64):
        q, ids = torch.randn(1, 2, s, 8), torch.arange(s)[None] // 20
        with pytest.raises(ValueError, match="counts rows and keys from the first"):
            masked(q, ids, 2)
        torch.testing.assert_close(masked(q, ids, 0), attention(q, q, q, mask=documents(ids) & causal()))


def test_a_function_that_changes_something_is_refused_in_compiled_checkpoints():
    seen, x = [], torch.randn(1, 2, 5, 4, requires_grad=True)

    def changes(score, b, h, q_idx, kv_idx):
        seen.append(1)
        return score

    @partial(torch.compile, fullgraph=True, backend="eager")
    def again(x):
        return checkpoint(lambda x: attention(x, x, x, score_mod=changes), x, use_reentrant=False)

    with pytest.raises(torch._dynamo.exc.Unsupported, match="side effect"):
        again(x)


class Open(torch.nn.Module):
    """Of a captured tensor whose sizes an export leaves open."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, q: Tensor, k: Tensor, v: Tensor, t: Tensor) -> Tensor:
        match self.name:
            case "own":
                return attention(q, k, v, score_mod=lambda s, b, h, i, j: s + t[i, j] * t[-1, 0])
            case "mask":
                return attention(q, k, v, mask=mask_mod(lambda b, h, i, j: (t[i, j] > 0) | (j == 0)))
            case "bias":
                return attention(q, k, v, score_mod=bias(t))
            case "sdpa":
                return sdpa.scaled_dot_product_attention(q, k, v, attn_mask=t)
        return attention(q, k, v, score_mod=lambda s, b, h, i, j: s + t[i, t.shape[1] - 1 - j])


def exported(name: str) -> Any:
    given = [*(torch.randn(2, 2, 9, 4) for _ in range(3)), torch.randn(9, 9)]
    free = torch.export.Dim.DYNAMIC
    sizes = {2: free}, {2: free}, {2: free}, {0: free, 1: free}
    return torch.export.export(
        Open(name), tuple(given), dynamic_shapes={"q": sizes[0], "k": sizes[1], "v": sizes[2], "t": sizes[3]}
    )


@pytest.mark.parametrize("name", ["own", "mask", "bias", "sdpa"])
def test_exports_leave_sizes_of_captured_tensors_open(name):
    run = exported(name).module()
    for s in (9, 14, 70):
        given = [*(torch.randn(2, 2, s, 4) for _ in range(3)), torch.randn(s, s)]
        torch.testing.assert_close(run(*given), Open(name)(*given))


def test_open_sizes_are_no_numbers():
    with pytest.raises(Exception, match=r"a size that torch\.export leaves open"):
        exported("number")


CALLS = {
    "plain": lambda q: attention(q, q, q),
    "causal": lambda q: attention(q, q, q, mask=causal(), scale=0.3),
    "window": lambda q: attention(q, q, q, mask=window(1, 1), scale=0.4),
    "softcap": lambda q: attention(q, q, q, score_mod=softcap(2.0)),
    "lse": lambda q: attention(q, q, q, return_lse=True)[1],
    "packed": lambda q: attention(q[0], q[0], q[0], layout=Packed.from_lengths([1, q.shape[1] - 1])),
}


@pytest.mark.rare
def test_backwards_of_eager_forwards_by_a_compiler():
    q = torch.randn(1, 5, 3, 4, requires_grad=True)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        for call in (*CALLS.values(), *CALLS.values()):
            q.grad = None
            call(q).square().sum().backward()
            with torch._dynamo.compiled_autograd._disable():
                (expected,) = torch.autograd.grad(call(q).square().sum(), q)
            torch.testing.assert_close(q.grad, expected)


@pytest.mark.parametrize("name", [name for name in CALLS if name != "packed"])  # whose lengths lie on the host
@pytest.mark.parametrize("needs_gradient", [False, True])
def test_meta_tensors(name, needs_gradient):
    q = torch.randn(1, 5, 3, 4, requires_grad=needs_gradient)
    expected, found = CALLS[name](q), CALLS[name](q.detach().to("meta").requires_grad_(needs_gradient))
    assert found.is_meta
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)


def test_vmap_of_no_examples():
    x, packed = torch.randn(2, 2, 5, 4), Packed.from_lengths([2, 3])
    assert torch.vmap(lambda w: attention(x, x, x, score_mod=alibi(w)))(torch.rand(0, 2)).shape == (0, *x.shape)
    by_first = torch.vmap(lambda a: attention(a, a, a, layout=packed), in_dims=1)
    assert by_first(torch.randn(5, 0, 2, 4)).shape == (0, 5, 2, 4)
    per_example = torch.vmap(torch.func.grad(lambda a: attention(a, a, a, layout=packed).sum()))
    assert per_example(torch.randn(0, 5, 2, 4)).shape == (0, 5, 2, 4)


def test_documents_in_a_checkpoint_that_keeps_all():
    ids, q = torch.tensor([[3, 3, 1, 1, 3]]), torch.randn(1, 2, 5, 4, requires_grad=True)

    def layer(q: Tensor) -> Tensor:
        return attention(q, q, q, mask=documents(ids))

    contexts = partial(create_selective_checkpoint_contexts, lambda *_, **__: CheckpointPolicy.MUST_SAVE)
    again = checkpoint(layer, q, use_reentrant=False, context_fn=contexts)
    for x, y in zip(*((out, *torch.autograd.grad(out.sum(), q)) for out in (again, layer(q))), strict=True):
        torch.testing.assert_close(x, y)


def below(kind: type) -> Iterator[type]:
    yield kind
    for made in kind.__subclasses__():
        yield from below(made)


@pytest.mark.parametrize("kind", [Mask, Layout, ScoreMod])
def test_constructors_take_the_defaults_of_all_fields(kind: type) -> None:
    """With which Dynamo of torch 2.11 calls those of frozen dataclasses, also of one that its own class wrote."""
    for made in filter(is_dataclass, below(kind)):
        defaults = {x.name for x in fields(made) if x.init and (x.default, x.default_factory) != (MISSING, MISSING)}
        assert defaults <= {*inspect.signature(made.__init__).parameters}, made
