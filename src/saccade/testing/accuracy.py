"""The one tolerance policy: how far from the exact answer a backend may be.

`exact` is the oracle in float64 on the inputs as they are. `eager` is the oracle in the dtype that the backend's scores
have, float32 for 16-bit inputs, with results rounded as the backend's are. `terms` is what is rounded on the way to an
element. A tensor x passes when

    max |x - exact| <= 2 (max |eager - exact| + eps/2 max terms)

and when the same holds for the root mean squares of the whole and of each row: of a row of d numbers of out, dq, dk, dv
and of what a score function captures, of each number of the LSE and of the largest scores. eps/2, of the inputs' dtype,
is what one rounding can do. So a fused kernel may be as wrong as twice the plain one, gradients that cancel to zero
have the rounding of what cancelled, and rows that are small beside others are looked at for themselves. No test holds
a number.

Roundings lean no way, so that a result which is a factor too large is caught where each of its rows would pass: what
x - exact has in common with exact, sum (x - exact) exact, may be twice what eager has, plus eps/2 times the root of the
sum of the squares of rows, each sum terms |exact|, plus a quarter of their sum.

Two backends round more, and are granted it: the cpu's products of bfloat16 leave in bfloat16, and `reference` rounds
each of its steps to the inputs' dtype. On a GPU, values of score functions have 11 bits, which is what its tanh has.
See `parts.Precision`.

`terms` adds the roundings up as independent ones add up, by the root of the sum of their squares. The sum of absolute
values would bound the worst case, but it grows with the length where errors grow with its root: at s = 1024 in bfloat16
such a tolerance for dk is larger than dk, and passes zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from saccade.api import attention, plan
from saccade.dropout import Dropout
from saccade.layouts import Dense, Paged
from saccade.masks import as_mask
from saccade.problem import Problem
from saccade.testing import packed, paged
from saccade.testing.call_slice import CallSlice, Precision, Results, with_gradients
from saccade.testing.error_tally import ErrorTally
from saccade.testing.shifted import captured, shift_dropout, shift_mask, shift_score

SCORES_AT_ONCE = 1 << 22
"""The oracle takes as many heads together as keep a score matrix below this, but never less than a group."""


@dataclass(frozen=True)
class Report:
    """How far one call is from the exact answer."""

    spec: str
    """The Spec's text form."""
    backend: str
    """Which backend ran it."""
    call: str
    """What the Spec leaves out: shapes and keywords."""
    ratios: dict[str, float]
    """Error over tolerance of each of out, lse, max_scores, dq, dk, dv, dsink, dscore0, dscore1, …; infinite for NaN
    and for infinities out of place."""

    @property
    def ratio(self) -> float:
        """The worst of them; up to 1 passes."""
        return max(self.ratios.values())

    def assert_ok(self) -> None:
        """
        Raises:
            AssertionError: a ratio above 1; the message names the worst tensor, the Spec and the call.
        """
        if not self.ratio <= 1:
            raise AssertionError(str(self))

    def __str__(self) -> str:
        worst = max(self.ratios, key=lambda name: self.ratios[name])
        every = ", ".join(f"{name} {ratio:.2f}" for name, ratio in self.ratios.items())
        return (
            f"{self.spec}, run by {self.backend}: the error of {worst} is {self.ratio:.2f} of the tolerance\n"
            f"  {self.call}\n  {every}"
        )


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    dout: Tensor | None = None,
    dlse: Tensor | None = None,
    backend: str = "auto",
    backward: bool = True,
    function: Callable[..., Any] = attention,
    **keywords: Any,
) -> Report:
    """Runs `attention`, forward and backward, with and without the LSE, and measures it against the oracle. Dropout is
    the same in all of them.

    The oracle works on q's device, one batch row and a few heads at a time: about ten float64 matrices of
    (group, s_q, s_k) must fit into memory.

    Args:
        q: as `attention` takes it, and so k, v and `keywords`; with return_max_scores=True these are measured too.
        dout: gradient of out, of its shape; the same random numbers in every call when None.
        dlse: gradient of the LSE, (b, h_q, s_q); none when None.
        backward: False leaves the gradients out, which paged caches never have.
        function: what to run in the place of `attention`, with its arguments: a merge of parts, another library's face.

    Raises:
        AssertionError: a result that has not the shape, dtype or device that it should have.

    >>> q, k, v = (torch.randn(1, 2, 64, 16) for _ in range(3))
    >>> check(q, k, v).assert_ok()
    """
    keywords = {name: value for name, value in keywords.items() if value is not None}
    layout, sink = keywords.get("layout", Dense()), keywords.get("sink")
    if not backward or isinstance(layout, Paged):
        dout = dlse = None
    elif dout is None:
        dout = random((*q.shape[:-1], v.shape[-1]), q.dtype, q.device)
    chosen = plan(q, k, v, backend=backend, **keywords)
    function = _seeded(partial(function, backend=backend), q.device)
    found = _run(function, q, k, v, dout, dlse, keywords)
    with torch.no_grad():  # without an LSE it is often another path
        alone = function(q.detach(), k.detach(), v.detach(), **keywords)
        found["alone"] = alone if isinstance(alone, Tensor) else alone.out
    _check_form(found, q, k, v, keywords)

    eps = torch.finfo(q.dtype).eps
    tallies = {name: ErrorTally(eps) for name in found}
    captures = captured(keywords.get("score_mod"))
    sums = {"dsink": sink} if sink is not None else {}
    sums |= captures
    totals = {name: torch.zeros(3, *x.shape, dtype=torch.float64, device=q.device) for name, x in sums.items()}
    precision = Precision.of(q.dtype, q.device, chosen.backend)
    for part in _parts(q, k, v, dout, dlse, keywords, precision):
        exact, eager = part.exact(), part.eager()
        ways = exact, eager, part.terms(exact)
        for name, tally in tallies.items():
            if name in totals:  # sums over all batch rows, and of captured tensors over all heads
                at = (slice(None), part.rows_at[1]) if name == "dsink" else ...
                totals[name][at] += torch.stack([way[name].double() ** (1 + (i == 2)) for i, way in enumerate(ways)])
                continue
            of_rows = name in ("lse", "max_scores")
            x = layout.canonical_lse(found[name]) if of_rows else layout.canonical(found[name])
            x = x[part.keys_at if name in ("dk", "dv") else part.rows_at]
            tensors = (x, *(way["out" if name == "alone" else name] for way in ways))
            tally.add(*(y[..., None] for y in tensors) if of_rows else tensors)
    for name, x, value in packed.beyond(found, layout):
        wanted = torch.full_like(x, value)
        tallies[name].add(x, wanted, wanted, torch.zeros_like(x))
    for name in tallies.keys() & totals.keys():
        exact, eager, squares = totals[name]
        tallies[name].eps = max(eps, torch.finfo(sums[name].dtype).eps)
        tallies[name].add(found[name], exact, eager, squares.sqrt())
    ratios = {name: tally.ratio() for name, tally in tallies.items()}
    ratios["out"] = max(ratios["out"], ratios.pop("alone"))
    words = [f"{name} {tuple(x.shape)}" for name, x in {"q": q, "k": k, "v": v}.items()]
    words += [f"{name}={list(x.shape) if isinstance(x, Tensor) else repr(x)}" for name, x in keywords.items()]
    return Report(str(chosen.spec), chosen.backend, ", ".join(words), ratios)


