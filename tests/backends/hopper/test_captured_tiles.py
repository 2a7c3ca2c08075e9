"""Which captured tensors bulk copies bring to the Hopper backward, and whose gradient it stores. No kernel runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from saccade import Dense, causal, mask_mod, scores
from saccade.backends import Saved
from saccade.backends.hopper.backward.launch import captured_of
from saccade.call import Call
from saccade.masks import as_mask

S_Q, S_K = 130, 264
BF16 = torch.bfloat16


def captured(t: Tensor, b: int = 2, d: int = 64, mask: Any = None, wanted: bool = True, **layout: Any) -> Any:
    q, k, v = (torch.zeros(b, 4, s, d, dtype=BF16) for s in (S_Q, S_K, S_K))
    score = scores.bind(scores.ScoreMod(lambda s, b, h, q_idx, kv_idx, t: s + t[b, h, q_idx, kv_idx], t), q)
    call = Call(q, k, v, mask=None if mask is None else as_mask(mask), score=score, layout=Dense("bhsd", **layout))
    return captured_of(call, Saved(q, None, q, torch.zeros(b, 4, S_Q), (wanted,)))


def table(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.zeros(shape or (2, 4, S_Q, S_K), dtype=dtype)


@pytest.mark.parametrize("d", [64, 128])
def test_stored(d: int) -> None:
    found = captured(table(), d=d)
    assert found.gradient.x.data_ptr() == found.memory.data_ptr()
    assert found.gradient.x.shape == (2, 4, S_Q, S_K)
    assert not found.clears
    assert captured(table(), mask=causal()).clears
    assert captured(table(), seqused_k=torch.tensor([3, 5])).clears


def test_zeros_where_no_kernel_clears() -> None:
    """Tiles in lists, and what is in the tensor alone."""
    listed = captured(table(), mask=mask_mod(lambda b, h, q_idx, kv_idx: (q_idx ^ kv_idx) & 64 == 0))
    larger = captured(table(2, 4, S_Q + 3, S_K + 8), mask=causal())
    for found in (listed, larger):
        assert found.gradient is not None
        assert not found.clears
        assert not found.memory.any()
    assert larger.gradient.x.shape == (2, 4, S_Q, S_K)
    assert larger.memory.shape == (2, 4, S_Q + 3, S_K + 8)


def test_read_but_not_stored() -> None:
    """Of another dtype, and not wanted."""
    for found in (captured(table(dtype=torch.float16)), captured(table(), wanted=False)):
        assert found.gradient is None
        assert found.made == {}


def test_expanded() -> None:
    """One tile for all heads, and a gradient for each."""
    found = captured(table(1, 1, S_Q, S_K).expand(2, 4, -1, -1))
    assert [x.value for x in found.tile.args] == [False, False]
    assert [x.value for x in found.gradient.args] == [True, True]


@pytest.mark.parametrize("t", [table(dtype=torch.float32), table(2, 4, S_Q, S_K + 1)], ids=["float32", "unaligned"])
def test_loaded_as_before(t: Tensor) -> None:
    assert captured(t) is None
    assert captured(table(), d=192) is None
