"""The backend cudnn without a GPU: who runs what, what graphs are made of, and what is done around them."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from saccade import (
    Dense,
    Unsupported,
    alibi,
    attention,
    bias,
    causal,
    compose,
    explain,
    prefix,
    relative_bias,
    softcap,
    window,
)
from saccade.backends import Saved, cudnn
from saccade.backends.cudnn import graphs, launch
from saccade.backends.cudnn.cache import MAXSIZE, GraphCache
from saccade.backends.cudnn.modification import modification
from saccade.backends.cudnn.replay import Replay
from saccade.dispatch import BACKENDS, plan_of
from saccade.problem import Problem
from saccade.reference import attention as reference
from saccade.reference import operands, probability
from saccade.scores import Graph, bind, data_type, score_callback
from saccade.scores.callbacks.graph import Recording
from saccade.testing import check
from saccade.testing.callbacks import (
    NAMES,
    USUAL,
    SoftcapCallback,
    added,
    case,
    one,
    scaled_causal,
    scaled_causal_bprop,
)
from saccade.testing.error_tally import ErrorTally


def test_it_is_never_chosen():
    assert "cudnn" not in BACKENDS
    told = str(explain("bf16 d64 causal aligned sm90"))
    assert "cudnn: nvidia-cudnn-frontend is not installed: pip install 'saccade[cudnn]'" in told or (
        "cudnn: needs a GPU" in told
    )


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
        ("bf16 d64 aligned cpu", "runs on sm80+, not on cpu"),
    ],
)
def test_refusals_by_name(spec, reason):
    assert reason in "; ".join(explain(spec).reasons["cudnn"])


def problem(score_mod=None, mask=None, s_q=7, s_k=9, h=4):
    q, k, v = (torch.randn(2, n, s, 8) for n, s in ((h, s_q), (2, s_k), (2, s_k)))
    return Problem(q, k, v, None, mask, bind(score_mod, q), Dense(), 0.3)


def test_refusals_of_what_no_spec_says(monkeypatch):
    """Lengths, and scores that cuDNN has no operations for; their gradients may be another backend's."""
    assert cudnn.refusals(problem(softcap(3.0)), True) == []
    (told,) = cudnn.refusals(problem(relative_bias(torch.randn(4, 5))), False)
    assert "score(relative_bias)" in told or "relative_bias" in told
    assert "not at computed indices" in told
    everything = problem(case("everything", 4, 7, 9).score())
    (told,) = cudnn.refusals(everything, False)
    assert told.startswith("came out wrong forward on an H200 with rounding")
    told, _ = cudnn.refusals(everything, True)
    assert told.startswith("has graphs of up to 220 operations on scores, not ")
    assert "has no backward of one query and one key" in cudnn.refusals(problem(s_q=1, s_k=1), True)
    assert cudnn.refusals(problem(s_q=1, s_k=1), False) == []
    wide = torch.zeros(1, 1, 2, 192)
    call = Problem(wide, wide, wide, None, None, None, Dense(), 0.3)
    assert cudnn.refusals(call, True) == ["has a backward of head dims up to 128 on cpu, not of 192"]
    assert cudnn.refusals(call, False) == []
    (told,) = cudnn.refusals(problem(mask=prefix(3)), False)
    assert told.startswith("has one window of keys")
    monkeypatch.setattr(cudnn, "obstacle", lambda: None)
    monkeypatch.setattr(cudnn, "SUPPORT", SimpleNamespace(reasons=lambda spec: []))
    monkeypatch.setattr(cudnn, "GRADIENT", cudnn.SUPPORT)
    call = problem(relative_bias(torch.randn(4, 5)))
    with pytest.raises(Unsupported, match="cudnn: cannot run relative_bias"):
        plan_of(call, "cudnn")
    assert plan_of(call, "cudnn", gradient=True).backend == "cpu"
    assert plan_of(problem(alibi(torch.rand(4))), "cudnn", gradient=True).backend == "cudnn"


KEYS = "a tensor of keys that is none of rows"


def words(score_mod, gradient, s=128):
    """What is refused of functions of `tests/backends/test_cudnn_gpu.py`."""
    call = problem(score_mod, None, s, s)
    return [x.partition(" with ")[2].split(", ") for x in cudnn.refusals(call, gradient)]