def _seeded(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """The function from the same state of torch's generators each time, which are as before after it."""

    def seeded(*arguments: Any, **keywords: Any) -> Any:
        with torch.random.fork_rng([device.index or 0] if device.type == "cuda" else []):
            torch.manual_seed(1)
            return function(*arguments, **keywords)

    return seeded


def random(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 1) -> Tensor:
    """Contiguous normal numbers that depend on the shape and the seed alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def _run(
    function: Callable[..., Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor | None,
    dlse: Tensor | None,
    keywords: dict[str, Any],
) -> Results:
    """What the function makes of the whole call."""
    given = {"dq": q, "dk": k, "dv": v, "dsink": keywords.get("sink")}
    leaves = {name: x.detach().requires_grad_(dout is not None) for name, x in given.items() if x is not None}
    q, k, v, *sink = leaves.values()
    keywords = keywords | ({"sink": sink[0]} if sink else {})
    leaves |= captured(keywords.get("score_mod"))
    out, lse, *top = function(q, k, v, return_lse=True, **keywords)
    of_rows = {"lse": lse} | ({"max_scores": top[0]} if top else {})
    _check_form({"out": out, **of_rows}, q, k, v, keywords)
    return of_rows | with_gradients(out, lse, leaves, dout, dlse)


def _check_form(found: Results, q: Tensor, k: Tensor, v: Tensor, keywords: dict[str, Any]) -> None:
    """Shapes, dtypes and devices are those of the contract."""
    layout, sink = keywords.get("layout", Dense()), keywords.get("sink")
    out = ((*q.shape[:-1], v.shape[-1]), q.dtype)
    lse = (
        tuple(layout.ordered_lse(layout.canonical(q)[..., 0]).shape),
        torch.float64 if q.dtype == torch.float64 else torch.float32,
    )
    forms = {"out": out, "alone": out, "lse": lse, "max_scores": lse}
    given = {"dq": q, "dk": k, "dv": v, "dsink": sink, **captured(keywords.get("score_mod"))}
    forms |= {name: (tuple(x.shape), x.dtype) for name, x in given.items() if x is not None}
    for name, x in found.items():
        got, wanted = (tuple(x.shape), x.dtype, x.device), (*forms[name], q.device)
        if got != wanted:
            raise AssertionError(f"{name} is {got}, should be {wanted}")


def _parts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor | None,
    dlse: Tensor | None,
    keywords: dict[str, Any],
    precision: Precision,
) -> Iterator[CallSlice]:
    layout, mask, sink = keywords.get("layout", Dense()), as_mask(keywords.get("mask")), keywords.get("sink")
    scale = keywords.get("scale", 1 / math.sqrt(q.shape[-1]))
    dropout = _seeded(Dropout.draw, q.device)(keywords.get("dropout_p", 0.0), q.device)
    q, k, v = (layout.canonical(x.detach()) for x in (q, k, v))
    dout, dlse = None if dout is None else layout.canonical(dout), None if dlse is None else layout.canonical_lse(dlse)
    if isinstance(layout, Paged):
        k, v = (paged.gathered(layout, x) for x in (k, v))
    h_k = k.shape[1]
    group = q.shape[1] // max(h_k, 1)
    for b, batch_q, rows, batch_k, keys in packed.places(layout, q, k):
        step = max(1, SCORES_AT_ONCE // max(1, group * (rows.stop - rows.start) * (keys.stop - keys.start)))
        used = (None if x is None else x[b : b + 1] for x in (layout.seqused_q, layout.seqused_k))
        dense = Dense("bhsd", *used)
        for start in range(0, h_k, step):
            key_heads = slice(start, min(start + step, h_k))
            heads = slice(key_heads.start * group, key_heads.stop * group)
            rows_at, keys_at = (batch_q, heads, rows), (batch_k, key_heads, keys)
            problem = Problem(
                q=q[rows_at],
                k=k[keys_at],
                v=v[keys_at],
                sink=None if sink is None else sink.detach()[heads],
                layout=dense,
                mask=shift_mask(mask, b, heads.start),
                score=shift_score(keywords.get("score_mod"), q, b, heads.start),
                scale=float(scale),
                dropout=shift_dropout(dropout, b, heads.start),
            )
            dout_part, dlse_part = (None if x is None else x[rows_at] for x in (dout, dlse))
            yield CallSlice(rows_at, keys_at, problem, dout_part, dlse_part, precision)
