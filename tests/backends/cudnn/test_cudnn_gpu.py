"""cuDNN's graphs on a GPU, against the oracle: plain calls, callbacks, and the cache of graphs."""

from __future__ import annotations

import threading

import pytest
import torch

from saccade import Dense, Unsupported, attention, causal, softcap, window
from saccade.compat.cudnn import graph_clear, graph_info, score_callback
from saccade.compat.transformer_engine import DotProductAttention, get_attention_backend
from saccade.testing import check
from saccade.testing.callbacks import SoftcapCallback, added, case, identity_bprop, one

pytest.importorskip("cudnn", reason="needs the extra [cudnn]: nvidia-cudnn-frontend")
pytestmark = pytest.mark.gpu
BF16, FP16 = torch.bfloat16, torch.float16
USUAL = "causal", "scaled_causal", "softcap", "post_scale_bias", "alibi"


def operands(order="bshd", dtype=BF16, h_q=4, h_k=2, s_q=256, s_k=256, d=64, d_v=None, b=2):
    shapes = (b, h_q, s_q, d), (b, h_k, s_k, d), (b, h_k, s_k, d_v or d)
    return [Dense(order).ordered(torch.randn(shape, device="cuda", dtype=dtype)).contiguous() for shape in shapes]


# The plainest first: what fails here fails everywhere below.
@pytest.mark.parametrize("order", ["bhsd", "bshd", "sbhd"])
def test_without_a_mask(order):
    check(*operands(order), layout=Dense(order), backend="cudnn").assert_ok()


@pytest.mark.parametrize(
    ("mask", "shape"),
    [
        (causal(), {"dtype": FP16, "d": 128}),
        (causal(), {"s_q": 200, "s_k": 333, "h_k": 1}),
        (causal(), {"s_q": 333, "s_k": 200}),
        (window(100, 0), {"d": 128, "d_v": 64}),
        (window(100, 50), {"s_q": 256, "s_k": 300}),
        (window(100, None), {"h_q": 2}),
        (window(70, 3), {"s_q": 300, "s_k": 200}),
        (None, {"d": 256}),
        (None, {"d": 72, "s_q": 1}),
    ],
)
def test_masks_and_shapes(mask, shape):
    check(*operands(**shape), mask=mask, layout=Dense("bshd"), backend="cudnn").assert_ok()


@pytest.mark.parametrize("mask", [None, causal(), window(40, 0)])
@pytest.mark.parametrize("sink", [False, True])
def test_padding_sinks_and_gradients_of_the_lse(mask, sink):
    q, k, v = operands(b=4)
    rows, keys = (torch.tensor(x, device="cuda") for x in ([256, 77, 0, 100], [256, 120, 30, 9]))
    for x, lengths in ((q, rows), (k, keys), (v, keys)):
        for part, n in zip(x, lengths.tolist(), strict=True):
            part[n:] = torch.nan
    keywords = {"mask": mask, "sink": torch.randn(4, device="cuda") if sink else None, "backend": "cudnn"}
    dlse = torch.randn(4, 4, 256, device="cuda")
    check(q, k, v, dlse=dlse, layout=Dense("bshd", rows, keys), **keywords).assert_ok()
    plain = operands(b=4)
    check(*plain, dlse=dlse, layout=Dense("bshd"), **keywords).assert_ok()


