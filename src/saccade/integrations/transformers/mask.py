"""The mask that transformers makes once for all layers: a structure, where others make a tensor of rows by keys."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from saccade import masks
from saccade.integrations.transformers.visible_keys import Place, VisibleKeys, padding, translated
from saccade.masks import Mask


class StructuredMask(BlockMask):
    """What each row sees. A BlockMask to transformers, which passes BlockMasks and tensors alone to its layers."""

    def __init__(self, mask: Mask | None, size: tuple[int, int, int, int], padded: bool) -> None:
        self.mask = mask
        """None: everything."""
        self.size_of_mask = size
        """(b, 1, s_q, s_k)"""
        self.padded = padded
        """Whether some tokens are padding."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.size_of_mask

    @property
    def ndim(self) -> int:
        return 4

    def dim(self) -> int:
        return 4

    def contiguous(self) -> StructuredMask:
        return self

    def to(self, *arguments: Any, **options: Any) -> StructuredMask:
        """On another device; other arguments change nothing."""
        if self.mask is None or not self.mask.tensors:
            return self
        first = self.mask.tensors[0]
        device = torch.empty(0, dtype=first.dtype, device=first.device).to(*arguments, **options).device
        if device == first.device:
            return self
        tensors = [x.to(device) for x in self.mask.tensors]
        moved = masks.from_tensors(self.mask.identity, list(self.mask.ints), tensors, list(self.mask.floats))
        return StructuredMask(moved, self.size_of_mask, self.padded)

    def __getitem__(self, index: Any) -> StructuredMask:
        raise NotImplementedError(
            f'{self!r} has no items: this model cuts its mask, which needs attn_implementation="sdpa" or "eager"'
        )

    def __repr__(self) -> str:
        return f"StructuredMask({self.mask!r}, {self.size_of_mask})"


def attention_mask_of(
    batch_size: int,
    q_length: int | None = None,
    kv_length: int = 0,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    cache_position: Tensor | None = None,
    device: torch.device | str | None = None,
    **others: Any,
) -> StructuredMask:
    """The mask function that transformers calls once in a forward, for each kind of layer.

    Args:
        batch_size: b.
        q_length: s_q, and where the first row is, q_offset; transformers 4 passes the rows' positions, `cache_position`
            (s_q,), instead.
        kv_length: s_k, and where the first key is, kv_offset.
        q_offset: an integer, or a tensor of one for a static cache.
        kv_offset: the same.
        mask_function: `(b, h, q_idx, kv_idx) -> bool` of positions.
        attention_mask: (b, n) bool, which tokens are no padding.
        cache_position: see q_length.
        device: of the mask.
        others: what other implementations need.
    """
    if cache_position is not None:
        q_length, device = cache_position.shape[0], cache_position.device
        whole = isinstance(kv_offset, int) and kv_offset == 0 and q_length == kv_length  # so the first row is at 0
        q_offset = 0 if whole else cache_position[0]
    assert q_length is not None
    if device is None and attention_mask is not None:
        device = attention_mask.device
    place = Place(q_length, kv_length, q_offset, kv_offset, device)
    seen, padded = translated(mask_function, place), False
    if attention_mask is not None:
        tokens = padding(attention_mask.to(torch.bool), place)
        seen, padded = seen & tokens, tokens != VisibleKeys()
    return StructuredMask(seen.as_mask(), (batch_size, 1, q_length, kv_length), padded)
