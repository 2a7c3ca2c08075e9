"""FlashMLA's sparse and dense functions by saccade: the same names, arguments and results, also on CPUs.

    from saccade.compat.flash_mla import flash_mla_sparse_fwd, flash_mla_with_kvcache

Any number of heads and of listed keys, any head dims that caches have, float16 and float32 besides bfloat16, and 16-bit
caches in decoding besides FP8 records. Source: https://github.com/deepseek-ai/FlashMLA
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from saccade.api import attention
from saccade.call.partial import Partial, Scored, merge
from saccade.layouts import Dense, LatentCache, Paged
from saccade.layouts.latent_cache import FORMATS
from saccade.layouts.validate import has_values, shortened
from saccade.masks import Mask
from saccade.masks import causal as causal_mask
from saccade.util import arguments
from saccade.util.arguments import Unsupported

__all__ = ["flash_mla_sparse_fwd", "flash_mla_with_kvcache", "get_mla_metadata"]


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[None, None]:
    """What FlashMLA schedules by, which nothing here needs: (None, None)."""
    return None, None


def flash_mla_sparse_fwd(
    q: Tensor, kv: Tensor, indices: Tensor, sm_scale: float, d_v: int = 512, attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`softmax(sm_scale q kv[indices]^T) kv[indices, :d_v]`: row i sees the rows of kv that its list names.

    Args:
        q: (s_q, h_q, d).
        kv: (s_kv, 1, d), whose first d_v columns are the values.
        indices: (s_q, 1, topk) int32. Entries below 0 or from s_kv on name nothing.
        sm_scale: factor on the scores.
        d_v: columns of a value.
        attn_sink: (h_q,) float32: `out *= exp(lse) / (exp(lse) + exp(attn_sink))`.
        topk_length: (s_q,) int32: how many entries of each list count; None for all.

    Returns:
        out (s_q, h_q, d_v); the largest scores, (s_q, h_q) float32, -inf for a row without keys; and the LSE,
        (s_q, h_q) float32, natural log, without the sink, +inf for a row without keys.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit.

    >>> q, kv, indices = torch.randn(3, 16, 48), torch.randn(20, 1, 48), torch.randint(-1, 20, (3, 1, 8)).int()
    >>> out, max_logits, lse = flash_mla_sparse_fwd(q, kv, indices, 48**-0.5, d_v=32)
    >>> out.shape, lse.shape
    (torch.Size([3, 16, 32]), torch.Size([3, 16]))
    """
    arguments.tensors(q=q, kv=kv, indices=indices)
    if kv.dim() != 3 or kv.shape[1] != 1 or indices.dim() != 3 or indices.shape[1] != 1:
        raise ValueError(f"kv must be (s_kv, 1, d), and indices (s_q, 1, topk), got {_shapes(kv, indices)}")
    if q.dim() != 3:
        raise ValueError(f"q must be (s_q, h_q, d), got {tuple(q.shape)}")
    _check(q, "kv", kv, "d_v", d_v)
    _check_sink(q, attn_sink)
    cache, scale = kv[None], arguments.number("sm_scale", sm_scale)
    layout = _lists(q, "indices", indices[:, 0], "topk_length", topk_length)
    found = attention(q, cache, cache[..., :d_v], layout=layout, scale=scale, return_lse=True, return_max_scores=True)
    assert isinstance(found, Scored)
    assert found.lse is not None
    lse = found.lse.T
    return _beside_sink(found.out, lse, attn_sink), found.max_scores.T, _natural(lse)


