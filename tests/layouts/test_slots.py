"""Rows that list the slots of a cache: against an oracle that gathers them, row after row, in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from saccade import Paged, append_kv, attention, causal, explain, selected, softcap
from saccade.testing import check
from tests.support.devices import CPU, INTERPRETER, TRITON, on

B, S_Q, H_Q, H_K, D, D_V, N, PAGES, SIZE = 3, 2, 4, 2, 16, 24, 9, 5, 8


def slots(*rows, n=N, dtype=torch.int32, known=PAGES * SIZE):
    """Slots in no order, and numbers that are none in any place."""
    drawn = torch.rand(*rows, known).argsort(-1)[..., :n]
    far = torch.tensor([-1, -7, -(1 << 31), known, known + 3, (1 << 31) - 1])[torch.randint(0, 6, (*rows, n))]
    return torch.where(torch.rand(*rows, n) < 0.3, far, drawn).to(dtype)


def caches(form="apart", d=D, d_v=D_V, h_k=H_K, fill=torch.nan):
    """Whose rows that no slot names, among them the first one, may be NaN: `fill`."""
    k, v = torch.randn(PAGES, SIZE, h_k, d), torch.randn(PAGES, SIZE, h_k, d_v)
    if form == "beside":  # keys of a page, then its values
        pages = torch.full((PAGES, 2, SIZE, h_k, d), fill)
        pages[:, 0], pages[:, 1] = k, torch.randn(PAGES, SIZE, h_k, d)
        return pages[:, 0], pages[:, 1]
    if form == "latent":
        return k, k[..., :d_v]
    return k, v


def gathered(q, k, v, table, used, sink=None):
    """out (rows, h_q, d_v) and lse (rows, h_q)."""
    outs, lses = [], []
    for row in range(len(q)):
        at = [n for n in table[row, : int(used[row])].tolist() if 0 <= n < PAGES * SIZE]
        keys, values = (x.flatten(0, 1)[at].double().transpose(0, 1) for x in (k, v))  # (h_k, n, d)
        queries = q[row].double().unflatten(0, (len(keys), -1)) / q.shape[-1] ** 0.5
        score = queries @ keys.mT
        logit = torch.full((q.shape[1],), -torch.inf) if sink is None else sink
        column = logit.double().view(*queries.shape[:2], 1)
        lse = torch.cat([score, column], -1).logsumexp(-1)
        share = (score - lse.nan_to_num(neginf=0)[..., None]).exp()
        outs.append((share @ values).flatten(0, 1))
        lses.append(lse.flatten())
    return torch.stack(outs), torch.stack(lses)


@pytest.mark.parametrize("form", ["apart", "beside", "latent"])
@pytest.mark.parametrize("end_to_end", [False, True], ids=["batch", "end to end"])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_against_the_oracle(backend, end_to_end, form):
    k, v = caches(form, d=D, d_v=D if form == "beside" else 8 if form == "latent" else D_V)
    table, used = slots(B, S_Q), torch.randint(0, N + 1, (B, S_Q))
    used[0, 1] = 0
    q, sink = torch.randn(B, S_Q, H_Q, D), torch.randn(H_Q)
    wanted = gathered(q.flatten(0, 1), k, v, table.flatten(0, 1), used.flatten(), sink)
    if end_to_end:
        given, layout = q.flatten(0, 1), Paged(slots=table.flatten(0, 1), seqused_k=used.flatten())
        out, lse = attention(given, k, v, layout=layout, sink=sink, return_lse=True, backend=backend)
        found = out, lse.T
    else:
        layout = Paged(slots=table, seqused_k=used)
        out, lse = attention(q, k, v, layout=layout, sink=sink, return_lse=True, backend=backend)
        assert out.shape == (B, S_Q, H_Q, v.shape[-1])
        assert lse.shape == (B, H_Q, S_Q)
        found = out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-4, atol=1e-4)


def without_the_others(k, v, table):
    """NaN in rows of the caches that no slot names, and slots that name neither the first row nor the last."""
    known = k.shape[0] * k.shape[1]
    table = torch.where((table == 0) | (table == known - 1), -1, table)
    named = torch.zeros(known, dtype=torch.bool, device=k.device)
    named[table[(table >= 0) & (table < known)].long()] = True
    for x in (k, v):
        x[~named.view(x.shape[:2])] = torch.nan
    return table


@pytest.mark.parametrize("form", ["apart", "beside", "latent"])
@pytest.mark.parametrize("h_k", [1, 2])
@pytest.mark.parametrize("end_to_end", [False, True], ids=["batch", "end to end"])
@on(CPU, INTERPRETER, replace(TRITON, d=128))
def test_caches(device, end_to_end, h_k, form):
    """What no slot names is NaN: the first row too, which is the nearest one to -1."""
    pages, size, n, h_q = (60, 64, 300, 16) if device.type == "cuda" else (PAGES, SIZE, N, H_Q)
    k, v = device.randn(pages, 2, size, h_k, device.d).unbind(1)
    k, v = (k.contiguous(), v.contiguous()) if form == "apart" else (k, k[..., :8] if form == "latent" else v)
    table = without_the_others(k, v, slots(B * S_Q, n=n, known=pages * size).to(device.type))
    used, starts = torch.randint(0, n + 1, (B * S_Q,), device=device.type), None
    used[1] = 0
    q = device.randn(B * S_Q, h_q, device.d)
    if end_to_end:
        starts = torch.tensor([0, 2, B * S_Q], device=device.type).int()
    else:
        q, table, used = (x.unflatten(0, (B, S_Q)) for x in (q, table, used))
    layout, sink = Paged(slots=table, seqused_k=used, cu_seqlens_q=starts), device.randn(h_q, dtype=torch.float32)
    check(q, k, v, layout=layout, sink=sink, return_max_scores=True, backend=device.backend).assert_ok()


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_nothing_is_read_through_what_is_no_slot(backend):
    (k, v), used = caches(), torch.full((6,), N)
    table, q = without_the_others(k, v, slots(6)), torch.randn(6, H_Q, D)
    out = attention(q, k, v, layout=Paged(slots=table, seqused_k=used), backend=backend)
    torch.testing.assert_close(out.double(), gathered(q, k, v, table, used)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_rows_after_the_last_sequence(backend):
    k, v = caches()
    q, table, used = torch.randn(7, H_Q, D), slots(7), torch.full((7,), N)
    out = torch.full((7, H_Q, D_V), 5.0)
    layout = Paged(slots=table, seqused_k=used, cu_seqlens_q=torch.tensor([0, 2, 2, 5]))
    attention(q, k, v, layout=layout, out=out, backend=backend)
    assert bool((out[5:] == 5).all())
    torch.testing.assert_close(out[:5].double(), gathered(q, k, v, table, used)[0][:5], rtol=1e-4, atol=1e-4)
    found = attention(q, k, v, layout=layout, return_lse=True, backend=backend)
    assert not found.out[5:].any()
    assert bool((found.lse[:, 5:] == -torch.inf).all())


def test_lists_translated_to_slots():
    """`selected` over pages is the same as the slots of its keys."""
    k, v = caches()
    pages, used = torch.tensor([[4, 0, 2], [1, 3, 2]]), torch.tensor([20, 13])
    lists = torch.rand(2, 1, S_Q, 24).argsort(-1)[..., :7]
    q = torch.randn(2, S_Q, H_Q, D)
    wanted = attention(q, k, v, mask=selected(lists), layout=Paged(pages, used))
    flat = pages.repeat_interleave(SIZE, 1) * SIZE + torch.arange(24) % SIZE
    table = torch.where(lists[:, 0] < used[:, None, None], flat[:, None].expand(-1, S_Q, -1).gather(2, lists[:, 0]), -1)
    layout = Paged(slots=table, seqused_k=torch.full((2, S_Q), 7))
    torch.testing.assert_close(attention(q, k, v, layout=layout), wanted)


@pytest.mark.parametrize("rows", [(3, 0), (0, 2), (0, 0), (0,)], ids=str)
def test_no_rows(rows):
    k, v = caches()
    layout = Paged(slots=torch.zeros(*rows, N).int(), seqused_k=torch.zeros(rows).int())
    check(torch.randn(*rows, H_Q, D), k, v, layout=layout).assert_ok()


def test_softcap_out_and_compiled():
    k, v = caches()
    q, layout = torch.randn(B, S_Q, H_Q, D), Paged(slots=slots(B, S_Q), seqused_k=torch.full((B, S_Q), N))
    wanted = attention(q, k, v, layout=layout, score_mod=softcap(2.0), backend="reference")
    out = torch.empty(B, S_Q, H_Q, D_V)
    assert attention(q, k, v, layout=layout, score_mod=softcap(2.0), out=out) is out
    torch.testing.assert_close(out, wanted)
    by_head = attention(q, k, v, layout=layout, score_mod=lambda s, b, h, i, j: 2 * torch.tanh(s / 2) + 0 * h)
    torch.testing.assert_close(by_head, wanted)
    torch.compiler.reset()

    def run(q, k, v, table, used):
        return attention(q, k, v, layout=Paged(slots=table, seqused_k=used), score_mod=softcap(2.0), return_lse=True)

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    given = q, k, v, layout.slots, layout.seqused_k
    for x, y in zip(compiled(*given), run(*given), strict=True):
        torch.testing.assert_close(x, y)
    assert " slots " in str(explain(q, k, v, layout=layout).spec)


BATCH = {"slots": torch.zeros(1, 3, 2).int(), "seqused_k": torch.zeros(1, 3).int()}


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"slots": torch.zeros(3, 2)}, r"slots must be .*torch.float32 \(3, 2\)"),
        ({"slots": torch.zeros(3, dtype=torch.int32)}, r"slots must be .*torch.int32 \(3,\)"),
        ({"seqused_k": torch.zeros(2).int()}, r"seqused_k beside slots must be .*\(3,\).*got torch.int32 \(2,\)"),
        ({"seqused_k": None}, "seqused_k beside slots must be .*got None"),
        ({"block_table": torch.zeros(3, 2, dtype=torch.int32)}, "omit block_table"),
        ({"q_offset": 0}, "omit q_offset"),
        ({"shared_pages": 1}, "omit shared_pages"),
        (BATCH | {"cu_seqlens_q": torch.zeros(2).int()}, r"cu_seqlens_q \(2,\) is for slots \(t_q, n\)"),
    ],
)  # fmt: skip
def test_wrong_layouts(fields, told):
    given = {"slots": torch.zeros(3, 2, dtype=torch.int32), "seqused_k": torch.zeros(3, dtype=torch.int32)}
    with pytest.raises(TypeError if told.endswith("got None") else ValueError, match=told):
        Paged(**given | fields)


def test_wrong_calls():
    k, v = caches()
    layout = Paged(slots=slots(3), seqused_k=torch.full((3,), N))
    q = torch.randn(3, H_Q, D)
    with pytest.raises(ValueError, match=r"their row sees all of them: omit the mask causal"):
        attention(q, k, v, layout=layout, mask=causal())
    with pytest.raises(ValueError, match="score_mod depends on kv_idx"):
        attention(q, k, v, layout=layout, score_mod=lambda s, b, h, i, j: s + j)
    with pytest.raises(ValueError, match=r"for \(3,\) rows q must be \(3, h, d\)"):
        attention(torch.randn(2, H_Q, D), k, v, layout=layout)
    with pytest.raises(ValueError, match=r"seqused_k must be in \[0, 9\], the slots of a row, got \[3, 10, 0\]"):
        attention(q, k, v, layout=Paged(slots=layout.slots, seqused_k=torch.tensor([3, 10, 0])))
    with pytest.raises(ValueError, match="pages begin at equal multiples of their rows, got strides"):
        attention(q, torch.randn(PAGES, SIZE * H_K * D + 1)[:, :-1].view(PAGES, SIZE, H_K, D), v, layout=layout)
    with pytest.raises(ValueError, match="append_kv takes a Paged layout with a block table"):
        append_kv(k, v, layout, torch.randn(3, H_K, D), torch.randn(3, H_K, D_V))


@pytest.mark.parametrize("offsets", [[0, 9], [1, 6], [0, 4, 2], [-3, 6]])
def test_offsets_are_those_of_rows(offsets):
    q, cache = torch.randn(6, 1, 8), torch.randn(2, 4, 1, 8)
    layout = Paged(slots=torch.zeros(6, 2).int(), seqused_k=torch.ones(6).int(), cu_seqlens_q=torch.tensor(offsets))
    with pytest.raises(ValueError, match="cu_seqlens_q must"):
        attention(q, cache, cache, layout=layout)


def test_results_share_no_memory():
    q, cache = torch.randn(3, 1, 8), torch.randn(2, 4, 1, 8)
    layout = Paged(slots=torch.zeros(3, 2).int(), seqused_k=torch.ones(3).int())
    found = attention(q, cache, cache, layout=layout, return_lse=True, return_max_scores=True)
    assert found.lse.untyped_storage().data_ptr() != found.max_scores.untyped_storage().data_ptr()
