"""One call as a backend sees it, and the flat form in which it passes through a registered operator."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade import hardware, layouts, masks, scores
from saccade.dropout import Dropout
from saccade.layouts import Dense, Layout, Packed, Paged, empty_like_rows
from saccade.lazily import lazily
from saccade.masks import Extent, Mask
from saccade.scores import Score
from saccade.spec import DTYPES, Spec


@dataclass(frozen=True, eq=False, init=False)
class Problem:
    """`out = dropout(softmax(mask(score_mod(scale q k^T)), with sink)) v`, all of it. Nobody writes into one: planning
    makes another."""

    q: Tensor
    """(b, h_q, s_q, d), a view of the user's tensor; packed sequences are one row of t_q"""
    k: Tensor
    """(b, h_k, s_k, d); of a paged cache (pages, h_k, page_size, d)"""
    v: Tensor
    """(b, h_k, s_k, d_v); of a paged cache (pages, h_k, page_size, d_v)"""
    sink: Tensor | None
    """(h_q)"""
    mask: Mask | None
    score: Score | None
    layout: Layout
    scale: float
    deterministic: bool = False
    dropout: Dropout | None = None
    first_b: int = 0
    """What scores and dropout call the first batch row."""
    out: Tensor | None = None
    """(b, h_q, s_q, d_v): where the caller wants the result. A backend writes there, or returns another tensor."""
    max_scores: bool = False
    """Whether the forward is asked for the largest score of each row."""

    launches: dict[Any, Any] = field(default_factory=dict)
    """What the backend keeps for Problems of this key, such as compiled kernels and grids; no tensors. A Plan's."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        mask: Mask | None,
        score: Score | None,
        layout: Layout,
        scale: float,
        deterministic: bool = False,
        dropout: Dropout | None = None,
        first_b: int = 0,
        out: Tensor | None = None,
        max_scores: bool = False,
        launches: dict[Any, Any] | None = None,
    ) -> None:
        # Every call makes one: what a frozen dataclass generates takes three times as long.
        vars(self).update(
            q=q, k=k, v=v, sink=sink, mask=mask, score=score, layout=layout, scale=scale, deterministic=deterministic,
            dropout=dropout, first_b=first_b, out=out, max_scores=max_scores,
            launches={} if launches is None else launches,
        )  # fmt: skip

    def planned(self, launches: dict[Any, Any]) -> Problem:
        """The same call, with what a Plan keeps for its key."""
        made = object.__new__(Problem)
        vars(made).update(vars(self), launches=launches)
        return made

    @lazily
    def key(self) -> tuple[Hashable, ...]:
        """Everything but values: Problems of one key have one Spec and run the same kernels on the same grid."""
        q, k, v, layout, mask, score, sink = self.q, self.k, self.v, self.layout, self.mask, self.score, self.sink
        records = layout.records if mask is None else [*layout.records, *mask.records]
        if sink is not None:
            records = [*records, sink]
        return (
            *(q.dtype, q.device, q.shape, k.shape, v.shape[3], q.stride(), k.stride(), v.stride()),
            *(_address(q) % ALIGNMENT, _address(k) % ALIGNMENT, _address(v) % ALIGNMENT),
            *(layout.text, None if mask is None else (mask.identity, mask.lower), score and score.identity),
            *(sink is None, self.deterministic, self.dropout is None, self.max_scores),
            None if self.out is None else (self.out.stride(), _address(self.out) % ALIGNMENT),
            *((x.dtype, x.shape, x.stride(), _address(x) % ALIGNMENT) for x in records),
            *([] if mask is None or not mask.listed else [abs(n) > scores.LONGEST for n in mask.ints]),
            *(abs(n) > scores.LONGEST for n in (score.ints if score else ())),
            *((x.dtype, x.dim(), _span(x) >> 31, _address(x) % ALIGNMENT) for x in (score.tensors if score else ())),
        )

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.q.shape[1] // self.k.shape[1] if self.k.shape[1] else 1

    def sequences(self) -> Iterator[Sequence]:
        """Each of the packed sequences, as a Problem of one batch row; reads the offsets."""
        layout = self.layout
        assert isinstance(layout, Packed)
        ends = (pairwise(x.tolist()) for x in (layout.cu_seqlens_q, layout.cu_seqlens_k))
        for i, ((first_q, stop_q), (first_k, stop_k)) in enumerate(zip(*ends, strict=True)):
            rows, keys = slice(first_q, stop_q), slice(first_k, stop_k)
            used = (None if x is None else x[i : i + 1] for x in (layout.seqused_q, layout.seqused_k))
            mask = None if self.mask is None else masks.of_batch_row(self.mask, i)
            operands = {"q": self.q[:, :, rows], "k": self.k[:, :, keys], "v": self.v[:, :, keys]}
            dense = Dense("bhsd", *used)
            problem = replace(self, **operands, mask=mask, layout=dense, first_b=i, out=None, launches={})
            yield Sequence(rows, keys, problem)

    @lazily
    def extent(self) -> Extent:
        if isinstance(self.layout, Paged):
            return self._paged_extent(self.layout)
        assert isinstance(self.layout, Dense)
        used = self.layout.seqused_q, self.layout.seqused_k
        return Extent.of(self.q.shape[2], self.k.shape[2], *used, self.q.device)

    def _paged_extent(self, layout: Paged) -> Extent:
        """Of q as a padded batch; reads the offsets of its sequences."""
        s_k = layout.capacity(self.k.shape[2])
        if layout.cu_seqlens_q is None:
            return Extent.of(self.q.shape[2], s_k, None, layout.seqused_k, self.q.device)
        lengths = layout.cu_seqlens_q.diff()
        return Extent.of(max(lengths.tolist(), default=0), s_k, lengths, layout.seqused_k, self.q.device)

    def empty_out(self) -> Tensor:
        """Memory for the result, (b, h_q, s_q, d_v): the caller's, or new, in q's order."""
        return empty_like_rows(self.q, self.v.shape[3]) if self.out is None else self.out

    def spec(self) -> Spec:
        # A cache is not copied so that its rows are aligned; queries are.
        operands = (self.k, self.v) if isinstance(self.layout, Paged) else (self.q, self.k, self.v)
        return Spec(
            dtype=DTYPES[self.q.dtype],
            d=self.q.shape[3],
            d_v=self.v.shape[3],
            group=self.group,
            layout=self.layout.kind,
            mask="none" if self.mask is None else self.mask.kind,
            score=self.score.kind if self.score else "none",
            sink=self.sink is not None,
            dropout=self.dropout is not None,
            deterministic=self.deterministic,
            max_scores=self.max_scores,
            aligned=all(map(aligned, operands)),
            device=hardware.name(self.q.device),
        )

    def lse_dtype(self) -> torch.dtype:
        return torch.float64 if self.q.dtype == torch.float64 else torch.float32


class Sequence(NamedTuple):
    """One of a packed Problem's, and which of its rows and keys it has."""

    rows: slice
    keys: slice
    problem: Problem


