"""Score functions that hide keys by large negative numbers, as masks that are added do."""

from __future__ import annotations

import math

import pytest
import torch

from saccade.testing import check

VALUES = [-1e9, -1e12, torch.finfo(torch.float32).min, -math.inf]
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


def wide(score):
    """So that eager halves have room for the number."""
    return score if score.dtype == torch.float64 else score.float()


def operands(place):
    shapes = (1, 2, 150, 64), (1, 1, 600, 64), (1, 1, 600, 64)
    return [torch.randn(shape, device=place.device, dtype=DTYPES[place.dtype]) for shape in shapes]


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_tiles_before_and_behind(value, place):
    def band(score, b, h, q_idx, kv_idx):
        return torch.where((kv_idx >= q_idx + 200) & (kv_idx < q_idx + 300), wide(score), value)

    check(*operands(place), score_mod=band, backend=place.backend).assert_ok()


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_whole_rows(value, place):
    """Of equal scores the softmax is the mean, and of -inf alone nothing. Nobody asks for these rows' gradients, and
    they spoil no others."""

    def thirds(score, b, h, q_idx, kv_idx):
        return torch.where(q_idx % 3 > 0, wide(score), value)

    q, k, v = operands(place)
    dout = torch.randn_like(q)
    dout[:, :, ::3] = 0
    check(q, k, v, score_mod=thirds, dout=dout, backend=place.backend).assert_ok()


def test_whole_rows_of_a_linear_score(place):
    def thirds(score, b, h, q_idx, kv_idx):
        return score + 0.01 * (kv_idx - q_idx) + torch.where(q_idx % 3 > 0, 0.5, -math.inf)

    check(*operands(place), score_mod=thirds, backend=place.backend).assert_ok()
