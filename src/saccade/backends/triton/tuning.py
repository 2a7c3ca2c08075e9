"""Candidates for the tile table of the Triton kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch

from saccade.backends import Saved
from saccade.backends.device.tuning import TuneRow
from saccade.backends.triton import launch
from saccade.backends.triton.config import BY_KEYS, WIDE, TileConfig, block_d, kernels, key
from saccade.call import Call

SHARED_BYTES = 227 << 10
"""The shared memory of one program on the largest GPU. A candidate that fails on a smaller one is passed over."""

LIMITS, ADDRESSES = {"forward": 128, "dq": 168}, 64
"""Registers of a thread with which four programs of four warps fit a multiprocessor, or three; what a thread has
besides its numbers of tiles."""


class TritonTuneRow(TuneRow):
    """Forward, `dkdv` or `dq`."""

    def key(self) -> str:
        return key(self.kernel, self.spec())

    def candidates(self) -> Iterator[TileConfig]:
        """Tiles worth a try: operands fit shared memory, scores and sums the registers of their warps."""
        yield from self._candidates(0)
        if self.kernel in ("forward", "dv") and block_d(self.d_v) > WIDE:
            yield from self._candidates(WIDE)

    def _candidates(self, columns: int) -> Iterator[TileConfig]:
        size = self.dtype.itemsize
        d, d_v = block_d(self.d), columns or block_d(self.d_v)
        by_keys = self.kernel in BY_KEYS
        sums = {"forward": d_v, "dkdv": d + d_v, "dk": d, "dv": d_v, "dq": d}[self.kernel]
        wide = max(d, d_v) > WIDE  # there tiles of few rows pay, and not every load has a buffer for each stage
        sizes = (16, 32, 64, 128) if wide else (32, 64, 128)
        for block_q in sizes:
            for block_k in sizes:
                streamed, resident = (block_q, block_k) if by_keys else (block_k, block_q)
                if resident < streamed and not by_keys and resident < 64 and not wide:
                    continue
                products = 1 if self.kernel in ("forward", "dv") else 2
                for warps in (4, 8):
                    registers = (block_q * block_k * products + resident * sums) / (warps * 32)
                    for stages in (1, 2, 3, 4):
                        buffers = max(stages - 1, 1) if wide else stages
                        shared = size * (d + d_v) * (streamed * buffers + resident * (products - 1))
                        if shared <= SHARED_BYTES and 32 <= registers <= 200:
                            yield TileConfig(block_q, block_k, warps, stages, columns=columns)
                            limit = LIMITS.get(self.kernel, 0)
                            if registers + ADDRESSES <= limit and torch.version.hip is None:
                                yield TileConfig(block_q, block_k, warps, stages, registers=limit)

    def runner(self, call: Call, best: Mapping[str, TileConfig]) -> Callable[[TileConfig], object]:
        if self.kernel == "forward":
            return lambda tile: launch.forward(call, {}, tiles={self.kernel: tile})
        out, lse, _ = launch.forward(call, {}, tiles=best)
        assert lse is not None
        saved = Saved(torch.randn_like(out), None, out, lse)
        return lambda tile: launch.backward(call, {}, saved, {**best, self.kernel: tile})


def rows(dims: list[tuple[int, int]]) -> list[TritonTuneRow]:
    """The rows of the table for these head dims (d, d_v), in 16-bit types."""
    plain = [TritonTuneRow("forward", d, d_v, masked) for d, d_v in dims for masked in (False, True)]
    return [replace(row, kernel=kernel) for row in plain for kernel in kernels(row.spec())]
