"""Prefixes that sequences share: what the plain call gives, by the oracle, in every form of a call."""

from __future__ import annotations

from dataclasses import replace
from functools import partial as bind
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from saccade import (
    Descale,
    Paged,
    Partial,
    alibi,
    attention,
    causal,
    explain,
    interval,
    mask_mod,
    prefix,
    relative_bias,
    softcap,
    window,
)
from saccade.call import Call
from saccade.ops import shared_pages
from saccade.testing import check
from tests.support.devices import CPU, INTERPRETER, Device, on

H_Q, H_K, D, SIZE, SHARED = 4, 2, 16, 16, 4
PREFIX = SHARED * SIZE
B, OWN = 3, 3


def cache(dtype: torch.dtype = torch.float32, size: int = SIZE, own: int = OWN) -> tuple[Tensor, Tensor, Tensor]:
    """Caches and a table whose rows begin with the same pages."""
    pages = PREFIX // size + B * own
    order, shared = torch.randperm(pages), PREFIX // size
    table = torch.cat([order[:shared].expand(B, -1), order[shared:].view(B, own)], 1).int()
    k, v = torch.randn(2, pages, size, H_K, D).to(dtype)
    return k, v, table


LENGTHS = {
    "beyond": [PREFIX + 7, PREFIX + 33, PREFIX + 48],
    "at the end": [PREFIX, PREFIX + 1, PREFIX],
    "inside": [PREFIX + 9, 30, 5],
    "all inside": [20, 37, 5],
    "none": [PREFIX + 2, 0, PREFIX + 2],
}
MASKS: dict[str, Any] = {
    "none": lambda s_q: None,
    "causal": lambda s_q: causal(),
    "window": lambda s_q: window(20, 0),
    "to the right": lambda s_q: window(30, 4),
    "prefix": lambda s_q: prefix(9),
    "prefixes": lambda s_q: prefix(torch.tensor([3, 70, 0])) & window(50, None),
    "interval": lambda s_q: interval(3, PREFIX + 5),
    "interval of sequences": lambda s_q: causal() & interval(torch.tensor([[1], [PREFIX + 2], [3]]), None),
    "interval of rows": lambda s_q: interval(None, torch.arange(40, 40 + 9 * B * s_q, 9).view(B, s_q)),
    "predicate": lambda s_q: causal() & mask_mod(lambda b, h, q_idx, kv_idx: (q_idx - kv_idx) % 3 != 0),
    "complement": lambda s_q: ~window(3, 0),
    "by batch row": lambda s_q: mask_mod(lambda b, h, q_idx, kv_idx: (kv_idx + b) % 3 != 0),
}
SCORES: dict[str, Any] = {
    "none": lambda: None,
    "softcap": lambda: softcap(3.0),
    "alibi": lambda: alibi(torch.rand(H_Q)),
    "relative": lambda: relative_bias(torch.randn(H_Q, 9)),
    "by batch row": lambda: lambda score, b, h, q_idx, kv_idx: score * (b + 1),
}


@pytest.mark.sample
@on(CPU, INTERPRETER)
@pytest.mark.parametrize("s_q", [1, 5])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_is_the_plain_call(lengths: str, mask: str, s_q: int, device: Device) -> None:
    """Every score function, with and without a sink, bfloat16 and float64 in turns; one of them in the interpreter,
    whose tiles have rows of all sequences as rows of one, with an end and a place for each."""
    first = ([*MASKS].index(mask) + s_q) % len(SCORES)
    for i, (name, score) in enumerate(SCORES.items()):
        if device.name == "interpreter" and i != first:
            continue
        dtype = (torch.bfloat16, torch.float32, torch.float64)[i % 3] if device.name == "cpu" else torch.float16
        k, v, table = cache(dtype)
        q = torch.randn(B, s_q, H_Q, D).to(dtype)
        layout = Paged(table, torch.tensor(LENGTHS[lengths]), shared_pages=SHARED)
        keywords = {"mask": MASKS[mask](s_q), "score_mod": score(), "layout": layout, "backend": device.backend}
        told = str(explain(q, k, v, **keywords).shared)
        assert ("reads the first 4 pages once" in told) != ("by batch row" in (mask, name)), told
        sink = torch.randn(H_Q) if i % 2 else None
        report = check(q, k, v, sink=sink, return_max_scores=True, **keywords)
        assert report.ratio <= 1, f"{name}: {report}"