def test_what_came_out_wrong_is_refused():
    for name in (*USUAL, "derivatives"):
        for s in (128, 16):
            score_mod = case(name, 4, s, s).score()
            assert words(score_mod, False, s) == words(score_mod, True, s) == []
    rows, near, below = torch.rand(128), torch.rand(128, 128) > 0.5, -1
    for score_mod, forward, backward in (
        (lambda s, b, h, q, k: torch.where((q >= k) & (q - k < 90), 2 * s, -1e9), [], []),
        (lambda s, b, h, q, k: torch.where(near[q, k], rows[q], s), [], []),
        (lambda s, b, h, q, k: torch.where(near[q, k], rows[k], s), [], [[KEYS]]),
        (lambda s, b, h, q, k: s * torch.where(q - k >= -1, 2.0, 1.0), [], []),
        (lambda s, b, h, q, k: s * torch.where(q - k >= below, 2.0, 1.0), [], []),
    ):
        assert words(score_mod, False) == forward
        assert words(score_mod, True) == backward


def test_ends_of_lengths():
    """Where a score of -inf becomes something else, what lies beside the tensors is hidden: in a backward alone."""
    factors = {factor: {"neg_inf": one(-1e9), "zero": one(0.0), "factor": one(factor)} for factor in (1.5, -1.5)}
    for factor, given in factors.items():
        call = problem(score_callback(scaled_causal, scaled_causal_bprop, given, given), None, 16, 128)
        plain, mod = modification(call.score, True), launch._modification(call, True)
        assert launch._modification(call, False) is modification(call.score, False)
        assert (mod is plain) == (factor > 0)
    for score_mod, unchanged in (
        (lambda s, b, h, q, k: s * (q - k != -1), False),  # -inf by zero, somewhere
        (lambda s, b, h, q, k: s * ((k - q) % 3), False),
        (lambda s, b, h, q, k: torch.where(q - k != -1, s, -1e9), True),
        (lambda s, b, h, q, k: s + (k - q) * ROWS[q], True),
    ):
        call = problem(score_mod, None, 7, 9)
        assert (launch._modification(call, True) is modification(call.score, True)) == unchanged
    call = problem(case("derivatives", 4, 200, 300).score(), None, 200, 300)
    mod = launch._modification(call, True)
    graph, known = Graph(), {x.value: x for x in data_type}
    inputs = [graph._input("tensor", i, made=known[x.dtype]) for i, x in enumerate(mod.tensors(call.score))]
    replay = Replay(mod, inputs, data_type)
    forward = Recording.of("forward", replay.forward(graph, graph._input("score")), False)
    backward = Recording.of("backward", replay.backward(graph, graph._input("gradient")), True)
    x = torch.randn(1, 1, 256, 384)
    at = [torch.arange(n).view([-1 if i == dim else 1 for i in range(4)]) for dim, n in enumerate(x.shape)]
    there = (at[2] < 200) & (at[3] < 300)
    values = [y.reshape(()) for y in mod.tensors(call.score)]
    beside = torch.where(there, x, -torch.inf)
    torch.testing.assert_close(forward(beside, *at, *values), torch.where(there, call.score(x, *at), -torch.inf))
    found = backward(torch.where(there, 1.0, 0.0), beside, *at, *values)
    torch.testing.assert_close(found, torch.where(there, call.score.derivative(x, *at), 0.0))


