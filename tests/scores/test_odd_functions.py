"""Functions of the score that are written in unusual ways: they compute what the reference does, by the graphs that
torch's `make_fx` makes."""

from __future__ import annotations

import copy
import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._decomp import core_aten_decompositions, get_decompositions
from torch.fx.experimental.proxy_tensor import make_fx

from saccade import ScoreMod, attention
from saccade.scores.codegen import program
from saccade.scores.score_mod import WithDerivative
from saccade.scores.tracing import lowering
from saccade.scores.tracing.trace import trace_function
from tests.support.scores import NAMES, build_score

S, D = 11, 8
drawn = torch.Generator().manual_seed(3)


def drawn_table(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=drawn, dtype=torch.float64).to(dtype).requires_grad_()


TABLE, PAIRS, SLOPES, ONE = drawn_table(2, 23), drawn_table(S, S), drawn_table(2), drawn_table(1, 1)
SMALL = drawn_table(2, 23, dtype=torch.float32)
NUMBER, WHOLE, SCALAR = torch.tensor(0.7), torch.tensor(3), drawn_table()
IDS, SEEN = torch.randint(0, 3, (S,), generator=drawn), torch.rand(S, S, generator=drawn) > 0.3


def autocast(s, b, h, i, j):
    with torch.autocast("cpu", torch.bfloat16):
        return s * 2 + TABLE[h, i] * s.tanh()


def disabled(s, b, h, i, j):
    with torch.no_grad():
        kept = s.exp()
    with torch.enable_grad():
        return s + kept * TABLE[h, j]


def in_place_beside(s, b, h, i, j):
    """Writes to a tensor of its own, before it meets the score."""
    made = TABLE.detach().clone()
    made.mul_(2).add_(1)
    return s + made[h, i]


def long_chain(s, b, h, i, j):
    for n in range(40):
        s = s + (s * (0.01 * n)).sin() * 0.1
    return s


