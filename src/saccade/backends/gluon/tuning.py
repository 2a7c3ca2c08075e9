"""Candidates for the schedules of the Hopper kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import product

from saccade.backends.device import tuning
from saccade.backends.gluon.forward import launch
from saccade.backends.gluon.forward.config import SHARED_BYTES, ForwardConfig, block_dv, key, shared_bytes
from saccade.backends.gluon.pipeline import MAX_STAGES
from saccade.problem import Problem

REGISTERS = 65536 // 128
"""Of one multiprocessor, for each of the 128 threads of a group of warps. The loader has one group, of which it uses a
warp."""
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
        ways = product((2, 3), (64, 128), range(2, MAX_STAGES + 1), (1, 2), (0, 1), (0, 8))
        for consumers, block_k, stages, slots, turns, fewer in ways:
            registers = (REGISTERS - 32) // consumers // 8 * 8 - fewer
            config = ForwardConfig(
                consumers, block_k, stages, slots, turns, registers, REGISTERS - consumers * registers
            )
            # Of a thread: float32 scores and sums of out, and 16-bit probabilities.
            sums = block_k // 2 + block_k // 4 + block_dv(self.d_v) // 2
            shared = shared_bytes(self.d, self.d_v, config)
            if shared <= SHARED_BYTES - BARRIER_BYTES and sums + SPARE <= registers:
                yield config

    def call(self, problem: Problem, best: Mapping[str, ForwardConfig]) -> Callable[[ForwardConfig], object]:
        return lambda tile: launch.forward(problem, tile=tile)


def rows(dims: list[tuple[int, int]]) -> list[ForwardRow]:
    """The rows of the table for these head dims (d, d_v)."""
    return [ForwardRow("forward", d, d_v, masked) for d, d_v in dims for masked in (False, True)]
