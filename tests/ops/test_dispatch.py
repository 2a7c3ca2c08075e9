"""Who runs a Spec: what backends declare, and forward and backward chosen separately."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, replace
from importlib import import_module

import pytest
import torch

from saccade import Spec, Unsupported, attention, explain, plan
from saccade.backends import Support, backend_module
from saccade.call import Call
from saccade.ops.dispatch import NAMES, plan_of, planned
from saccade.ops.dispatch import plan as plan_spec
from saccade.scores import bind
from saccade.testing.cases import NAMED

HOPPER = Spec.parse("bf16 group4 d128 causal aligned sm90")


def declared(**changes) -> Support:
    return replace(import_module("saccade.backends.hopper").SUPPORT, **changes)


@pytest.fixture
def everywhere(monkeypatch):
    """No machine lacks anything, as far as backends say; what they declare still counts. Plans are made anew."""
    from saccade.ops import dispatch

    for name in NAMES:
        monkeypatch.setattr(backend_module(name), "obstacle", lambda: None)
    dispatch.plan.cache_clear()
    dispatch._plans.clear()
    yield monkeypatch
    dispatch.plan.cache_clear()
    dispatch._plans.clear()


@pytest.mark.parametrize("d", [8, 24, 64, 200, 256])
def test_multiples_are_taken(d):
    assert declared(multiple_of=8).reasons(replace(HOPPER, d=d, d_v=d)) == []


@pytest.mark.parametrize(("d", "d_v"), [(4, 8), (8, 4), (12, 24), (111, 8), (1, 1), (255, 255)])
def test_other_head_dims_are_not(d, d_v):
    found = declared(multiple_of=8).reasons(replace(HOPPER, d=d, d_v=d_v))
    assert found == [f"takes head dims that are multiples of 8, not {d} and {d_v}"]
    assert declared(multiple_of=1).reasons(replace(HOPPER, d=d, d_v=d_v)) == []


def test_flags_that_have_to_be_set():
    loose = replace(HOPPER, aligned=False)
    (reason,) = declared(needs=("aligned",)).reasons(loose)
    assert "aligned" in reason
    assert declared(needs=("aligned",)).reasons(HOPPER) == []
    assert declared(needs=()).reasons(loose) == []


def test_alignment_is_no_reason_where_another_is():
    """Odd head dims make rows that are not aligned."""
    (reason,) = declared().reasons(replace(HOPPER, d=111, d_v=111, aligned=False))
    assert "multiples of 8" in reason


@pytest.mark.parametrize("name", NAMES)
def test_a_backend_runs_its_plainest_call(name):
    support = backend_module(name).SUPPORT
    device = support.devices[0].rstrip("+").replace("any", "cpu")
    assert support.reasons(support.plainest(device)) == []


@pytest.mark.parametrize("name", NAMES)
def test_a_backward_runs_where_its_forward_does(name):
    """What a backward declares is part of what its forward does, and it is there."""
    module = backend_module(name)
    if module.GRADIENT is None:
        assert not hasattr(module, "run_backward") or name == "reference"
        return
    assert callable(module.run_backward)
    for field in ("devices", "dtypes", "layouts", "masks", "scores", "flags"):
        assert set(getattr(module.GRADIENT, field)) <= set(getattr(module.SUPPORT, field))
    assert module.GRADIENT.max_d <= module.SUPPORT.max_d


def test_forward_and_backward_may_be_two_backends(everywhere):
    gluon = import_module("saccade.backends.hopper")
    everywhere.setattr(gluon, "GRADIENT", None)
    assert plan_spec(HOPPER).backend == "gluon"
    assert plan_spec(HOPPER, gradient=True).backend == "triton"
    assert plan_spec(HOPPER, "gluon", gradient=True).backend == "triton"
    assert plan_spec(HOPPER, "triton", gradient=True).backend == "triton"
    told = explain("bf16 group4 d128 causal aligned sm90")
    assert (told.backend, told.gradient) == ("gluon", "triton")
    assert "gluon: chosen, with the backward of triton" in str(told)


def test_a_backend_takes_its_own_backward_as_far_as_that_goes(everywhere):
    gluon = import_module("saccade.backends.hopper")
    everywhere.setattr(gluon, "GRADIENT", declared(max_d=128))
    for backend in ("auto", "gluon"):
        assert plan_spec(HOPPER, backend, gradient=True).backend == "gluon"
        wide = replace(HOPPER, d=256, d_v=256)
        assert plan_spec(wide, backend).backend == "gluon"
        assert plan_spec(wide, backend, gradient=True).backend == "triton"
    # Another's forward that was named does not get it.
    assert plan_spec(HOPPER, "triton", gradient=True).backend == "triton"
    told = explain("bf16 group4 d128 causal aligned sm90")
    assert told.gradient == "gluon"
    assert "gluon: chosen\n" in str(told)


def test_without_any_backward_every_backend_says_so(everywhere):
    for name in NAMES:
        everywhere.setattr(backend_module(name), "GRADIENT", None)
    with pytest.raises(Unsupported) as raised:
        plan_spec(HOPPER, gradient=True)
    assert str(raised.value).count(": has no backward") == 3
    assert "chosen, without a backward" in str(explain("bf16 group4 d128 causal aligned sm90"))


@pytest.mark.parametrize(
    ("spec", "backend"),
    [
        ("bf16 d128 aligned sm90", "gluon"),
        ("bf16 d128 sm90", "triton"),
        ("bf16 d111 sm90", "triton"),
        ("fp32 d128 aligned sm90", "triton"),
        ("bf16 d128 aligned sm80", "triton"),
        ("bf16 d128 aligned sm100", "triton"),
        ("bf16 d128 aligned gfx942", "triton"),
        ("bf16 d128 aligned cpu", "cpu"),
    ],
)
def test_auto(everywhere, spec, backend):
    assert plan(spec).backend == backend


def test_plans_of_forward_and_backward_are_kept_apart(everywhere):
    """A backend keeps launches in its Plan: those of another backend must not be in it."""
    made = NAMED["causal"].inputs()
    operands = made.q, made.k, made.v
    call = Call(*operands, mask=made.keywords["mask"], layout=made.keywords["layout"])
    ahead = plan_of(call, "auto")
    back = plan_of(call, "auto", gradient=True)
    assert ahead.launches is not back.launches
    assert planned(call, "auto", gradient=True)[0].launches is back.launches
    assert plan_of(call, "auto") is ahead


def test_planning_changes_nothing(everywhere):
    """A Call means what it meant when it came in, its key too; what the score hides is in another one's mask."""
    q, k, v = torch.randn(3, 1, 2, 12, 16)
    score = bind(lambda score, b, h, i, j: torch.where(i >= j, score + 1, -math.inf), q)
    call = Call(q, k, v, score=score)
    before, key = dict(vars(call)), call.key
    plan, hidden = planned(call, "auto")
    assert {name: vars(call)[name] for name in before} == before
    assert call.replace().key == key == call.key
    assert (str(call.spec.mask), plan.spec.mask, hidden.spec.mask) == ("none", "causal", "causal")
    assert hidden.key != key
    assert planned(call, "reference")[1].mask is None
    for name in ("mask", "out", "first_b"):
        with pytest.raises(FrozenInstanceError):
            setattr(call, name, None)


