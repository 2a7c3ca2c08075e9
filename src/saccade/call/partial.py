"""The results of attention that are more than out, and how Partials over some of the keys become one."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import _register_namedtuple

from saccade.layouts import Dense
from saccade.util import arguments

_DTYPES = torch.float16, torch.bfloat16, torch.float32, torch.float64


class Partial(NamedTuple):
    """`out` and the log-sum-exp of its scores. `merge` joins Partials over disjoint keys."""

    out: Tensor
    """softmax(scores) v, in the layout and dtype of q."""
    lse: Tensor
    """log sum exp(scores): natural log, float32 (float64 for float64 inputs), (b, h_q, s_q) whatever the layout."""


class Scored(NamedTuple):
    """The result of `attention` with `return_max_scores=True`."""

    out: Tensor
    """softmax(scores) v, in the layout and dtype of q."""
    lse: Tensor | None
    """The LSE, as in a `Partial`, with `return_lse`; else None."""
    max_scores: Tensor
    """`max_j score[b, h, i, j]`, the largest score that each row sees, after scale and score_mod: natural units,
    float32 (float64 for float64 inputs), (b, h_q, s_q) whatever the layout, packed (h_q, t_q). -inf where a row sees no
    key; the sink is no score. It has no gradient."""


for _record in (Partial, Scored):  # torch.export.save keeps what a model returns by a name
    _register_namedtuple(_record, serialized_type_name=f"saccade.{_record.__name__}")


def finite(x: Tensor) -> Tensor:
    """The highest number for +inf, which a sink may be, and the LSE with it: a difference of two would be NaN."""
    return torch.where(x == torch.inf, torch.finfo(x.dtype).max, x)


def infinite(lse: Tensor, top: Tensor) -> Tensor:
    """+inf for an LSE whose `top` is the highest number, the inverse of `finite`; what is NaN stays NaN."""
    return torch.where(top == torch.finfo(top.dtype).max, lse + torch.inf, lse)


def merge(*partials: Partial, layout: Dense | None = None) -> Partial:
    """`lse = log sum_i exp(lse_i)`, `out = sum_i exp(lse_i - lse) out_i`: attention over the union of disjoint keys.

    Split-KV decoding, shared prefixes and ring attention are all this one function. Differentiable in every `out` and
    `lse`; exact to rounding for any split of the keys. Of the Partials exactly one may carry a sink.

    Args:
        partials: as `attention(..., return_lse=True)` returns them, all of one shape.
        layout: the Dense layout that `out` is in; its order says where the heads and rows are. Default "bhsd".

    Returns:
        A Partial with the first one's dtypes. Rows that no Partial has keys for are `out = 0`, `lse = -inf`.

    Raises:
        ValueError: no Partials, or shapes, dtypes or devices that do not fit one another.
        TypeError: an argument that is not a Partial.

    >>> q, k, v = (torch.randn(1, 2, 8, 4) for _ in range(3))
    >>> from saccade import attention
    >>> left = attention(q, k[:, :, :3], v[:, :, :3], return_lse=True)
    >>> right = attention(q, k[:, :, 3:], v[:, :, 3:], return_lse=True)
    >>> torch.allclose(merge(left, right).out, attention(q, k, v), atol=1e-5)
    True
    """
    if not partials:
        raise ValueError("merge needs at least one Partial")
    for partial in partials:
        if not isinstance(partial, tuple) or len(partial) != 2 or not all(isinstance(x, Tensor) for x in partial):
            raise TypeError(f"merge takes Partials, (out, lse) of two tensors, got {arguments.describe(partial)}")
    if not isinstance(layout, (Dense, type(None))):
        raise TypeError(f"layout must be a Dense record, got {arguments.describe(layout)}")
    layout = layout or Dense()
    partials = tuple(Partial(*partial) for partial in partials)
    if len(sequence_slices := {x.device for partial in partials for x in partial}) > 1:
        raise ValueError(f"merge needs Partials on one device, got {', '.join(sorted(map(str, sequence_slices)))}")
    if wrong := [x.dtype for partial in partials for x in partial if x.dtype not in _DTYPES]:
        raise ValueError(f"merge needs Partials of float16, bfloat16, float32 or float64, got {wrong[0]}")
    if any(partial.out.dim() != 4 for partial in partials):
        raise ValueError(
            f"merge needs out of four dimensions, got {', '.join(str(tuple(p.out.shape)) for p in partials)}"
        )
    dtype, first = partials[0].lse.dtype, layout.canonical(partials[0].out)
    for out, lse in partials:
        rows = tuple(layout.canonical(out).shape[:-1])
        if out.shape != partials[0].out.shape or lse.shape != partials[0].lse.shape or rows != tuple(lse.shape):
            shapes = ", ".join(f"out {tuple(o.shape)} with lse {tuple(m.shape)}" for o, m in partials)
            raise ValueError(
                f"merge needs Partials of one shape, out {layout.order} and lse (b, h, s), got {shapes}; "
                "pass layout=Dense('bshd') or Dense('sbhd') if out is in that order"
            )
    lses = finite(torch.stack([lse for _, lse in partials]))
    top = lses.amax(0).detach()
    top = torch.where(top == -torch.inf, 0, top)
    weights = (lses - top).exp()
    total = weights.sum(0)
    empty = total == 0
    weights = weights / torch.where(empty, 1, total)
    out = torch.zeros_like(first, dtype=dtype)
    for weight, partial in zip(weights, partials, strict=True):
        out = out + weight[..., None] * layout.canonical(partial.out).to(dtype)
    lse = infinite(torch.where(empty, -torch.inf, top + torch.where(empty, 1, total).log()), top)
    return Partial(layout.ordered(out).to(partials[0].out.dtype), lse)
