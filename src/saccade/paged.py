"""Paged caches at the door: shapes and masks that do not fit."""

from __future__ import annotations

import torch

from saccade import scores, shapes
from saccade.layouts import Paged
from saccade.masks import Mask


def complaint(q: torch.Size, k: torch.Size, v: torch.Size, layout: Paged, name: str = "q") -> str | None:
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
    return shapes.head_complaint(q, k, v, -2)


def sizes(layout: Paged, q: torch.Size, s_k: int) -> scores.Sizes:
    """What a call has of sequences, heads, rows and keys, of q in the form (b or 1, h_q, s_q or t_q, d). Where queries
    are end to end on a GPU, nobody knows how many the longest sequence has: 0."""
    b, s_q, offsets = layout.sequences, q[2], layout.cu_seqlens_q
    if offsets is not None:
        readable = b and offsets.device.type == "cpu" and not torch.compiler.is_compiling()
        s_q = int(offsets.diff().max()) if readable else 0
    return scores.Sizes(b, q[1], s_q, s_k, exact=False)


def mask_complaint(mask: Mask | None, layout: Paged, call: scores.Sizes) -> str | None:
    """What is wrong with a mask over paged sequences; the layout's own tensors were checked when it was made."""
    for leaf in mask.leaves() if mask is not None else ():
        if leaf.listed and (found := leaf.packed_complaint(*call[:4])):
            return found
    told = "documents(ids) is for rows and keys that are the same tokens, and not for paged caches"
    return shapes.sequence_mask_complaint(mask, layout.sequences, told)
