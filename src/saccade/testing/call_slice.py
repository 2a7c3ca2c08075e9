"""A call and its slices: one sequence and some heads, with the exact answer, the plain one, and what is rounded on the
way to each element. `accuracy` says how they make a tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from saccade import scores
from saccade.backends import reference
from saccade.call import Call
from saccade.call.descale import EIGHT_BITS, Factors, factors
from saccade.call.dropout import Dropout
from saccade.layouts import Dense, Layout, SequenceSlice, SlotRows, dense_of
from saccade.masks import Extent, Mask, as_mask, of_rows

Results = dict[str, Tensor]
"""out, lse, and as far as they are asked for max_scores, dq, dk, dv, dsink."""

At = tuple[slice, slice, slice]
"""batch, heads and rows"""


FAR = 1 << 20
"""A score beyond it masks its key, or equals all scores of its row: float32 loses what is added to it."""

TENSOR_CORE_SUMS = 2.0**-13
"""Hopper's tensor cores add products of 8-bit numbers in so many bits, 32 at a time (notes/fp8.md)."""

PROMOTED = 128
"""Keys after which such sums are added up in float32 at the latest."""
P_BITS = 8
"""P of 8 bits is multiplied by 2 to this power, so that small probabilities are normal numbers."""

BEYOND = 16.0
"""Above this error of a score, nothing is known of its probability."""


