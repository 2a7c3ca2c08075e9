"""Tile shapes of the Triton kernels: a measured table per GPU, and formulas where it is silent."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from saccade import configs
from saccade.spec import Spec

KERNELS = ("forward", "keys", "rows")
"""forward; dK and dV by blocks of keys; dQ by blocks of rows."""


@dataclass(frozen=True)
class Config:
    """How one kernel is cut: query rows and keys of a tile, warps of a program, stages of its loads in flight."""

    block_q: int
    block_k: int
    warps: int
    stages: int


def block_d(d: int) -> int:
    """The head dim that a tile has: the next power of two, as Triton's shapes are, and at least 16, as its dots want."""
    return max(16, 1 << (d - 1).bit_length())


def key(kernel: str, spec: Spec) -> str:
    """A row of the table: what a kernel's best tile depends on."""
    edges = "full" if spec.mask == "none" else "masked"
    words = ["triton", kernel, spec.dtype, f"d{block_d(spec.d)}/{block_d(spec.d_v)}", edges]
    return " ".join(words if spec.score == "none" else [*words, "score"])


@lru_cache(maxsize=1024)
def config(kernel: str, spec: Spec, gpu: str) -> Config:
    """The Config of a kernel for a Spec: from the table of that GPU, else by formula."""
    row = configs.table(gpu).get(key(kernel, spec))
    return Config(**row) if row else formula(kernel, spec)


def formula(kernel: str, spec: Spec) -> Config:
    """Tiles that fit 100 KB of shared memory and 64k registers: what any GPU since sm_80 has."""
    wide = max(block_d(spec.d), block_d(spec.d_v))
    if spec.dtype == "fp32":
        block = 64 if wide <= 64 else 32 if wide <= 128 else 16
        return Config(block, min(block, 32), 4, 1 if wide > 128 else 2)
    if kernel == "forward":
        return Config(128, 64 if wide <= 128 else 32, 4 if wide <= 64 else 8, 3 if wide <= 64 else 2)
    if wide <= 64:
        return Config(64, 64, 4, 3)
    if wide <= 128:
        return Config(*((32, 64) if kernel == "keys" else (64, 32)), 4, 2)
    return Config(*((16, 64) if kernel == "keys" else (64, 16)), 4, 1)
