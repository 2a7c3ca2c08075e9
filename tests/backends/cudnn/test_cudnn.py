"""The backend cudnn without a GPU: who runs what, what graphs are made of, and what is done around them."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from saccade import Dense, Unsupported, alibi, attention, bias, causal, explain, prefix, relative_bias, softcap, window
from saccade.backends import Saved, cudnn
from saccade.backends.cudnn import graphs, launch
from saccade.backends.cudnn.graphs import GraphReplay, score_graph
from saccade.backends.reference import attention as reference
from saccade.backends.reference import operands, probability
from saccade.call import Call
from saccade.ops.dispatch import BACKENDS, plan_of
from saccade.scores import Graph, bind, data_type, score_callback
from saccade.scores.callbacks.graph import CallbackGraph
from saccade.testing import check
from saccade.testing.accuracy import ErrorTally
from saccade.testing.callbacks import SoftcapCallback, added, case, one

CALLBACKS = "causal", "scaled_causal", "softcap", "post_scale_bias", "alibi", "added", "derivatives"
"""Those of `saccade.testing.callbacks` that cuDNN runs."""


def test_it_is_never_chosen():
    assert "cudnn" not in BACKENDS
    told = str(explain("bf16 d64 causal aligned sm90"))
    missing = "cudnn: nvidia-cudnn-frontend is not installed: pip install 'saccade[cudnn]'"
    assert missing in told or "cudnn: runs it, not chosen" in told


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("fp32 d64 sm90", "takes fp16, bf16, not fp32"),
        ("bf16 d64 packed aligned sm90", "has no packed layout"),
        ("bf16 d60 aligned sm90", "multiples of 8"),
        ("bf16 d64 sm90", "aligned rows"),
        ("bf16 d64 dropout aligned sm90", "has no dropout"),
        ("bf16 d64 documents aligned sm90", "has no mask documents"),
        ("bf16 d64 padded score(f) aligned sm90", "has no padded with score"),
        ("bf16 d64 causal score(f) aligned sm90", "has no causal with score"),
        ("bf16 d64 window score(f) aligned sm90", "has no window with score"),
        ("bf16 d64 softcap aligned sm90", "has no score softcap"),
        ("bf16 d64 aligned cpu", "runs on sm80+, not on cpu"),
    ],
)
def test_refusals_by_name(spec, reason):
    assert reason in "; ".join(explain(spec).reasons["cudnn"])


def call_of(score_mod=None, mask=None, s_q=7, s_k=9, h=4):
    q, k, v = (torch.randn(2, n, s, 8) for n, s in ((h, s_q), (2, s_k), (2, s_k)))
    return Call(q, k, v, mask=mask, score=bind(score_mod, q), scale=0.3)


def test_refusals_of_what_no_spec_says(monkeypatch):
    """Lengths, masks and callbacks; gradients may be another backend's."""
    assert "has no backward for one query and one key" in cudnn.refusals(call_of(s_q=1, s_k=1), True)
    assert cudnn.refusals(call_of(s_q=1, s_k=1), False) == []
    wide = torch.zeros(1, 1, 2, 192)
    call = Call(wide, wide, wide, scale=0.3)
    assert cudnn.refusals(call, True) == ["supports head dims up to 128 in the backward on cpu, not 192"]
    assert cudnn.refusals(call, False) == []
    (reason,) = cudnn.refusals(call_of(mask=prefix(3)), False)
    assert reason.startswith("takes causal masks and windows")
    monkeypatch.setattr(cudnn, "obstacle", lambda: None)
    monkeypatch.setattr(cudnn, "SUPPORT", SimpleNamespace(reasons=lambda spec: []))
    monkeypatch.setattr(cudnn, "GRADIENT", cudnn.SUPPORT)
    with pytest.raises(Unsupported, match="cudnn: takes score functions only as callbacks"):
        plan_of(call_of(relative_bias(torch.randn(4, 5))), "cudnn")
    call = call_of(case("softcap", 4, 7, 9)._replace(score_mod_bprop=None, score_mod_bprop_tensors=None).score())
    assert plan_of(call, "cudnn").backend == "cudnn"
    assert plan_of(call, "cudnn", gradient=True).backend == "cpu"
    assert plan_of(call_of(case("softcap", 4, 7, 9).score()), "cudnn", gradient=True).backend == "cudnn"


