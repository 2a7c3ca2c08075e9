"""Writes to a paged cache: new keys and values, with rotary embeddings, as a serving loop appends them."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from saccade import aliasing, arguments, autograd, layouts, ops
from saccade.backends import Append, Rotary
from saccade.layouts import Paged

ops.library.define(
    "append_kv(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k_new, Tensor v_new, Tensor[] tensors, str layout, "
    "Tensor[] rotary, bool interleaved) -> ()"
)


def append_kv(
    k_cache: Tensor,
    v_cache: Tensor,
    layout: Paged,
    k_new: Tensor,
    v_new: Tensor,
    *,
    rotary: tuple[Tensor, Tensor] | None = None,
    interleaved: bool = False,
) -> None:
    """Writes new keys and values after those of each sequence: row `i` of sequence `b` becomes key
    `layout.seqused_k[b] + i`.

    Formula, with `rotary=(cos, sin)` and a key's position p: each pair (x, y) among its first elements becomes
    `(x cos[p] - y sin[p], y cos[p] + x sin[p])`, in float32. One launch on a GPU, which reads the lengths there: a CUDA
    graph may be replayed with others. New rows beyond the table, or whose page number is out of range, such as -1, are
    omitted: requests that only fill up a batch cost no page.

    Args:
        k_cache: (pages, page_size, h_k, d), written in place; any strides, the last dimension contiguous.
        v_cache: (pages, page_size, h_k, d_v).
        layout: with the lengths *before* these rows; attention then takes one with the lengths after them.
        k_new: (b, s, h_k, d), or with the layout's `cu_seqlens_q` sequences end to end, (t, h_k, d).
        v_new: (b, s, h_k, d_v), or (t, h_k, d_v).
        rotary: cos and sin, (positions, pairs) with `2 * pairs <= d`, of any float dtype. Later positions take the last
            row. The caller rotates the queries.
        interleaved: pairs are the elements (0, 1), (2, 3), …; else (0, pairs), (1, pairs + 1), …

    Raises:
        ValueError: shapes, dtypes or devices that do not fit one another, or an operand that requires a gradient;
            caches that share memory with each other, with the new rows, or, as an expanded view does, within; when
            lengths are read, as they are on a CPU, those that are negative or beyond the table, and broken offsets.
        TypeError: a layout that is not `Paged`.

    Source: Su et al., RoFormer (https://arxiv.org/abs/2104.09864).

    >>> cache = torch.zeros(2, 8, 1, 4), torch.zeros(2, 8, 1, 4)
    >>> layout = Paged(torch.tensor([[1]]), seqused_k=torch.tensor([3]))
    >>> append_kv(*cache, layout, torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1, 4))
    >>> cache[0][1, :, 0, 0]
    tensor([0., 0., 0., 1., 1., 0., 0., 0.])
    """
    _check(k_cache, v_cache, layout, k_new, v_new, rotary)
    arguments.flags(interleaved=interleaved)
    k_new, v_new = layouts.with_rows(k_new), layouts.with_rows(v_new)
    tables = [] if rotary is None else [table.contiguous() for table in rotary]
    flat = k_cache, v_cache, k_new, v_new, layout.tensors, layout.text, tables, bool(interleaved)
    if ops.runs_directly(k_cache, v_cache, k_new, v_new):
        _append(*flat)
    else:
        torch.ops.saccade.append_kv(*flat)


def _append(
    k_cache: Tensor,
    v_cache: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    tensors: Any,
    layout: str,
    rotary: Any,
    interleaved: bool,
) -> None:
    paged = layouts.from_tensors(layout, list(tensors))
    assert isinstance(paged, Paged)
    if k_cache.device.type == "cpu":
        paged.check_lengths(k_new.shape[0], k_cache.shape[1])
    backend = "triton" if k_cache.device.type == "cuda" else "cpu"
    module = importlib.import_module(f"saccade.backends.{backend}.append")
    module.append(
        Append(k_cache, v_cache, k_new, v_new, paged, Rotary(rotary[0], rotary[1], interleaved) if rotary else None)
    )


def _append_autograd(*flat: Any) -> None:
    autograd.refuse_tangents(*flat[:4])
    if autograd.needs_gradient(*flat[:4]):
        raise ValueError("append_kv has no gradients: call it inside torch.no_grad()")
    with torch._C._AutoDispatchBelowAutograd():
        torch.ops.saccade.append_kv(*flat)


def _fake_append(*flat: Any) -> None:
    return None


ops.library.impl("append_kv", _append, "CompositeExplicitAutograd")
ops.library.impl("append_kv", _append_autograd, "Autograd")
torch.library.register_fake("saccade::append_kv", _fake_append, lib=ops.library)


def _check(
    k_cache: Tensor, v_cache: Tensor, layout: Paged, k_new: Tensor, v_new: Tensor, rotary: tuple[Tensor, Tensor] | None
) -> None:
    if not isinstance(layout, Paged):
        raise TypeError(f"append_kv needs a Paged layout, got {layout!r}")
    arguments.tensors(k_cache=k_cache, v_cache=v_cache, k_new=k_new, v_new=v_new)
    shapes = f"k_cache {tuple(k_cache.shape)}, v_cache {tuple(v_cache.shape)}, "
    shapes += f"k_new {tuple(k_new.shape)}, v_new {tuple(v_new.shape)}"
    complaint = layout.shape_error(k_new.shape, k_cache.shape, v_cache.shape, "k_new")
    if not complaint and (k_new.shape[:-1] != v_new.shape[:-1] or v_new.shape[-1] != v_cache.shape[-1]):
        complaint = "k_new and v_new must have the same rows and heads, and v_cache's head dim"
    if not complaint and k_new.shape[-2] != k_cache.shape[-2]:
        complaint = "k_new must have the cache's heads"
    if complaint:
        raise ValueError(f"{complaint}: {shapes}")
    tensors = k_cache, v_cache, k_new, v_new
    if len({x.dtype for x in tensors}) > 1:
        raise ValueError(f"caches and new rows must share one dtype, got {', '.join(str(x.dtype) for x in tensors)}")
    if len(devices := {x.device for x in (*tensors, *layout.tensors)}) > 1:
        raise ValueError(f"all tensors of append_kv must be on one device, got {', '.join(map(str, devices))}")
    if any(x.stride(-1) != 1 and x.shape[-1] != 1 for x in (k_cache, v_cache)):
        raise ValueError(f"the last dimension of a cache must be contiguous, got strides {k_cache.stride()}")
    if k_new.device.type != "meta" and not torch.compiler.is_compiling():
        others = ("k_new", k_new), ("v_new", v_new)
        aliasing.refuse_shared("k_cache", k_cache, [("v_cache", v_cache), *others])
        aliasing.refuse_shared("v_cache", v_cache, others)
    if rotary is not None:
        _check_rotary(rotary, k_new)


def _check_rotary(rotary: Any, k_new: Tensor) -> None:
    if not isinstance(rotary, (tuple, list)) or len(rotary) != 2:
        raise TypeError(f"rotary must be two tensors, (cos, sin), got {arguments.told(rotary)}")
    cos, sin = rotary
    arguments.tensors(cos=cos, sin=sin)
    if cos.device != k_new.device or sin.device != k_new.device:
        raise ValueError(f"cos and sin must be on k_new's device {k_new.device}, got {cos.device}, {sin.device}")
    if cos.shape != sin.shape or cos.dim() != 2 or not 0 < 2 * cos.shape[1] <= k_new.shape[-1] or not len(cos):
        got = f"cos {tuple(cos.shape)}, sin {tuple(sin.shape)}"
        raise ValueError(f"rotary needs cos and sin (positions, pairs), 2 pairs <= {k_new.shape[-1]}, got {got}")
    if not cos.is_floating_point() or cos.dtype != sin.dtype:
        raise ValueError(f"cos and sin must share one float dtype, got {cos.dtype}, {sin.dtype}")