@pytest.mark.sample
@on(CPU, INTERPRETER)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("rows", [(1, 1, 1), (1, 40, 0), (0, 3, 70)])
def test_queries_end_to_end(rows: tuple[int, ...], lengths: str, device: Device) -> None:
    """Decoding beside chunks of prompts, and rows after the last sequence."""
    if device.name == "interpreter":
        rows = tuple(min(n, 4) for n in rows)
    t = sum(rows)
    offsets = torch.tensor([0, *rows]).cumsum(0).int()
    masks = [mask(1) for name, mask in MASKS.items() if name != "interval of rows"]
    masks.append(causal() & interval(torch.arange(t + 5) % 20, None))
    k, v, table = cache()
    q = torch.randn(t + 5, H_Q, D)
    q[t:] = torch.nan
    layout = Paged(table, torch.tensor(LENGTHS[lengths]), offsets, shared_pages=SHARED)
    keywords: dict[str, Any] = {"layout": layout, "return_max_scores": True, "backend": device.backend}
    some = slice(None) if device.name == "cpu" else slice(t % 6, None, 6)
    for mask, score in [*zip(masks, [*SCORES.values()] * 3, strict=False)][some]:
        check(q, k, v, mask=mask, score_mod=score(), **keywords).assert_ok()


def at(offset: Any, k_offset: Any = None, rows: tuple[int, ...] | None = None) -> Paged:
    offsets = None if rows is None else torch.tensor([0, *rows]).cumsum(0).int()
    used = torch.tensor(LENGTHS["inside"])
    return Paged(torch.zeros(B, 1).int(), used, offsets, None, offset, k_offset, 1)