NO_CALLBACKS = {
    "softcap": lambda: softcap(3.0),
    "alibi": lambda: alibi(torch.rand(4)),
    "bias": lambda: bias(torch.randn(1, 4, 7, 9)),
    "score(f)": lambda: lambda f, b, h, q_idx, kv_idx: f * (q_idx - kv_idx),
}


@pytest.mark.parametrize("name", NO_CALLBACKS)
def test_other_score_functions_are_refused(name):
    """Whatever cuDNN has operations for: other backends run them."""
    for gradient in (False, True):
        (reason,) = cudnn.refusals(call_of(NO_CALLBACKS[name]()), gradient)
        assert reason.startswith("takes score functions only as callbacks (saccade.compat.cudnn.score_callback)")


@pytest.mark.parametrize("name", CALLBACKS)
def test_callbacks_are_taken(name):
    score_mod = case(name, 4, 7, 9).score()
    assert cudnn.refusals(call_of(score_mod), False) == cudnn.refusals(call_of(score_mod), True) == []


FIRST = "takes a computed value as the first operand of "
SELECT = "takes a computed mask in binary_select"
BELOW = "gives wrong results on an H200 for comparisons with an integer that may be negative: pass a float"


def refused(fn, gradient=False, **tensors):
    bprop = (lambda g, dP, t: dP) if gradient else None
    return cudnn.refusals(call_of(score_callback(lambda g, s, t: fn(g, s, **t), bprop, tensors)), gradient)


@pytest.mark.parametrize(
    ("reason", "fn"),
    [
        (FIRST + "mul", lambda g, s, x: g.mul(x, s)),
        (FIRST + "sub", lambda g, s, x: g.mul(s, g.sub(2.0, s))),
        (SELECT, lambda g, s, x: g.binary_select(s, 0.5, g.cmp_gt(s, 0.0))),
        (SELECT, lambda g, s, x: g.binary_select(s, x, g.cmp_gt(s, 0.0))),
        (SELECT, lambda g, s, x: g.binary_select(s, 0.0, x)),
        (BELOW, lambda g, s, x: g.mul(s, g.cmp_ge(g.sub(g.gen_index(s, 2), g.gen_index(s, 3)), -1))),
        ("gives wrong results on an H200 for logical_not", lambda g, s, x: g.mul(s, g.logical_not(g.cmp_gt(s, 0.0)))),
        ("gives wrong results on an H200 for scale: use mul", lambda g, s, x: g.scale(s, x)),
        (
            "gives wrong results on an H200 for rounding",
            lambda g, s, x: g.add(g.add(s, x).set_data_type(data_type.BFLOAT16), 1.0),
        ),
    ],
)
def test_what_engines_refuse_or_compute_wrong(reason, fn):
    (found,) = refused(fn, x=torch.rand(1, 1, 7, 9))
    assert found.startswith(reason)


def test_limits_of_tensors_and_sizes():
    ones = torch.ones(1, 1, 7, 9, dtype=torch.bool)
    assert refused(lambda g, s, x: g.mul(s, x), x=ones) == ["does not take bool tensors in a callback: pass int32"]
    keys, rows = torch.rand(1, 1, 1, 9), torch.rand(1, 1, 7, 1)
    for gradient in (False, True):
        assert refused(lambda g, s, x: g.add(s, x), gradient, x=rows) == []
        found = refused(lambda g, s, x: g.add(s, x), gradient, x=keys)
        assert (
            found
            == ["gives wrong gradients on an H200 for a tensor that depends on the key and not on the row"] * gradient
        )
    limits = cudnn.refusals(call_of(case("band", 4, 7, 9).score()), False)
    assert len(limits) == 5
    (reason,) = refused(lambda g, s, x: [s := g.add(s, x) for _ in range(221)][-1], x=torch.rand(1, 1, 7, 9))
    assert reason == "runs up to 220 operations on scores, not 221"


