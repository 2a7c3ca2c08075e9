"""The call against the oracle: named cases, random ones, and shapes and masks that hypothesis makes up."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from saccade import Dense, Partial, attention, causal, softcap
from saccade.testing import check
from saccade.testing.cases import MODELS, NAMED, SMALL, Case
from tests.support import draws

pytestmark = pytest.mark.usefixtures("poison")


def checked(case: Case, device: str, backend: str = "auto", lse_gradient: bool = True):
    print(case.describe())  # shown when the test fails
    made = case.inputs(device)
    dlse = made.dlse if lse_gradient else None
    check(made.q, made.k, made.v, dout=made.dout, dlse=dlse, backend=backend, **made.keywords).assert_ok()


@pytest.mark.sample
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_small(case, place):
    checked(case.replace(dtype=place.dtype), place.device, place.backend)


@pytest.mark.sample
@pytest.mark.parametrize(
    "case", [case.smaller(160).replace(h_q=case.h_q // 4, h_k=case.h_k // 4) for case in MODELS], ids=str
)
def test_models(case, place):
    checked(case.replace(dtype=place.dtype), place.device, place.backend)


@pytest.mark.sample
@pytest.mark.parametrize("name", ["causal", "window", "documents-causal", "d192-128", "ragged", "softcap-sink"])
def test_without_gradient_of_lse(name, place):
    """Often another path than with one."""
    checked(NAMED[name].replace(dtype=place.dtype), place.device, place.backend, lse_gradient=False)


@pytest.mark.sample
@pytest.mark.parametrize("lse_gradient", [False, True])
@pytest.mark.parametrize("name", ["causal", "documents-causal", "few-keys", "ragged", "softcap-sink", "everything"])
def test_every_cpu(name, processor, lse_gradient):
    checked(NAMED[name].replace(dtype="bf16"), "cpu", "cpu", lse_gradient)


@pytest.mark.sample
@pytest.mark.parametrize("seed", range(60))
def test_draw(seed, torch_device):
    dtype = None if torch_device == "cpu" else ("fp16", "bf16", "fp32")[seed % 3]
    checked(draws.dense(seed, dtype), torch_device, lse_gradient=seed % 2 == 0)


@st.composite
def problems(draw: st.DrawFn) -> Case:
    s_q, group, h_k = draw(st.integers(0, 70)), draw(st.integers(1, 4)), draw(st.integers(1, 2))
    s_k = draw(st.just(s_q) | st.integers(0, 70))
    bound = st.just("None") | st.integers(0, 80).map(str)
    leaves = [
        st.just("causal"),
        st.tuples(bound, bound).map(lambda bounds: f"window({bounds[0]},{bounds[1]})"),
        st.integers(0, 80).map(lambda n: f"prefix({n})"),
        st.just("prefixes"),
    ]
    if s_q == s_k:
        leaves.append(st.just("documents"))
    mask = st.recursive(
        st.one_of(leaves),
        lambda inner: st.tuples(inner, st.sampled_from("&|"), inner).map(lambda three: f"({''.join(three)})"),
        max_leaves=4,
    )
    return Case(
        "hypothesis",
        dtype="fp32",
        b=draw(st.integers(0, 3)),
        h_q=group * h_k,
        h_k=h_k,
        s_q=s_q,
        s_k=s_k,
        d=draw(st.integers(1, 32)),
        d_v=draw(st.integers(1, 32)),
        mask=draw(st.just("none") | mask),
        score=draw(st.sampled_from(["none", "softcap(3)"])),
        sink=draw(st.booleans()),
        order=draw(st.sampled_from(["bhsd", "bshd", "sbhd"])),
        used=draw(st.sampled_from(["all", "q", "k", "qk"])),
        ids=draw(st.sampled_from(["packed", "scattered"])),
    )


@given(problems())
def test_shapes_and_masks(case):
    checked(case, "cpu")


@pytest.mark.sample
@pytest.mark.parametrize("scale", [0.0, -0.3, 2.0])
def test_scale(scale, place):
    made = SMALL[1].replace(dtype=place.dtype).inputs(place.device)
    check(made.q, made.k, made.v, scale=scale, backend=place.backend, **made.keywords).assert_ok()


def test_scale_is_one_over_the_root_of_d():
    q, k, v = torch.randn(3, 1, 2, 9, 16)
    assert torch.equal(attention(q, k, v), attention(q, k, v, scale=0.25))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_any_float_dtype_of_the_sink(dtype, place):
    made = Case("", dtype=place.dtype, h_q=4, s_q=20, s_k=30, mask="causal").inputs(place.device)
    sink = torch.tensor([-1.0, 0.5, 2.0, -torch.inf], dtype=dtype, device=place.device)
    check(made.q, made.k, made.v, sink=sink, backend=place.backend, **made.keywords).assert_ok()


def test_sink_is_one_more_key_without_value(place):
    """With q = 1 and d = 1 the score of a key is the key itself."""
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}[place.dtype]
    k = torch.randn(1, 1, 9, 1, device=place.device).to(dtype)
    q, v = torch.ones_like(k[:, :, :2]), torch.ones_like(k)
    v[:, :, -1] = 0
    sink = k[0, 0, -1]
    options = {"scale": 1.0, "return_lse": True, "backend": place.backend}

    def function(q, k, v, **_):
        out, lse = attention(q, k[:, :, :-1], v[:, :, :-1], sink=sink, **options)
        return Partial(out, lse) if _.get("return_lse") else out

    check(q, k, v, scale=1.0, backend=place.backend, backward=False, function=function).assert_ok()


def test_results_by_request():
    q, k, v = torch.randn(3, 2, 3, 8, 4)
    out = attention(q, k, v)
    both = attention(q, k, v, return_lse=True)
    assert isinstance(out, torch.Tensor)
    assert isinstance(both, Partial)
    assert both.lse.shape == (2, 3, 8)


@pytest.mark.parametrize("wanted", ["q", "k", "v", "sink"])
def test_one_gradient_alone(wanted):
    made = Case("", dtype="fp32", h_q=4, s_q=9, s_k=12, sink=True).inputs()
    tensors = {"q": made.q, "k": made.k, "v": made.v, "sink": made.keywords["sink"]}

    def gradients(*names):
        leaves = {name: x.clone().requires_grad_(name in names) for name, x in tensors.items()}
        sink = leaves["sink"]
        attention(leaves["q"], leaves["k"], leaves["v"], sink=sink, mask=causal()).backward(made.dout)
        return {name: x.grad for name, x in leaves.items()}

    alone = gradients(wanted)
    assert torch.equal(alone.pop(wanted), gradients(*tensors)[wanted])
    assert all(gradient is None for gradient in alone.values())


def test_gradient_of_lse_alone():
    made = Case("", dtype="fp64", h_q=4, s_q=9, s_k=12).inputs()

    def gradients(backend):
        leaves = [x.clone().requires_grad_() for x in (made.q, made.k)]
        lse = attention(*leaves, made.v, mask=causal(), backend=backend, return_lse=True).lse
        return torch.autograd.grad(lse, leaves, made.dlse)

    torch.testing.assert_close(gradients("cpu"), gradients("reference"))


def test_inputs_are_left_alone(place):
    made = Case("", dtype=place.dtype, h_q=4, s_q=33, s_k=33, mask="causal", sink=True).inputs(place.device)
    before = [x.clone() for x in (made.q, made.k, made.v, made.dout, made.keywords["sink"])]
    check(made.q, made.k, made.v, dout=made.dout, backend=place.backend, **made.keywords)
    assert all(map(torch.equal, before, (made.q, made.k, made.v, made.dout, made.keywords["sink"])))


def test_tf32_needs_no_switch_of_ours():
    """Precision follows torch's own setting, and nothing here changes it."""
    before = torch.get_float32_matmul_precision()
    q, k, v = torch.randn(3, 1, 1, 8, 4)
    attention(q, k, v, score_mod=softcap(2.0), layout=Dense())
    assert torch.get_float32_matmul_precision() == before
