"""Score functions and masks of operations that kernels write themselves: integers that wrap, and arguments that are
not the usual ones."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

KINDS = torch.randint(0, 4, (64,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
MANY = torch.randint(-(2**31), 2**31, (64,), dtype=torch.int32, generator=torch.Generator().manual_seed(1))
FAR = torch.tensor([3, 2**32 - 1] * 32, dtype=torch.int64).to(torch.uint32)

WRAPPING: dict[str, Callable[..., Tensor]] = {
    "int8 cast": lambda s, b, h, i, j: s + (j * 20).to(torch.int8) * 0.05,
    "uint8 cast": lambda s, b, h, i, j: s + (j * 20 - 100).to(torch.uint8) * 0.02,
    "int16 cast": lambda s, b, h, i, j: s + (j * 4000).to(torch.int16) * 1e-4,
    "int32 cast": lambda s, b, h, i, j: s + (j * 100000000).to(torch.int32) * 1e-9,
    "int8": lambda s, b, h, i, j: s + (j.to(torch.int8) * 20 + 100) * 0.05,
    "uint8": lambda s, b, h, i, j: s + (j.to(torch.uint8) - 10) * 0.02 + (-i.to(torch.uint8)) * 0.01,
    "int16": lambda s, b, h, i, j: s + (j.short() * j.short() * i.short()) * 1e-4,
    "int32": lambda s, b, h, i, j: s + (j.int() * 100000 * (i.int() * 1000)) * 1e-9,
    "sums of int32": lambda s, b, h, i, j: s + ((j.int() + 2000000000) + (i.int() + 2000000000)) * 1e-9,
    "linear of int32": lambda s, b, h, i, j: s + (j.int() * 100000000) * 1e-9,
    "linear of int8": lambda s, b, h, i, j: s + (j - i).to(torch.int8) * 1.0 + (j.to(torch.int8) * 50) * 0.01,
    "shifts": lambda s, b, h, i, j: s + (j.int() << 28) * 1e-9 + ((j.to(torch.uint8) << 6) >> 3) * 0.1,
    "far shifts": lambda s, b, h, i, j: s + (j << i) * 1e-19 + ((j - 20) >> (i * 2)) * 0.1 + ((j - 9).int() >> i) * 0.1,
    "shifts without bits": lambda s, b, h, i, j: s + (j.int() << 33) * 0.1 + ((j - 20).int() >> 40) * 0.5,
    "bits": lambda s, b, h, i, j: s + (~KINDS[j]) * 0.01 + (j.to(torch.int8) ^ (i - 9).to(torch.int8)) * 0.1,
    "captured": lambda s, b, h, i, j: s + (KINDS[i] - KINDS[j]) * 0.01,
    "factor": lambda s, b, h, i, j: (
        s + torch.add(KINDS[i], KINDS[j], alpha=100) * 0.01 + torch.sub(i, j, alpha=3) * 0.1
    ),
    "numbers": lambda s, b, h, i, j: s + KINDS[i] * 300 * 0.01 + (KINDS[j] + 511) * 0.01,
    "hash": lambda s, b, h, i, j: s + ((MANY[i] * 1103515245 + MANY[j]) >> 16) * 1e-4,
    "signs": lambda s, b, h, i, j: s + (j.to(torch.int8) * 64).abs() * 0.01 + (j.to(torch.int8) * 64) // -1 * 0.02,
    "powers": lambda s, b, h, i, j: s + j.to(torch.int8) ** 3 * 0.01 + j.to(torch.uint8).square() * 0.01,
    "quotients": lambda s, b, h, i, j: s + (KINDS[i] - 1) // 7 * 0.1 + (KINDS[j] - KINDS[i]) % 10 * 0.1,
    "bounds": lambda s, b, h, i, j: s + torch.maximum(KINDS[i] - KINDS[j], KINDS[j]) * 0.01,
    "chosen": lambda s, b, h, i, j: s + torch.where(i > j, KINDS[i] - KINDS[j], KINDS[i]) * 0.01,
    "uint32": lambda s, b, h, i, j: s + FAR[j].float() * 1e-9,
}
"""Torch wraps integers to the bits that their dtype has."""

ARGUMENTS: dict[str, Callable[..., Tensor]] = {
    "round 1": lambda s, b, h, i, j: torch.round(s, decimals=1),
    "round 2": lambda s, b, h, i, j: s + torch.round((i - j) * 0.0137, decimals=2) * 10,
    "round -1": lambda s, b, h, i, j: s + torch.round((i - j) * 1.0, decimals=-1) * 0.1,
    "gelu": lambda s, b, h, i, j: F.gelu(s, approximate="tanh"),
    "softplus": lambda s, b, h, i, j: F.softplus(s, 2.0, 1.0),
    "leaky_relu": lambda s, b, h, i, j: F.leaky_relu(s, 0.3),
    "elu": lambda s, b, h, i, j: F.elu(s, 0.7) + F.celu(s, 0.4),
    "hardtanh": lambda s, b, h, i, j: F.hardtanh(s, -0.3, 0.2),
    "alpha": lambda s, b, h, i, j: torch.add(s, j, alpha=0.1) - torch.rsub(i * 1.0, s, alpha=0.2),
    "rounding_mode": lambda s, b, h, i, j: s + torch.div(j - 20.5, 3.0, rounding_mode="trunc") * 0.1,
    "power of a number": lambda s, b, h, i, j: s + 2.0 ** (j * 0.1),
    "isclose": lambda s, b, h, i, j: torch.where(torch.isclose(s, s.round(), 0.1, 0.2), s, s * 0.5),
    "isclose of NaN": lambda s, b, h, i, j: torch.where(torch.isclose((s - 9).log(), s.log(), equal_nan=True), s, 1.0),
    "isclose of integers": lambda s, b, h, i, j: torch.where(torch.isclose(i, j, atol=3.0), s, s * 0.5),
    "isfinite": lambda s, b, h, i, j: torch.where(torch.isfinite(torch.log((j - i) * 1.0)), s, s * 0.5),
    "nan_to_num": lambda s, b, h, i, j: s + torch.nan_to_num(torch.log((j - 9) * 1.0), 0.3, neginf=-2.0),
    "softshrink": lambda s, b, h, i, j: F.softshrink(s, 0.3) + F.hardshrink(s, 0.7),
    "truths": lambda s, b, h, i, j: torch.where(((i > j) * (j > 3) + (j == 1)), s, s * 0.5),
}
"""Arguments beyond the defaults, and functions that torch makes of several."""

MASKS: dict[str, Callable[..., Tensor]] = {
    "captured": lambda b, h, i, j: (KINDS[i] - KINDS[j]) <= 1,
    "captured beside a number": lambda b, h, i, j: KINDS[i] - KINDS[j] != torch.tensor(-1),
    "hash": lambda b, h, i, j: (((i.int() * 1103515245 + j.int() * 12345) >> 16) % 3) != 0,
    "round": lambda b, h, i, j: torch.round(i * 0.01, decimals=1) == torch.round(j * 0.01, decimals=1),
}
