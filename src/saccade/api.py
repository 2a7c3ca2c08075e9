"""The one call."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, cast, overload

import torch
from torch import Tensor

from saccade import ops
from saccade.backends import Outputs
from saccade.call import Call, check_call
from saccade.call.descale import Descale
from saccade.call.partial import Partial, Scored
from saccade.call.spec import Spec
from saccade.layouts import Dense, Layout
from saccade.masks import Mask
from saccade.ops import dispatch, replay
from saccade.ops.explanation import Explanation
from saccade.ops.replay import CallKey
from saccade.util import arguments

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from saccade.distributed import ContextPlan

_BHSD = Dense()
ScoreFunction = Callable[..., Tensor]
"""(score, b, h, q_idx, kv_idx) -> score"""


class _Options(TypedDict, total=False):
    """The arguments of `attention` that do not change what it returns."""

    mask: Mask | Tensor | BlockMask | None
    score_mod: ScoreFunction | None
    layout: Layout
    scale: float | None
    sink: Tensor | None
    dropout_p: float
    deterministic: bool | None
    backend: str
    out: Tensor | None
    descale: Descale | None
    context: ContextPlan | None


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = False,
    return_max_scores: Literal[False] = False, **options: Unpack[_Options],
) -> Tensor: ...  # fmt: skip


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], return_max_scores: Literal[False] = False,
    **options: Unpack[_Options],
) -> Partial: ...  # fmt: skip


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = False, return_max_scores: Literal[True],
    **options: Unpack[_Options],
) -> Scored: ...  # fmt: skip


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
    descale: Descale | None = None,
    context: ContextPlan | None = None,
) -> Tensor | Partial | Scored:
    """`out = dropout(softmax(mask(score_mod(scale q k^T)))) v`, fused, differentiable, in memory linear in the lengths.

    Order of operations: scale, score_mod, mask, sink, softmax, dropout. Query heads share key heads when `h_q` is a
    multiple of `h_k` (GQA, MQA): query head i reads key head `i // (h_q // h_k)`.

    Args:
        q: (b, h_q, s_q, d) in the order that `layout` says, or packed (t_q, h_q, d); float16, bfloat16, float32, or
            float64 on the CPU; float8_e4m3fn or float8_e5m2, as k and v then are. Any strides. Or all three
            DTensors, sharded alike along batch rows or heads, or replicated; results are DTensors too.
        k: (b, h_k, s_k, d), or a cache of pages (pages, page_size, h_k, d); dtype and device of q, or 8 bits.
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
        scale: factor on q k^T; 1/sqrt(d) when None. A number, finite as a float32; a tensor of one, as long as it
            needs no gradient.
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
        backend: "auto", or one name out of `saccade.ops.dispatch.NAMES`: that backend runs or raises.
        out: a tensor of the result's shape and dtype that it is written to, and that is returned; its last dimension
            is contiguous, and it shares no memory with what the call reads; slices of one tensor that lie between one
            another do not. Over pages, rows after the last sequence of `cu_seqlens_q` stay as they are. For calls
            without gradients.
        descale: what 8-bit k and v, and 8-bit q, stand for: see `Descale`, which also says what has gradients then.
        context: q, k and v are one rank's rows of sequences that many ranks share: see `saccade.distributed.plan`.

    Returns:
        out, (b, h_q, s_q, d_v) in q's layout, dtype and memory order; of 8-bit q in bfloat16, or in the dtype of
        `out`, which may be float16. With `return_lse`, a Partial whose lse is
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
    if context is not None:
        if not hasattr(context, "attention"):
            raise TypeError(f"context must be a plan of saccade.distributed.plan, got {arguments.describe(context)}")
        result, lse, max_scores = context.attention(
            q, k, v, mask=mask, score_mod=score_mod, layout=layout, scale=scale, sink=sink, dropout_p=dropout_p,
            return_lse=return_lse, return_max_scores=return_max_scores, deterministic=deterministic, backend=backend,
            out=out, descale=descale,
        )  # fmt: skip
        return _returned(result, lse, max_scores, return_lse, return_max_scores)
    found = None
    if isinstance(q, Tensor) and not torch.compiler.is_compiling() and not replay.on_host(q):
        flags = return_lse, return_max_scores, deterministic
        given = mask, score_mod, layout, scale, sink, dropout_p, flags, backend, out, descale
        found = replay.of_arguments(q, k, v, *given)
        if found is not None and found.replay is not None and (results := ops.replayed(found)) is not None:
            result, lse, max_scores = results
            return _returned(result if out is None else out, lse, max_scores, return_lse, return_max_scores)
    call = check_call(
        q, k, v, mask=mask, score_mod=score_mod, layout=layout, scale=scale, sink=sink, dropout_p=dropout_p,
        return_lse=return_lse, return_max_scores=return_max_scores, deterministic=deterministic, backend=backend,
        out=out, descale=descale,
    )  # fmt: skip
    shift = None if descale is None else descale.shift  # of smoothed keys
    if shift is not None and out is not None:
        shift = shift.clone()  # out may be written over it
    result, lse, max_scores = _run(call, score_mod, backend, return_lse, found)
    if shift is not None:
        lse = cast(Tensor, lse) + call.scale * shift if return_lse else None
        max_scores = cast(Tensor, max_scores) + call.scale * shift if return_max_scores else None
    if out is not None:
        result = out
    elif call.layout is not layout:  # that of nested tensors
        result = call.layout.wrap_out(result)
    return _returned(result, lse, max_scores, return_lse, return_max_scores)


