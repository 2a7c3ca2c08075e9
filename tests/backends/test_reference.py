"""The oracle against PyTorch's own attention and plain formulas, in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from saccade import Packed, attention, mask_mod
from saccade.testing.cases import NAMED

# No row of these is without keys: there PyTorch's answer is NaN, and ours zero.
SEEING = ["plain", "causal", "window", "prefix", "prefixes", "prefix-window", "documents-causal", "documents-or-window"]
SEEING += ["union-in-window", "group3", "mqa", "d192-128", "few-queries", "one-query", "sbhd"]


@pytest.mark.parametrize("name", SEEING)
def test_as_pytorch_does(name):
    case = NAMED[name].replace(dtype="fp64")
    made = case.inputs(requires_grad=True)
    layout, mask = made.keywords["layout"], made.keywords.get("mask")
    visible = None if mask is None else mask.visible(case.s_q, case.s_k, case.b)[:, None]
    q, k, v = map(layout.canonical, (made.q, made.k, made.v))
    wanted = layout.ordered(F.scaled_dot_product_attention(q, k, v, visible, enable_gqa=True))
    found = attention(made.q, made.k, made.v, backend="reference", **made.keywords)
    assert_close(found, wanted)
    leaves = made.q, made.k, made.v
    assert_close(*(torch.autograd.grad(x, leaves, made.dout) for x in (found, wanted)))


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("score", ["none", "softcap(3)"])
def test_as_the_formula_says(score, sink):
    """scale, score_mod, mask, sink, softmax: in this order."""
    case = NAMED["window"].replace(dtype="fp64", score=score, sink=sink)
    made = case.inputs()
    scores = made.q @ made.k.mT / case.d**0.5
    if score != "none":
        scores = 3 * torch.tanh(scores / 3)
    scores = scores.masked_fill(~made.keywords["mask"].visible(case.s_q, case.s_k), -torch.inf)
    if sink:
        column = made.keywords["sink"].double()[None, :, None, None]
        scores = torch.cat([scores, column.expand(case.b, case.h_q, case.s_q, 1)], -1)
    out, lse = attention(made.q, made.k, made.v, backend="reference", return_lse=True, **made.keywords)
    assert_close(out, scores.softmax(-1)[..., : case.s_k] @ made.v)
    assert_close(lse, scores.logsumexp(-1))


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32", "fp64"])
def test_dtypes(dtype):
    made = NAMED["softcap-sink"].replace(dtype=dtype).inputs()
    out, lse = attention(made.q, made.k, made.v, backend="reference", return_lse=True, **made.keywords)
    assert out.dtype == made.q.dtype
    assert lse.dtype == (torch.float64 if dtype == "fp64" else torch.float32)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize(("b", "s_q", "s_k"), [(1, 3, 0), (1, 0, 3), (0, 2, 2)])
def test_rows_of_tensors_where_there_are_no_scores(b, s_q, s_k, backend):
    table = torch.randn(16, 3, requires_grad=True)

    def near(b, h, i, j):
        return (table[i] * table[j]).sum(-1) < 1

    q, k = torch.randn(b, 2, s_q, 4), torch.randn(b, 2, s_k, 4)
    keywords = {"mask": mask_mod(near), "score_mod": lambda s, *at: s + (table[at[2]] * table[at[3]]).sum(-1)}
    out = attention(q, k, k, backend=backend, **keywords)
    assert out.shape == q.shape
    assert not torch.autograd.grad(out.sum(), table)[0].any()
    rows, layout = torch.randn(4, 2, 4), Packed(torch.tensor([0, 4, 4]))  # the last sequence is empty
    assert attention(rows, rows, rows, layout=layout, backend=backend, **keywords).shape == rows.shape