def replayed(graph, derivative=True):
    """A ScoreGraph on a graph that records: what cuDNN is told, as functions of tiles."""
    recorder, known = Graph(), {x.value: x for x in data_type}
    inputs = [
        recorder._input("tensor", i, result_type=known[dtype or torch.float32])
        for i, (*_, dtype) in enumerate(graph.inputs)
    ]
    replay = GraphReplay(graph, inputs, data_type)
    forward = CallbackGraph.of("forward", replay.forward(recorder, recorder._input("score")), False)
    if not derivative or graph.backward is None:
        return forward, lambda gradient, *_: gradient
    return forward, CallbackGraph.of("backward", replay.backward(recorder, recorder._input("gradient")), True)


def places(x):
    return [torch.arange(n).view([-1 if i == dim else 1 for i in range(4)]) for dim, n in enumerate(x.shape)]


@pytest.mark.parametrize("name", CALLBACKS)
def test_graphs_compute_the_score_and_its_derivative(name):
    """Replayed onto a graph that records: what cuDNN is told is what the callback says."""
    score = call_of(case(name, 4, 7, 9).score()).score
    graph = score_graph(score, gradient=True)
    tensors = graph.tensors(score)
    assert all(x.dim() == 4 for x in tensors)
    by_value = [x for x, read in zip(tensors, graph.inputs, strict=True) if read.name != "tensor"]
    assert all(x.device.type == "cpu" and x.numel() == 1 for x in by_value)
    forward, backward = replayed(graph)
    x = 2 * torch.randn(2, 4, 7, 9)
    at, values = places(x), [y.reshape(()) if y.numel() == 1 else y for y in tensors]
    torch.testing.assert_close(forward(x, *at, *values), score(x, *at).detach())
    dP = torch.randn_like(x)
    torch.testing.assert_close(backward(dP, x, *at, *values), dP * score.derivative(x, *at))


@pytest.mark.parametrize(("s_q", "s_k"), [(200, 300), (128, 300), (200, 256), (128, 256)])
def test_ends_of_lengths(s_q, s_k):
    """In a backward, what lies outside of the tensors is -inf, with a gradient of zero."""
    call = call_of(case("derivatives", 4, s_q, s_k).score(), None, s_q, s_k)
    assert launch._score_graph(call, {}, False) is score_graph(call.score, False)
    graph = launch._score_graph(call, {}, True)
    assert (graph is score_graph(call.score, True)) == (s_q == 128 and s_k == 256)
    forward, backward = replayed(graph)
    x = torch.randn(1, 1, 256, 384)
    at, values = places(x), [y.reshape(()) for y in graph.tensors(call.score)]
    rows, keys = (n if n % 128 else 512 for n in (s_q, s_k))
    inside = (at[2] < rows) & (at[3] < keys)
    outside = torch.where(inside, x, -torch.inf)
    torch.testing.assert_close(forward(outside, *at, *values), torch.where(inside, call.score(x, *at), -torch.inf))
    found = backward(torch.where(inside, 1.0, 0.0), outside, *at, *values)
    torch.testing.assert_close(found, torch.where(inside, call.score.derivative(x, *at), 0.0))


def test_callbacks_are_called_as_they_were_written():
    """The very operations, values that score_mod kept among them, which are made once; the identity is left out."""
    graph = score_graph(call_of(case("softcap", 4, 7, 9).score()).score, True)
    recorder = Graph()
    inputs = [recorder._input("tensor", i) for i in range(len(graph.inputs))]
    replay = GraphReplay(graph, inputs, data_type)
    replay.forward(recorder, recorder._input("score"))
    replay.backward(recorder, recorder._input("gradient"))
    assert [x.name for x in recorder._steps[len(inputs) :]] == [
        "score", "div", "tanh", "mul", "gradient", "mul", "tanh_backward", "div",
    ]  # fmt: skip
    assert score_graph(call_of(case("added", 4, 7, 9).score()).score, True).backward is None


def test_new_numbers_are_the_same_graph():
    def kept(cap):
        given, softcap = {"cap": one(cap)}, SoftcapCallback()
        return score_callback(softcap.forward, softcap.backward, given, given)

    def scaled(factor):
        return score_callback(
            lambda graph, score, tensors: graph.mul(score, graph.tensor_scalar(factor)),
            lambda graph, dP, tensors: graph.mul(dP, graph.tensor_scalar(factor)),
        )

    for make in (kept, scaled):
        scores = [call_of(make(value)).score for value in (0.5, 2.0)]
        first, second = (score_graph(score, True) for score in scores)
        assert first == second
        assert hash(first) == hash(second)
        assert {x.item() for x in first.tensors(scores[0])} == {0.5}
        assert {x.item() for x in second.tensors(scores[1])} == {2.0}


