"""Factors of 8-bit operands."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from saccade.util import arguments

EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)
WIDER = torch.float16, torch.bfloat16, torch.float32
"""The dtypes that `quantize` takes."""
BLOCK = 128
"""Rows, or keys, that share one number where a Descale goes by blocks."""
_FORMS = "a number or a float32 tensor (), (h_k,), (b, h_k), or by blocks of 128 rows (b, h_k, n)"


@dataclass(frozen=True, eq=False)
class Descale:
    """The scale factors of 8-bit q, k and v: `value = byte * descale`.

    Attention over 8-bit operands is attention over these values. The factors of q and k multiply the scores before
    `scale`, and those of v the result. A factor is a positive number, or a float32 tensor of positive numbers on q's
    device. None is 1. The shape of a tensor says what shares a factor:

    - (): everything.
    - (h_k,): a key head and its query heads.
    - (b, h_k): the same of one sequence.
    - (b, h_k, n): a block of 128 rows of it. Block j has rows 128 j to 128 j + 127 of the sequence. n is ceil(s / 128);
      for packed sequences and pages it may be larger.

    Args:
        q: factors of 8-bit queries; None with wider ones.
        k: factors of keys.
        v: factors of values; blocks go by keys.
        shift: float32 in the LSE's shape, which `quantize` makes for smoothed keys: what each row of `q kᵀ` lacks.
            It is added to the LSE and to `max_scores`. Sinks and score functions need the original scores, so they
            are refused with a shift.
        backward: with None, a call that needs a gradient is refused. With "dequantized", the backward is that of 16-bit
            operands on the values, in the dtype of out. Wider queries, the sink and captured tensors then have
            gradients. 8-bit tensors have none, because it would be rounded to 8 bits.

    Raises:
        TypeError: neither a number nor a float32 tensor.
        ValueError: a number that is not positive, or beyond float32's normal ones; a tensor of more than three
            dimensions, or one that is nested or sparse. The values of tensors are not read. An unknown `backward`, or
            one beside a shift, which has no derivative.

    >>> k = v = torch.randn(1, 2, 128, 64).to(torch.float8_e4m3fn)
    >>> q = torch.randn(1, 4, 128, 64, dtype=torch.bfloat16)
    >>> out = attention(q, k, v, descale=Descale(k=0.5, v=torch.tensor([1.0, 2.0])))
    >>> out.dtype
    torch.bfloat16

    Source: Micikevicius et al., FP8 formats for deep learning (https://arxiv.org/abs/2209.05433).
    """

    q: Tensor | float | None = None
    k: Tensor | float | None = None
    v: Tensor | float | None = None
    shift: Tensor | None = None
    backward: Literal["dequantized"] | None = None

    def __post_init__(self) -> None:
        shift = self.shift
        if self.backward not in (None, "dequantized"):
            raise ValueError(f"backward must be None or 'dequantized', got {arguments.describe(self.backward)}")
        if self.backward and shift is not None:
            raise ValueError(
                "the shift of smoothed keys has no derivative: omit backward, or quantize without smooth_k"
            )
        if shift is not None and (not isinstance(shift, Tensor) or shift.dtype != torch.float32):
            raise TypeError(f"the shift must be a float32 tensor in the LSE's shape, got {arguments.describe(shift)}")
        for name in NAMES:
            x = getattr(self, name)
            if x is None:
                continue
            if not isinstance(x, Tensor):
                object.__setattr__(self, name, _number(name, x))
            elif x.is_nested or x.layout != torch.strided:
                raise ValueError(f"the descale of {name} must be {_FORMS}, and dense, got a nested or sparse one")
            elif x.dtype != torch.float32 or x.dim() > 3:
                wrong: Any = TypeError if x.dtype != torch.float32 else ValueError
                raise wrong(f"the descale of {name} must be {_FORMS}, got {arguments.describe(x)}")


NAMES = ("q", "k", "v")


def _number(name: str, x: Any) -> float:
    """A factor as a float."""
    if isinstance(x, bool):
        raise TypeError(f"the descale of {name} must be {_FORMS}, got {x}")
    value = arguments.number(f"the descale of {name}", x)
    if not arguments.LEAST_FLOAT32 <= value <= arguments.MOST_FLOAT32:
        raise ValueError(f"the descale of {name} must be a positive number, from 2^-126 to float32's largest, got {x}")
    return value


class Factors(NamedTuple):
    """A Descale as a backend sees it: each factor None, which is 1, or float32 (b, h_k, n), n = 1 without blocks. They
    are expanded views: any stride may be 0."""

    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    backward: bool = False
    """Whether the values have gradients."""

    @property
    def each(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return self.q, self.k, self.v

    @property
    def blocked(self) -> bool:
        """Whether a factor goes by blocks."""
        return any(x is not None and x.shape[2] > 1 for x in self.each)

    @property
    def names(self) -> str:
        """The operands that have a factor, such as `kv`; `-` is none."""
        return "".join(name for name, x in zip(NAMES, self.each, strict=True) if x is not None) or "-"

    @property
    def tensors(self) -> list[Tensor]:
        return [x for x in self.each if x is not None]

    @property
    def key(self) -> Hashable:
        """Everything but values."""
        return tuple([None if x is None else (x.shape, x.stride()) for x in self.each])

    @staticmethod
    def from_tensors(names: str, tensors: list[Tensor]) -> Factors:
        """The inverse of `names` and `tensors`; takes from the end of the list."""
        found = {name: tensors.pop() for name in reversed(names) if name in NAMES}
        return Factors(found.get("q"), found.get("k"), found.get("v"))

    def of_sequence(self, i: int, heads: slice = slice(None)) -> Factors:
        """The factors of one sequence, as a batch of one, and of all or some key heads."""
        return self.mapped(lambda x: x[i : i + 1, heads])

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Factors:
        """The same record with each tensor changed."""
        q, k, v = (None if x is None else change(x) for x in self.each)
        return self._replace(q=q, k=k, v=v)

    def values(self, name: str, x: Tensor, dtype: torch.dtype, starts: Tensor | None = None) -> Tensor:
        """What the operand of this name, (b, h, s, d), stands for, rounded once to another dtype. Sequences end to end
        are one batch row and begin at `starts`."""
        factor = getattr(self, name)
        if factor is None:
            return x.to(dtype)
        if starts is not None:
            factor = _of_packed_rows(factor, starts, x.shape[2])
        elif factor.shape[0] > x.shape[0]:  # ranges of keys, which share their factors
            factor = factor[:1]
        wide = torch.promote_types(dtype, torch.float32)
        of_rows = _to_heads(factor, x)[..., None] if starts is not None else factor_of_rows(factor, x)
        return (x.to(wide) * of_rows.to(wide)).to(dtype)


def factor_of_rows(factor: Tensor, x: Tensor, first: int = 0) -> Tensor:
    """A factor (b, h_k, n) at the rows of x (b, h, s, d), which start at row `first`: (b, h, s or 1, 1)."""
    if factor.shape[2] > 1:
        rows = torch.arange(first, first + x.shape[2], device=x.device) // BLOCK
        factor = factor[:, :, rows.clamp(max=factor.shape[2] - 1)]
    return _to_heads(factor, x)[..., None]


def _to_heads(factor: Tensor, x: Tensor) -> Tensor:
    """A factor (b, h_k, n) for each head of x (b, h, s, d)."""
    h, h_k = x.shape[1], factor.shape[1]
    return factor.repeat_interleave(h // max(h_k, 1), dim=1) if h != h_k else factor


def _of_packed_rows(factor: Tensor, starts: Tensor, t: int) -> Tensor:
    """A factor (b, h_k, n) of sequences that begin at `starts` (b + 1) at all t rows, (1, h_k, t). After the last
    sequence any of them."""
    if not factor.shape[0]:
        return factor.new_ones(1, factor.shape[1], t)
    row = torch.arange(t, device=factor.device)
    number = torch.searchsorted(starts[1:].to(row.dtype).contiguous(), row, right=True).clamp(max=starts.shape[0] - 2)
    block = ((row - starts[number]) // BLOCK).clamp(0, factor.shape[2] - 1)
    return factor[number, :, block].T[None]


def factors(
    descale: Descale | None, device: torch.device, eight_bits: bool, shape: tuple[int, int, int | None, int],
    bounds: bool = True,
) -> Factors:  # fmt: skip
    """The factors of a call whose k and v have 8 bits, and with `eight_bits` q too. Raises ValueError for a shape or
    device that does not fit, quoted.

    shape: sequences, key heads, and the longest sequence's rows and keys; None if the host does not know. bounds:
    whether the lengths are bounds alone, as of packed sequences and of pages: then there may be factors of more blocks.
    """
    if descale is None:
        return Factors()
    if descale.q is not None and not eight_bits:
        raise ValueError("descale=Descale(q=…) is for 8-bit queries: omit it with wider ones")
    b, h_k, s_q, s_k = shape
    found = []
    for name, s in zip(NAMES, (s_q, s_k, s_k), strict=True):
        x = getattr(descale, name)
        if isinstance(x, float):
            x = None if x == 1.0 else torch.full((), x, dtype=torch.float32, device=device)
        blocks = None if s is None else -(-s // BLOCK)
        found.append(None if x is None else _expanded(name, x, device, (b, h_k, blocks), bounds))
    return Factors(found[0], found[1], found[2], descale.backward is not None)


def _expanded(
    name: str, x: Tensor, device: torch.device, wanted: tuple[int, int, int | None], more: bool
) -> Tensor | None:
    """(b, h_k, n); None where no sequence has a block. `more` blocks than n may be given."""
    b, h_k, blocks = wanted
    if x.device != device:
        raise ValueError(f"the descale of {name} must be on q's device {device}, got {x.device}")
    by_blocks = x.dim() == 3
    fits = by_blocks and x.shape[:2] == (b, h_k) and blocks is not None
    if blocks is not None:
        fits = fits and (x.shape[2] >= blocks if more else x.shape[2] == blocks)
    if not fits and not arguments.is_one_of(x.shape, (), (h_k,), (b, h_k)):
        unknown = "which needs the longest sequence's length on the host"
        lengths = unknown if blocks is None else f"n = {blocks} of them"
        raise ValueError(
            f"the descale of {name} must be (), (h_k,) = ({h_k},), (b, h_k) = ({b}, {h_k}), or (b, h_k, n), {lengths}, "
            f"got {tuple(x.shape)}"
        )
    if by_blocks:
        return x if x.shape[2] else None
    return x.expand(b, h_k)[..., None]
