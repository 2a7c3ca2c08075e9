"""The arguments of `attention`, checked: one path for `attention` and `explain`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from saccade import layouts, scores
from saccade.call.call import Call, eight_bit_gradients, needs_gradient
from saccade.call.descale import EIGHT_BITS, Descale, Factors, factors
from saccade.call.dropout import Dropout
from saccade.call.spec import DTYPES
from saccade.layouts import Dense, LatentCache, Layout, Paged, with_rows
from saccade.layouts.validate import sink_error
from saccade.masks import Mask, as_mask
from saccade.scores import Score, Traced
from saccade.util import arguments, hardware, memory_layout
from saccade.util.arguments import Unsupported
from saccade.util.memory_layout import ALIGNMENT, address

_BHSD = Dense()
_LEARNED_SCALE = (
    ": multiply q by it, attention(q * scale, …, scale=1.0), or pass "
    "score_mod=lambda score, b, h, q_idx, kv_idx: score * scale and scale=1.0"
)


def check_call(
    q: Tensor, k: Tensor | LatentCache, v: Tensor | LatentCache, *, mask: Any = None, score_mod: Any = None,
    layout: Layout | None = None, scale: Any = None, sink: Tensor | None = None, dropout_p: Any = 0.0,
    return_lse: bool = False, return_max_scores: bool = False, deterministic: bool | None = None, backend: str = "auto",
    out: Tensor | None = None, descale: Descale | None = None, runs: bool = True,
) -> Call:  # fmt: skip
    """The call of these arguments of `attention`, or an error that quotes them. In the hot path of small calls.
    runs: False for a call that is planned alone: it draws no dropout."""
    arguments.flags(return_lse=return_lse, return_max_scores=return_max_scores, deterministic=deterministic)
    layout = _BHSD if layout is None else layout
    if not isinstance(layout, Layout) or not isinstance(backend, str):
        raise _type_error(layout, backend)
    cache = k
    reads = isinstance(k, LatentCache) and _reads_records(q, k, layout, backend, dropout_p)
    q, k, v, layout, slots = _settled(q, k, v, layout, reads)
    tensors = layout.tensors
    if mask is not None:
        mask = _bind_mask(mask, runs and backend == "reference")
        tensors = *tensors, *mask.tensors
    if tensors or sink is not None or (mask is not None and mask.block_sparse):
        _check_tensors(q, k, v, mask, layout, sink, tensors)
    if not isinstance(dropout_p, float):
        dropout_p = arguments.number("dropout_p", dropout_p)
    if dropout_p and not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p must be in [0, 1), got {dropout_p}; with 1 every probability would be zero")
    if out is not None:
        _check_out(out, q, v, layout, cache)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else _checked_scale(scale)
    found = None
    if k.dtype in EIGHT_BITS or descale is not None:
        found = _check_descale(descale, q, k, v, layout)
        if descale is not None and descale.shift is not None:
            _check_shift(descale.shift, q, layout, {"sink": sink, "score_mod": score_mod})
    score = None if score_mod is None else _bind_score(score_mod, q, k, layout)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    dropout = None
    if dropout_p:
        dropout = Dropout.draw(dropout_p, q.device) if runs else Dropout.planned(dropout_p)
    return Call(
        q, k, v, layout=layout, mask=mask if slots is None else slots, score=score, sink=sink, scale=scale,
        deterministic=deterministic, dropout=dropout, max_scores=return_max_scores, descale=found, out=out,
    )  # fmt: skip


def _settled(q: Any, k: Any, v: Any, layout: Layout, reads: bool) -> tuple[Tensor, Tensor, Tensor, Layout, Mask | None]:
    """Operands as a backend takes them, and the layout over them: of nested ones that of their rows, of slots that of
    rows of caches, and a mask. reads: a kernel reads records."""
    if isinstance(k, LatentCache) or isinstance(v, LatentCache):
        k, v, layout = _opened(q, k, v, layout, reads)
    if isinstance(q, Tensor) and q.is_nested:
        q, k, v, layout = layouts.unwrap(q, k, v, layout)
    if layout.slots is None:
        return *_check_operands(q, k, v, layout, reads), layout, None
    rows = layouts.SlotRows.of(layout)  # pyright: ignore[reportArgumentType]
    q, k, v = _check_operands(q, k, v, rows, reads)
    layout, k, v, mask = rows.over_rows(k, v)
    return q, k, v, layout, mask


def _reads_records(q: Any, cache: LatentCache, layout: Layout, backend: str, dropout_p: Any) -> bool:
    """Whether a kernel reads them, that of `gluon`."""
    if not isinstance(q, Tensor) or autocast(q, q, q)[0].dtype != torch.bfloat16 or hardware.name(q.device) != "sm90":
        return False
    if backend not in ("auto", "gluon") or dropout_p or torch.compiler.is_compiling() or not isinstance(layout, Paged):
        return False
    pages, unit = cache.bytes, ALIGNMENT if layout.slots is None else cache.record.bytes
    whole = cache.format == "v3.2" and pages.stride(0) % unit == address(pages) % ALIGNMENT == 0 and pages.numel() > 0
    return whole and layout.cu_seqlens_q is None and layout.num_splits is None and not layout.shared_pages


def _opened(q: Any, k: Any, v: Any, layout: Layout, reads: bool) -> tuple[Tensor, Tensor, Layout]:
    """The rows of a cache of records as 16-bit numbers, or as wide as queries are; their bytes if a kernel reads them.
    Raises TypeError for keys and values apart, and ValueError for queries of other dtypes or of other shapes."""
    arguments.tensors(q=q)
    if k is not v:
        raise TypeError(
            f"a LatentCache holds keys and values: pass the same object as k and as v, got {arguments.describe(k)} and "
            f"{arguments.describe(v)}"
        )
    if q.dtype in EIGHT_BITS or q.dtype not in DTYPES:
        raise ValueError(f"a LatentCache takes queries of float16, bfloat16, float32 or float64, got {q.dtype}")
    if not isinstance(layout, Paged):
        raise TypeError(f"a LatentCache is read through Paged(…), got the layout {layout!r}")
    record, seen = k.record, layout if layout.slots is None else layouts.SlotRows.of(layout)
    shape = (*k.bytes.shape[:2], 1)
    if error := seen.shape_error(q.shape, torch.Size((*shape, record.d)), torch.Size((*shape, record.d_v))):
        raise ValueError(f"{error}: q {tuple(q.shape)}, {k!r} of head dims {record.d}/{record.d_v}")
    if not reads:
        rows, layout = k.opened(layout, autocast(q, q, q)[0].dtype)
        return rows, rows[..., : record.d_v], layout
    rows = k.bytes.view(torch.uint8).view(*shape, record.bytes)
    return rows, rows[..., : record.d_v], layout


def _type_error(layout: Any, backend: Any) -> TypeError:
    if not isinstance(layout, Layout):
        return TypeError(f"layout must be a Dense, Packed or Paged record, such as Dense('bshd'), got {layout!r}")
    return TypeError(f'backend must be a name, such as "auto" or "reference", got {arguments.describe(backend)}')


def _bind_mask(mask: Any, as_written: bool) -> Mask:
    """The mask of this call. The reference takes functions as they are written."""
    bound = mask if isinstance(mask, Mask) else as_mask(mask)
    assert bound is not None
    return bound.bound() if bound.block_sparse and not as_written else bound


def _checked_scale(scale: Any) -> float:
    scale = arguments.number("scale", scale, _LEARNED_SCALE)
    if not -arguments.MOST_FLOAT32 <= scale <= arguments.MOST_FLOAT32:  # as nan is not
        raise ValueError(
            f"scale must be a number, or None for 1/sqrt(d), got {scale}: kernels take it as a finite float32, at most "
            f"{arguments.MOST_FLOAT32:.4g}; products of inf or nan would be NaN"
        )
    return scale


def _check_operands(q: Tensor, k: Tensor, v: Tensor, layout: Layout, records: bool) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as a backend takes them. records: k and v are their bytes, of shapes that are checked."""
    arguments.operands(q, k, v)
    q, k, v = autocast(q, k, v)
    if not records and not q.dtype == k.dtype == v.dtype:
        _check_dtypes(q.dtype, k.dtype, v.dtype)
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k and v must be on one device, got {q.device}, {k.device}, {v.device}")
    if q.dtype not in DTYPES:
        raise ValueError(
            f"attention takes float16, bfloat16, float32 and float64, and float8_e4m3fn and float8_e5m2, got {q.dtype}"
        )
    if not records and (error := layout.shape_error(q.shape, k.shape, v.shape)):
        raise ValueError(f"{error}: {_shapes(q, k, v, layout)}")
    # Kernels read rows of contiguous elements; everything else about the strides is theirs to follow.
    if q.stride(-1) == k.stride(-1) == v.stride(-1) == 1:
        return q, k, v
    return with_rows(q), with_rows(k), with_rows(v)


