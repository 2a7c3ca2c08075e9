"""Keys that sequences share, by the portable kernels: one program sums over all that read its keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from saccade import Packed, attention, causal, mask_mod
from saccade.backends.device import q_block
from saccade.backends.device.records import FAR
from saccade.backends.triton import backward_kernels
from saccade.masks import Mask
from saccade.testing import Report, check
from saccade.testing.cases import Case

CASES = [
    Case("used", dtype="fp32", b=4, h_q=4, s_q=40, s_k=70, d=16, mask="window(9,3)", sink=True, used="q", order="thd",
         ranges=True, tail=5),
    Case("dropout", dtype="fp32", b=4, h_q=2, h_k=1, s_q=40, s_k=150, d=16, mask="causal", score="alibi",
         dropout_p=0.4, order="thd", ranges=True),
    Case("bias", dtype="fp32", b=3, s_q=20, s_k=90, d=16, score="bias", order="thd", ranges=True),
    Case("interval", dtype="fp32", b=3, s_q=70, s_k=90, d=16, mask="interval_rows", order="thd", ranges=True),
    Case("many", dtype="fp32", b=140, s_q=3, s_k=9, d=16, mask="causal", order="thd", ranges=True),
    Case("fp16", dtype="fp16", b=3, s_q=50, s_k=80, d=40, mask="prefixes", order="thd", ranges=True),
    Case("empty", dtype="fp32", b=3, lengths=(0, 0, 0), order="thd", ranges=True, tail=5),
    Case("nothing", dtype="fp32", b=0, order="thd", ranges=True, tail=5),
]  # fmt: skip


def report(case: Case, mask: Mask | None = None) -> Report:
    made = case.inputs(requires_grad=True)
    keywords: dict[str, Any] = made.keywords | ({} if mask is None else {"mask": mask})
    return check(made.q, made.k, made.v, dout=made.dout, dlse=made.dlse, backend="triton", **keywords)


@pytest.mark.sample
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients(case: Case) -> None:
    report(case).assert_ok()


def test_positions() -> None:
    """Masks, functions and dropout see positions."""
    made = CASES[1].inputs(requires_grad=True)
    layout = replace(
        made.keywords["layout"], q_offset=torch.tensor([100, 3, 9, 250]), k_offset=torch.tensor([60, 0, 7, 200])
    )
    keywords: dict[str, Any] = made.keywords | {"layout": layout}
    check(made.q, made.k, made.v, dout=made.dout, dlse=made.dlse, backend="triton", **keywords).assert_ok()


@pytest.mark.parametrize("mask", [mask_mod(lambda b, h, i, j: (i // 20 + j // 33 + b) % 3 != 0), ~causal()], ids=str)
def test_predicates(mask: Mask) -> None:
    report(CASES[0], mask).assert_ok()


def test_a_broken_sequence_stays_alone() -> None:
    """NaN in the queries of one sequence, and in keys that no sequence reads."""
    q, k, v = torch.randn(30, 2, 16), torch.randn(100, 1, 16), torch.randn(100, 1, 16)
    k[90:], v[:5] = torch.nan, torch.inf
    vectors = torch.tensor([[0, 10, 20], [5, 40, 61], [40, 25, 29]])
    layout = Packed(torch.tensor([0, 10, 20, 30]), starts_k=vectors[1], seqused_k=vectors[2])

    def gradients(broken: bool) -> list[torch.Tensor]:
        leaves = [x.clone() for x in (q, k, v)]
        dout = torch.ones_like(q)
        if broken:
            leaves[0][10:20], dout[10:20] = torch.inf, torch.nan
        leaves = [x.requires_grad_() for x in leaves]
        return [*torch.autograd.grad(attention(*leaves, layout=layout, backend="triton"), leaves, dout)]

    (_, *whole), (_, *broken) = gradients(False), gradients(True)
    for x, y in zip(whole, broken, strict=True):
        assert torch.equal(x[:40], y[:40])
        assert torch.equal(x[65:], y[65:])
        assert bool(y[40:65].isnan().all())
        assert not x[:5].any()
        assert not x[90:].any()


def test_broken_ranges_stay_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing reads them on the host, kernels clamp them."""
    monkeypatch.setattr(Packed, "check_lengths", lambda *_: None)
    x = [torch.randn(n, 2, 16, requires_grad=True) for n in (30, 40, 40)]
    offsets = torch.tensor([0, 10, 20, 30])
    for starts, used in (([-5, 39, 1 << 40], [9, 9, 9]), ([0, 1, 2], [1 << 40, -1, 41]), ([-(1 << 40)] * 3, [40] * 3)):
        layout = Packed(offsets, starts_k=torch.tensor(starts), seqused_k=torch.tensor(used))
        out = attention(*x, mask=causal(), layout=layout, backend="triton")
        assert all(bool(y.isfinite().all()) for y in torch.autograd.grad(out.sum(), x))


# Wrong kernels


def first_reader_alone(used_k: Any, after: Any, chunk: Any, start: Any, s_k: Any, block_k: Any) -> Any:
    return RIGHT(used_k, after, chunk, start, s_k, block_k) if after < 0 else FAR


RIGHT = backward_kernels.next_reader


@pytest.mark.parametrize("fault", ["first", "aligned"])
def test_wrong_kernels_are_rejected(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[1]
    if fault == "first":
        monkeypatch.setattr(backward_kernels, "next_reader", first_reader_alone)
    else:  # dropout's bits of keys that begin at multiples of 16
        monkeypatch.setattr(q_block, "keep_unaligned", q_block.keep)
    found = report(case).ratios
    assert found["dk"] > 1
    assert found["dv"] > 1
    assert found["out"] <= 1