def test_failed_builds_are_not_kept(monkeypatch):
    def refuse(key, handle):
        raise RuntimeError("no engine")

    graphs.graph_cache.clear()
    key = graphs.GraphKey(0, (), 1.0)
    with monkeypatch.context() as patched:
        patched.setattr(graphs, "build", refuse)
        with pytest.raises(RuntimeError, match="no engine"):
            graphs.built_graph(key, None)
    monkeypatch.setattr(graphs, "build", lambda key, handle: "built")
    assert [graphs.built_graph(key, None) for _ in range(2)] == ["built"] * 2
    assert graphs.graph_cache.info() == (1, 2, 128, 1)
    graphs.graph_cache.clear()


class StandIn:
    """What cuDNN computes for a GraphKey, from the oracle's probabilities. Rows that see no key are NaN, as cuDNN does
    not define them. Its backward takes the LSE and the row sums of what it is given."""

    def __init__(self, key):
        self.key = key

    def run(self, given, score_inputs, handle):
        key, (q, k, v) = self.key, (given[name] for name in "qkv")
        mask = None if key.window is None else window(*key.window)
        if not key.bottom_right and mask is not None:
            assert q.shape[2] == k.shape[2]
        used = (given[name].flatten() if name in given else None for name in ("rows", "keys"))
        call = Call(q, k, v, mask=mask, layout=Dense("bhsd", *used), scale=key.scale)
        if "dout" not in given:
            out, lse, _ = reference(call)
            blind = lse == -torch.inf
            given["out"].copy_(out.masked_fill(blind[..., None], torch.nan))
            if "stats" in given:
                given["stats"].copy_(lse.masked_fill(blind, torch.nan)[..., None])
            return
        queries, every_k, every_v = operands(call)
        p, lse, _ = probability(call, queries, every_k)
        p = p * torch.exp(lse - given["stats"][..., 0]).nan_to_num(0)[..., None]
        dout, group = given["dout"], q.shape[1] // k.shape[1]
        ds = p * (dout @ every_v.mT - (dout * given["out"]).sum(-1, keepdim=True)) * key.scale
        given["dq"].copy_(ds @ every_k)
        for name, x in (("dk", ds.mT @ queries), ("dv", p.mT @ dout)):
            given[name].copy_(x.unflatten(1, (-1, group)).sum(2))


