"""Compiled calls whose batches and lengths change, beside tensors whose sizes do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from saccade import (
    Dense,
    Packed,
    attention,
    bias,
    block_mask,
    causal,
    documents,
    interval,
    mask_mod,
    nn,
    prefix,
    relative_bias,
    softcap,
    window,
)
from saccade.compat import flex, sdpa
from saccade.compat.transformer_engine import DotProductAttention

LONGEST, HEADS, D = 64, 4, 8
VISIBLE = torch.ones(1, 1, LONGEST, LONGEST).tril() == 1
ADDED = torch.linspace(-2, 2, LONGEST**2).view(1, 1, LONGEST, LONGEST)
IDS = (torch.arange(LONGEST) // 5)[None]
OFFSETS = torch.arange(8)
LAYER = nn.Attention(HEADS * D, HEADS, rotary_base=1e4)
CORE = DotProductAttention(HEADS, D, attn_mask_type="no_mask", qkv_format="bshd")


def _lower(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def heads_of(x: Tensor) -> Any:
    return [x.unflatten(-1, (HEADS, D)).transpose(1, 2)] * 3


def rows_of(x: Tensor) -> Any:
    return [x.unflatten(-1, (HEADS, D))] * 3


def square(t: Tensor, x: Tensor) -> Tensor:
    """A buffer up to the current length."""
    return t[..., : x.shape[1], : x.shape[1]]


def vector(t: Tensor, x: Tensor, rows: bool) -> Tensor:
    """Of one row, or of a row for each of the batch's."""
    return (t.expand(8, LONGEST)[: x.shape[0]] if rows else t)[:, : x.shape[1]]


def captures(x: Tensor) -> Tensor:
    ids = vector(IDS, x, rows=False)
    mask = mask_mod(lambda b, h, q_idx, kv_idx: (ids[0, q_idx] == ids[0, kv_idx]) | (kv_idx == OFFSETS[b]))
    return attention(*heads_of(x), mask=mask)


def biased(x: Tensor, kind: str) -> Tensor:
    return CORE(*rows_of(x), core_attention_bias_type=kind, core_attention_bias=square(ADDED, x))


def of_sdpa(x: Tensor, mask: Tensor) -> Tensor:
    return sdpa.scaled_dot_product_attention(*heads_of(x), attn_mask=square(mask, x))


FACES = {
    "tensor": lambda x: attention(*heads_of(x), mask=square(VISIBLE, x)),
    "bias": lambda x: attention(*heads_of(x), score_mod=bias(square(ADDED, x))),
    "documents": lambda x: [attention(*heads_of(x), mask=documents(vector(IDS, x, rows))) for rows in (False, True)],
    "mask_mod": captures,
    "positions": lambda x: [LAYER(x, positions=vector(IDS, x, rows)) for rows in (False, True)],
    "sdpa": lambda x: [of_sdpa(x, VISIBLE), of_sdpa(x, ADDED)],
    "transformer_engine": lambda x: [biased(x, "pre_scale_bias"), biased(x, "post_scale_bias")],
}
SIZES = (1, 9), (2, 12), (3, LONGEST)
"""At the longest the buffer is itself, so that its sizes are numbers beside symbols."""

_BLOCKED = block_mask(mask_mod(_lower), 1, HEADS, LONGEST, LONGEST)
_BLOCK_MASK = flex.create_block_mask(_lower, None, None, LONGEST, LONGEST, device="cpu")
BLOCKED = {
    "block_mask": lambda x: attention(*heads_of(x), mask=_BLOCKED),
    "BlockMask": lambda x: attention(*heads_of(x), mask=_BLOCK_MASK),
    "flex": lambda x: flex.flex_attention(*heads_of(x), block_mask=_BLOCK_MASK),
}