def _run(call: Call, score_mod: Any, backend: str, lse: bool, found: CallKey | None) -> Outputs:
    if (results := ops.run_directly(call, backend, lse, found)) is not None:
        return results
    if arguments.has_dtensor(*call.differentiable()):
        from saccade.distributed import dtensor  # which imports torch.distributed

        return dtensor.run(call, score_mod, backend, lse)
    return ops.run_by_operator(call, backend, lse)


def _returned(
    out: Tensor, lse: Tensor | None, max_scores: Tensor | None, return_lse: bool, return_max_scores: bool
) -> Tensor | Partial | Scored:
    if return_max_scores:
        return Scored(out, lse if return_lse else None, cast(Tensor, max_scores))
    return Partial(out, cast(Tensor, lse)) if return_lse else out


def explain(q: Tensor | str, *operands: Any, backend: str = "auto", **keywords: Any) -> Explanation:
    """Which backend runs a call, and one line of reason for each that does not.

    Args:
        q: the first of `attention`'s arguments, followed by the others; or a Spec's text alone, such as
            "bf16 d128 aligned sm90", which is `aligned` where rows start at multiples of 16 bytes.

    Raises:
        ValueError: arguments that `attention` would refuse, or text that is not a Spec.

    >>> print(explain("fp32 d64 causal cpu"))
    fp32 d64 dense causal cpu
      gluon: runs on sm90, not on cpu; takes fp16, bf16, fp8_e4m3, fp8_e5m2, not fp32
      triton: runs on sm80+, gfx90a, gfx942, gfx950, not on cpu
      cpu: chosen
      cudnn: runs on sm80+, not on cpu; takes fp16, bf16, not fp32
      reference: runs it, not chosen
      memory besides the outputs: a few tiles of scores, at most 16 MB for each thread
    """
    return Explanation(_planned(q, operands, backend, keywords), backend)


def plan(q: Tensor | str, *operands: Any, backend: str = "auto", **keywords: Any) -> dispatch.Plan:
    """`explain(…).plan`, which takes its place: this name goes with the next version."""
    warnings.warn("saccade.plan(…) is explain(…).plan now, and goes with the next version", DeprecationWarning, 2)
    return explain(q, *operands, backend=backend, **keywords).plan


_SIGNATURE = inspect.signature(attention)


def _planned(q: Tensor | str, operands: tuple[Any, ...], backend: str, keywords: dict[str, Any]) -> Spec | Call:
    """The call of these arguments of `attention`, or of a Spec's text, to plan."""
    if isinstance(q, str):
        if operands or keywords:
            got = ", ".join([*map(arguments.describe, operands), *(f"{name}=" for name in keywords)])
            raise TypeError(f"explain takes a Spec's text alone, and a backend, got {got} beside {q!r}")
        return Spec.parse(q)
    try:
        bound = _SIGNATURE.bind(q, *operands, backend=backend, **keywords)
    except TypeError as error:
        raise TypeError(f"explain takes the arguments of attention, or a Spec's text: {error}") from None
    bound.apply_defaults()
    if bound.arguments.pop("context") is not None:
        raise TypeError("explain is of calls in one process: omit context, and print(context.explain())")
    call = check_call(**bound.arguments, runs=False)
    if arguments.has_dtensor(*call.differentiable()):
        raise TypeError("explain is of calls in one process: pass one rank's part of DTensors, x.to_local()")
    return call
