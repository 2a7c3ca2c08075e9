"""Score modifications, masks and dropout as some batch rows and heads of a call see them, and captured tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from saccade import scores
from saccade.dropout import Dropout
from saccade.masks import Extent, Mask

DRAWS = 8


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
        self, gradient: Tensor, gradient_term: Tensor, of_rows: Tensor, of_functions: float, score: Tensor,
        at: tuple[Tensor, ...],
    ) -> dict[str, Tensor]:  # fmt: skip
        """The roundings of what is added up for captured tensors, squared: those of the gradient and of
        d modified / d tensor, and what a row's keys have in common, of_rows (d modified / d tensor), added up by rows
        first."""
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
    """A mask as some batch rows and heads see it, from b and h on: as much as the oracle needs."""

    def __init__(self, mask: Mask, b: int, h: int) -> None:
        self.mask, self.b, self.h = mask, b, h
        self.kind = mask.kind  # pyright: ignore[reportAttributeAccessIssue]

    def sees(self, extent: Extent, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return self.mask.sees(extent, b + self.b, h + self.h, q_idx, kv_idx)
