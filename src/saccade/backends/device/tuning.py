"""What `saccade tune` asks of every backend: rows of the tile table to fill, and how long a candidate takes."""

# pyright: reportArgumentType=false, reportReturnType=false

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton.testing

from saccade.call import Call
from saccade.call.descale import EIGHT_BITS, Factors
from saccade.call.spec import DTYPES, Spec
from saccade.masks import causal

TOKENS, WIDTH, LENGTH = 16384, 2048, 4096
"""b s, h d and s of the problem that is timed."""


@dataclass(frozen=True)
class TuneRow(ABC):
    """One row of the table to fill: a kernel, head dims, a mask or none, a dtype."""

    kernel: str
    d: int
    d_v: int
    masked: bool
    dtype: torch.dtype = torch.bfloat16

    @abstractmethod
    def key(self) -> str:
        """Its key in the table."""

    @abstractmethod
    def candidates(self) -> Iterator[Any]:
        """Configs worth a try."""

    @abstractmethod
    def runner(self, call: Call, best: Mapping[str, Any]) -> Callable[[Any], object]:
        """What runs a candidate, with the `best` of the other kernels that run with it."""

    @property
    def timed(self) -> str:
        """What a time is of."""
        return "forward" if self.kernel == "forward" else "the whole backward"

    def spec(self) -> Spec:
        return Spec(DTYPES[self.dtype], self.d, self.d_v, mask="causal" if self.masked else "none", aligned=True)

    def call(self, tokens: int = TOKENS, length: int = LENGTH) -> Call:
        """The Call that stands for the row, with random operands; a short one compiles the same kernels."""
        shape = tokens // length, max(1, WIDTH // self.d), length
        q, k, v = (torch.randn(*shape, n, device="cuda").to(self.dtype) for n in (self.d, self.d, self.d_v))
        descale = Factors() if self.dtype in EIGHT_BITS else None
        return Call(q, k, v, mask=causal() if self.masked else None, scale=self.d**-0.5, descale=descale)

    def milliseconds(self, best: Mapping[str, Any]) -> Callable[[Any], float]:
        """What times a candidate, on one problem for all of them."""
        run = self.runner(self.call(), best)
        return lambda tile: triton.testing.do_bench(lambda: run(tile), return_mode="median")


def compile_one(task: tuple[TuneRow, Any]) -> str | None:
    """Fills Triton's cache for a candidate, in a process of its own; says why it cannot run, if it cannot."""
    row, tile = task
    try:
        row.runner(row.call(512, 512), {})(tile)
        torch.cuda.synchronize()
    except Exception as reason:  # a candidate may fail in any stage of the compiler; the others still count
        return f"{type(reason).__name__}: {reason}".splitlines()[0]
    return None
