"""What attention over ranks does not take is refused by name, before anything is exchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from saccade import (
    Dense,
    Descale,
    Packed,
    Unsupported,
    attention,
    causal,
    documents,
    explain,
    interval,
    mask_mod,
    prefix,
    relative_bias,
    selected,
    window,
)
from saccade.distributed import plan, pull
from saccade.distributed.transport import agreement_of
from saccade.scores import ScoreMod

HERE = str(Path(__file__))
HEAD = ScoreMod(lambda s, b, h, i, j: s * (h + 1), bprop=lambda g, s, b, h, i, j: g * (h + 1))


def operands(rows=6, h_q=4, h_k=2):
    return torch.randn(rows, h_q, 16), torch.randn(rows, h_k, 16), torch.randn(rows, h_k, 16)


def of(**keywords):
    return plan([8, 4], 2, mask=causal(), **keywords)


@pytest.mark.parametrize(
    ("keywords", "error", "words"),
    [
        (
            {"mask": window(3, 2)},
            ValueError,
            r"exchanges the keys that causal shows, but the mask window\(3,2\) may see window",
        ),
        ({}, ValueError, "but the mask None may see all keys: pass plan"),
        ({"mask": causal(), "layout": Dense("bshd")}, ValueError, "the plan says where rows and keys are: omit layout"),
        ({"mask": causal(), "out": torch.zeros(6, 4, 16)}, Unsupported, "out= is not supported over several ranks"),
        ({"mask": causal(), "descale": Descale(k=1.0)}, Unsupported, "descale= is not supported"),
        ({"mask": causal(), "sink": torch.zeros(3)}, ValueError, r"sink must be a float tensor \(4,\)"),
        (
            {"mask": documents(torch.zeros(1, 6).int()) & causal()},
            Unsupported,
            "counts the rows and keys of one",
        ),
        (
            {"mask": selected(torch.zeros(1, 6, 2).int()) & causal()},
            Unsupported,
            "lists keys that other ranks may have",
        ),
    ],
)
def test_keywords(keywords, error, words):
    with pytest.raises(error, match=words):
        attention(*operands(), context=of(), **keywords)


LATE: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "scale": ({"scale": "x"}, TypeError, "scale must be a number, got 'x'"),
    "dropout": ({"dropout_p": 2.0}, ValueError, r"dropout_p must be in \[0, 1\), got 2.0"),
    "flag": ({"deterministic": "yes"}, TypeError, "deterministic must be True or False, got 'yes'"),
    "backend": ({"backend": "cuda"}, ValueError, "unknown backend 'cuda'"),
    "support": ({"backend": "cudnn"}, Unsupported, "no backend runs fp32"),
    "mask": ({"mask": causal() & prefix(torch.ones(3).int())}, ValueError, r"prefix lengths must have shape \(2,\)"),
    "function": ({"score_mod": lambda *_: 1 / 0}, ValueError, "ZeroDivisionError"),
    "table": ({"score_mod": relative_bias(torch.zeros(3, 5))}, ValueError, "h_q = 4, got"),
    "reference": ({"backend": "reference", "scale": "x"}, TypeError, "scale must be a number"),
}


@pytest.mark.parametrize("method", ["gather", "pull", "ulysses"])
@pytest.mark.parametrize("name", LATE)
def test_before_anything_is_exchanged(name, method):
    """Without processes an exchange raises RuntimeError: what is wrong with a call is found before it."""
    keywords, error, words = LATE[name]
    with pytest.raises(error, match=words):
        attention(*operands(), context=of(method=method), **{"mask": causal()} | keywords)
    with pytest.raises(RuntimeError, match="without processes"):
        attention(*operands(), context=of(method=method), mask=causal())


def of_two_dimensions(group):
    """What a rank says of calls by a mesh, by whose rows keys go to others, and by whose columns heads."""
    mesh = DeviceMesh("cpu", torch.arange(8).view(4, 2), mesh_dim_names=("rows", "heads"))
    made = plan([8, 4], mesh, mask=causal(), heads=4)
    x = made.shard(torch.randn(12, 4, 16))
    for keywords, error, words in LATE.values():
        with pytest.raises(error, match=words):
            attention(x, x, x, context=made, **{"mask": causal()} | keywords)
    return agreement_of(made.heads_transport().group("")).exchanges


def test_before_anything_is_exchanged_by_a_mesh(pool):
    """Calls that fail on all ranks count as one exchange each, so that the ranks stay in step."""
    assert {*pool.run((HERE, "of_two_dimensions"), 8)} == {len(LATE)}


def test_tensor_masks():
    made = plan([8, 4], 2)
    with pytest.raises(Unsupported, match="write it as mask_mod"):
        attention(*operands(), context=made, mask=torch.ones(6, 6, dtype=torch.bool))


@pytest.mark.parametrize(
    ("q", "k", "v", "words"),
    [
        (*operands(7), r"rank 0 has 6 rows of ContextPlan\(2 documents, 12 rows over 2 ranks, gather\)"),
        (*(x[None] for x in operands()), "q, k and v must have three dimensions"),
        (operands()[0].half(), *operands()[1:], "must share one dtype and one device, got torch.float16"),
        (*operands()[:2], operands(h_k=1)[2], "k and v must have the same heads"),
    ],
)
def test_operands(q, k, v, words):
    with pytest.raises(ValueError, match=words):
        attention(q, k, v, mask=causal(), context=of())


def test_batches():
    made, x = plan((2, 8), 2, mask=causal()), torch.randn(2, 4, 3, 16)
    with pytest.raises(ValueError, match=r"rank 0 has 2 batch rows of 4 of ContextPlan\(a batch \(2, 8\)"):
        attention(x, x, x, mask=causal(), context=made)
    with pytest.raises(ValueError, match="pass its order alone, such as"):
        attention(x, x, x, mask=causal(), context=made, layout=Dense("bshd", q_offset=3))


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"dropout_p": 0.1}, "dropout with 3 heads for each rank, not a power of two"),
        ({"mask": causal() & interval(None, torch.zeros(6).int())}, "has bounds for each row"),
    ],
)
def test_divided_heads(keywords, words):
    with pytest.raises(Unsupported, match=rf"{words}.*plan\(…, method='gather'\) supports it"):
        attention(*operands(h_q=6), context=of(method="ulysses"), **{"mask": causal()} | keywords)
    with pytest.raises(ValueError, match="2 ranks can divide heads if the query heads are a multiple of 2"):
        attention(*operands(h_q=3, h_k=3), context=of(method="ulysses"), mask=causal())


def by_head(group, masked):
    made = plan([8, 4], group, mask=causal(), method="ulysses")
    mask = causal() & mask_mod(lambda b, h, i, j: (i + j) % (h + 2) > 0) if masked else causal()
    score_mod = None if masked else HEAD
    with pytest.raises(Unsupported) as raised:
        attention(*operands(), mask=mask, score_mod=score_mod, context=made)
    return str(raised.value)


@pytest.mark.parametrize("masked", [True, False])
def test_functions_of_the_head(pool, masked):
    words = "depends on the head" + ("" if masked else ", and has a derivative of its own")
    assert all(words in told for told in pool.run((HERE, "by_head"), 2, masked))


def of_mesh(group, ranks):
    """What a mesh with the ranks in this order says; of one that is taken, whether rows come back."""
    mesh = DeviceMesh("cpu", torch.tensor(ranks), mesh_dim_names=("rows", "heads"))
    try:
        made = plan([8, 5], mesh, mask=causal(), heads=4)
    except ValueError as refused:
        return str(refused)
    q, k, v = (torch.arange(13.0 * 64).view(13, 4, 16).mul(0.01 * n).sin() for n in (1, 2, 3))
    right = attention(q, k, v, mask=causal(), layout=Packed.from_lengths([8, 5]))
    out = made.unshard(attention(*map(made.shard, (q, k, v)), mask=causal(), context=made))
    return "right" if torch.allclose(out, right, atol=1e-5) else "wrong"


ORDERS = {
    "rows": ([4, 5, 6, 7, 0, 1, 2, 3], "right"),
    "columns": ([1, 0, 3, 2, 5, 4, 7, 6], "right"),
    "transposed": ([0, 4, 1, 5, 2, 6, 3, 7], "right"),
    "one row": ([0, 1, 2, 3, 5, 4, 6, 7], "the same order in all rows"),
    "one column": ([0, 3, 2, 1, 4, 5, 6, 7], "the same order in all rows"),
}


@pytest.mark.parametrize("name", ORDERS)
def test_meshes_in_any_order(pool, name):
    """A process group counts its ranks in the order of their numbers, whatever the mesh's."""
    ranks, words = ORDERS[name]
    rows = [ranks[i : i + 2] for i in range(0, 8, 2)]
    assert all(words in told for told in pool.run((HERE, "of_mesh"), 8, rows))


def test_other_contexts():
    with pytest.raises(TypeError, match=r"context must be a plan of saccade.distributed.plan, got 'group'"):
        attention(*operands(), context="group")
    with pytest.raises(TypeError, match=r"omit context, and print\(context.explain\(\)\)"):
        explain(*operands(), mask=causal(), context=of())
    with pytest.raises(RuntimeError, match=r"made for 2 ranks without processes: pass plan\(…, group\) a group"):
        attention(*operands(), mask=causal(), context=of())


@pytest.mark.parametrize("method", ["gather", "ulysses"])
def test_operands_without_values(method):
    """On meta they say shapes, and nothing is exchanged."""
    q, k, v = (x.to("meta").requires_grad_() for x in operands())
    out, lse = attention(q, k, v, mask=causal(), context=of(method=method), return_lse=True)
    assert (out.shape, lse.shape, out.is_meta) == ((6, 4, 16), (4, 6), True)
    gradients = torch.autograd.grad(out.sum(), (q, k, v))
    assert [x.shape for x in gradients] == [x.shape for x in (q, k, v)]


def test_rocm_gathers(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert pull.obstacle("group", "cuda:0") == "ranks on ROCm: only CUDA's driver makes these copies"