FUNCTIONS = {
    # Views and shapes
    "view of a table": lambda s, b, h, i, j: s + TABLE.view(2, 23)[h, i] + TABLE.t()[j, h],
    "reshaped": lambda s, b, h, i, j: s + TABLE.reshape(-1)[h * 23 + j],
    "slices": lambda s, b, h, i, j: s + TABLE[:, 3:20:2][h, i % 8] + TABLE[:, -1][h],
    "expanded": lambda s, b, h, i, j: s + SLOPES[:, None].expand(2, S)[h, j],
    "broadcast": lambda s, b, h, i, j: s + PAIRS[None, None].expand(2, 2, S, S)[b, h, i, j],
    "views of values": lambda s, b, h, i, j: s.view_as(s) + (i - j).expand_as(s).contiguous() * TABLE[h, i],
    "negative": lambda s, b, h, i, j: s + TABLE[h, -1 - j] + TABLE[-1, i],
    "data": lambda s, b, h, i, j: s.data * 0.5 + s + TABLE.data[h, i],
    "clones": lambda s, b, h, i, j: s.clone() + TABLE[h, j].clone().detach() + TABLE[h, i].clone(),
    # Tensors without dimensions
    "number": lambda s, b, h, i, j: s * NUMBER + WHOLE * i / (j + WHOLE),
    "scalar that learns": lambda s, b, h, i, j: s * SCALAR + SCALAR.sigmoid() * (i - j),
    "one element": lambda s, b, h, i, j: s * ONE + ONE[0, 0] * j,
    "number first": lambda s, b, h, i, j: 2 - s / (1 + abs(i - j)) + 3.5 * TABLE[h, i] - NUMBER,
    "made": lambda s, b, h, i, j: s + torch.tensor(0.5) * i + torch.tensor([1.0, 2.0])[h],
    "new": lambda s, b, h, i, j: s + torch.zeros_like(s) + s.new_ones(()) + torch.full_like(s, 2) * TABLE[h, i],
    # Integers and bools
    "floor": lambda s, b, h, i, j: s + TABLE[h, (i // 2 + j // WHOLE)] + (i % 3) * 0.5,
    "negative floor": lambda s, b, h, i, j: s + TABLE[h, (i - j) // 2 + 6] + (i - j) % 4 * 0.1,
    "remainder": lambda s, b, h, i, j: s + torch.remainder(i - j, 5) + torch.fmod(i - j, 5) + TABLE[h, (i + j) % 23],
    "by values": lambda s, b, h, i, j: s + i // (j + 1) + i % (j + 2),
    "bits": lambda s, b, h, i, j: s + (i & 3) + (i | j) * 0.25 + (i ^ j) * 0.1 + ((i << 1) >> 2) + (~i) * 0.01,
    "truth": lambda s, b, h, i, j: torch.where(((i >= j) & ~(j == 3)) | (h > 0) ^ (b == 1), s, s - 2),
    "logical": lambda s, b, h, i, j: torch.where(torch.logical_and(i > 2, s > 0).logical_not(), s * s, s * TABLE[h, j]),
    "bools as numbers": lambda s, b, h, i, j: s + (i > j) * 0.5 + (i == j).to(s.dtype) - (s > 0).float() * TABLE[h, i],
    "captured bools": lambda s, b, h, i, j: torch.where(SEEN[i, j], s, -2.0) * (1 + SEEN[j, i]),
    "same document": lambda s, b, h, i, j: s.masked_fill(IDS[i] != IDS[j], -math.inf) + (i == j) * 0,
    "read at a read": lambda s, b, h, i, j: s + TABLE[h, IDS[i] * 3 + IDS[j]] * PAIRS[IDS[j], i],
    "int powers": lambda s, b, h, i, j: s + (i - j) ** 2 * 0.01 + TABLE[h, i] ** 2 + 2**h,
    "min and max": lambda s, b, h, i, j: s + torch.minimum(i, j) * 0.1 + TABLE[h, torch.maximum(i, j)] + i.clamp(2, 5),
    # Choices
    "where of numbers": lambda s, b, h, i, j: s + torch.where(i > j, 1.5, -0.5) + torch.where(i == j, 2, 3),
    "where both": lambda s, b, h, i, j: torch.where(i > j, 0.0, s) + torch.where(s > 0, TABLE[h, i], 1),
    "where method": lambda s, b, h, i, j: s.where(i >= j, -1e9) + (i >= 0) * 0.0,
    "masked_fill": lambda s, b, h, i, j: s.masked_fill((i - j).abs() > 5, -3.0) + s.masked_fill(j > i, NUMBER),
    "masked_fill of a value": lambda s, b, h, i, j: (s * TABLE[h, i]).masked_fill(s < 0, 0.25),
    "clamp": lambda s, b, h, i, j: s.clamp(-0.5, 0.5) + s.clamp(min=0.1) + torch.clamp(TABLE[h, i], max=0.2),
    "clamp by tensors": lambda s, b, h, i, j: s.clamp(TABLE[h, i] - 1, TABLE[h, j].abs() + 1),
    "maximum": lambda s, b, h, i, j: (
        torch.maximum(s, TABLE[h, i]) + torch.minimum(s, PAIRS[i, j]) + torch.fmax(s, s * 2)
    ),
    "sign": lambda s, b, h, i, j: s.abs() + s.sign() * TABLE[h, j].abs() - (s - 1).sgn() * 0.1,
    # Functions
    "exponentials": lambda s, b, h, i, j: s.exp() * 0.1 + torch.expm1(s) * 0.1 + torch.exp2(s) * TABLE[h, i],
    "logarithms": lambda s, b, h, i, j: (
        (s * s + 1).log() + s.abs().log1p() + (TABLE[h, j].abs() + 1).log2() + (j + 1).log()
    ),
    "roots": lambda s, b, h, i, j: (
        (s * s + 1).sqrt() + (s * s + 2).rsqrt() + (TABLE[h, i].abs() + 1).pow(0.3) + (i + 1) ** -0.5
    ),
    "circular": lambda s, b, h, i, j: s.sin() + (TABLE[h, i] * (i - j)).cos() + s.atan() + torch.atan2(s, TABLE[h, j]),
    "hyperbolic": lambda s, b, h, i, j: s.tanh() + s.sinh() * 0.1 + TABLE[h, i].cosh() * 0.1 + s.asinh(),
    "rounding": lambda s, b, h, i, j: s + s.floor() - s.ceil() * 0.5 + s.round() + s.trunc() + TABLE[h, i].frac(),
    "sigmoid": lambda s, b, h, i, j: s.sigmoid() + torch.sigmoid(TABLE[h, i] * s) + F.logsigmoid(s),
    "gates": lambda s, b, h, i, j: F.silu(s) + F.gelu(s * TABLE[h, i]) + F.gelu(s, approximate="tanh") + F.mish(s),
    "bends": lambda s, b, h, i, j: (
        F.relu(s) + F.relu6(s * 4) + F.leaky_relu(s, 0.2) + F.elu(s * TABLE[h, i]) + F.selu(s)
    ),
    "soft": lambda s, b, h, i, j: (
        F.softplus(s, 2.0) + F.softsign(s) + F.softshrink(s, 0.2) + F.tanhshrink(s) + F.celu(s)
    ),
    "hard": lambda s, b, h, i, j: (
        F.hardtanh(s) + F.hardswish(s) + F.hardsigmoid(s) + F.hardshrink(s) + F.threshold(s, 0.1, 0.0)
    ),
    "special": lambda s, b, h, i, j: torch.special.expit(s) + torch.special.erf(s) + torch.special.ndtr(TABLE[h, i]),
    "more special": lambda s, b, h, i, j: (
        torch.special.i0(s) * 0.1 + torch.special.entr(s.abs()) + torch.special.log_ndtr(s)
    ),
    "and more": lambda s, b, h, i, j: (
        torch.special.xlogy(s, TABLE[h, i].abs() + 1) + torch.lgamma(s.abs() + 1) + s.sinc()
    ),
    "of two": lambda s, b, h, i, j: (
        torch.hypot(s, TABLE[h, i]) + torch.logaddexp(s, PAIRS[i, j]) + torch.copysign(s, s - 1)
    ),
    "of three": lambda s, b, h, i, j: torch.lerp(s, TABLE[h, i], 0.3) + torch.addcmul(s, s, TABLE[h, j], value=0.5),
    "fractions": lambda s, b, h, i, j: (
        torch.addcdiv(s, s, PAIRS[i, j].abs() + 1) + s.reciprocal().clamp(-1, 1) + torch.rsub(s, 1)
    ),
    "quotients": lambda s, b, h, i, j: (
        torch.div(s, 0.3, rounding_mode="floor") + (s / 0.7).floor() + s % 0.9 + s.fmod(0.4) + s
    ),
    "alpha": lambda s, b, h, i, j: torch.add(s, TABLE[h, i], alpha=0.5) - torch.sub(s, PAIRS[i, j], alpha=2),
    "comparisons": lambda s, b, h, i, j: s + s.isnan() + s.isinf() * 2 + s.isfinite() * TABLE[h, i] + torch.signbit(s),
    "nan_to_num": lambda s, b, h, i, j: s.nan_to_num() + TABLE[h, i].nan_to_num(0, 1, -1),
    # Dtypes
    "int plus float": lambda s, b, h, i, j: i * 0.5 + j / 3 + s + h.float() * SLOPES[h],
    "single tables": lambda s, b, h, i, j: s + SMALL[h, i] + SMALL[h, j] * TABLE[h, i] + SMALL[h, i].tanh(),
    "conversions": lambda s, b, h, i, j: (
        s.float().tanh().double() + i.double().sqrt() + s.to(torch.int64) + j.type_as(s)
    ),
    "half inside": lambda s, b, h, i, j: s + s.to(torch.bfloat16).to(s.dtype).detach() * 0 + TABLE[h, i],
    "whole": lambda s, b, h, i, j: s + (s * 3).long() + (s > 0).int() + i.short().to(s.dtype) * TABLE[h, j],
    # Modes and ways to write
    "autocast": autocast,
    "no_grad": disabled,
    "in place beside": in_place_beside,
    "long chain": long_chain,
    "broadcast tensors": lambda s, b, h, i, j: torch.minimum(*torch.broadcast_tensors(s, (i - j) * 0.1 + TABLE[h, i])),
    "constant": lambda s, b, h, i, j: s * 0 + 1.0,
    "index alone": lambda s, b, h, i, j: (i - j).abs() * -0.1 + s * 0,
    "rows": lambda s, b, h, i, j: s + (PAIRS[i] * PAIRS[j]).sum() * 0.1 + PAIRS[i].norm() + PAIRS[j].logsumexp(0),
    "reductions": lambda s, b, h, i, j: s + PAIRS[i].mean() + PAIRS[j].amax() + (PAIRS[i] > 0).any() * TABLE[h, i],
}  # fmt: skip


def operands() -> list[Tensor]:
    made = torch.Generator().manual_seed(5)
    return [torch.randn(2, h, S, D, dtype=torch.float64, generator=made).requires_grad_() for h in (2, 1, 1)]


def results(name: str, backend: str) -> list[Tensor | None]:
    """The output and all gradients."""
    leaves = [*operands(), TABLE, PAIRS, SLOPES, ONE, SMALL, SCALAR]
    out = attention(*leaves[:3], score_mod=FUNCTIONS[name], backend=backend)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves, allow_unused=True)]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_against_the_reference(name):
    for found, right in zip(results(name, "cpu"), results(name, "reference"), strict=True):
        assert (found is None) == (right is None)
        if found is not None:
            torch.testing.assert_close(found, right, rtol=1e-6, atol=1e-6)  # some compute in float32


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x, x * 2

    @staticmethod
    def backward(ctx, x, y):
        return x + y


REFUSED = {
    "in place": (lambda s, *at: s.mul_(2), "writes in place"),
    "item assignment": (lambda s, b, h, i, j: s.__setitem__(0, 1), "writes in place"),
    "item of an index": (lambda s, b, h, i, j: i.__setitem__(0, 1), "such as x = torch.where"),
    "item of a table": (lambda s, b, h, i, j: TABLE.detach().__setitem__((h, i), s), "writes in place"),
    "sum in place": (lambda s, *at: s.__iadd__(1), "such as x = x.add"),
    "power in place": (lambda s, *at: s.__ipow__(2), "such as x = x"),
    "in place of an index": (lambda s, b, h, i, j: s + i.add_(1), "writes in place"),
    "out": (lambda s, *at: torch.exp(s, out=torch.empty(())), "writes to out="),
    "item": (lambda s, *at: s * s.item(), "only the kernel knows"),
    "float": (lambda s, *at: s * float(s), "only the kernel knows"),
    "branch": (lambda s, b, h, i, j: s if i > j else -s, "only the kernel knows"),
    "any": (lambda s, *at: s if (s > 0).any() else -s, "only the kernel knows"),
    "math": (lambda s, *at: s * math.exp(s), "only the kernel knows"),
    "shape": (lambda s, *at: s.view(-1), "scores keep their shape"),
    "unsqueeze": (lambda s, *at: s.unsqueeze(0), "scores keep their shape"),
    "sum": (lambda s, *at: s - s.sum(), "cannot reduce"),
    "amax": (lambda s, *at: s - s.amax(-1, keepdim=True), "amax"),
    "cumsum": (lambda s, *at: s.cumsum(-1), "cumsum"),
    "sort": (lambda s, *at: s.sort().values, "a tensor"),
    "matmul": (lambda s, *at: s @ s, "score and the indices are single values: write a \\* b"),
    "einsum": (lambda s, *at: torch.einsum("ij,jk->ik", s, s), "one value each"),
    "dot": (lambda s, b, h, i, j: s + torch.dot(i * 1.0, j * 1.0), "one value each"),
    "softmax": (lambda s, *at: F.softmax(s, -1), "attention's own"),
    "gather": (lambda s, b, h, i, j: s + TABLE.gather(1, i), "brackets"),
    "embedding": (lambda s, b, h, i, j: s + F.embedding(i, TABLE)[0], "brackets"),
    "no index": (lambda s, *at: s + TABLE, "by indices"),
    "too many indices": (lambda s, b, h, i, j: s + TABLE[h, i, j], "indices"),
    "a mask for an index": (lambda s, b, h, i, j: s + PAIRS[0][s > 0], "at integers"),
    "a float for an index": (lambda s, b, h, i, j: s + TABLE[h, s], "int"),
    "complex": (lambda s, *at: torch.complex(s, s).abs(), "complex"),
    "complex number": (lambda s, *at: s * 1j, "real numbers, and meet 1j"),
    "floored": (lambda s, *at: s // 0.7, r"floor_divide cannot .*: torch has no deriv.* write torch.floor\(a / b"),
    "a number floored": (lambda s, *at: 0.7 // s, "floor_divide cannot .* torch.floor(?s:.*)a number flo"),
    "shifted": (lambda s, *at: s << 1, r"torch has no lshift of Double values: convert them first"),
    "topk": (lambda s, *at: s.topk(1), "topk cannot be part of a score function"),
    "sort in brackets": (lambda s, *at: s.sort()[0], "sort cannot be part of a score function"),
    "log_softmax": (lambda s, *at: F.log_softmax(s, -1), "attention's own"),
    "random": (lambda s, *at: s + torch.randn_like(s), "dropout_p"),
    "dropout": (lambda s, *at: F.dropout(s), "dropout_p"),
    "a random operation": (lambda s, *at: torch.ops.aten.bernoulli.p(s, 0.5), "bernoulli.*dropout_p"),
    "unique": (lambda s, *at: s + s.unique(), "pointwise"),
    "nonzero": (lambda s, *at: s + s.nonzero(), "only the kernel knows"),
    "histogram": (lambda s, *at: torch.histc(s), "cannot reduce"),
    "two results": (lambda s, *at: Doubled.apply(s)[0], "one value"),
    "frexp": (lambda s, *at: torch.frexp(s).mantissa, "mantissa"),
    "no derivative": (lambda s, *at: torch.special.zeta(s, s), "zeta cannot .* no derivative of it; write"),
    "a copy": (lambda s, *at: copy.deepcopy(s), "got a dict"),
    "a tuple": (lambda s, *at: (s, s), "got tuple"),
    "other dtypes": (lambda s, b, h, i, j: torch.heaviside(s, i), "heaviside"),
    "heaviside": (lambda s, *at: torch.heaviside(s, s), r"heaviside cannot .* write torch.where\(score > 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    function, told = REFUSED[name]
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match=told):
        attention(*operands(), score_mod=function)
    assert torch.equal(torch.get_rng_state(), before)


# The graphs


CORE = {**core_aten_decompositions()}


class MakeFx:
    """Makes graphs by `make_fx`, with all of torch's decompositions as they are."""

    line = None

    def __init__(self, decompositions=None):
        self.decompositions = None
        if decompositions is not None:
            self.decompositions = {**CORE, **decompositions, **get_decompositions([torch.ops.aten.masked_fill])}

    def trace(self, function, inputs):
        zeros = [torch.zeros((), dtype=x.dtype).expand(x.shape) for x in inputs]
        tracer = make_fx(function, self.decompositions, "fake", _allow_non_fake_inputs=True)
        return tracer(*zeros).graph


def graphs(function, dtype: torch.dtype) -> list[str]:
    """All that kernels are made of."""
    own = isinstance(function, ScoreMod) and function.bprop is not None
    trace = trace_function(WithDerivative(function) if own else function, dtype, torch.device("cpu"), 1 + own)
    made = program.Program("score", lowering.lower(trace), dtype)
    gradients, _ = made.locals([True] * len(made.ranks))
    modules = [made.value, made.value_decomposed, made.slope, made.derived_slope, gradients]
    values = [x.meta["val"] for module in modules for x in module.graph.nodes if isinstance(x.meta.get("val"), Tensor)]
    texts = [str(module.graph) for module in modules] + [str((x.dtype, x.shape)) for x in values]
    for places, module in (made.before, made.numbers):
        inputs = [] if module is None else module.graph.find_nodes(op="placeholder")
        names = {x.name: f"in{i}" for i, x in enumerate(inputs)}
        text = str(module and module.graph)
        texts += [str(places), re.sub(r"\w+", lambda found, names=names: names.get(found[0], found[0]), text)]
    return [*texts, str((made.dtypes, made.ranks, made.integral))]


def pytest_generate_tests(metafunc):
    if "traced" in metafunc.fixturenames:  # each takes a second; one in four by default
        names = [*FUNCTIONS, *NAMES]
        metafunc.parametrize("traced", names if metafunc.config.getoption("--everything") else names[::4])


def test_graphs_are_those_of_make_fx(traced, monkeypatch):
    odd = traced in FUNCTIONS
    function, dtype = (FUNCTIONS[traced], torch.float64) if odd else (build_score(traced, 2, S, S), torch.float32)
    found = graphs(function, dtype)
    for module in (lowering, program):
        monkeypatch.setattr(module, "Tracer", MakeFx)
    assert found == graphs(function, dtype)


FIRST_CALLS = """
import sys, torch, saccade
from saccade import ScoreMod, alibi, attention, causal, mask_mod, relative_bias, t5_bias
from saccade.scores import bind

table = torch.randn(2, 64, requires_grad=True)

def own(s, b, h, i, j):
    s = torch.where(i >= j, s.tanh() * 2, (s.abs() + 1).log() - s.exp() * 0.1)
    s = s.masked_fill((i - j).abs() > 40, -1e9) + torch.sigmoid(s) * table[h, i]
    return torch.nn.functional.gelu(s).clamp(-3, 3) + torch.relu(s) * torch.maximum(s, table[h, j]) ** 2

def functions():
    yield from (alibi(torch.ones(2)), relative_bias(table[:, :63]), t5_bias(table[:, :32].T, max_distance=64), own)
    yield ScoreMod(lambda s, *at: s * s, bprop=lambda g, s, *at: 2 * g * s)

for function in functions():
    q, k, v = (torch.randn(1, 2, 50, 16, requires_grad=True) for _ in range(3))
    attention(q, k, v, score_mod=function, mask=mask_mod(lambda b, h, i, j: (i - j) % 3 < 2)).sum().backward()
assert table.grad.abs().sum() > 0
print(*sorted({"sympy", "torch._dynamo", "torch._inductor"} & {*sys.modules}))
score = torch.zeros(1, 2, 4, 4)
print(*[bind(function, score).program.identity for function in functions()])
"""


def test_first_calls_of_a_process_import_no_compiler(fresh_process):
    """Which takes seconds. Programs have the same names where it is imported."""
    imported, names = fresh_process(FIRST_CALLS).splitlines()
    assert not imported
    imported, others = fresh_process(f"import torch._dynamo, torch._inductor\n{FIRST_CALLS}").splitlines()
    assert imported == "sympy torch._dynamo torch._inductor"
    assert names == others
