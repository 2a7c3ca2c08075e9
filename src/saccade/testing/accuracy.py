"""The one tolerance policy: how far from the exact answer a backend may be.

`exact` is the oracle in float64 on the same inputs, or on what 8-bit ones stand for; score functions compute everything
in float64. `eager` is the oracle in the dtype of the backend's scores, float32 for inputs of 16 bits and less, with
results rounded as the backend rounds them; score functions have torch's dtypes, so where these are of 16 bits a backend
may compute them in as few or in more.
`terms` are the values that are rounded on the way to an element. A tensor x passes when

    max |x - exact| <= 2 (max |eager - exact| + eps/2 max terms)

and when the same holds for the root mean squares of the whole tensor and of each row: a row of d numbers of out, dq,
dk, dv and of the gradients of captured tensors, and each number of the LSE and of the largest scores. One rounding
costs at most eps/2 of the inputs' dtype. So a fused kernel may be twice as wrong as the plain one, a gradient that
cancels to zero may have the rounding of what cancelled, and small rows are checked on their own. No test has a number
of its own.

Rounding has no direction, so a result that is a factor too large fails even where each row would pass: the component of
x - exact along exact, sum (x - exact) exact, may be twice that of eager, plus eps/2 times the root of the sum of
squares over rows, each sum terms |exact|, plus a quarter of their sum.

Some backends round more, and the tolerance allows for it: P is rounded to 8 bits where q has 8, and tensor
cores add products of such numbers in fewer bits; on a GPU the values of score functions have 11 bits, as its tanh has.
See `call_slice.Precision`.

`terms` adds roundings as independent errors: by the root of the sum of squares. The sum of absolute values would bound
the worst case, but it grows with the length where errors grow with its root: at s = 1024 in bfloat16 such a tolerance
for dk is larger than dk, and accepts zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from saccade.api import attention, explain
from saccade.call.descale import EIGHT_BITS
from saccade.call.dropout import Dropout
from saccade.layouts import Dense
from saccade.testing import packed
from saccade.testing.call_slice import CallSlice, CheckedCall, Precision, Results, with_gradients

SCORES_AT_ONCE = 1 << 22
"""The oracle takes as many heads at once as keep its score matrix below this, but at least one group."""


@dataclass(frozen=True)
class Report:
    """How far one call is from the exact answer."""

    spec: str
    """The Spec's text form."""
    backend: str
    """Which backend ran it."""
    call: str
    """What the Spec omits: shapes and keywords."""
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
    """Runs `attention`, forward and backward, with and without the LSE, and measures it against the oracle. All of
    these draw the same dropout.

    The oracle works on q's device, one batch row and a few heads at a time: about ten float64 matrices of
    (group, s_q, s_k) must fit into memory.

    Args:
        q: as `attention` takes it; so are k, v and `keywords`. With return_max_scores=True, those are measured too.
        dout: gradient of out, of its shape; None draws the same random numbers in every call.
        dlse: gradient of the LSE, (b, h_q, s_q), or None.
        backward: False omits the gradients; paged caches have none.
        function: what to run instead of `attention`, with its arguments: a merge of parts, another library's interface.

    Raises:
        AssertionError: a result of the wrong shape, dtype or device.

    >>> q, k, v = (torch.randn(1, 2, 64, 16) for _ in range(3))
    >>> check(q, k, v).assert_ok()
    """
    keywords = {name: value for name, value in keywords.items() if value is not None}
    layout = keywords.get("layout", Dense())
    if not backward or layout.gradient_error or k.dtype in EIGHT_BITS:
        dout = dlse = None
    elif dout is None:
        dout = random((*q.shape[:-1], v.shape[-1]), q.dtype, q.device)
    chosen = explain(q, k, v, backend=backend, **keywords).plan
    function = _seeded(partial(function, backend=backend), q.device)
    call = CheckedCall.of(q, k, v, dout, dlse, keywords)
    with torch.no_grad():  # without an LSE it is often another path
        alone = function(q.detach(), k.detach(), v.detach(), **keywords)
    # Last, as the results of a compiled function with CUDA graphs live until its next call.
    found = _run(function, call) | {"alone": alone if isinstance(alone, Tensor) else alone.out}
    _check_form(found, call)
    call = call.settled()
    layout = call.layout

    eps = torch.finfo(found["out"].dtype).eps
    tallies = {name: ErrorTally(eps) for name in found}
    whole = {"dq", "dk", "dv"} if layout.starts_k is None else {"dq"}  # sequences may share keys
    sums = {name: x for name, x in call.differentiated.items() if name not in whole}
    sums = {name: layout.canonical(x) if name in ("dk", "dv") else x for name, x in sums.items()}
    totals = {name: torch.zeros(3, *x.shape, dtype=torch.float64, device=q.device) for name, x in sums.items()}
    for part in _slices(call, Precision.of(q.dtype, k.dtype, q.device, chosen.backend)):
        exact, eager = part.exact(), part.eager()
        ways = exact, eager, part.terms(exact)
        for name, tally in tallies.items():
            if name in totals:  # sums over all batch rows, and of captured tensors over all heads
                at = (slice(None), *_offset_in_sum(name, part))
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
        x = found[name]
        if name in ("dk", "dv"):
            x, squares = layout.canonical(x), squares + exact**2  # the sum over sequences is rounded too
        tallies[name].add(x, exact, eager, squares.sqrt())
    ratios = {name: tally.ratio() for name, tally in tallies.items()}
    ratios["out"] = max(ratios["out"], ratios.pop("alone"))
    words = [f"{name} {tuple(x.shape)}" for name, x in {"q": q, "k": k, "v": v}.items()]
    words += [f"{name}={list(x.shape) if isinstance(x, Tensor) else repr(x)}" for name, x in keywords.items()]
    return Report(str(chosen.spec), chosen.backend, ", ".join(words), ratios)