@pytest.mark.parametrize("name", [*USUAL, "added"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_callbacks(name, dtype):
    """Both orders and gradients of what they learn, with fewer keys than heads of queries, and lengths that differ."""
    for order, s_q, s_k in (("bshd", 200, 300), ("sbhd", 256, 256)):
        score_mod = case(name, 4, s_q, s_k, "cuda").score()
        tensors = operands(order, dtype, s_q=s_q, s_k=s_k)
        check(*tensors, score_mod=score_mod, layout=Dense(order), backend="cudnn").assert_ok()


@pytest.mark.parametrize("name", USUAL)
def test_lengths_of_callbacks(name):
    for s in (16, 8192):
        tensors = operands(s_q=s, s_k=s, h_q=2, h_k=1, d=128, b=1)
        score_mod = case(name, 2, s, s, "cuda", b=1).score()
        check(*tensors, score_mod=score_mod, layout=Dense("bshd"), backend="cudnn").assert_ok()


UNARY = ("abs", "ceil", "cos", "erf", "floor", "neg", "sin"), ("log", "sqrt", "rsqrt", "reciprocal")
OPERATIONS = {
    **{name: lambda g, s, x, name=name: getattr(g, name)(input=s) for name in UNARY[0]},
    **{name: lambda g, s, x, name=name: getattr(g, name)(input=g.add(g.mul(s, s), 0.5)) for name in UNARY[1]},
    "exp": lambda g, s, x: g.exp(input=g.min(s, 1.0)),
    "tan": lambda g, s, x: g.tan(input=g.div(s, 8.0)),
    "add_square": lambda g, s, x: g.add_square(s, g.mul(s, 0.25)),
    "pow": lambda g, s, x: g.pow(input0=g.add(g.mul(s, s), 0.5), input1=0.75),
    "mod": lambda g, s, x: g.mul(s, g.mod(input0=g.gen_index(s, 3), input1=3)),
    "max": lambda g, s, x: g.max(g.mul(s, 0.5), s),
    "or": lambda g, s, x: g.mul(s, g.logical_or(g.cmp_eq(g.gen_index(s, 2), 9), g.cmp_gt(s, -0.5))),
    "below zero": lambda g, s, x: g.mul(s, g.cmp_neq(g.sub(g.gen_index(s, 2), g.gen_index(s, 3)), -1.0)),
    "batches and heads": lambda g, s, x: g.add(s, g.mul(g.gen_index(s, 1), g.gen_index(s, 0))),
    "rows": lambda g, s, x: g.mul(s, x),
}
LINEAR = "mod", "below zero", "rows"
"""Operations whose derivative is the same operation on dP; that of "batches and heads" is the identity."""


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations(name):
    """As callbacks write them; a derivative that is not written is another backend's."""
    for s_q, s_k in ((256, 256), (200, 300)):
        tensors = {"x": torch.randn(1, 1, s_q, 1, device="cuda")}

        def score_mod(graph, score, tensors):
            return OPERATIONS[name](graph, score, tensors["x"])

        bprop = score_mod if name in LINEAR else identity_bprop if name == "batches and heads" else None
        callback = score_callback(score_mod, bprop, tensors, tensors if bprop else None)
        check(*operands(s_q=s_q, s_k=s_k), score_mod=callback, layout=Dense("bshd"), backend="cudnn").assert_ok()


def test_every_derivative_that_cudnn_has():
    for s_q, s_k in ((256, 256), (200, 300)):
        score_mod = case("derivatives", 4, s_q, s_k, "cuda").score()
        check(*operands(s_q=s_q, s_k=s_k), score_mod=score_mod, layout=Dense("bshd"), backend="cudnn").assert_ok()


def test_refusals():
    """Score functions that are no callbacks, and masks beside a callback; a sink beside one runs."""
    callback = case("softcap", 4, 256, 256).score()
    sink = torch.randn(4, device="cuda")
    check(*operands(), score_mod=callback, sink=sink, layout=Dense("bshd"), backend="cudnn").assert_ok()
    for keywords in ({"score_mod": softcap(2.0)}, {"score_mod": callback, "mask": causal()}):
        with pytest.raises(Unsupported, match="cudnn: "):
            attention(*operands(), layout=Dense("bshd"), backend="cudnn", **keywords)


@pytest.mark.parametrize("name", [None, "softcap"])
def test_deterministic(name):
    tensors = [x.requires_grad_() for x in operands(s_q=1024, s_k=1024)]
    score_mod = name and case(name, 4, 1024, 1024).score()
    results = []
    for _ in range(3):
        out = attention(*tensors, score_mod=score_mod, layout=Dense("bshd"), deterministic=True, backend="cudnn")
        results.append([out, *torch.autograd.grad(out.square().sum(), tensors)])
    for again in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(again, results[0], strict=True))


def test_graphs_are_built_once():
    """For new scalars, constants too, new closures and callbacks without a key; again for other shapes."""
    graph_clear()
    tensors = [x.requires_grad_() for x in operands()]

    def step(score_mod):
        out = attention(*tensors, score_mod=score_mod, layout=Dense("bshd"), backend="cudnn")
        return out, *torch.autograd.grad(out.sum(), tensors)

    def softcapped(cap):
        kept, given = SoftcapCallback(), {"cap": one(cap)}
        return score_callback(kept.forward, kept.backward, given, given)

    first, *_ = step(softcapped(0.5))
    assert graph_info().misses == 2
    for cap in (0.8, 30.0):
        other, *_ = step(softcapped(cap))
        assert not torch.equal(first, other)
    assert graph_info().misses == 2

    def scaled(factor):
        def times(graph, x, tensors):
            return graph.mul(a=x, b=graph.tensor_scalar(factor))

        return score_callback(times, times)

    found = [step(scaled(factor))[0] for factor in (0.5, 2.0, 0.5)]
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[1])
    assert graph_info().misses == 4
    for keys in (1, 256):
        step(score_callback(added, identity_bprop, {"bias": torch.zeros(1, 1, 256, keys, device="cuda")}))
    assert graph_info().misses == 8


def test_threads_and_streams():
    tensors = operands()
    score_mod = case("softcap", 4, 256, 256).score()
    keywords = {"score_mod": score_mod, "layout": Dense("bshd"), "backend": "cudnn"}
    wanted = attention(*tensors, **keywords)
    torch.cuda.synchronize()
    found = []

    def work():
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                out = attention(*tensors, **keywords)
            torch.cuda.current_stream().synchronize()
            found.append(torch.equal(out, wanted))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 4


def test_in_a_cuda_graph_and_compiled():
    tensors = operands()
    score_mod = case("softcap", 4, 256, 256).score()
    keywords = {"score_mod": score_mod, "layout": Dense("bshd"), "backend": "cudnn"}
    wanted = attention(*tensors, **keywords)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(*tensors, **keywords)
    out.zero_()
    graph.replay()
    assert torch.equal(out, wanted)
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, mask=causal(), layout=Dense("bshd"), backend="cudnn"))
    plain = attention(*tensors, mask=causal(), layout=Dense("bshd"), backend="cudnn")
    assert torch.equal(compiled(*tensors), plain)


@pytest.mark.parametrize("order", ["sbhd", "bshd"])
@pytest.mark.parametrize("name", ["causal", "softcap", "post_scale_bias"])
def test_transformer_engine(name, order):
    """Its own tests' shapes: b = 2, h = 4, d = 64, s = 16 or 64."""
    s = 64 if name == "causal" else 16
    tensors = [x.requires_grad_() for x in operands(order, h_k=4, s_q=s, s_k=s)]
    core = DotProductAttention(4, 64, qkv_format=order, attn_mask_type="no_mask", layer_number=1, backend="cudnn")
    given = case(name, 4, s, s, "cuda")
    out = core(*tensors, qkv_format=order, attn_mask_type="no_mask", **given._asdict())
    wanted = attention(*tensors, score_mod=given.score(), layout=Dense(order), backend="cudnn").flatten(-2)
    assert torch.equal(out, wanted)
    assert get_attention_backend(core, *tensors, **given._asdict()).backend == "cudnn"
