"""PyTorch citizenship: schema, fakes, autograd, compile, transforms, autocast, checkpointing, flops."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from saccade import Dense, attention, causal, documents, explain, prefix, softcap, window
from saccade.testing.cases import NAMED, Case

CASES = [
    "plain",
    "window",
    "prefixes",
    "documents-causal",
    "everything",
    "ragged-sink",
    "softcap-sink",
    "d192-128",
    "dropout",
    "dropout-everything",
    "no-keys",
    "packed",
    "packed-used",
]
CALLS = {name: NAMED[name] for name in CASES} | {"ranges": NAMED["packed-cross"].replace(name="ranges", ranges=True)}


class Recorder(TorchDispatchMode):
    """Keeps the arguments of the operators that a call reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.forward = self.backward = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.saccade.forward.default:
            self.forward = args
        if func is torch.ops.saccade.backward.default:
            self.backward = args
        return func(*args, **(kwargs or {}))


def recorded(case: Case, lse_gradient: bool = False) -> Recorder:
    made = case.inputs(requires_grad=True)
    with Recorder() as recorder:
        found = attention(made.q, made.k, made.v, return_lse=True, **made.keywords)
        torch.autograd.backward(found if lse_gradient else found[:1], [made.dout, made.dlse][: 1 + lse_gradient])
    return recorder


# Schema and fakes


@pytest.mark.slow
@pytest.mark.sample
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_opcheck_of_forward(name, gradients):
    case = CALLS[name]
    args = [x.detach().clone() if isinstance(x, Tensor) else x for x in recorded(case).forward]
    if case.used != "all" or case.ranges:  # opcheck does not know that NaN is equal to NaN
        args = [x.nan_to_num() if isinstance(x, Tensor) else x for x in args]
    for x in args[:4]:
        if isinstance(x, Tensor):
            x.requires_grad_(gradients)
    for lse in (False, True):
        opcheck(torch.ops.saccade.forward.default, (*args[:-1], lse))


