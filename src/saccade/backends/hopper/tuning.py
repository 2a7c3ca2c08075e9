"""Candidates for the schedules of the Hopper kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import product

import torch

from saccade.backends.device import tuning
from saccade.backends.hopper.forward import launch
from saccade.backends.hopper.forward.config import SHARED_BYTES, ForwardConfig, block_dv, key, shared_bytes
from saccade.backends.hopper.pipeline import MAX_STAGES
from saccade.call import Call
from saccade.call.descale import EIGHT_BITS

REGISTERS = 65536 // 128
"""Of one multiprocessor, for each of the 128 threads of a warpgroup. Producer and scheduler are warps of one."""
BARRIER_BYTES = 1024
"""At most, with the records of the work items."""
SPARE = 24
"""Registers of a consumer's thread that hold no part of a tile, at least."""


class ForwardRow(tuning.TuneRow):
    """The forward."""

    def key(self) -> str:
        return key(self.spec())

    def candidates(self) -> Iterator[ForwardConfig]:
        """Schedules worth a try: tiles fit shared memory, and scores, probabilities and sums a consumer's registers."""
        if self.dtype in EIGHT_BITS:
            yield from self._eight_bit()
            return
        own_out = (0, block_dv(self.d_v) // 2) if max(self.d, self.d_v) > 128 else (0,)
        ways = product((2, 3), (64, 128), range(2, MAX_STAGES + 1), (1, 2), (0, 1), (0, 8), own_out)
        for consumers, block_k, stages, slots, turns, fewer, out_columns in ways:
            registers = (REGISTERS - 32) // consumers // 8 * 8 - fewer
            loader = REGISTERS - consumers * registers
            config = ForwardConfig(consumers, block_k, stages, slots, turns, registers, loader, out_columns=out_columns)
            # Of a thread: float32 scores and sums of out, and 16-bit probabilities.
            sums = block_k // 2 + block_k // 4 + block_dv(self.d_v) // 2
            shared = shared_bytes(self.d, self.d_v, config)
            if shared <= SHARED_BYTES - BARRIER_BYTES and sums + SPARE <= registers:
                yield config

    def _eight_bit(self) -> Iterator[ForwardConfig]:
        """The same of 8-bit operands, whose products with values have registers of their own. Fewer than 128 keys were
        never faster where 128 fit."""
        blocks = (64, 128) if self.d_v > 128 else (128,)
        ways = product((2, 3), blocks, range(2, MAX_STAGES + 1), (1, 2), (0, 1), (0, 1), (1, 2))
        for consumers, block_k, stages, slots, turns, overlap, parts in ways:
            registers = (REGISTERS - 24) // consumers // 8 * 8
            loader = REGISTERS - consumers * registers
            config = ForwardConfig(
                consumers, block_k, stages, slots, turns, registers, loader, overlap=overlap, parts=parts
            )
            # Of a thread: sums of out, and scores, or 8-bit probabilities and a part of their products, or both.
            sums, scores = block_dv(self.d_v) // 2, block_k // 2
            products = block_k // 8 + sums // parts
            held = sums + (scores + products if overlap else max(scores, products))
            shared = shared_bytes(self.d, self.d_v, config, 1)
            if shared <= SHARED_BYTES - BARRIER_BYTES and held + SPARE // 2 <= registers:
                yield config

    def runner(self, call: Call, best: Mapping[str, ForwardConfig]) -> Callable[[ForwardConfig], object]:
        return lambda tile: launch.forward(call, {}, True, tile)


def rows(dims: list[tuple[int, int]]) -> list[ForwardRow]:
    """The rows of the table for these head dims (d, d_v)."""
    dtypes = torch.bfloat16, torch.float8_e4m3fn
    return [ForwardRow("forward", d, d_v, mask, dtype) for dtype in dtypes for d, d_v in dims for mask in (False, True)]
