"""How far the bytes of `quantize` are from what they must be, in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor

from saccade.bench.providers.base import Prepared
from saccade.bench.quantizing import options
from saccade.descale import BLOCK, NAMES
from saccade.quantization import Quantized
from saccade.testing.cases import Inputs

STEP = 2.0**-9
"""Between the least numbers of e4m3."""


class BytesVerifier:
    """What `quantize` must return for dense operands, in float64, one key head at a time."""

    names = NAMES

    def __init__(self, mode: str, inputs: Inputs) -> None:
        self.options, self.inputs = options(mode), inputs

    def check(self, prepared: Prepared) -> float:
        return self.error_ratio(cast(Quantized, prepared.call()))

    def error_ratio(self, made: Quantized) -> float:
        """The worst error over what a byte's half step and float32's sums allow: at most 1 passes."""
        return max(ratio for name in NAMES for ratio in self._ratios(name, made))

    def _ratios(self, name: str, made: Quantized) -> Iterator[float]:
        given, codes, descale = getattr(self.inputs, name), getattr(made, name), getattr(made.descale, name)
        b, h_k, s, _ = self.inputs.k.shape if name != "q" else (*self.inputs.k.shape[:2], *given.shape[2:])
        group = given.shape[1] // h_k
        # (b, h_k, n)
        factor = descale.double().expand(b, h_k) if descale.dim() < 3 else descale.double()
        factor = factor if factor.dim() == 3 else factor[..., None]
        largest = torch.zeros_like(factor)
        for i in range(b):
            for j in range(h_k):
                heads = slice(j * group, (j + 1) * group)
                x, shift = self._exact(name, i, heads, j)
                blocks = factor.shape[2]
                by_row = factor[i, j].repeat_interleave(BLOCK)[:s] if blocks > 1 else factor[i, j].expand(s)
                sizes = x.abs().amax((0, 2))
                sizes = torch.nn.functional.pad(sizes, (0, -s % BLOCK)).view(-1, BLOCK).amax(1)
                largest[i, j] = sizes if blocks > 1 else sizes.amax()
                yield _ratio(codes[i, heads].double(), x, by_row[:, None])
                if shift is not None and made.shift is not None:
                    # A sum of d products of numbers, in float32.
                    room = 2.0**-20 * (self.inputs.q[i, heads].double().norm(dim=-1) * self.norm + 1e-30)
                    yield float(((made.shift[i, heads] - shift).abs() / room).amax())
        if self.options["per"] == "tensor":
            largest = largest.amax().expand_as(largest)
        wanted = largest / torch.finfo(codes.dtype).max
        yield float(((factor - wanted).abs() / (wanted * 2.0**-18)).amax())

    def _exact(self, name: str, i: int, heads: slice, j: int) -> tuple[Tensor, Tensor | None]:
        """[group, s, d]: what becomes bytes, and q's product with the mean of keys."""
        x = getattr(self.inputs, name)[i, heads].double()
        shift = None
        if "smooth_k" in self.options and name != "v":
            mean = self.inputs.k[i, j].double().mean(0)
            self.norm = mean.norm()
            x, shift = (x - mean, None) if name == "k" else (x, x @ mean)
        return x @ _hadamard(x.shape[2], x) if "rotate" in self.options and name != "v" else x, shift


def _ratio(codes: Tensor, x: Tensor, factor: Tensor) -> float:
    """The worst `|codes factor - x|` over half a step of the code, and what float32 adds."""
    exponent = torch.frexp(codes).exponent - 4
    half = torch.ldexp(torch.ones_like(codes), exponent).clamp(min=STEP) / 2
    room = half * factor + x.norm(dim=-1, keepdim=True) * 2.0**-21
    return float(torch.nan_to_num((codes * factor - x).abs() / room, nan=torch.inf).amax())


def _hadamard(d: int, like: Tensor) -> Tensor:
    """[d, d]: of neighbouring elements, as many as the largest power of two that divides d."""
    made = like.new_ones(1, 1)
    while d % (2 * len(made)) == 0:
        made = torch.cat((torch.cat((made, made), 1), torch.cat((made, -made), 1)))
    return torch.block_diag(*[made / len(made) ** 0.5] * (d // len(made)))
