"""The same call twice gives the same bits."""

from __future__ import annotations

import pytest
import torch

from saccade import attention, explain, softcap, window
from saccade.testing.cases import Case

CASE = Case("", b=2, h_q=6, h_k=2, s_q=150, s_k=190, d=32, mask="window(90,0)", score="softcap(9)", sink=True)
REPEATS = 5


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.sample
def test_forward(place, threads):
    made = CASE.replace(dtype=place.dtype).inputs(place.device)

    def run():
        return attention(made.q, made.k, made.v, backend=place.backend, return_lse=True, **made.keywords)

    first = run()
    for _ in range(REPEATS):
        again = run()
        assert torch.equal(again.out, first.out)
        assert torch.equal(again.lse, first.lse)


@pytest.mark.sample
def test_backward(place, threads):
    made = CASE.replace(dtype=place.dtype).inputs(place.device, requires_grad=True)
    leaves = made.q, made.k, made.v, made.keywords["sink"]

    def run():
        keywords = {"backend": place.backend, "return_lse": True, "deterministic": True, **made.keywords}
        return torch.autograd.grad(attention(*leaves[:3], **keywords), leaves, [made.dout, made.dlse])

    first = run()
    for _ in range(REPEATS):
        assert all(map(torch.equal, run(), first))


def test_torch_s_own_switch():
    """`deterministic=None` follows it; the Spec says which it was."""
    q, k, v = torch.randn(3, 1, 1, 4, 8)
    before = torch.are_deterministic_algorithms_enabled()
    try:
        for switch in (True, False):
            torch.use_deterministic_algorithms(switch)
            assert explain(q, k, v).plan.spec.deterministic is switch
            assert explain(q, k, v, deterministic=not switch).plan.spec.deterministic is not switch
    finally:
        torch.use_deterministic_algorithms(before)


def test_other_work_in_between_changes_nothing(place):
    """No state is kept between calls: other shapes, masks and gradients in between leave the bits as they are."""
    made = CASE.replace(dtype=place.dtype).inputs(place.device)
    first = attention(made.q, made.k, made.v, backend=place.backend, **made.keywords)
    for s in (1, 17, 300):
        other = Case("", dtype=place.dtype, s_q=s, s_k=s, mask="causal").inputs(place.device, requires_grad=True)
        attention(other.q, other.k, other.v, backend=place.backend, **other.keywords).sum().backward()
    assert torch.equal(attention(made.q, made.k, made.v, backend=place.backend, **made.keywords), first)


def test_runtime_values_do_not_stick(place):
    """Calls that differ in one runtime value alone, one after the other: nothing is cached by too little."""
    made = CASE.replace(dtype=place.dtype, score="none").inputs(place.device)
    variants = [
        {},
        {"scale": 0.5},
        {"scale": 0.25},
        {"mask": window(90, 0)},
        {"mask": window(9, 0)},
        {"score_mod": softcap(2.0)},
        {"score_mod": softcap(3.0)},
        {"sink": made.keywords["sink"] + 1},
    ]

    def run(variant):
        return attention(made.q, made.k, made.v, backend=place.backend, **(made.keywords | variant))

    first = [run(variant) for variant in variants]
    assert all(torch.equal(run(variant), out) for variant, out in zip(reversed(variants), reversed(first), strict=True))
    same = [torch.equal(x, y) for i, x in enumerate(first) for y in first[:i]]
    assert sum(same) == 1, "the mask of the case and the same window again"
