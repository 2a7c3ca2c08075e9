"""Block masks that compiled code makes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from saccade import attention, block_mask, causal, mask_mod
from saccade.compat import flex

IDS, REACH = torch.arange(256) // 50, torch.tensor([3, 40])


def operands(x: Tensor) -> Any:
    """(b, 2, s, 8), three times."""
    return [x.unflatten(-1, (2, 8)).transpose(1, 2)] * 3


def own(x: Tensor, ids: Tensor) -> Tensor:
    b, s, _ = x.shape
    near = mask_mod(lambda b, h, i, j: (ids[i] == ids[j]) | ((i - j < REACH[h]) & (j != s // 3)))
    mask: Any = block_mask(causal() & near, b, 2, s, s)
    return attention(*operands(x), mask=mask) * mask.states.float().mean()


def face(x: Tensor, ids: Tensor) -> Tensor:
    b, s, _ = x.shape
    mask = flex.create_block_mask(lambda b, h, i, j: (i >= j) & (ids[i] == ids[j]), b, None, s, s, device=x.device)
    return flex.flex_attention(*operands(x), block_mask=mask)


def written(x: Tensor, ids: Tensor) -> Tensor:
    """Of a tensor that is written to before the call, which sees what it holds then."""
    b, s, _ = x.shape
    ids = ids.clone()
    mask = block_mask(mask_mod(lambda b, h, i, j: ids[i] == ids[j]), b, 2, s, s)
    ids //= 3
    return attention(*operands(x), mask=mask)


@pytest.mark.rare
@pytest.mark.slow
@pytest.mark.parametrize(("call", "fullgraph"), [(own, True), (face, False), (written, True)])
def test_a_compiled_block_mask_of_every_shape(call, fullgraph):
    torch._dynamo.reset()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=fullgraph)
    for b, s in ((1, 64), (2, 130)):
        x = torch.randn(b, s, 16)
        torch.testing.assert_close(compiled(x, IDS), call(x, IDS))


def test_block_masks_that_compiled_code_returns():
    """Their states are those of the mask when they were made, as `sparsity` says; calls compute their own."""
    ids, x = IDS.clone(), torch.randn(1, 200, 16)

    def make(ids: Tensor) -> Any:
        return block_mask(mask_mod(lambda b, h, i, j: ids[i] == ids[j]), 1, 2, 200, 200)

    found, wanted = torch.compile(make, backend="aot_eager", fullgraph=True)(ids), make(ids)
    assert torch.equal(found.states, wanted.states)
    for _ in range(2):
        torch.testing.assert_close(attention(*operands(x), mask=found), attention(*operands(x), mask=wanted))
        ids //= 3
    with pytest.raises(ValueError, match=r"a block mask of \(1, 1, 4, 4\) tiles is for another shape"):
        attention(*operands(x[:, :100]), mask=found)


def test_a_compiled_create_block_mask():
    compiled = torch.compile(flex.create_block_mask, backend="aot_eager")
    found, wanted = (
        make(lambda b, h, i, j: (i >= j) & (IDS[i] == IDS[j]), None, None, 256, 256, device="cpu")
        for make in (compiled, create_block_mask)
    )
    assert torch.equal(found.to_dense(), wanted.to_dense())
    assert found.sparsity() == wanted.sparsity()