class Precision(NamedTuple):
    """The dtypes that a backend computes in between. What it multiplies and what it returns have the inputs' dtype."""

    scores: torch.dtype
    """What `q k^T` and `dout v^T` leave in, and everything from there on: scale, functions, the softmax, the LSE,
    `p (dp - delta)`."""
    functions: torch.dtype
    """What values of score functions are good to."""
    exp: float = 0.0
    """The relative error of exponentials, where it is more than that of the scores' dtype."""
    probabilities: torch.dtype | None = None
    """What P is rounded to: e4m3 beside queries of 8 bits, float16 beside other queries over 8-bit keys, whose products
    run in it (`wide_queries`); None is the inputs' dtype."""
    sums: float = 0.0
    """The relative error of each partial sum of a product, where it is more than that of the LSE's dtype."""
    products: float = 0.0
    """That of a score, where it leaves its product in fewer bits."""

    @classmethod
    def of(cls, dtype: torch.dtype, kv: torch.dtype, device: torch.device, backend: str) -> Precision:
        """Of the dtypes of q, and of k and v."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        if backend == "reference" or (kv in EIGHT_BITS and backend == "cpu"):  # read as float32
            return cls(wide, wide)
        if dtype in EIGHT_BITS:
            p, functions = torch.float8_e4m3fn, torch.float16 if backend != "triton" else wide
            return cls(wide, functions, 0.0, p, TENSOR_CORE_SUMS)
        half = dtype in (torch.float16, torch.bfloat16)
        p = torch.float16 if half and kv in EIGHT_BITS else None
        if device.type == "cpu":  # PyTorch's own kernel takes exponentials to 14 bits for 16-bit inputs
            # Two products of bfloat16, where rows are few, leave in the bits of both.
            return cls(wide, wide, 2**-14 if half else 0.0, p, products=2**-18 if dtype == torch.bfloat16 else 0.0)
        # tanh in one instruction has 11 bits.
        return cls(wide, torch.float16 if half and backend != "triton" else wide, probabilities=p)


class CheckedCall(NamedTuple):
    """The operands of a call, the gradients of its results, and the keywords of `attention`."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor | None
    dlse: Tensor | None
    keywords: dict[str, Any]
    descale: Factors | None = None

    @staticmethod
    def of(
        q: Tensor, k: Tensor, v: Tensor, dout: Tensor | None, dlse: Tensor | None, keywords: dict[str, Any]
    ) -> CheckedCall:
        """The call of these arguments, with what 8-bit operands stand for."""
        call = CheckedCall(q, k, v, dout, dlse, keywords)
        if k.dtype not in EIGHT_BITS:
            return call
        sizes, h_k = call.layout.sizes(q, k), call.layout.canonical(k).shape[1]
        shape = sizes.b, h_k, sizes.s_q if call.layout.knows_rows else None, sizes.s_k
        found = factors(keywords.get("descale"), q.device, q.dtype in EIGHT_BITS, shape)
        return call._replace(descale=found)

    @property
    def layout(self) -> Layout:
        return self.keywords.get("layout", Dense())

    @property
    def differentiated(self) -> dict[str, Tensor]:
        """What gets a gradient, by the names of the gradients; captured tensors if they require one."""
        named = {"dq": self.q, "dk": self.k, "dv": self.v, "dsink": self.keywords.get("sink")}
        found = {name: x for name, x in named.items() if x is not None}
        return found | captured(self.keywords.get("score_mod"))

    def settled(self) -> CheckedCall:
        """The call over slots as one over rows of the caches, with a mask of the slots that there are; any other is
        itself."""
        if self.layout.slots is None:
            return self
        layout, k, v, mask = SlotRows.of(self.layout).over_rows(self.k, self.v)  # pyright: ignore[reportArgumentType]
        return self._replace(k=k, v=v, keywords=self.keywords | {"layout": layout, "mask": mask})

    def canonical(self) -> CheckedCall:
        """The tensors as (b, h, s, d), detached, the pages of a cache gathered."""
        layout, dout, dlse = self.layout, self.dout, self.dlse
        q, k, v = (layout.canonical(x.detach()) for x in self[:3])
        k, v = layout.gathered(k), layout.gathered(v)
        dout = None if dout is None else layout.canonical(dout)
        dlse = None if dlse is None else layout.canonical_lse(dlse)
        return CheckedCall(q, k, v, dout, dlse, self.keywords, self.descale)

    def sequence_slices(self) -> list[SequenceSlice]:
        """Where each sequence of a canonical call is."""
        return self.layout.sequence_slices(self.q, self.k)

    def slice(
        self, sequence: SequenceSlice, heads: slice, key_heads: slice, precision: Precision,
        dropout: Dropout | None = None,
    ) -> CallSlice:  # fmt: skip
        """One sequence and some heads of a canonical call."""
        b, h, keywords = sequence.number, heads.start, self.keywords
        rows_at, keys_at = (sequence.batch_q, heads, sequence.rows), (sequence.batch_k, key_heads, sequence.keys)
        sink, mask, out = keywords.get("sink"), as_mask(keywords.get("mask")), keywords.get("out")
        score = scores.bind(keywords.get("score_mod"), self.q)
        call = Call(
            q=self.q[rows_at],
            k=self.k[keys_at],
            v=self.v[keys_at],
            sink=None if sink is None else sink.detach()[heads],
            layout=dense_of(self.layout, sequence, self.q.shape[2]),
            mask=None if mask is None else ShiftedMask(of_rows(mask, sequence.rows), b, h, self.q.shape[1]),
            score=None if score is None else ShiftedScore(score, b, h),
            descale=None if self.descale is None else self.descale.of_sequence(b, key_heads),
            out=None if out is None else out.new_empty(0),
            scale=float(keywords.get("scale", 1 / math.sqrt(self.q.shape[-1]))),
            dropout=None if dropout is None else ShiftedDropout(dropout.state, dropout.p, b, h),
        )
        dout, dlse = (None if x is None else x[rows_at] for x in (self.dout, self.dlse))
        return CallSlice(rows_at, keys_at, call, dout, dlse, precision)


