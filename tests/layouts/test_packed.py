"""Packed sequences: offsets that are right and wrong, rows of others, nested tensors, compilers and graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.flop_counter import FlopCounterMode

from saccade import Dense, Packed, attention, block_mask, causal, documents, explain, mask_mod, prefix, window
from saccade.layouts import from_tensors, view_layout
from saccade.masks import Mask
from saccade.testing import check
from saccade.testing.cases import NAMED, Case
from tests.support import draws

OFFSETS = torch.tensor([0, 3, 3, 10])


def packed(q=OFFSETS, k=OFFSETS, **keywords):
    return Packed(q, k, 7, 7, **keywords)


def normal(t, h, d, **keywords):
    return torch.randn(t, h, d, **keywords)


# What it takes


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda: packed(q=OFFSETS.float()), "cu_seqlens_q must be an int32 or int64 tensor"),
        (lambda: packed(k=OFFSETS[None]), "(b + 1,)"),
        (lambda: packed(q=OFFSETS[:0], k=OFFSETS[:0]), "got none"),
        (lambda: packed(k=OFFSETS[:3]), "(4,), (3,)"),
        (lambda: packed(seqused_q=torch.tensor([1, 2])), "seqused_q must have shape (3,)"),
        (lambda: Packed(OFFSETS, OFFSETS, -1, 7), "max_seqlen_q must be an integer from 0 on"),
        (lambda: Packed(OFFSETS, OFFSETS, 7, 7.0), "max_seqlen_k"),
        (lambda: Packed(OFFSETS, OFFSETS, 7, OFFSETS), "a tensor of one"),
    ],
)
def test_broken_tensors(made, words):
    error = TypeError if words == "max_seqlen_k" else ValueError
    with pytest.raises(error, match="^.*" + words.replace("(", r"\(").replace(")", r"\)").replace("+", r"\+")):
        made()


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (
            packed(q=OFFSETS + 1),
            "cu_seqlens_q must begin at 0, never decrease, and not end beyond the tensor",
        ),
        (packed(k=torch.tensor([0, 5, 3, 10])), "cu_seqlens_k must begin at 0"),
        (packed(k=torch.tensor([0, 5, 7, 11])), "got \\[0, 5, 7, 11\\]"),
        (packed(seqused_k=torch.tensor([3, 1, 7])), "seqused_k must be between 0 and the sequences' lengths"),
        (packed(seqused_q=torch.tensor([3, -1, 7])), "seqused_q must be"),
    ],
)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_malformed_offsets(layout, words, backend):
    x = normal(10, 2, 8)
    with pytest.raises(ValueError, match=words):
        attention(x, x, x, layout=layout, backend=backend)


def upper(b, h, q_idx, kv_idx):
    return q_idx > kv_idx


def test_wrong_calls():
    x = normal(10, 2, 8)
    with pytest.raises(ValueError, match="three dimensions"):
        attention(x[None], x[None], x[None], layout=packed())
    with pytest.raises(ValueError, match="four dimensions"):
        attention(x, x, x)
    with pytest.raises(ValueError, match="k and v must have the same heads and length"):
        attention(x, x, x[:9], layout=packed())
    with pytest.raises(ValueError, match="omit documents"):
        attention(x, x, x, mask=documents(torch.zeros(1, 10).int()), layout=packed())
    with pytest.raises(ValueError, match="block_mask is for dense calls alone"):
        attention(x, x, x, mask=block_mask(mask_mod(upper), 3, 2, 10, 10), layout=packed())
    with pytest.raises(ValueError, match=r"at least .* = \(3, 2, 7, 7\), .* got \(1, 1, 1, 6\)"):
        attention(x, x, x, mask=torch.ones(6, dtype=torch.bool), layout=packed())
    given = create_block_mask(upper, None, None, 6, 8, device="cpu")
    with pytest.raises(ValueError, match=r"the BlockMask .* got \(1, 1, 6, 8\)"):
        attention(x, x, x, mask=given, layout=packed())
    endless = torch.empty(1, 1, 1).expand(1 << 23, 1, 1)
    with pytest.raises(ValueError, match="mask functions take lengths up to"):
        attention(endless, endless, endless, mask=mask_mod(upper), layout=Packed(OFFSETS, OFFSETS, 1 << 23, 7))
    with pytest.raises(ValueError, match="one for each sequence"):
        attention(x, x, x, mask=prefix(torch.tensor([1, 2])), layout=packed())


@pytest.mark.parametrize(
    "used", [{}, {"seqused_q": OFFSETS[:3]}, {"seqused_k": OFFSETS[:3], "validate": True}], ids=["", "q", "k"]
)
def test_text_and_records_are_the_whole_layout(used):
    layout = packed(**used)
    tensors = [*layout.tensors]
    again = from_tensors(layout.text, tensors, [], 10, 12)
    assert tensors == []
    assert isinstance(again, Packed)
    assert (again.text, again.max_seqlen_q, again.max_seqlen_k) == (layout.text, 10, 12)
    assert all(x is y for x, y in zip(again.tensors, layout.tensors, strict=True))
    assert repr(layout) == "Packed(3 sequences)"


def test_views():
    x = normal(10, 2, 8)
    view = view_layout("packed,validate").canonical(x)
    assert view.shape == (1, 2, 10, 8)
    assert torch.equal(view_layout("packed").ordered(view), x)
    assert str(explain(x, x, x, layout=packed()).spec) == "fp32 d8 packed aligned cpu"


# What it computes


@pytest.mark.parametrize("case", ["packed-cross", "packed-used", "packed-alibi"])
def test_each_sequence_is_a_call_of_its_own(case, place):
    made = NAMED[case].replace(dtype=place.dtype, tail=0).inputs(place.device)
    q, k, v, layout = made.q, made.k, made.v, made.keywords["layout"]
    out, lse = attention(q, k, v, return_lse=True, backend=place.backend, **made.keywords)
    keywords = {name: x for name, x in made.keywords.items() if name != "layout"}
    for b in range(layout.sequences):
        rows, keys = (slice(*x[b : b + 2].tolist()) for x in (layout.cu_seqlens_q, layout.cu_seqlens_k))
        used = (None if x is None else x[b : b + 1] for x in (layout.seqused_q, layout.seqused_k))
        parts = (x[None, at] for x, at in ((q, rows), (k, keys), (v, keys)))
        one, one_lse = attention(
            *parts, layout=Dense("bshd", *used), return_lse=True, backend=place.backend, **keywords
        )
        assert out[rows].shape == one[0].shape
        torch.testing.assert_close(out[rows], one[0])
        torch.testing.assert_close(lse[:, rows], one_lse[0])


def predicates(device):
    """Masks that are no intervals, for up to 5 sequences, 4 heads, 150 queries and keys."""
    made = torch.Generator().manual_seed(0)
    reach, steps = torch.tensor([5, 40, 9, 2, 70], device=device), torch.tensor([3, 1, 7, 64], device=device)
    tensor = (torch.rand(5, 1, 150, 150, generator=made) > 0.3).to(device)
    tiles = mask_mod(lambda b, h, i, j: (i // 20 + j // 33) % 3 != 0)
    return {
        "tiles": tiles,
        "causal": tiles & causal(),
        "sequences": mask_mod(lambda b, h, i, j: ((i - j) // steps[h] % 2 == 0) & (j <= i + reach[b])),
        "not": ~window(9, 3),
        "union": prefix(reach) | mask_mod(lambda b, h, i, j: j == i),
        "tensor": tensor,
        "row": tensor[0, 0, 0],
        "nothing": mask_mod(lambda b, h, i, j: i < 0),
        "block_mask": create_block_mask(lambda b, h, i, j: (i - j) % 40 < 30, 5, None, 200, 150, device=device),
    }


@pytest.mark.sample
@pytest.mark.parametrize("name", predicates("cpu"))
def test_predicates(name, place):
    """Their indices count within the sequence, and their tiles are those of the sequence."""
    case = Case("", dtype=place.dtype, b=5, h_q=4, s_q=150, s_k=150, d=16, order="thd", tail=3)
    if name in ("tiles", "causal", "tensor"):
        case = case.replace(s_k=90, used="qk", sink=True, score="alibi" if name == "causal" else "none")
    made = case.inputs(place.device, requires_grad=True)
    keywords = made.keywords | {"mask": predicates(place.device)[name]}
    check(made.q, made.k, made.v, dout=made.dout, dlse=made.dlse, backend=place.backend, **keywords).assert_ok()


@pytest.mark.sample
@pytest.mark.parametrize("seed", range(6))
def test_random_batches(seed, place):
    case = draws.packed(seed, place.dtype)
    made = case.inputs(place.device)
    report = check(made.q, made.k, made.v, dout=made.dout, dlse=made.dlse, backend=place.backend, **made.keywords)
    assert report.ratio <= 1, f"{case.describe()}\n{report}"


def test_a_broken_sequence_stays_alone(place, poison):
    """NaN and Inf in one sequence reach no other, forward or backward."""
    offsets = torch.tensor([0, 40, 170, 171, 300], device=place.device)
    made = Case("", dtype=place.dtype, h_q=4, d=64, order="thd", b=4, lengths=(40, 130, 1, 129), tail=9).inputs(
        place.device
    )
    layout = Packed(offsets, offsets, 130, 130)

    def results(broken):
        leaves = [x.clone() for x in (made.q, made.k, made.v)]
        dout = made.dout.clone()
        if broken:
            for x, bad in zip((*leaves, dout), (torch.nan, torch.inf, torch.nan, torch.inf), strict=True):
                x[40:170] = bad
        leaves = [x.requires_grad_() for x in leaves]
        out = attention(*leaves, mask=causal(), layout=layout, backend=place.backend, deterministic=True)
        return out.detach(), *torch.autograd.grad(out, leaves, dout)

    for whole, broken in zip(results(False), results(True), strict=True):
        assert torch.equal(whole[:40], broken[:40])
        assert torch.equal(whole[170:300], broken[170:300])
        assert (broken[300:] == 0).all()


def test_offsets_of_either_width_and_bounds_of_either_kind(place):
    made = NAMED["packed"].replace(dtype=place.dtype).inputs(place.device)
    layout = made.keywords["layout"]
    cu_q, cu_k = layout.cu_seqlens_q, layout.cu_seqlens_k
    bound = torch.tensor(90, device=place.device)
    first, *others = (
        attention(made.q, made.k, made.v, mask=causal(), layout=other, backend=place.backend)
        for other in (layout, Packed(cu_q.long(), cu_k.long(), 90, 90), Packed(cu_q, cu_k, bound, bound, validate=True))
    )
    for other in others:
        assert torch.equal(first, other)


def test_validate(place):
    x = torch.randn(10, 2, 8, device=place.device).to(
        getattr(torch, {"fp16": "float16", "bf16": "bfloat16"}.get(place.dtype, "float32"))
    )
    layout = Packed(*[torch.tensor([0, 5, 3, 11], device=place.device)] * 2, 7, 7, validate=True)
    with pytest.raises(ValueError, match="cu_seqlens_q must begin at 0"):
        attention(x, x, x, layout=layout)


# PyTorch


@pytest.mark.parametrize("order", ["bshd", "bhsd"])
def test_nested_tensors(order):
    q, k, v = (normal(10, h, 8, requires_grad=True) for h in (4, 2, 2))
    want = attention(q, k, v, mask=causal(), layout=packed())
    wanted = torch.autograd.grad(want.square().sum(), (q, k, v))
    jagged = [torch.nested.nested_tensor_from_jagged(x, OFFSETS) for x in (q, k, v)]
    jagged = [x if order == "bshd" else x.transpose(1, 2) for x in jagged]
    out = attention(*jagged, mask=causal(), layout=Dense(order))
    assert out.is_nested
    assert out.dim() == 4
    values = out.values() if order == "bshd" else out.values().transpose(0, 1)
    assert torch.equal(values, want)
    for x, y in zip(torch.autograd.grad(values.square().sum(), (q, k, v)), wanted, strict=True):
        assert torch.equal(x, y)
    assert explain(*jagged, layout=Dense(order)).spec.layout == "packed"


def test_nested_tensors_that_do_not_fit():
    q = torch.nested.nested_tensor_from_jagged(normal(10, 4, 8), OFFSETS)
    with pytest.raises(ValueError, match="jagged in dimension 1"):
        attention(q, q, q)
    with pytest.raises(ValueError, match="k is not"):
        attention(q, normal(10, 4, 8)[None], q, layout=Dense("bshd"))


@pytest.mark.slow
@pytest.mark.parametrize("gradients", [False, True])
def test_compiles_once_for_all_lengths(gradients):
    torch._dynamo.reset()
    counter, counts = CompileCounterWithBackend("aot_eager"), []

    def call(q, k, v, offsets, bound):
        return attention(q * 1, k, v, mask=window(5, 0), layout=Packed(offsets, offsets, bound, bound))

    compiled = torch.compile(call, backend=counter, fullgraph=True, dynamic=True)
    for t, b in ((20, 5), (31, 6), (50, 9)):
        offsets = torch.cat([torch.zeros(1), torch.rand(b - 1).sort().values * t, torch.tensor([t])]).int()
        q, k, v = (normal(t, h, 8, requires_grad=gradients) for h in (4, 2, 2))
        bound = torch.tensor(t)
        got, want = compiled(q, k, v, offsets, bound), call(q, k, v, offsets, bound)
        assert torch.equal(got, want)
        if gradients:
            for x, y in zip(*(torch.autograd.grad(x.sum(), (q, k, v)) for x in (got, want)), strict=True):
                assert torch.equal(x, y)
        counts.append(counter.frame_count)
    assert len(set(counts)) == 1


def test_flops_are_those_of_the_sequences():
    q, k, v = normal(10, 4, 8), normal(10, 2, 8), normal(10, 2, 6)
    with FlopCounterMode(display=False) as counter:
        attention(q, k, v, layout=packed())
    assert counter.get_total_flops() == 2 * 4 * (3 * 3 + 7 * 7) * (8 + 6)


@pytest.mark.parametrize("order", ["bhsd", "bshd"])
def test_nested_beside_a_mask_of_the_longest(order):
    rows = [torch.randn(n, 2, 8) for n in (2, 4, 3)]
    seen = torch.rand(4, 4) > 0.3
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged)
    nested = nested.transpose(1, 2) if order == "bhsd" else nested
    out = attention(nested, nested, nested, mask=seen, layout=Dense(order))
    for found, x in zip(out.unbind(), rows, strict=True):
        x, n = x.transpose(0, 1)[None], len(x)
        right = attention(x, x, x, mask=seen[:n, :n])[0]
        torch.testing.assert_close(found if order == "bhsd" else found.transpose(0, 1), right)
    with pytest.raises(ValueError, match=r"at least \(sequences, h_q, queries, keys\) = \(3, 2, 4, 4\)"):
        attention(nested, nested, nested, mask=seen[:3], layout=Dense(order))


# On a GPU


@pytest.fixture(params=["auto", "triton"])
def chosen(request: pytest.FixtureRequest) -> str:
    return request.param


def offsets_of(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths], device="cuda").cumsum(0).int()


def operands(t: int, h_q: int = 8, h_k: int = 2, d: int = 128) -> list[Tensor]:
    return [torch.randn(t, h, d, device="cuda", dtype=torch.bfloat16) for h in (h_q, h_k, h_k)]


@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("mask", ["none", "causal", "window(300,0)"])
@pytest.mark.parametrize(
    "lengths",
    [(5000, *[30] * 60), tuple(range(0, 700, 7)), (128, 256, 192, 64, 384), (1,) * 200],
    ids=["one-long", "all", "whole-tiles", "ones"],
)
def test_lengths(lengths: tuple[int, ...], mask: str, d: int, chosen: str) -> None:
    longest = max(lengths)
    case = Case("", b=len(lengths), h_q=8, h_k=2, s_q=longest, s_k=longest, d=d, mask=mask, order="thd",
                lengths=lengths, tail=150)  # fmt: skip
    made = case.inputs("cuda")
    check(made.q, made.k, made.v, dout=made.dout, dlse=made.dlse, backend=chosen, **made.keywords).assert_ok()


def tiles(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """A third of the tiles is empty, and others are partial."""
    return ((q_idx // 128 + kv_idx // 64 + h + b) % 3 != 0) & ((q_idx ^ kv_idx) % 256 != 5)


MASKS: dict[str, Mask] = {
    "intervals": window(700, 0),
    "listed": mask_mod(tiles) & causal(),
    "shared": mask_mod(lambda b, h, q_idx, kv_idx: (q_idx + 7 * b ^ kv_idx) & 192 != 0),
    "all-but": ~(mask_mod(tiles) | window(3, 0)),
    "nowhere": mask_mod(lambda b, h, q_idx, kv_idx: q_idx < 0),
}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("d", "name"),
    [*((d, name) for d in (64, 128, 256) for name in ("listed", "all-but")), (128, "nowhere"), (128, "shared")],
)
def test_predicates_on_a_gpu(d: int, name: str, chosen: str) -> None:
    """Other lengths of queries and keys, of which some are not in use."""
    case = Case("", b=9, h_q=8, h_k=2, s_q=900, s_k=1300, d=d, order="thd", used="qk", sink=True, score="alibi",
                tail=90, dropout_p=0.2 if name == "all-but" else 0.0)  # fmt: skip
    for deterministic in (False, True):
        made = case.inputs("cuda", requires_grad=True)
        keywords = made.keywords | {"mask": MASKS[name], "backend": chosen, "deterministic": deterministic}
        check(made.q, made.k, made.v, dout=made.dout, dlse=made.dlse, **keywords).assert_ok()


@pytest.mark.gpu
@pytest.mark.parametrize(("d", "mask"), [(64, "none"), (128, "causal"), (256, "window(200,0)")])
def test_dropout(d: int, mask: str, chosen: str) -> None:
    """Its bits are those of a place in the sequence, wherever that begins."""
    case = Case("", b=7, h_q=8, h_k=2, s_q=700, s_k=500, d=d, mask=mask, order="thd", used="k", sink=True,
                tail=40, dropout_p=0.3)  # fmt: skip
    for deterministic in (False, True):
        made = case.inputs("cuda")
        keywords = made.keywords | {"backend": chosen, "deterministic": deterministic}
        check(made.q, made.k, made.v, dout=made.dout, dlse=made.dlse, **keywords).assert_ok()


def gradients(x: list[Tensor], layout: Packed, chosen: str, **keywords: Any) -> list[Tensor]:
    leaves = [y.detach().requires_grad_() for y in x]
    out, lse = attention(*leaves, layout=layout, return_lse=True, backend=chosen, **keywords)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out.float().square().sum() + lse[:, :9].sum(), leaves)]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("d", "name", "whole"),
    [(128, "intervals", False), (128, "intervals", True), (128, "listed", True), (256, "listed", True)],
)
def test_repeats_are_bitwise_equal(d: int, name: str, whole: bool, chosen: str) -> None:
    """With whole blocks, half of the programs have none, and come in several rounds: all add to one piece of dq."""
    offsets = offsets_of([128] * 200 if whole else [900, 0, 33, 400, 1])
    layout, x = Packed(offsets, offsets, 900, 900), operands(int(offsets[-1]) + 66, d=d)
    first = gradients(x, layout, chosen, mask=MASKS[name], deterministic=True)
    for _ in range(20):
        again = gradients(x, layout, chosen, mask=MASKS[name], deterministic=True)
        assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["intervals", "listed"])
def test_a_graph_is_replayed_with_other_offsets(name: str, chosen: str) -> None:
    """Captured with upper bounds, and nothing in it waits for the host."""
    batches = [[512, 512, 512, 512], [1, 2000, 0, 47], [0, 0, 0, 2048], [300, 301, 302, 0], [2, 3, 5, 7]]
    offsets, x = offsets_of(batches[0]), operands(2048)
    layout = Packed(offsets, offsets, 2048, 2048)

    def call() -> list[Tensor]:
        return gradients(x, layout, chosen, mask=MASKS[name])

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    for lengths in batches:
        offsets.copy_(offsets_of(lengths))
        for y in found:
            y.fill_(torch.nan)
        graph.replay()
        wanted = call()
        for of, y, z in zip(("out", "lse", "dq", "dk", "dv"), found, wanted, strict=True):
            if of == "dq" and chosen == "auto":  # added up in any order
                torch.testing.assert_close(y, z)
            else:
                assert torch.equal(y, z), (of, lengths)


@pytest.mark.gpu
def test_nothing_waits_for_the_host(chosen: str) -> None:
    offsets, x = offsets_of([100, 0, 300]), operands(400)
    layout = Packed(offsets, offsets, torch.tensor(300, device="cuda"), torch.tensor(300, device="cuda"))
    gradients(x, layout, chosen, mask=causal())
    torch.cuda.set_sync_debug_mode("error")
    try:
        gradients(x, layout, chosen, mask=causal())
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "offsets",
    [
        [5, 100, 400],
        [0, 300, 100],
        [0, -7, 400],
        [0, 200, 1 << 20],
        [400, 400, 400],
        [0, 1 << 40, 9],
        [0, 300, 100, 400],
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["intervals", "listed"])
@pytest.mark.parametrize("deterministic", [False, True], ids=["", "in order"])
def test_broken_offsets_stay_inside(offsets: list[int], name: str, deterministic: bool, chosen: str) -> None:
    """What comes out means nothing, but no row before or behind the tensors is written, and nobody waits for ever."""
    cu = torch.tensor(offsets, device="cuda")
    memory = [torch.zeros(1200, h, 128, device="cuda", dtype=torch.bfloat16) for h in (8, 2, 2)]
    x = [y[400:800].normal_() for y in memory]
    keywords = {"mask": MASKS[name], "deterministic": deterministic}
    gradients(x, Packed(cu, cu, 400, 400), chosen, **keywords)
    whole = torch.tensor([0, *[390] * (len(offsets) - 2), 400], device="cuda")
    gradients(x, Packed(whole, cu, 400, 400), chosen, **keywords)
    torch.cuda.synchronize()
    for y in memory:
        assert not y[:400].any()
        assert not y[800:].any()
    with pytest.raises(ValueError, match="must begin at 0"):
        gradients(x, Packed(cu, cu, 400, 400, validate=True), chosen)


@pytest.mark.gpu
def test_heads_that_share_a_tile() -> None:
    """One query for each sequence: the heads of a group fill the tile."""
    made = Case("", b=50, h_q=16, h_k=2, s_q=1, s_k=900, d=128, mask="causal", order="thd", lengths=(1,) * 50).inputs(
        "cuda"
    )
    check(made.q, made.k, made.v, dout=made.dout, dlse=made.dlse, **made.keywords).assert_ok()
    assert explain(made.q, made.k, made.v, **made.keywords).backend in ("gluon", "triton")


@pytest.mark.gpu
def test_captured_tensors_of_no_sequence(chosen: str) -> None:
    none = torch.zeros(1, device="cuda", dtype=torch.int32)
    x = torch.randn(3, 1, 192, device="cuda", dtype=torch.float16, requires_grad=True)
    table = torch.randn(1100, device="cuda", dtype=torch.float16, requires_grad=True)
    layout = Packed(none, none, 0, 0)
    out = attention(x, x, x, score_mod=lambda s, b, h, i, j: s + table[i], layout=layout, backend=chosen)
    for gradient in torch.autograd.grad(out.sum(), (x, table)):
        assert not gradient.count_nonzero()
