"""The largest score of each row, of the portable kernels; sinks come in behind the keys there."""

from __future__ import annotations

import pytest
import torch

from saccade import attention, mask_mod, softcap
from saccade.backends.triton import paged as launches
from saccade.testing import paged
from saccade.testing.accuracy import check
from saccade.testing.cases import NAMED

CASES = {case.name: case for case in paged.named()} | NAMED


@pytest.mark.parametrize("name", ["ragged-sink", "no-keys-sink"])
def test_named_case(name: str) -> None:
    given = CASES[name].replace(dtype="fp32").inputs()
    check(
        given.q, given.k, given.v, backend="triton", backward=False, return_max_scores=True, **given.keywords
    ).assert_ok()


def test_packed() -> None:
    given = CASES["packed-used"].replace(dtype="fp32", b=3, s_q=40, s_k=50, h_q=2, h_k=1).inputs()
    check(
        given.q, given.k, given.v, backend="triton", backward=False, return_max_scores=True, **given.keywords
    ).assert_ok()


@pytest.mark.parametrize("splits", [0, 1])
def test_pages(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The merge of parts takes the largest; some sequences have fewer parts than others; the first one has the sink."""
    monkeypatch.setattr(launches, "LEAST_TILES", 1)
    monkeypatch.setattr(launches, "multiprocessors", lambda device: 7)
    case = CASES["decode-window"].replace(
        dtype="fp32", b=2, h_q=3, h_k=1, s_k=99, d=16, d_v=8, lengths=(1, 2), splits=splits
    )
    given = case.inputs(seed=2)
    check(given.q, given.k, given.v, backend="triton", return_max_scores=True, **given.keywords).assert_ok()


def test_units_and_what_counts() -> None:
    """A negative scale, a row that sees nothing, and one that sees a NaN."""
    q, k, v = (torch.randn(1, h, s, 16) for h, s in ((2, 6), (1, 30), (1, 30)))
    k[0, 0, 29] = torch.nan
    mask = mask_mod(lambda b, h, q_idx, kv_idx: (q_idx != 3) & ((kv_idx != 29) | (q_idx == 4)))
    options = {"scale": -0.7, "score_mod": softcap(2.0), "mask": mask, "sink": torch.full((2,), 100.0)}
    found, wanted = (
        attention(q, k, v, return_lse=True, return_max_scores=True, backend=backend, **options)
        for backend in ("triton", "reference")
    )
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)
    assert found.max_scores[0, :, 3].isinf().all()
    assert found.max_scores[0, :, 4].isnan().all()
