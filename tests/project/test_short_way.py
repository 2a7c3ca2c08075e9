"""How many functions of ours a call on a CPU passes: the way that a reader follows, and what small calls pay for."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from saccade import Paged, attention, causal

SOURCE = str(Path(__file__).parents[2] / "src" / "saccade")


def plain() -> Callable[[], Any]:
    q, k, v = torch.randn(3, 1, 2, 16, 16)
    return lambda: attention(q, k, v, mask=causal())


def with_gradient() -> Callable[[], Any]:
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, 2, 16, 16))
    return lambda: attention(q, k, v, mask=causal())


def paged_token() -> Callable[[], Any]:
    cache, q = torch.randn(4, 16, 2, 16), torch.randn(1, 1, 2, 16)
    layout = Paged(torch.tensor([[0, 1]], dtype=torch.int32), torch.tensor([20], dtype=torch.int32))
    return lambda: attention(q, cache, cache, mask=causal(), layout=layout)


@pytest.mark.parametrize(
    ("made", "most_calls", "most_files"), [(plain, 45, 14), (with_gradient, 80, 18), (paged_token, 110, 18)]
)
def test_functions_of_ours(made: Callable[[], Callable[[], Any]], most_calls: int, most_files: int) -> None:
    """Of the third call: the first two fill caches."""
    call, passed = made(), []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(SOURCE):
            passed.append((frame.f_code.co_filename, frame.f_code.co_name))

    call()
    call()
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    names = [name for _, name in passed]
    assert "attention" in names
    assert "execute" in names
    assert len(passed) <= most_calls, passed
    assert len({file for file, _ in passed}) <= most_files, passed
