"""The public functions `attention` and `explain`."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, cast, overload

import torch
from torch import Tensor

from saccade import ops, scores
from saccade.backends import Outputs
from saccade.call import Call, check_call
from saccade.call.descale import Descale
from saccade.call.partial import Partial, Scored
from saccade.call.spec import Spec
from saccade.layouts import Dense, LatentCache, Layout
from saccade.masks import Mask
from saccade.ops import dispatch, replay
from saccade.ops.explanation import Explanation
from saccade.ops.replay import CallKey
from saccade.util import arguments
from saccade.util.imports import after_import

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
    q: Tensor, k: Tensor | LatentCache, v: Tensor | LatentCache, *, return_lse: Literal[False] = False,
    return_max_scores: Literal[False] = False, **options: Unpack[_Options],
) -> Tensor: ...  # fmt: skip


@overload
def attention(
    q: Tensor, k: Tensor | LatentCache, v: Tensor | LatentCache, *,
    return_lse: Literal[True], return_max_scores: Literal[False] = False,
    **options: Unpack[_Options],
) -> Partial: ...  # fmt: skip


@overload
def attention(
    q: Tensor, k: Tensor | LatentCache, v: Tensor | LatentCache, *,
    return_lse: bool = False, return_max_scores: Literal[True],
    **options: Unpack[_Options],
) -> Scored: ...  # fmt: skip


def attention(
    q: Tensor,
    k: Tensor | LatentCache,
    v: Tensor | LatentCache,
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
        q: (b, h_q, s_q, d) in the order of `layout`, or packed (t_q, h_q, d). The dtype is float16, bfloat16, float32,
            float64 (CPU only), or float8_e4m3fn or float8_e5m2, and then k and v have it too. Any strides. q, k and v
            may be DTensors that are sharded alike along batch rows or heads, or replicated. The results are DTensors
            then.
        k: (b, h_k, s_k, d), or a cache of pages (pages, page_size, h_k, d). It has q's device, and q's dtype or 8 bits.
        v: (b, h_k, s_k, d_v); d_v may differ from d.
        mask: which keys a query sees. `causal()`, `window(left, right)`, `prefix(n)`, `documents(ids)` and predicates,
            `mask_mod(fn)`, combine with `&`, `|` and `~`. It may also be a bool tensor that broadcasts to
            (b, h_q, s_q, s_k), True where a query sees a key, or torch's BlockMask. With None all see all.
        score_mod: a function `(score, b, h, q_idx, kv_idx) -> score` of pointwise torch operations that changes a
            scaled score, or a ready one such as `softcap(50.0)`. It may capture tensors, which get gradients, and
            numbers. Each call computes what the function would compute in that call. New values never recompile. See
            `ScoreMod`.
        layout: `Dense("bhsd")`, "bshd" or "sbhd", with lengths for padded batches; `Packed(…)` for concatenated
            sequences; `Paged(…)` for keys and values in the pages of a cache. Nested (jagged) tensors are packed
            sequences. They need no layout except their order, and out is nested too.
        scale: factor on q k^T; 1/sqrt(d) when None. A finite float32 number, or a tensor of one number that needs no
            gradient.
        sink: (h_q) logits of any float dtype. Each is one more column of the softmax, with a value of zero. It is
            neither scaled nor modified. It gets a gradient, and the LSE includes it.
        dropout_p: the probability, in [0, 1), with which a weight becomes zero. The others are divided by
            `1 - dropout_p`. Each call draws anew from torch's generator of q's device. The LSE is unaffected. A new
            value never recompiles.
        return_lse: returns a `Partial(out, lse)` instead of out alone.
        return_max_scores: returns a `Scored(out, lse, max_scores)`, with the largest score that each row sees, after
            scale and score_mod.
        deterministic: makes gradients bitwise equal from run to run. None follows
            `torch.are_deterministic_algorithms_enabled()`. The forward is always deterministic.
        backend: "auto", or a name out of `saccade.ops.dispatch.NAMES`. A named backend runs the call or raises.
        out: a tensor of the result's shape and dtype. The result is written to it, and it is returned. Its last
            dimension is contiguous. It shares no memory with an input; interleaved slices of one tensor share none.
            Over pages, rows after the last sequence of `cu_seqlens_q` keep their values. Only for calls without
            gradients.
        descale: the factors of 8-bit q, k and v. See `Descale`, which also says which gradients there are.
        context: the plan of sequences that many ranks share; q, k and v are this rank's rows. See
            `saccade.distributed.plan`.

    Returns:
        out, (b, h_q, s_q, d_v) in q's layout, dtype and memory order. For 8-bit q it is bfloat16, or has the dtype of
        the argument `out`. With `return_lse`, a Partial. Its lse is (b, h_q, s_q) for every order, or packed
        (h_q, t_q), in natural log, float32 (float64 for float64 inputs), and differentiable. A row that sees no key
        has `out = 0`, `lse = -inf` (or its sink) and zero gradients. With `return_max_scores`, a Scored. Its
        max_scores have the shape of lse and no gradient.

    Raises:
        ValueError: shapes, dtypes or devices do not match. The message quotes them.
        TypeError: an argument has the wrong type.
        Unsupported: no backend runs the call. The message has a reason per backend, as `explain` has. Also for second
            derivatives and forward mode, which only "reference" has.

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
        arguments.tensors(k=k, v=v)
        assert isinstance(k, Tensor)
        assert isinstance(v, Tensor)
        result, lse, max_scores = context.attention(
            q, k, v, mask=mask, score_mod=score_mod, layout=layout, scale=scale, sink=sink, dropout_p=dropout_p,
            return_lse=return_lse, return_max_scores=return_max_scores, deterministic=deterministic, backend=backend,
            out=out, descale=descale,
        )  # fmt: skip
        return _returned(result, lse, max_scores, return_lse, return_max_scores)
    found, bound = None, score_mod
    if isinstance(q, Tensor) and not torch.compiler.is_compiling() and not replay.on_host(q):
        flags = return_lse, return_max_scores, deterministic
        given = mask, score_mod, layout, scale, sink, dropout_p, flags, backend, out, descale
        found, values = replay.of_arguments(q, k, v, *given)
        if found is not None and found.replay is not None and (results := ops.replayed(found)) is not None:
            result, lse, max_scores = results
            return _returned(result if out is None else out, lse, max_scores, return_lse, return_max_scores)
        bound = scores.of_values(score_mod, values)
    call = check_call(
        q, k, v, mask=mask, score_mod=bound, layout=layout, scale=scale, sink=sink, dropout_p=dropout_p,
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


def _runs_whole() -> None:
    """Has Dynamo leave a call alone that it could not trace, such as one that is refused: it would trace the frames of
    its inside one by one. A torch without these names compiles all the same."""
    try:
        from torch._dynamo import eval_frame
        from torch._dynamo.types import FrameAction, FrameExecStrategy  # pyright: ignore[reportPrivateImportUsage]
    except ImportError:
        return
    for function in (check_call, _run):
        eval_frame.set_code_exec_strategy(function.__code__, FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP))  # pyright: ignore[reportPrivateImportUsage]


after_import("torch._dynamo.eval_frame", _runs_whole)


def _returned(
    out: Tensor, lse: Tensor | None, max_scores: Tensor | None, return_lse: bool, return_max_scores: bool
) -> Tensor | Partial | Scored:
    if return_max_scores:
        return Scored(out, lse if return_lse else None, cast(Tensor, max_scores))
    return Partial(out, cast(Tensor, lse)) if return_lse else out


def explain(q: Tensor | str, *operands: Any, backend: str = "auto", **keywords: Any) -> Explanation:
    """An Explanation: the backend that runs a call, and why the others do not.

    Args:
        q: the arguments of `attention`, of which this is the first; or the text of a Spec, such as
            "bf16 d128 aligned sm90". `aligned` means that rows start at multiples of 16 bytes.

    Raises:
        ValueError: `attention` would refuse the arguments, or the text is not a Spec.

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
    """`explain(…).plan`. Deprecated: the next version removes this name."""
    warnings.warn("saccade.plan(…) is explain(…).plan now, and goes with the next version", DeprecationWarning, 2)
    return explain(q, *operands, backend=backend, **keywords).plan


_SIGNATURE = inspect.signature(attention)


def _planned(q: Tensor | str, operands: tuple[Any, ...], backend: str, keywords: dict[str, Any]) -> Spec | Call:
    """The Spec of a text, or the checked Call of `attention`'s arguments."""
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
        raise TypeError("explain describes calls in one process: omit context, and print(context.explain()) instead")
    call = check_call(**bound.arguments, runs=False)
    if arguments.has_dtensor(*call.differentiable()):
        raise TypeError("explain describes calls in one process: pass one rank's part of DTensors, x.to_local()")
    return call
