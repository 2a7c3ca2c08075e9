"""The cache of continuous batching: where the keys of each sequence are, once the new ones are written."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from saccade.layouts import Packed, Paged
from saccade.ops.kv_cache import append_kv


def updated(
    cache: Any, key: Tensor, value: Tensor, module: Any, offsets: tuple[Tensor, Any], keywords: dict[str, Any]
) -> tuple[Tensor, Tensor, Packed | Paged]:
    """Writes the new rows, (1, h_k, t, d), to the cache.

    Args:
        offsets: cu_seq_lens_q and cu_seq_lens_k; a layer takes its own of the latter's entries.
        keywords: `read_index` and `write_index`, or the `block_table` of a step of one token for each sequence.

    Returns:
        The keys and values of all sequences end to end, (t_k, h_k, d), or all pages; and where each sequence's are.
    """
    cu_q, cu_k = offsets
    if _takes_indices(type(cache).update):  # transformers 4
        k, v = cache.update(key, value, module.layer_idx, **keywords)
        if isinstance(cu_k, dict):
            cu_k = cu_k["sliding_attention" if getattr(module, "sliding_window", None) else "full_attention"]
        return k, v, Packed(cu_q, cu_k)
    keywords = {**keywords, "cu_seq_lens_k": cu_k}
    k, v = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=keywords)
    if keywords.get("block_table") is None:
        return k[0].transpose(0, 1), v[0].transpose(0, 1), Packed(cu_q, keywords["cu_seq_lens_k"])
    return _written(cache.layer_to_allocator[module.layer_idx], k, v, keywords)


@torch.compiler.disable()
def _written(allocator: Any, key: Tensor, value: Tensor, keywords: dict[str, Any]) -> tuple[Tensor, Tensor, Paged]:
    """Writes one row of each sequence where its block table says; a sequence without keys has no page.

    Never inside of a compiled graph: of two inputs that are views of one tensor and are written to, torch 2.13 makes
    new views, whose strides lack a factor if sizes are symbols, and it copies the whole tensor, which is the cache.
    """
    # Pages of keys and of values alternate, layer by layer, and each view holds all: one in `step` is its own.
    step = allocator.block_physical_stride // allocator.tokens_per_page
    k_cache, v_cache = keywords["k_cache"][::step], keywords["v_cache"][::step]
    table = torch.div(keywords["block_table"], step, rounding_mode="floor")
    used = keywords["cu_seq_lens_k"].diff()
    new = (x[0].transpose(0, 1)[:, None] for x in (key, value))  # (sequences, 1, h_k, d)
    append_kv(k_cache, v_cache, Paged(table, (used - 1).clamp(min=0)), *new)
    return k_cache, v_cache, Paged(table, used)


def _takes_indices(update: Callable[..., Any]) -> bool:
    return "read_index" in inspect.signature(update).parameters
