"""The one call."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, cast, overload

import torch
from torch import Tensor

from saccade import arguments, dispatch, ops, scores
from saccade.dropout import Dropout
from saccade.explanation import Explanation
from saccade.layouts import ORDERS, Dense, Layout, Packed, Paged, nested, validate, with_rows
from saccade.masks import Mask, as_mask
from saccade.partial import Partial, Scored
from saccade.problem import Problem, flattened
from saccade.spec import DTYPES, Spec

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_BHSD = Dense()
_LEARNED_SCALE = (
    ": multiply q by it, attention(q * scale, …, scale=1.0), or give "
    "score_mod=lambda score, b, h, q_idx, kv_idx: score * scale and scale=1.0"
)
ScoreFunction = Callable[..., Tensor]
"""(score, b, h, q_idx, kv_idx) -> score"""


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | Tensor | BlockMask | None = None,
    score_mod: ScoreFunction | None = None,
    layout: Layout = _BHSD,
    scale: float | None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    return_lse: Literal[False] = False,
    return_max_scores: Literal[False] = False,
    deterministic: bool | None = None,
    backend: str = "auto",
    out: Tensor | None = None,
) -> Tensor: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | Tensor | BlockMask | None = None,
    score_mod: ScoreFunction | None = None,
    layout: Layout = _BHSD,
    scale: float | None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    return_lse: Literal[True],
    return_max_scores: Literal[False] = False,
    deterministic: bool | None = None,
    backend: str = "auto",
    out: Tensor | None = None,
) -> Partial: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | Tensor | BlockMask | None = None,
    score_mod: ScoreFunction | None = None,
    layout: Layout = _BHSD,
    scale: float | None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    return_max_scores: Literal[True],
    deterministic: bool | None = None,
    backend: str = "auto",
    out: Tensor | None = None,
) -> Scored: ...


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | Tensor | BlockMask | None = None,
    score_mod: ScoreFunction | None = None,
    layout: Layout = _BHSD,
    scale: float | None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    return_max_scores: bool = False,
    deterministic: bool | None = None,
    backend: str = "auto",
    out: Tensor | None = None,
) -> Tensor | Partial | Scored:
    """`out = dropout(softmax(mask(score_mod(scale q k^T)))) v`, fused, differentiable, in memory linear in the lengths.

    Order of operations: scale, score_mod, mask, sink, softmax, dropout. Query heads share key heads when `h_q` is a
    multiple of `h_k` (GQA, MQA): query head i reads key head `i // (h_q // h_k)`.

    Args:
        q: (b, h_q, s_q, d) in the order that `layout` says, or packed (t_q, h_q, d); float16, bfloat16, float32, or
            float64 on the CPU. Any strides.
        k: (b, h_k, s_k, d), or a cache of pages (pages, page_size, h_k, d); dtype and device of q.
        v: (b, h_k, s_k, d_v); d_v may differ from d.
        mask: who may attend to whom: `causal()`, `window(left, right)`, `prefix(n)`, `documents(ids)`, and any
            predicate by `mask_mod(fn)`, combined with `&`, `|` and `~`; a bool tensor that broadcasts to
            (b, h_q, s_q, s_k), True where a query sees a key; or torch's BlockMask. None: everyone to everyone.
        score_mod: how a scaled score changes: any function `(score, b, h, q_idx, kv_idx) -> score` of pointwise torch
            operations, with the tensors and numbers that it captures, or a ready one, e.g. `softcap(50.0)`. A call
            has what the function would compute at that call; captured tensors get gradients, and new values never
            recompile. See `ScoreMod`.
        layout: `Dense("bhsd")`, "bshd" or "sbhd", with used lengths for padded batches; `Packed(…)` for sequences of
            different lengths, end to end; `Paged(…)` for keys and values in the pages of a cache. Nested (jagged)
            tensors are packed sequences that need no layout but their order; out is nested as well.
        scale: factor on q k^T; 1/sqrt(d) when None. A number; a tensor of one, as long as it needs no gradient.
        sink: (h_q) logits, any float dtype, one more column of the softmax whose value is zero; neither scaled nor
            modified. It gets a gradient. The LSE includes it.
        dropout_p: the share of probabilities that become zero, in [0, 1); the others are divided by `1 - dropout_p`.
            Drawn anew in each call, by torch's generator of q's device; the LSE is that of all of them. A new value
            never recompiles.
        return_lse: return a `Partial(out, lse)` instead of out alone.
        return_max_scores: return a `Scored(out, lse, max_scores)`, with the largest score that each row sees, after
            scale and score_mod; for trainers that watch or clip it.
        deterministic: gradients bitwise equal from run to run; None follows
            `torch.are_deterministic_algorithms_enabled()`. The forward always is.
        backend: "auto", or one name out of `saccade.dispatch.NAMES`: that backend runs or raises.
        out: a tensor of the result's shape and dtype that it is written to, and that is returned; its last dimension
            is contiguous, and it shares no memory with what the call reads; slices of one tensor that lie between one
            another do not. For calls without gradients.

    Returns:
        out, (b, h_q, s_q, d_v) in q's layout, dtype and memory order. With `return_lse`, a Partial whose lse is
        (b, h_q, s_q) whatever the order, or packed (h_q, t_q): natural log, float32 (float64 for float64 inputs),
        differentiable. A row that sees no key has `out = 0`, `lse = -inf` (or its sink) and zero gradients. With
        `return_max_scores`, a Scored, whose max_scores have the form of lse and no gradient.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit one another; the message quotes them.
        TypeError: an argument that is not the record it should be.
        Unsupported: no backend runs the call, with one line of reason for each; see `explain`. Or a second derivative,
            or one in forward mode, of another backend than "reference".

    Sources: Dao et al., FlashAttention (arXiv 2205.14135) and FlashAttention-2 (arXiv 2307.08691); sinks: Xiao et al.,
    arXiv 2309.17453.

    >>> q, k, v = torch.randn(2, 8, 128, 64), torch.randn(2, 2, 128, 64), torch.randn(2, 2, 128, 64)
    >>> attention(q, k, v, mask=causal() & window(63, None)).shape
    torch.Size([2, 8, 128, 64])
    >>> out, lse = attention(q, k, v, return_lse=True)
    >>> lse.shape, lse.dtype
    (torch.Size([2, 8, 128]), torch.float32)
    >>> scale = 1 / 8
    >>> top = attention(q[:, :2], k, v, scale=scale, return_max_scores=True).max_scores
    >>> torch.allclose(top, (q[:, :2] @ k.mT * scale).amax(-1), atol=1e-5)
    True
    """
    arguments.flags(return_lse=return_lse, return_max_scores=return_max_scores, deterministic=deterministic)
    jagged = isinstance(q, Tensor) and q.is_nested
    order = layout.order if jagged else ""
    if jagged:
        q, k, v, layout = nested.values(q, k, v, layout)
    mask = _bound_mask(mask, backend)
    q, k, v = _checked(q, k, v, mask, score_mod, layout, sink, dropout_p)
    if out is not None:
        _check_out(out, q, v, jagged)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else arguments.number("scale", scale, _LEARNED_SCALE)
    deterministic = _determined(deterministic)
    score = _bound(score_mod, q, k, layout)
    dropout = Dropout.draw(float(dropout_p), q.device)
    captures = score.tensors if score else ()
    if backend == "reference" or ops.runs_directly(q, k, v, sink, *captures):
        operands = layout.canonical(q), layout.canonical(k), layout.canonical(v)
        if out is not None:
            ops.refuse_gradients(q, k, v, sink, *captures)
        given = None if out is None else layout.canonical(out)
        options = dropout, 0, given, return_max_scores
        problem = Problem(*operands, sink, mask, score, layout, scale, deterministic, *options)
        found, lse, top = ops.execute(problem, backend, return_lse)
    else:
        flags = {"backend": backend, "deterministic": deterministic, "max_scores": return_max_scores}
        header, records, ints, floats = flattened(layout, mask, score, scale, dropout, **flags)
        flat = q, k, v, sink, captures, records, str(header), ints, floats, bool(return_lse)
        if out is None:
            found, lse, top = ops.forward(*flat)
        else:
            found, (lse, top) = out, ops.forward_out(out, *flat)
    if jagged:
        assert isinstance(layout, Packed)
        found = nested.nested(found, layout, order)
    if out is not None:
        found = out
    if return_max_scores:
        return Scored(found, lse if return_lse else None, cast(Tensor, top))
    return Partial(found, cast(Tensor, lse)) if return_lse else found


def explain(q: Tensor | str, *operands: Any, backend: str = "auto", **keywords: Any) -> Explanation:
    """Which backend runs a call, and one line of reason for each that does not.

    Args:
        q: the first of `attention`'s arguments, followed by the others; or a Spec's text alone.

    Raises:
        ValueError: arguments that `attention` would refuse, or a text that is no Spec.

    >>> print(explain("fp32 d64 causal cpu"))
    fp32 d64 dense causal cpu
      gluon: runs on sm90, not on cpu; takes fp16, bf16, not fp32
      triton: runs on sm80+, gfx90a, gfx942, gfx950, not on cpu
      cpu: chosen
      cudnn: runs on sm80+, not on cpu; takes fp16, bf16, not fp32
      reference: runs it, not chosen
      memory besides the outputs: a few tiles of scores, at most 16 MB for each thread
    """
    return Explanation(_call(q, operands, keywords), backend)


def plan(q: Tensor | str, *operands: Any, backend: str = "auto", **keywords: Any) -> dispatch.Plan:
    """The Plan that `attention` would use: the same arguments, or a Spec's text.

    Raises:
        Unsupported: no backend runs it.

    >>> plan("bf16 d128 cpu").backend
    'cpu'
    """
    return dispatch.plan_for(_call(q, operands, keywords), backend)


def _call(q: Tensor | str, operands: tuple[Any, ...], keywords: dict[str, Any]) -> Spec | Problem:
    if isinstance(q, str):
        return Spec.parse(q)
    defaults = {"mask": None, "score_mod": None, "layout": _BHSD, "scale": None, "sink": None, "dropout_p": 0.0}
    defaults |= {"return_lse": False, "return_max_scores": False, "deterministic": None, "out": None}
    if unknown := keywords.keys() - defaults.keys():
        raise TypeError(f"attention has no argument {', '.join(sorted(unknown))}")
    given = defaults | keywords
    arguments.flags(**{name: given[name] for name in ("return_lse", "return_max_scores", "deterministic")})
    given["mask"] = as_mask(given["mask"])
    if given["mask"] is not None:
        given["mask"] = given["mask"].bound()
    layout, mask, score_mod, sink = (given[name] for name in ("layout", "mask", "score_mod", "sink"))
    if len(operands) != 2:
        raise TypeError(f"explain and plan take q, k and v, or a Spec's text, got {1 + len(operands)} operands")
    k, v = operands
    if isinstance(q, Tensor) and q.is_nested:
        q, k, v, layout = nested.values(q, k, v, layout)
    checked = _checked(q, k, v, mask, score_mod, layout, sink, given["dropout_p"])
    deterministic = _determined(given["deterministic"])
    views = [layout.canonical(x) for x in checked]
    score = _bound(score_mod, q, k, layout)
    dropout = Dropout(torch.empty(2, dtype=torch.int64), given["dropout_p"]) if given["dropout_p"] else None
    options = {"deterministic": deterministic, "dropout": dropout, "max_scores": given["return_max_scores"]}
    return Problem(views[0], views[1], views[2], sink, mask, score, layout, 1.0, **options)


def _bound_mask(mask: Any, backend: str) -> Mask | None:
    """The mask of this call; `reference` takes functions as they are."""
    made = as_mask(mask)
    return made if made is None or not made.listed or backend == "reference" else made.bound()


def _determined(asked: bool | None) -> bool:
    return torch.are_deterministic_algorithms_enabled() if asked is None else asked


def _bound(score_mod: ScoreFunction | None, q: Tensor, k: Tensor, layout: Layout) -> scores.Score | None:
    if score_mod is None:
        return None
    if isinstance(layout, Paged):
        sizes = validate.paged_sizes(layout, layout.canonical(q).shape, layout.capacity(k.shape[1]))
    elif isinstance(layout, Packed):
        sizes = scores.Sizes(
            layout.sequences, q.shape[1], *validate.longest(layout, q.shape[0], k.shape[0]), exact=False
        )
    else:
        b, h, s_q, _ = layout.canonical(q).shape
        sizes = scores.Sizes(b, h, s_q, layout.canonical(k).shape[2], exact=not layout.records)
    complaint = scores.complaint(score_mod, sizes._replace(exact=isinstance(layout, Dense)))
    score = None if complaint else scores.bind(score_mod, q)
    if score is not None:
        complaint = scores.short(score.identity, score.tensors, sizes)
    if max(sizes.s_q, sizes.s_k) > scores.LONGEST:
        complaint = f"score functions take lengths up to {scores.LONGEST}, got {sizes.s_q} and {sizes.s_k}"
    if complaint:
        raise ValueError(f"{complaint}: q {tuple(q.shape)}, k {tuple(k.shape)} in order {layout.order}")
    return score


def _checked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None,
    score_mod: ScoreFunction | None,
    layout: Layout,
    sink: Tensor | None,
    dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as a backend takes them, or an error that quotes their validate. In the hot path of small calls."""
    if not isinstance(layout, Layout):
        raise TypeError(f"layout must be a Dense, Packed or Paged record, such as Dense('bshd'), got {layout!r}")
    arguments.operands(q, k, v)
    flat = isinstance(layout, Packed)
    if not isinstance(layout, Paged) and not q.dim() == k.dim() == v.dim() == (3 if flat else 4):
        raise ValueError(f"q, k and v must have {'three' if flat else 'four'} dimensions: {_shapes(q, k, v, layout)}")
    q, k, v = _autocast(q, k, v)
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v must share one dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k and v must be on one device, got {q.device}, {k.device}, {v.device}")
    if q.dtype not in DTYPES:
        raise ValueError(f"attention takes float16, bfloat16, float32 and float64, got {q.dtype}")
    if isinstance(layout, Paged):
        complaint = validate.paged_complaint(q.shape, k.shape, v.shape, layout)
    else:
        b_dim, h_dim, s_dim = (None, 1, 0) if flat else ORDERS[layout.order][:3]
        complaint = validate.complaint(q.shape, k.shape, v.shape, b_dim, h_dim, s_dim)
    if complaint:
        raise ValueError(f"{complaint}: {_shapes(q, k, v, layout)}")
    if mask is not None or sink is not None or layout.records:
        _check_records(q, k, v, mask, layout, sink)
    if not isinstance(dropout_p, float):
        dropout_p = arguments.number("dropout_p", dropout_p)
    if dropout_p and not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p must be in [0, 1), got {dropout_p}; 1 would keep nothing, and out be zero")
    # Kernels read rows of contiguous elements; everything else about the strides is theirs to follow.
    return with_rows(q), with_rows(k), with_rows(v)