def flash_mla_with_kvcache(
    q: Tensor, k_cache: Tensor, block_table: Tensor | None, cache_seqlens: Tensor | None, head_dim_v: int,
    tile_scheduler_metadata: Any = None, num_splits: Any = None, softmax_scale: float | None = None,
    causal: bool = False, is_fp8_kvcache: bool = False, indices: Tensor | None = None, attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None, extra_indices_in_kvcache: Tensor | None = None,
    topk_length: Tensor | None = None, extra_topk_length: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Decoding over pages of latent rows: of all keys, or of those in the slots that `indices` lists.

    Args:
        q: (b, s_q, h_q, d).
        k_cache: (pages, page_size, 1, d), whose first head_dim_v columns are the values; or FP8 records, 656 or 584
            bytes a row, see `LatentCache`.
        block_table: (b, width): the page table; unused with indices.
        cache_seqlens: (b,): keys of each sequence; unused with indices.
        head_dim_v: columns of a value.
        tile_scheduler_metadata: unused, as num_splits.
        num_splits: unused.
        softmax_scale: factor on the scores; 1/sqrt(d) when None.
        causal: whether the last row stands at the last key, and rows see none behind them; not with indices.
        is_fp8_kvcache: whether the caches hold FP8 records.
        indices: (b, s_q, topk) int32: slots, page * page_size + row; -1, and whatever the cache has not, names nothing.
        attn_sink: (h_q,) float32, as in `flash_mla_sparse_fwd`.
        extra_k_cache: a second cache, whose keys rows see too.
        extra_indices_in_kvcache: (b, s_q, topk): slots of it.
        topk_length: (b,): how many of the indices count.
        extra_topk_length: the same of the second ones.

    Returns:
        out (b, s_q, h_q, head_dim_v) and the LSE, (b, h_q, s_q) float32, natural log, without the sink, +inf for a row
        without keys.

    Raises:
        Unsupported: FP8 records of another size.
        ValueError: shapes that do not fit, causal with indices, or a second cache without both.
    """
    if (extra_k_cache is None) != (extra_indices_in_kvcache is None) or (extra_k_cache is not None and indices is None):
        raise ValueError("extra_k_cache and extra_indices_in_kvcache go together, and with indices")
    for name, length, slots in (
        ("topk_length", topk_length, indices),
        ("extra_topk_length", extra_topk_length, extra_indices_in_kvcache),
    ):
        if length is not None and slots is None:
            raise ValueError(f"{name} counts slots that are listed: pass them too")
    arguments.tensors(q=q, k_cache=k_cache)
    if q.dim() != 4 or k_cache.dim() != 4:
        raise ValueError(f"q must be (b, s_q, h_q, d), and k_cache (pages, page_size, 1, d), got {_shapes(q, k_cache)}")
    _check_sink(q, attn_sink)
    scale = None if softmax_scale is None else arguments.number("softmax_scale", softmax_scale)

    def over(name: str, cache: Tensor, layout: Paged, mask: Mask | None = None) -> Partial:
        if is_fp8_kvcache:
            k = v = _records(q, name, cache, head_dim_v)
        else:
            _check(q, name, cache, "head_dim_v", head_dim_v)
            k, v = cache, cache[..., :head_dim_v]
        return attention(q, k, v, mask=mask, layout=layout, scale=scale, return_lse=True)

    if indices is None:
        if block_table is None or cache_seqlens is None:
            raise ValueError("flash_mla_with_kvcache needs block_table and cache_seqlens, or indices")
        layout = _pages(q, block_table, cache_seqlens, k_cache.shape[1])
        found = over("k_cache", k_cache, layout, causal_mask() if causal else None)
    elif causal:
        raise ValueError("indices say which keys a row sees: not with causal=True")
    else:
        found = over("k_cache", k_cache, _lists(q, "indices", indices, "topk_length", topk_length))
        if extra_k_cache is not None and extra_indices_in_kvcache is not None:
            lists = extra_indices_in_kvcache, "extra_topk_length", extra_topk_length
            more = over("extra_k_cache", extra_k_cache, _lists(q, "extra_indices_in_kvcache", *lists))
            found = merge(found, more, layout=Dense("bshd"))
    out, lse = found
    return _beside_sink(out, lse.transpose(1, 2), attn_sink), _natural(lse)


def _shapes(*tensors: Tensor) -> str:
    return " and ".join(str(tuple(x.shape)) for x in tensors)


def _records(q: Tensor, name: str, cache: Tensor, columns: int) -> LatentCache:
    """The cache of FP8 records whose size its rows have. Raises Unsupported for records of another size, ValueError for
    queries or values of other columns than the records have, or bytes of another dtype or order, and TypeError for a
    cache that is not a tensor."""
    arguments.tensors(**{name: cache})
    found = next((form for form, record in FORMATS.items() if record.bytes == cache.shape[-1]), None)
    if found is None:
        known = " and ".join(str(record.bytes) for record in FORMATS.values())
        raise Unsupported(f"{name}: FP8 records of {known} bytes are supported, not {cache.shape[-1]}")
    record = FORMATS[found]
    if (q.shape[-1], columns) != (record.d, record.d_v):
        wanted = f"q (…, {record.d}) and head_dim_v {record.d_v}"
        got = f"q {tuple(q.shape)} and head_dim_v {columns}"
        raise ValueError(f"{name} of {record.bytes} bytes a row goes with {wanted}, got {got}")
    return LatentCache(cache, found)


def _check(q: Tensor, cache_name: str, cache: Tensor, name: str, columns: int) -> None:
    """Raises ValueError for a cache that is not like q, or more columns of values than a row has, and TypeError for a
    cache that is not a tensor, or columns that are not an integer."""
    arguments.tensors(**{cache_name: cache})
    if cache.shape[-1:] != q.shape[-1:] or cache.dtype != q.dtype or cache.device != q.device:
        wanted, got = (f"rows of {x.shape[-1]} {x.dtype} on {x.device}" for x in (q, cache))
        raise ValueError(f"{cache_name} must have {wanted}, as q {tuple(q.shape)} has, got {got}, {tuple(cache.shape)}")
    if arguments.integer(name, columns, least=1) > cache.shape[-1]:
        raise ValueError(f"{name} must be at most the {cache.shape[-1]} columns of a row, got {columns}")


def _check_sink(q: Tensor, sink: Tensor | None) -> None:
    """Raises ValueError for a sink of another shape or device, and TypeError for a sink that is not a tensor."""
    if sink is None:
        return
    arguments.tensors(attn_sink=sink)
    if tuple(sink.shape) != (q.shape[-2],) or sink.device != q.device:
        wanted = f"({q.shape[-2]},) on {q.device}, one number for each query head"
        raise ValueError(f"attn_sink must be {wanted}, got {tuple(sink.shape)} on {sink.device}")


def _pages(q: Tensor, table: Tensor, used: Tensor, page_size: int) -> Paged:
    """The layout of sequences in pages."""
    _check_integers("block_table", table, q, (q.shape[0], table.shape[-1]) if isinstance(table, Tensor) else ())
    _check_integers("cache_seqlens", used, q, (q.shape[0],))
    room = table.shape[1] * page_size
    _check_range("cache_seqlens", used, room, f"the {room} rows of {table.shape[1]} pages of {page_size}")
    return Paged(table, used)


def _lists(q: Tensor, name: str, slots: Tensor, length_name: str, length: Tensor | None) -> Paged:
    """The layout of rows that list slots; without a length all of them count, and a length is of each row, or of each
    batch row. Raises ValueError for a list or length of another shape, dtype or device, on a CPU also for a length that
    no list has, and TypeError for what is not a tensor."""
    rows = q.shape[:-2]
    _check_integers(name, slots, q, (*rows, slots.shape[-1]) if isinstance(slots, Tensor) and slots.dim() else ())
    n = slots.shape[-1]
    if length is None:
        return Paged(slots=slots, seqused_k=torch.full(rows, n, dtype=torch.int32, device=q.device))
    shape = rows if isinstance(length, Tensor) and length.dim() == len(rows) else rows[:1]
    _check_integers(length_name, length, q, shape)
    _check_range(length_name, length, n, f"the {n} slots of {name}")
    return Paged(slots=slots, seqused_k=length[:, None].expand(rows) if shape != rows else length)


def _check_integers(name: str, x: Tensor, q: Tensor, shape: Sequence[int]) -> None:
    """Raises ValueError for another shape, dtype or device, and TypeError for what is not a tensor."""
    arguments.tensors(**{name: x})
    if x.dtype not in (torch.int32, torch.int64) or tuple(x.shape) != tuple(shape) or x.device != q.device:
        wanted = f"int32 or int64 {tuple(shape)} on {q.device} with q {tuple(q.shape)}"
        raise ValueError(f"{name} must be {wanted}, got {arguments.describe(x)} on {x.device}")


def _check_range(name: str, lengths: Tensor, most: int, text: str) -> None:
    """On a CPU, raises ValueError for lengths that are negative or more than there are."""
    read = lengths.is_cpu and lengths.numel() and has_values(lengths)
    if read and not 0 <= int(lengths.min()) <= int(lengths.max()) <= most:
        raise ValueError(f"{name} must be from 0 to {text}, got {shortened(lengths.flatten().tolist())}")


def _beside_sink(out: Tensor, lse: Tensor, sink: Tensor | None) -> Tensor:
    """out (…, h_q, d_v) of a softmax that holds the sink (h_q) too; lse (…, h_q)."""
    if sink is None:
        return out
    share = torch.sigmoid(lse - sink.to(lse.dtype)).masked_fill(lse == -torch.inf, 0)
    return (out.to(lse.dtype) * share[..., None]).to(out.dtype)


def _natural(lse: Tensor) -> Tensor:
    """FlashMLA's +inf for a row without keys."""
    return lse.masked_fill(lse == -torch.inf, torch.inf)
