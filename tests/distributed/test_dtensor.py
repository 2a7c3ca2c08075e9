"""Calls of DTensors are those of the whole tensors, forward and backward; what no rank can compute alone is refused."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from saccade import (
    Dense,
    Packed,
    Paged,
    ScoreMod,
    alibi,
    attention,
    causal,
    documents,
    explain,
    interval,
    mask_mod,
    prefix,
    softcap,
    window,
)
from saccade.distributed import plan
from tests.support.ranks import mesh_of

HERE = str(Path(__file__))
EQUAL = 1e-12  # in float64, what sums in another order differ by
B, H, H_K, S, D = 8, 16, 8, 12, 16
BATCH, HEADS, BOTH = [Shard(0)], [Shard(1)], [Shard(0), Shard(1)]


def random(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def operands(order="bhsd"):
    torch.manual_seed(3)
    given = random(B, H, S, D), random(B, H_K, S, D), random(B, H_K, S, D)
    return [x.permute([("bhsd").index(letter) for letter in order]).contiguous() for x in given]


def functions(name, wrap):
    """A function with the tensors that it captures; `wrap` makes them what a call has."""
    slopes, table = wrap(random(H).requires_grad_()), wrap(random(B, H).requires_grad_())
    return {
        "none": (None, []),
        "softcap": (softcap(3.0), []),
        "alibi": (alibi(slopes), [slopes]),
        "closure": (lambda s, b, h, i, j: s * table[b, h] + 0.1 * h + slopes[j % 3], [slopes, table]),
        "distance": (lambda s, b, h, i, j: s + slopes[(i - j) % 5], [slopes]),
    }[name]


def masks(name, wrap):
    ids = torch.arange(S).expand(B, S) // torch.arange(2, B + 2)[:, None]
    lengths = torch.tensor([1, 4, 7, 2, 0, 9, 3, 5])
    seen, heads = torch.rand(B, 1, 1, S) > 0.2, torch.rand(B, H, S, S) > 0.3
    flags = wrap(torch.arange(S) % 4 != 2)
    return {
        "none": lambda: None,
        "causal": causal,
        "window": lambda: window(3, 1),
        "documents": lambda: documents(ids) & causal(),
        "prefix": lambda: prefix(wrap(lengths)),
        "interval": lambda: interval(wrap(lengths)[:, None], torch.arange(1, S + 1)[None] + 3),
        "rows": lambda: wrap(seen),
        "tensor": lambda: wrap(heads),
        "mask_mod": lambda: causal() & mask_mod(lambda b, h, i, j: flags[j] | (i == j)),
    }[name]()


LAYOUTS = {
    "bhsd": Dense,
    "bshd": lambda: Dense("bshd"),
    "sbhd": lambda: Dense("sbhd"),
    "padded": lambda: Dense(
        "bhsd", seqused_q=torch.tensor([12, 5, 9, 1, 3, 0, 12, 4]), seqused_k=torch.tensor([12, 7, 9, 3, 3, 8, 11, 5])
    ),
    "offset": lambda: Dense(q_offset=torch.arange(B) % 5, k_offset=torch.arange(B) // 4),
}


def results(given, sink, captures, keywords, run=attention):
    """out, LSE, largest scores and gradients, of the whole call."""
    out, lse, top = run(*given, sink=sink, return_lse=True, return_max_scores=True, **keywords)
    weight = torch.linspace(0.5, 2, lse.numel(), dtype=lse.dtype).view(lse.shape).cos()
    loss = (out * out.detach().cos()).sum() + (weighted(lse, weight)).sum()
    leaves = [*given, *([] if sink is None else [sink]), *captures]
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
    placed = [x.placements for x in (out, lse, top)] if isinstance(out, DTensor) else None
    return placed, [whole(x) for x in (out, lse, top, *gradients)]


def weighted(lse, weight):
    if isinstance(lse, DTensor):
        weight = distribute_tensor(weight, lse.device_mesh, lse.placements)
    return torch.where(lse.isinf(), 0 * weight, lse * weight)


def whole(x):
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach()


@cache
def mesh_over(group):
    """A line of two ranks, or all processes as a table: they make its groups together."""
    return DeviceMesh.from_group(group, "cpu") if group.size() == 2 else mesh_of((4, 2))


def error(group, placements, mask, score, layout="bhsd", how="replicated", compiled=False):
    """The largest difference between a call of DTensors and that of the whole ones, and how its results are placed."""
    torch._dynamo.reset()
    mesh = mesh_over(group)
    everywhere = [Replicate()] * mesh.ndim
    order = LAYOUTS[layout]().order
    letters = ["" if p.is_replicate() else "bhsd"[p.dim] for p in placements]
    placements = [Shard(order.index(x)) if x else Replicate() for x in letters]

    def wrap(x):
        if how == "plain":
            return x
        made = distribute_tensor(x.detach(), mesh, everywhere)
        return made.requires_grad_(x.requires_grad)

    found = []
    for mine in (False, True):
        given = [x.requires_grad_() for x in operands(order)]
        sink = random(H).requires_grad_()
        function, captures = functions(score, wrap if mine else lambda x: x)
        if mine:
            given = [distribute_tensor(x.detach(), mesh, placements).requires_grad_() for x in given]
            if how != "plain":
                at = [Shard(0) if x == "h" and how == "sharded" else Replicate() for x in letters]
                sink = distribute_tensor(sink.detach(), mesh, at).requires_grad_()
        keywords = {
            "mask": masks(mask, wrap if mine else lambda x: x),
            "score_mod": function,
            "layout": LAYOUTS[layout](),
        }
        run = torch.compile(attention, backend="aot_eager", fullgraph=True) if compiled and mine else attention
        found.append(results(given, sink, captures, keywords, run))
    (_, right), (placed, got) = found
    worst = max(float((x - y).nan_to_num(0, 0, 0).abs().max()) for x, y in zip(got, right, strict=True))
    same = all(torch.equal(x.isfinite(), y.isfinite()) for x, y in zip(got, right, strict=True))
    of_rows = tuple(Shard("bh".index(x)) if x else Replicate() for x in letters)
    return worst if same else float("inf"), placed == [tuple(placements), of_rows, of_rows]


LINE = [
    (BATCH, "documents", "alibi", "bhsd", "plain"),
    (BATCH, "prefix", "closure", "sbhd"),
    (BATCH, "interval", "softcap", "padded"),
    (BATCH, "causal", "distance", "offset", "plain"),
    (BATCH, "rows", "none"),
    (BATCH, "tensor", "none"),
    (HEADS, "causal", "closure", "bshd", "sharded"),
    (HEADS, "tensor", "alibi"),
    (HEADS, "mask_mod", "closure", "bhsd", "plain"),
    (HEADS, "rows", "none", "padded"),
    ([Replicate()], "documents", "closure"),
]
"""Placements, mask, score function, layout, and how what all ranks have is given."""
TABLE = [
    (BOTH, "interval", "closure", "padded"),
    (BOTH, "tensor", "distance", "bshd", "sharded"),
    ([Replicate(), Shard(1)], "mask_mod", "alibi"),
]
"""The same on a mesh of 4 x 2."""
TWICE = [
    ([Shard(1), Shard(1)], "window", "closure", "bhsd", "sharded"),
    ([Shard(0), Shard(0)], "interval", "closure", "padded", "plain"),
]
"""One dimension over both of the mesh."""


def errors(group, cases):
    return [error(group, *case) for case in cases]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "cases"), [(2, LINE), (8, TABLE + TWICE)], ids=["line", "table"])
def test_equal_the_whole_call(pool, ranks, cases):
    for found in pool.run((HERE, "errors"), ranks, cases):
        for case, (worst, placed) in zip(cases, found, strict=True):
            assert worst <= EQUAL, case
            assert placed, case


@pytest.mark.rare
def test_compiled(pool):
    """As one graph, forward and backward: sinks and functions of the head by heads, bounds by batch rows."""
    cases = [
        (HEADS, "documents", "closure", "bshd", "sharded", True),
        (BATCH, "interval", "softcap", "padded", "replicated", True),
    ]
    for found in pool.run((HERE, "errors"), 2, cases):
        assert all(worst <= EQUAL and placed for worst, placed in found)


def ragged(group):
    """How far calls of packed sequences and of pages are from those of the whole tensors, by heads."""
    mesh = mesh_over(group)
    torch.manual_seed(3)
    offsets, worst = torch.tensor([0, 5, 5, 12]), []
    q, k, v, cache = random(12, H, D), random(12, H_K, D), random(12, H_K, D), random(3, 4, H_K, D)
    table, used = torch.tensor([[2, 0], [1, 1]]), torch.tensor([7, 3])
    ends = torch.tensor([0, 4, 6])
    for layout, dims, given in (
        (Packed(offsets), (1, 1, 1), (q, k, v)),
        (Paged(table, used), (2, 2, 2), (random(2, 3, H, D), cache, cache[..., :8])),
        (Paged(table, used, cu_seqlens_q=ends), (1, 2, 2), (random(6, H, D), cache, cache)),
    ):
        mine = [distribute_tensor(x, mesh, [Shard(dim)]) for x, dim in zip(given, dims, strict=True)]
        options = {"mask": causal(), "layout": layout, "sink": random(H), "return_lse": True}
        for x, y in zip(attention(*mine, **options), attention(*given, **options), strict=True):
            worst.append(float((whole(x) - y).nan_to_num(0, 0, 0).abs().max()))
    return max(worst)


def test_ragged_layouts(pool):
    assert max(pool.run((HERE, "ragged"), 2)) <= EQUAL


def refused(group):
    """What calls raise, in words."""
    mesh = mesh_over(group)
    given = operands()
    q, k, v = (distribute_tensor(x, mesh, HEADS) for x in given)
    rows = [distribute_tensor(x, mesh, [Shard(2)]) for x in given]
    by_batch = [distribute_tensor(x, mesh, BATCH) for x in given]
    partial = [DTensor.from_local(x, mesh, [Partial()], run_check=False) for x in given]
    flat = [distribute_tensor(random(12, n, D), mesh, [Shard(0)]) for n in (H, H_K, H_K)]
    few = [distribute_tensor(x, mesh, HEADS) for x in (random(B, 6, S, D), random(B, 3, S, D), random(B, 3, S, D))]
    odd = [distribute_tensor(x, mesh, BATCH) for x in (random(3, 2, S, D),) * 3]
    cut = distribute_tensor(random(H), mesh, [Shard(0)])
    everywhere = distribute_tensor(random(H), mesh, [Replicate()])
    lengths = distribute_tensor(torch.arange(B), mesh, [Replicate()])
    own = ScoreMod(lambda s, b, h, i, j: s * (h + 1), bprop=lambda g, s, b, h, i, j: g * (h + 1))
    calls = {
        "rows": lambda: attention(*rows),
        "keys": lambda: attention(distribute_tensor(given[0], mesh, [Replicate()]), *rows[1:]),
        "packed rows": lambda: attention(*flat, layout=Packed(torch.tensor([0, 12]))),
        "head dim": lambda: attention(*(distribute_tensor(x, mesh, [Shard(3)]) for x in given)),
        "partial": lambda: attention(*partial),
        "unlike": lambda: attention(q, *by_batch[1:]),
        "mixed": lambda: attention(q, *given[1:]),
        "key heads": lambda: attention(*few),
        "odd": lambda: attention(*odd),
        "sink": lambda: attention(*by_batch, sink=cut),
        "short sink": lambda: attention(q, k, v, sink=random(H // 2)),
        "plain beside sink": lambda: attention(*given, sink=everywhere),
        "plain beside mask": lambda: attention(*given, mask=prefix(lengths)),
        "captured": lambda: attention(q, k, v, score_mod=alibi(cut)),
        "short capture": lambda: attention(q, k, v, score_mod=alibi(random(H // 2))),
        "local lengths": lambda: attention(*by_batch, layout=Dense(seqused_k=torch.tensor([1, 2]))),
        "bprop": lambda: attention(q, k, v, score_mod=own),
        "mask of the head": lambda: attention(q, k, v, mask=mask_mod(lambda b, h, i, j: i + h > j)),
        "mask of the batch": lambda: attention(*by_batch, mask=mask_mod(lambda b, h, i, j: i + b > j)),
        "reference": lambda: attention(q, k, v, score_mod=alibi(everywhere), backend="reference"),
        "dropout": lambda: attention(q, k, v, dropout_p=0.1),
        "out": lambda: attention(q, k, v, out=torch.empty_like(given[0])),
        "explain": lambda: explain(q, k, v),
        "context": lambda: attention(q, k, v, context=plan((B, S), group)),
    }
    said = {}
    for name, call in calls.items():
        try:
            call()
        except Exception as raised:
            said[name] = f"{type(raised).__name__}: {raised}"
    return said


REFUSED = {
    "rows": r"ValueError: rows that are sharded over ranks need context=plan.* q \(8, 16, 12, 16\) \(Shard\(dim=2\),\)",
    "keys": r"ValueError: rows that are sharded over ranks need context=plan.* k \(8, 8, 12, 16\) \(Shard\(dim=2\),\)",
    "packed rows": r"ValueError: rows that are sharded over ranks need context=plan",
    "head dim": r"ValueError: .*batch rows or heads, or be replicated.* q \(8, 16, 12, 16\) \(Shard\(dim=3\),\)",
    "partial": r"ValueError: .*batch rows or heads, or be replicated.*Partial",
    "unlike": r"ValueError: .*sharded alike.* q \(8, 16, 12, 16\) \(Shard\(dim=1\),\), k .* \(Shard\(dim=0\)",
    "mixed": r"TypeError: q, k and v must all be DTensors.* q \(8, 16, 12, 16\) \(Shard\(dim=1\),\), k \(.*\) plain",
    "key heads": r"ValueError: 2 ranks divide query heads and key heads that .* not 6 and 3.*Shard\(dim=1\)",
    "odd": r"ValueError: 2 ranks divide batch rows that are multiples of 2, not 3",
    "sink": r"ValueError: sink beside DTensors must be \(Replicate\(\),\) on their mesh, or plain, got \(16,\) \(Shard",
    "short sink": r"ValueError: sink must be a float tensor \(16,\)",
    "plain beside sink": r"TypeError: q, k and v must all be DTensors, or q, k, v, the sink and captured tensors",
    "plain beside mask": r"TypeError: a tensor of layout or mask is a DTensor, and q is not",
    "captured": r"ValueError: a tensor of score_mod beside .* must be \(Replicate\(\),\) on .* got \(16,\) \(Shard",
    "short capture": r"ValueError: .*\(8,\)",
    "local lengths": r"ValueError: seqused_k must have shape \(8,\), got \(2,\)",
    "bprop": r"Unsupported: .*depends on the batch row or the head.*omit bprop",
    "mask of the head": r"Unsupported: the mask mask_mod\(lambda\) depends on the batch row or the head",
    "mask of the batch": r"Unsupported: the mask mask_mod\(lambda\) depends on the batch row or the head, along which",
    "reference": r"Unsupported: backend='reference' calls score_mod itself",
    "dropout": r"Unsupported: dropout_p beside DTensors: not supported",
    "out": r"Unsupported: out beside DTensors",
    "explain": r"TypeError: explain describes calls in one process",
    "context": r"TypeError: context= takes a rank's rows and the sink as plain tensors",
}


def test_refusals(pool):
    for said in pool.run((HERE, "refused"), 2):
        assert said.keys() == REFUSED.keys()
        for name, words in REFUSED.items():
            assert re.match(words, said[name], re.DOTALL), f"{name}: {said[name]}"
