"""Attention to a cache of keys and values, to which new ones may be appended: what versions 2 and 3 share."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.backends import Rotary
from saccade.backends.cpu.append import rotated
from saccade.call.descale import EIGHT_BITS, Descale
from saccade.call.partial import Partial
from saccade.compat.flash_attn.call import Terms, attend, bounds, of_rows, row_numbers, without_gradients
from saccade.layouts import Paged
from saccade.ops.kv_cache import append_kv, check_rotary
from saccade.util import arguments
from saccade.util.kept_memory import capturing, keep


class CacheTerms(NamedTuple):
    """The arguments of `flash_attn_with_kvcache` besides the queries and the cache, by its names."""

    k: Tensor | None
    v: Tensor | None
    rotary_cos: Tensor | None
    rotary_sin: Tensor | None
    cache_seqlens: Any
    cache_batch_idx: Tensor | None
    cache_leftpad: Tensor | None
    page_table: Tensor | None
    softmax_scale: Any
    causal: Any
    window_size: Any
    softcap: Any
    rotary_interleaved: Any
    num_splits: Any
    return_softmax_lse: Any
    alibi_slopes: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k_new: Tensor | None = None
    rotary_seqlens: Tensor | None = None
    attention_chunk: Any = 0
    descale: Descale | None = None

    @property
    def local(self) -> bool:
        """Whether queries have places, so that each is rotated by its own."""
        return bool(self.causal) or bounds(self.window_size) != (None, None) or self.attention_chunk != 0


def attend_to_cache(q: Tensor, k_cache: Tensor, v_cache: Tensor, terms: CacheTerms) -> Tensor | Partial:
    """Appends the new keys and values, if there are any, and attends to all: out, or (out, softmax_lse). Raises
    ValueError or TypeError for arguments that do not fit one another, and Unsupported in a backward."""
    _check(q, k_cache, v_cache, terms)
    if not torch.is_grad_enabled():
        return _attend_to_cache(q, k_cache, v_cache, terms)
    operands = q, k_cache, v_cache, terms.k, terms.v, terms.alibi_slopes
    return without_gradients(lambda: _attend_to_cache(q, k_cache, v_cache, terms), *operands)


def _attend_to_cache(q: Tensor, k_cache: Tensor, v_cache: Tensor, terms: CacheTerms) -> Tensor | Partial:
    table, used = _table(q, k_cache, terms)
    if terms.k is not None:
        cu_new = terms.cu_seqlens_k_new
        if cu_new is None:
            room = table.shape[-1] * k_cache.shape[1]
            _check_numbers("cache_seqlens", used, len(used), room - terms.k.shape[1] + 1)
        q = _append(q, k_cache, v_cache, Paged(table, used, cu_new), terms)
        used = used + (terms.k.shape[1] if cu_new is None else cu_new.diff())
    layout = Paged(table, used, terms.cu_seqlens_q, terms.num_splits or None)
    own = Terms(
        0.0, terms.softmax_scale, terms.causal, terms.window_size, terms.softcap, terms.alibi_slopes, False,
        terms.return_softmax_lse, terms.descale,
    )  # fmt: skip
    return attend(q, k_cache, v_cache, layout, own, terms.cache_leftpad, terms.attention_chunk)


def _check(q: Tensor, k_cache: Tensor, v_cache: Tensor, terms: CacheTerms) -> None:
    if not (isinstance(q, Tensor) and isinstance(k_cache, Tensor) and isinstance(v_cache, Tensor)):
        arguments.tensors(q=q, k_cache=k_cache, v_cache=v_cache)
    if terms.num_splits != 0:
        arguments.integer("num_splits", terms.num_splits)
    if k_cache.dim() != 4 or v_cache.dim() != 4:
        shapes = f"{tuple(k_cache.shape)}, {tuple(v_cache.shape)}"
        raise ValueError(f"k_cache and v_cache must be (b, s, h_k, d) or (pages, page_size, h_k, d), got {shapes}")
    dims, form = (4, "(b, s_q, h_q, d)") if terms.cu_seqlens_q is None else (3, "(t_q, h_q, d) with cu_seqlens_q")
    if q.dim() != dims:
        raise ValueError(f"q must be {form}, got {tuple(q.shape)}")
    b = _sequences(q, terms)
    if terms.cache_leftpad is not None:
        _check_numbers("cache_leftpad", terms.cache_leftpad, b)
    if terms.rotary_seqlens is not None:
        _check_numbers("rotary_seqlens", terms.rotary_seqlens, b)
    k, v, cos, sin, *_ = terms
    if not (k is v is cos is sin is terms.cu_seqlens_k_new is None):
        _check_new(terms)


def _sequences(q: Tensor, terms: CacheTerms) -> int:
    return q.shape[0] if terms.cu_seqlens_q is None else terms.cu_seqlens_q.shape[0] - 1


def _check_numbers(name: str, x: Any, b: int, stop: int | None = None) -> None:
    """A number for each sequence, below `stop`, as far as the host may read them. Raises ValueError or TypeError for
    others."""
    arguments.tensors(**{name: x})
    if x.shape != (b,) or x.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name} must be int32 or int64 (b,), got {x.dtype} {tuple(x.shape)} for {b} sequences")
    if stop is None or x.device.type != "cpu" or not b or arguments.watched():
        return
    if not 0 <= int(x.min()) <= int(x.max()) < stop:
        raise ValueError(f"{name} must be from 0 to {stop - 1}, got {x.tolist()}")


def _check_new(terms: CacheTerms) -> None:
    for one, other in (("k", "v"), ("rotary_cos", "rotary_sin")):
        if (getattr(terms, one) is None) != (getattr(terms, other) is None):
            raise ValueError(f"{one} and {other} come together: give both or none")
    if terms.k is None:
        names = "rotary_cos", "cu_seqlens_k_new"
        given = next(name for name in names if getattr(terms, name) is not None)
        raise ValueError(f"{given} is for new keys and values, k and v, which are None")
    arguments.tensors(k=terms.k, v=terms.v)
    arguments.flags(causal=terms.causal, rotary_interleaved=terms.rotary_interleaved)
    if terms.cache_seqlens is None:
        raise ValueError("k and v are appended after the keys of each sequence: give cache_seqlens")


def _check_angles(k_cache: Tensor, before: Paged, terms: CacheTerms) -> None:
    """A later position would take the last row's angles; flash-attn refuses by these sizes too. Raises ValueError for
    fewer rows of angles than the cache has room for, or a first position without any."""
    assert terms.k is not None
    check_rotary((terms.rotary_cos, terms.rotary_sin), terms.k)
    for name in ("rotary_cos", "rotary_sin"):
        angles, room = getattr(terms, name), before.block_table.shape[-1:].numel() * k_cache.shape[1]
        if angles.shape[0] < room:
            raise ValueError(f"{name} needs a row for each of the {room} keys of a sequence, got {tuple(angles.shape)}")
    if terms.rotary_seqlens is not None and terms.rotary_cos is not None:
        _check_numbers("rotary_seqlens", terms.rotary_seqlens, before.sequences, terms.rotary_cos.shape[0])


def _table(q: Tensor, k_cache: Tensor, terms: CacheTerms) -> tuple[Tensor, Tensor]:
    """The pages of each sequence, and how many keys it has before the call. Without pages a row of the cache is one.

    cache_batch_idx says which row of the cache is whose, or which row of the page table.
    """
    b, table = _sequences(q, terms), terms.page_table
    if terms.cache_batch_idx is not None:
        table = _rows_of(table, terms.cache_batch_idx, b, k_cache.shape[0])
    if table is None:
        if b > k_cache.shape[0]:
            raise ValueError(f"{b} sequences need as many rows of the cache, got k_cache {tuple(k_cache.shape)}")
        table = own_rows(b, q)
    used = terms.cache_seqlens
    if not isinstance(used, Tensor):
        room = table.shape[-1] * k_cache.shape[1]
        used = room if used is None else arguments.integer("cache_seqlens", used)
        used = torch.full((b,), used, dtype=torch.int32, device=q.device)
    return table, used


def _rows_of(table: Tensor | None, row: Any, b: int, rows: int) -> Tensor:
    """The page table of each sequence by cache_batch_idx. On a GPU a row outside the table gets pages outside the
    cache, to which nothing is written."""
    if table is not None:
        arguments.tensors(page_table=table)
        if table.dim() != 2 or not table.shape[0]:
            raise ValueError(f"with cache_batch_idx, the page table must be (rows, width), got {tuple(table.shape)}")
        rows = table.shape[0]
    _check_numbers("cache_batch_idx", row, b, rows)
    if table is None:
        return row[:, None]
    pages = table[row.long().clamp(0, rows - 1)]
    return pages if row.device.type == "cpu" else pages.where(((row >= 0) & (row < rows))[:, None], -1)


def _append(q: Tensor, k_cache: Tensor, v_cache: Tensor, before: Paged, terms: CacheTerms) -> Tensor:
    """Writes new keys and values; returns the queries, rotated if there are angles.

    One launch does all where queries and new keys are the same tokens and are rotated alike.
    """
    k, v, cu_q, cu_new, starts = terms.k, terms.v, terms.cu_seqlens_q, terms.cu_seqlens_k_new, terms.rotary_seqlens
    assert k is not None
    assert v is not None
    interleaved, descale = bool(terms.rotary_interleaved), terms.descale
    if descale is not None:  # rows of 8 bits are copied
        descale = None if k.dtype in EIGHT_BITS else Descale(k=descale.k, v=descale.v)
    if terms.rotary_cos is None or terms.rotary_sin is None:
        append_kv(k_cache, v_cache, before, k, v, descale=descale)
        return q
    if k.dtype in EIGHT_BITS or q.dtype in EIGHT_BITS:
        raise ValueError(f"rotary_cos is for q and k of 16 bits or more, got {q.dtype}, {k.dtype}: rotate them before")
    _check_angles(k_cache, before, terms)
    rotary = Rotary(terms.rotary_cos, terms.rotary_sin, interleaved)
    together = starts is None and cu_q is cu_new and q.shape[:-2] == k.shape[:-2]
    if together and (terms.local or (cu_q is None and q.shape[1] == 1)):
        return append_kv(
            k_cache, v_cache, before, k, v, q=q, rotary=rotary[:2], interleaved=interleaved, descale=descale
        )
    if starts is None:
        append_kv(k_cache, v_cache, before, k, v, rotary=rotary[:2], interleaved=interleaved, descale=descale)
    else:
        if k_cache.dtype in EIGHT_BITS:  # float32, so that keys are rounded once
            k, v = k.float(), v.float()
        append_kv(k_cache, v_cache, before, _rotated(k, rotary, cu_new, starts, True), v, descale=descale)
    return _rotated(q, rotary, cu_q, before.seqused_k if starts is None else starts, terms.local)


def _rotated(x: Tensor, rotary: Rotary, cu_seqlens: Tensor | None, starts: Tensor, apart: bool) -> Tensor:
    """x with its pairs turned: all rows of a sequence by the position where it starts, or each `apart` by its own."""
    position = of_rows(starts, cu_seqlens, x)
    if apart:
        position = position + row_numbers(cu_seqlens, x)
    return rotated(x.flatten(0, -3), rotary, position.expand(x.shape[:-2]).flatten().long()).view(x.shape)


_OWN_ROWS: dict[tuple[torch.device, int], Tensor] = {}


def own_rows(b: int, like: Tensor) -> Tensor:
    """(b, 1): row i of the cache is sequence i's.

    A table is kept once the device has it: it comes from the host's memory, and the host waits for the copy. A call
    that a compiler or a mode watches, or that a graph captures, makes its own.
    """
    device = like.device
    watched = type(like) is not Tensor or torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack()
    if watched or capturing():
        return torch.arange(b, dtype=torch.int32, device=device)[:, None]
    return _kept_rows(b, device)


@lru_cache(maxsize=256)
def _kept_rows(b: int, device: torch.device) -> Tensor:
    size = max(256, 1 << max(b - 1, 0).bit_length())
    table = _OWN_ROWS.get((device, size))
    if table is None:
        table = keep(lambda: torch.arange(size, dtype=torch.int32, device="cpu").to(device)[:, None])
        _OWN_ROWS[device, size] = table
    return table[:b]