BELOW, ROWS, NEAR = -3, torch.rand(7), torch.rand(7, 9) > 0.5
SCORES = {
    **{name: (lambda name=name: case(name, 4, 7, 9).score()) for name in NAMES},
    "library softcap": lambda: softcap(3.0),
    "library alibi": lambda: alibi(torch.rand(4)),
    "bias": lambda: bias(torch.randn(1, 4, 7, 9)),
    "composed": lambda: compose(softcap(3.0), alibi(torch.rand(4))),
    # Operands that engines refuse in their places: see legal.py.
    "read first": lambda: (
        lambda s, b, h, q, k: torch.where(ROWS[q] > k, 2 - ROWS[q] / (s * s + 1), NEAR[q, k] & (s > 0))
    ),
    "not": lambda: lambda s, b, h, q, k: torch.where(~((q >= k) & ~NEAR[q, k]), s * 2, torch.where(~(s > 0), 0.5, s)),
    "below": lambda: lambda s, b, h, q, k: s * torch.where((q - k >= BELOW) & (q - k < -1), 2.0, 1.0),
    "inverted": lambda: lambda s, b, h, q, k: torch.where(NEAR[q, k], -1e9, s),
    "remainders": lambda: lambda s, b, h, q, k: s * ((k - q) % 3) + (q // 2) % 5 + torch.remainder(s, 0.7),
    "function": lambda: lambda s, b, h, q, k: torch.where((q >= k) & (q - k < 3), s * (b + 1), (k - q).clamp(min=-1)),
}


@pytest.mark.parametrize("name", SCORES)
def test_graphs_compute_the_score_and_its_derivative(name):
    """Replayed onto a graph that records: what cuDNN is told is what the score function says."""
    score = problem(SCORES[name]()).score
    mod = modification(score, gradient=True)
    given = mod.tensors(score)
    assert all(x.dim() == 4 for x in given)
    assert all(x.device.type == "cpu" and x.numel() == 1 for x in given[len(mod.reads) :])
    graph, known = Graph(), {x.value: x for x in data_type}
    inputs = [graph._input("tensor", i, made=known[x.dtype]) for i, x in enumerate(given)]
    replay = Replay(mod, inputs, data_type)
    forward = Recording.of("forward", replay.forward(graph, graph._input("score")), False)
    x = 2 * torch.randn(2, 4, 7, 9)
    at = [torch.arange(n).view([-1 if i == dim else 1 for i in range(4)]) for dim, n in enumerate(x.shape)]
    values = [y.reshape(()) if y.numel() == 1 else y for y in given]
    torch.testing.assert_close(forward(x, *at, *values), score(x, *at).detach())
    grad = torch.randn_like(x)
    found = grad
    if mod.backward is not None:
        backward = Recording.of("backward", replay.backward(graph, graph._input("gradient")), True)
        found = backward(grad, x, *at, *values)
    torch.testing.assert_close(found, grad * score.derivative(x, *at))


@pytest.mark.parametrize(
    ("window", "off"), [(causal(), 0), (causal(), 2), (window(3, 1), -2), (window(2, None), 2)], ids=str
)
def test_windows_are_a_part_of_the_score(window, off):
    call = problem(alibi(torch.rand(4)), window, 7, 7 + off)
    assert cudnn.refusals(call, True) == []
    plain, mod = modification(call.score, True), launch._modification(call, True)
    assert mod.backward is plain.backward
    given = mod.tensors(call.score)
    graph, known = Graph(), {x.value: x for x in data_type}
    replay = Replay(mod, [graph._input("tensor", i, made=known[x.dtype]) for i, x in enumerate(given)], data_type)
    forward = Recording.of("forward", replay.forward(graph, graph._input("score")), False)
    x = torch.randn(2, 4, 7, 7 + off)
    at = [torch.arange(n).view([-1 if i == dim else 1 for i in range(4)]) for dim, n in enumerate(x.shape)]
    found = forward(x, *at, *(y.reshape(()) if y.numel() == 1 else y for y in given))
    seen = window.sees(call.extent, *at)
    torch.testing.assert_close(found, call.score(x, *at).where(seen, -torch.inf))


def test_callbacks_are_called_as_they_were_written():
    """The very operations, values that score_mod kept among them, which are made once; the identity is left out."""
    mod = modification(problem(case("softcap", 4, 7, 9).score()).score, True)
    graph = Graph()
    numbers = [graph._input("tensor", i) for i in range(len(mod.numbers))]
    replay = Replay(mod, numbers, data_type)
    replay.forward(graph, graph._input("score"))
    replay.backward(graph, graph._input("gradient"))
    assert [x.name for x in graph._steps[len(numbers) :]] == [
        "score", "div", "tanh", "mul", "gradient", "mul", "tanh_backward", "div",
    ]  # fmt: skip
    assert modification(problem(case("added", 4, 7, 9).score()).score, True).backward is None
    assert modification(problem(alibi(torch.rand(4))).score, True).backward is None


def test_new_numbers_are_the_same_graph():
    def made(cap):
        given, softcap = {"cap": one(cap)}, SoftcapCallback()
        call = problem(score_callback(softcap.forward, softcap.backward, given, given))
        mod = modification(call.score, True)
        return mod, [x.item() for x in mod.tensors(call.score)]

    def scaled(factor):
        call = problem(score_callback(lambda graph, score, tensors: graph.mul(score, graph.tensor_scalar(factor))))
        mod = modification(call.score, True)
        return mod, [x.item() for x in mod.tensors(call.score)]

    for make in (made, scaled):
        (first, values), (second, others) = make(0.5), make(2.0)
        assert first == second
        assert hash(first) == hash(second)
        assert {*values} == {0.5}
        assert {*others} == {2.0}


def test_cache():
    cache, built = GraphCache(), []
    for key in [*range(MAXSIZE + 1), MAXSIZE, 0]:
        cache.built(key, lambda key=key: built.append(key) or key + 1)
    assert built == [*range(MAXSIZE + 1), 0]
    assert cache.info() == (1, MAXSIZE + 2, MAXSIZE, MAXSIZE)

    def refused():
        raise RuntimeError("no engine")

    with pytest.raises(RuntimeError, match="no engine"):
        cache.built("bad", refused)
    cache.clear()
    assert cache.info() == (0, 0, MAXSIZE, 0)


class StandIn:
    """What cuDNN computes of a Form, from the oracle's probabilities, with NaN in rows that see no key: those are not
    its to define. Its backward takes the LSE and the row sums of what it is given."""

    def __init__(self, form):
        self.form = form

    def run(self, given, held, handle):
        form, (q, k, v) = self.form, (given[name] for name in "qkv")
        mask = None if form.band is None else window(*form.band)
        if not form.bottom_right and mask is not None:
            assert q.shape[2] == k.shape[2]
        used = (given[name].flatten() if name in given else None for name in ("rows", "keys"))
        call = Problem(q, k, v, None, mask, None, Dense("bhsd", *used), form.scale)
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
        ds = p * (dout @ every_v.mT - (dout * given["out"]).sum(-1, keepdim=True)) * form.scale
        given["dq"].copy_(ds @ every_k)
        for name, x in (("dk", ds.mT @ queries), ("dv", p.mT @ dout)):
            given[name].copy_(x.unflatten(1, (-1, group)).sum(2))


@pytest.fixture
def stand_in(monkeypatch):
    monkeypatch.setattr(launch, "handle", lambda device: None)
    monkeypatch.setattr(launch, "_on_device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(launch, "_graph", lambda problem, form, mine: StandIn(form))
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


@pytest.mark.usefixtures("stand_in")
def test_forms_follow_what_no_key_of_a_problem_holds(monkeypatch):
    """Scale, bounds, the LSE, and shapes of captured tensors."""
    forms, launches = [], {}

    class Kept(StandIn):
        def run(self, given, held, handle):
            forms.append(self.form)

    monkeypatch.setattr(launch, "_graph", lambda problem, form, mine: Kept(form))
    table = (
        score_callback(added, None, {"bias": torch.zeros(1, 1, 7, 9)}),
        score_callback(added, None, {"bias": torch.zeros(2, 4, 7, 9)}),
    )
    for score_mod in (None, *table):
        for mask in (window(2, 0), window(None, 2), window(2, None), window(3, 0)):
            for scale, lse in ((0.3, False), (0.3, True), (0.4, True)):
                call = replace(problem(score_mod, mask), scale=scale, launches=launches)
                launch.forward(call, lse)
    # With a score, bounds are values: the two with both are one.
    assert [len({*forms[i : i + 12]}) for i in (0, 12, 24)] == [12, 9, 9]
    assert len({*forms}) == 30


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_of_the_lse_as_columns(dtype):
    v, out, dout = (torch.randn(2, h, 5, 16, dtype=dtype) for h in (2, 4, 4))
    dlse = torch.randn(2, 4, 5)
    wider, out2, dout2 = launch.extended(v, out, dout, dlse)
    found = (out2.double() * dout2.double()).sum(-1) - (out.double() * dout.double()).sum(-1)
    tally = ErrorTally(torch.finfo(torch.float32).eps)
    tally.add(found, -dlse, -dlse, dlse)
    assert tally.ratio() <= 1
    assert wider.shape[3] == out2.shape[3] == 24
    assert not wider[..., 16:].any()


def test_graphs_of_the_frontend(stand_in, monkeypatch):
    """Where the package is, its graphs of every kind of call are valid: bounds, lengths, results and callbacks."""
    pytest.importorskip("cudnn", reason="needs the extra [cudnn]: nvidia-cudnn-frontend")
    forms = []

    class Kept(StandIn):
        def run(self, given, held, handle):
            forms.append(replace(self.form, device=0))

    monkeypatch.setattr(launch, "_graph", lambda problem, form, mine: Kept(form))
    used = torch.tensor([8, 64], dtype=torch.int32)
    calls = [
        {},
        *({"mask": mask} for mask in (causal(), window(3, 0), window(3, None))),
        {"layout": Dense("bhsd", used, used)},
        *({"score_mod": case(name, 4, 64, 64).score()} for name in NAMES),
        {"score_mod": softcap(2.0), "mask": window(5, 0)},
    ]
    for keywords in calls:
        q, k, v = (torch.randn(2, h, 64, 64, dtype=torch.bfloat16) for h in (4, 2, 2))
        score = bind(keywords.pop("score_mod", None), q)
        call = Problem(q, k, v, None, keywords.get("mask"), score, keywords.get("layout", Dense()), 0.1)
        out, lse = launch.forward(call, True)
        launch.backward(call, Saved(out, None, out, lse))
    assert len(forms) == 2 * len(calls)
    for form in forms:
        made = graphs.described(form, sm_version=90, sm_count=132)
        made.graph.validate()


def test_what_a_graph_is_given():
    """By uids, in the order of its Form, without gradients."""
    calls = []
    graph = SimpleNamespace(execute=lambda *given, **named: calls.append((given, named)))
    q, out, held = torch.randn(2, requires_grad=True), torch.randn(2), torch.ones(1)
    graphs.Built(graph, (3, 1, 2), 16).run({"q": q, "out": out}, [held], "handle")
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