@pytest.mark.parametrize("lse_gradient", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_opcheck_of_backward(name, lse_gradient):
    args = recorded(CALLS[name].replace(dtype="fp32"), lse_gradient).backward
    opcheck(torch.ops.saccade.backward.default, args, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("order", ["bhsd", "bshd", "sbhd"])
def test_fakes_have_the_strides_of_results(order):
    """As they are for views of every memory order, too."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    case = Case("", dtype="fp32", b=3, h_q=4, s_q=6, s_k=7, d=8, d_v=5, order=order, sink=True)
    made = case.inputs(requires_grad=True)
    for permutation in [(0, 1, 2, 3), (2, 1, 0, 3), (1, 2, 0, 3), (1, 0, 2, 3)]:
        back = [permutation.index(dim) for dim in range(4)]
        tensors = [x.permute(permutation).contiguous().permute(back) for x in (made.q, made.k, made.v)]
        with Recorder() as recorder:
            attention(*tensors, **made.keywords).backward(made.dout)
        for operator, args in (("forward", recorder.forward), ("backward", recorder.backward)):
            function = getattr(torch.ops.saccade, operator).default
            mode = FakeTensorMode()
            fakes = torch.utils._pytree.tree_map_only(Tensor, mode.from_tensor, args)
            with mode:
                promised = function(*fakes)
            with torch.no_grad():
                found = function(*args)
            forms = ([(x.shape, x.stride(), x.dtype) for x in tree_leaves(given)] for given in (promised, found))
            assert next(forms) == next(forms)


# Compilation


def _call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v, mask=causal() & window(9, None), score_mod=softcap(5.0))


def _compiled(function, **options):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(function, fullgraph=True, backend=counter, **options), counter


def _tensors(s: int, **options) -> list[Tensor]:
    return [torch.randn(2, h, s, 16, **options) for h in (4, 2, 2)]


@pytest.mark.parametrize("gradients", [False, True])
def test_compile(gradients):
    compiled, counter = _compiled(_call)
    leaves = [x.requires_grad_(gradients) for x in _tensors(20)]
    found, wanted = compiled(*leaves), _call(*leaves)
    assert counter.frame_count == 1
    assert torch.equal(found, wanted)
    if gradients:
        pairs = (torch.autograd.grad(x.square().sum(), leaves) for x in (found, wanted))
        assert all(map(torch.equal, *pairs))


@pytest.mark.parametrize("gradients", [False, True])
def test_one_compilation_serves_every_length(gradients):
    compiled, _ = _compiled(_call, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for s in (20, 2, 33, 64, 129):
            leaves = [x.requires_grad_(gradients) for x in _tensors(s)]
            found, wanted = compiled(*leaves), _call(*leaves)
            assert torch.equal(found, wanted)
            if gradients:
                pairs = (torch.autograd.grad(x.square().sum(), leaves) for x in (found, wanted))
                assert all(map(torch.equal, *pairs))


def test_automatic_dynamic_shapes():
    """Without being told: the second length compiles again, for all that follow."""
    compiled, counter = _compiled(_call)
    for s in (20, 30, 40, 50, 60):
        tensors = _tensors(s)
        assert torch.equal(compiled(*tensors), _call(*tensors))
    assert counter.frame_count == 2


@pytest.mark.slow
@pytest.mark.parametrize("own", [(2, 4, True, True), (2, 1, 1, True), (True, True), (True, 1)], ids=str)
def test_one_compilation_serves_mask_tensors_of_every_length(own):
    """True: as long as rows, or keys."""

    def layer(q, k, v, visible):
        return attention(q, k, v, mask=visible)

    compiled, _ = _compiled(layer, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for s in (20, 31, 50):
            q, (_, k, v) = _tensors(s)[0], _tensors(s + 3)
            lengths = (*own[:-2], *(n if x is True else x for x, n in zip(own[-2:], (s, s + 3), strict=True)))
            visible = torch.rand(lengths) < 0.8
            assert torch.equal(compiled(q, k, v, visible), layer(q, k, v, visible))


def test_one_compilation_serves_every_record():
    """Ids, used lengths and prefix lengths are runtime values."""

    def layer(q, k, v, sink, ids, used, lengths):
        mask = documents(ids) & causal()
        out, lse = attention(q, k, v, mask=mask, sink=sink, layout=Dense("bhsd", seqused_k=used), return_lse=True)
        return out * lse.exp()[..., None].clamp(max=2) + attention(q, k, v, mask=prefix(lengths))

    compiled, _ = _compiled(layer, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for s in (20, 31, 50):
            ids, used, lengths = torch.arange(s)[None].expand(2, s) // 7, torch.tensor([s, s - 3]), torch.tensor([3, s])
            leaves = [x.requires_grad_() for x in (*_tensors(s), torch.randn(4))]
            found, wanted = (function(*leaves, ids, used, lengths) for function in (compiled, layer))
            assert torch.equal(found, wanted)
            pairs = (torch.autograd.grad(x.square().sum(), leaves) for x in (found, wanted))
            assert all(map(torch.equal, *pairs))


def test_a_mask_as_an_argument_of_the_compiled_region():
    compiled, counter = _compiled(lambda q, k, v, mask: attention(q, k, v, mask=mask) + 1)
    tensors = _tensors(12)
    masks = [documents(torch.randint(0, 3, (2, 12))) & causal() for _ in range(4)]
    for mask in masks:
        assert torch.equal(compiled(*tensors, mask), attention(*tensors, mask=mask) + 1)
    assert counter.frame_count == 1


FIRST_CALL = """
import torch
from saccade import attention, causal, softcap
call = lambda q, k, v: attention(q, k, v, mask=causal(), score_mod=softcap(3.0))
q, k, v = (torch.randn(1, 2, 20, 16, requires_grad=True) for _ in range(3))
out = torch.compile(call, fullgraph=True, dynamic={dynamic})(q, k, v)
out.sum().backward()
found = out, q.grad, k.grad, v.grad
leaves = [x.detach().requires_grad_() for x in (q, k, v)]
wanted = call(*leaves)
wanted.sum().backward()
assert all(map(torch.equal, found, (wanted, *(x.grad for x in leaves))))
print("the same")
"""


@pytest.mark.rare
@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_as_the_first_call_of_a_process(dynamic, fresh_process):
    """With Inductor, torch.compile's own backend."""
    assert fresh_process(FIRST_CALL.format(dynamic=dynamic)) == "the same\n"


def test_export():
    class Layer(torch.nn.Module):
        def forward(self, q, k, v):
            return _call(q, k, v)

    tensors = tuple(_tensors(20))
    exported = torch.export.export(Layer(), tensors)
    assert torch.equal(exported.module()(*tensors), _call(*tensors))
    assert [node.target for node in exported.graph.nodes if "saccade" in str(node.target)] == [
        torch.ops.saccade.forward.default
    ]


# Autograd


@pytest.mark.sample
@pytest.mark.parametrize(
    "keywords",
    [
        {},
        {"mask": causal()},
        {"mask": window(2, 1), "score_mod": softcap(1.5)},
        {"mask": prefix(3) & window(3, 3)},
        {"mask": documents(torch.tensor([[0, 1, 0, 1, 1, 2]])) | window(1, 0)},
        {"layout": Dense("bhsd", torch.tensor([4, 0]), torch.tensor([6, 2])), "mask": causal()},
        {"layout": Dense("bshd"), "scale": 0.7},
    ],
    ids=str,
)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_gradcheck(backend, keywords):
    layout = keywords.get("layout", Dense())
    b = 2 if layout.tensors else 1
    shapes = [(b, 2, 6, 2), (b, 1, 6, 2), (b, 1, 6, 3)]
    leaves = [layout.ordered(torch.randn(shape, dtype=torch.float64)).requires_grad_() for shape in shapes]
    sink = torch.randn(2, dtype=torch.float64, requires_grad=True)

    def results(q, k, v, sink):
        out, lse = attention(q, k, v, sink=sink, backend=backend, return_lse=True, **keywords)
        return out, torch.where(lse == -torch.inf, 0, lse)  # finite differences of -inf are NaN

    assert torch.autograd.gradcheck(results, (*leaves, sink))
    assert torch.autograd.gradcheck(lambda *leaves: attention(*leaves, backend=backend, **keywords), leaves)


def test_double_backward():
    leaves = [torch.randn(1, h, 3, 2, dtype=torch.float64, requires_grad=True) for h in (2, 1, 1)]
    gradients = torch.autograd.grad(attention(*leaves).square().sum(), leaves, create_graph=True)
    with pytest.raises(RuntimeError, match=re.escape('pass backend="reference"')):
        torch.autograd.grad(gradients[0].sum(), leaves)
    assert torch.autograd.gradgradcheck(lambda *leaves: attention(*leaves, mask=causal(), backend="reference"), leaves)


def test_create_graph_alone_is_no_error():
    leaves = [x.requires_grad_() for x in _tensors(5)]
    with_graph, without = (
        torch.autograd.grad(attention(*leaves).sum(), leaves, create_graph=create) for create in (True, False)
    )
    assert all(map(torch.equal, with_graph, without))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_func_grad(backend):
    made = NAMED["softcap-sink"].replace(dtype="fp32").inputs()
    sink = made.keywords.pop("sink")

    def loss(q, k, v, sink):
        return (attention(q, k, v, sink=sink, backend=backend, **made.keywords) * made.dout).sum()

    tensors = made.q, made.k, made.v, sink
    found, value = torch.func.grad_and_value(loss, argnums=(0, 1, 2, 3))(*tensors)
    leaves = [x.clone().requires_grad_() for x in tensors]
    wanted = loss(*leaves)
    assert torch.equal(value, wanted)
    assert all(map(torch.equal, found, torch.autograd.grad(wanted, leaves)))


def test_func_vjp():
    tensors = _tensors(9)
    out, pull = torch.func.vjp(lambda *x: attention(*x, mask=causal(), return_lse=True), *tensors)
    leaves = [x.requires_grad_() for x in tensors]
    wanted = attention(*leaves, mask=causal(), return_lse=True)
    gradients = [torch.randn_like(x) for x in wanted]
    assert torch.equal(out.out, wanted.out)
    assert all(map(torch.equal, pull(type(out)(*gradients)), torch.autograd.grad(wanted, leaves, gradients)))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(use_reentrant):
    leaves = [x.requires_grad_() for x in _tensors(20)]

    def layer(q, k, v):
        return _call(q, k, v).square()

    # The first forward may run without a graph, and so on another path: gradients come from the second.
    checkpoint(layer, *leaves, use_reentrant=use_reentrant).sum().backward()
    wanted = torch.autograd.grad(layer(*leaves).sum(), leaves)
    assert all(map(torch.equal, (x.grad for x in leaves), wanted))


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_autocast(low):
    """Attention runs in the low precision; gradients come back in the inputs' own."""
    leaves = [x.requires_grad_() for x in _tensors(20)]
    with torch.autocast("cpu", dtype=low):
        found = _call(*leaves)
    lower = [x.detach().to(low).requires_grad_() for x in leaves]
    wanted = _call(*lower)
    assert found.dtype == low
    assert torch.equal(found, wanted)
    dout = torch.randn_like(wanted)
    gradients = torch.autograd.grad(found, leaves, dout)
    assert all(x.dtype == torch.float32 for x in gradients)
    assert all(map(torch.equal, gradients, (x.float() for x in torch.autograd.grad(wanted, lower, dout))))


def test_autocast_reaches_neither_the_inside_nor_the_backward():
    leaves = [x.double().requires_grad_() for x in _tensors(20)]
    wanted = torch.autograd.grad(_call(*leaves).square().sum(), leaves)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = torch.autograd.grad(_call(*leaves).square().sum(), leaves)
        out = attention(*_tensors(5), backend="reference", return_lse=True)
    assert all(map(torch.equal, found, wanted))
    assert (out.out.dtype, out.lse.dtype) == (torch.bfloat16, torch.float32)


def test_autocast_joins_dtypes_and_leaves_float64():
    q, k, v = _tensors(8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attention(q, k.bfloat16(), v).dtype == torch.bfloat16
        assert attention(q.double(), k.double(), v.double()).dtype == torch.float64


def test_saved_tensors_may_not_change():
    q, k, v = (x.requires_grad_() for x in _tensors(6))
    copies = [x * 1 for x in (q, k, v)]
    out = attention(*copies)
    copies[1].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_no_graph_without_gradients():
    q, k, v = _tensors(6)
    assert attention(q, k, v).grad_fn is None
    with torch.no_grad():
        assert attention(q.requires_grad_(), k, v).grad_fn is None
    with torch.inference_mode():
        assert attention(q, k, v).is_inference()


def test_the_same_bits_on_every_way_in():
    """Past the dispatcher or through it, with gradients or without: one result."""
    q, k, v = _tensors(33)
    for lse in (False, True):

        def call(q, k, v, lse=lse):
            return attention(q, k, v, mask=causal(), score_mod=softcap(3.0), return_lse=lse)

        wanted = call(q, k, v)
        with torch.inference_mode():
            found = [call(q, k, v)]
        with Recorder():
            found.append(call(q, k, v))
        if lse:
            found.append(call(*(x.clone().requires_grad_() for x in (q, k, v))))
        for x in found:
            pairs = zip(x, wanted, strict=True) if lse else [(x, wanted)]
            assert all(torch.equal(*pair) for pair in pairs)


def test_parameters_and_subclasses():
    class Named(Tensor):
        pass

    tensors = _tensors(6)
    wanted = attention(*tensors)
    assert torch.equal(attention(*map(torch.nn.Parameter, tensors)), wanted)
    assert torch.equal(attention(*(x.as_subclass(Named) for x in tensors)).as_subclass(Tensor), wanted)


# Flops


@pytest.mark.parametrize("order", ["bhsd", "bshd", "sbhd"])
def test_flops(order):
    """As torch counts its own attention: every product of two matrices, hidden pairs too."""
    made = Case("", dtype="fp32", h_q=4, s_q=10, s_k=14, d=8, d_v=6, mask="causal", order=order).inputs(
        requires_grad=True
    )
    with FlopCounterMode(display=False) as plain:
        q, k, v = (made.keywords["layout"].canonical(x.detach()) for x in (made.q, made.k, made.v))
        k, v = (x.repeat_interleave(2, 1) for x in (k, v))
        q @ k.mT @ v
    with FlopCounterMode(display=False) as forward:
        out = attention(made.q, made.k, made.v, **made.keywords)
    assert forward.get_total_flops() == plain.get_total_flops()
    with torch.no_grad(), FlopCounterMode(display=False) as without_gradients:
        attention(made.q, made.k, made.v, **made.keywords)
    assert without_gradients.get_total_flops() == plain.get_total_flops()
    with FlopCounterMode(display=False) as backward:
        out.backward(made.dout)
    pairs = 2 * 4 * 10 * 14
    assert backward.get_total_flops() == 2 * pairs * (3 * 8 + 2 * 6)


def test_flops_beside_those_of_torch():
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 2, 4, 16, 8))
    counts = []
    for function in (attention, F.scaled_dot_product_attention):
        with (
            FlopCounterMode(display=False) as counter,
            torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
        ):
            function(q, k, v)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1]


def test_explain_does_not_run_anything():
    with Recorder() as recorder:
        explain(*_tensors(8), mask=causal())
    assert recorder.forward is None
