"""Tile shapes of the Triton kernels: a measured table per GPU, and formulas where it is silent."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from saccade.backends import configs
from saccade.backends.device import block_d
from saccade.call.spec import EIGHT_BIT_WORDS, Spec

WIDE = 256
"""Above this head dim dK and dV have a launch each: sums of both are more than there are registers."""


def kernels(spec: Spec) -> tuple[str, ...]:
    """The kernels of a Spec with tiles of their own: forward; dK and dV by blocks of keys; dQ by blocks of rows."""
    return ("forward", "dk", "dv", "dq") if max(spec.d, spec.d_v) > WIDE else ("forward", "dkdv", "dq")


BY_KEYS = ("dkdv", "dk", "dv")


@dataclass(frozen=True)
class TileConfig:
    """How one kernel is cut: query rows and keys of a tile, warps of a program, stages of loads in flight."""

    block_q: int
    block_k: int
    warps: int
    stages: int
    spill: int = 0
    """Bytes that ptxas may spill; its row in the table says why that is the fastest all the same."""
    columns: int = 0
    """Of out or dv, that a program computes, a power of two; 0: all. Each group of columns recomputes the scores, on
    tiles of more rows than there are registers for otherwise."""
    registers: int | None = None
    """How many a thread may have in calls without a score, dropout or a mask by functions or lists, so that a
    multiprocessor has one more program; None is up to the compiler."""


def key(kernel: str, spec: Spec) -> str:
    """A row of the table: what a kernel's best tile depends on. All head dims above WIDE share those of 512/512: what
    fits these fits all."""
    size = "32bit" if spec.dtype == "fp32" else "8bit" if spec.dtype in EIGHT_BIT_WORDS else "16bit"
    edges = "full" if spec.mask == "none" else "masked"
    d, d_v = block_d(spec.d), block_d(spec.d_v)
    if max(d, d_v) > WIDE:
        d = d_v = 2 * WIDE
    return f"triton {kernel} {size} d{d}/{d_v} {edges}"


@lru_cache(maxsize=1024)
def config(kernel: str, spec: Spec, gpu: str) -> TileConfig:
    """The TileConfig of a kernel for a Spec: from the table of that GPU, else by formula."""
    row = configs.table(gpu).get(key(kernel, spec))
    return TileConfig(**row) if row else formula(kernel, spec)


def formula(kernel: str, spec: Spec) -> TileConfig:
    """Tiles that fit 99 KB of shared memory and 64k registers, what any GPU since sm_80 has, and 64 KB on AMD's, and
    that spill next to nothing there: compiled and not timed (notes/triton.md)."""
    wide = max(block_d(spec.d), block_d(spec.d_v))
    if spec.dtype == "fp32":
        # IEEE products run on the vector units, out of registers: these are the tiles that do not spill.
        if wide <= 64:
            return TileConfig(64, 32, 8, 2)
        return TileConfig(32, 16, 8, 2) if wide <= 128 else TileConfig(16, 16, 8, 1)
    if wide > WIDE:
        return {
            "forward": TileConfig(32, 32, 8, 2),
            "dk": TileConfig(16, 32, 8, 1),
            "dv": TileConfig(32, 32, 8, 1),
        }.get(kernel, TileConfig(32, 16, 8, 1))
    if spec.dtype in EIGHT_BIT_WORDS:  # each tile has sums of its own
        return TileConfig(128 if wide <= 128 else 64, 64, 8, 3 if wide <= 128 else 2)
    if kernel == "forward":
        if wide <= 64:
            return TileConfig(128, 64, 4 if wide <= 32 else 8, 3)
        return TileConfig(128, 32, 8, 3) if wide <= 128 else TileConfig(64, 32, 8, 2)
    if kernel == "dkdv":
        if wide <= 64:
            return TileConfig(32, 64, 4, 2)
        if wide > 128:
            return TileConfig(16, 64, 8, 1)
        # With 8 warps AMD's GPUs spill 332 bytes, and with 4 the others 56.
        return TileConfig(32, 64, 4 if spec.device.startswith("gfx") else 8, 2)
    if wide <= 64:
        return TileConfig(128, 64, 8, 2)
    return TileConfig(64, 32, 4, 2) if wide <= 128 else TileConfig(64, 16, 4, 1)