def _offset_in_sum(name: str, part: CallSlice) -> tuple[Any, ...]:
    """Where a slice adds to a gradient that it shares with others."""
    if name == "dsink":
        return (part.rows_at[1],)
    return part.keys_at if name in ("dk", "dv") else (...,)


def _seeded(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """The function, run from the same state of torch's generators each time; it restores them."""

    def seeded(*arguments: Any, **keywords: Any) -> Any:
        with torch.random.fork_rng([device.index or 0] if device.type == "cuda" else []):
            torch.default_generator.manual_seed(1)
            if device.type == "cuda":
                torch.cuda.default_generators[device.index or 0].manual_seed(1)
            return function(*arguments, **keywords)

    return seeded


def random(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 1) -> Tensor:
    """Contiguous normal numbers that depend on the shape and the seed alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def _run(function: Callable[..., Any], call: CheckedCall) -> Results:
    """The results and gradients of the whole call."""
    leaves = {
        name: x if name.startswith("dscore") else x.detach().requires_grad_(call.dout is not None)
        for name, x in call.differentiated.items()
    }
    sink = {"sink": leaves["dsink"]} if "dsink" in leaves else {}
    out, lse, *top = function(leaves["dq"], leaves["dk"], leaves["dv"], return_lse=True, **call.keywords | sink)
    of_rows = {"lse": lse} | ({"max_scores": top[0]} if top else {})
    _check_form({"out": out, **of_rows}, call)
    return of_rows | with_gradients(out, lse, leaves, call.dout, call.dlse)


def _check_form(results: Results, call: CheckedCall) -> None:
    """Shapes, dtypes and devices are those of the contract."""
    q, layout = call.q, call.settled().layout
    given = call.keywords.get("out")
    dtype = q.dtype if q.dtype not in EIGHT_BITS else torch.bfloat16 if given is None else given.dtype
    out = (*q.shape[:-1], call.v.shape[-1]), dtype
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    lse = tuple(layout.ordered_lse(layout.canonical(q)[..., 0]).shape), wide
    forms = {"out": out, "alone": out, "lse": lse, "max_scores": lse}
    forms |= {name: (tuple(x.shape), x.dtype) for name, x in call.differentiated.items()}
    for name, x in results.items():
        got, wanted = (tuple(x.shape), x.dtype, x.device), (*forms[name], q.device)
        if got != wanted:
            raise AssertionError(f"{name} is {got}, should be {wanted}")


def _slices(call: CheckedCall, precision: Precision) -> Iterator[CallSlice]:
    dropout = _seeded(Dropout.draw, call.q.device)(call.keywords.get("dropout_p", 0.0), call.q.device)
    call = call.canonical()
    h_k = call.k.shape[1]
    group = call.q.shape[1] // max(h_k, 1)
    for sequence in call.sequence_slices():
        rows, keys = sequence.rows.stop - sequence.rows.start, sequence.keys.stop - sequence.keys.start
        step = max(1, SCORES_AT_ONCE // max(1, group * rows * keys))
        for start in range(0, h_k, step):
            key_heads = slice(start, min(start + step, h_k))
            heads = slice(key_heads.start * group, key_heads.stop * group)
            yield call.slice(sequence, heads, key_heads, precision, dropout)


COMMON = 1 / 4
"""How much of what is rounded may lean one way: numbers that are alike are rounded alike, and sums are cut off."""


class ErrorTally:
    """Of a tensor's errors and terms, part after part: the largest elements, the sums of squares, the worst row, and
    how much of the errors lies along the exact result."""

    def __init__(self, eps: float) -> None:
        self.eps = eps
        self.top = torch.zeros(3, dtype=torch.float64)
        self.squares = torch.zeros(3, dtype=torch.float64)
        self.along = torch.zeros(2, dtype=torch.float64)
        self.spread, self.common = 0.0, 0.0
        self.row = 0.0
        self.broken = False

    def add(self, x: Tensor, exact: Tensor, eager: Tensor, terms: Tensor) -> None:
        """Rows are along the last dimension."""
        if not x.numel():
            return
        x, exact, eager, terms = (torch.atleast_1d(y.detach().double()) for y in (x, exact, eager, terms))
        finite = exact.isfinite()
        self.broken |= bool((x.isfinite() != finite).any()) or bool((x != exact)[~finite].any())
        # Where the plain run overflows, it says nothing.
        found = torch.stack([y.nan_to_num(0, 0, 0) for y in (x - exact, eager - exact, terms)])
        exact = exact.nan_to_num(0, 0, 0)
        if x.shape[-1] > 1:  # an LSE has what its exponentials have
            self.along += (found[:2] * exact).flatten(1).sum(1).cpu()
            of_rows = (found[2] * exact.abs()).sum(-1)  # a row's errors may be one and the same
            self.spread += float(of_rows.square().sum())
            self.common += float(of_rows.sum())
        self.top = torch.maximum(self.top, found.abs().flatten(1).amax(1).cpu())
        self.squares += found.square().flatten(1).sum(1).cpu()
        error, other, term = found.square().mean(-1).sqrt()
        self.row = max(self.row, float(self._shares(error, other, term).max()))

    def ratio(self) -> float:
        if self.broken:
            return math.inf
        # The roots of the sums stand for the roots of the means.
        along = [*self.along.abs().tolist(), math.sqrt(self.spread) + COMMON * self.common]
        wholes = torch.stack([self.top, self.squares.sqrt(), torch.tensor(along, dtype=torch.float64)], dim=1)
        return max(self.row, float(self._shares(*wholes).max()))

    def _shares(self, error: Tensor, other: Tensor, term: Tensor) -> Tensor:
        """Infinite where there is an error and nothing is allowed."""
        return torch.where(error == 0, 0, error / (2 * (other + self.eps / 2 * term)))


def worst_row_error(x: Tensor, exact: Tensor, eps: float, least: float = 0.0) -> Tensor:
    """Error over tolerance of the worst row, (), on its device and without a wait for the host: for thousands of calls.

    Rows are along the last dimension, and each may be off by two roundings of eps/2 for what is rounded on the way, of
    two numbers of its size, or of `least` if that is more. NaN where x has one, infinite for infinities out of place.
    """
    x, exact = x.double(), exact.double()
    finite = exact.isfinite()
    error, size = (torch.where(finite, y, 0).square().mean(-1).sqrt() for y in (x - exact, exact))
    right = torch.where(finite, True, x == exact).all()
    return torch.where(right, error / (2 * eps * size.clamp(min=max(least, 1e-30))), torch.inf).amax()