def test_auto_goes_on_where_a_problem_is_refused(everywhere):
    """By what no Spec says: the next backend is asked, and all of their reasons are told where none is left."""
    from saccade.ops import dispatch

    everywhere.setattr(dispatch, "BACKENDS", ("cpu", "reference"))
    everywhere.setattr(import_module("saccade.backends.cpu"), "refusals", lambda *a: ["not today"], raising=False)
    made = NAMED["causal"].inputs()
    call = Call(made.q, made.k, made.v, mask=made.keywords["mask"], layout=made.keywords["layout"])
    assert plan_spec(call.spec).backend == "cpu"
    assert plan_of(call, "auto").backend == "reference"
    with pytest.raises(Unsupported, match="cpu: not today"):
        plan_of(call, "cpu")
    everywhere.setattr(dispatch, "BACKENDS", ("cpu",))
    dispatch._plans.clear()
    with pytest.raises(Unsupported, match="cpu: not today"):
        plan_of(call, "auto")


def test_gradients_go_to_the_backward_that_is_planned(everywhere):
    """The operator asks for two Plans: a forward of `cpu` whose backward is another's."""
    cpu, triton = (backend_module(name) for name in ("cpu", "triton"))
    asked = []

    def backward(call, launches, saved):
        asked.append(call.spec.device)
        return cpu.run_backward(call, launches, saved)

    everywhere.setattr(triton, "SUPPORT", replace(cpu.SUPPORT, dtypes=()))
    everywhere.setattr(triton, "GRADIENT", cpu.SUPPORT)
    everywhere.setattr(triton, "run_backward", backward)
    everywhere.setattr(cpu, "GRADIENT", None)
    made = NAMED["causal"].inputs(requires_grad=True)
    for backend in ("auto", "cpu"):
        attention(made.q, made.k, made.v, backend=backend, **made.keywords).sum().backward()
    assert asked == ["cpu", "cpu"]
    assert made.q.grad is not None