OFFSETS = {
    "a number": at(50),
    "both": at(60, 5),
    "sequences": at(torch.tensor([60, 9, 70])),
    "rows": at(torch.tensor([[60, 3], [9, 8], [70, 2]]), -4),
    "shared rows": at(torch.tensor([[60, 3]])),
    "keys of sequences": at(60, torch.tensor([1, 2, 3])),
    "end to end": at(50, 2, (1, 0, 5)),
    "end to end, sequences": at(torch.tensor([[60], [9], [70]]), None, (1, 0, 5)),
    "end to end, rows": at(torch.tensor([60, 3, 9, 8, 70, 2]), None, (1, 0, 5)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OFFSETS)
def test_positions(name: str) -> None:
    k, v, table = cache()
    layout = replace(OFFSETS[name], block_table=table, shared_pages=SHARED)
    q = torch.randn(B, 2, H_Q, D) if layout.cu_seqlens_q is None else torch.randn(6, H_Q, D)
    for mask in ("none", "causal", "window", "prefixes", "predicate"):
        for score in SCORES.values():
            check(q, k, v, layout=layout, mask=MASKS[mask](2), score_mod=score()).assert_ok()


DESCALES = {
    "numbers": lambda: Descale(k=0.5, v=2.0),
    "heads": lambda: Descale(k=torch.rand(H_K) + 0.5, v=torch.rand(H_K) + 0.5),
    "sequences": lambda: Descale(k=torch.rand(B, H_K) + 0.5),
    "blocks": lambda: Descale(*(None, *((torch.rand(1, H_K, 2) + 0.5).expand(B, H_K, 2) for _ in range(2)))),
}


@pytest.mark.parametrize("eight", [False, True], ids=["bf16", "8 bits"])
@pytest.mark.parametrize("name", DESCALES)
@pytest.mark.parametrize("shared", [SHARED, 8])
def test_descale(shared: int, name: str, eight: bool) -> None:
    """Blocks begin where own pages do, or the plain call runs."""
    k, v, table = cache()
    k, v = (x.to(torch.float8_e4m3fn) for x in (k, v))
    table = torch.cat([table[:1, :SHARED].expand(B, -1), table], 1)  # the prefix twice: 128 keys
    layout = Paged(table, torch.tensor([140, 170, 30]), shared_pages=shared)
    q = torch.randn(B, 2, H_Q, D).to(torch.float8_e4m3fn if eight else torch.bfloat16)
    keywords: dict[str, Any] = {"layout": layout, "mask": causal(), "descale": DESCALES[name]()}
    check(q, k, v, **keywords).assert_ok()
    reason = str(explain(q, k, v, **keywords).shared)
    plain = name == "sequences" or (name == "blocks" and shared == SHARED)
    assert ("the plain call runs" in reason) == plain
    if eight:  # a result of 8-bit queries may be wanted in float16

        def into(*given: Tensor, **options: Any) -> Any:
            out = torch.empty(q.shape, dtype=torch.float16)
            found = attention(*given, out=out, **options)
            return Partial(out.bfloat16(), found.lse) if isinstance(found, Partial) else out.bfloat16()

        check(q, k, v, function=into, **keywords).assert_ok()


def test_out_keeps_its_tail() -> None:
    k, v, table = cache()
    offsets, q = torch.tensor([0, 2, 3, 7]).int(), torch.randn(9, H_Q, D)
    plain = Paged(table, torch.tensor(LENGTHS["beyond"]), offsets)
    layout, out = replace(plain, shared_pages=SHARED), torch.full_like(q, 5.0)
    assert attention(q, k, v, mask=causal(), layout=layout, out=out) is out
    torch.testing.assert_close(out[:7], attention(q, k, v, mask=causal(), layout=plain)[:7])
    assert (out[7:] == 5).all()
    assert (attention(q, k, v, mask=causal(), layout=layout)[7:] == 0).all()


HIDDEN: dict[str, Any] = {
    "prefix": lambda h, kv_idx: kv_idx < PREFIX,
    "own keys": lambda h, kv_idx: kv_idx >= PREFIX,
    "all": lambda h, kv_idx: kv_idx >= 0,
    "all of a head": lambda h, kv_idx: h == 1,
}


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("sink", [None, 0.5, -torch.inf, 1e4])
@pytest.mark.parametrize("hidden", HIDDEN)
def test_scores_that_hide_keys(hidden: str, sink: float | None, backend: str) -> None:
    """One part of the merge, or both, has an LSE of -inf; a sink may have that too, or all of the weight."""
    hides = HIDDEN[hidden]
    sinks = None if sink is None else torch.full((H_Q,), sink)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return torch.where(hides(h, kv_idx), -torch.inf, score)

    for s_q in (1, 3):
        k, v, table = cache()
        q = torch.randn(B, s_q, H_Q, D)
        layout = Paged(table, torch.tensor([PREFIX + 9, PREFIX + 30, 30]), shared_pages=SHARED)
        keywords: dict[str, Any] = {"layout": layout, "mask": causal(), "score_mod": score_mod, "sink": sinks}
        if backend == "cpu":
            assert "reads the first 4 pages once" in str(explain(q, k, v, backend=backend, **keywords))
        check(q, k, v, backend=backend, return_max_scores=sink is None, **keywords).assert_ok()
        tops = (
            attention(q, k, v, backend=backend, return_max_scores=True, **keywords | {"sink": x})[-1]
            for x in (sinks, None)
        )
        assert torch.equal(*tops)  # a sink is no score


def test_pages_that_nobody_uses_may_hold_nan() -> None:
    k, v, table = cache()
    k[table[0, 2:SHARED].long()], v[table[0, 2:SHARED].long()] = torch.nan, torch.nan
    layout = Paged(table, torch.tensor([2 * SIZE, 20, 0]), shared_pages=SHARED)
    q = torch.randn(B, 3, H_Q, D)
    check(q, k, v, layout=layout, mask=causal()).assert_ok()
    check(q, k, v, layout=layout).assert_ok()


def test_nan_stays_nan() -> None:
    k, v, table = cache()
    k[table[0, 1].long(), 3, 0] = torch.nan
    layout = Paged(table, torch.tensor(LENGTHS["beyond"]), shared_pages=SHARED)
    out, lse = attention(torch.randn(B, 1, H_Q, D), k, v, layout=layout, return_lse=True)
    assert out[:, :, :2].isnan().all()
    assert lse[:, :2].isnan().all()
    assert out[:, :, 2:].isfinite().all()


def test_every_number_of_pages() -> None:
    """From none to all of the table, with pages of one row as well."""
    for size in (1, SIZE, PREFIX):
        k, v, table = cache(size=size)
        q, used = torch.randn(B, 2, H_Q, D), torch.tensor([PREFIX, 11, PREFIX])
        wanted = attention(q, k, v, mask=causal(), layout=Paged(table, used))
        for n in (0, 1, PREFIX // size):
            found = attention(q, k, v, mask=causal(), layout=Paged(table, used, shared_pages=n))
            torch.testing.assert_close(found, wanted)
        table = table[:1].expand(B, -1)  # all of it
        found, wanted = (
            attention(q, k, v, mask=causal(), layout=Paged(table, used, shared_pages=n)) for n in (table.shape[1], 0)
        )
        torch.testing.assert_close(found, wanted)


def test_what_runs() -> None:
    """Two calls where nothing but lengths tells sequences apart, else the plain call, to the bit; and why."""
    k, v, table = cache()
    q, used = torch.randn(B, 1, H_Q, D), torch.tensor(LENGTHS["beyond"])
    layout = Paged(table, used, shared_pages=SHARED)
    assert "cpu reads the first 4 pages once for all 3 sequences" in str(explain(q, k, v, layout=layout))
    assert explain(q, k, v, layout=Paged(table, used)).shared is None
    for keywords, reason in (
        ({"layout": Paged(table, used, num_splits=1, shared_pages=SHARED)}, "num_splits=1 promises bits"),
        ({"layout": layout, "mask": MASKS["by batch row"](1)}, "mask_mod depends on the batch row"),
        ({"layout": layout, "score_mod": SCORES["by batch row"]()}, "the score function depends on the batch row"),
        ({"layout": Paged(table, used, None, None, 90, torch.arange(B), SHARED)}, "k_offset is a tensor"),
    ):
        assert reason in str(explain(q, k, v, **keywords))
        plain = {**keywords, "layout": replace(keywords["layout"], shared_pages=0)}
        assert torch.equal(attention(q, k, v, **keywords), attention(q, k, v, **plain))
    one = Paged(table[:1], used[:1], shared_pages=SHARED)
    assert "1 sequence shares nothing" in str(explain(q[:1], k, v, layout=one))


@pytest.mark.parametrize(
    ("b", "rows", "pages", "runs"),
    [(8, 1, 512, True), (4, 1, 512, True), (2, 1, 512, False), (99, 1, 60, False), (8, 40, 512, False)],
)
def test_what_pays_on_a_gpu(b: int, rows: int, pages: int, runs: bool) -> None:
    """Bytes that are read less, and rows so few that reading is what takes the time: 8k keys of 8 sequences."""
    cache = torch.empty(1, 8, 1, 128, dtype=torch.bfloat16).expand(pages, -1, 16, -1)
    q, table = torch.empty(b, 16, rows, 128, dtype=torch.bfloat16), torch.zeros(b, pages, dtype=torch.int32)
    layout = Paged(table, torch.zeros(b, dtype=torch.int32), shared_pages=pages)
    reason = shared_pages._cost(Call.of_views(q, cache, cache, layout))
    assert (reason is None) == runs, reason
    assert runs or ("80 query rows" if rows > 1 else "MB of keys and values less") in str(reason)


def test_errors() -> None:
    k, v, table = cache()
    q, used = torch.randn(B, 1, H_Q, D), torch.tensor(LENGTHS["beyond"])
    for wrong in (-1, table.shape[1] + 1, True, 1.0, None):
        error = ValueError if type(wrong) is int else TypeError
        with pytest.raises(error, match=r"shared_pages must be an integer from 0 to the columns .* got"):
            Paged(table, used, shared_pages=wrong)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"shared_pages=5 says that all rows .* row 1 begins with"):
        attention(q, k, v, layout=Paged(table, used, shared_pages=SHARED + 1))
    table[1, 2:] = -1  # after its last page
    attention(q, k, v, layout=Paged(table, torch.tensor([PREFIX, 20, PREFIX + 1]), shared_pages=SHARED))


def test_compiled() -> None:
    """As one opaque operator."""
    k, v, table = cache()
    q, used = torch.randn(B, 2, H_Q, D), torch.tensor(LENGTHS["inside"])

    def call(q: Tensor, k: Tensor, v: Tensor, table: Tensor, used: Tensor) -> Tensor:
        return attention(q, k, v, mask=causal(), layout=Paged(table, used, shared_pages=SHARED))

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(q, k, v, table, used), call(q, k, v, table, used))


