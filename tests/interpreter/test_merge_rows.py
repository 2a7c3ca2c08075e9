"""Attention over further keys, merged into rows of packed results: `merge` says what it is."""

from __future__ import annotations

import pytest
import torch

from saccade.backends.triton import merge_rows
from saccade.backends.triton.merge_rows_kernel import merge_rows_kernel
from saccade.partial import Partial, merge

LATE = torch.tensor([1, 2, 5], dtype=torch.int32)


def results(rows, heads, d_v, strided=False):
    torch.manual_seed(rows)
    out = torch.randn(heads, rows, d_v).transpose(0, 1) if strided else torch.randn(rows, heads, d_v)
    return out, torch.randn(heads, rows)


def merged(out, lse, part, part_lse):
    both = merge(
        Partial(out[LATE].transpose(0, 1)[None], lse[:, LATE][None]),
        Partial(part.transpose(0, 1)[None], part_lse[None]),
    )
    out, lse = out.clone(), lse.clone()
    out[LATE], lse[:, LATE] = both.out[0].transpose(0, 1), both.lse[0]
    return out, lse


def wrong_by(found, wanted):
    return max(float((x - y).abs().max()) for x, y in zip(found, wanted, strict=True))


@pytest.mark.parametrize("d_v", [16, 24, 256])
@pytest.mark.parametrize("strided", [False, True])
def test_rows_of_it_are_those_of_all_keys(d_v, strided):
    out, lse = results(7, 3, d_v, strided)
    part, part_lse = results(3, 3, d_v, strided)
    lse[0, 1], part_lse[1, 2] = -torch.inf, -torch.inf
    wanted = merged(out, lse, part, part_lse)
    merge_rows.merge_rows(out, lse, part, part_lse, LATE)
    assert wrong_by((out, lse), wanted) < 1e-6


def test_rows_without_keys_stay_so():
    out, lse = torch.zeros(7, 1, 16), torch.full((1, 7), -torch.inf)
    merge_rows.merge_rows(out, lse, torch.zeros(3, 1, 16), torch.full((1, 3), -torch.inf), LATE)
    assert (out == 0).all()
    assert (lse == -torch.inf).all()


def test_nan_stays():
    (out, lse), (part, part_lse) = results(7, 2, 16), results(3, 2, 16)
    lse[0, 1], part_lse[1, 1] = torch.nan, torch.nan
    merge_rows.merge_rows(out, lse, part, part_lse, LATE)
    assert bool(lse[0, 1].isnan() & out[1, 0].isnan().all() & lse[1, 2].isnan() & out[2, 1].isnan().all())
    assert int(lse.isnan().sum()) == 2


@pytest.mark.parametrize("fault", ["rows", "lse", "heads"])
def test_faults_are_found(fault):
    """Other rows, the LSEs of others, and heads that lie elsewhere."""
    (out, lse), (part, part_lse) = results(7, 3, 16), results(3, 3, 16)
    wanted = merged(out, lse, part, part_lse)
    late = LATE.flip(0) if fault == "rows" else LATE
    of_part = part_lse.flip(0) if fault == "lse" else part_lse
    strides = [*out.stride()[:2], *part.stride()[:2]]
    if fault == "heads":
        strides[2:] = reversed(strides[2:])
    merge_rows_kernel[(1, 3)](out, lse, part, of_part, late, 3, 7, *strides, 16, 8, 16)
    assert wrong_by((out, lse), wanted) > 0.1
