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


def mask_complaint(mask: Mask | None, layout: Paged, s_q: int, s_k: int) -> str | None:
    """What is wrong with a mask over paged sequences; the layout's own tensors were checked when it was made."""
    if mask is not None and mask.listed and max(s_q, s_k) > scores.LONGEST:
        return f"mask functions take lengths up to {scores.LONGEST}, got {s_q} and {s_k}"
    told = "documents(ids) is for rows and keys that are the same tokens, and not for paged caches"
    return shapes.sequence_mask_complaint(mask, layout.sequences, told)
