"""Packed sequences whose keys are ranges, which overlap and leave gaps: starts_k and seqused_k."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.flop_counter import FlopCounterMode

from saccade import Dense, Packed, Unsupported, attention, causal, explain, mask_mod, window
from saccade.layouts import from_tensors
from saccade.masks import Mask
from saccade.testing import check
from saccade.testing.cases import Case
from tests.support import draws

OFFSETS = torch.tensor([0, 4, 4, 10])
STARTS, USED = torch.tensor([2, 0, 5]), torch.tensor([6, 3, 7])


def ranges(starts=STARTS, used=USED, **keywords):
    return Packed(OFFSETS, starts_k=starts, seqused_k=used, **keywords)


def operands(**keywords):
    return torch.randn(10, 4, 16, **keywords), torch.randn(14, 2, 16, **keywords), torch.randn(14, 2, 16, **keywords)


# What it takes


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda: Packed(OFFSETS, starts_k=STARTS), "needs seqused_k"),
        (lambda: Packed(OFFSETS, OFFSETS, starts_k=STARTS, seqused_k=USED), "takes the place of cu_seqlens_k"),
        (lambda: ranges(starts=STARTS.float()), "starts_k must be an int32 or int64 tensor of shape"),
        (lambda: ranges(starts=STARTS[:2]), r"starts_k must have shape \(3,\), got \(2,\)"),
        (lambda: ranges(used=USED[None]), r"seqused_k must be an int32 or int64 tensor of shape \(b,\)"),
    ],
)
def test_broken_tensors(made, words):
    with pytest.raises(ValueError, match=words):
        made()


@pytest.mark.parametrize(
    ("starts", "used"),
    [
        (STARTS - 3, USED),
        (STARTS, USED - 5),
        (STARTS, USED + 3),
        (torch.tensor([2, 1 << 40, 5]), USED),
        (torch.tensor([2, 15, 5]), torch.tensor([6, 0, 7])),
    ],
)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_ranges_outside_of_the_keys(starts, used, backend):
    with pytest.raises(ValueError, match="no range may end beyond the tensor's 14 rows, got"):
        attention(*operands(), layout=ranges(starts, used), backend=backend)


def test_validate(place):
    dtype = getattr(torch, {"fp16": "float16", "bf16": "bfloat16"}.get(place.dtype, "float32"))
    x = [y.to(place.device, dtype) for y in operands()]
    vectors = {"starts_k": STARTS.to(place.device), "seqused_k": USED.to(place.device) + 3}
    with pytest.raises(ValueError, match="no range may end beyond"):
        attention(*x, layout=Packed(OFFSETS.to(place.device), **vectors, validate=True), backend=place.backend)


@pytest.mark.parametrize("used", [{}, {"seqused_q": USED - 3, "validate": True}], ids=["", "q"])
def test_text_and_tensors_are_the_whole_layout(used):
    layout = ranges(**used)
    tensors = [*layout.tensors]
    again = from_tensors(layout.text, tensors, 10, 14)
    assert tensors == []
    assert again.text == layout.text
    assert again.kind == "ranges"
    assert all(x is y for x, y in zip(again.tensors, layout.tensors, strict=True))


def test_words():
    x = operands()
    assert str(explain(*x, layout=ranges()).spec) == "fp32 d16 group2 ranges aligned cpu".replace(
        "d16 group2", "group2 d16"
    )
    assert explain("bf16 d64 ranges causal cpu").plan.backend == "cpu"
    assert ranges().sizes(*x[:2])[2:4] == (6, 7)
    assert ranges(max_seqlen_k=9).sizes(*x[:2]).s_k == 9
    with pytest.raises(Unsupported, match=r"cudnn: .*has no ranges layout"):
        attention(*x, layout=ranges(), backend="cudnn")


def test_flops_are_those_of_the_ranges():
    with FlopCounterMode(display=False) as counter:
        attention(*operands(), layout=ranges())
    assert counter.get_total_flops() == 2 * 4 * (4 * 6 + 6 * 7) * (16 + 16)


# What it computes

# fmt: off
CASES = [
    Case("ranges", b=5, h_q=4, s_q=90, s_k=150, mask="causal", order="thd", ranges=True),
    Case("plain", b=4, h_q=4, s_q=150, s_k=150, d=128, order="thd", ranges=True, tail=70),
    Case("used", b=7, h_q=6, s_q=100, s_k=130, d=40, d_v=24, mask="window(30,0)", score="softcap(9)", sink=True,
         used="q", order="thd", ranges=True, tail=3),
    Case("intervals", b=4, s_q=100, s_k=100, mask="interval_rows", order="thd", ranges=True),
    Case("union", b=4, s_q=140, s_k=140, mask="prefixes|window(5,3)", order="thd", ranges=True),
    Case("bias-dropout", b=4, h_q=4, s_q=70, s_k=130, mask="causal", score="bias", sink=True, dropout_p=0.3,
         order="thd", ranges=True),
    Case("d256", b=4, s_q=90, s_k=150, d=256, mask="window(40,0)", order="thd", ranges=True),
    Case("empty", b=3, lengths=(0, 0, 0), order="thd", ranges=True, tail=5),
    Case("nothing", b=0, order="thd", ranges=True, tail=5),
]
# fmt: on


@pytest.mark.sample
@pytest.mark.parametrize("case", CASES, ids=str)
def test_cases(case, place):
    made = case.replace(dtype=place.dtype).inputs(place.device, requires_grad=True)
    check(made.q, made.k, made.v, dout=made.dout, dlse=made.dlse, backend=place.backend, **made.keywords).assert_ok()


def test_each_sequence_is_a_call_of_its_own(place):
    made = Case("", dtype=place.dtype, b=5, h_q=4, s_q=70, s_k=90, order="thd", ranges=True).inputs(place.device)
    layout = made.keywords["layout"]
    leaves = [x.requires_grad_() for x in (made.q, made.k, made.v)]
    out = attention(*leaves, mask=causal(), layout=layout, backend=place.backend)
    dk = torch.autograd.grad(out, leaves, made.dout)[1]
    total = torch.zeros_like(dk, dtype=torch.float64)
    for b in range(layout.sequences):
        rows = slice(*layout.cu_seqlens_q[b : b + 2].tolist())
        keys = slice(int(layout.starts_k[b]), int(layout.starts_k[b] + layout.seqused_k[b]))
        parts = [x[None, at].detach().requires_grad_() for x, at in zip(leaves, (rows, keys, keys), strict=True)]
        one = attention(*parts, mask=causal(), layout=Dense("bshd"), backend=place.backend)
        torch.testing.assert_close(out[rows], one[0])
        total[keys] += torch.autograd.grad(one, parts, made.dout[None, rows])[1][0]
    assert not total[made.k[:, 0, 0].isnan()].any()
    torch.testing.assert_close(dk, total.to(dk.dtype), rtol=0.02, atol=0.1 if place.dtype == "bf16" else 0.02)


def test_ranges_end_to_end_are_packed_sequences(place):
    made = Case("", dtype=place.dtype, b=4, h_q=4, s_q=90, s_k=120, order="thd", used="q", tail=9).inputs(place.device)
    packed = made.keywords["layout"]
    layout = Packed(packed.cu_seqlens_q, starts_k=packed.cu_seqlens_k[:-1], seqused_k=packed.cu_seqlens_k.diff(),
                    seqused_q=packed.seqused_q)  # fmt: skip
    keywords = {"mask": causal(), "layout": layout, "backend": place.backend}
    assert torch.equal(
        attention(made.q, made.k, made.v, **keywords),
        attention(made.q, made.k, made.v, **keywords | {"layout": packed}),
    )
    check(made.q, made.k, made.v, dout=made.dout, dlse=made.dlse, **keywords).assert_ok()


def test_chunks_of_one_sequence_are_the_whole(place):
    """As context parallelism and shared prefixes have them: each chunk of queries sees all keys up to its last."""
    x = Case("", dtype=place.dtype, b=1, h_q=4, s_q=300, s_k=300, mask="causal", order="thd", lengths=(300,)).inputs(
        place.device
    )
    cuts = torch.tensor([0, 70, 128, 299, 300], device=place.device)
    layout = Packed(cuts, starts_k=torch.zeros_like(cuts[1:]), seqused_k=cuts[1:])

    def chunked(q, k, v, **keywords):
        return attention(q, k, v, **keywords | {"layout": layout})

    keywords = x.keywords | {"mask": causal()}
    check(x.q, x.k, x.v, dout=x.dout, dlse=x.dlse, backend=place.backend, function=chunked, **keywords).assert_ok()


PREDICATES = {
    "tiles": mask_mod(lambda b, h, i, j: (i // 20 + j // 33 + b) % 3 != 0),
    "causal": mask_mod(lambda b, h, i, j: (i ^ j) & (h + 1) == 0) & causal(),
    "not": ~causal(),
    "nothing": mask_mod(lambda b, h, i, j: i < 0),
}


@pytest.mark.sample
@pytest.mark.parametrize("name", PREDICATES)
def test_predicates(name, place):
    case = Case("", dtype=place.dtype, b=5, h_q=4, s_q=150, s_k=90, d=16, order="thd", tail=3, ranges=True, sink=True)
    made = case.inputs(place.device, requires_grad=True)
    keywords = made.keywords | {"mask": PREDICATES[name]}
    check(made.q, made.k, made.v, dout=made.dout, dlse=made.dlse, backend=place.backend, **keywords).assert_ok()


@pytest.mark.sample
@pytest.mark.parametrize("seed", range(8))
def test_random_batches(seed, place):
    case = draws.packed(seed, place.dtype).replace(ranges=True, dropout_p=0.2 * (seed % 2))
    made = case.inputs(place.device)
    report = check(made.q, made.k, made.v, dout=made.dout, dlse=made.dlse, backend=place.backend, **made.keywords)
    assert report.ratio <= 1, f"{case.describe()}\n{report}"


def test_a_broken_sequence_stays_alone(place, poison):
    """NaN and Inf in the queries of one sequence reach no other, nor the keys that it does not read."""
    offsets, starts, used = torch.tensor([[0, 40, 170, 300], [3, 60, 75, 0], [100, 90, 120, 0]], device=place.device)
    made = Case("", dtype=place.dtype, h_q=4, d=64, s_q=300, s_k=200, order="thd", b=1, lengths=(300,)).inputs(
        place.device
    )
    layout = Packed(offsets, starts_k=starts[:3], seqused_k=used[:3])
    k, v = torch.randn(2, 200, 2, 64, device=place.device).to(made.q.dtype)
    k[195:], v[195:] = torch.nan, torch.nan  # in no range
    k[:3], v[:3] = torch.inf, torch.inf

    def results(broken):
        q, dout = made.q[:, :, :].clone(), made.dout.clone()
        if broken:
            q[40:170], dout[40:170] = torch.nan, torch.inf
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attention(*leaves, mask=causal(), layout=layout, backend=place.backend, deterministic=True)
        return out.detach(), *torch.autograd.grad(out, leaves, dout)

    (out, dq, *keys), (out_b, dq_b, *keys_b) = results(False), results(True)
    for x, y in ((out, out_b), (dq, dq_b)):
        assert torch.equal(x[:40], y[:40])
        assert torch.equal(x[170:], y[170:])
    for x, y in zip(keys, keys_b, strict=True):
        assert bool(x.isfinite().all())
        assert torch.equal(x[:60], y[:60])
        assert torch.equal(x[150:], y[150:])
        assert not x[:3].any()
        assert not x[195:].any()


def test_repeats_are_bitwise_equal(place):
    made = Case("", dtype=place.dtype, b=7, h_q=4, s_q=60, s_k=90, order="thd", ranges=True).inputs(place.device)
    leaves = [x.requires_grad_() for x in (made.q, made.k, made.v)]

    def gradients():
        out = attention(*leaves, backend=place.backend, deterministic=True, **made.keywords)
        return torch.autograd.grad(out, leaves, made.dout)

    first = gradients()
    for _ in range(3):
        assert all(torch.equal(x, y) for x, y in zip(first, gradients(), strict=True))


# PyTorch


@pytest.mark.slow
@pytest.mark.parametrize("gradients", [False, True])
def test_compiles_once_for_all_lengths(gradients):
    torch._dynamo.reset()
    counter, counts = CompileCounterWithBackend("aot_eager"), []

    def call(q, k, v, offsets, starts, used):
        return attention(q * 1, k, v, mask=causal(), layout=Packed(offsets, starts_k=starts, seqused_k=used))

    compiled = torch.compile(call, backend=counter, fullgraph=True, dynamic=True)
    for t, b in ((20, 5), (31, 6), (50, 9)):
        offsets = torch.cat([torch.zeros(1), torch.rand(b - 1).sort().values * t, torch.tensor([t])]).int()
        starts = torch.randint(0, t, (b,))
        q, k, v = (torch.randn(n, h, 16, requires_grad=gradients) for n, h in ((t, 4), (t + 7, 2), (t + 7, 2)))
        given = q, k, v, offsets, starts, t + 7 - starts
        got, want = compiled(*given), call(*given)
        assert torch.equal(got, want)
        if gradients:
            for x, y in zip(*(torch.autograd.grad(x.sum(), (q, k, v)) for x in (got, want)), strict=True):
                assert torch.equal(x, y)
        counts.append(counter.frame_count)
    assert len(set(counts)) == 1


# On a GPU


DEVICE = "cuda"


@pytest.fixture(params=["auto", "triton"])
def chosen(request: pytest.FixtureRequest) -> str:
    return request.param


def gpu_operands(t_q: int, t_k: int, h_q: int = 8, h_k: int = 2, d: int = 128) -> list[Tensor]:
    sizes = (t_q, h_q), (t_k, h_k), (t_k, h_k)
    return [torch.randn(t, h, d, device=DEVICE, dtype=torch.bfloat16) for t, h in sizes]


def chunks(ends: list[int], device: str = DEVICE) -> Packed:
    """Chunks of one sequence, each of which sees all keys up to its last."""
    cuts = torch.tensor([0, *ends], device=device)
    return Packed(cuts, starts_k=torch.zeros_like(cuts[1:]), seqused_k=cuts[1:])


@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 128, 192, 256])
@pytest.mark.parametrize("mask", ["none", "causal", "window(300,0)", "prefixes", "interval_rows"])
def test_masks(mask: str, d: int, chosen: str) -> None:
    case = Case("", b=9, h_q=8, h_k=2, s_q=700, s_k=1300, d=d, mask=mask, order="thd", ranges=True, tail=150, used="q")
    for deterministic in (False, True):
        made = case.inputs(DEVICE)
        keywords = made.keywords | {"backend": chosen, "deterministic": deterministic}
        check(made.q, made.k, made.v, dout=made.dout, dlse=made.dlse, **keywords).assert_ok()


@pytest.mark.gpu
@pytest.mark.parametrize("b", [1, 70, 300])
@pytest.mark.parametrize("group", [1, 4])
def test_many_sequences(b: int, group: int, chosen: str) -> None:
    """More than a program looks at at once; some of them empty."""
    case = Case("", b=b, h_q=2 * group, h_k=2, s_q=60, s_k=200, d=64, mask="causal", order="thd", ranges=True)
    made = case.inputs(DEVICE)
    check(made.q, made.k, made.v, dout=made.dout, dlse=made.dlse, backend=chosen, **made.keywords).assert_ok()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("score", ["softcap(9)", "relative_bias(40)", "bias"])
def test_scores_and_their_tensors(score: str, dtype: str) -> None:
    case = Case("", dtype=dtype, b=7, h_q=8, h_k=2, s_q=300, s_k=500, d=64, mask="causal", score=score, sink=True,
                order="thd", ranges=True)  # fmt: skip
    for deterministic in (False, True):
        made = case.inputs(DEVICE, requires_grad=True)
        check(made.q, made.k, made.v, dout=made.dout, dlse=made.dlse, deterministic=deterministic,
              **made.keywords).assert_ok()  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize(("d", "mask"), [(64, "none"), (128, "causal"), (256, "window(200,0)")])
def test_dropout(d: int, mask: str, chosen: str) -> None:
    """Its bits are those of a place in the sequence, wherever its keys begin."""
    case = Case("", b=7, h_q=8, h_k=2, s_q=700, s_k=500, d=d, mask=mask, order="thd", ranges=True, sink=True,
                dropout_p=0.3)  # fmt: skip
    for deterministic in (False, True):
        made = case.inputs(DEVICE)
        keywords = made.keywords | {"backend": chosen, "deterministic": deterministic}
        check(made.q, made.k, made.v, dout=made.dout, dlse=made.dlse, **keywords).assert_ok()


def tiles(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """A third of the tiles is empty, and others are partial."""
    return ((q_idx // 128 + kv_idx // 64 + h + b) % 3 != 0) & ((q_idx ^ kv_idx) % 256 != 5)


MASKS: dict[str, Mask] = {"intervals": window(700, 0), "listed": mask_mod(tiles) & causal(), "not": ~window(3, 0)}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["listed", "not"])
def test_predicates_on_a_gpu(name: str, chosen: str) -> None:
    case = Case("", b=9, h_q=8, h_k=2, s_q=500, s_k=900, d=128, order="thd", ranges=True, sink=True, score="alibi")
    for deterministic in (False, True):
        made = case.inputs(DEVICE, requires_grad=True)
        keywords = made.keywords | {"mask": MASKS[name], "backend": chosen, "deterministic": deterministic}
        check(made.q, made.k, made.v, dout=made.dout, dlse=made.dlse, **keywords).assert_ok()


@pytest.mark.gpu
@pytest.mark.parametrize("d", [64, 128])
def test_chunks_of_one_sequence_are_the_whole_on_a_gpu(d: int, chosen: str) -> None:
    x = Case("", b=1, h_q=8, h_k=2, s_q=3000, s_k=3000, d=d, order="thd", lengths=(3000,)).inputs(DEVICE)
    layout = chunks([700, 1280, 2999, 3000])

    def chunked(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Any:
        return attention(q, k, v, **keywords | {"layout": layout})

    keywords = x.keywords | {"mask": causal()}
    check(x.q, x.k, x.v, dout=x.dout, dlse=x.dlse, backend=chosen, function=chunked, **keywords).assert_ok()


def gradients(x: list[Tensor], layout: Packed, chosen: str, **keywords: Any) -> list[Tensor]:
    leaves = [y.detach().requires_grad_() for y in x]
    out, lse = attention(*leaves, layout=layout, return_lse=True, backend=chosen, **keywords)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out.float().square().sum() + lse[:, :9].sum(), leaves)]


@pytest.mark.gpu
@pytest.mark.parametrize("name", MASKS)
def test_repeats_are_bitwise_equal_on_a_gpu(name: str, chosen: str) -> None:
    layout, x = chunks([*range(64, 1024, 64), 1024]), gpu_operands(1024, 1024)
    first = gradients(x, layout, chosen, mask=MASKS[name], deterministic=True)
    for _ in range(20):
        again = gradients(x, layout, chosen, mask=MASKS[name], deterministic=True)
        assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("deterministic", [False, True], ids=["", "in order"])
def test_a_graph_is_replayed_with_other_ranges(name: str, deterministic: bool, chosen: str) -> None:
    cuts = [[0, 512, 1024, 2048], [0, 1, 2000, 2001], [0, 0, 0, 0], [0, 300, 601, 903]]
    vectors = [([0, 0, 0], [512, 1024, 2048]), ([700, 3, 5], [1, 1000, 0]), ([0, 0, 0], [0, 0, 0]), ([9, 0, 900],) * 2]
    offsets, starts, used = (torch.tensor(y, device=DEVICE) for y in (cuts[0], *vectors[0]))
    x = gpu_operands(2048, 2048)

    def call() -> list[Tensor]:
        layout = Packed(offsets, starts_k=starts, seqused_k=used)
        return gradients(x, layout, chosen, mask=MASKS[name], deterministic=deterministic)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    for cut, (start, use) in zip(cuts, vectors, strict=True):
        for vector, numbers in ((offsets, cut), (starts, start), (used, use)):
            vector.copy_(torch.tensor(numbers))
        for y in found:
            y.fill_(torch.nan)
        graph.replay()
        for of, y, z in zip(("out", "lse", "dq", "dk", "dv"), found, call(), strict=True):
            assert torch.equal(y, z), (of, cut)


@pytest.mark.gpu
def test_nothing_waits_for_the_host(chosen: str) -> None:
    layout, x = chunks([100, 300, 400]), gpu_operands(400, 400)
    lengths, ids = torch.tensor([100, 300], device=DEVICE), torch.arange(400, device=DEVICE) % 100
    gradients(x, layout, chosen, mask=causal())
    gradients(x, Packed.from_lengths(lengths), chosen, mask=causal())
    torch.cuda.set_sync_debug_mode("error")
    try:
        gradients(x, layout, chosen, mask=causal())
        gradients(x, Packed.from_lengths(lengths), chosen, mask=causal())
        gradients(x, Packed.from_lengths([100, 300], device=DEVICE), chosen, mask=causal())
        ranked = Packed.from_position_ids(ids, max_sequences=3)
        found = gradients(x, ranked, chosen, mask=causal())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert ranked.cu_seqlens_q.tolist() == [0, 100, 200, 300]
    assert not found[0][300:].any()  # of a sequence too many
    assert bool((found[1][:, 300:] == -torch.inf).all())


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("starts", "used"),
    [([-5, 300], [400, 400]), ([1 << 40, 0], [9, 1 << 40]), ([0, 399], [-7, 400]), ([-(1 << 40), 400], [400, 400])],
    ids=str,
)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("deterministic", [False, True], ids=["", "in order"])
def test_broken_ranges_stay_inside(
    starts: list[int], used: list[int], name: str, deterministic: bool, chosen: str
) -> None:
    """What comes out means nothing, but no row before or behind the tensors is written."""
    memory = [torch.zeros(1200, h, 128, device=DEVICE, dtype=torch.bfloat16) for h in (8, 2, 2)]
    x = [y[400:800].normal_() for y in memory]
    offsets = torch.tensor([0, 390, 400], device=DEVICE)
    vectors = {"starts_k": torch.tensor(starts, device=DEVICE), "seqused_k": torch.tensor(used, device=DEVICE)}
    gradients(x, Packed(offsets, **vectors), chosen, mask=MASKS[name], deterministic=deterministic)
    torch.cuda.synchronize()
    for y in memory:
        assert not y[:400].any()
        assert not y[800:].any()
    with pytest.raises(ValueError, match="no range may end beyond"):
        gradients(x, Packed(offsets, **vectors, validate=True), chosen)


@pytest.mark.gpu
def test_who_runs_it() -> None:
    """Hopper's forward, and the portable backward."""
    x = [y.requires_grad_() for y in gpu_operands(400, 400)]
    hopper = torch.cuda.get_device_capability() == (9, 0)
    assert explain(*x, layout=chunks([100, 400])).backend == ("gluon" if hopper else "triton")
