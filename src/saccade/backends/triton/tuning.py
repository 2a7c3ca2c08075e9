"""Candidates for the tile table, and how long each one takes."""

# pyright: reportArgumentType=false, reportReturnType=false

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton.testing

from saccade.backends import Saved
from saccade.backends.triton import launch
from saccade.backends.triton.config import KERNELS, Config, block_d, config, key
from saccade.layouts import Dense
from saccade.masks import causal
from saccade.problem import Problem

SHARED_BYTES = 227 << 10
"""What the largest GPU has for one program; a candidate that needs more on a smaller one fails, and is passed over."""
TOKENS, WIDTH, LENGTH = 16384, 2048, 4096
"""b s, h d and s of the problem that is timed."""


@dataclass(frozen=True)
class Row:
    """One row of the table to fill: a kernel, a head dim, a mask or none, a dtype."""

    kernel: str
    d: int
    masked: bool
    dtype: torch.dtype = torch.bfloat16

    def problem(self, tokens: int = TOKENS, length: int = LENGTH) -> Problem:
        """The Problem that stands for the row, with random operands; a short one compiles the same kernels."""
        shape = tokens // length, max(1, WIDTH // self.d), length, self.d
        q, k, v = (torch.randn(shape, device="cuda", dtype=self.dtype) for _ in range(3))
        return Problem(q, k, v, None, causal() if self.masked else None, None, Dense(), self.d**-0.5)

    def key(self) -> str:
        return key(self.kernel, self.problem(512, 512).spec())

    def candidates(self) -> Iterator[Config]:
        """Tiles worth a try: operands fit shared memory, scores and sums the registers of their warps."""
        size = self.dtype.itemsize
        d = block_d(self.d)
        for block_q in (32, 64, 128):
            for block_k in (32, 64, 128):
                streamed, resident = (block_q, block_k) if self.kernel == "keys" else (block_k, block_q)
                if resident < streamed and self.kernel != "keys" and resident < 64:
                    continue
                products = 1 if self.kernel == "forward" else 2
                sums = 2 if self.kernel == "keys" else 1
                for warps in (4, 8):
                    registers = (block_q * block_k * products + resident * d * sums) / (warps * 32)
                    for stages in (1, 2, 3, 4):
                        shared = size * 2 * d * (streamed * stages + resident * (products - 1))
                        if shared <= SHARED_BYTES and 32 <= registers <= 200:
                            yield Config(block_q, block_k, warps, stages)


def rows(dims: list[int]) -> list[Row]:
    """The rows of the table for these head dims, in 16-bit types."""
    return [Row(kernel, d, masked) for d in dims for masked in (False, True) for kernel in KERNELS]


def compile_one(task: tuple[Row, Config]) -> tuple[Row, Config, str | None]:
    """Fills Triton's cache for a candidate, in a process of its own; says why it cannot run, if it cannot."""
    row, tile = task
    try:
        problem = row.problem(512, 512)
        out, lse = launch.forward(problem, tiles={row.kernel: tile})
        if row.kernel != "forward":
            launch.backward(problem, Saved(torch.ones_like(out), None, out, lse), {row.kernel: tile})
        torch.cuda.synchronize()
    except Exception as reason:  # a candidate may fail in any stage of the compiler; the others still count
        return row, tile, f"{type(reason).__name__}: {reason}".splitlines()[0]
    return row, tile, None


class Timer:
    """Times the candidates of one row on one problem: the forward, or the whole backward with the others' best."""

    def __init__(self, row: Row, best: dict[str, Config], gpu: str) -> None:
        self.row, self.problem = row, row.problem()
        spec = self.problem.spec()
        self.tiles = {kernel: config(kernel, spec, gpu) for kernel in KERNELS} | best
        out, lse = launch.forward(self.problem, tiles=self.tiles)
        self.saved = Saved(torch.randn_like(out), None, out, lse)

    def milliseconds(self, tile: Config) -> float:
        tiles = {**self.tiles, self.row.kernel: tile}
        if self.row.kernel == "forward":
            return triton.testing.do_bench(lambda: launch.forward(self.problem, tiles=tiles), return_mode="median")
        return triton.testing.do_bench(lambda: launch.backward(self.problem, self.saved, tiles), return_mode="median")