@pytest.fixture
def stand_in(monkeypatch):
    monkeypatch.setattr(launch, "handle_of", lambda device: None)
    monkeypatch.setattr(launch, "on_device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(launch, "_graph", lambda call, key, handle: StandIn(key))
    monkeypatch.setattr(cudnn, "obstacle", lambda: None)
    anything = SimpleNamespace(reasons=lambda spec: [])
    monkeypatch.setattr(cudnn, "SUPPORT", anything)
    monkeypatch.setattr(cudnn, "GRADIENT", anything)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize(
    ("s_q", "s_k", "mask", "used"),
    [
        (9, 9, causal(), None),
        (5, 9, window(2, 1), None),
        (9, 5, causal(), None),
        (9, 6, window(1, None), None),
        (8, 9, None, "all"),
        (8, 9, causal(), "all"),
        (8, 9, window(2, 0), "keys"),
        (4, 0, None, None),
    ],
)
def test_around_the_graphs(s_q, s_k, mask, used, sink):
    """Padding with NaN in it, rows without keys, sinks, and gradients of the LSE."""
    q, k, v = (torch.randn(3, s, h, 8) for s, h in ((s_q, 4), (s_k, 2), (s_k, 2)))
    rows, keys = torch.tensor([8, 3, 0]), torch.tensor([9, 2, 4])
    if used:
        for x, lengths in ((k, keys), (v, keys)) if used == "keys" else ((q, rows), (k, keys), (v, keys)):
            for part, n in zip(x, lengths, strict=True):
                part[n:] = torch.nan
    layout = Dense("bshd", rows if used == "all" else None, keys if used else None)
    keywords = {"mask": mask, "layout": layout, "sink": torch.randn(4) if sink else None}
    dlse = torch.randn(3, 4, s_q)
    check(q, k, v, dlse=dlse, backend="cudnn", **keywords).assert_ok()
    check(q, k, v, backend="cudnn", **keywords).assert_ok()


@pytest.fixture
def keys(stand_in, monkeypatch):
    """The keys of graphs that run."""
    found = []

    class Listed(StandIn):
        def run(self, given, score_inputs, handle):
            found.append(self.key)

    monkeypatch.setattr(launch, "_graph", lambda call, key, handle: Listed(key))
    return found


def test_graph_keys_hold_what_no_key_of_a_problem_does(keys):
    """Scale, bounds, the LSE, and shapes of captured tensors."""
    launches = {}
    masks = window(2, 0), window(None, 2), window(2, None), window(3, 0)
    tables = (score_callback(added, None, {"bias": torch.zeros(*n, 7, 9)}) for n in ((1, 1), (2, 4)))
    for score_mod, mask in (*((None, mask) for mask in masks), *((table, None) for table in tables)):
        for scale, lse in ((0.3, False), (0.3, True), (0.4, True)):
            launch.forward(call_of(score_mod, mask).replace(scale=scale), launches, lse)
    assert len(keys) == len({*keys}) == 18


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_of_the_lse_as_columns(dtype):
    v, out, dout = (torch.randn(2, h, 5, 16, dtype=dtype) for h in (2, 4, 4))
    dlse = torch.randn(2, 4, 5)
    wider, out2, dout2 = launch.append_dlse(v, out, dout, dlse)
    found = (out2.double() * dout2.double()).sum(-1) - (out.double() * dout.double()).sum(-1)
    tally = ErrorTally(torch.finfo(torch.float32).eps)
    tally.add(found, -dlse, -dlse, dlse)
    assert tally.ratio() <= 1
    assert wider.shape[3] == out2.shape[3] == 24
    assert not wider[..., 16:].any()


def test_graphs_of_the_frontend(keys):
    """Where the package is, its graphs of every kind of call are valid: bounds, lengths, results and callbacks."""
    pytest.importorskip("cudnn", reason="needs the extra [cudnn]: nvidia-cudnn-frontend")
    used = torch.tensor([8, 64], dtype=torch.int32)
    calls = [
        {},
        *({"mask": mask} for mask in (causal(), window(3, 0), window(3, None))),
        {"layout": Dense("bhsd", used, used)},
        *({"score_mod": case(name, 4, 64, 64).score()} for name in CALLBACKS),
    ]
    for keywords in calls:
        q, k, v = (torch.randn(2, h, 64, 64, dtype=torch.bfloat16) for h in (4, 2, 2))
        score = bind(keywords.pop("score_mod", None), q)
        call = Call(q, k, v, mask=keywords.get("mask"), score=score, layout=keywords.get("layout", Dense()), scale=0.1)
        out, lse = launch.forward(call, {}, True)
        launch.backward(call, {}, Saved(out, None, out, lse))
    assert len(keys) == 2 * len(calls)
    for key in keys:
        description = graphs.describe(replace(key, device=0), sm_version=90, sm_count=132)
        description.graph.validate()


def test_what_a_graph_is_given():
    """By uids, in the order of its key, without gradients."""
    calls = []
    graph = SimpleNamespace(execute=lambda *given, **named: calls.append((given, named)))
    q, out, held = torch.randn(2, requires_grad=True), torch.randn(2), torch.ones(1)
    graphs.BuiltGraph(graph, (3, 1, 2), 16).run({"q": q, "out": out}, [held], "handle")
    (((first, *others), workspace), named), *_ = calls
    assert not first.requires_grad
    assert first.data_ptr() == q.data_ptr()
    assert others[0] is out
    assert others[1] is held
    assert workspace.numel() == 16
    assert named == {"handle": "handle", "tensor_uids": (3, 1, 2)}


def test_a_call_without_the_package_says_what_to_install():
    q = torch.randn(1, 1, 16, 8, dtype=torch.bfloat16)
    with pytest.raises(Unsupported, match="cudnn: runs on sm80"):
        attention(q, q, q, backend="cudnn")