def _shapes(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> str:
    return f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} in order {layout.order}"


def _check_records(q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, layout: Layout, sink: Tensor | None) -> None:
    records = [*layout.records, *mask.records] if mask is not None else layout.records
    for tensor in records:
        if tensor.device != q.device:
            raise ValueError(f"the tensors of layout and mask must be on q's device {q.device}, got {tensor.device}")
    if not records and sink is None and (mask is None or not mask.listed):
        return
    rows, s_k = layout.canonical(q).shape, layout.canonical(k).shape[2]
    if isinstance(layout, Packed):
        complaint = validate.packed_complaint(mask, layout, rows, s_k)
    elif isinstance(layout, Paged):
        complaint = validate.paged_mask_complaint(
            mask, layout, validate.paged_sizes(layout, rows, layout.capacity(k.shape[1]))
        )
    else:
        complaint = mask.complaint(rows[0], rows[1], rows[2], s_k) if mask is not None and mask.listed else None
        if records and not complaint:
            complaint = validate.record_complaint(rows, s_k, mask, layout)
    if sink is not None and not complaint:
        complaint = validate.sink_complaint(sink, rows[1], q.device)
    if complaint:
        raise ValueError(f"{complaint}: {_shapes(q, k, v, layout)}")


def _check_out(out: Tensor, q: Tensor, v: Tensor, jagged: bool) -> None:
    wanted = (*q.shape[:-1], v.shape[-1])
    if not isinstance(out, Tensor) or jagged:
        raise TypeError(f"out must be a tensor, and q no nested one, got out {type(out).__name__}")
    if out.shape != wanted or out.dtype != q.dtype or out.device != q.device:
        got = f"{out.dtype} {tuple(out.shape)} on {out.device}"
        raise ValueError(f"out must be {q.dtype} {wanted} on {q.device}, got {got}")
    if out.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"out {tuple(out.shape)} is written to, and must not require a gradient: pass out.detach()")
    if out.stride(-1) != 1 and out.shape[-1] != 1:
        raise ValueError(f"the last dimension of out must be contiguous, got strides {out.stride()}")


def _autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Inside torch.autocast, attention runs in the low precision, as torch's own does."""
    device = q.device.type
    if device not in ("cpu", "cuda", "xpu", "hpu", "mps") or not torch.is_autocast_enabled(device):
        return q, k, v
    low = torch.get_autocast_dtype(device)
    made = (x.to(low) if x.is_floating_point() and x.dtype != torch.float64 else x for x in (q, k, v))
    return tuple(made)  # pyright: ignore[reportReturnType]
