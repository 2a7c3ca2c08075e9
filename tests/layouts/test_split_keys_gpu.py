"""Pages on Hopper whose keys are cut in parts, since few blocks of rows would leave the GPU idle."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from saccade import Paged, attention, causal
from saccade.backends import hopper as gluon
from saccade.backends.device import merge_kernel
from saccade.backends.hopper.forward import launch
from saccade.ops import dispatch
from saccade.testing import check, gallery, paged
from saccade.testing.cases import Case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs Hopper"
    ),
]

CASES = [case for case in paged.named() if case.d <= gluon.SUPPORT.max_d and case.b]
LONG = Case("", dtype="bf16", b=3, h_q=8, h_k=2, s_q=9, s_k=2300, d=128, mask="causal", order="paged")


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Sets in how many parts keys are cut, few rows too."""
    monkeypatch.setattr(gluon, "LEAST_ROWS", 0)
    monkeypatch.setattr(gluon, "LEAST_ITEMS", 0)

    def cut(count: int) -> None:
        monkeypatch.setattr(launch, "key_splits", lambda problem, processors: count)
        dispatch._plans.clear()

    yield cut
    dispatch._plans.clear()


def in_bulk(case: Case) -> Case:
    """The same with pages that gluon takes, and the parts that it chooses."""
    return case.replace(dtype="bf16", page_size=case.page_size if case.page_size % 8 == 0 else 8, splits=0)


@pytest.mark.parametrize("count", [2, 5])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_named_cases(case: Case, count: int, parts: Any) -> None:
    """Most have fewer tiles of keys than parts."""
    parts(count)
    given = in_bulk(case).inputs("cuda")
    check(given.q, given.k, given.v, backend="gluon", **given.keywords).assert_ok()


@pytest.mark.parametrize("count", [2, 3, 17])
@pytest.mark.parametrize("mask", ["none", "causal", "window(300,0)", "prefix(7)|window(30,2)", "dilated_window"])
@pytest.mark.parametrize("lengths", [(), (40, 0, 200, 1)], ids=["batch", "end-to-end"])
def test_masks(lengths: tuple[int, ...], mask: str, count: int, parts: Any) -> None:
    """Windows end within a part, and parts lie outside of windows; the sink and the largest scores."""
    parts(count)
    case = LONG.replace(b=len(lengths) or 3, mask=mask, lengths=lengths, sink=True, s_q=130, tail=5 if lengths else 0)
    given = case.inputs("cuda", seed=count)
    check(given.q, given.k, given.v, backend="gluon", return_max_scores=True, **given.keywords).assert_ok()


@pytest.mark.parametrize(
    ("d", "d_v", "h_q"), [(64, 64, 8), (256, 256, 8), (192, 128, 8), (80, 40, 6), (96, 96, 8), (128, 128, 142)]
)
def test_head_dims(d: int, d_v: int, h_q: int, parts: Any) -> None:
    parts(3)
    for score in ("none", "alibi", "softcap(5)"):
        given = LONG.replace(d=d, d_v=d_v, h_q=h_q, s_k=900, score=score, dtype="fp16").inputs("cuda")
        check(given.q, given.k, given.v, backend="gluon", **given.keywords).assert_ok()


