"""Copies with aligned rows, to the bit, of tensors that lie in any way."""

from __future__ import annotations

import pytest
import torch

from saccade.backends.device import gradients
from saccade.backends.device.gradients import padded
from saccade.call import aligned

TENSORS = {
    "odd": torch.randn(2, 3, 37, 13),
    "shifted": torch.randn(2, 3, 37, 17)[..., 1:],
    "expanded": torch.randn(1, 3, 1, 1).expand(2, 3, 37, 24),
    "turned": torch.randn(24, 37, 3, 2).permute(3, 2, 1, 0),
    "16 bits": torch.randn(1, 2, 70, 300).half()[:, :, ::2, ::3],
    "8 bits": torch.randn(2, 1, 9, 40).to(torch.float8_e5m2)[..., 3:],
    "nan": torch.full((1, 1, 5, 5), torch.nan),
    "nothing": torch.empty(2, 0, 3, 5),
}


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("numbers", [64, 4096])
def test_to_the_bit(name, numbers, monkeypatch):
    monkeypatch.setattr(gradients, "COPIED", numbers)
    x = TENSORS[name]
    made = padded({}, x)
    assert made.shape == x.shape
    assert aligned(made)
    bits = torch.uint8 if x.element_size() == 1 else torch.int16 if x.element_size() == 2 else torch.int32
    assert torch.equal(made.view(bits), x.view(bits))
