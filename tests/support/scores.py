"""Score functions as users write them, shared by tests: closures, tables, ids, every kind of operation.

Among them are operations that kernels write themselves: integers that wrap, and arguments that are not usual.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from saccade.scores import ScoreMod, alibi, bias, compose, relative_bias, softcap, t5_bias, temperature

Score = Callable[..., Tensor]


class _Distances(torch.nn.Module):
    """A bound method with parameters of its module."""

    def __init__(self, slopes: Tensor) -> None:
        super().__init__()
        self.slopes = torch.nn.Parameter(slopes)
        self.strength = 0.25

    def bend(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score - self.strength * self.slopes[h].exp() * (q_idx - kv_idx).abs().float().sqrt()


def build_score(name: str, h: int, s_q: int, s_k: int, device: torch.device | str = "cpu", b: int = 2) -> Score:
    """One of `NAMES`, its tensors on a device; those that learn require a gradient."""
    drawn = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=drawn).to(device).requires_grad_()

    ids = torch.randint(0, 5, (b, max(s_q, s_k)), generator=drawn).to(device)
    table, cap, turns = normal(h, 33), 3.0, 4
    pairs, gates = normal(5, 5), normal(h, s_q)

    def wrapped(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + table[h, (kv_idx - q_idx) % 33 - 33]

    def by_ids(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + pairs[ids[b, q_idx], ids[b, kv_idx]]

    def gated(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return torch.where((kv_idx // turns + q_idx) % 3 == 0, score * torch.sigmoid(gates[h, q_idx]), F.gelu(score))

    def bent(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        x = torch.clamp(score, -cap, cap) + F.softplus(score) - torch.log1p(score.abs()) + torch.erf(score / cap)
        return torch.maximum(x, -x.square().clamp(max=9.0)) + torch.tanh(x) ** 3

    def bits(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        noise = ((q_idx * 40503) ^ (kv_idx << 3)) & 255
        return torch.where(noise.bitwise_not() < -20, score * (noise.float() / 256 + 0.5).round(), -torch.inf)

    def scaled(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, *, by: float) -> Tensor:
        return score * by

    makers: dict[str, Callable[[], Score]] = {
        "alibi": lambda: alibi(normal(h)),
        "relative_bias": lambda: relative_bias(normal(h, 41)),
        "t5_bias": lambda: t5_bias(normal(32, h)),
        "bias": lambda: bias(normal(h, s_q, s_k)),
        "temperature": lambda: temperature(normal(h).detach().exp().requires_grad_()),
        "composed": lambda: compose(alibi(normal(h)), softcap(9.0), relative_bias(normal(1, 9))),
        "wrapped": lambda: wrapped,
        "ids": lambda: by_ids,
        "gated": lambda: gated,
        "bent": lambda: bent,
        "bits": lambda: bits,
        "partial": lambda: partial(scaled, by=1.5),
        "method": lambda: _Distances(normal(h).detach().cpu()).to(device).bend,
        "own": lambda: ScoreMod(
            lambda score, b, h, q_idx, kv_idx, t: score * t[h] + score.pow(3) / 9,
            normal(h),
            bprop=lambda grad, score, b, h, q_idx, kv_idx, t: grad * (t[h] + score * score / 3),
        ),
    }
    return makers[name]()


NAMES = (
    "alibi", "relative_bias", "t5_bias", "bias", "temperature", "composed", "wrapped", "ids", "gated", "bent", "bits",
    "partial", "method", "own",
)  # fmt: skip


def halved_from(n: int) -> Score:
    """Scores of keys that are n or more ahead are halved."""
    return lambda score, b, h, q_idx, kv_idx: torch.where(kv_idx - q_idx < n, score, 0.5 * score)


def near_or_third(n: int) -> Score:
    """A mask function: keys that are less than n ahead, and all of every third row."""
    return lambda b, h, q_idx, kv_idx: (kv_idx - q_idx < n) | (q_idx % 3 == 0)


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