@pytest.mark.parametrize("mask", ["mask_mod", "causal&mask_mod", "~causal"])
def test_masks_without_intervals(mask):
    """Where a backend has no lists of tiles, the next one runs them."""
    assert declared(masks=("causal", "window")).reasons(replace(HOPPER, mask=mask))
    assert not import_module("saccade.backends.triton").SUPPORT.reasons(replace(HOPPER, mask=mask))


def test_where_an_operand_lies_is_known_of_each():
    """Operands that are not aligned are copied, and what is kept for a key says which of them."""
    aligned = torch.zeros(1, 2, 16, 8)
    moved = torch.zeros(2 * 16 * 8 + 1)[1:].view(1, 2, 16, 8)
    keys = {
        Call(*tensors).key
        for tensors in ((moved, aligned, aligned), (aligned, moved, aligned), (aligned, aligned, moved))
    }
    assert len(keys) == 3


def test_auto_leaves_calls_to_what_is_faster(everywhere):
    """Where that runs them; a name, a backward and a backend that is alone go on with the first."""
    from saccade.ops import dispatch
    from saccade.ops.explanation import Explanation

    everywhere.setattr(dispatch, "BACKENDS", ("cpu", "reference"))
    slower = lambda call, gradient: None if gradient else "it is late"  # noqa: E731
    everywhere.setattr(import_module("saccade.backends.cpu"), "slower_than_next", slower, raising=False)
    made = NAMED["causal"].inputs()
    call = Call(made.q, made.k, made.v, mask=made.keywords["mask"], layout=made.keywords["layout"])
    assert plan_of(call, "auto").backend == "reference"
    assert plan_of(call, "cpu").backend == "cpu"
    assert plan_of(call, "auto", gradient=True).backend == "cpu"
    told = Explanation(call)
    assert (told.backend, told.outrun) == ("reference", {"cpu": "it is late"})
    assert "cpu: runs it, not chosen: it is late" in str(told)
    everywhere.setattr(dispatch, "BACKENDS", ("cpu",))
    dispatch._plans.clear()
    assert plan_of(call, "auto").backend == "cpu"


@pytest.mark.parametrize(
    ("d", "shape", "dtype", "slower"),
    [
        (64, (2, 9, 9), torch.float32, True),
        (64, (9, 9), torch.bfloat16, True),
        (64, (2, 9, 16), torch.float32, True),
        (64, (2, 9, 16), torch.bfloat16, False),
        (64, (2, 9, 16), torch.float16, False),
        (128, (2, 9, 9), torch.float32, False),
        (64, (2, 1, 9), torch.float32, False),
        (64, (9,), torch.float32, False),
    ],
)
def test_biases_of_every_score_of_few_columns_are_triton_s(d, shape, dtype, slower):
    from saccade import bias
    from saccade.backends import hopper as gluon

    q, k, v = torch.randn(3, 1, 2, 9, d).bfloat16()
    call = Call(q, k, v, score=bind(bias(torch.randn(shape, dtype=dtype)), q))
    assert (gluon.slower_than_next(call, False) is not None) == slower
