"""Score functions as users write them, shared by tests: closures, tables, ids, every kind of operation."""

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
