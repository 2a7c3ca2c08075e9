"""Dropout: which probabilities a call keeps, as a function of its state and of their place alone.

The generator is Philox-4x32 (Salmon et al., Parallel random numbers: as easy as 1, 2, 3, 2011), of the key `state[0]`
and of counters made from `state[1]` and the place. It has no order, so that forward and backward, every backend and
every way of cutting tiles draw the same bits.

One application decides four elements: those whose row and key differ in bit 3 alone. Hopper's and Ampere's matrix
products give a thread of both, in s and in its transpose, so that no number is drawn twice and none goes from one
thread to another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

ROUNDS = 7
"""The fewest that pass all of BigCrush, by its authors; FlashAttention-2 has as many. Three more, their margin, would
be another half of what the numbers cost, which is as much as a matrix product."""
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
STEPS = 0x9E3779B9, 0xBB67AE85
"""The numbers that a round adds to the key."""
SPAN = 16
"""Rows, and keys, of which pairs lie in one span."""
_LOW = (1 << 32) - 1
_AT_ONCE = 1 << 16
"""Applications whose counters lie in the cores' caches together."""


@dataclass(frozen=True, eq=False)
class Dropout:
    """`keep` of `out = (keep P / (1 - p)) v`, of one call.

    >>> dropout = Dropout(torch.tensor([1, 2]), 0.25)
    >>> at = torch.arange(2), torch.arange(4)  # batch rows and heads
    >>> kept = dropout.keep(*at, slice(0, 100), slice(0, 200))
    >>> kept.shape, round(kept.double().mean().item(), 2)
    (torch.Size([2, 4, 100, 200]), 0.75)
    >>> bool((kept[:, :, 7:50, 33:90] == dropout.keep(*at, slice(7, 50), slice(33, 90))).all())
    True
    """

    state: Tensor
    """(2) int64, seed and offset, on the device of q"""
    p: float
    """in [0, 1)"""

    @staticmethod
    def draw(p: float, device: torch.device) -> Dropout | None:
        """The Dropout of one call, None where p = 0. A draw of torch's own: `manual_seed` repeats it, checkpointing
        restores it, and every replay of a CUDA graph makes a new one."""
        return Dropout(torch.randint((1 << 63) - 1, (2,), dtype=torch.int64, device=device), p) if p else None

    @staticmethod
    def planned(p: float) -> Dropout | None:
        """One that is never applied, without a draw."""
        return Dropout(torch.empty(2, dtype=torch.int64, device="cpu"), p) if p else None

    @property
    def rescale(self) -> float:
        """1 / (1 - p)"""
        return 1 / (1 - self.p)

    @property
    def threshold(self) -> int:
        """An odd number in [0, 2^31): an element is dropped where its 31 bits are below."""
        return min(round(self.p * (1 << 31)), (1 << 31) - 1) | 1

    def keep(self, b: Tensor, h: Tensor, rows: slice, keys: slice) -> Tensor:
        """Which probabilities stay, bool (n, m, rows, keys), of batch rows b (n,) and query heads h (m,)."""
        first = rows.start // SPAN, keys.start // SPAN
        spans = [-(-part.stop // SPAN) - start for part, start in zip((rows, keys), first, strict=True)]
        # [n, m, spans of rows, bit 3 of the row, its low bits, spans of keys, bit 3 of the key, its low bits]
        kept = torch.empty(len(b), len(h), spans[0], 2, 8, spans[1], 2, 8, dtype=torch.bool, device=self.state.device)
        seed, offset = self.state
        low = torch.arange(8, device=kept.device)
        q = ((first[0] + torch.arange(spans[0], device=kept.device))[:, None] * 8 + low)[..., None, None]
        k = (first[1] + torch.arange(spans[1], device=kept.device))[:, None] * 8 + low
        c2 = (b ^ (offset >> 32))[:, None, None, None, None, None] & _LOW
        c3 = ((h ^ offset) & _LOW)[:, None, None, None, None]
        for at in _pieces(len(b) * len(h) * spans[1] * 64, spans[0]):
            for i, word in enumerate(philox((q[at], k, c2, c3), seed)):
                kept[:, :, at, i // 2, :, :, i % 2] = word >= 2 * self.threshold - (1 << 31)
        whole = kept.view(len(b), len(h), spans[0] * SPAN, spans[1] * SPAN)
        (q_start, q_stop), (k_start, k_stop) = (
            (part.start - start * SPAN, part.stop - start * SPAN)
            for part, start in zip((rows, keys), first, strict=True)
        )
        return whole[:, :, q_start:q_stop, k_start:k_stop]

    def keep_at(self, b: Tensor, h: Tensor, p: Tensor, r: Tensor) -> Tensor:
        """The same where rows and keys stand at positions: int64 that broadcast to (batch rows, heads, rows, keys)."""
        seed, offset = self.state
        c0, c1 = (((x >> 4) * 8 + (x & 7)) & _LOW for x in (p, r))
        words = philox((c0, c1, (b ^ (offset >> 32)) & _LOW, (h ^ offset) & _LOW), seed)
        w0, w1, w2, w3 = torch.broadcast_tensors(*words)
        odd = (r & 8) != 0
        word = torch.where((p & 8) != 0, torch.where(odd, w3, w2), torch.where(odd, w1, w0))
        return word >= 2 * self.threshold - (1 << 31)


def philox(counters: tuple[Tensor, Tensor, Tensor, Tensor], seed: Tensor) -> tuple[Tensor, ...]:
    """Four words, int32, for the broadcast of four counters below 2^32, int64. While rounds mix rows with rows and keys
    with keys alone, they are cheap.

    >>> zero = torch.zeros(1, dtype=torch.int64)
    >>> [hex(word.item() & 0xFFFFFFFF) for word in philox((zero,) * 4, zero[0])]
    ['0x5f6fb709', '0xd893f64', '0x4f121f81', '0x4f730a48']
    """
    c0, c1, c2, c3 = counters
    k0, k1 = seed & _LOW, (seed >> 32) & _LOW
    for _ in range(ROUNDS):
        # Bits above the 32nd stay where nothing multiplies them.
        a, b = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1 = _mixed(b, c1, k0), b
        c2, c3 = _mixed(a, c3, k1), a
        k0, k1 = (k0 + STEPS[0]) & _LOW, (k1 + STEPS[1]) & _LOW
    return tuple(word.to(torch.int32) for word in (c0, c1, c2, c3))


def _mixed(product: Tensor, other: Tensor, key: Tensor) -> Tensor:
    """The product's high word with another one and the key's."""
    mixed = (product >> 32) ^ other
    return mixed.bitwise_xor_(key).bitwise_and_(_LOW)


def _pieces(each: int, many: int) -> Iterator[slice]:
    """[0, many) in pieces of _AT_ONCE, where one takes `each`."""
    step = max(1, _AT_ONCE // max(each, 1))
    for start in range(0, many, step):
        yield slice(start, min(start + step, many))
