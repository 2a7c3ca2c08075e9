"""The contracts at the edges: rows without keys, empty tensors, poisoned padding, hidden keys, large scores."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from saccade import Dense, attention, causal, documents, prefix, softcap, window
from saccade.call.spec import TORCH_DTYPES
from saccade.masks import Extent
from saccade.testing import check
from saccade.testing.cases import Case

pytestmark = pytest.mark.usefixtures("poison")


def run(place, case: Case, seed: int = 0, **changes):
    """out, lse, and the gradients of all inputs"""
    made = case.replace(dtype=place.dtype).inputs(place.device, seed, requires_grad=True)
    keywords = {"backend": place.backend, "return_lse": True, **made.keywords, **changes}
    found = attention(made.q, made.k, made.v, **keywords)
    leaves = {"dq": made.q, "dk": made.k, "dv": made.v}
    if made.keywords.get("sink") is not None:
        leaves["dsink"] = made.keywords["sink"]
    gradients = torch.autograd.grad(found, tuple(leaves.values()), [made.dout, made.dlse])
    return found.out.detach(), found.lse.detach(), dict(zip(leaves, gradients, strict=True))


# Rows without keys


@pytest.mark.parametrize("s_q", [33, 150, 1024])
def test_causal_with_more_queries_than_keys(s_q, place):
    """The first s_q - s_k rows see nothing: out 0, lse -inf, and no gradient in or from them."""
    s_k = 32
    out, lse, gradients = run(place, Case("", s_q=s_q, s_k=s_k, d=16, mask="causal"))
    empty = slice(0, s_q - s_k)
    assert not out[:, :, empty].any()
    assert (lse[:, :, empty] == -torch.inf).all()
    assert lse[:, :, s_q - s_k :].isfinite().all()
    assert not gradients["dq"][:, :, empty].any()
    assert not any(x.isnan().any() for x in (out, *gradients.values()))


def test_a_row_without_keys_has_its_sink(place):
    case = Case("", h_q=4, s_q=20, s_k=6, d=16, mask="causal", sink=True)
    out, lse, gradients = run(place, case)
    sink = case.inputs(place.device).keywords["sink"].to(lse.dtype)
    assert not out[:, :, :14].any()
    torch.testing.assert_close(lse[:, :, :14], sink[None, :, None].expand(2, 4, 14))
    assert not gradients["dq"][:, :, :14].any()
    assert not any(x.isnan().any() for x in (out, lse, *gradients.values()))


def test_no_row_has_a_key(place):
    """Documents that end where the used keys end, behind a window that starts there."""
    ids = torch.arange(16, device=place.device)[None] // 8
    used = Dense("bhsd", seqused_k=torch.tensor([4, 4], device=place.device))
    mask = documents(ids) & window(None, 100)
    out, lse, gradients = run(place, Case("", s_q=16, s_k=16, d=16), mask=mask, layout=used)
    assert not out[:, :, 8:].any()
    assert (lse[:, :, 8:] == -torch.inf).all()
    assert lse[:, :, :8].isfinite().all()
    assert not gradients["dq"][:, :, 8:].any()
    assert not gradients["dk"][:, :, 4:].any()
    assert not any(x.isnan().any() for x in (out, *gradients.values()))


@pytest.mark.sample
@pytest.mark.parametrize("rows", [1, 40])
def test_hidden_inside_the_hull(rows, place):
    """Scattered documents whose hull reaches over used keys, none of which is theirs."""
    ids = torch.tensor([[0] * rows + [1] * 30 + [0] * rows], device=place.device)
    s = ids.shape[1]
    used = Dense("bhsd", seqused_k=torch.tensor([s - 1, rows + 30], device=place.device))
    for mask in (documents(ids) & window(5, None), documents(ids) & window(0, 3), documents(ids) & causal()):
        made = Case("", dtype=place.dtype, s_q=s, s_k=s, d=16).inputs(place.device)
        gradients = {"dout": made.dout, "dlse": made.dlse}
        check(made.q, made.k, made.v, mask=mask, layout=used, backend=place.backend, **gradients).assert_ok()
        check(made.q, made.k, made.v, mask=mask, layout=used, backend=place.backend, dout=made.dout).assert_ok()


# Empty tensors


@pytest.mark.parametrize("mask", ["none", "causal", "window(3,0)", "prefix(2)", "prefixes"])
@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [{"b": 0}, {"s_q": 0}, {"s_k": 0}, {"s_q": 0, "s_k": 0}, {"h_q": 0, "h_k": 0}],
    ids="-".join,
)
def test_empty(sizes, sink, mask, place):
    case = Case("", s_q=5, s_k=7, d=16, d_v=8, mask=mask, sink=sink).replace(**sizes)
    out, lse, gradients = run(place, case)
    assert out.shape == (case.b, case.h_q, case.s_q, 8)
    assert lse.shape == (case.b, case.h_q, case.s_q)
    assert not any(x.isnan().any() for x in (out, lse, *gradients.values()))
    if case.s_k == 0:
        assert not out.any()
        assert sink or (lse == -torch.inf).all()
    if 0 in (case.s_q, case.s_k, case.b, case.h_q):
        assert not any(gradients[name].any() for name in ("dq", "dk", "dv"))


def test_batch_rows_without_tokens(place):
    """Any subset of the batch rows may be empty on either side."""
    for empty_q, empty_k in [((0, 3), ()), ((), (1, 2)), ((0,), (0, 3)), (range(4), range(4))]:
        lengths = [[0 if b in empty else n for b in range(4)] for empty, n in ((empty_q, 9), (empty_k, 11))]
        layout = Dense("bhsd", *(torch.tensor(n, dtype=torch.int32, device=place.device) for n in lengths))
        out, lse, gradients = run(place, Case("", b=4, s_q=9, s_k=11, d=16, mask="causal"), layout=layout)
        for b in range(4):
            if 0 in (lengths[0][b], lengths[1][b]):
                assert not any(x[b].any() for x in (out, *gradients.values()))
                assert (lse[b] == -torch.inf).all()
        assert not any(x.isnan().any() for x in (out, *gradients.values()))


# Padding


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("mask", ["none", "causal", "window(20,20)", "prefix(60)", "documents"])
def test_padding_never_leaks(mask, bad, place):
    """Whatever lies beyond the used rows, results are the same to the bit; and there they are zero."""
    case = Case("", dtype=place.dtype, b=3, h_q=4, s_q=70, s_k=70, d=40, mask=mask, sink=True, used="qk")
    found = []
    for filling in (0.0, bad):
        made = case.inputs(place.device, requires_grad=True)
        for x in (made.q, made.k, made.v, made.dout, made.dlse):
            x.data.nan_to_num_(filling)
        layout = made.keywords["layout"]
        unused = torch.arange(70, device=place.device) >= layout.seqused_q[:, None]
        made.dlse.masked_fill_(unused[:, None], filling)
        leaves = made.q, made.k, made.v, made.keywords["sink"]
        results = attention(*leaves[:3], backend=place.backend, return_lse=True, **made.keywords)
        found.append((*results, *torch.autograd.grad(results, leaves, [made.dout, made.dlse])))
    for name, clean, poisoned in zip(("out", "lse", "dq", "dk", "dv", "dsink"), *found, strict=True):
        assert torch.equal(clean, poisoned), name


def test_neighbours_in_memory_never_leak(place):
    """Rows of a slice end where the slice ends: what lies around them is NaN, and Inf."""
    dtype = TORCH_DTYPES[place.dtype]

    def within(bad: float, s: int) -> Tensor:
        memory = torch.full((2, 2, s + 40, 40), bad, dtype=dtype, device=place.device)
        memory[:, :, 13 : s + 13, 4:28] = torch.randn(2, 2, s, 24, generator=torch.Generator().manual_seed(s))
        return memory[:, :, 13 : s + 13, 4:28]

    for bad in (math.nan, math.inf):
        q, k, v, dout = within(bad, 37), within(bad, 45), within(bad, 45), within(bad, 37)
        check(q, k, v, dout=dout, mask=causal(), backend=place.backend).assert_ok()


def test_nan_reaches_only_who_sees_it(place):
    """A NaN in one batch row or one head stays there."""
    made = Case("", dtype=place.dtype, b=2, h_q=4, s_q=40, s_k=40, d=16, mask="causal").inputs(place.device)
    clean = attention(made.q, made.k, made.v, backend=place.backend, **made.keywords)
    for x in (made.q, made.k, made.v):
        bad = x.clone()
        bad[1, 1] = math.nan
        out = attention(
            *(bad if y is x else y for y in (made.q, made.k, made.v)), backend=place.backend, **made.keywords
        )
        reached = torch.zeros(2, 4, dtype=torch.bool, device=place.device)
        reached[1, [1] if x is made.q else [2, 3]] = True
        assert torch.equal(out[~reached], clean[~reached])
        assert out[reached].isnan().any()


# What is hidden has probability zero


MASKS = ["none", "causal", "window(5,2)", "window(0,0)", "prefix(9)", "prefixes", "documents&causal"]
MASKS += ["documents|window(1,1)", "prefix(6)&window(4,4)", "prefix(3)|window(2,2)"]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("used", ["all", "qk"])
def test_probability_is_zero_exactly_where_hidden(mask, used, place):
    """With v = identity, out is P; with dout = identity, dv is its transpose."""
    s = 48
    case = Case("", dtype=place.dtype, b=3, s_q=s, s_k=s, d=16, d_v=s, mask=mask, used=used, ids="scattered")
    made = case.inputs(place.device)
    identity = torch.eye(s, dtype=made.q.dtype, device=place.device).expand(3, 2, s, s)
    v = identity.detach().requires_grad_()
    out = attention(made.q, made.k, v, backend=place.backend, **made.keywords)
    dv = torch.autograd.grad(out, v, identity)[0]
    layout = made.keywords["layout"]
    at = Extent.of(s, s, layout.seqused_q, layout.seqused_k, out.device)
    i = torch.arange(s, device=place.device)
    visible = (i < at.rows)[..., None] & (i < at.keys)[:, None]
    if "mask" in made.keywords:
        b = torch.arange(3, device=place.device)[:, None, None]
        visible = visible & made.keywords["mask"].sees(at, b, b * 0, i[:, None], i)
    for p in (out, dv.mT):
        assert torch.equal(p != 0, visible[:, None].expand(3, 2, s, s))


# Scores of any size


@pytest.mark.parametrize("shift", [-2e4, -1e3, -100.0, 100.0, 1e3, 2e4])
def test_scores_far_from_zero(shift, place):
    """All keys of a row moved together: P stays, the LSE moves along; no sentinel is mistaken for a score."""
    made = Case("", dtype=place.dtype, s_q=40, s_k=50, d=16, mask="window(20,0)").inputs(place.device)
    q, k = made.q.clone(), made.k.clone()
    q[..., 0], k[..., 0] = 64.0, shift / 16.0  # with scale 1/4: scores move by the shift
    gradients = {"dout": made.dout, "dlse": made.dlse}
    check(q, k, made.v, backend=place.backend, **gradients, **made.keywords).assert_ok()
    lse = attention(q, k, made.v, backend=place.backend, return_lse=True, **made.keywords).lse
    assert torch.equal(lse < 0, torch.full_like(lse, shift < 0, dtype=torch.bool))


@pytest.mark.parametrize("size", [3.0, 30.0])
def test_large_scores(size, place):
    """One key takes all: no overflow, and gradients that are right where they vanish."""
    made = Case("", dtype=place.dtype, s_q=65, s_k=65, d=64, mask="causal").inputs(place.device)
    gradients = {"dout": made.dout, "dlse": made.dlse}
    check(size * made.q, size * made.k, made.v, backend=place.backend, **gradients, **made.keywords).assert_ok()


def test_small_scores(place):
    made = Case("", dtype=place.dtype, s_q=65, s_k=65, d=64).inputs(place.device)
    q = torch.zeros_like(made.q)
    check(q, made.k, made.v, dout=made.dout, dlse=made.dlse, backend=place.backend).assert_ok()


def test_softcap_saturates(place):
    made = Case("", dtype=place.dtype, s_q=30, s_k=30, d=64).inputs(place.device)
    gradients = {"dout": made.dout, "dlse": made.dlse}
    check(8 * made.q, 8 * made.k, made.v, score_mod=softcap(1.5), backend=place.backend, **gradients).assert_ok()


def test_one_key_has_no_gradient_of_scores(place):
    """P is 1 whatever the score: dq and dk are rounding of what cancels."""
    made = Case("", dtype=place.dtype, h_q=6, s_q=17, s_k=1, d=64).inputs(place.device)
    check(made.q, made.k, made.v, dout=made.dout, backend=place.backend).assert_ok()


def test_prefix_beyond_the_keys(place):
    made = Case("", dtype=place.dtype, b=2, s_q=20, s_k=30, d=16).inputs(place.device)
    lengths = torch.tensor([30, 1000], device=place.device)
    for mask in (prefix(30), prefix(2**20), prefix(lengths), window(10**6, 10**6), window(2**40, None)):
        assert mask.visible(20, 30, 2).all()
        check(made.q, made.k, made.v, mask=mask, backend=place.backend).assert_ok()
