"""The attention function that transformers calls in each layer."""

from __future__ import annotations

import inspect
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from saccade import masks, scores
from saccade.api import attention
from saccade.integrations.transformers.mask import StructuredMask, attention_mask_of
from saccade.layouts import Packed, Paged
from saccade.masks import Mask
from saccade.ops.kv_cache import append_kv

if TYPE_CHECKING:
    from saccade.distributed import ContextPlan

REFUSED = frozenset(("head_mask", "layer_head_mask", "indices", "block_indices", "sinks"))
"""Keywords that would change the result."""


def attention_forward(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor,
    attention_mask: StructuredMask | BlockMask | Tensor | None, dropout: float = 0.0, scaling: float | None = None, *,
    sliding_window: int | None = None, softcap: float | None = None, is_causal: bool | None = None,
    s_aux: Tensor | None = None, position_bias: Tensor | None = None, cache: Any = None,
    cu_seq_lens_q: Tensor | None = None, cu_seq_lens_k: Any = None, context: ContextPlan | None = None, **others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """`out = dropout(softmax(mask(softcap(scaling q k^T) + position_bias), with s_aux)) v`.

    Args:
        module: the layer, whose `is_causal` counts where neither a mask nor `is_causal` is given.
        query: (b, h_q, s_q, d).
        key: (b, h_k, s_k, d).
        value: (b, h_k, s_k, d_v).
        attention_mask: what `attention_mask_of` returns; torch's BlockMask; (b or 1, h_q or 1, s_q, s_k or more), bool,
            True where a row sees a key, or floats that are added; or None.
        dropout: the share of probabilities that become zero.
        scaling: factor on q k^T; 1/sqrt(d) when None.
        sliding_window: the keys that a row sees, itself included, where no mask says so.
        softcap: scores become `softcap tanh(score / softcap)`.
        is_causal: where there is no mask, whether row i sees keys up to itself.
        s_aux: (h_q) logits of sinks, which get a gradient.
        position_bias: broadcasts to (b, h_q, s_q, s_k); it gets a gradient.
        cache: the cache of continuous batching, whose sequences lie end to end.
        cu_seq_lens_q: (sequences + 1): offsets of sequences that lie end to end, in the batch row or in all of them.
        cu_seq_lens_k: the same for the keys.
        context: the plan of which these are a rank's rows, as `model(ids, position_ids=…, context=plan)` passes it on;
            documents are told by the plan, not by the positions.
        others: what does not matter here, such as position_ids.

    Returns:
        out (b, s_q, h_q, d_v), contiguous, and None for the weights, which nobody can have.

    Raises:
        ValueError: weights, or a keyword that would change the result and has no meaning; a mask that does not fit;
            cu_seq_lens_k without cu_seq_lens_q.
    """
    _refuse(others, cache, cu_seq_lens_q)
    if isinstance(attention_mask, Tensor):
        _refuse_lost_masks(module, attention_mask)
    if cu_seq_lens_k is not None and cu_seq_lens_q is None:
        raise ValueError("cu_seq_lens_k has the offsets of the keys alone: pass cu_seq_lens_q too")
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    keywords: dict[str, Any] = {"scale": scaling, "sink": s_aux, "dropout_p": dropout}
    if context is not None:
        mask = _within_sequences(module, attention_mask, causal, sliding_window, "context")
        beside = {"position_bias": position_bias, "cache": cache, "cu_seq_lens_q": cu_seq_lens_q}
        return _of_ranks(context, (query, key, value), softcap, keywords | {"mask": mask}, beside), None
    if cu_seq_lens_q is not None:
        if position_bias is not None:
            raise ValueError("position_bias and cu_seq_lens_q do not go together")
        given = attention_mask if cache is None else None  # transformers 4 also writes out what the offsets say
        keywords["mask"] = _within_sequences(module, given, causal, sliding_window)
        if softcap is not None:
            keywords["score_mod"] = scores.softcap(softcap)
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))  # (t, h, d)
        if cache is None:
            layout = Packed(cu_seq_lens_q, cu_seq_lens_k)
        else:
            k, v, layout = updated(cache, key, value, module, (cu_seq_lens_q, cu_seq_lens_k), others)
        if isinstance(layout, Paged):
            q = q[:, None]  # (sequences, 1, h_q, d)
        out = attention(q, k, v, layout=layout, **keywords)
        return out.reshape(query.shape[0], query.shape[2], *out.shape[-2:]).contiguous(), None
    mask, added = _dense_mask(attention_mask, query, key, causal, sliding_window)
    if not softcap is position_bias is added is None:
        changes = [scores.softcap(softcap)] if softcap is not None else []
        changes += [scores.bias(x) for x in (position_bias, added) if x is not None]
        keywords["score_mod"] = changes[0] if len(changes) == 1 else scores.compose(*changes)
    return attention(query, key, value, mask=mask, **keywords).transpose(1, 2).contiguous(), None


