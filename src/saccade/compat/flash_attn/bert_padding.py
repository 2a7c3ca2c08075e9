"""Batches with padding, put end to end and back: FlashAttention's `bert_padding`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from saccade.util import arguments

__all__ = [
    "index_first_axis", "index_first_axis_residual", "index_put_first_axis", "pad_input", "unpad_input",
    "unpad_input_for_concatenated_sequences",
]  # fmt: skip


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """`input[indices]`: rows of the first dimension.

    >>> index_first_axis(torch.arange(6).view(3, 2), torch.tensor([2, 0]))
    tensor([[4, 5],
            [0, 1]])
    """
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """`out[indices] = values` with `out` (first_axis_dim, …) zero elsewhere.

    >>> index_put_first_axis(torch.ones(2, 1), torch.tensor([3, 1]), 4).flatten()
    tensor([0., 1., 0., 1.])
    """
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices, values)


def index_first_axis_residual(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """`input[indices]` and input itself, whose gradients are added.

    >>> rows, residual = index_first_axis_residual(torch.zeros(4, 2), torch.tensor([1, 2]))
    >>> rows.shape, residual.shape
    (torch.Size([2, 2]), torch.Size([4, 2]))
    """
    return input.index_select(0, indices), input.view_as(input)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The tokens that a mask keeps, end to end; the host waits for their number.

    Args:
        hidden_states: (b, s, …).
        attention_mask: (b, s), bool or numbers; not 0 where a token is, counted once whatever the number.
        unused_mask: (b, s); not 0 where a place is kept for a token that is not used.

    Returns:
        the rows (t, …) that either mask keeps, their indices in (b * s) (t), cu_seqlens (b + 1) int32, the longest
        length as an integer, and how many tokens of each sequence the attention_mask has, (b) int32.

    Raises:
        ValueError: masks of another shape than (b, s).

    >>> mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    >>> rows, indices, cu_seqlens, longest, used = unpad_input(torch.randn(2, 3, 8), mask)
    >>> rows.shape, indices.tolist(), cu_seqlens.tolist(), longest, used.tolist()
    (torch.Size([3, 8]), [0, 1, 3], [0, 2, 3], 2, [2, 1])
    """
    arguments.tensors(hidden_states=hidden_states, attention_mask=attention_mask)
    if unused_mask is not None:
        arguments.tensors(unused_mask=unused_mask)
    for name, mask in (("attention_mask", attention_mask), ("unused_mask", unused_mask)):
        if mask is not None and (mask.dim() != 2 or mask.shape != hidden_states.shape[:2]):
            shapes = f"{tuple(mask.shape)} with hidden_states {tuple(hidden_states.shape)}"
            raise ValueError(f"{name} must be (b, s) of hidden_states (b, s, …), got {shapes}")
    tokens = attention_mask != 0
    kept = tokens if unused_mask is None else tokens | (unused_mask != 0)
    return *_end_to_end(hidden_states, kept, kept.sum(-1, dtype=torch.int32)), tokens.sum(-1, dtype=torch.int32)


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """The tokens of batch rows that hold several short sequences each, end to end.

    Args:
        hidden_states: (b, s, …).
        attention_mask_in_length: (b, s) integers: the lengths of a row's sequences, then zeros.

    Returns:
        the rows (t, …), their indices in (b * s) (t), cu_seqlens int32 of all sequences, and the longest length.

    >>> lengths = torch.tensor([[2, 1, 0, 0], [3, 0, 0, 0]])
    >>> rows, indices, cu_seqlens, longest = unpad_input_for_concatenated_sequences(torch.randn(2, 4, 8), lengths)
    >>> indices.tolist(), cu_seqlens.tolist(), longest
    ([0, 1, 2, 4, 5, 6], [0, 2, 3, 6], 3)
    """
    arguments.tensors(hidden_states=hidden_states, attention_mask_in_length=attention_mask_in_length)
    if attention_mask_in_length.dim() != 2 or attention_mask_in_length.shape != hidden_states.shape[:2]:
        shapes = f"{tuple(attention_mask_in_length.shape)} with hidden_states {tuple(hidden_states.shape)}"
        raise ValueError(f"attention_mask_in_length must be (b, s) of hidden_states (b, s, …), got {shapes}")
    used = attention_mask_in_length.sum(-1, keepdim=True)
    kept = torch.arange(attention_mask_in_length.shape[1], device=used.device) < used
    lengths = attention_mask_in_length.flatten()
    return _end_to_end(hidden_states, kept, lengths[lengths != 0])


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The inverse of `unpad_input`: (batch, seqlen, …), zero where no token is.

    >>> pad_input(torch.ones(3, 2), torch.tensor([0, 1, 3]), 2, 3)[..., 0]
    tensor([[1., 1., 0.],
            [1., 0., 0.]])
    """
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


def _end_to_end(hidden_states: Tensor, kept: Tensor, lengths: Tensor) -> Any:
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if lengths.shape[0] else 0
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, longest