class CallSlice(NamedTuple):
    """One sequence and some heads of a call, tensors (1, h, s, …), and where they are in it."""

    rows_at: At
    """Batch, heads and rows of q, out and dq."""
    keys_at: At
    """Batch, key heads and keys."""
    call: Call
    dout: Tensor | None
    dlse: Tensor | None
    precision: Precision

    def exact(self) -> Results:
        return self._exactly()._oracle()

    def eager(self) -> Results:
        call = self.call
        if call.out_dtype != torch.float64:
            plain = self if self.precision.scores == call.q.dtype else self._wide(self.precision.scores)
            return {name: self._returned(x, name) for name, x in plain._oracle().items()}
        # A plain run in float64 would repeat the exact one bit by bit. This one scales first, and sums the head
        # dimension from its other end.
        turned = call.replace(q=call.q.flip(-1) * call.scale, k=call.k.flip(-1), scale=1.0)
        results = self._replace(call=turned)._oracle()
        if self.dout is not None:
            results["dq"], results["dk"] = results["dq"].flip(-1) * call.scale, results["dk"].flip(-1)
        return results

    def terms(self, exact: Results) -> Results:
        """The roundings that reach an element, in units of eps/2 of the inputs' dtype; here they are squared until the
        end. `fine` is the square of one rounding of a score.

        A matrix product x y passes on the roundings of x, and rounds its n partial sums, `more` of n altogether, in the
        dtype of the LSE: x_term y^2 + more(n) (x^2 y^2 + (x y)^2). P and ds are rounded to the inputs' dtype before
        they are multiplied. In the backward p is exp(score - lse), so it has the LSE's roundings too. dp, delta and
        dlse cancel in g = dp - delta + dlse, so they count one by one. Every result is itself rounded.
        """
        call = self.call
        dtype, sums = call.out_dtype, call.lse_dtype()
        eps = torch.finfo(dtype).eps
        fine, of_functions = ((torch.finfo(x).eps / eps) ** 2 for x in self.precision[:2])
        # Below these a rounding is absolute: results are as small as their dtype can tell, exponentials become zero.
        smallest = torch.finfo(dtype).smallest_normal ** 2
        least = max(torch.finfo(dtype).smallest_normal, 2 / eps * torch.finfo(sums).smallest_normal) ** 2

        call, dout, dlse = self._exactly()[2:5]
        call = call.dequantized()
        q, k, v = reference.operands(call)
        p = reference.probability(call, q, k)[0].detach()
        more_q, more_k, more_d, more_v = (
            n * (2 * torch.finfo(sums).eps / eps) ** 2 for n in (q.shape[2], k.shape[2], q.shape[3], v.shape[3])
        )
        more_p = more_k
        if self.precision.sums:
            of_sums = (2 * self.precision.sums / eps) ** 2
            more_d, more_p = q.shape[3] * of_sums, max(more_k, PROMOTED * of_sums)
        kept = reference.kept(call) * call.dropout.rescale if call.dropout else q.new_ones(())
        masked = (exact["lse"] == -torch.inf)[..., None]
        out, lse = exact["out"], torch.where(masked, 0, exact["lse"][..., None])
        top = exact["max_scores"][..., None]
        top = torch.where(top.isfinite(), top, 0)

        score = q @ k.mT * call.scale
        far = FAR if call.sink is None else math.inf  # beside a sink of their size they are numbers like others
        coarse = (2 * self.precision.products / eps) ** 2
        score_term = coarse * score**2 + (fine + more_d) * (score**2 + q**2 @ k.mT**2 * call.scale**2)
        slope, slope_term = score.new_ones(()), score.new_zeros(())
        if call.score is not None:
            modified, slope = self._modified(score)
            if isinstance(call.score, ShiftedScore):
                of_functions = max(of_functions, call.score.roundings() / eps**2)
            # Where a function bends or jumps, a score's rounding does more than its derivative says.
            error = eps / 2 * score_term.sqrt()
            ends = torch.stack([torch.stack(self._modified(score + side * error)) for side in (-1, 1)])
            moved = (ends - torch.stack([modified, slope])).nan_to_num(0, 0, 0).abs().amax(0) / (eps / 2)
            score_term, slope_term = moved**2
            # A score that is far from zero masks its key, or equals all of its row: a constant, which nothing rounds.
            near = modified.abs() < far
            score_term = score_term + of_functions * torch.where(near, modified, 0) ** 2
            if isinstance(call.score, ShiftedScore):
                score_term = score_term + fine * torch.where(near, self._passed_on(score, modified), 0)
            slope_term = slope_term + derivative_term(of_functions, slope, least=1.0)
        score_term = torch.where(p > 0, score_term, 0)  # a score may be -inf
        p_rounded = torch.where(p > 0, p**2 + least, 0)
        if self.precision.probabilities is not None:
            narrow = torch.finfo(self.precision.probabilities)
            top_p = torch.nn.functional.pad(p, (0, 1)).amax(-1, keepdim=True)
            smallest_step = top_p * narrow.smallest_normal * narrow.eps / (2**P_BITS if narrow.bits == 8 else 1)
            p_rounded = p_rounded + torch.where(p > 0, (p**2 * narrow.eps**2 + smallest_step**2) / eps**2, 0)
        p_term = p**2 * ((eps / 2 * score_term.sqrt()).clamp(max=BEYOND).expm1() / (eps / 2)) ** 2
        # Keys that are alike have scores that are rounded alike.
        of_p = 1 + more_k / fine + torch.where(lse.abs() < far, lse**2 + top**2, 0)
        of_p = fine * of_p + p_term.sqrt().sum(-1, keepdim=True) ** 2 + (2 * self.precision.exp / eps) ** 2
        lse_term = of_p + fine * (lse**2 + top**2)
        out_term = smallest + (1 + more_p) * out**2 + ((p_rounded + p_term + more_p * p**2) * kept**2) @ v**2
        squares = {"out": out_term, "lse": lse_term[..., 0]}
        squares["max_scores"] = torch.nn.functional.pad(score_term, (0, 1)).amax(-1)  # of no key, zero
        if dout is not None:
            dout = torch.where(masked, 0, dout)  # in padding it may be NaN
            dlse = torch.where(masked, 0, torch.zeros_like(lse) if dlse is None else dlse[..., None])
            p_term = p_term + p**2 * of_p
            dp, delta = dout @ v.mT * kept, (dout * out).sum(-1, keepdim=True)
            dp_term = coarse * dp**2 + (fine + more_v) * (dp**2 + dout**2 @ v.mT**2 * kept**2)
            row_term = (
                fine * (delta**2 + dlse**2)
                + more_v * delta**2
                + (dout**2 * (out_term + more_v * out**2)).sum(-1, keepdim=True)
            )
            before = dp - delta + dlse
            if isinstance(call.score, ShiftedScore) and call.score.captured():
                before_term = p_term * before**2 + p**2 * dp_term
                of_row = p * row_term.sqrt()  # an error in delta, which is common to a row's keys
                of_sums = (2 * torch.finfo(sums).eps / eps) ** 2
                terms = p * before, before_term, of_row, of_functions, of_sums
                for name, rows in call.score.squares(*terms, score.detach(), self.indices()).items():
                    squares[name] = exact[name].double() ** 2 + rows
            ds = p * before * slope
            ds_term = p_term * (before * slope) ** 2 + p**2 * ((dp_term + row_term) * slope**2 + before**2 * slope_term)
            ds_term = torch.where(p > 0, ds**2 + least * (1 + (before * slope) ** 2) + ds_term, 0)
            # A row's error in delta is common to its keys.
            dq_term = (ds_term + more_k * ds**2) @ k**2 + row_term * (p * slope @ k) ** 2
            dk_term = self._of_groups((ds_term + more_q * ds**2).mT @ q**2)
            dv_term = self._of_groups(((p_rounded + p_term + more_q * p**2) * kept**2).mT @ dout**2)
            squares["dq"] = smallest + (1 + more_k) * exact["dq"] ** 2 + dq_term * call.scale**2
            squares["dk"] = smallest + (1 + more_q) * exact["dk"] ** 2 + dk_term * call.scale**2
            squares["dv"] = smallest + (1 + more_q) * exact["dv"] ** 2 + dv_term
            if call.sink is not None:
                share = torch.where(masked, 0, (call.sink[:, None, None] - lse).exp())
                rows = share**2 * (row_term + (fine + of_p + more_q) * (delta - dlse) ** 2)
                assert self.call.sink is not None
                tiny = torch.finfo(self.call.sink.dtype).smallest_normal ** 2
                squares["dsink"] = tiny + (1 + more_q) * exact["dsink"] ** 2 + rows.sum((0, 2, 3))
        return {name: square.sqrt() for name, square in squares.items()}

    def _oracle(self) -> Results:
        call, backward = self.call, self.dout is not None
        operands = {"dq": call.q, "dk": call.k, "dv": call.v, "dsink": call.sink}
        leaves = {name: x.detach().requires_grad_(backward) for name, x in operands.items() if x is not None}
        call = call.replace(**{name.removeprefix("d"): x for name, x in leaves.items()})
        if isinstance(call.score, ShiftedScore):
            leaves |= call.score.captured()
        out, lse, largest = reference.attention(call)
        return {"max_scores": largest} | with_gradients(out, lse, leaves, self.dout, self.dlse)

    def _returned(self, x: Tensor, name: str) -> Tensor:
        """As the call returns it: rounded once more."""
        if name in ("lse", "max_scores") or name.startswith("dscore"):
            return x
        sink = self.call.sink if name == "dsink" else None
        return x.to(self.call.out_dtype if sink is None else sink.dtype)

    def _modified(self, score: Tensor) -> tuple[Tensor, Tensor]:
        """The modified score, and its derivative by the score."""
        function = self._exactly().call.score
        assert function is not None
        score = score.detach().requires_grad_()
        modified = function(score, *self.indices())
        slope: Tensor | None = None
        if modified.requires_grad:
            slope = torch.autograd.grad(modified, score, torch.ones_like(modified), allow_unused=True)[0]
        return modified.detach(), torch.zeros_like(score) if slope is None else slope

    def _passed_on(self, score: Tensor, modified: Tensor) -> Tensor:
        """What one rounding of each number on the way to the modified score does to that score, squared: numbers that
        cancel leave more than the score's own size tells. A mean over draws of the roundings' signs."""
        total, function = torch.zeros_like(modified), self._exactly().call.score
        assert function is not None
        for seed in range(DRAWS):
            with torch.no_grad(), _Rounded(seed):
                moved = function(score, *self.indices())
            total += ((moved - modified) / _Rounded.STEP).nan_to_num(0, 0, 0) ** 2
        return total / DRAWS

    def indices(self) -> tuple[Tensor, ...]:
        """b, h and the positions of rows and keys, which broadcast to whole score matrices."""
        call = self.call
        sizes = *call.q.shape[:3], call.k.shape[2]
        b, h, q_idx, kv_idx = (
            torch.arange(n, device=call.q.device).view([-1] + [1] * (3 - i)) for i, n in enumerate(sizes)
        )
        return b, h, call.extent.q_position(b, q_idx), call.extent.k_position(b, kv_idx)

    def _of_groups(self, x: Tensor) -> Tensor:
        """(1, h_q, s, d) summed over the query heads of each key head"""
        return x.unflatten(1, (-1, self.call.group)).sum(2)

    def _exactly(self) -> CallSlice:
        """The same numbers in float64, those that a score function makes too."""
        wide = self._wide(torch.float64)
        score = wide.call.score
        score = score.widened() if isinstance(score, ShiftedScore) else score
        return wide._replace(call=wide.call.replace(score=score))

    def _wide(self, dtype: torch.dtype) -> CallSlice:
        """The same numbers in another dtype."""

        def wide(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.to(dtype)

        tensors: dict[str, Any] = {name: wide(getattr(self.call, name)) for name in ("q", "k", "v", "sink")}
        return self._replace(call=self.call.replace(**tensors), dout=wide(self.dout), dlse=wide(self.dlse))


def with_gradients(
    out: Tensor, lse: Tensor, leaves: dict[str, Tensor], dout: Tensor | None, dlse: Tensor | None
) -> Results:
    """out and lse, and the gradients of leaves, zeros where there is none."""
    results = {"out": out.detach(), "lse": lse.detach()}
    if dout is not None:
        outputs, wanted = ([out], [dout]) if dlse is None else ([out, lse], [dout, dlse.to(lse.dtype)])
        gradients = torch.autograd.grad(outputs, list(leaves.values()), wanted, allow_unused=True, retain_graph=True)
        pairs = zip(leaves.items(), gradients, strict=True)
        results |= {name: torch.zeros_like(leaf) if x is None else x for (name, leaf), x in pairs}
    return results


DRAWS = 8
"""Of random signs, over which squares are averaged."""


def captured(score_mod: Any) -> dict[str, Tensor]:
    """The tensors of a score modification that require a gradient, by the names of their gradients."""
    leaves = scores.captured(score_mod)
    wanted = {id(x): x for x in leaves if isinstance(x, Tensor) and x.requires_grad}
    return {f"dscore{i}": x for i, x in enumerate(wanted.values())}


@dataclass(frozen=True, eq=False)
class ShiftedDropout(Dropout):
    """Dropout as some batch rows and heads draw it, from b and h on."""

    b: int
    h: int

    def keep(self, b: Tensor, h: Tensor, rows: slice, keys: slice) -> Tensor:
        return super().keep(b + self.b, h + self.h, rows, keys)

    def keep_at(self, b: Tensor, h: Tensor, p: Tensor, r: Tensor) -> Tensor:
        return super().keep_at(b + self.b, h + self.h, p, r)


class _Widened(TorchFunctionMode):
    """Functions of floats in float64, whatever torch would compute in less, but for what converts or writes them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name not in _AS_GIVEN and not (name.endswith("_") and not name.endswith("__")):
            args, kwargs = tree_map_only(Tensor, _wide, (args, kwargs))
        return func(*args, **kwargs or {})


class _Rounded(TorchDispatchMode):
    """Moves each number of float64 that float32 would round, up or down by a relative `STEP`; its bits draw which."""

    STEP = 2.0**-36

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.odd = 0x9E3779B97F4A7C1 + 2 * seed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        x = func(*args, **kwargs or {})
        if not isinstance(x, Tensor) or x.dtype != torch.float64 or func.is_view or func._schema.is_mutable:
            return x
        sign = ((x.contiguous().view(torch.int64) * self.odd >> 40) & 2) - 1
        return torch.where(x.float() == x, x, x * (1 + self.STEP * sign))


_AS_GIVEN = frozenset(
    ("__get__", "__set__", "__setitem__", "to", "type", "type_as", "float", "double", "half", "bfloat16")
)


def _wide(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x


@contextmanager
def _widely() -> Iterator[None]:
    """Where what torch computes of floats, captured tensors and indices is good to float64."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Widened():
            yield
    finally:
        torch.set_default_dtype(usual)


def derivative_term(of_functions: float, x: Any, least: float = 0.0) -> Tensor:
    """What is rounded in derivatives by values of a function, squared: they are made of such values, as 4 (1 - tanh^2)
    is, of which each is as large as the steepest derivative of its head, or as `least`."""
    x = torch.as_tensor(x)
    size = x.nan_to_num(0, 0, 0).abs()
    steepest = size.amax((-2, -1), keepdim=True) if size.dim() > 1 and size.numel() else size
    return of_functions * (x**2 + 4 * (steepest.clamp(min=least) - size) ** 2)


class ShiftedScore(scores.Score):
    """A score modification as some batch rows and heads see it, from b and h on."""

    def __init__(self, score: scores.Score, b: int, h: int, exact: bool = False) -> None:
        self.score, self.b, self.h, self.exact = score, b, h, exact
        self.kind, self.identity = score.kind, score.identity

    def widened(self) -> ShiftedScore:
        """The same in float64 throughout. As it is written, its numbers have the dtypes that torch gives them."""
        return ShiftedScore(self.score, self.b, self.h, exact=True)

    def __call__(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        with _widely() if self.exact else nullcontext():
            return self.score(score, b + self.b, h + self.h, q_idx, kv_idx)

    def roundings(self) -> float:
        """The sum of eps^2 over its operations of floats, each of the dtype that torch gives it."""
        if not isinstance(self.score, scores.Traced):
            return 0.0
        program = self.score.program
        graphs = program.core, *(module.graph for _, module in (program.before, program.numbers) if module)
        values = (x.meta.get("val") for graph in graphs for x in graph.nodes if x.op == "call_function")
        return sum(torch.finfo(x.dtype).eps ** 2 for x in values if isinstance(x, Tensor) and x.is_floating_point())

    def captured(self) -> dict[str, Tensor]:
        return captured(getattr(self.score, "fn", None))

    def squares(
        self, gradient: Tensor, gradient_term: Tensor, of_rows: Tensor, of_functions: float, of_sums: float,
        score: Tensor, at: tuple[Tensor, ...],
    ) -> dict[str, Tensor]:  # fmt: skip
        """The roundings of what is added up for captured tensors, squared: those of the gradient and of
        d modified / d tensor, what a row's keys have in common, of_rows (d modified / d tensor), added up by rows
        first, and of_sums for each of an element's n partial sums."""
        leaves, held = self.captured(), self.score.tensors
        at = (at[0] + self.b, at[1] + self.h, *at[2:])

        def added(gradient: Tensor, of: Callable[[Any], Any] | None = None) -> list[Tensor | None]:
            sums = [torch.zeros_like(x, dtype=torch.float64) if x.requires_grad else None for x in held]
            self.score.accumulate(sums, gradient, score, *at, of=of)
            return sums

        total = added(gradient_term, lambda x: x * x)
        for x, more in zip(total, added(gradient**2, partial(derivative_term, of_functions)), strict=True):
            if x is not None and more is not None:
                x += more
        summands = (
            added(torch.ones_like(gradient), lambda x: torch.as_tensor(x) != 0),
            added(gradient),
            added(gradient**2, lambda x: x * x),
        )
        for x, n, whole, apart in zip(total, *summands, strict=True):
            if x is not None and n is not None and whole is not None and apart is not None:
                x += of_sums * n * (whole**2 + apart)
        signs = torch.Generator().manual_seed(0)
        for _ in range(DRAWS):  # rows of random signs add up as their squares do
            sign = 2 * torch.randint(0, 2, (*score.shape[:3], 1), generator=signs).to(score) - 1
            for x, more in zip(total, added(sign * of_rows), strict=True):
                if x is not None and more is not None:
                    x += more**2 / DRAWS
        # What the score computes from them beforehand is treated as a choice among them.
        pairs = zip(held, total, strict=True)
        made = [(x, t.clamp(max=torch.finfo(x.dtype).max).to(x.dtype)) for x, t in pairs if t is not None]
        outputs, totals = zip(*made, strict=True)
        found = torch.autograd.grad(outputs, list(leaves.values()), totals, allow_unused=True, retain_graph=True)
        pairs = zip(leaves.items(), found, strict=True)
        return {name: torch.zeros_like(x) if x_sum is None else x_sum.abs() for (name, x), x_sum in pairs}


class ShiftedMask(Mask):
    """A mask as some batch rows and heads see it, from b and h of so many on: as much as the oracle needs."""

    def __init__(self, mask: Mask, b: int, h: int, heads: int) -> None:
        self.mask, self.b, self.h, self.heads = mask, b, h, heads
        self.kind = mask.kind  # pyright: ignore[reportAttributeAccessIssue]

    def sees(self, extent: Extent, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return self.mask.sees(extent._replace(heads=self.heads), b + self.b, h + self.h, q_idx, kv_idx)