def test_vmap() -> None:
    """Examples that have prefixes of their own."""
    k, v, table = cache()
    tables = torch.stack([table, (table + 3) % k.shape[0]])
    q, used = torch.randn(2, B, 2, H_Q, D), torch.tensor(LENGTHS["inside"])

    def call(q: Tensor, table: Tensor) -> Tensor:
        return attention(q, k, v, mask=causal(), layout=Paged(table, used, shared_pages=SHARED))

    wanted = torch.stack([call(q[i], tables[i]) for i in range(2)])
    torch.testing.assert_close(torch.vmap(call)(q, tables), wanted)


@settings(max_examples=40)
@given(st.data())
def test_drawn(data: st.DataObject) -> None:
    """Any lengths, rows, sizes of pages, masks and scores."""
    draw = data.draw
    size, shared, b = draw(st.sampled_from([1, 3, 8, 16])), draw(st.integers(1, 9)), draw(st.integers(2, 5))
    width = shared + draw(st.integers(0, 5))
    used = draw(st.lists(st.integers(0, width * size), min_size=b, max_size=b))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    table = torch.randint(0, 50, (b, width), generator=generator)
    table[:, :shared] = table[0, :shared]
    k, v = torch.randn(2, 50, size, H_K, D, generator=generator)
    rows = draw(st.none() | st.lists(st.integers(0, 9), min_size=b, max_size=b))
    offsets = None if rows is None else torch.tensor([0, *rows]).cumsum(0)
    s_q = draw(st.integers(1, 9))
    shape = (b, s_q) if rows is None else (sum(rows) + draw(st.integers(0, 3)),)
    q = torch.randn(*shape, H_Q, D, generator=generator)
    splits = draw(st.sampled_from([None, None, 3]))
    layout = Paged(table, torch.tensor(used), offsets, splits, shared_pages=shared)
    left = draw(st.none() | st.integers(0, 40))
    starts = torch.randint(0, 30, (b, 1), generator=generator)
    mask = draw(st.sampled_from([None, causal(), window(left, 0), window(left, 3), prefix(7), MASKS["predicate"](0)]))
    if draw(st.booleans()):
        mask = interval(starts, None) if mask is None else mask & interval(starts, None)
    score = draw(st.sampled_from([*SCORES.values()]))()
    sink = torch.randn(H_Q, generator=generator) if draw(st.booleans()) else None
    check(q, k, v, layout=layout, mask=mask, score_mod=score, sink=sink, return_max_scores=True).assert_ok()


