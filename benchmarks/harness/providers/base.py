"""The interface of a provider, and every mode of a differentiable function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.cost import Cost
from benchmarks.harness.grids import MODES, Cell
from saccade.layouts import Dense, Layout, Packed
from saccade.masks import Mask
from saccade.scores import ScoreMod, Softcap
from saccade.testing.cases import Inputs
from saccade.testing.timing import Timed

Results = tuple[Any, ...]
Function = Callable[..., Tensor]
"""(q, k, v) -> out"""


@dataclass(frozen=True)
class Prepared(Timed):
    """A provider's call. Of a forward it gives (out,), of the other modes (dq, dk, dv), and perhaps more, which is
    ignored."""

    order: str = "bhsd"
    """The order of the results' dimensions."""
    cost: Cost | None = None
    """If it is not the cell's."""
    after: Callable[[Results], Results] | None = None
    """Turns what the call returns into results in `order`, untimed."""


class Provider:
    """One implementation of attention, and what it supports. A reason is one line; None means that it runs."""

    name: str
    role = "peer"
    """`saccade`, `peer` or `ceiling`."""
    calls: tuple[str, ...] = MODES
    layouts: tuple[str, ...] = ("dense",)
    dtypes: tuple[str, ...] = ()
    """() for any."""
    masks: type[Mask] = Mask
    scores: tuple[str, ...] | None = ()
    """Kinds of score functions; None for any."""
    sinks = False
    deterministic = False
    module = ""
    """What `available` imports."""
    needs_cuda = False
    checked = True
    """Whether its results are those of the cell; a copy has none."""
    timed_if_wrong = False
    """Whether it is timed with an error above the tolerance, which is in its row, because that is its choice."""

    def available(self, device: torch.device) -> str | None:
        """Why it does not run on this machine at all."""
        if self.needs_cuda and device.type != "cuda":
            return "runs on CUDA GPUs"
        try:
            if self.module:
                import_module(self.module)
        except ImportError as missing:
            return str(missing)
        return None

    def supports(self, cell: Cell, inputs: Inputs) -> str | None:
        """Why it does not run this cell."""
        case, mask, score = cell.case, inputs.keywords.get("mask"), cell.case.score.partition("(")[0]
        if cell.call not in self.calls:
            return f"this adapter has no {cell.call}"
        if cell.layout not in self.layouts:
            return f"this adapter takes {' and '.join(self.layouts)} operands, not {cell.layout}"
        if self.dtypes and case.dtype not in self.dtypes:
            return f"takes {' and '.join(self.dtypes)}, not {case.dtype}"
        if mask is not None and not isinstance(mask, self.masks):
            return f"has no {mask.kind} mask"
        if self.scores is not None and score not in ("none", *self.scores):
            return f"this adapter has no score {score}"
        if case.sink and not self.sinks:
            return "has no sinks"
        if cell.deterministic and not self.deterministic:
            return "this adapter does not ask for deterministic gradients"
        return None

    def prepare(self, cell: Cell, inputs: Inputs) -> Prepared:
        """Does all that is not timed: layouts, masks and, for a backward, the forward. May raise any exception."""
        raise NotImplementedError


@dataclass(frozen=True)
class Operands:
    """The operands of a call, and the gradient of its result."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    order: str
    learned: tuple[Tensor, ...] = field(default=(), kw_only=True)
    """Tensors of the score that get gradients too."""


LEARNED = "relative_bias", "t5_bias", "bias"
"""Scores whose tables are parameters of a model."""


def learned(inputs: Inputs, mode: str) -> tuple[Tensor, ...]:
    """The tables that get gradients besides q, k and v; a forward is timed as inference runs it."""
    score = inputs.keywords.get("score_mod")
    if not isinstance(score, ScoreMod) or score.kind not in LEARNED:
        return ()
    tables = tuple(x for x in score.tensors if x.is_floating_point())
    for x in tables:
        x.requires_grad_(mode != "forward")
    return () if mode == "forward" else tables


@dataclass(frozen=True)
class PeerInputs(Operands):
    """Inputs for a peer: in its order, with no NaN in the padding."""

    mask: Mask | None
    score: ScoreMod | Softcap | None
    sink: Tensor | None
    layout: Layout
    group: int
    """Query heads per key head."""

    @staticmethod
    def of(inputs: Inputs, order: str) -> PeerInputs:
        """Tensors in `order`, or packed, contiguous: each provider gets the memory layout that suits it. Of order bshd
        they are those of a model, of which it takes views (`inputs.projected`)."""
        layout: Layout = inputs.keywords.get("layout", Dense())
        target = layout if layout.ragged_keys else Dense(order)
        tensors = [layout.canonical(x) for x in (inputs.q, inputs.k, inputs.v, inputs.dout)]
        if layout.tensors:
            tensors = [x.nan_to_num(0) for x in tensors]
        group = tensors[0].shape[1] // max(1, tensors[1].shape[1])
        q, k, v, dout = map(target.ordered, tensors)
        if layout.text != "bshd":
            q, k, v, dout = (x.contiguous() for x in (q, k, v, dout))
        keywords = (inputs.keywords.get(name) for name in ("mask", "score_mod", "sink"))
        return PeerInputs(q, k, v, dout, target.order, *keywords, layout=layout, group=group)

    def lengths(self) -> tuple[Tensor, Tensor, int, int]:
        """Offsets and longest sequences of packed queries and keys, as varlen functions take them.

        Raises:
            TypeError: the layout is not Packed, or has used lengths.
        """
        layout = self.layout
        if not isinstance(layout, Packed) or (layout.seqused_q, layout.seqused_k) != (None, None):
            raise TypeError(f"varlen functions take no {layout!r}")
        q, k = layout.cu_seqlens_q, layout.cu_seqlens_k
        assert k is not None, "ranges have used lengths"
        return q, k, int(q.diff().max()), int(k.diff().max())


WARM = 3
"""Forwards, of which the last one's backward is timed: a first one, which each training has once, may make another."""


def prepared(function: Function, cell: Cell, operands: Operands, retains: bool = True) -> Prepared:
    """Every mode of a function that PyTorch differentiates.

    Args:
        function: (q, k, v) -> out, in the order of the operands.
        retains: whether its graph can serve several backwards. Otherwise every backward has an untimed forward of its
            own.
    """
    order, dout, call = operands.order, operands.dout, cell.call
    if call == "forward" and not cell.with_host:
        return Prepared(lambda: (function(operands.q, operands.k, operands.v),), order=order)
    leaves = [x.detach().requires_grad_() for x in (operands.q, operands.k, operands.v)]
    if call == "forward":
        return Prepared(lambda: (function(*leaves),), order=order)
    leaves_and_tables = [*leaves, *operands.learned]
    if call == "forward+backward":
        return Prepared(lambda: torch.autograd.grad(function(*leaves), leaves_and_tables, dout), order=order)
    if retains:
        out = function(*leaves)
        for _ in range(WARM - 1):
            out = function(*leaves)
        return Prepared(lambda: torch.autograd.grad(out, leaves_and_tables, dout, retain_graph=True), order=order)
    fresh: list[Tensor] = []

    def before() -> None:
        fresh[:] = [function(*leaves)]

    return Prepared(lambda: torch.autograd.grad(fresh.pop(), leaves_and_tables, dout), before, order)
