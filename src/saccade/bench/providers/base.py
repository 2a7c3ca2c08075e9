"""What a provider is, and how one differentiable function serves every mode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from saccade.bench.cost import Cost
from saccade.bench.grids import Cell
from saccade.layouts import Dense, Layout, Packed
from saccade.masks import Mask
from saccade.scores import ScoreMod, Softcap
from saccade.testing.cases import Inputs

Results = tuple[Tensor, ...]
Function = Callable[..., Tensor]
"""(q, k, v) -> out"""


@dataclass(frozen=True)
class Prepared:
    """A call that does what is timed, and nothing else."""

    call: Callable[[], Results]
    """Forward: (out,). The other modes: (dq, dk, dv), and more that nobody looks at."""
    order: str = "bhsd"
    """What the dimensions of the results are."""
    before: Callable[[], None] | None = None
    """What every call needs anew and the clock must not see."""
    work: Cost | None = None
    """Where it is not the cell's."""
    after: Callable[[Results], Results] | None = None
    """From what the call returns to results in `order`; nobody times it."""


class Provider:
    """One implementation of attention on the bench. A reason is one line; None says that nothing speaks against it."""

    name: str
    role = "peer"
    """`saccade`, `peer` or `ceiling`."""

    def available(self, device: torch.device) -> str | None:
        """Why it does not run on this machine at all."""
        return None

    def supports(self, cell: Cell, inputs: Inputs) -> str | None:
        """Why it does not run this cell."""
        return None

    def prepare(self, cell: Cell, inputs: Inputs) -> Prepared:
        """Layouts, masks and, for a backward, the forward: all that is not timed. May raise: that is its reason."""
        raise NotImplementedError


@dataclass(frozen=True)
class Operands:
    """What is differentiated, and with what."""

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
    """What a backward differentiates besides q, k and v; a forward is timed as inference runs it."""
    score = inputs.keywords.get("score_mod")
    if not isinstance(score, ScoreMod) or score.kind not in LEARNED:
        return ()
    tables = tuple(x for x in score.tensors if x.is_floating_point())
    for x in tables:
        x.requires_grad_(mode != "forward")
    return () if mode == "forward" else tables


@dataclass(frozen=True)
class PeerInputs(Operands):
    """Inputs as a peer wants them: its order, no NaN in the padding."""

    mask: Mask | None
    score: ScoreMod | Softcap | None
    sink: Tensor | None
    layout: Layout
    group: int
    """Query heads per key head."""

    @staticmethod
    def of(inputs: Inputs, order: str) -> PeerInputs:
        """Tensors in `order`, or packed as they are, contiguous: each provider gets the memory layout that it was made
        for."""
        layout: Layout = inputs.keywords.get("layout", Dense())
        target = layout if isinstance(layout, Packed) else Dense(order)
        tensors = [layout.canonical(x) for x in (inputs.q, inputs.k, inputs.v, inputs.dout)]
        if layout.records:
            tensors = [x.nan_to_num(0) for x in tensors]
        group = tensors[0].shape[1] // max(1, tensors[1].shape[1])
        q, k, v, dout = (target.ordered(x).contiguous() for x in tensors)
        found = (inputs.keywords.get(name) for name in ("mask", "score_mod", "sink"))
        return PeerInputs(q, k, v, dout, target.order, *found, layout=layout, group=group)

    def lengths(self) -> tuple[Tensor, Tensor, int, int]:
        """Offsets and longest sequences of packed queries and keys, as varlen functions take them.

        Raises:
            TypeError: no packed sequences.
        """
        layout = self.layout
        if not isinstance(layout, Packed):
            raise TypeError(f"{layout!r} has no offsets")
        q, k = layout.cu_seqlens_q, layout.cu_seqlens_k
        return q, k, int(q.diff().max()), int(k.diff().max())


def prepared(function: Function, mode: str, given: Operands, retains: bool = True) -> Prepared:
    """Every mode of a function that PyTorch differentiates.

    Args:
        function: (q, k, v) -> out, in the order of `given`.
        retains: whether its graph can be kept for one backward after the other. Otherwise every backward has a forward
            of its own, outside of the clock.
    """
    if mode == "forward":
        return Prepared(lambda: (function(given.q, given.k, given.v),), given.order)
    leaves = [x.detach().requires_grad_() for x in (given.q, given.k, given.v)]
    leaves_and_tables = [*leaves, *given.learned]
    if mode == "forward+backward":
        return Prepared(lambda: torch.autograd.grad(function(*leaves), leaves_and_tables, given.dout), given.order)
    if retains:
        out = function(*leaves)
        return Prepared(lambda: torch.autograd.grad(out, leaves_and_tables, given.dout, retain_graph=True), given.order)
    fresh: list[Tensor] = []

    def before() -> None:
        fresh[:] = [function(*leaves)]

    return Prepared(lambda: torch.autograd.grad(fresh.pop(), leaves_and_tables, given.dout), given.order, before)