@pytest.mark.parametrize("n", [9, 15, 40])
def test_trees(n: int, parts: Any) -> None:
    parts(4)
    k, v = torch.randn(2, 700, 16, 8, 128, device="cuda").bfloat16()
    q, table = (
        torch.randn(5, n, 32, 128, device="cuda").bfloat16(),
        torch.randperm(700, device="cuda").view(5, 140).int(),
    )
    layout = Paged(table, torch.full((5,), 2100 + n, device="cuda"))
    mask = gallery.tree([(i - 1) // 2 for i in range(n)], 2100, "cuda")
    check(q, k, v, layout=layout, mask=mask, backend="gluon").assert_ok()


def test_a_graph_is_replayed_with_other_lengths(parts: Any, captured: Any) -> None:
    """From no keys at all on; bits are the same in each run."""
    parts(5)
    k, v = torch.randn(2, 400, 16, 2, 128, device="cuda").bfloat16()
    q, table = (
        torch.randn(4, 20, 8, 128, device="cuda").bfloat16(),
        torch.randperm(400, device="cuda").view(4, 100).int(),
    )
    used = torch.zeros(4, dtype=torch.int32, device="cuda")

    def step() -> list[Tensor]:
        given: dict[str, Any] = {"layout": Paged(table, used), "mask": causal(), "return_lse": True}
        return list(attention(q, k, v, backend="gluon", **given))

    graph, found = captured(step)
    for lengths in ([0] * 4, [1600] * 4, [1, 129, 20, 0], [5, 1600, 0, 700]):
        used.copy_(torch.tensor(lengths, dtype=torch.int32))
        for x in found:
            x.fill_(torch.nan)
        for _ in range(20):
            graph.replay()
            assert all(torch.equal(one, other) for one, other in zip(found, step(), strict=True)), lengths
        check(q, k, v, layout=Paged(table, used), mask=causal(), backend="gluon").assert_ok()


def test_rows_of_no_sequence_stay_in_out(parts: Any) -> None:
    parts(3)
    for lengths, tail in (((1, 60, 0, 7, 1), 9), ((300, 70), 700), ((0, 0), 3)):
        given = LONG.replace(b=len(lengths), d=64, d_v=64, lengths=lengths, tail=tail, s_k=900).inputs("cuda")
        used = sum(lengths)
        plain = attention(given.q, given.k, given.v, backend="gluon", return_lse=True, **given.keywords)
        assert not plain.out[used:].any()
        for columns in (64, 67):
            out = torch.full((used + tail, 8, columns), 7.0, device="cuda", dtype=torch.bfloat16)[..., columns - 64 :]
            found = attention(given.q, given.k, given.v, backend="gluon", return_lse=True, out=out, **given.keywords)
            assert torch.equal(out[:used], plain.out[:used])
            assert (out[used:] == 7).all()
            assert (found.lse[:, used:] == -torch.inf).all()


def _nothing(found: Tensor, lses: Tensor) -> None:
    pass


def _a_part_is_lost(found: Tensor, lses: Tensor) -> None:
    lses[1] = -torch.inf


def _a_part_counts_twice(found: Tensor, lses: Tensor) -> None:
    found[1], lses[1] = found[0], lses[0]


def _every_part_has_the_sink(found: Tensor, lses: Tensor) -> None:
    lses[1] = torch.logaddexp(lses[1], torch.zeros_like(lses[1]))


def _heads_are_swapped(found: Tensor, lses: Tensor) -> None:
    found[0] = found[0].roll(1, 2)


def _one_percent(found: Tensor, lses: Tensor) -> None:
    found *= 1.01


FAULTS = [_a_part_is_lost, _a_part_counts_twice, _every_part_has_the_sink, _heads_are_swapped, _one_percent]


@pytest.mark.parametrize("fault", [_nothing, *FAULTS])
@pytest.mark.parametrize("together", [1, merge_kernel.TOGETHER])
def test_faults_are_seen(together: int, fault: Any, parts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong parts fail by the tolerance; those of the kernel stay below it, merged one by one and together."""
    merge = launch._merge

    def faulty(call: Any, launches: Any, given: Any, outputs: Any) -> None:
        fault(*given[:2])
        merge(call, launches, given, outputs)

    monkeypatch.setattr(merge_kernel, "MANY_ROWS", 1 if together > 1 else 1 << 40)
    monkeypatch.setattr(launch, "_merge", faulty)
    parts(3)
    given = LONG.inputs("cuda")
    report = check(given.q, given.k, given.v, backend="gluon", **given.keywords)
    assert (report.ratio <= 1) == (fault is _nothing), report
