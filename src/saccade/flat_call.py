"""The flat form in which a call passes through a registered operator: its schema, and the way back to a Problem."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade import layouts, masks, scores
from saccade.descale import EIGHT_BITS, Factors
from saccade.dropout import Dropout
from saccade.layouts import Layout
from saccade.problem import Problem


class Header(NamedTuple):
    """The static part of a flat call, with one text form: what its tensors, ints and floats are."""

    layout: str = "bhsd"
    mask: str = "none"
    score: str = "none"
    """The identities of mask and score, not their words in a Spec."""
    backend: str = "auto"
    descale: str = "-"
    """Which operands have factors, `Factors.names`: these are tensors, before the numbers."""
    carried: str = "-"
    """The functions of mask and score, where another process may run the call: `scores.written_programs`."""
    dequantized: bool = False
    """Whether 8-bit operands have the backward of their values."""
    deterministic: bool = False
    dropout: bool = False
    """Its state is the last of the tensors, and p the second of the floats."""
    max_scores: bool = False
    numbers: bool = False
    """The floats of mask and score, which torch.compile computes, are a tensor on the host, the last one but dropout's:
    an operator's floats would be constants."""

    def programs(self) -> list[Any]:
        """What a backward has to keep alive besides tensors."""
        return [scores.program_of(self.score), *masks.programs(self.mask)]

    @property
    def text(self) -> str:
        return " ".join([*self[:6], *(name for name, flag in zip(self._fields[6:], self[6:], strict=True) if flag)])

    @staticmethod
    @lru_cache(maxsize=512)
    def parse(text: str) -> Header:
        layout, mask, score, backend, descale, carried, *flags = text.split(" ")
        scores.read_programs(carried)
        return Header(layout, mask, score, backend, descale, carried, **dict.fromkeys(flags, True))


class FlatCall(NamedTuple):
    """The arguments that all operators share, in the schema's order."""

    q: Tensor
    """As the user has it, and so are k and v."""
    k: Tensor
    v: Tensor
    sink: Tensor | None
    captures: Sequence[Tensor]
    """The tensors of the score function, which may need gradients."""
    tensors: Sequence[Tensor]
    """The tensors of layout, mask, descale and dropout."""
    header: str
    ints: Sequence[int]
    floats: Sequence[float]
    """The scale, dropout's p, and the numbers of mask and score."""

    @property
    def parsed(self) -> Header:
        return Header.parse(self.header)

    def operator(self, name: str) -> Any:
        """The registered operator for this call. A CUDA graph would replay the numbers that the host had when it was
        captured: the overload `numbers` is for calls that torch.compile leaves out of its graphs."""
        overloads = getattr(torch.ops.saccade, name)
        return overloads.numbers if self.header.endswith(" numbers") else overloads.default

    @property
    def view_layout(self) -> Layout:
        """The layout, for its views alone."""
        return layouts.view_layout(self.parsed.layout)

    def layout(self) -> Layout:
        tensors, ints = list(self.tensors), list(self.ints)
        return layouts.from_tensors(self.parsed.layout, tensors, ints, self.q.shape[0], self.k.shape[0])

    def differentiable(self) -> tuple[Tensor | None, ...]:
        """The tensors that may need gradients."""
        return *self[:4], *self.captures

    def static(self) -> tuple[str, Sequence[int], Sequence[float]]:
        """What is not a tensor."""
        return self[6:]

    @staticmethod
    def of_tensors(
        tensors: Sequence[Any], captures: int, static: tuple[str, Sequence[int], Sequence[float]]
    ) -> FlatCall:
        """The inverse of `differentiable`, `tensors` and `static`; the number of captures divides the tensors."""
        end = 4 + captures
        q, k, v, sink = tensors[:4]
        return FlatCall(q, k, v, sink, tensors[4:end], tensors[end:], *static)

    def problem(self, out: Tensor | None = None, max_scores: bool = True) -> Problem:
        """The call as a backend sees it; without the largest scores where `max_scores` is False."""
        header, (scale, *floats) = self.parsed, self.floats
        tensors, ints = list(self.tensors), list(self.ints)
        dropout = Dropout(tensors.pop(), floats.pop(0)) if header.dropout else None
        if header.numbers:
            floats = tensors.pop().tolist()
        descale = None
        if self.k.dtype in EIGHT_BITS:
            descale = Factors.from_tensors(header.descale, tensors)._replace(backward=header.dequantized)
        layout = layouts.from_tensors(header.layout, tensors, ints, self.q.shape[0], self.k.shape[0])
        mask = masks.from_tensors(header.mask, ints, tensors, floats)
        score = scores.from_tensors(header.score, list(self.captures), ints, floats)
        q, k, v = map(layout.canonical, self[:3])
        options = header.deterministic, dropout, 0, out, header.max_scores and max_scores, descale
        return Problem(q, k, v, self.sink, mask, score, layout, scale, *options)


def savable(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Tensors beside q, k and v as autograd may save them for a backward. Of those made in inference mode, whose writes
    torch does not count, these are copies of what they hold at the call."""
    return [x.clone() if x is not None and x.is_inference() else x for x in tensors]


_SCHEMA_TYPES = {
    "Tensor": "Tensor",
    "Tensor | None": "Tensor?",
    "Sequence[Tensor]": "Tensor[]",
    "str": "str",
    "Sequence[int]": "SymInt[]",
    "Sequence[float]": "float[]",
}
SCHEMA = ", ".join(
    f"{_SCHEMA_TYPES[getattr(kind, '__forward_arg__', kind)]} {name}" for name, kind in FlatCall.__annotations__.items()
)
"""The text of these arguments in an operator's schema."""
