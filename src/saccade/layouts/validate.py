"""What is wrong with the shapes of a call and with its mask, in words: the error's text, or None."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.masks import Blocked, Documents, KeyInterval, Mask, TensorMask
from saccade.scores import Sizes


def operand_error(q: torch.Size, k: torch.Size, v: torch.Size, h: int, s: int) -> str | None:
    """Of operands whose dimensions h and s are the heads and the rows."""
    if k[h] != v[h] or k[s] != v[s]:
        return "k and v must have the same heads and length"
    return head_error(q, k, v, h)


def head_error(q: torch.Size, k: torch.Size, v: torch.Size, h: int) -> str | None:
    """Of heads, which are dimension h, and of head dims."""
    if q[-1] != k[-1]:
        return "q and k must have one head dim"
    if q[-1] == 0 or v[-1] == 0:
        return "head dims must be at least 1"
    if (q[h] % k[h] if k[h] else q[h]) or (k[h] and not q[h]):
        return f"the query heads must be a multiple of the key heads, got {q[h]} and {k[h]}"
    return None


def cache_error(k: torch.Size, v: torch.Size) -> str | None:
    """Of the caches (pages, page_size, h, d)."""
    if k[:3] != v[:3]:
        return "both caches must have the same pages, page size and heads"
    if not k[0] or not k[1]:
        return "a paged cache needs at least one page of one row"
    return None


def sink_error(sink: Tensor, h_q: int, device: torch.device) -> str | None:
    if not isinstance(sink, Tensor) or sink.shape != (h_q,) or not sink.is_floating_point():
        got = f"{sink.dtype} {tuple(sink.shape)}" if isinstance(sink, Tensor) else repr(sink)
        return f"sink must be a float tensor ({h_q},), one logit per query head, got {got}"
    if sink.device != device:
        return f"sink must be on q's device {device}, got {sink.device}"
    return None


def sequence_mask_error(mask: Mask | None, sizes: Sizes, no_documents: str) -> str | None:
    """Of a mask over sequences that do not see one another; `no_documents` says why documents are refused."""
    if isinstance(mask, Blocked):
        return "block_mask is for dense calls alone: pass the mask itself"
    for leaf in mask.leaves() if mask is not None else ():
        if isinstance(leaf, Documents):
            return no_documents
        if leaf.kind == "prefixes" and leaf.tensors[0].shape != (sizes.b,):
            got = tuple(leaf.tensors[0].shape)
            return f"prefix lengths must have shape ({sizes.b},), one for each sequence, got {got}"
        if leaf.listed and (error := leaf.shape_error(sizes)):
            return error
    return None


def counts_from_first(mask: Mask) -> bool:
    """Whether a mask is of the call's first row and key on, wherever they stand."""
    return mask.of_shape or isinstance(mask, (Blocked, Documents, TensorMask))


def interval_error(mask: Mask | None, sequences: int, rows: int, end_to_end: bool) -> str | None:
    """Of intervals whose bounds are tensors; `rows` are those of a sequence, or of all sequences end to end."""
    if mask is None or not mask.by_row:
        return None
    leaves = mask.leaves()
    errors = (leaf.bounds_error(sequences, rows, end_to_end) for leaf in leaves if isinstance(leaf, KeyInterval))
    return next(filter(None, errors), None)