def _check_dtypes(q: torch.dtype, k: torch.dtype, v: torch.dtype) -> None:
    """The error for operands that do not all have the same one."""
    if k != v:
        raise ValueError(f"k and v must share one dtype, got q {q}, k {k}, v {v}")
    if k not in EIGHT_BITS:
        raise ValueError(
            f"q, k and v must share one dtype, got {q}, {k}, {v}; k and v of 8 bits, float8_e4m3fn or float8_e5m2, go "
            "with a wider q"
        )
    if q in EIGHT_BITS:
        raise ValueError(f"8-bit q, k and v must share one dtype, got {q}, {k}, {v}")


def _check_descale(descale: Descale | None, q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Factors:
    """The checked Descale of a call's 8-bit operands."""
    if descale is not None and not isinstance(descale, Descale):
        raise TypeError(f"descale must be a Descale record, such as Descale(k=0.5), got {arguments.describe(descale)}")
    if k.dtype not in EIGHT_BITS:
        raise ValueError(f"descale is for 8-bit operands, got q {q.dtype}, k {k.dtype} and v {v.dtype}: omit it")
    given = () if descale is None else (descale.q, descale.k, descale.v, descale.shift)
    names = ("q", "k", "v", "descale.q", "descale.k", "descale.v", "descale.shift")
    fixed = {
        name: x
        for name, x in zip(names, (q, k, v, *given), strict=False)
        if isinstance(x, Tensor) and (name not in "qkv" or x.dtype in EIGHT_BITS)
    }
    if needs_gradient(*fixed.values()):
        if descale is None or descale.backward is None:
            raise Unsupported(eight_bit_gradients(q, k, v))
        of = ", ".join(f"{name} {x.dtype} {tuple(x.shape)}" for name, x in fixed.items() if needs_gradient(x))
        raise Unsupported(f"8-bit operands and their factors have no gradients: pass {of} without one, by .detach()")
    sizes = layout.sizes(q, k)
    shape = sizes.b, layout.canonical(k).shape[1], sizes.s_q if layout.knows_rows else None, sizes.s_k
    try:
        found = factors(descale, q.device, q.dtype in EIGHT_BITS, shape, not isinstance(layout, Dense))
    except ValueError as error:
        raise ValueError(f"{error}: {_shapes(q, k, v, layout)}") from None
    if found.backward and layout.starts_k is not None and not _one_for_all(found):
        raise ValueError(
            "with ranges of keys (starts_k), of which several sequences may share a row, backward='dequantized' needs "
            f"a descale of k and v that is a number, () or (h_k,): {_shapes(q, k, v, layout)}"
        )
    return found


def _one_for_all(found: Factors) -> bool:
    """Whether all sequences, and blocks, share the factors of k and v."""
    of_keys = [x for x in (found.k, found.v) if x is not None]
    return all(x.shape[2] == 1 and (x.shape[0] == 1 or x.stride(0) == 0) for x in of_keys)


def _check_shift(shift: Tensor, q: Tensor, layout: Layout, others: dict[str, Any]) -> None:
    """What smoothed keys go with."""
    for name, x in others.items():
        if x is not None:
            raise ValueError(
                f"descale.shift says that the scores of smoothed keys lack a term, and {name} needs exact scores: "
                f"omit {name}, or quantize(…, smooth_k=False)"
            )
    shape = tuple(layout.ordered_lse(layout.canonical(q)[..., 0]).shape)
    if shift.shape != shape or shift.device != q.device:
        got = f"{tuple(shift.shape)} on {shift.device}"
        raise ValueError(f"descale.shift must have the LSE's shape {shape} on q's device {q.device}, got {got}")


def _shapes(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> str:
    return f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} in order {layout.order}"


def autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Inside torch.autocast, attention runs in the low precision, as torch's own does."""
    device = q.device.type
    if device not in ("cpu", "cuda", "xpu", "hpu", "mps") or not torch.is_autocast_enabled(device):
        return q, k, v
    low = torch.get_autocast_dtype(device)
    kept = torch.float64, *EIGHT_BITS
    cast = (x.to(low) if x.is_floating_point() and x.dtype not in kept else x for x in (q, k, v))
    return tuple(cast)  # pyright: ignore[reportReturnType]


def _check_tensors(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, layout: Layout, sink: Tensor | None, tensors: tuple[Tensor, ...]
) -> None:
    """The tensors of layout and mask, and the sink."""
    for tensor in tensors:
        if tensor.device != q.device:
            raise ValueError(f"the tensors of layout and mask must be on q's device {q.device}, got {tensor.device}")
    if arguments.has_dtensor(*tensors) and not arguments.has_dtensor(q):
        raise TypeError("a tensor of layout or mask is a DTensor, and q is not: pass its x.to_local()")
    error = layout.mask_error(mask, q, k) if tensors or (mask is not None and mask.block_sparse) else None
    if sink is not None and not error:
        error = sink_error(sink, layout.canonical(q).shape[1], q.device)
    if error:
        raise arguments.refusal(q if sink is None else sink, f"{error}: {_shapes(q, k, v, layout)}")


def _check_out(out: Tensor, q: Tensor, v: Tensor, layout: Layout, cache: Any) -> None:
    if error := layout.out_error(out):
        raise TypeError(error)
    shape = (*q.shape[:-1], v.shape[-1])
    dtypes = (torch.bfloat16, torch.float16) if q.dtype in EIGHT_BITS else (q.dtype,)
    if out.shape != shape or out.dtype not in dtypes or out.device != q.device:
        got = f"{out.dtype} {tuple(out.shape)} on {out.device}"
        raise ValueError(f"out must be {' or '.join(map(str, dtypes))} {shape} on {q.device}, got {got}")
    if out.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"out {tuple(out.shape)} is written to, and must not require a gradient: pass out.detach()")
    if memory_layout.negated(out):
        raise ValueError(
            f"out {tuple(out.shape)} is a view of negated numbers: pass its own tensor, such as torch.empty_like(out)"
        )
    if out.stride(-1) != 1 and out.shape[-1] != 1:
        raise ValueError(f"the last dimension of out must be contiguous, got strides {out.stride()}")
    if isinstance(cache, LatentCache):  # whose rows a call reads beforehand
        memory_layout.refuse_shared("out", out, [("k", cache.bytes)])


def _bind_score(score_mod: Any, q: Tensor, k: Tensor, layout: Layout) -> Score:
    given = layout.sizes(q, k)
    sizes = layout.function_sizes(given)
    given_mod = score_mod.fn if isinstance(score_mod, Traced) else score_mod
    error = scores.complaint(given_mod, sizes._replace(exact=layout.rectangular and not layout.positioned))
    score = None if error else scores.bind(score_mod, q)
    if score is not None:
        error = scores.short(score.identity, score.tensors, sizes)
    if max(given.s_q, given.s_k) > scores.LONGEST:
        error = f"score functions take lengths up to {scores.LONGEST}, got {given.s_q} and {given.s_k}"
    if isinstance(score, Traced):
        error = error or layout.reach_error(given)
        if isinstance(layout, layouts.SlotRows) and (taken := score.program.inputs & {"b", "q_idx", "kv_idx"}):
            error = f"keys in slots have no numbers, and score_mod depends on {', '.join(sorted(taken))}"
    if error or score is None:
        if sizes.s_q != given.s_q:
            error = f"{error} (functions take the positions of rows and keys: {layout!r})"
        raise ValueError(f"{error}: q {tuple(q.shape)}, k {tuple(k.shape)} in order {layout.order}")
    return score
