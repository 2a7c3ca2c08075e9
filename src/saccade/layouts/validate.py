"""What is wrong with the shapes of a call, in words."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade import scores
from saccade.layouts.dense import Dense
from saccade.layouts.packed import Packed
from saccade.layouts.paged import Paged
from saccade.masks import Blocked, Documents, Mask


def complaint(q: torch.Size, k: torch.Size, v: torch.Size, b: int | None, h: int, s: int) -> str | None:
    """What is wrong with the shapes, whose batch, head and row dimensions are b (None: packed), h and s."""
    if b is not None and not q[b] == k[b] == v[b]:
        return "q, k and v must have one batch size"
    if k[h] != v[h] or k[s] != v[s]:
        return "k and v must have the same heads and length"
    return head_complaint(q, k, v, h)


def head_complaint(q: torch.Size, k: torch.Size, v: torch.Size, h: int) -> str | None:
    """What is wrong with heads and their dims; h is the dimension of the heads."""
    if q[-1] != k[-1]:
        return "q and k must have one head dim"
    if q[-1] == 0 or v[-1] == 0:
        return "head dims must be at least 1"
    if (q[h] % k[h] if k[h] else q[h]) or (k[h] and not q[h]):
        return f"the query heads must be a multiple of the key heads, got {q[h]} and {k[h]}"
    return None


def sink_complaint(sink: Tensor, h_q: int, device: torch.device) -> str | None:
    if not isinstance(sink, Tensor) or sink.shape != (h_q,) or not sink.is_floating_point():
        got = f"{sink.dtype} {tuple(sink.shape)}" if isinstance(sink, Tensor) else repr(sink)
        return f"sink must be a float tensor ({h_q},), one logit per query head, got {got}"
    if sink.device != device:
        return f"sink must be on q's device {device}, got {sink.device}"
    return None


def record_complaint(q: torch.Size, s_k: int, mask: Mask | None, layout: Dense) -> str | None:
    """What is wrong with the tensors of layout and mask; q is (b, h_q, s_q, d)."""
    b, _, s_q, _ = q
    for used in layout.records:
        if used.shape != (b,):
            return f"used lengths must have shape ({b},), got {tuple(used.shape)}"
    if layout.records and mask is not None and (isinstance(mask, Blocked) or any(x.of_shape for x in mask.leaves())):
        return (
            "block masks are for calls whose rows are all in use: beside used lengths pass the mask itself, or for "
            f"torch's BlockMask mask_mod(fn), got {mask!r}"
        )
    for leaf in mask.leaves() if mask is not None else ():
        if isinstance(leaf, Documents) and (leaf.ids.shape[0] not in (1, b) or not leaf.ids.shape[1] == s_q == s_k):
            return f"documents(ids) needs ids (b, s) and s_q = s_k = s, got ids {tuple(leaf.ids.shape)}"
        if leaf.kind == "prefixes" and leaf.records[0].shape != (b,):
            return f"prefix lengths must have shape ({b},), got {tuple(leaf.records[0].shape)}"
    return None


def sequence_mask_complaint(mask: Mask | None, b: int, no_documents: str) -> str | None:
    """What is wrong with a mask over b sequences that see nothing of one another; `no_documents` says why not them."""
    if isinstance(mask, Blocked):
        return "block_mask finds the tiles of dense calls alone: pass the mask itself"
    for leaf in mask.leaves() if mask is not None else ():
        if isinstance(leaf, Documents):
            return no_documents
        if leaf.kind == "prefixes" and leaf.records[0].shape != (b,):
            return f"prefix lengths must have shape ({b},), one for each sequence, got {tuple(leaf.records[0].shape)}"
    return None


def packed_complaint(mask: Mask | None, layout: Packed, q: torch.Size, t_k: int) -> str | None:
    """What is wrong with a mask over packed sequences; the layout's own tensors were checked when it was made.

    Args:
        q: (1, h_q, t_q, d).
    """
    b = layout.sequences
    told = "packed sequences see nothing of one another: make documents sequences, instead of documents(ids)"
    if found := sequence_mask_complaint(mask, b, told):
        return found
    for leaf in mask.leaves() if mask is not None else ():
        if leaf.listed and (found := leaf.packed_complaint(b, q[1], *longest(layout, q[2], t_k))):
            return found
    return None


def longest(layout: Packed, t_q: int, t_k: int) -> tuple[int, int]:
    """Upper bounds of the lengths; one that nobody may read has the tensor's rows in its place."""
    bounds = (layout.max_seqlen_q, t_q), (layout.max_seqlen_k, t_k)
    s_q, s_k = (t if isinstance(bound, Tensor) else min(bound, t) for bound, t in bounds)
    return s_q, s_k


def paged_complaint(q: torch.Size, k: torch.Size, v: torch.Size, layout: Paged, name: str = "q") -> str | None:
    """What is wrong with q, (b, s_q, h_q, d) or (t_q, h_q, d), and the caches, (pages, page_size, h_k, d)."""
    flat, b = layout.cu_seqlens_q is not None, layout.sequences
    if len(q) != (3 if flat else 4) or not len(k) == len(v) == 4:
        wanted = "(t, h, d), as there are cu_seqlens_q," if flat else "(b, s, h, d)"
        return f"with a paged cache {name} is {wanted} and caches are (pages, page_size, h, d)"
    if not flat and q[0] != b:
        return f"{name} must have the batch size of block_table ({b}, {layout.block_table.shape[1]})"
    if k[:3] != v[:3]:
        return "both caches must have the same pages, page size and heads"
    if not k[0] or not k[1]:
        return "a paged cache needs at least one page of one row"
    return head_complaint(q, k, v, -2)


def paged_sizes(layout: Paged, q: torch.Size, s_k: int) -> scores.Sizes:
    """What a call has of sequences, heads, rows and keys, of q in the form (b or 1, h_q, s_q or t_q, d). Where queries
    are end to end on a GPU, nobody knows how many the longest sequence has: 0."""
    b, s_q, offsets = layout.sequences, q[2], layout.cu_seqlens_q
    if offsets is not None:
        readable = b and offsets.device.type == "cpu" and not torch.compiler.is_compiling()
        s_q = int(offsets.diff().max()) if readable else 0
    return scores.Sizes(b, q[1], s_q, s_k, exact=False)


def paged_mask_complaint(mask: Mask | None, layout: Paged, call: scores.Sizes) -> str | None:
    """What is wrong with a mask over paged sequences; the layout's own tensors were checked when it was made."""
    for leaf in mask.leaves() if mask is not None else ():
        if leaf.listed and (found := leaf.packed_complaint(*call[:4])):
            return found
    told = "documents(ids) is for rows and keys that are the same tokens, and not for paged caches"
    return sequence_mask_complaint(mask, layout.sequences, told)
