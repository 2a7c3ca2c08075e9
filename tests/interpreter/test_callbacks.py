"""Callbacks in cuDNN's manner in the portable kernels."""

from __future__ import annotations

import pytest
import torch

from saccade import causal
from saccade.testing.accuracy import check
from saccade.testing.callbacks import case


@pytest.mark.parametrize("name", ["alibi", "everything", "derivatives"])
def test_against_the_oracle(name):
    q, k, v = (torch.randn(1, h, s, 16) for h, s in ((2, 19), (1, 21), (1, 21)))
    check(q, k, v, mask=causal(), score_mod=case(name, 2, 19, 21, b=1).score(), backend="triton").assert_ok()
