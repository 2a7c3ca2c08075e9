"""Callbacks in cuDNN's manner in the portable kernels."""

from __future__ import annotations

import pytest
import torch

from saccade import causal, explain
from saccade.testing.accuracy import check
from saccade.testing.callbacks import case


@pytest.mark.parametrize("name", ["alibi", "everything", "derivatives"])
def test_against_the_oracle(name):
    q, k, v = (torch.randn(1, h, s, 16) for h, s in ((2, 19), (1, 21), (1, 21)))
    check(q, k, v, mask=causal(), score_mod=case(name, 2, 19, 21, b=1).score(), backend="triton").assert_ok()


def test_what_hides_runs_as_a_mask():
    """A table's gradient, and a derivative of the user's own, beside what is hidden; fewer keys than rows."""
    q, k, v = (torch.randn(1, h, s, 16) for h, s in ((2, 24), (1, 19), (1, 19)))
    table = torch.randn(2, 19, requires_grad=True)

    def tabled(score, b, h, q_idx, kv_idx):
        return torch.where((q_idx - kv_idx).abs() <= 9, score + table[h, kv_idx], -torch.inf)

    for score_mod in (tabled, case("scaled_causal", 2, 24, 19, b=1).score()):
        assert explain(q, k, v, score_mod=score_mod, backend="triton").hidden.kind == "window"
        check(q, k, v, score_mod=score_mod, backend="triton").assert_ok()