def by_position(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return score + 0.5 * (kv_idx % 5) - 0.2 * (q_idx % 3)


def endless(stop: Tensor) -> Any:
    return interval(None, 1 << 20)


def misplaced(call: Any, sequence: Any) -> Tensor:
    return RIGHT["_positions_of_rows"](call, sequence) + 1


def twice(call: Any, descale: Any) -> Any:
    return RIGHT["_over_prefix"](call, descale).replace(sink=call.sink)


def unmoved(call: Any, descale: Any) -> Any:
    part = RIGHT["_over_own_pages"](call, descale)
    return part.replace(layout=replace(part.layout, q_offset=None, k_offset=None))


RIGHT = {name: getattr(shared_pages, name) for name in ("_positions_of_rows", "_over_prefix", "_over_own_pages")}
WRONG = {"_before": endless, "_positions_of_rows": misplaced, "_over_prefix": twice, "_over_own_pages": unmoved}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_ones_fail(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefix without an end, rows one further, a sink counted twice, own keys that stand at 0."""
    k, v, table = cache()
    q = torch.randn(B, 3, H_Q, D)
    layout = Paged(table, torch.tensor([PREFIX + 20, 33, PREFIX + 40]), shared_pages=SHARED)
    run = bind(check, q, k, v, layout=layout, mask=causal(), score_mod=by_position, sink=torch.ones(H_Q))
    run().assert_ok()
    monkeypatch.setattr(shared_pages, name, WRONG[name])
    without = {"mask": None} if name == "_before" else {}
    assert run(**without).ratio > 1


@pytest.fixture
def whatever_it_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_pages, "LEAST_SAVED", 0)
    monkeypatch.setattr(shared_pages, "LEAST_KEYS", 0)
    monkeypatch.setattr(shared_pages, "MOST_ROWS", 1 << 30)


# On a GPU, caches of a server's size
SERVED_H_Q, SERVED_H_K, SERVED_D = 16, 4, 128


def served_cache(b: int, shared: int, own: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Caches and a table whose rows begin with the same pages."""
    pages = shared + b * own
    order = torch.randperm(pages, device="cuda")
    table = torch.cat([order[:shared].expand(b, -1), order[shared:].view(b, own)], 1).int()
    k, v = torch.randn(2, pages, size, SERVED_H_K, SERVED_D, device="cuda").to(dtype)
    return k, v, table


@pytest.mark.gpu
@pytest.mark.usefixtures("whatever_it_saves")
@pytest.mark.parametrize("backend", ["auto", "triton"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("s_q", [1, 4, 64, 300])
@pytest.mark.parametrize("size", [1, 16, 64])
def test_is_the_plain_call_of_a_server(size: int, s_q: int, dtype: torch.dtype, backend: str) -> None:
    b, shared, own = 5, 1024 // size, 512 // size
    k, v, table = served_cache(b, shared, own, size, dtype)
    q = torch.randn(b, s_q, SERVED_H_Q, SERVED_D, device="cuda").to(dtype)
    starts = torch.tensor([[0], [700], [1030], [9], [1]], device="cuda")
    masks = [
        None, causal(), window(800, 0), prefix(torch.tensor([3, 1100, 0, 9, 1], device="cuda")),
        causal() & interval(starts, None), causal() & mask_mod(lambda b, h, q_idx, kv_idx: (q_idx - kv_idx) % 3 != 0),
    ]  # fmt: skip
    scores = [None, softcap(20.0), alibi(torch.rand(SERVED_H_Q, device="cuda")), None, None, None]
    for lengths in ([1500, 1025, 1024, 1400, 1536], [1536, 700, 0, 1024, 3]):
        layout = Paged(table, torch.tensor(lengths, device="cuda"), shared_pages=shared)
        for mask, score in zip(masks, scores, strict=True):
            sink = torch.randn(SERVED_H_Q, device="cuda")
            keywords: dict[str, Any] = {"mask": mask, "score_mod": score, "sink": sink, "layout": layout}
            report = check(q, k, v, backend=backend, return_max_scores=True, **keywords)
            assert report.ratio <= 1, f"{lengths} {mask}\n{report}"


@pytest.mark.gpu
@pytest.mark.usefixtures("whatever_it_saves")
@pytest.mark.parametrize("rows", [(1, 1, 1, 1, 1), (1, 400, 0, 1, 64)])
def test_queries_of_a_server_end_to_end(rows: tuple[int, ...]) -> None:
    k, v, table = served_cache(5, 64, 32, 16, torch.bfloat16)
    offsets = torch.tensor([0, *rows], device="cuda").cumsum(0).int()
    q = torch.randn(sum(rows) + 7, SERVED_H_Q, SERVED_D, device="cuda").bfloat16()
    q[sum(rows) :] = torch.nan
    lengths = torch.tensor([1500, 1424, 1024, 30, 1100], device="cuda")
    layout = Paged(table, lengths, offsets, shared_pages=64)
    for mask in (causal(), window(500, 0), prefix(9)):
        for score in (None, alibi(torch.rand(SERVED_H_Q, device="cuda"))):
            check(q, k, v, layout=layout, mask=mask, score_mod=score).assert_ok()


@pytest.mark.gpu
@pytest.mark.usefixtures("whatever_it_saves")
def test_descale_of_a_server() -> None:
    k, v, table = served_cache(4, 64, 32, 16, torch.float32)
    k, v = (x.to(torch.float8_e4m3fn) for x in (k, v))
    q = torch.randn(4, 1, SERVED_H_Q, SERVED_D, device="cuda").bfloat16()
    layout = Paged(table, torch.tensor([1500, 1030, 1024, 40], device="cuda"), shared_pages=64)
    blocks = (torch.rand(1, SERVED_H_K, 12, device="cuda") + 0.5).expand(4, SERVED_H_K, 12)
    for factor in (0.5, torch.rand(SERVED_H_K, device="cuda") + 0.5, blocks):
        keywords: dict[str, Any] = {"layout": layout, "mask": causal(), "descale": Descale(k=factor, v=factor)}
        if explain(q, k, v, **keywords).backend is not None:
            check(q, k, v, **keywords).assert_ok()


@pytest.mark.gpu
@pytest.mark.usefixtures("whatever_it_saves")
@pytest.mark.parametrize("s_q", [1, 8])
def test_a_graph_is_replayed_with_other_lengths(s_q: int, captured: Any) -> None:
    """Nothing waits for the host, and lengths and tables are read in each replay."""
    b, shared, size = 6, 32, 16
    k, v, table = served_cache(b, shared, 32, size, torch.bfloat16)
    q, used = (
        torch.randn(b, s_q, SERVED_H_Q, SERVED_D, device="cuda").bfloat16(),
        torch.full((b,), 600, device="cuda"),
    )

    layout = Paged(table, used, shared_pages=shared)

    def call() -> Partial:
        return attention(q, k, v, mask=causal(), layout=layout, return_lse=True)

    graph, (out, lse) = captured(call)

    def replayed(*given: Tensor, return_lse: bool = False, **keywords: Any) -> Tensor | Partial:
        graph.replay()
        return Partial(out.clone(), lse.clone()) if return_lse else out.clone()

    for lengths in ([600, 513, 512, 700, 0, 40], [900, 901, 902, 903, 904, 905]):
        used.copy_(torch.tensor(lengths))
        table[:, shared:] = table[:, shared:].roll(1, 0)
        check(q, k, v, mask=causal(), layout=layout, function=replayed).assert_ok()
