"""Padding removed and put back, with gradients."""

from __future__ import annotations

import pytest
import torch

from saccade.compat.flash_attn.bert_padding import (
    index_first_axis,
    index_first_axis_residual,
    index_put_first_axis,
    pad_input,
    unpad_input,
    unpad_input_for_concatenated_sequences,
)

LENGTHS = torch.tensor([3, 0, 5])


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(), (4,), (2, 8)], ids=str)
def test_there_and_back(dtype, shape):
    mask = (torch.arange(5) < LENGTHS[:, None]).to(dtype)
    x = torch.randn(3, 5, *shape, dtype=torch.float64, requires_grad=True)
    rows, indices, offsets, longest, used = unpad_input(x, mask)
    assert (offsets.tolist(), longest, used.tolist()) == ([0, 3, 3, 8], 5, [3, 0, 5])
    assert offsets.dtype == used.dtype == torch.int32
    assert isinstance(longest, int)
    assert torch.equal(rows, x[mask.bool()])
    back = pad_input(rows, indices, 3, 5)
    kept = mask.bool().view(3, 5, *[1] * len(shape))
    assert torch.equal(back, torch.where(kept, x, 0))
    back.backward(torch.ones_like(back))
    assert torch.equal(x.grad, kept.expand_as(x).double())


def test_places_that_are_kept_and_not_used():
    """As upstream's tests have them: they count in cu_seqlens, and not in the last result."""
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]]).bool()
    unused = torch.tensor([[0, 0, 1, 0], [0, 1, 1, 0]]).bool()
    rows, indices, offsets, longest, used = unpad_input(torch.randn(2, 4, 8), mask, unused)
    assert rows.shape == (6, 8)
    assert (indices.tolist(), offsets.tolist(), longest, used.tolist()) == ([0, 1, 2, 4, 5, 6], [0, 3, 6], 3, [2, 1])


def test_sequences_within_rows():
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    x = torch.randn(3, 6, 4)
    rows, indices, offsets, longest = unpad_input_for_concatenated_sequences(x, lengths)
    assert offsets.tolist() == [0, 2, 5, 8, 10, 16]
    assert longest == 6
    assert torch.equal(rows, x.flatten(0, 1)[indices])
    assert indices.tolist() == [*range(5), *range(6, 11), *range(12, 18)]


def test_rows():
    x, at = torch.randn(5, 3, dtype=torch.float64, requires_grad=True), torch.tensor([4, 1])
    assert torch.autograd.gradcheck(lambda x: index_first_axis(x, at), x)
    assert torch.autograd.gradcheck(lambda x: index_first_axis_residual(x, at), x)
    assert torch.autograd.gradcheck(lambda x: index_put_first_axis(x[:2], at, 7), x)
    rows, residual = index_first_axis_residual(x, at)
    assert torch.equal(rows, x[at])
    assert torch.equal(residual, x)


def test_no_token_at_all():
    rows, indices, offsets, longest, used = unpad_input(torch.randn(2, 3, 4), torch.zeros(2, 3))
    assert (rows.shape, offsets.tolist(), longest, used.tolist()) == ((0, 4), [0, 0, 0], 0, [0, 0])
    assert not pad_input(rows, indices, 2, 3).any()


def test_a_token_counts_once():
    """Masks of other numbers than 1, and two masks that overlap: lengths are those of the rows."""
    x, mask = torch.randn(2, 3, 4), torch.tensor([[2, 7, 0], [0, 1, -1]])
    rows, indices, offsets, longest, used = unpad_input(x, mask, torch.tensor([[1, 0, 1], [0, 1, 0]]))
    assert torch.equal(rows, x.flatten(0, 1)[indices])
    assert (indices.tolist(), offsets.tolist(), longest, used.tolist()) == ([0, 1, 2, 4, 5], [0, 3, 5], 3, [2, 2])
    rows, indices, offsets, longest, used = unpad_input(x, mask * 0.5)
    assert (indices.tolist(), offsets.tolist(), longest, used.tolist()) == ([0, 1, 4, 5], [0, 2, 4], 2, [2, 2])


def test_wrong_masks():
    x = torch.randn(2, 3, 4)
    with pytest.raises(ValueError, match=r"attention_mask must be \(b, s\) of hidden_states.*\(2, 4\)"):
        unpad_input(x, torch.ones(2, 4))
    with pytest.raises(ValueError, match="unused_mask must be"):
        unpad_input(x, torch.ones(2, 3), torch.ones(2, 1, 3))
    with pytest.raises(ValueError, match="attention_mask_in_length must be"):
        unpad_input_for_concatenated_sequences(x, torch.ones(6))
    with pytest.raises(TypeError, match="attention_mask must be a tensor"):
        unpad_input(x, [[1, 1, 0], [1, 0, 0]])
