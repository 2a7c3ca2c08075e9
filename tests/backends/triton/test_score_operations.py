"""What kernels make of integers that wrap, and of arguments that are not the usual ones."""

from __future__ import annotations

import pytest
import torch

from saccade import mask_mod
from saccade.testing.accuracy import check
from tests.support.scores import ARGUMENTS, MASKS, WRAPPING


def operands() -> list[torch.Tensor]:
    return [torch.randn(1, h, 40, 16) for h in (2, 1, 1)]


@pytest.mark.parametrize("name", [*WRAPPING, *ARGUMENTS])
def test_scores(name):
    check(*operands(), score_mod=(WRAPPING | ARGUMENTS)[name], backend="triton").assert_ok()


@pytest.mark.parametrize("name", MASKS)
def test_masks(name):
    check(*operands(), mask=mask_mod(MASKS[name]), backend="triton").assert_ok()