def check(face, sizes, dynamic=()):
    torch._dynamo.reset()
    compiled = torch.compile(face, backend="aot_eager", fullgraph=True)
    for b, s in sizes:
        x = torch.randn(b, s, HEADS * D)
        for dim in dynamic:
            torch._dynamo.mark_dynamic(x, dim)
        torch.testing.assert_close(compiled(x), face(x))


@pytest.mark.slow
@pytest.mark.parametrize("name", FACES)
def test_sizes_that_dynamo_finds_dynamic(name):
    check(FACES[name], SIZES)


NUMBERS: dict[str, Any] = {
    "scale": lambda n: {"scale": n / 8},
    "a cap": lambda n: {"score_mod": softcap(n + 0.5)},
    "bounds": lambda n: {"mask": window(n, n) & (prefix(n) | interval(n, n + 9))},
    "an offset": lambda n: {"mask": causal(), "layout": Dense(q_offset=n)},
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_dynamo_finds_dynamic(name):
    """Their checks ask Dynamo nothing that it does not know of its symbols."""
    torch.compiler.reset()
    x = torch.randn(1, HEADS, 24, D)
    call = lambda n: attention(x, x, x, **NUMBERS[name](n))  # noqa: E731
    compiled = torch.compile(call, backend="eager", fullgraph=True, dynamic=True)
    for n in (2, 3, 5):
        assert torch.equal(compiled(n), call(n))


CAPTURED: dict[str, Any] = {
    "a bound": lambda n: lambda s, b, h, i, j: s.clamp(min=n),
    "an exponent": lambda n: lambda s, b, h, i, j: s.abs() ** n,
    "a keyword": lambda n: lambda s, b, h, i, j: torch.nn.functional.softplus(s, beta=n + 1),
    "a table of one column": lambda n: relative_bias(torch.randn(HEADS, 2 * int(n) + 1)),
}


@pytest.mark.parametrize("number", [0, 3, 0.0, 2.5])
@pytest.mark.parametrize("name", CAPTURED)
def test_numbers_that_functions_capture(name, number):
    """Dynamo leaves them open; those that are part of a program are read."""
    torch.compiler.reset()
    x, keywords = torch.randn(1, HEADS, 24, D), {"score_mod": CAPTURED[name](number)}
    call = lambda x: attention(x, x, x, **keywords)  # noqa: E731
    compiled = torch.compile(call, backend="eager", fullgraph=True, dynamic=True)
    torch.testing.assert_close(compiled(x), call(x))


@pytest.mark.slow
@pytest.mark.parametrize("name", FACES)
def test_sizes_that_are_marked_dynamic(name):
    check(FACES[name], [(2, 12), (3, 33)], dynamic=(0, 1))


@pytest.mark.slow
@pytest.mark.parametrize("name", BLOCKED)
def test_batches_of_block_masks_that_are_made_outside(name):
    check(BLOCKED[name], [(b, LONGEST) for b in (1, 2, 3)])
    check(BLOCKED[name], [(b, LONGEST) for b in (2, 3)], dynamic=(0,))


@pytest.mark.slow
@pytest.mark.parametrize("layout", [Dense("bshd"), Packed(torch.tensor([0, 3, 6]))], ids=["dense", "packed"])
def test_operands_whose_last_dimension_is_not_contiguous(layout):
    """Strides that nobody knows order the dimensions of the copy, forward and backward."""
    torch._dynamo.reset()
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True, dynamic=True)
    for s in (7, 12):
        shape = (2, D, s, HEADS) if isinstance(layout, Dense) else (D, s, HEADS)
        leaves = [torch.randn(shape).requires_grad_() for _ in range(3)]
        q, k, v = (x.movedim(-3, -1) for x in leaves)
        results = [call(q, k, v, mask=causal(), layout=layout) for call in (compiled, attention)]
        torch.testing.assert_close(*results)
        assert results[0].stride() == results[1].stride()
        torch.testing.assert_close(*[torch.autograd.grad(out.square().sum(), leaves) for out in results])
