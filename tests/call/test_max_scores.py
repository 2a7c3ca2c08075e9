"""The largest score of each row: an output of the forward in every layout, through the operator, with no gradient.

What a row's maximum is in their registers, each backend's kernels have in a way of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.library import opcheck

from saccade import (
    Packed,
    Paged,
    Scored,
    Spec,
    Unsupported,
    attention,
    causal,
    explain,
    mask_mod,
    softcap,
    window,
)
from saccade.testing import paged
from saccade.testing.accuracy import check
from saccade.testing.cases import NAMED, Case
from tests.support.devices import CPU, INTERPRETER, TRITON, Device, every_head_dim, on


def plan(*call: Any, **keywords: Any) -> Any:
    """Which backend runs it, or the error that says why none does."""
    return explain(*call, **keywords).plan


CASES = {case.name: case for case in paged.named()} | NAMED
CHECKED = [
    "plain", "documents-or-window", "d1", "everything", "ragged-sink", "few-keys-sink", "no-queries", "no-keys-sink",
    "longest-rows", "dropout-plain", "packed-used", "packed-empty", "chunk-everything", "mixed-fixed", "no-rows",
]  # fmt: skip
DTYPES = "fp16", "bf16", "fp32", "fp64"


@pytest.mark.sample
@pytest.mark.parametrize("i", range(len(CHECKED)), ids=CHECKED)
def test_named_case(i: int) -> None:
    """With gradients, which they do not disturb."""
    given = CASES[CHECKED[i]].replace(dtype=DTYPES[i % 4]).inputs()
    gradients = {} if isinstance(given.keywords.get("layout"), Paged) else {"dout": given.dout, "dlse": given.dlse}
    check(given.q, given.k, given.v, return_max_scores=True, **gradients, **given.keywords).assert_ok()


FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": "causal", "sink": True},
    "window": {"mask": "window(70,9)"},
    "softcap": {"mask": "causal", "score": "softcap(5)", "sink": True},
    "linear": {"mask": "causal", "score": "alibi"},
    "table": {"score": "relative_bias(90)", "sink": True},
    "padded": {"b": 4, "mask": "causal", "used": "qk", "order": "bshd", "sink": True},
    "no-keys": {"s_k": 0, "sink": True},
    "packed": {"b": 5, "order": "thd", "mask": "causal", "sink": True, "used": "k", "tail": 90},
}
ONCE: dict[str, dict[str, Any]] = {
    "unequal": {"mask": "window(90,0)", "dropout_p": 0.3},
    "documents": {"mask": "documents&causal", "ids": "scattered"},
    "heads-together": {"s_q": 5, "mask": "causal"},
}


@every_head_dim()
@pytest.mark.parametrize("i", range(len(FEATURES)), ids=FEATURES)
def test_features(i: int, device: Device) -> None:
    """A forward alone, as its gradients are those of any other call."""
    verify(device, device.case(i, **[*FEATURES.values()][i]))


@pytest.mark.parametrize("name", ONCE)
def test_features_of_some_sizes(name: str, device: Device) -> None:
    sizes = {
        "unequal": {"d": 3 * device.d, "d_v": 2 * device.d},
        "documents": {"s_q": device.s_k},
        "heads-together": {"h_q": 8 * device.h_k},
    }
    verify(device, device.case(**ONCE[name], **sizes[name]))


def verify(device: Device, case: Case) -> None:
    given = case.inputs(device.type)
    keywords = given.keywords | {"backend": device.backend, "return_max_scores": True}
    check(given.q, given.k, given.v, backward=False, **keywords).assert_ok()


@on(CPU, INTERPRETER, TRITON)
@pytest.mark.parametrize("splits", [0, 1, 7])
@pytest.mark.parametrize("lengths", [(), (1, 60, 0, 7)], ids=["batch", "end-to-end"])
def test_pages(lengths: tuple[int, ...], splits: int, device: Device) -> None:
    """The merge of parts takes the largest; some sequences have fewer parts than others; the first one has the sink."""
    small = {"h_q": 3, "h_k": 1, "s_k": 99, "d": 16, "d_v": 8, "mask": "window(40,0)"}
    large = {"h_q": 32, "h_k": 8, "s_k": 2300, "d": 128, "mask": "window(900,0)"}
    case = device.case(b=4, s_q=1, sink=True, order="paged", lengths=lengths, splits=splits,
                       tail=3 if lengths else 0, **(large if device.type == "cuda" else small))  # fmt: skip
    verify(device, case)


def operands(requires_grad: bool = False) -> list[torch.Tensor]:
    return [torch.randn(2, h, s, 16, requires_grad=requires_grad) for h, s in ((4, 20), (2, 30), (2, 30))]


def test_what_is_returned() -> None:
    q, k, v = operands(requires_grad=True)
    wanted = attention(q, k, v, mask=causal(), return_lse=True)
    for asked in (False, True):
        found = attention(q, k, v, mask=causal(), return_max_scores=True, return_lse=asked)
        assert isinstance(found, Scored)
        assert not found.max_scores.requires_grad
        if found.lse is not None:
            torch.testing.assert_close(found.lse, wanted.lse)  # another kernel may make it
        assert (found.lse is None) == (not asked)
        gradients = torch.autograd.grad(found.out.sum(), (q, k, v), retain_graph=True)
        for one, other in zip(
            gradients, torch.autograd.grad(wanted.out.sum(), (q, k, v), retain_graph=True), strict=True
        ):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("scale", [0.7, -0.7])
@pytest.mark.parametrize("cap", [None, 2.0])
def test_units_and_what_counts(cap: float | None, scale: float, device: Device) -> None:
    """Natural units, after the modification; a negative scale; rows that see nothing; a NaN that is seen, or is not."""
    q, k, v = device.operands(torch.float16 if device.type == "cuda" else None, b=2)
    last, heads = device.s_k - 1, device.h_q
    mask = mask_mod(lambda b, h, q_idx, kv_idx: (q_idx != 3) & ((kv_idx != last) | (q_idx == 4)))
    options = {"scale": scale, "mask": mask, "score_mod": cap and softcap(cap)}
    options |= {"sink": torch.full((heads,), 9.0, device=device.type), "return_max_scores": True}
    check(q, k, v, backward=False, backend=device.backend, **options).assert_ok()
    k[1, 0, last] = torch.nan
    found = attention(q, k, v, return_lse=True, backend=device.backend, **options)
    wanted = attention(q, k, v, return_lse=True, backend="reference", **options)
    if q.dtype == torch.float32:
        torch.testing.assert_close(tuple(found), tuple(wanted), equal_nan=True)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one.isnan(), other.isnan())
        assert torch.equal(one.isinf(), other.isinf())
    group, top = heads // device.h_k, found.max_scores
    assert top[:, :, 3].isneginf().all()
    assert top[1, :group, 4].isnan().all()
    assert int(top.isfinite().sum()) == 2 * heads * (device.s_q - 1) - group


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_by_the_formula(backend: str) -> None:
    """Natural units, after the modification; a negative scale; rows that see nothing; a NaN that is seen, or is not."""
    q, k, v = operands()
    k[1, 1, 29] = torch.nan
    nowhere = mask_mod(lambda b, h, q_idx, kv_idx: (q_idx != 3) & ((kv_idx != 29) | (q_idx == 4)))
    options = {"scale": -0.7, "score_mod": softcap(2.0), "mask": nowhere, "sink": torch.full((4,), 100.0)}
    top = attention(q, k, v, return_max_scores=True, backend=backend, **options).max_scores
    scores = 2 * torch.tanh(-0.7 * (q @ k.repeat_interleave(2, 1).mT) / 2)
    wanted = scores[..., :29].amax(-1)
    wanted[:, :, 3] = -torch.inf
    wanted[:, :, 4] = scores[:, :, 4].amax(-1)
    torch.testing.assert_close(top, wanted, equal_nan=True)
    assert int(top.isnan().sum()) == 2


def test_through_the_operator() -> None:
    """Compiled, with a buffer too, and with the gradients of the call."""
    q, k, v = operands(requires_grad=True)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: object) -> Scored:
        return attention(q, k, v, mask=window(9, 0), return_max_scores=True, **options)  # pyright: ignore[reportCallIssue, reportArgumentType]

    found, wanted = call(q, k, v), attention(q, k, v, mask=window(9, 0), return_max_scores=True)
    assert torch.equal(found.max_scores, wanted.max_scores)
    assert not found.max_scores.requires_grad
    for one, other in zip(*(torch.autograd.grad(x.out.sum(), (q, k, v)) for x in (found, wanted)), strict=True):
        assert torch.equal(one, other)
    with torch.no_grad():
        buffer = torch.full_like(wanted.out, torch.nan)
        assert torch.equal(call(q, k, v, out=buffer).max_scores, wanted.max_scores)
        assert torch.equal(buffer, wanted.out)


@pytest.mark.parametrize("order", ["sbhd", "thd"])
def test_opcheck(order: str) -> None:
    if order == "thd":
        offsets = torch.tensor([0, 3, 10])
        layout = Packed(offsets, offsets, 7, 7)
        q, k, v = (torch.randn(10, h, 8) for h in (4, 2, 2))
    else:
        layout = None
        q, k, v = (torch.randn(10, 2, h, 8) for h in (4, 2, 2))
    header = f"{order if layout is None else layout.text} causal none auto - - max_scores"
    tensors = [] if layout is None else layout.tensors
    arguments = q, k, v, None, [], tensors, header, [], [0.3]
    lse = order == "thd"
    opcheck(torch.ops.saccade.forward_out.default, (torch.empty_like(q), *arguments, lse))
    for x in (q, k, v):
        x.requires_grad_()
    opcheck(torch.ops.saccade.forward.default, (*arguments, lse))


def test_calls_with_and_without_alternate() -> None:
    """Each has plans and launches of its own."""
    q, k, v = operands()
    for _ in range(2):
        assert isinstance(attention(q, k, v), torch.Tensor)
        assert len(attention(q, k, v, return_lse=True)) == 2
        found = attention(q, k, v, return_max_scores=True)
        assert found.max_scores.shape == q.shape[:-1]


def test_who_runs_it() -> None:
    """A word of the Spec, like any other that a backend may not have."""
    q, k, v = operands()
    told = explain(q, k, v, return_max_scores=True)
    assert told.backend == told.gradient == "cpu"
    assert told.spec == Spec.parse("fp32 group2 d16 max_scores aligned cpu")
    with pytest.raises(Unsupported, match=r"cudnn: .*has no max_scores"):
        plan("bf16 d128 max_scores aligned sm90", backend="cudnn")


def test_largest_over_sequences_and_heads() -> None:
    """Packed sequences, as trainers reduce them: (h_q) from (h_q, t_q)."""
    case = Case(
        "", dtype="fp32", b=3, h_q=4, h_k=2, s_q=20, s_k=20, d=8, mask="causal", order="thd", lengths=(3, 0, 17)
    )
    given = case.inputs()
    top = attention(given.q, given.k, given.v, return_max_scores=True, **given.keywords).max_scores
    parts = [
        attention(*(x[rows].transpose(0, 1)[None] for x in (given.q, given.k, given.v)), mask=causal(),
                  return_max_scores=True).max_scores[0]
        for rows in (slice(0, 3), slice(3, 20))
    ]  # fmt: skip
    torch.testing.assert_close(top, torch.cat(parts, dim=1))


@pytest.mark.gpu
def test_with_and_without_alternate_in_graphs(backend: str) -> None:
    """Launches are kept apart, and what they give repeats, in a graph too."""
    q, k, v = (torch.randn(2, h, 500, 128, device="cuda", dtype=torch.bfloat16) for h in (8, 2, 2))
    options = {"mask": causal(), "backend": backend}
    first = attention(q, k, v, return_max_scores=True, return_lse=True, **options)
    for _ in range(3):
        assert isinstance(attention(q, k, v, **options), torch.Tensor)
        again = attention(q, k, v, return_max_scores=True, return_lse=True, **options)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attention(q, k, v, return_max_scores=True, return_lse=True, **options)
    for x in captured:
        x.fill_(torch.nan)
    graph.replay()
    assert all(torch.equal(x, y) for x, y in zip(first, captured, strict=True))