def _of_ranks(
    plan: ContextPlan, operands: tuple[Tensor, ...], softcap: float | None, keywords: dict[str, Any], beside: Any
) -> Tensor:
    """The rows of one rank, (b, s_q, h_q, d)."""
    if given := [name for name, x in beside.items() if x is not None]:
        raise ValueError(f"context and {', '.join(given)} do not go together: the plan knows the documents")
    if softcap is not None:
        keywords["score_mod"] = scores.softcap(softcap)
    if getattr(plan, "batch", None) is not None:
        return attention(*operands, context=plan, **keywords).transpose(1, 2).contiguous()
    b, _, s, _ = operands[0].shape
    out = attention(*(x.transpose(1, 2).flatten(0, 1) for x in operands), context=plan, **keywords)
    return out.unflatten(0, (b, s)).contiguous()


def _refuse(others: dict[str, Any], cache: Any, offsets: Tensor | None) -> None:
    if others.get("output_attentions"):
        raise ValueError('saccade never holds the attention weights: output_attentions=True needs "eager"')
    if not REFUSED.isdisjoint(others) and (given := [x for x in sorted(REFUSED) if others.get(x) is not None]):
        raise ValueError(f'the attention function of saccade does not take {", ".join(given)}: use "eager"')
    if cache is not None and offsets is None:
        raise ValueError(f"a cache ({type(cache).__name__}) is for sequences end to end: give cu_seq_lens_q")
    if cache is None and others.get("block_table") is not None:
        raise ValueError("block_table says where the keys are in a cache, which is None")


def _refuse_lost_masks(module: torch.nn.Module, mask: Tensor) -> None:
    """A model that asks whether its mask is a BlockMask may go on without it: what it passes then lacks all of that.
    Raises ValueError for a layer whose code knows BlockMasks."""
    kind = type(module)
    if hasattr(sys.modules.get(kind.__module__), "BlockMask"):
        raise ValueError(
            f"{kind.__name__} passes a mask of its own, {tuple(mask.shape)}, and not the one that transformers made: "
            'use attn_implementation="sdpa" or "eager"'
        )


def _dense_mask(
    given: StructuredMask | BlockMask | Tensor | None, q: Tensor, k: Tensor, causal: bool, sliding_window: int | None
) -> tuple[Any, Tensor | None]:
    """The mask, and what is added to the scores."""
    if given is None:
        return _without_mask(q, k, causal, sliding_window), None
    if isinstance(given, StructuredMask):
        b, _, s_q, s_k = given.shape
        if (s_q, s_k) != (q.shape[2], k.shape[2]):
            raise ValueError(
                f"the mask is for {b} x {s_q} rows and {s_k} keys, got {_shapes(q, k)}: a model that adds keys of its "
                'own needs attn_implementation="eager"'
            )
        return given.mask, None
    if isinstance(given, Tensor):
        if given.dim() != 4:
            raise ValueError(f"attention_mask must have four dimensions, got {tuple(given.shape)} for {_shapes(q, k)}")
        given = given[..., : k.shape[2]]
        if given.dtype == torch.bool:
            return given, None
        if not given.is_floating_point():
            raise ValueError(f"attention_mask must be bool or floats that are added, got {given.dtype}")
        return None, given
    return given, None


def _without_mask(q: Tensor, k: Tensor, causal: bool, sliding_window: int | None) -> Mask | None:
    """That of a call which is given none."""
    if sliding_window is None and not causal:
        return None
    s_q, s_k = q.shape[2], k.shape[2]
    if sliding_window is not None and s_k > sliding_window and not (causal and s_q == s_k):
        raise ValueError(f"sliding_window={sliding_window} needs a mask for {_shapes(q, k)}, or causal rows and keys")
    if not causal or s_q == 1:
        return None
    if s_q != s_k:
        raise ValueError(f"without a mask a causal call needs as many rows as keys, got {_shapes(q, k)}")
    return _causal(sliding_window)