@dataclass(frozen=True)
class Header:
    """The static part of a flattened Problem, with one text form: what the records that travel beside it are."""

    layout: str = "bhsd"
    mask: str = "none"
    score: str = "none"
    """The identities of mask and score, not their words in a Spec."""
    backend: str = "auto"
    deterministic: bool = False
    dropout: bool = False
    """Its state is the last of the records, and p the second of the floats."""
    max_scores: bool = False
    numbers: bool = False
    """The floats of mask and score are a tensor, the last record but dropout's: torch.compile makes constants of an
    operator's floats."""

    def programs(self) -> list[Any]:
        """What a backward has to keep alive besides tensors."""
        return [scores.program_of(self.score), *masks.programs(self.mask)]

    def __str__(self) -> str:
        flags = (flag for flag in ("deterministic", "dropout", "max_scores", "numbers") if getattr(self, flag))
        return " ".join((self.layout, self.mask, self.score, self.backend, *flags))

    @staticmethod
    @lru_cache(maxsize=512)
    def parse(text: str) -> Header:
        layout, mask, score, backend, *flags = text.split(" ")
        return Header(layout, mask, score, backend, **dict.fromkeys(flags, True))

    def problem(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        captures: list[Tensor],
        records: list[Tensor],
        ints: list[int],
        floats: list[float],
        **options: Any,
    ) -> Problem:
        """The Problem whose layout, mask, score and dropout were flattened to (`captures`, `records`, `ints`,
        `floats`), with other `options` of its own."""
        scale, *floats = floats
        records, ints = list(records), list(ints)
        dropout = Dropout(records.pop(), floats.pop(0)) if self.dropout else None
        if self.numbers:
            floats = records.pop().tolist()
        layout = layouts.from_records(self.layout, records, q.shape[0], k.shape[0])
        mask = masks.from_records(self.mask, ints, records, floats)
        score = scores.from_records(self.score, captures, ints, floats)
        q, k, v = layout.canonical(q), layout.canonical(k), layout.canonical(v)
        options = {"deterministic": self.deterministic, "dropout": dropout, "max_scores": self.max_scores} | options
        return Problem(q, k, v, sink, mask, score, layout, scale, **options)


def flattened(
    layout: Layout, mask: Mask | None, score: Score | None, scale: float, dropout: Dropout | None, **options: Any
) -> tuple[Header, list[Tensor], list[Any], list[Any]]:
    """The Header of a call with these fields of its own, and the records, ints and floats that it tells of."""
    compiling = torch.compiler.is_compiling()
    if mask is not None and compiling:
        masks.pin(mask.identity)
    kinds = "none" if mask is None else mask.identity, "none" if score is None else score.identity
    records = [*layout.records, *([] if mask is None else mask.records)]
    ints = [*([] if mask is None else mask.ints), *(score.ints if score else [])]
    floats = [*([] if mask is None else mask.floats), *(score.floats if score else [])]
    numbers = bool(floats) and compiling
    if numbers:
        one = torch.ones((), dtype=torch.float64, device="cpu")
        records, floats = [*records, torch.stack([one * x for x in floats])], []
    floats = [scale, *floats]
    if dropout is not None:
        records, floats = [*records, dropout.state], [scale, dropout.p, *floats[1:]]
    header = Header(layout.text, *kinds, dropout=dropout is not None, numbers=numbers, **options)
    return header, records, ints, floats


ALIGNMENT = 16
"""Bytes: what a bulk copy wants of pointers and strides."""


def aligned(x: Tensor) -> bool:
    """Whether every row of a (b, h, s, d) tensor is contiguous and starts at a multiple of 16 bytes."""
    stride_b, stride_h, stride_s, stride_d = x.stride()
    return stride_d == 1 and ((stride_b | stride_h | stride_s) * x.element_size() | _address(x)) % ALIGNMENT == 0


def _span(x: Tensor) -> int:
    """What decides between 32 and 64 bits: elements, and elements of memory from the first to the last."""
    return max(x.numel(), sum((n - 1) * abs(m) for n, m in zip(x.shape, x.stride(), strict=True))) + (1 << 24)


def _address(x: Tensor) -> int:
    """0 for tensors without memory, as they are inside torch.func transforms."""
    try:
        return x.data_ptr()
    except RuntimeError:
        return 0
