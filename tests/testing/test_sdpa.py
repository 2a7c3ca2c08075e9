"""PyTorch's attention gets the problem that a Case has."""

from __future__ import annotations

import pytest
import torch

from saccade import attention
from saccade.testing.cases import NAMED
from saccade.testing.sdpa import sdpa, with_mask


@pytest.mark.parametrize(
    "name", ["plain", "causal", "few-queries", "group3", "sbhd", "documents-window", "prefixes", "packed"]
)
def test_sdpa_is_given_the_same_problem(name):
    case = NAMED[name].replace(dtype="fp64")
    inputs = case.inputs()
    ours = attention(inputs.q, inputs.k, inputs.v, backend="reference", **inputs.keywords)
    theirs = sdpa(case, inputs)
    assert theirs is not None
    out = theirs()
    if case.order == "thd":
        _, _, padding = with_mask(inputs, case.b)
        assert padding is not None
        torch.testing.assert_close(padding.q.packed(out), ours)
    else:
        torch.testing.assert_close(out, inputs.keywords["layout"].canonical(ours))


@pytest.mark.parametrize(
    "case",
    [NAMED["softcap"], NAMED["sink"], NAMED["packed"].replace(ranges=True), NAMED["plain"].replace(order="paged")],
)
def test_what_it_has_no_call_for(case):
    assert sdpa(case, case.inputs()) is None