def _shapes(q: Tensor, k: Tensor) -> str:
    return f"query {tuple(q.shape)} and key {tuple(k.shape)}"


def _causal(sliding_window: int | None) -> Mask:
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window counts the keys that a row sees, itself included, got {sliding_window}")
    return masks.causal() if sliding_window is None else masks.window(sliding_window - 1, 0)


def _within_sequences(
    module: torch.nn.Module, given: Any, causal: bool, sliding_window: int | None, name: str = "cu_seq_lens_q"
) -> Mask | None:
    """The mask of sequences end to end, which transformers tells by keywords alone."""
    if given is not None and (not isinstance(given, StructuredMask) or given.padded):
        raise ValueError(f"{name} and an attention_mask do not go together: {name} says what is no padding")
    kinds, layer = getattr(getattr(module, "config", None), "layer_types", None), getattr(module, "layer_idx", None)
    kind = kinds[layer] if kinds is not None and layer is not None else "full_attention"
    if kind not in ("full_attention", "sliding_attention") or (kind == "sliding_attention" and sliding_window is None):
        raise ValueError(f"{name} does not tell the mask of a layer of {kind}: pass position_ids alone")
    if causal:
        return _causal(sliding_window)
    if sliding_window is not None:
        raise ValueError(f"{name} with sliding_window is for causal layers")
    return None


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
    if "read_index" in inspect.signature(type(cache).update).parameters:  # before transformers 5.20
        indices = {name: keywords[name] for name in ("read_index", "write_index")}
        k, v = cache.update(key, value, module.layer_idx, **indices)
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


NAME = "saccade"
FOR_BATCHES = "saccade_flash2"
"""The name for continuous batching, which takes names with "flash" in them alone, and block tables with "flash…2"."""
_BEFORE_5_20 = f"paged|{FOR_BATCHES}"
"""What transformers 5.0 to 5.19 make of that name."""


def register() -> None:
    """Makes `attn_implementation="saccade"` known to transformers: every layer computes
    `out = dropout(softmax(mask(scale q k^T))) v` here, forward and backward.

    Masks keep their structure: padding, windows, chunks, packed sequences and caches are intervals of keys, and no
    tensor of rows by keys is made. `generate_batch` of transformers 5 needs the name "saccade_flash2". A second call
    changes nothing.

    Raises:
        ImportError: transformers is missing, or is older than 4.57.
        RuntimeError: a version whose loader of flash attention is unknown, for "saccade_flash2".
    """
    try:
        transformers: Any = import_module("transformers")
        interfaces = transformers.AttentionInterface, transformers.AttentionMaskInterface
    except (ImportError, AttributeError) as error:
        raise ImportError(f"saccade.integrations.transformers needs transformers 4.57 or newer: {error}") from error
    for name in (NAME, FOR_BATCHES, _BEFORE_5_20):
        for interface, function in zip(interfaces, (attention_forward, attention_mask_of), strict=True):
            interface.register(name, function)
    _announce()


def _announce() -> None:
    """Transformers 5 loads whatever has "flash" in its name from a package or a hub; ours is loaded already."""
    loader: Any = import_module("transformers.modeling_flash_attention_utils")
    load: Any = getattr(loader, "_lazy_imports", None)
    if getattr(load, "knows_saccade", False):
        return
    if load is None or next(iter(inspect.signature(load).parameters), None) != "implementation":
        raise RuntimeError(f"cannot announce {FOR_BATCHES!r}: transformers' _lazy_imports is not as expected")

    functions: list[Any] = [attention_forward] * 2
    if hasattr(loader, "_flash_with_kvcache_fn"):  # with block tables, which `updated` reads from 5.20 on
        functions.append(None if hasattr(loader, "lazy_import_paged_flash_attention") else attention_forward)

    def lazy_imports(implementation: Any, *arguments: Any, **options: Any) -> Any:
        if implementation in (FOR_BATCHES, _BEFORE_5_20):
            return (*functions, None, None)  # for attention, and for padding
        return load(implementation, *arguments, **options)

    lazy_imports.knows_saccade = True  # pyright: ignore[reportFunctionMemberAccess]
    loader._lazy_imports = lazy_imports
