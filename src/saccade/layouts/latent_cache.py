"""Caches of latent rows as FP8 records, whose parts have several dtypes: how numbers become bytes, and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.layouts.paged import Paged
from saccade.layouts.validate import described
from saccade.util import arguments
from saccade.util.arguments import Unsupported

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max


class Record(NamedTuple):
    """The bytes of a row: numbers of e4m3, then their factors, unless these are after all rows of a page, then numbers
    of bfloat16."""

    bytes: int
    d: int
    d_v: int
    quantized: int
    """numbers of e4m3; the rest of d are bfloat16"""
    columns: int
    """that share a factor"""
    exponents: bool
    """Factors are powers of two, the exponents' bytes after all rows of a page; else float32, in the row."""

    @property
    def factors(self) -> int:
        return self.quantized // self.columns

    @property
    def row(self) -> int:
        """Bytes from one row to the next."""
        return self.bytes - 8 if self.exponents else self.bytes


FORMATS = {"v3.2": Record(656, 576, 512, 512, 128, False), "v4": Record(584, 512, 512, 448, 64, True)}


@dataclass(frozen=True, eq=False)
class LatentCache:
    """A cache of latent rows in pages, as FP8 records: what `attention` takes as k and v, and `append_kv` writes.

    Formula: number `i` of a row is `e4m3[i] * factor[i // columns]`; the last 64 are bfloat16. The first 512 numbers of
    a row are its values. All heads share a row.

    - "v3.2": d 576. 656 bytes: 512 numbers of e4m3, 4 factors in float32, of 128 numbers each, and 64 of bfloat16.
    - "v4": d 512. 584 bytes: a page has 448 numbers of e4m3 and 64 of bfloat16 for each row, and after all rows 8 bytes
      for each: exponents of 7 factors `2 ** (byte - 127)`, of 64 numbers each, and one that is unused.

    Args:
        bytes: (pages, page_size, bytes of a record) or (pages, page_size, 1, bytes), of any 8-bit dtype; a page's bytes
            are contiguous, pages may be further apart.
        format: "v3.2" or "v4".

    Raises:
        ValueError: bytes of another shape or dtype, or pages that are not contiguous.
        Unsupported: a format that is none of these.

    >>> cache = LatentCache(torch.zeros(4, 64, 656, dtype=torch.uint8), "v3.2")
    >>> append_kv(cache, cache, None, torch.randn(2, 1, 576), None, slot_mapping=torch.tensor([3, 70]))
    >>> layout = Paged(slots=torch.tensor([[3, 70, -1]]), seqused_k=torch.tensor([3]))
    >>> attention(torch.randn(1, 16, 576), cache, cache, layout=layout).shape
    torch.Size([1, 16, 512])
    """

    bytes: Tensor
    format: str

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            known = ", ".join(f'"{name}" ({x.bytes} bytes of d {x.d})' for name, x in FORMATS.items())
            raise Unsupported(f"LatentCache: no format {self.format!r}; there are {known}")
        arguments.tensors(bytes=self.bytes)
        x, size = self.bytes, self.record.bytes
        if x.element_size() != 1 or x.dtype == torch.bool or x.dim() not in (3, 4) or x.shape[-1] != size:
            wanted = f"an 8-bit tensor (pages, page_size, {size}) or (pages, page_size, 1, {size})"
            raise ValueError(f'bytes of format "{self.format}" must be {wanted}, got {described(x)}')
        if (x.dim() == 4 and x.shape[2] != 1) or not x[:1].is_contiguous():
            text = "one head, and a page's bytes contiguous"
            raise ValueError(f"bytes must have {text}, got {described(x)} with strides {x.stride()}")

    @property
    def record(self) -> Record:
        return FORMATS[self.format]

    @property
    def page_size(self) -> int:
        return self.bytes.shape[1]

    @property
    def slots(self) -> int:
        return self.bytes.shape[0] * self.page_size

    def _parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """Views (pages, page_size, bytes) of numbers of e4m3, of factors, and of numbers of bfloat16."""
        record, pages = self.record, self.bytes.view(torch.uint8).flatten(1)  # (pages, all bytes)
        if not record.exponents:
            rows = pages.unflatten(1, (self.page_size, record.bytes))
            return tuple(rows.split((record.quantized, 4 * record.factors, 2 * (record.d - record.quantized)), 2))  # pyright: ignore[reportReturnType]
        rows, factors = pages.split((self.page_size * record.row, self.page_size * 8), 1)
        rows, factors = (x.unflatten(1, (self.page_size, -1)) for x in (rows, factors))
        return rows[..., : record.quantized], factors[..., : record.factors], rows[..., record.quantized :]

    def rows(self, slots: Tensor | None, dtype: torch.dtype) -> Tensor:
        """The rows (n, d) in these slots (n), or all; a slot that there is not reads another."""
        parts = self._parts()
        if slots is None:
            numbers, factors, rest = (x.flatten(0, 1) for x in parts)
        else:
            slots = slots.long().clamp(0, max(self.slots - 1, 0))
            numbers, factors, rest = (x[slots // self.page_size, slots % self.page_size] for x in parts)
        exponents = self.record.exponents
        scale = torch.exp2(factors.float() - 127) if exponents else factors.contiguous().view(torch.float32)
        wide, scale = numbers.contiguous().view(E4M3).float().unflatten(1, (self.record.factors, -1)), scale[..., None]
        if dtype == torch.bfloat16:  # as the kernel multiplies, whose factors are sums of two bfloat16
            high = scale.to(dtype).float()
            wide = wide * high + (wide * (scale - high).to(dtype)).to(dtype)
        else:
            wide = wide * scale
        return torch.cat([wide.flatten(1).to(dtype), rest.contiguous().view(torch.bfloat16).to(dtype)], 1)

    def write(self, slots: Tensor, rows: Tensor) -> None:
        """Rows (n, d) become those in slots (n); numbers that are no slots are omitted. Nothing waits for the device:
        such a row repeats what another one writes, or what is there."""
        if not rows.shape[0] or not self.slots:
            return
        record, there = self.record, (slots >= 0) & (slots < self.slots)
        wide = rows.float()
        groups = wide[:, : record.quantized].unflatten(1, (record.factors, record.columns))
        top = groups.abs().amax(-1)
        if record.exponents:
            exponent = (top.clamp(min=1e-4) / LARGEST).log2().ceil().clamp(-127, 127)
            scale, factors = torch.exp2(exponent), (exponent + 127).to(torch.uint8)
        else:
            scale = (top * (1 / LARGEST)).clamp(min=torch.finfo(torch.float32).tiny)
            factors = scale.view(torch.uint8).view(len(rows), -1)
        numbers = (groups / scale[..., None]).clamp(-LARGEST, LARGEST).to(E4M3).view(torch.uint8).flatten(1)
        rest = rows[:, record.quantized :].to(torch.bfloat16).contiguous().view(torch.uint8)
        other = there.int().argmax()  # some row that has a slot, if any has
        source = torch.where(there, torch.arange(len(rows), device=rows.device), other)
        slot = torch.where(there.any(), slots.long()[source], 0)
        at = slot // self.page_size, slot % self.page_size
        for part, new in zip(self._parts(), (numbers, factors, rest), strict=True):
            part[at] = torch.where(there.any(), new[source], part[at])

    def opened(self, layout: Paged, dtype: torch.dtype) -> tuple[Tensor, Paged]:
        """Rows (pages, page_size, 1, d) that a call over these pages or slots reads, and the layout over them: of slots
        those alone that are listed, if these are fewer than all."""
        slots = layout.slots
        if slots is None or slots.numel() >= self.slots:
            return self.rows(None, dtype).view(*self.bytes.shape[:2], 1, self.record.d), layout
        there = (slots >= 0) & (slots < self.slots)
        index = torch.arange(slots.numel(), device=slots.device, dtype=torch.int32).view(slots.shape)
        found = Paged(
            slots=torch.where(there, index, -1), seqused_k=layout.seqused_k, cu_seqlens_q=layout.cu_seqlens_q,
            num_splits=layout.num_splits,
        )  # fmt: skip
        read = slots.flatten() if slots.numel() else slots.new_full((1,), -1)  # a cache has one row at least
        return self.rows(read, dtype)[:, None, None], found

    def __repr__(self) -> str:
        return f"LatentCache({list(self.bytes.shape)}, {self.format!r})"
